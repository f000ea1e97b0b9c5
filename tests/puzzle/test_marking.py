"""The score from verdicts and times, and the result file."""

import json

import pytest

from helpers.puzzle import marking
from helpers.results import store

ALL = {"one kernel": True, "compile": True, "assembly": True, "eviction": True, "bits": True, "memory": True}
FACTS = {
    "card": "Tesla T4",
    "capability": [7, 5],
    "driver": "580.65.06",
    "cuda": "13.0",
    "versions": {"torch": "2.11.0", "unsloth": None},
    "date": "2026-11-23T12:00:00+00:00",
    "forced": None,
}
SECONDS = {"ours": [1.0, 1.1, 1.2], "unsloth_today": [1.5], "unsloth_classic": [2.2], "bitsandbytes": [3]}


def both(*values):
    """Return these ratios over both versions of Unsloth."""
    return {"today": [*values], "classic": [*values]}


def totals(passed, ratios):
    points = marking.points_of(passed, marking.speeds(ratios))
    return [sum(line[column] or 0 for line in points.values()) for column in ("today", "classic")]


@pytest.mark.parametrize(
    "ratio, total",
    [(1.0, 6), (1.001, 9), (1.0499, 9), (1.05, 10), (1.0968, 10), (1.10, 12), (1.1499, 12), (1.15, 14)],
)
def test_the_median_of_the_puzzles_line_decides(ratio, total):
    assert totals(ALL, both(0.5, ratio, 9.0)) == [total, total]
    assert totals(ALL, {"today": [ratio], "classic": []}) == [total, 9]


@pytest.mark.parametrize(
    "criterion, lost", [("one kernel", 3), ("compile", 2), ("assembly", 3), ("eviction", 1), ("bits", 2)]
)
def test_what_failed_loses_its_points(criterion, lost):
    assert totals(ALL | {criterion: False}, both(2.0)) == [14 - lost] * 2


def test_what_was_not_measured_scores_nothing():
    assert totals(dict.fromkeys(ALL), None) == [0, 0]
    assert totals(ALL, None) == [9, 9]


def test_a_wrong_weight_in_the_puzzles_test_is_no_speedup():
    assert totals(ALL, False) == [6, 6]


def test_the_printed_score(capsys):
    marking.print_score(ALL | {"memory": False}, {"today": [1.0968], "classic": [2.0]}, FACTS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "10 of 14 points on Tesla T4, 2026-11-23"
    (speedup,) = [line.split() for line in lines if line.startswith("Speedup  ")]
    assert speedup[1:3] == ["1.09x", "2.00x"]
    assert "Breaks a rule" in lines[-1]
    marking.print_score(dict.fromkeys(ALL), None, FACTS | {"card": None})
    shown = capsys.readouterr().out
    assert "0 of 14 points on this CPU" in shown and shown.count("not measured") == 18


def test_the_result_file_can_be_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(marking, "ON_GPU", True)
    monkeypatch.setenv("NF4_BUILD", str(tmp_path))
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    ratios = {"today": [1.3, 1.2, 1.4], "classic": [2.0]}
    points = marking.points_of(ALL | {"compile": None}, marking.speeds(ratios))
    marking.write_result(FACTS, points, ratios, SECONDS, store.hashes())
    path = tmp_path / "nf4_tesla-t4.json"
    assert json.loads(path.read_text())["kernel"] == store.hashes()
    store.file_result(path)
    rows = store.rows("tesla-t4")
    assert store.one(rows, "protocol", "puzzle's line", "unsloth_today", "x").values == (1.3, 1.2, 1.4)
    assert store.one(rows, "protocol", "puzzle's line", "unsloth_classic", "x").values == (2.0,)
    assert store.one(rows, "protocol", "total", "ours", "s").median == 1.1
    assert not store.select(rows, "score", "Works under torch.compile")
    assert "send this file" in capsys.readouterr().out
