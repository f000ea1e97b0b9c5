"""Rows and meta.json: written, replaced, read, selected; the two hashes; files that people send."""

import json
import math

import pytest

from helpers.results import store
from helpers.results.store import Row, one

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
        ["protocol", "puzzle's line", "unsloth_classic", "x", [1.3]],
        *(["protocol", "total", who, "s", [3.5]] for who in ("ours", "unsloth_today")),
        ["score", "Penalty: speedup at most 1.00", "today", "points", [0]],
    ],
}
FACTS = {name: SENT["environment"][name] for name in store.FACTS}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, request):
    if not request.node.name.startswith("test_stored"):
        monkeypatch.setenv("NF4_RESULTS", str(tmp_path))


def test_a_section_is_replaced_and_the_others_stay():
    kept = Row("gpu_time", '4096 bf16, "odd"', "ours", "us", (1, 2.5, 0.30000123, 124664700))
    old = Row("protocol", "total", "peft", "s", [1])
    new = Row("protocol", "total", "ours", "s", (0.3, 0.31))
    store.write("gpu_time", [kept], environment=NVIDIA)
    store.write("protocol", [old], environment=NVIDIA, note="first")
    store.write("protocol", [new], environment=NVIDIA)
    assert store.rows("nvidia-h200") == [kept, new]
    meta = store.meta("nvidia-h200")
    assert meta["card"] == "NVIDIA H200"
    stamp = {"date": "2026-11-22", "commit": store.commit(), **store.hashes(), "note": ""}
    assert meta["sections"]["protocol"] == stamp | {name: NVIDIA[name] for name in store.FACTS}


def test_folder_of_a_machine():
    assert store.slug(NVIDIA | {"card": None}) == "cpu"
    assert store.slug(NVIDIA | {"card": "../NVIDIA"}) == "nvidia"
    assert store.slug(NVIDIA | {"forced": "t4"}) == "nvidia-h200-forced-t4"


def test_one_of_two_rows_is_not_guessed():
    rows = [Row("a", "x", who, "us", [2]) for who in ("ours", "peft")]
    with pytest.raises(KeyError, match="2 rows for .*x"):
        one(rows, case="x")


# --- files that people send ---


def test_a_sent_file_keeps_its_hashes_and_replaces_its_sections_alone(tmp_path):
    path = tmp_path / "nf4_tesla-t4.json"
    path.write_text(json.dumps(SENT))
    other = Row("ordinary_launches", "total", "ordinary", "s", [1])
    store.write("ordinary_launches", [other], environment=SENT["environment"])
    with pytest.raises(ValueError, match="holds results already; add --replace"):
        store.file_result(path)
    assert store.rows("tesla-t4") == [other], "nothing changes"
    assert store.file_result(path, replace=True) == store.folder("tesla-t4")
    rows = store.rows("tesla-t4")
    assert one(rows, "protocol", "puzzle's line", "unsloth_today").values == (1.17, 1.16, 1.18)
    assert other in rows
    section = store.meta("tesla-t4")["sections"]["protocol"]
    assert section == {"date": "2026-11-22", "commit": None, **SENT["kernel"], **FACTS, "note": ""}


def sent(card="Tesla T4", forced=None, row=None, values=None, **changes):
    """Return the text of a sent file with something changed."""
    content = json.loads(json.dumps(SENT | changes))
    content["environment"] |= {"card": card, "forced": forced}
    if row:
        content["rows"].append(row)
    if values:
        content["rows"][2][4] = values
    return json.dumps(content)


BAD_FILES = {
    "": "JSONDecodeError",
    '{"environment": {': "JSONDecodeError",
    "[]": "TypeError",
    "[" * 10_000: "RecursionError",
    sent(card=None): "TypeError",
    sent(card="<script>"): "'<script>' is not a short plain text",
    sent(card="a\nb"): "is not a short plain text",
    sent(card="<!-- claim -->"): "is not a short plain text",
    sent(forced="/../../../home/x"): "is not a short plain text",
    sent(kernel={"kernel": "0123456789ab"}): "KeyError: 'launch'",
    sent(rows=SENT["rows"][:1]): "rows are missing: .*'ours'",
    sent(rows=[["protocol"]]): "TypeError",
    sent(row=["protocol", "total", "<b>", "s", [1]]): "'<b>' is not a short plain text",
    sent(row=["protocol", "total", "peft", "s", []]): "values",
    sent(row=["score", "One fused kernel", "today", "points", ["three"]]): "ValueError",
    sent(values=[0]): "values",
    sent(values=[math.nan]): "values",
    sent(values=[math.inf]): "values",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_any_other_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "sent.json"
    path.write_text(content)
    problem = BAD_FILES[content]
    with pytest.raises(ValueError, match=f"^{path} is not a result file of the notebook: .*{problem}[^\n]*$"):
        store.file_result(path)
    assert [place.name for place in tmp_path.iterdir()] == ["sent.json"], "nothing is stored"


# --- which code a row measured ---

CODE = '''"""Nothing."""
# %% id="f"
def f(self, a):
    """Nothing."""
    return a + 1
'''


@pytest.mark.parametrize(
    "old, new, same",
    [
        (CODE, "# a comment\n" + CODE, True),
        ("Nothing", "Something", True),
        ("a + 1", "(a  +\n 1)  # why", True),
        ("a + 1", "a + 2", False),
        ("a + 1", "1 + a", False),
    ],
    ids=["comment", "docstring", "layout", "number", "order"],
)
def test_a_hash_follows_the_code_and_not_its_comments(old, new, same):
    assert (store.code_hash(CODE.replace(old, new)) == store.code_hash(CODE)) == same


# --- what results/ holds ---


@pytest.mark.parametrize("card", CARDS)
def test_stored_rows_are_sound(card):
    rows, meta = store.rows(card), store.meta(card)
    assert {row.section for row in rows} == set(meta["sections"])
    assert len({(row.section, row.case, row.contender, row.unit) for row in rows}) == len(rows), "a row twice"
    assert all(math.isfinite(value) for row in rows for value in row.values)
    for section in meta["sections"].values():
        assert set(section) == {"date", "commit", "kernel", "launch", "note", *store.FACTS}
