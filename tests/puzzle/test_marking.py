"""The score from verdicts and times, and the rows."""

import json
import re

import pytest

from helpers.puzzle import marking
from helpers.results import executed

LOST = {"single_kernel": 3, "torch_compile": 2, "custom_asm": 3, "cache_eviction": 1, "exact": 2}  # points
ALL = dict.fromkeys([*LOST, "memory"], True)
TURN = [(20, 12, 0.5), (9, 5, 0.25), (50, 40, 0.5)]  # us until return, us on the GPU, s; at each size
TIMES = {"ours": [TURN] * 2, "bitsandbytes": [TURN] * 2}
FAST = {"unsloth_today": [2.0], "unsloth_classic": [2.0]}


def total(passed, ratio):
    return sum(filter(None, marking.points_of(passed, ratio).values()))


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
    "memory, ratios, start",
    [
        (True, FAST | {"unsloth_today": [0.5, 1.0968, 9.0]}, "10 of 14 points on Tesla T4, 20"),
        (True, None, "9 of 14 points"),
        (True, FAST | {"unsloth_classic": []}, "14 of 14 points"),
        (False, FAST, "No points on Tesla T4, 20"),
        (True, False, "No points"),  # a wrong weight in the puzzle's test
    ],
)
def test_a_broken_rule_stands_in_place_of_the_points(memory, ratios, start, capsys, on_gpu):
    """On a CPU: test_notebook.py."""
    points = marking.print_score(ALL | {"memory": memory}, ratios)
    assert capsys.readouterr().out.startswith(start)
    assert bool(points) is ("of 14" in start)


def test_the_rows_are_what_draw_reads(monkeypatch, on_gpu):
    shown = []
    monkeypatch.setattr(marking, "display", shown.append)
    for gpu, quick in ((False, ""), (True, "1"), (True, "")):
        monkeypatch.setattr(marking, "ON_GPU", gpu)
        monkeypatch.setenv("NF4_QUICK", quick)
        marking.print_rows({"torch": "2.11.0"}, marking.points_of(ALL, 2.0), FAST, TIMES)
    line = json.loads(re.search("{.*}", shown.pop().data)[0])
    assert not shown, "nothing without a GPU, nothing of a quick run"
    machine = line.pop("environment")
    assert machine["card"] == "Tesla T4" and machine["versions"]["torch"] == "2.11.0"
    rows = executed.rows_of(**line)
    assert len(rows) == 4 + 6 * len(TIMES)
    assert rows[0][1:] == ("until return", "ours", "us", [9, 9])
    assert rows[1][1:] == ("100 rounds", "ours", "s", [1.25, 1.25])
