"""The marking table from synthetic evidence: every line, every threshold, and what is missing."""

import json

import pytest

from helpers.oracle import baselines
from helpers.submission import checks, harness, scoring
from helpers.submission.checks import Evidence


def speed(ratio):
    return Evidence("speed", ratio > 1, {"ratio": ratio}, text=f"{ratio:.3f}x: 1 s against {ratio} s")


def everything(classic=2.0, today=1.6, **changes):
    """Evidence for all points, then `changes` (passed, or a whole Evidence) by key."""
    evidence = {key: Evidence(key, True, text=f"{key} seen") for key, *_ in scoring.CRITERIA}
    evidence |= {key: Evidence(key, True, text=f"{key} seen") for key in scoring.WITHOUT_POINTS}
    evidence |= {"speed_classic": speed(classic), "speed_today": speed(today)}
    for key, change in changes.items():
        evidence[key] = (
            change if isinstance(change, Evidence) else Evidence(key, change, text=f"{key} failed")
        )
    return evidence


def points(score, name, column="today"):
    return next(line.points[column] for line in score.lines if line.name == name)


def test_all_points():
    score = scoring.table(everything(), "a card, today")
    assert score.totals == {"classic": 14, "today": 14}
    assert score.headline == (
        "14 of 14 points on a card, today, against Unsloth today (1.60x); Unsloth classic: 14 (2.00x)."
    )


def test_the_weights_are_the_puzzles():
    best = {line.name: line.best for line in scoring.table(everything()).lines}
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
    assert sum(best.values()) == scoring.MAXIMUM


@pytest.mark.parametrize(
    "ratio, earned",
    [
        (0.5, -3),
        (1.0, -3),
        (1.0001, 0),
        (1.0499, 0),
        (1.05, 1),
        (1.0999, 1),
        (1.10, 3),
        (1.1499, 3),
        (1.15, 5),
        (3.0, 5),
    ],
)
def test_speed_thresholds(ratio, earned):
    score = scoring.table(everything(classic=ratio, today=1.6))
    assert score.totals == {"classic": 9 + earned, "today": 14}


@pytest.mark.parametrize(
    "key, lost",
    [("single_kernel", 3), ("torch_compile", 2), ("custom_asm", 3), ("cache_eviction", 1), ("dtypes", 2)],
)
def test_a_failed_criterion(key, lost):
    score = scoring.table(everything(**{key: False}))
    assert score.totals == {"classic": 14 - lost, "today": 14 - lost}
    assert f"{key} failed" in score.to_text()


@pytest.mark.parametrize("key, best", [(key, best) for key, _, best, _ in scoring.CRITERIA])
def test_a_missing_criterion_adds_nothing(key, best):
    missing = Evidence(key, None, needs="an NVIDIA GPU")
    for evidence in (everything(**{key: missing}), {k: v for k, v in everything().items() if k != key}):
        score = scoring.table(evidence)
        assert score.totals["today"] == 14 - best
        assert "not measured (needs " in score.to_text()
        assert f"{best} points not measured in full" in score.headline


def test_points_without_points_change_nothing():
    score = scoring.table(everything(**dict.fromkeys(scoring.WITHOUT_POINTS, False)))
    assert score.totals["today"] == 14
    assert score.to_text().count("NO; ") == len(scoring.WITHOUT_POINTS)
    assert "Also checked (no points):" in score.to_text() and "(no points):" in score.to_markdown()


def test_the_headline_says_what_failed_without_points():
    failed = Evidence("new output", False, text="results share memory")
    score = scoring.table(everything(exact=False, fresh_output=failed, dtypes=None))
    assert score.headline.endswith("; 1 points not measured in full; FAILED: exact, new output.")
    missing = Evidence("exact", None, needs="bitsandbytes")
    assert scoring.table({"exact": missing}).headline.endswith("can be measured here.")
    assert scoring.table({"exact": failed, "dtypes": failed}).headline.endswith("here; FAILED: new output.")


def test_headline_names_the_stricter_column():
    assert (
        "against Unsloth classic (1.04x); Unsloth today: 14 (1.30x)"
        in scoring.table(everything(1.04, 1.3)).headline
    )
    assert (
        "against Unsloth today (1.04x); Unsloth classic: 14 (1.30x)"
        in scoring.table(everything(1.3, 1.04)).headline
    )
    assert "against Unsloth today (1.20x)" in scoring.table(everything(1.3, 1.2)).headline, "equal points"


def test_one_column_not_measured():
    score = scoring.table(everything(speed_classic=Evidence("s", None, needs="Unsloth classic (not there)")))
    assert score.totals == {"classic": 9, "today": 14}
    assert points(score, "Speedup at least 1.15", "classic") is None
    assert "against Unsloth today (1.60x); Unsloth classic: speed not measured" in score.headline
    assert "not measured (needs Unsloth classic (not there))" in score.to_markdown()


def test_nothing_measured():
    score = scoring.table({})
    assert score.totals == {"classic": 0, "today": 0}
    assert score.headline == "0 of 14 points; 0 can be measured here."
    assert all(cell == "-" for row in score.rows()[:-1] for cell in row[1:3])


def test_a_candidate_that_fails_the_official_checks_loses_the_speed_points():
    failed = Evidence("speed", False, {"failure": "x"}, text="no time: AssertionError: up weight")
    score = scoring.table(everything(speed_classic=failed, speed_today=failed))
    assert score.totals == {"classic": 6, "today": 6}
    assert points(score, "Penalty: speedup at most 1.00") == -3
    assert "no time: AssertionError" in score.headline


LONG = "<b>50 | 60</b> " + "many words of evidence " * 12


def test_text_fits_and_says_everything():
    score = scoring.table(everything(custom_asm=Evidence("asm", True, text=LONG)), "a card")
    text = score.to_text()
    assert max(map(len, text.splitlines())) <= 110
    assert text.startswith(score.headline)
    assert "14 of 14" in text and text.count("many") == 12
    assert "+3" in text and "today: 1.600x" in text


def test_negative_and_zero_points_are_shown():
    score = scoring.table(everything(classic=0.9, today=1.02, dtypes=False))
    rows = {row[0]: row[1:3] for row in score.rows()}
    assert rows["Penalty: speedup at most 1.00"] == ["-3", "0"]
    assert rows["Tested in fp16 and bf16"] == ["-1", "-1"]
    assert rows["Sum"] == ["4 of 14", "7 of 14"]


def test_markdown_and_html_escape():
    score = scoring.table(everything(custom_asm=Evidence("asm", True, text=LONG)))
    table_rows = [line for line in score.to_markdown().splitlines() if line.startswith("|")]
    assert len(table_rows) == 12
    assert all(row.replace("\\|", "").count("|") == 5 for row in table_rows)
    page = score._repr_html_()
    assert "&lt;b&gt;50 | 60" in page and "<b>50" not in page
    assert page.count("<tr>") == 11 and score.headline in page
    assert page.count("white-space:nowrap") == 11 * 3, "all but the evidence stays on one line"
    for name in ("black", "white", "#"):
        assert f"color:{name}" not in page, "the page's own colours, for light and dark"


def test_json():
    report = json.loads(json.dumps(scoring.table(everything(dtypes=None)).to_dict()))
    assert report["maximum"] == 14 and report["totals"]["today"] == 13
    assert report["evidence"]["speed_today"]["details"]["ratio"] == 1.6
    assert len(report["lines"]) == 9


def comparison(**entries):
    """A Comparison of entries given as seconds, or as a harness.Entry."""
    made = {
        name: entry if isinstance(entry, harness.Entry) else harness.Entry(name, seconds=entry)
        for name, entry in entries.items()
    }
    return harness.Comparison(made, 1000, 5, "Unsloth today", "cuda", ["a", "b", "c"])


def test_speed_evidence_is_the_ratio_of_medians():
    found = checks.speed(comparison(mine=[1.0, 2.0, 9.0], other=[3.0, 3.0, 1.0]), "mine", "other")
    assert found.passed and found.details["ratio"] == 1.5
    assert found.text == "1.500x: 2.0000 s against 3.0000 s (other)"
    assert not checks.speed(comparison(mine=[2.0], other=[2.0]), "mine", "other").passed


def test_speed_evidence_where_something_is_missing():
    absent = harness.Entry("Unsloth today", reason="needs an NVIDIA GPU")
    broken = harness.Entry("Unsloth today", failure="c: RuntimeError: boom\nmore")
    assert checks.speed(comparison(mine=[], other=[]), "mine", "other").needs == checks.GPU
    assert "needs an NVIDIA GPU" in checks.speed(comparison(mine=[1.0], other=absent), "mine", "other").needs
    assert "boom" in checks.speed(comparison(mine=[1.0], other=broken), "mine", "other").needs
    assert checks.speed(comparison(mine=[1.0]), "mine", "other").passed is None
    failed = checks.speed(comparison(mine=broken, other=[1.0]), "mine", "other")
    assert failed.passed is False and "boom" in failed.text and "ratio" not in failed.details


def test_collect_gives_every_line_its_evidence(monkeypatch):
    """Which checks are run, on the candidate that was passed in, without any of them doing its work."""
    seen = []

    def fake(key):
        return lambda candidate: seen.append((key, candidate)) or Evidence(key, True, text="seen")

    for key in [key for key, *_ in scoring.CRITERIA] + list(scoring.WITHOUT_POINTS):
        if key != "official_checks":
            monkeypatch.setattr(checks, key, fake(key))
    made = comparison(mine=[1.0], unsloth_classic=[2.0], unsloth_today=[1.5])
    made.entries["mine"].identical = True
    candidate = object()
    evidence = scoring.collect(candidate, made, name="mine")
    assert {found for _, found in seen} == {candidate} and len(seen) == 9
    score = scoring.table(evidence)
    assert score.totals == {"classic": 14, "today": 14} and "against Unsloth today (1.50x)" in score.headline


def test_checks_already_done_are_not_run_again(monkeypatch):
    run = []
    for key in [key for key, *_ in scoring.CRITERIA] + list(scoring.WITHOUT_POINTS):
        monkeypatch.setattr(checks, key, lambda *_, key=key: run.append(key) or Evidence(key, True))
    monkeypatch.setattr(checks, "speed", lambda *_: run.append("speed") or Evidence("speed", None))
    monkeypatch.setattr(harness, "compare", lambda *_, **__: run.append("protocol"))
    done = {"exact": Evidence("exact", False), "single_kernel": Evidence("single kernel", None)}
    found = scoring.collect("candidate", evidence=done)
    assert done.items() <= found.items() and found["dtypes"].passed
    assert run[0] == "protocol" and run.count("speed") == 2 and len(run) == 3 + 10 - 2
    assert not done.keys() & set(run) and len(done) == 2, "and the given ones are left as they were"
    run.clear()
    assert scoring.collect("candidate", evidence=found) == found and run == []
    score = scoring.score("candidate", comparison(your_dequantize_nf4=[1.0]), evidence=found)
    assert score.evidence == found and "FAILED: exact" in score.headline


def test_without_a_comparison_the_official_one_is_run(monkeypatch):
    calls = []

    def compare(candidates, **options):
        calls.append((candidates, options))
        return comparison(your_dequantize_nf4=[1.0])

    monkeypatch.setattr(harness, "compare", compare)
    for key in [key for key, *_ in scoring.CRITERIA] + list(scoring.WITHOUT_POINTS):
        if key != "official_checks":
            monkeypatch.setattr(checks, key, lambda candidate: Evidence("", None, needs="nothing"))
    for quick, expected in ((False, {"rounds": 1000, "repeats": 5}), (True, {"rounds": 200, "repeats": 3})):
        scoring.collect("candidate", quick=quick)
        assert calls.pop() == ({"your_dequantize_nf4": "candidate"}, expected)


def test_command_on_this_machine(monkeypatch, capsys, tmp_path):
    """The command prints the table and writes what it printed, stamped with machine and kernel."""
    monkeypatch.setattr(
        scoring, "collect", lambda candidate, comparison, **options: everything(**options_seen(options))
    )
    monkeypatch.setattr(baselines, "available", dict)
    file = tmp_path / "deep" / "score.json"
    assert scoring.main(["--quick", "--json", str(file)]) == 0
    assert "14 of 14" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert set(report) == {"environment", "kernel_hash", "data"} and len(report["kernel_hash"]) == 16
    monkeypatch.setattr(scoring, "collect", lambda *a, **k: everything(dtypes=False))
    assert scoring.main([]) == 1


def options_seen(options):
    assert options["quick"] is True
    return {}


def test_the_pytorch_backend_scores_nothing(monkeypatch):
    """Exact, but not the kernel: NF4_BACKEND=torch earns no point, and costs the one for fp16 and bf16."""
    pytest.importorskip("bitsandbytes")
    from helpers.nf4 import backend

    monkeypatch.setenv("NF4_BACKEND", "torch")
    monkeypatch.setattr(checks, "_cross_compiled", lambda: {"default": "", "asm": "", "hints": ""})
    made = comparison(mine=harness.Entry("mine", identical=True))
    evidence = scoring.collect(backend.dequantize, made, name="mine")
    assert evidence["exact"].passed, evidence["exact"].text
    assert max(scoring.table(evidence).totals.values()) < 0
    assert not any(found.passed for key, found in evidence.items() if key not in scoring.WITHOUT_POINTS)


@pytest.mark.gpu
@pytest.mark.slow
def test_score_on_the_gpu(kernel):
    score = scoring.score(kernel.your_dequantize_nf4, quick=True)
    assert score.totals == {"classic": 14, "today": 14}, score.to_text()
