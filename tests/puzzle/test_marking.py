"""The score from verdicts and times, and the rows."""

import json
import re

import pandas
import pytest

from helpers.puzzle import marking
from helpers.results import executed

LOST = {"single_kernel": 3, "torch_compile": 2, "custom_asm": 3, "cache_eviction": 1, "exact": 2}  # points
ALL = dict.fromkeys([*LOST, "memory"], True)
TIMES = {"function": ["this kernel", "bitsandbytes"] * 2, "size": ["4.2M bf16"] * 4, "turn": [1, 1, 2, 2]}
TIMES |= {"us until a call returns": [9, 50, 9, 50], "us on the GPU": [4, 11, 4, 11]}
TIMES = pandas.DataFrame(TIMES | {"ms for 100 rounds": [30, 60, 30, 60]})
FAST = {"unsloth_today": [2.0], "unsloth_classic": [2.0]}


def total(passed, ratio):
    return sum(marking.points_of(passed, ratio).values())


@pytest.mark.parametrize(
    "ratio, points",
    [(1.0, 6), (1.0499, 9), (1.05, 10), (1.0999, 10), (1.10, 12), (1.15, 14)],
)
def test_the_speedup_decides(ratio, points):
    assert total(ALL, ratio) == points


def test_what_failed_loses_its_points_and_what_was_not_measured_scores_nothing():
    for criterion, points in LOST.items():
        assert total(ALL | {criterion: False}, 2.0) == 14 - points
    assert total(dict.fromkeys(ALL), None) == 0


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(marking, "ON_GPU", True)
    monkeypatch.setattr(marking.torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(marking.torch.cuda, "get_device_capability", lambda: (7, 5))


@pytest.mark.parametrize(
    "memory, ratios, times, start",
    [
        (True, FAST | {"unsloth_today": [0.5, 1.0968, 9.0]}, TIMES, "10 of 14 points on Tesla T4, 20"),
        (True, None, None, "9 of 14 points"),
        (True, FAST | {"unsloth_classic": []}, TIMES, "14 of 14 points"),
        (False, FAST, TIMES, "No points on Tesla T4, 20"),
        (True, False, None, "No points"),  # a wrong weight in the puzzle's test
        (True, FAST, False, "No points"),  # wrong bits in section 4
    ],
)
def test_a_broken_rule_stands_in_place_of_the_points(memory, ratios, times, start, capsys, on_gpu):
    """On a CPU: test_notebook.py."""
    points = marking.print_score(ALL | {"memory": memory}, ratios, times)
    shown = capsys.readouterr().out
    assert shown.startswith(start) and bool(points) is ("of 14" in start)
    if start.startswith("10"):
        assert re.search(r"Speedup at least 1.10 +0 +2 +puzzles_line\n", shown)
        assert re.search(r"Sum +10 +14 *\nSpeedup +1.09x +2.00x +puzzles_line\n", shown)


def test_the_rows_are_what_draw_reads(monkeypatch, on_gpu):
    shown = []
    monkeypatch.setattr(marking, "display", shown.append)
    marking.print_rows({}, {}, FAST, False)
    for gpu, quick in ((False, ""), (True, "1"), (True, "")):
        monkeypatch.setattr(marking, "ON_GPU", gpu)
        monkeypatch.setenv("NF4_QUICK", quick)
        marking.print_rows({"torch": "2.11.0"}, marking.points_of(ALL, 2.0), FAST, TIMES)
    line = json.loads(re.search("{.*}", shown.pop().data)[0])
    assert not shown, "nothing without a GPU, of a quick run, or if a rule is broken"
    machine = line.pop("environment")
    assert machine["card"] == "Tesla T4" and machine["versions"]["torch"] == "2.11.0"
    rows = {row[:3]: row.values for row in executed.rows_of(**line)}
    assert rows["protocol", "until return", "ours"] == [9, 9]
    assert rows["claim", "vs bitsandbytes", "ours"] == [2, 2]
