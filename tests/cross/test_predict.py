"""The prediction for a T4 from simulated kernels, published overheads and what was measured on an H200."""

import json

import pytest

from helpers.cross import predict
from helpers.results import store
from helpers.results.store import Row, one


@pytest.fixture(scope="module")
def simulated():
    return json.loads(predict.SIMULATION.read_text(encoding="utf-8"))


def test_the_sum_by_hand(simulated):
    rows = predict.predict(simulated, (0.5, 0.5))

    def values(case, contender):
        return pytest.approx(one(rows, case=case, contender=contender).values)

    assert values("kernels", "ours") == (2.53, 2.53 * 1.13)
    assert values("calls", "ours") == (0.27, 0.3465)
    assert values("total", "unsloth_today") == (3.14, 2.67 * 1.13 + 0.693)
    low, high = (3.26 * 1.13 + 0.54) / (2.53 * 1.13 + 0.3465), (3.26 + 0.693) / (2.53 + 0.27)
    assert values("speedup", "unsloth_classic") == (low, high)
    assert values("points", "unsloth_classic") == (14, 14)
    assert values("points", "unsloth_today") == (10, 14)


def test_the_share_of_overhead_is_measured_and_stored(monkeypatch, tmp_path):
    """Until a call returns 10 us against 25; the official protocol less kernels of 10 us: 20 against 40."""
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    rows = []
    for who, until_return, seconds in (("ours", 10, 0.27), ("unsloth_today", 25, 0.45)):
        rows.append(Row("host_time", "until_return", who, "us", [until_return]))
        rows.append(Row("protocol", "total", who, "s", [seconds]))
        rows += [Row("gpu_time", size, who, "us", [10]) for size in predict.OFFICIAL]
    store.save(predict.HOST, rows, {})
    assert predict.overhead_share() == pytest.approx((0.4, 0.5))
    predict.write()
    kept = store.rows(predict.CARD)
    assert one(kept, "t4_prediction", "4194304 bf16 at 1000 MHz", "unsloth_today", "us").median == 52
    assert "nothing was measured" in store.meta(predict.CARD)["sections"]["t4_prediction"]["note"]
