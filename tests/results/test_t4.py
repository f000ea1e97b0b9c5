"""The prediction for a T4: stored rows and docs/t4.md are what inputs.json beside those rows gives."""

import runpy
import types

import pytest

from helpers.results import pages, store

SCRIPT = store.ROOT / "results" / pages.SIMULATED / "predict.py"
predict = types.SimpleNamespace(**runpy.run_path(str(SCRIPT)))
SECTIONS = (predict.published, predict.t4_prediction, predict.t4_sensitivity, predict.claim)


@pytest.mark.parametrize("section", SECTIONS)
def test_stored_rows_and_the_page_are_what_the_inputs_give(section):
    found = predict.rows(section)
    stored = store.select(store.rows(pages.SIMULATED), section.__name__)
    assert [row[:4] for row in found] == [row[:4] for row in stored]
    for row, expected in zip(found, stored, strict=True):
        assert row.values == pytest.approx(expected.values, rel=1e-6), row
    if section is not predict.claim:
        assert pages.table(found, section.__name__) in (store.ROOT / "docs" / "t4.md").read_text()
