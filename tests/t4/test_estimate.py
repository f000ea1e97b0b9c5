"""What the notebook shows of a T4 from stored files: the time of "Run all", and the forced run."""

import json

import pytest

from helpers.machine import environment
from helpers.show import notebook
from helpers.submission import scoring
from helpers.t4 import estimate
from helpers.submission.checks import Evidence

FACTS = {"gpu": "NVIDIA H200", "date": "2026-11-21T10:00:00+00:00", "forced": None}


@pytest.fixture
def store(monkeypatch, tmp_path):
    """store(folder, name, data, **facts): a result file where the notebook looks for it."""
    monkeypatch.setattr(notebook, "RESULTS", tmp_path)

    def write(folder, name, data, **facts):
        (tmp_path / folder).mkdir(exist_ok=True)
        content = {"environment": FACTS | facts, "kernel_hash": "0123456789abcdef", "data": data}
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(content))

    return write


def test_without_files_every_line_that_needs_one_says_so(store):
    text = notebook.run_all_estimate()
    assert text.count("not measured  ") == 4 and "benchmark.json not stored; notebook.json not stored" in text


def test_the_estimate_is_of_the_stored_files_and_of_the_notebooks_own_repeats(store):
    cells = [{"title": "a", "seconds": 40.0, "protocol": False, "setup": False}]
    store("nvidia-h200", "notebook", {"cells": cells})
    text = notebook.run_all_estimate()
    found = estimate.estimate_run_all({"notebook": {"cells": cells}}, environment.REPEATS_SM75)
    assert estimate.render_estimate(found) in text and "protocol once, 1000 rounds" in text
    assert "notebook.json of 2026-11-21, kernel 0123456789abcdef" in text
    low, high = found["total_s"]
    assert f"{low:.0f} to {high:.0f}" in text and "of 15" in text
    assert len(text.splitlines()) <= 20 and max(map(len, text.splitlines())) <= 130


def evidence():
    """As a run with forced decisions on an H200 finds it."""
    keys = [key for key, *_ in scoring.CRITERIA]
    found = {key: Evidence(key, True, text=f"{key} seen") for key in keys}
    found["exact"] = Evidence("exact", True, text="45 layers")
    speed = Evidence("speed", True, {"ratio": 1.5}, text="1.500x: seconds of an H200")
    return found | {"speed_classic": speed, "speed_today": speed}


def test_a_forced_run_is_summed_up_without_its_times(store):
    score = scoring.table(evidence(), "NVIDIA H200, T4's decisions forced, 2026-11-21")
    store("nvidia-h200-forced-t4", "score", score.to_dict(), forced="t4")
    text = notebook.stored_forced()
    first, second, *rest = text.splitlines()
    assert first == "NVIDIA H200, T4's decisions forced, 2026-11-21, kernel 0123456789abcdef"
    assert second.startswith("9 of the 9 points that do not depend on speed")
    assert "+1 Works under torch.compile: torch_compile seen" in rest and "exact: yes; 45 layers" in rest
    assert "1.5" not in text and "Speedup" not in text


def test_no_forced_run_says_how_to_get_one(store):
    assert notebook.stored_forced() == (
        "not stored: NF4_FORCE=t4 python -m helpers run --in-place on a machine with an NVIDIA GPU"
    )
    store("nvidia-h200", "score", {}, forced=None)
    assert notebook.stored_forced().startswith("not stored")


def test_a_protocol_timed_once_says_so(store):
    from helpers.submission import harness

    entry = harness.Entry("mine", seconds=[1.0], identical=True)
    shown = repr(
        notebook.protocol(harness.Comparison({"mine": entry}, 1000, 1, "Unsloth today", "cuda", ["a"]))
    )
    assert "1 configurations, 1000 rounds, timed once" in shown and "1.0000 to 1.0000" not in shown
    shown = repr(
        notebook.protocol(harness.Comparison({"mine": entry}, 1000, 3, "Unsloth today", "cuda", ["a"]))
    )
    assert "3 interleaved repeats" in shown


def test_the_predicted_floor_is_that_of_the_card(store, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(environment, "result_folder", lambda: notebook.RESULTS / "nvidia-h200")
    monkeypatch.setattr(notebook.gpu_time, "ceiling", lambda: 2000.0)
    assert "2000 GB/s measured now" in notebook.floor() and "42.2 MB -> 21.1 us" in notebook.floor()
    sizes = [
        {"numel": rows * columns, "dtype": str(dtype)[6:], "rows": {"floor_triton": {"p50": us}}}
        for (rows, columns, dtype), us in zip(notebook.PROTOCOL_SHAPES, (12.0, 4.0, 38.0), strict=True)
    ]
    store("nvidia-h200", "benchmark", {"gpu": {"sizes": sizes}})
    assert "stored 2026-11-21" in notebook.floor() and "42.2 MB -> 12.0 us, 3517 GB/s" in notebook.floor()
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    assert "NVIDIA H200, stored 2026-11-21" in notebook.floor() and "-> 12.0 us" in notebook.floor()
    (notebook.RESULTS / "nvidia-h200" / "benchmark.json").unlink()
    assert "not measured: needs an NVIDIA GPU" in notebook.floor() and notebook.floor().count("-> -") == 3
