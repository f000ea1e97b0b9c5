"""Rows and meta.json: written, replaced, read, selected; the two hashes; what is stored in results/."""

import math

import pytest

from helpers.results import store
from helpers.results.store import Row, one, select

NVIDIA = {
    "card": "NVIDIA H200",
    "driver": "580",
    "cuda": "13.0",
    "versions": {"torch": "2.11"},
    "date": "2026-11-22T10:00:00+00:00",
    "forced": None,
}
CARDS = sorted(path.parent.name for path in (store.ROOT / "results").glob("*/rows.csv"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, request):
    if "stored" not in request.node.name:
        monkeypatch.setenv("NF4_RESULTS", str(tmp_path))


def rows_of(section, *values):
    return [Row(section, "total", "ours", "s", values)]


def test_a_section_is_replaced_and_the_others_stay():
    kept = Row("gpu_time", '4096 bf16, "odd"', "ours", "us", (1, 2.5, 123456.7, 16777216))
    store.write("gpu_time", [kept], environment=NVIDIA)
    store.write("protocol", rows_of("protocol", 1.0), environment=NVIDIA, note="first")
    folder = store.write("protocol", rows_of("protocol", 0.3000012, 0.31), environment=NVIDIA)
    assert folder.name == "nvidia-h200"
    rows = store.rows("nvidia-h200")
    assert one(rows, "gpu_time").values == (1, 2.5, 123460, 16777216), "5 digits, whole numbers as they are"
    assert one(rows, "protocol").values == (0.3, 0.31) and one(rows, "gpu_time").case == kept.case
    meta = store.meta("nvidia-h200")
    assert (meta["card"], meta["versions"]) == ("NVIDIA H200", {"torch": "2.11"})
    assert meta["sections"]["protocol"] == {"date": "2026-11-22", **store.hashes(), "note": ""}
    assert list(meta["sections"]) == ["gpu_time", "protocol"]


def test_this_machine_is_the_default():
    assert store.rows(store.write("protocol", rows_of("protocol", 1)).name) == rows_of("protocol", 1)


@pytest.mark.parametrize(
    "change, name",
    [
        ({}, "nvidia-h200"),
        ({"card": "Tesla T4"}, "tesla-t4"),
        ({"card": None}, "cpu"),
        ({"forced": "t4"}, "nvidia-h200-forced-t4"),
        ({"card": "../NVIDIA"}, "nvidia"),
    ],
)
def test_folder_of_a_machine(change, name):
    assert store.slug(NVIDIA | change) == name


def test_select_and_one():
    rows = [Row("a", "x", who, "us", (value, 9.0, 1.0)) for who, value in (("ours", 2.0), ("peft", 3.0))]
    assert select(rows, case="x") == rows and select(rows, "b") == []
    row = one(rows, "a", contender="peft")
    assert (row.median, row.low, row.high) == (3.0, 1.0, 9.0)
    with pytest.raises(KeyError, match="0 rows for a, nobody, expected one"):
        one(rows, "a", contender="nobody")
    with pytest.raises(KeyError, match="2 rows for x"):
        one(rows, case="x")


CODE = '''"""Nothing."""
class A:
    """Nothing."""
    x = "text"
    def f(self, a):
        return a + 1
'''


@pytest.mark.parametrize(
    "file, old, new, changed",
    [
        ("kernel.py", CODE, "# a comment\n" + CODE, []),
        ("kernel.py", "Nothing", "Something", []),
        ("kernel.py", "a + 1", "a  +  1  # why", []),
        ("kernel.py", "a + 1", "a + 2", ["device"]),
        ("launch.py", "a + 1", "1 + a", ["host"]),
        ("launch.py", "text", "other", ["host"]),
    ],
    ids=["comment", "docstring", "layout", "number", "order", "text"],
)
def test_hashes_follow_the_code_and_not_its_comments(tmp_path, monkeypatch, file, old, new, changed):
    monkeypatch.setattr(store, "NF4", tmp_path)
    for name in ("kernel.py", "launch.py"):
        (tmp_path / name).write_text(CODE)
    before = store.hashes()
    (tmp_path / file).write_text(CODE.replace(old, new))
    after = store.hashes()
    assert [part for part in before if before[part] != after[part]] == changed


@pytest.mark.parametrize("card", CARDS)
def test_stored_rows_are_sound(card):
    assert (store.folder(card) / "rows.csv").read_text().startswith(",".join(store.HEADER))
    rows, meta = store.rows(card), store.meta(card)
    assert {row.section for row in rows} == set(meta["sections"])
    assert len({(row.section, row.case, row.contender, row.unit) for row in rows}) == len(rows), "a row twice"
    assert all(math.isfinite(value) for row in rows for value in row.values)
    for section in meta["sections"].values():
        assert set(section) == {"date", "device", "host", "note"}


def test_stored_results_are_small():
    files = [path for path in (store.ROOT / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 300_000
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in files) <= 1_500
