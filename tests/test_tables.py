import pytest

from helpers import tables


def row(p50, **more):
    return {"p50": p50, **more}


@pytest.fixture
def result():
    case = {"shape": [1024, 4096], "dtype": "bfloat16"}
    gpu = {"numel": 2**22, "dtype": "float16", "vs": {"unsloth_today": 1.234}}
    gpu["rows"] = {"kernel": row(3.5, gb_s=3012.4), "unsloth_today": row(4.319), "floor_cuda": row(3.35)}
    steps = {
        "import_torch": 1.0,
        "load_kernel_module": 0.25,
        "prepare": 9.0,
        "first_call": 0.8,
        "second_call": 0.0001,
    }
    return {
        "data": {
            "host": {
                "cases": [
                    case
                    | {
                        "returned": {"kernel": row(6.1, ratio=1.05), "peft": row(43.0, ratio=7.4)},
                        "synchronized": {"kernel": row(14.0, ratio=1.01)},
                    }
                ]
            },
            "gpu": {
                "sizes": [gpu, {"numel": 2**30, "dtype": "float16", "skipped": "no memory"}],
                "layers": [gpu | {"layers": ["A 1x2", "B 3x4"]}],
            },
            "gemm": {
                "cases": [
                    case
                    | {
                        "tokens": 6144,
                        "rows": {
                            "kernel": row(500.0, vs_multiplication_alone=1.1),
                            "multiplication alone": row(454.5, vs_multiplication_alone=1.0),
                        },
                    }
                ]
            },
            "cold": {"kernel": {"empty": {"median": steps}}},
            "ablation": {
                "cases": [
                    {"numel": 2**22, "dtype": "float16", "rows": {"as chosen": row(3.5, vs_chosen=1.0)}},
                    {
                        "numel": 2**22,
                        "dtype": "bfloat16",
                        "rows": {"as chosen": row(3.6, vs_chosen=1.0), "4 warps": row(3.9, vs_chosen=1.083)},
                    },
                ]
            },
        }
    }


def test_every_table_shows_the_files_figures(result):
    made = {name: make(result)[1:] for name, make in tables.TABLES.items()}
    assert made["host"] == [
        ["1024x4096 bf16, returned", "6.10 (1.05x)", "43.00 (7.40x)"],
        ["1024x4096 bf16, synchronized", "14.00 (1.01x)", "-"],
    ]
    assert made["sizes"] == [["4M fp16", "3.50", "4.32 (1.23x)", "3.35", "3012"]]
    assert made["layers"][0][0] == "A 1x2, B 3x4 fp16"
    assert made["gemm"] == [["6144 x 1024x4096 bf16", "500.00 (1.10x)", "454.50 (1.00x)"]]
    assert made["cold"] == [["this kernel, empty cache", "1.2500", "0.8000", "0.0001"]]
    assert made["ablation"] == [
        ["as chosen", "3.50 (1.00x)", "3.60 (1.00x)"],
        ["4 warps", "-", "3.90 (1.08x)"],
    ]


@pytest.mark.parametrize("name", tables.TABLES)
def test_what_was_not_measured_has_no_table(name):
    sections = ("host", "gpu", "gemm", "cold", "ablation")
    for data in (
        {},
        dict.fromkeys(sections, {"not_measured": "needs a GPU"}),
        dict.fromkeys(sections, {"failed": "x"}),
    ):
        assert tables.TABLES[name]({"data": data}) == []
    assert tables.summary({"data": {}}) == ""


def test_text_aligns_columns_and_markdown_separates_them(result):
    table = [["what", "a", "b"], ["longer name", "1", "22"], ["x", "333", ""]]
    assert tables.text(table) == "what         a    b\nlonger name  1    22\nx            333"
    assert (
        tables.markdown(table)
        == "| what | a | b |\n| --- | --- | --- |\n| longer name | 1 | 22 |\n| x | 333 |  |"
    )
    summary = tables.summary(result)
    assert all(cell in summary for make in tables.TABLES.values() for line in make(result) for cell in line)
