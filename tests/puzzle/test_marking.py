"""The marking table from synthetic evidence: every line, every threshold, and what is missing."""

import ast
import hashlib
import json

import pytest

from helpers.nf4.environment import describe
from helpers.puzzle import checks, marking, notebook, protocol
from helpers.puzzle.checks import Evidence
from helpers.results import pages, store

POINTS = {judge: won for _, judge, won, _ in marking.TABLE if isinstance(judge, str)}
WITHOUT_POINTS = ("no_large_buffers", "no_sync", "fresh_output")
GPU = "an NVIDIA GPU"
FAILED = protocol.Entry("ours", failure="c: AssertionError: up_proj\nmore")


def comparison(classic=2.0, today=1.6, forms=(), **changes):
    """Ours takes a second; the others as many as given, or what an Entry says."""
    seconds = {"ours": 1.0, "unsloth_today": today, "unsloth_classic": classic, **changes}
    entries = {
        name: value if isinstance(value, protocol.Entry) else protocol.Entry(name, seconds=[value])
        for name, value in seconds.items()
    }
    return protocol.Comparison(entries, 1000, "Unsloth today", list(forms))


def marked(run=None, **changes):
    """Marked with evidence for all points, then `changes` (passed, or a whole Evidence) by key."""
    seen = {key: Evidence(key, True, f"{key} seen") for key in (*POINTS, *WITHOUT_POINTS)}
    for key, change in changes.items():
        seen[key] = change if isinstance(change, Evidence) else Evidence(key, change, f"{key} failed")
    return marking.mark(run or comparison(), seen)


@pytest.fixture(autouse=True)
def card(monkeypatch):
    facts = describe() | {"card": "Tesla T4 (a)", "capability": [7, 5], "date": "2026-11-22T10:00:00+00:00"}
    monkeypatch.setattr(marking, "describe", lambda: facts)
    monkeypatch.setattr(marking, "ON_GPU", True)


def test_all_points_and_their_weights():
    table = marked()
    assert table.totals == {"today": 14, "classic": 14} and marking.MAXIMUM == 14
    against = "against Unsloth today 14 (1.60x), Unsloth classic 14 (2.00x)."
    assert table.note == f"14 of 14 points on Tesla T4 (a), 2026-11-22; {against}"
    assert [line["today"] for line in table.points.values()] == [3, 0, 1, 2, 2, 1, 3, 1, 1]
    assert set(POINTS) <= {check.__name__ for check in checks.CHECKS}


@pytest.mark.parametrize(
    "ratio, earned",
    [(0.5, -3), (1.0, -3), (1.0001, 0), (1.049, 0), (1.05, 1), (1.099, 1), (1.10, 3), (1.149, 3), (1.15, 5)],
)  # fmt: skip
def test_speed_thresholds(ratio, earned):
    assert marked(comparison(classic=ratio)).totals == {"classic": 9 + earned, "today": 14}


@pytest.mark.parametrize("key", POINTS)
def test_a_failed_criterion_costs_and_a_missing_one_adds_nothing(key):
    lost = {"torch_compile": 2, "exact": 2}.get(key, POINTS[key])
    table = marked(**{key: False})
    assert set(table.totals.values()) == {14 - lost} and f"NO: {key} failed" in str(table)
    table = marked(**{key: Evidence(key, None, f"not measured (needs {GPU})")})
    assert set(table.totals.values()) == {14 - POINTS[key]} and f"not measured (needs {GPU})" in str(table)
    assert f"; {POINTS[key]} points not measured" in table.note


def test_what_has_no_points_changes_none_and_is_named():
    table = marked(**dict.fromkeys(WITHOUT_POINTS, False))
    assert table.totals["today"] == 14
    assert table.note.endswith("; FAILED (worth no points): no_large_buffers, no_sync, fresh_output.")


def test_the_stricter_column_comes_first_in_headline_and_table():
    table = marked(comparison(1.04, 1.3))
    assert table.note.startswith("9 of 14 points")
    assert "; against Unsloth classic 9 (1.04x), Unsloth today 14 (1.30x)" in table.note
    assert table[0] == ["Criterion", "vs Unsloth classic", "vs Unsloth today", "Measured"]
    rows = {cells[0]: cells[1:3] for cells in marked(comparison(0.9, 1.02), exact=False)}
    assert rows["Penalty: speedup at most 1.00"] == ["-3", "0"]
    assert rows["Tested in fp16 and bf16"] == ["-1", "-1"] and rows["Sum"] == ["4 of 14", "7 of 14"]


def test_what_was_not_timed_scores_nothing_and_says_why():
    for entry in (protocol.Entry("x", "unsloth: gone"), protocol.Entry("x", failure="unsloth: gone\nmore")):
        table = marked(comparison(classic=entry))
        assert table.totals == {"classic": 9, "today": 14}
        assert "not measured (needs unsloth: gone" in " ".join(str(table).split())
        assert "5 points not measured" in table.note and "classic" not in table.note
    table = marking.mark(comparison(ours=protocol.Entry("ours")), {})
    assert table.note == "0 of 14 points on Tesla T4 (a), 2026-11-22; 14 points not measured."
    table = marked(comparison(ours=FAILED))
    assert table.totals == {"today": 6, "classic": 6}
    assert "no time: c: AssertionError: up_proj" in " ".join(str(table).split())
    assert "(wrong)" in table.note and "Official protocol" in table.note


def test_the_ratio_is_of_medians_and_said_once():
    run = comparison(today=protocol.Entry("x", seconds=[3.0, 3.0, 1.0]))
    run.entries["ours"].seconds = [1.0, 2.0, 9.0]
    assert marking.speed(run, "ours", "unsloth_today")[0] == 1.5 == run.speedup("ours", "unsloth_today")
    assert " ".join(str(marked(run)).split()).count("today: 1.500x") == 4


def test_tables_are_text_and_html():
    table = marked(custom_asm=Evidence("asm", False, "<many> words of evidence " * 12))
    assert max(map(len, str(table).splitlines())) <= 110 and str(table).count("many") == 12
    html = table._repr_html_()
    assert html.count("<tr>") == 11 and "&lt;many&gt;" in html and "<b>11 of 14 points" in html


FORMS = {"kernel[grid]": 2.0, "compiled[grid]": protocol.Entry("x", failure="wrong\nmore")}


def test_launch_forms_beside_the_score():
    table = marking.forms_table(comparison(**FORMS, forms=FORMS))
    assert table[1:] == [
        ["kernel[grid], no checks", "2.0000", "0.80x", "1.00x"],
        ["compiled[grid], no checks", "not measured (needs wrong)", "", ""],
        ["direct launch, all checks (your_dequantize_nf4)", "1.0000", "1.60x", "2.00x"],
    ]


def test_a_run_leaves_a_file_that_draw_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NF4_BUILD", str(tmp_path))
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    run = comparison(**FORMS, forms=FORMS)
    run.entries["ours"].per_config = {"2048x8192 fp16": [1.0]}
    cells, kernel = ["def f(): pass", "x = 1"], {"device": "abc", "host": "def"}
    stamp = {"kernel": kernel, "cells": [hashlib.sha256(text.encode()).hexdigest()[:8] for text in cells]}
    monkeypatch.setattr(marking, "STAMP", stamp)
    for inputs, known in ((["", *cells, "y"], kernel), (cells[:1], {})):
        monkeypatch.setattr(marking, "In", inputs, raising=False)
        marking.save_result(marked(run), run)
        path = tmp_path / "nf4_tesla-t4-a.json"
        assert json.loads(path.read_text())["kernel"] == known
        shown = capsys.readouterr().out
        assert f"Kernel {'abc.def' if known else '(edited)'}; results" in shown and "send us" in shown
    pages.file_result(path)
    rows = store.rows("tesla-t4-a")
    assert store.one(rows, "protocol", "2048x8192 fp16", "ours", "s").values == (1.0,)
    assert store.one(rows, "protocol", "total", "unsloth_today").values == (1.6,)
    forms = {row.contender: row.median for row in store.select(rows, "launch_forms")}
    assert forms == {"direct": 1.0, "ordinary": 2.0, "unsloth_today": 1.6, "unsloth_classic": 2.0}
    assert sum(row.median for row in store.select(rows, "score", contender="today", unit="points")) == 14
    assert store.one(rows, "score", "total", "classic", "x").values == (2.0,)
    monkeypatch.setattr(marking, "ON_GPU", False)
    path.unlink()
    marking.save_result(marked(run), run)
    assert not path.exists(), "times of Triton's interpreter mean nothing"
    assert "on this CPU (Triton's interpreter)" in marked(run).note


def test_no_name_of_a_cell_hides_another():
    """In the notebook all modules share one namespace."""
    owners, imported = {}, set()
    for name, path in notebook.MODULES.items():
        for node in ast.parse("\n".join(c.source for c in notebook.cells_of_module(name, path))).body:
            bound = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                bound = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            if isinstance(node, ast.Import):
                imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            for one in bound:
                assert owners.setdefault(one, name) == name, (one, owners[one], name)
    assert not imported & set(owners), "an import would hide a name, or be hidden"
