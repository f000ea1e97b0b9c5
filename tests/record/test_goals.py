import copy

import pytest

from helpers.record import goals

OFFICIAL = ("protocol", "entries", "kernel", "speedup_over")
SHARE = "GPU time, share of a no-arithmetic CUDA C kernel"
AGAINST = "GPU time, speedup over Unsloth today"
SIZES = (2**16, *goals.TARGET_SIZES, 2**30)


@pytest.fixture
def data():
    """A result in which every target is met with nothing to spare."""
    bar = {goals.TARGET_SIZES[0]: 0.90}
    return {
        "protocol": {
            "rounds": 1000,
            "entries": {
                "kernel": {"speedup_over": {"unsloth_today": 1.6, "unsloth_classic": 2.0}},
                "unsloth_today": {"speedup_over": {"unsloth_today": 1.0, "unsloth_classic": 1.25}},
            },
        },
        "host": {
            "cases": [
                {"shape": [2048, 8192], "dtype": "float16", "returned": {"kernel": {"ratio": 9.0}}},
                {
                    "shape": [1024, 4096],
                    "dtype": "bfloat16",
                    "returned": {"kernel": {"ratio": 1.05}, "unsloth_today": {"ratio": 2.9}},
                    "synchronized": {"kernel": {"ratio": 1.05}, "unsloth_today": {"ratio": 1.9}},
                },
            ]
        },
        "gpu": {
            "sizes": [
                {
                    "numel": numel,
                    "dtype": dtype,
                    "share": {
                        "floor_cuda": {"kernel": bar.get(numel, 0.97), "unsloth_today": 0.65},
                        "floor_triton": {"kernel": 0.99},
                    },
                    "vs": {"unsloth_today": 1.0},
                }
                for numel in SIZES
                for dtype in ("float16", "bfloat16")
            ],
            "vs_unsloth_today": {
                "geometric_mean": 1.10,
                "lowest": 1.0,
                "lowest_at": [2**30, "float16"],
                "cases": 12,
            },
        },
        "sass": {
            "rows": {
                "float16": {"ours": 6.5, "unsloth_today": 13.5, "over_budget": []},
                "bfloat16": {"ours": 8.5, "unsloth_today": 17.5, "over_budget": []},
            }
        },
        "compiles": {"rows": [{"dtype": "float16", "state": "nested", "compiles": 1}]},
        "cold": {
            "kernel": {"empty": {"median": {"first_call": 1.0}}, "warm": {"median": {"first_call": 0.2}}}
        },
    }


def met(data) -> dict[str, bool | None]:
    return {row["name"]: row["met"] for row in goals.targets(data)}


def row(data, start: str) -> dict:
    (found,) = [row for row in goals.targets(data) if row["name"].startswith(start)]
    return found


def test_all_met_at_the_bars_themselves(data):
    verdicts = met(data)
    assert len(verdicts) == 14 and all(verdicts.values())


def test_whole_result_files_are_read_like_their_data(data):
    assert goals.targets({"environment": {}, "kernel_hash": "", "data": data}) == goals.targets(data)


def test_figures_are_the_files(data):
    first = row(data, "official protocol, speedup over Unsloth classic")
    assert (first["unsloth_today"], first["ours"], first["must_reach"]) == ("1.25", "2.00", ">= 2.00")
    host = row(data, "host time until the call returns")
    assert (host["unsloth_today"], host["ours"]) == ("2.90", "1.05")
    share = row(data, "GPU time, share of a no-arithmetic CUDA C kernel, 58.7M")
    assert (share["unsloth_today"], share["ours"]) == ("0.650 / 0.650", "0.970 / 0.970")
    assert row(data, "GPU time, speedup over Unsloth today, lowest")["ours"] == "1.000 (at 1G float16)"
    assert row(data, "SASS")["ours"] == "6.50 / 8.50"
    assert row(data, "first call ever")["ours"] == "1.00 s"


def change(data, path, value):
    *parents, last = path
    for key in parents:
        data = data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "start"),
    [
        ((*OFFICIAL, "unsloth_today"), 1.59, "official protocol, speedup over Unsloth today"),
        ((*OFFICIAL, "unsloth_classic"), 1.99, "official protocol, speedup over Unsloth classic"),
        (("host", "cases", 1, "returned", "kernel", "ratio"), 1.051, "host time until"),
        (("host", "cases", 1, "synchronized", "kernel", "ratio"), 1.051, "host time with"),
        (("gpu", "sizes", 2, "share", "floor_cuda", "kernel"), 0.899, f"{SHARE}, 4.19M"),
        (("gpu", "sizes", 5, "share", "floor_cuda", "kernel"), 0.969, f"{SHARE}, 16.8M"),
        (("gpu", "sizes", 7, "share", "floor_cuda", "kernel"), 0.969, f"{SHARE}, 58.7M"),
        (("gpu", "sizes", 8, "share", "floor_cuda", "kernel"), 0.969, f"{SHARE}, 235M"),
        (("gpu", "vs_unsloth_today", "lowest"), 0.999, f"{AGAINST}, lowest"),
        (("gpu", "vs_unsloth_today", "geometric_mean"), 1.099, f"{AGAINST}, geometric mean"),
        (("sass", "rows", "bfloat16", "over_budget"), ["2 spills"], "SASS"),
        (("compiles", "rows", 0, "compiles"), 2, "compiles"),
        (("compiles", "rows", 0, "compiles"), 0, "compiles"),
        (("cold", "kernel", "empty", "median", "first_call"), 1.01, "first call ever"),
        (("cold", "kernel", "warm", "median", "first_call"), 0.21, "first call in a new process"),
    ],
)
def test_each_target_can_be_missed_alone(data, path, value, start):
    before = met(copy.deepcopy(data))
    change(data, path, value)
    missed = {name for name, verdict in met(data).items() if verdict is False}
    assert missed == {name for name in before if name.startswith(start)} and len(missed) == 1


def test_nothing_measured_gives_no_verdict():
    for found in (
        {},
        {name: {"not_measured": "needs an NVIDIA GPU"} for name in ("gpu", "host", "protocol", "cold")},
    ):
        rows = goals.targets(found)
        assert len(rows) == 14
        assert all(row["met"] is None and row["ours"] == goals.NOT_MEASURED for row in rows)


def test_one_missing_dtype_gives_no_verdict(data):
    data["gpu"]["sizes"] = [case for case in data["gpu"]["sizes"] if case["dtype"] == "float16"]
    verdicts = {name: verdict for name, verdict in met(data).items() if name.startswith("GPU time")}
    assert len(verdicts) == 6 and set(verdicts.values()) == {None}


def test_a_shorter_span_of_sizes_gives_no_verdict(data):
    data["gpu"]["sizes"] = [case for case in data["gpu"]["sizes"] if case["numel"] < 2**30]
    lowest = row(data, "GPU time, speedup over Unsloth today, lowest")
    assert lowest["met"] is None and "64K to 235M" in lowest["name"]


def test_fewer_rounds_than_the_official_protocol_give_no_verdict(data):
    data["protocol"]["rounds"] = 100
    official = row(data, "official protocol, speedup over Unsloth today")
    assert official["met"] is None and "100 rounds only" in official["name"] and official["ours"] == "1.60"


def test_without_cuda_c_the_ceiling_named_is_tritons(data):
    for case in data["gpu"]["sizes"]:
        del case["share"]["floor_cuda"]
    share = row(data, "GPU time, share of a no-arithmetic Triton kernel, 4.19M")
    assert share["ours"] == "0.990 / 0.990" and share["unsloth_today"] == goals.NOT_MEASURED


def test_the_table_holds_every_cell(data):
    data["compiles"]["rows"][0]["compiles"] = 3
    del data["cold"]
    rows = goals.targets(data)
    header, *lines = goals.table(data)
    assert header == ["target", "Unsloth today", "ours", "must reach", "met"]
    for entry, line in zip(rows, lines, strict=True):
        verdict = {True: "yes", False: "no", None: goals.NOT_MEASURED}[entry["met"]]
        assert line == [entry["name"], entry["unsloth_today"], entry["ours"], entry["must_reach"], verdict]
    assert {line[-1] for line in lines} == {"yes", "no", goals.NOT_MEASURED}


@pytest.mark.parametrize(
    ("numel", "text"),
    [(2**16, "64K"), (2**20, "1M"), (2**30, "1G"), (58_720_256, "58.7M"), (114_688, "115k")],
)
def test_sizes_in_words(numel, text):
    assert goals.size_text(numel) == text
