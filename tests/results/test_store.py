"""Rows and meta.json: written, replaced, read, selected; the two hashes; files that people send."""

import json
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
SENT = {
    "environment": NVIDIA | {"card": "Tesla T4"},
    "kernel": {"kernel": "0123456789ab", "launch": "ba9876543210"},
    "rows": [
        ["protocol", "puzzle's line", "unsloth_today", "x", [1.17, 1.16, 1.18]],
        ["score", "One fused kernel", "today", "points", [3]],
    ],
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, request):
    if "stored" not in request.node.name:
        monkeypatch.setenv("NF4_RESULTS", str(tmp_path))


def rows_of(section, *values):
    return [Row(section, "total", "ours", "s", values)]


def test_a_section_is_replaced_and_the_others_stay():
    kept = Row("gpu_time", '4096 bf16, "odd"', "ours", "us", (1, 2.5, 0.30000123, 124664700))
    store.write("gpu_time", [kept], environment=NVIDIA)
    store.write("protocol", rows_of("protocol", 1.0), environment=NVIDIA, note="first")
    folder = store.write("protocol", rows_of("protocol", 0.3, 0.31), environment=NVIDIA)
    assert folder.name == "nvidia-h200"
    rows = store.rows("nvidia-h200")
    assert rows == [kept, *rows_of("protocol", 0.3, 0.31)]
    meta = store.meta("nvidia-h200")
    assert (meta["card"], meta["versions"]) == ("NVIDIA H200", {"torch": "2.11"})
    assert meta["sections"]["protocol"] == {"date": "2026-11-22", **store.hashes(), "note": ""}


@pytest.mark.parametrize(
    "change, name",
    [
        ({}, "nvidia-h200"),
        ({"card": None}, "cpu"),
        ({"forced": "t4"}, "nvidia-h200-forced-t4"),
        ({"card": "../NVIDIA"}, "nvidia"),
    ],
)
def test_folder_of_a_machine(change, name):
    assert store.slug(NVIDIA | change) == name


def test_select_and_one():
    rows = [Row("a", "x", who, "us", (2.0, 9.0, 1.0)) for who in ("ours", "peft")]
    assert select(rows, case="x") == rows and select(rows, "b") == []
    row = one(rows, "a", contender="peft")
    assert (row.median, row.low, row.high) == (2.0, 1.0, 9.0)
    with pytest.raises(KeyError, match="0 rows for .*nobody"):
        one(rows, "a", contender="nobody")
    with pytest.raises(KeyError, match="2 rows for .*x"):
        one(rows, case="x")


# --- files that people send ---


def test_a_sent_file_is_stored_with_its_hashes(tmp_path):
    path = tmp_path / "nf4_tesla-t4.json"
    path.write_text(json.dumps(SENT))
    assert store.file_result(path) == store.folder("tesla-t4")
    assert one(store.rows("tesla-t4"), "protocol").values == (1.17, 1.16, 1.18)
    section = store.meta("tesla-t4")["sections"]["score"]
    assert section == {"date": "2026-11-22", **SENT["kernel"], "note": ""}


@pytest.mark.parametrize(
    "content, problem",
    [
        ("", "it is not JSON"),
        ('{"environment": {', "it is not JSON"),
        ("[]", "it needs a card"),
        (json.dumps(SENT | {"environment": NVIDIA | {"card": None}}), "it needs a card"),
        (json.dumps(SENT | {"kernel": {"kernel": "0123456789ab"}}), "both hashes"),
        (json.dumps(SENT | {"rows": SENT["rows"][:1]}), "rows of protocol and score"),
        (json.dumps(SENT | {"rows": [["protocol"]]}), "rows of protocol and score"),
    ],
)
def test_any_other_file_is_refused_in_one_line(tmp_path, content, problem):
    path = tmp_path / "sent.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{path} is not a result file of the notebook: .*{problem}[^\n]*$"):
        store.file_result(path)
    assert [place.name for place in tmp_path.iterdir()] == ["sent.json"], "nothing is stored"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a result file of the notebook: No such file"):
        store.file_result(tmp_path / "missing.json")


# --- which code a row measured ---

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
        ("kernel.py", "a + 1", "a + 2", ["kernel"]),
        ("launch.py", "a + 1", "1 + a", ["launch"]),
        ("launch.py", "text", "other", ["launch"]),
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


# --- what results/ holds ---


@pytest.mark.parametrize("card", CARDS)
def test_stored_rows_are_sound(card):
    rows, meta = store.rows(card), store.meta(card)
    assert {row.section for row in rows} == set(meta["sections"])
    assert len({(row.section, row.case, row.contender, row.unit) for row in rows}) == len(rows), "a row twice"
    assert all(math.isfinite(value) for row in rows for value in row.values)
    for section in meta["sections"].values():
        assert set(section) == {"date", "kernel", "launch", "note"}


def test_stored_results_are_small():
    files = [path for path in (store.ROOT / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 300_000
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in files) <= 1_500
