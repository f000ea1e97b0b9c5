"""Rows and meta.json: written, replaced, read, selected; what results/ holds."""

import math

import pytest

from helpers.results import store
from helpers.results.store import Row

FACTS = {"card": "NVIDIA T1", "cpu": "a CPU", "driver": "580", "cuda": "13.0", "versions": {"torch": "2.11"}}
MACHINE = {"date": "2026-11-22T10:00:00+00:00", "forced": None, **FACTS}


def test_a_section_is_replaced_and_the_others_stay(folder):
    kept = Row("gpu_time", '4096 bf16, "odd"', "ours", "us", (1, 2.5, 0.30000123, 124664700))
    new = Row("protocol", "total", "ours", "s", (0.3, 0.31))
    store.write("gpu_time", [kept], environment=MACHINE)
    store.write("protocol", [Row("protocol", "total", "peft", "s", [1])], environment=MACHINE)
    store.write("protocol", [new], environment=MACHINE, note="second")
    assert store.rows("nvidia-t1") == [kept, new]
    at = store.meta("nvidia-t1")["sections"]["protocol"]
    expected = {"date": "2026-11-22", "note": "second", "kernel": store.kernel_hash(), **FACTS}
    assert at == {"commit": store.commit(), **expected}


def test_what_an_earlier_kernel_measured_is_named(folder):
    store.write("now", [], environment=MACHINE)
    store.write("before", [], environment=MACHINE | {"kernel": "another"})
    store.write("published", [], environment=MACHINE | {"kernel": None})  # by others
    assert store.earlier("nvidia-t1") == ["before"]


def test_folder_of_a_machine():
    assert store.slug(MACHINE | {"forced": "/../t4"}) == "nvidia-t1-forced-t4"


@pytest.mark.parametrize("card", store.cards())
def test_stored_rows_are_sound(card):
    rows, meta = store.rows(card), store.meta(card)
    assert {row.section for row in rows} == set(meta["sections"])
    assert len({row[:4] for row in rows}) == len(rows), "a row twice"
    assert all(math.isfinite(value) for row in rows for value in row.values)
