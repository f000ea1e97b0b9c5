"""The score from verdicts and times, and the rows."""

import json
import re

import pytest

from helpers.puzzle import marking
from helpers.results import executed
from helpers.results.store import Row

LOST = {"single_kernel": 3, "torch_compile": 2, "custom_asm": 3, "cache_eviction": 1, "exact": 2}  # points
ALL = dict.fromkeys([*LOST, "memory"], True)
TURN = [(20, 12, 0.5), (9, 5, 0.25), (50, 40, 0.5)]  # us until return, us on the GPU, s; at each size
TIMES = {"ours": [TURN] * 2, "bitsandbytes": [TURN] * 5}
FAST = {"unsloth_today": [2.0], "unsloth_classic": [2.0]}


def totals(passed, ratios):
    both = [marking.points_of(passed, speedup) for speedup in marking.speeds(ratios).values()]
    return [sum(filter(None, points.values())) for points in both]


@pytest.mark.parametrize(
    "ratio, total",
    [(1.0, 6), (1.001, 9), (1.0499, 9), (1.05, 10), (1.0999, 10), (1.10, 12), (1.15, 14)],
)
def test_the_median_of_the_puzzles_line_decides(ratio, total):
    assert totals(ALL, {"unsloth_today": [0.5, ratio, 9.0], "unsloth_classic": []}) == [total, 9]


def test_what_failed_loses_its_points_and_what_was_not_measured_scores_nothing():
    for criterion, points in LOST.items():
        assert totals(ALL | {criterion: False}, FAST) == [14 - points] * 2
    assert totals(dict.fromkeys(ALL), None) == [0, 0]
    assert totals(ALL, None) == [9, 9]
    assert totals(ALL, False) == [6, 6], "a wrong weight in the puzzle's test is no speedup"


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(marking, "ON_GPU", True)
    monkeypatch.setattr(marking.torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(marking.torch.cuda, "get_device_capability", lambda: (7, 5))


@pytest.mark.parametrize("memory", [True, False])
def test_a_broken_rule_stands_in_place_of_the_points(memory, capsys, on_gpu):
    """On a CPU: test_notebook.py."""
    points = marking.print_score(ALL | {"memory": memory}, FAST | {"unsloth_today": [1.0968]})
    first, *rest = capsys.readouterr().out.splitlines()
    start = "10 of 14 points on Tesla T4, 20" if memory else "No points, for a broken rule (memory): "
    assert first.startswith(start) and any(line.startswith("Sum") for line in rest) is memory
    assert bool(points) is memory


def test_the_rows_are_what_draw_reads(monkeypatch, on_gpu):
    shown = []
    monkeypatch.setattr(marking, "display", shown.append)
    points = marking.points_of(ALL, 2.0)
    for gpu, quick in ((False, ""), (True, "1"), (True, "")):
        monkeypatch.setattr(marking, "ON_GPU", gpu)
        monkeypatch.setenv("NF4_QUICK", quick)
        marking.print_rows({"torch": "2.11.0"}, points, FAST, TIMES)
    line = json.loads(re.search("{.*}", shown.pop().data)[0])
    assert not shown, "nothing without a GPU, nothing of a quick run"
    rows = [Row(*fields) for fields in line["rows"]]
    executed.check_rows(rows)
    assert line["environment"]["card"] == "Tesla T4" and line["environment"]["versions"]["torch"] == "2.11.0"
    assert len(rows) == 2 + 2 * len(TIMES) + 9
    assert rows[2][1:] == ("until return", "ours", "us", [9, 9])
    assert rows[3][1:] == ("100 rounds", "ours", "s", [1.25, 1.25])
