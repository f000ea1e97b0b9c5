import pytest

from helpers.record import tables


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


def test_the_protocol_is_shown_as_ratios_to_ours():
    def entry(label, seconds, identical=True):
        spread = {"p20": seconds, "p50": seconds, "p80": seconds} if seconds else None
        return {"label": label, "spread": spread, "identical": identical}

    entries = {
        "kernel": entry("kernel", 0.25),
        "unsloth_today": entry("Unsloth today", 0.4),
        "peft": entry("PEFT", 0.5, identical=False),
        "bitsandbytes": entry("bitsandbytes", None),
    }
    head, *rows = tables.protocol({"protocol": {"entries": entries, "checked_against": "Unsloth today"}})
    assert head[:3] == ["official protocol", "seconds", "time / ours"]
    assert rows == [
        ["this kernel", "0.250", "1", "every bit equal"],
        ["Unsloth today", "0.400", "1.60", tables.REFERENCE],
        ["PEFT", "0.500", "2.00", "within tolerance"],
    ]
    assert tables.protocol({"protocol": {"entries": {}}}) == []


def test_the_notebook_shows_the_protocol_the_same_way_and_the_notes_below():
    from helpers.show import notebook
    from helpers.submission import harness

    entries = {
        "mine": harness.Entry("mine", seconds=[0.25], identical=True),
        "a": harness.Entry("Unsloth today", seconds=[0.4], identical=True, note="one launch"),
        "b": harness.Entry("PEFT", reason="not installed"),
        "c": harness.Entry("bitsandbytes", failure="layer: AssertionError: wrong\nmore"),
    }
    shown = notebook.protocol(harness.Comparison(entries, 1000, 3, "Unsloth today", "cuda", ["a"]))
    assert [row[3:] for row in shown.rows] == [
        ["time / ours", "official checks"],
        ["1", "bit-equal"],
        ["1.60", tables.REFERENCE],
        ["", "not installed"],
        ["", "layer: AssertionError: wrong"],
    ]
    assert shown.below == ("Unsloth today: one launch",)


def test_steps_are_shown_in_words_and_the_portable_path_is_put_in_its_place(monkeypatch):
    from helpers.show import notebook

    rows = {"no inline assembly": row(35.0, vs_chosen=10.0), "2 words a thread": row(4.2, vs_chosen=1.2)}
    cases = [{"numel": 2**20, "dtype": "bfloat16", "rows": rows}]
    sizes = [{"vs": {"unsloth_today": ratio}} for ratio in (1.31, 1.01)] + [{}]
    data = {"ablation": {"cases": cases}, "gpu": {"sizes": sizes}}
    stored = {"environment": {}, "kernel_hash": "0", "data": data}
    monkeypatch.setattr(notebook, "stored", lambda card: stored)
    head, first, *_ = notebook.steps().rows
    assert head[2:] == ["1M elements, bf16"]
    assert (first[0], first[2]) == ("portable path (general, no assembly)", "10.00")
    assert "2 words per thread" in repr(notebook.steps()) and " a thread" not in repr(tables.ablation(stored))
    assert "1.0 to 1.3 times as long" in notebook.steps().below[0]
    data["gpu"] = {"not_measured": "x"}
    assert "was not measured" in notebook.steps().below[0]


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
