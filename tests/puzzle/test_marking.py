"""The marking table from synthetic evidence: every line, every threshold, and what is missing."""

import ast
import json
from pathlib import Path

import msgspec
import pytest

from helpers.results import store as results
from helpers.puzzle import checks as evidence, marking, protocol, score
from helpers.puzzle.checks import Evidence

POINTS = {judge: won for _, judge, won, _ in marking.TABLE if isinstance(judge, str)}
WITHOUT_POINTS = ("no_large_buffers", "no_sync", "fresh_output")
GPU = "an NVIDIA GPU"


def comparison(classic=2.0, today=1.6, **changes):
    """Ours takes a second; the baselines as many as given, or what an Entry says."""
    seconds = {"ours": 1.0, "unsloth_today": today, "unsloth_classic": classic, **changes}
    entries = {
        name: value if isinstance(value, protocol.Entry) else protocol.Entry(name, seconds=[value])
        for name, value in seconds.items()
    }
    return protocol.Comparison(entries, 1000, 5, "Unsloth today", "cuda", ["a", "b", "c"])


def everything(**changes):
    """Evidence for all points, then `changes` (passed, or a whole Evidence) by key."""
    seen = {key: Evidence(key, True, f"{key} seen") for key in (*POINTS, *WITHOUT_POINTS)}
    for key, change in changes.items():
        seen[key] = change if isinstance(change, Evidence) else Evidence(key, change, f"{key} failed")
    return seen


def marked(run=None, **changes):
    return marking.mark(run or comparison(), everything(**changes))


def points(table, name, column="today"):
    return next(line.points[column] for line in table.lines if line.name == name)


@pytest.fixture(autouse=True)
def on_a_card(monkeypatch):
    facts = marking.machine() | {"gpu": "a card", "capability": (9, 0), "date": "2026-11-22T10:00:00+00:00"}
    monkeypatch.setattr(marking, "machine", lambda: facts)
    return facts


def test_all_points():
    table = marked()
    assert table.totals == {"classic": 14, "today": 14}
    assert table.headline == (
        "14 of 14 points on a card, 2026-11-22; against Unsloth today 14 (1.60x), Unsloth classic 14 (2.00x)."
    )


def test_the_weights_are_the_puzzles():
    best = {line.name: line.best for line in marked().lines}
    assert best == {
        "One fused kernel": 3,
        "Penalty: speedup at most 1.00": 0,
        "Speedup at least 1.05": 1,
        "Speedup at least 1.10": 2,
        "Speedup at least 1.15": 2,
        "Works under torch.compile": 1,
        "Custom assembly works": 3,
        "Uses cache eviction": 1,
        "Tested in fp16 and bf16": 1,
    }
    assert sum(best.values()) == marking.MAXIMUM == 14
    assert set(POINTS) <= {check.__name__ for check in evidence.CHECKS}


@pytest.mark.parametrize(
    "ratio, earned",
    [
        *((0.5, -3), (1.0, -3), (1.0001, 0), (1.0499, 0), (1.05, 1)),
        *((1.0999, 1), (1.10, 3), (1.1499, 3), (1.15, 5), (3, 5)),
    ],
)
def test_speed_thresholds(ratio, earned):
    assert marked(comparison(classic=ratio)).totals == {"classic": 9 + earned, "today": 14}


@pytest.mark.parametrize(
    "key, lost",
    [("single_kernel", 3), ("torch_compile", 2), ("custom_asm", 3), ("cache_eviction", 1), ("exact", 2)],
)
def test_a_failed_criterion(key, lost):
    table = marked(**{key: False})
    assert table.totals == {"classic": 14 - lost, "today": 14 - lost} and f"{key} failed" in str(table)


@pytest.mark.parametrize("key, best", POINTS.items())
def test_a_missing_criterion_adds_nothing(key, best):
    for seen in (everything(**{key: Evidence(key, None, needs=GPU)}), everything()):
        if seen[key].passed:
            del seen[key]
        table = marking.mark(comparison(), seen)
        assert table.totals["today"] == 14 - best and "not measured (needs " in str(table)
        assert f"; {best} points not measured" in table.headline


def test_what_has_no_points_changes_none_and_is_named():
    table = marked(**dict.fromkeys(WITHOUT_POINTS, False))
    assert table.totals["today"] == 14
    assert table.headline.endswith("; FAILED without points: no_large_buffers, no_sync, fresh_output.")
    assert str(table).count("NO; ") == 3 and "Also checked (no points):" in str(table)
    assert "official protocol: yes; right against Unsloth today" in str(table)


def test_the_stricter_column_comes_first():
    assert "14 of 14" not in marked(comparison(1.04, 1.3)).headline
    first = "; against Unsloth classic 9 (1.04x), Unsloth today 14 (1.30x)"
    assert "9 of 14 points" in marked(comparison(1.04, 1.3)).headline
    assert first in marked(comparison(1.04, 1.3)).headline
    assert "against Unsloth today 14 (1.20x), Unsloth classic" in marked(comparison(1.3, 1.2)).headline


def test_one_column_not_measured():
    for entry in (protocol.Entry("x", reason="not there"), protocol.Entry("x", failure="not there\nmore")):
        table = marked(comparison(classic=entry))
        assert table.totals == {"classic": 9, "today": 14}
        assert points(table, "Speedup at least 1.15", "classic") is None
        assert "not measured (needs a time of unsloth_classic: not there" in " ".join(str(table).split())
        assert "5 points not measured" in table.headline and "classic" not in table.headline


def test_nothing_measured():
    run = comparison(ours=protocol.Entry("ours"))
    table = marking.mark(run, {})
    assert table.totals == {"classic": 0, "today": 0}
    assert table.headline == "0 of 14 points on a card, 2026-11-22; 14 points not measured."
    assert all(set(cells[1:3]) == {"-"} for cells in list(table.rows())[1:-1])


def test_a_candidate_that_is_wrong_loses_the_speed_points():
    table = marked(comparison(ours=protocol.Entry("ours", failure="c: AssertionError: up_proj\nmore")))
    assert table.totals == {"classic": 6, "today": 6}
    assert points(table, "Penalty: speedup at most 1.00") == -3
    assert "no time: c: AssertionError: up_proj" in " ".join(str(table).split())
    assert "(wrong)" in table.headline and "official protocol" in table.headline


def test_the_ratio_is_of_medians_and_said_once():
    run = comparison(unsloth_today=protocol.Entry("x", seconds=[3.0, 3.0, 1.0]))
    run.entries["ours"].seconds = [1.0, 2.0, 9.0]
    table = marking.mark(run, everything())
    assert marking.speed(run, "ours", "unsloth_today")[0] == 1.5 == run.speedup("ours", "unsloth_today")
    assert str(table).count("2.0000 s instead of 3.0000 s") == 1


def test_the_text_fits_and_says_everything():
    text = str(marked(custom_asm=Evidence("asm", True, "many words of evidence " * 12)))
    assert max(map(len, text.splitlines())) <= 110
    assert text.count("many") == 12 and "+3" in text and "14 of 14" in text
    rows = {cells[0]: cells[1:3] for cells in marked(comparison(0.9, 1.02), exact=False).rows()}
    assert rows["Penalty: speedup at most 1.00"] == ["-3", "0"]
    assert rows["Tested in fp16 and bf16"] == ["-1", "-1"]
    assert rows["Sum"] == ["4 of 14", "7 of 14"]


def test_a_score_is_read_back_as_it_was_stored(tmp_path):
    score = marked(exact=None)
    results.write("score", score, tmp_path, marking.Score)
    stored = results.read("score", tmp_path, marking.Score).data
    assert stored == score and stored.totals["today"] == 13 and len(stored.lines) == 9
    assert stored.evidence["exact"].passed is None and stored.evidence["official"].passed


@pytest.mark.parametrize("capability, asked", [((9, 0), False), ((7, 5), True)])
def test_a_run_alone_keeps_its_result(on_a_card, tmp_path, capsys, capability, asked):
    on_a_card |= {"gpu": "Tesla T4 (a)", "capability": capability}
    run = comparison()
    path = marking.keep_result(marked(run), run, tmp_path, kernel={"label": "abc"})
    assert path.name == "nf4_tesla-t4-a.json"
    content = json.loads(path.read_text())
    assert set(content) == {"environment", "kernel", "data"} and set(content["data"]) == {"score", "protocol"}
    msgspec.convert(content["environment"], results.Environment)
    msgspec.convert(content["data"]["score"], marking.Score)
    assert msgspec.convert(content["data"]["protocol"], results.Protocol).speedup("ours", "unsloth_today")
    assert ("please attach this file" in capsys.readouterr().out) is asked


def test_the_environment_is_that_of_every_result_file(monkeypatch):
    from helpers import machine

    monkeypatch.undo()
    facts, described = marking.machine(), machine.describe()
    assert set(facts) == set(described)
    volatile = ("date", "interpreter")
    assert {k: v for k, v in json.loads(json.dumps(facts)).items() if k not in volatile} == {
        k: v for k, v in described.items() if k not in volatile
    }


def test_the_command_prints_the_table(monkeypatch, capsys):
    runs = []

    def compare(candidates, **how):
        runs.append(how)
        return comparison()

    monkeypatch.setattr(protocol, "compare", compare)
    monkeypatch.setattr(evidence, "examine", lambda candidate: everything())
    assert score.main(["--quick"]) == 0
    assert "14 of 14" in capsys.readouterr().out and runs == [{"rounds": 200, "repeats": 3}]
    monkeypatch.setattr(evidence, "examine", lambda candidate: everything(no_sync=False))
    assert score.main([]) == 1 and runs[1] == {}
    monkeypatch.setattr(evidence, "examine", lambda candidate: everything())
    monkeypatch.setattr(protocol, "compare", lambda candidates: comparison(today=0.9))
    assert score.main([]) == 1, "slower than a baseline"


def test_the_pytorch_backend_scores_nothing(monkeypatch):
    """Exact, but not the kernel: NF4_BACKEND=torch earns no point, and costs the one for fp16 and bf16."""
    pytest.importorskip("bitsandbytes")
    from helpers.nf4 import backend

    monkeypatch.setenv("NF4_BACKEND", "torch")
    checks = (evidence.exact, evidence.fresh_output)
    seen = evidence.examine(backend.dequantize, checks, tick=lambda line: None)
    assert seen["fresh_output"].passed and seen["exact"].passed is False
    assert max(marking.mark(comparison(ours=protocol.Entry("ours")), seen).totals.values()) < 0


# --- one namespace ---


def names_of(path):
    """What a file's own code binds at its top level, imports of modules left out."""
    bound = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.append(node.name)
        elif isinstance(node, ast.Assign):
            bound += [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return bound


def test_no_name_of_a_section_hides_another():
    """In the notebook the kernel and the three modules share one namespace."""
    root = Path(marking.__file__).parents[1]
    files = [
        root / "nf4" / "kernel.py",
        *(root / "submission" / f"{n}.py" for n in ("protocol", "evidence", "marking")),
    ]
    owners, imported = {}, set()
    for file in files:
        for name in set(names_of(file)):
            assert owners.setdefault(name, file.name) == file.name, (name, owners[name], file.name)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    assert not imported & set(owners), "an import would hide a name, or be hidden"


@pytest.mark.gpu
@pytest.mark.slow
def test_score_on_the_gpu(kernel):
    run = protocol.compare({"ours": kernel.your_dequantize_nf4}, rounds=200, repeats=3)
    table = marking.mark(run, evidence.examine(kernel.your_dequantize_nf4))
    assert table.totals == {"classic": 14, "today": 14}, str(table)
