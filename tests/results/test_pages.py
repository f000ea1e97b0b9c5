"""Blocks of README, docs and notebook, and the files people send. Whether the pages are up to date."""

import base64
import json
import re

import nbformat
import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store
from helpers.results.store import Row

DOCS = sorted((store.ROOT / "docs").glob("*.md"))
PAGES = [store.ROOT / "README.md", *DOCS]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*.py")]
SENT = {
    "environment": {
        "card": "Tesla T4",
        "driver": "535",
        "cuda": "12.8",
        "versions": {"torch": "2.11"},
        "date": "2026-12-01T08:00:00+00:00",
        "forced": None,
    },
    "kernel": None,
    "rows": [
        *(["protocol", "total", who, "s", [s]] for who, s in (("ours", 2.9), ("unsloth_today", 3.4))),
        *(["score", "total", column, "x", [x]] for column, x in (("today", 1.17), ("classic", 1.4))),
        *(["score", "One fused kernel", column, "points", [3]] for column in ("today", "classic")),
    ],
}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A folder whose `results` is a copy of the stored one, without a T4's."""
    stored = {card: (store.rows(card), store.meta(card)) for card in (plots.CARD, plots.T4)}
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    for card, (rows, meta) in stored.items():
        store.save(card, rows, meta)
    return tmp_path


@pytest.mark.parametrize("path", [*PAGES, pages.NOTEBOOK], ids=lambda path: path.name)
def test_page_is_up_to_date(path):
    assert pages.draw_page(path, check=True), "run `python -m helpers draw`"


def test_pivot_leaves_a_gap_where_nothing_was_measured():
    rows = [
        Row("", case, who, "us", (us,))
        for case, who, us in (("a", "ours", 1), ("b", "ours", 2), ("b", "peft", 3))
    ]
    lines = ["| us | this kernel | PEFT |", "| --- | --- | --- |", "| a | 1.0 | - |", "| b | 2.0 | 3.0 |"]
    assert pages.pivot("us", rows) == "\n".join(lines)


def test_a_page_is_filled_and_then_up_to_date(copied, monkeypatch):
    monkeypatch.setattr(pages, "FIGURES", copied)
    path = copied / "page.md"
    blocks = "<!-- claim -->\nold\n<!-- /claim -->\n<!-- figure t4 -->\n<!-- /figure t4 -->"
    path.write_text(f"Before.\n{blocks}\nAfter.\n")
    assert not pages.draw_page(path, check=True) and "old" in path.read_text()
    assert not pages.draw_page(path, check=False)
    assert pages.draw_page(path, check=True)
    text = path.read_text()
    assert "Before.\n<!-- claim -->\n14 of 14" in text and "](t4.png)\n<!-- /figure t4 -->\nAfter." in text
    (copied / "t4.png").unlink()
    assert not pages.draw_page(path, check=True), "its picture is missing"


def test_a_notebook_holds_its_pictures(copied):
    path = copied / "book.ipynb"
    cells = [
        nbformat.v4.new_markdown_cell("<!-- figure t4 -->\n<!-- /figure t4 -->"),
        nbformat.v4.new_code_cell("1"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert not pages.draw_page(path, check=False) and pages.draw_page(path, check=True)
    (coded,) = re.findall(
        r"\(data:image/png;base64,(.+)\)", nbformat.read(path, as_version=4).cells[0].source
    )
    assert base64.b64decode(coded).startswith(b"\x89PNG")
    rows = [row for row in store.rows(plots.T4) if row.case != "total"]
    rows += [Row("t4_prediction", "total", who, "s", (9, 10)) for who in ("ours", *pages.BASELINES.values())]
    store.save(plots.T4, rows, store.meta(plots.T4))
    assert not pages.draw_page(path, check=True), "other numbers, so another picture"


@pytest.mark.parametrize("name", ["no_such_block", "figure no_such_picture"])
def test_an_unknown_block_is_an_error(name):
    with pytest.raises(KeyError, match=name):
        pages.render(f"<!-- {name} -->\n<!-- /{name} -->", lambda name, picture: "")


def test_a_missing_row_is_an_error_and_a_missing_section_not_measured(copied):
    rows = [row for row in store.rows(plots.CARD) if row.section not in ("score", "launch_forms")]
    store.save(plots.CARD, rows, store.meta(plots.CARD))
    with pytest.raises(KeyError, match="0 rows"):
        pages.claim()
    assert pages.launch_forms().startswith("Not measured yet (needs ")


def test_results_of_an_earlier_kernel_are_named(copied):
    meta, now = store.meta(plots.CARD), store.hashes()
    for name, section in meta["sections"].items():
        section.update(now | ({"host": "old"} if name in ("gpu_time", "soak", "compiled") else {}))
        section.update({"device": "old"} if name in ("fuzz", "training") else {})
    store.save(plots.CARD, store.rows(plots.CARD), meta)
    assert pages.stale(plots.CARD) == {
        "compiled": "launch path", "training": "kernel", "fuzz": "kernel", "soak": "launch path"
    }  # fmt: skip
    assert pages.environment().endswith("Measured with an earlier version of this code: compiled, training.")
    on_cpu = [store.Row("seeded_bugs", "cpu", who, "count", (2,)) for who in ("seeded", "caught")]
    store.save("cpu", on_cpu, {})
    assert "These ran (random layers) with an earlier version of the kernel." in pages.evidence()


def test_a_sent_result_is_filed_and_shown(copied):
    assert pages.t4_claim().startswith("Predicted on a Tesla T4: ") and "measured" not in pages.t4()
    path = copied / "nf4_tesla-t4.json"
    path.write_text(json.dumps(SENT))
    assert pages.file_result(path) == store.folder("tesla-t4")
    section = store.meta("tesla-t4")["sections"]["protocol"]
    assert section == {"date": "2026-12-01", "device": None, "host": None, "note": ""}, "not this kernel"
    claim = "1.17 times as fast as Unsloth today (3 of 14 points)"
    assert pages.t4_claim().startswith(f"Measured on a Tesla T4: {claim}")
    assert "| measured, s |" in pages.t4() and "| 2.90 |" in pages.t4()


def test_draw_command(monkeypatch, capsys):
    monkeypatch.setattr(pages, "draw", lambda check: ["README.md"])
    assert (pages.main(["--check"]), pages.main([])) == (1, 0)
    assert capsys.readouterr().out == "out of date: README.md\nupdated: README.md\n"
    monkeypatch.setattr(pages, "draw", lambda check: [])
    assert pages.main(["--check"]) == 0


@pytest.mark.parametrize("path", [*PAGES, store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)


def test_docs_stay_short():
    words = rows = 0
    for path in DOCS:
        text = re.sub(
            r"```.*?```|<!--.*?-->|!\[.*?\]\(.*?\)", "", path.read_text(encoding="utf-8"), flags=re.S
        )
        lines = text.splitlines()
        words += sum(len(line.split()) for line in lines if not line.startswith("|"))
        rows += sum(line.startswith("|") - 2 * line.startswith("| ---") for line in lines)
    assert words <= 2_700 and rows <= 90
