"""Records: written, replaced, read, selected; what results/ holds."""

from helpers.results import store
from helpers.results.store import Row

MACHINE = {"card": "NVIDIA T1", "date": "2026-11-22T10:00:00+00:00", "forced": None}


def test_a_section_is_replaced_and_the_others_stay(folder):
    kept = Row("gpu_time", '4096 bf16, "odd"', "ours", "us", (1, 2.5, 0.30000123456789, 124664700))
    new = Row("protocol", "total", "ours", "s", (0.3, 0.31))
    store.write("gpu_time", [kept], environment=MACHINE)
    store.write("notebook", [kept], environment=MACHINE)
    store.write("notebook", [new], environment=MACHINE)
    assert store.rows("nvidia-t1") == [kept, new]
    here = {"version": store.VERSION, "commit": store.commit(), "note": ""}
    assert store.records("nvidia-t1")["notebook"].environment == MACHINE | here


def test_folder_of_a_machine():
    assert store.slug(MACHINE | {"forced": "/../t4"}) == "nvidia-t1-forced-t4"
