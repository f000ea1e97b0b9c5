"""The prediction for a T4 from simulated kernels, published totals and what was measured on an H200."""

import shutil

import pytest

from helpers.cross import predict
from helpers.results import store
from helpers.results.store import Row, one

WHO = ("ours", "unsloth_today", "unsloth_classic")


def inputs():
    """A T4 whose kernels take 10 us (Unsloth's 20), 9000 of them 0.09 s; classic's 0.27 s."""
    us = {"ours": 10, "copy_kernel": 10, "unsloth_today": 20}
    cases = [f"{size} at 1590 MHz{model}" for model, sizes in predict.SIZES.items() for size, _ in sizes]
    rows = [Row("simulated", case, who, "us", [us[who]]) for case in dict.fromkeys(cases) for who in us]
    return rows + [
        Row("t4_inputs", "published kernels over simulated ones", "all", "x", [1.0]),
        Row("t4_inputs", "Unsloth's kernel with Triton 3.7", "unsloth_today", "x", [0.5]),
        Row("t4_inputs", "kernels of the protocol, s", "unsloth_classic", "s", [0.27]),
        Row("published", "rushilbhat/unsloth-puzzles, 2025-03", "solution", "s", [0.09 * 1.5 + 1]),
    ]


def test_the_sum_by_hand():
    """The weights are called 3000 times each, the large one takes 3.5 times as long: 0.03 x 5.5 s."""
    shares = {who: (1.0, 1.0) for who in WHO} | {"ours": (0.5, 0.5), "public_launcher": (0.6, 0.6)}
    rows = predict.predict(inputs(), shares)

    def values(case, contender):
        return pytest.approx(one(rows, case=case, contender=contender).values)

    assert values("kernels", "ours") == (0.165, 0.165)
    overhead = 0.09 * 1.5 + 1 - 0.165
    assert values("calls", "unsloth_today") == (overhead, overhead)
    ours = 0.165 + overhead / 2
    assert values("speedup, Triton 3.6", "unsloth_today") == ((0.33 + overhead) / ours,) * 2
    newer = 0.165 + overhead * 0.6
    assert values("speedup, Triton 3.7", "unsloth_today") == ((0.165 + overhead) / newer,) * 2
    assert values("points, Triton 3.6", "unsloth_classic") == (14, 14)


def test_the_stored_prediction_is_what_the_stored_inputs_give(monkeypatch, tmp_path):
    shutil.copytree(store.ROOT / "results" / predict.CARD, tmp_path / predict.CARD)
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    before = {(row.case, row.contender, row.unit): row.values for row in store.rows(predict.CARD)}
    predict.write()
    for row in store.rows(predict.CARD):
        assert row.values == pytest.approx(before.pop((row.case, row.contender, row.unit)))
    assert not before
