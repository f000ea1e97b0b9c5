"""The prediction for a T4: stored rows and docs/t4.md are what inputs.json beside those rows gives."""

import importlib.util
import statistics

import pandas
import pytest

from helpers.puzzle import marking
from helpers.results import pages, store

SCRIPT = store.ROOT / "results" / pages.SIMULATED / "predict.py"
SPEC = importlib.util.spec_from_file_location("predict", SCRIPT)
predict = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(predict)


@pytest.mark.parametrize("section", (predict.published, predict.t4_prediction, predict.t4_sensitivity))
def test_stored_rows_and_the_page_are_what_the_inputs_give(section):
    found = predict.rows(section)
    stored = store.select(store.rows(pages.SIMULATED), section.__name__)
    assert [row[:4] for row in found] == [row[:4] for row in stored]
    for row, expected in zip(found, stored, strict=True):
        assert row.values == pytest.approx(expected.values, rel=1e-6), row
    assert pages.table(found, section.__name__) in (store.ROOT / "docs" / "t4.md").read_text()


def seconds(who, calibration):
    """Return the seconds of 3000 kernels of each of the test's weights, from inputs.json."""
    us = {}
    for run in predict.INPUTS["runs"]:
        if (run["contender"], run["calibration"], run["mhz"]) == (who, calibration, 1590):
            us[run["elements"], run["dtype"]] = statistics.fmean(run["steady_us"])
    largest = us[16777216, "bf16"] * (4096 * 14336 / 16777216)
    return 3000e-6 * (us[1024 * 4096, "bf16"] + us[2048 * 8192, "fp16"] + largest)


def test_combinations_by_hand():
    kernels, launches = predict.combine(calibrations=["turn"], bandwidths=[113])  # half of the copy's 226
    copy, ours = seconds("copy_kernel", "turn"), seconds("ours", "turn")
    assert sorted(kernels["ours"]) == pytest.approx([ours] * 4 + [2 * ours] * 4)
    shares = [share["ours"] for share in predict.FACTS["launch_shares"]]
    assert list(launches["ours"]) == pytest.approx([share * (3.3453 - 2 * copy) for share in shares] * 2)
    kernels, launches = predict.combine(
        calibrations=["burst"], bandwidths=[240], plain=1.1, unsloth=0.9, ours=2
    )
    copy, theirs = seconds("copy_kernel", "burst"), seconds("unsloth_today", "burst")
    assert list(kernels["unsloth_today"]) == pytest.approx([0.9 * theirs] * 4)
    assert list(kernels["unsloth_classic"]) == pytest.approx([3.26] * 4)
    assert list(launches["ours"]) == pytest.approx([2 * share * (3.3453 - 1.1 * copy) for share in shares])


def test_points_are_the_puzzles():
    passed = {decides: True for *_, decides in marking.CRITERIA}
    speedups = [0.99, 1.01, 1.05, 1.1, 1.14, 1.15, 2.0]
    expected = [sum(marking.points_of(passed, speedup).values()) for speedup in speedups]
    assert list(predict.points(pandas.Series(speedups))) == expected


def test_every_score_is_counted():
    for case, entry in predict.INPUTS["sensitivity"].items():
        rows = store.select(predict.rows(predict.t4_sensitivity), "t4_sensitivity", case)
        counts = [row.median for row in rows if row.unit == "combinations"]
        assert sum(counts) == len(predict.combine(**entry["change"])[0]), case
