"""The prediction for a T4 from simulated kernels, published totals and what was measured on an H200."""

import pytest

from helpers.cross import predict
from helpers.results import store


def test_the_stored_prediction_is_what_the_stored_inputs_give():
    rows = store.rows(predict.CARD)
    found = {(row.case, row.contender, row.unit): row.values for row in predict.predict(rows)}
    expected = store.select(rows, "t4_prediction")
    assert len(found) == len(expected)
    for row in expected:
        assert found[row.case, row.contender, row.unit] == pytest.approx(row.values)
