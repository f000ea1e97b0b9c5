"""Blocks of README, docs and notebook: what they say, and whether the pages are up to date."""

import re

import nbformat
import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store
from helpers.results.store import Row

DOCS = sorted((store.ROOT / "docs").glob("*.md"))
PAGES = [store.ROOT / "README.md", *DOCS]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*.py")]
LINE = ("protocol", "puzzle's line", "unsloth_today", "x")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A folder whose `results` is a copy of the stored one with a measured line, without a T4's."""
    stored = {card: (store.rows(card), store.meta(card)) for card in (plots.CARD, plots.T4)}
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(pages, "FIGURES", tmp_path)
    for card, (rows, meta) in stored.items():
        rows = [row for row in rows if row.case != "puzzle's line"]
        store.save(card, [*rows, Row(*LINE, (1.579, 1.5, 1.6))], meta)
    return tmp_path


@pytest.mark.parametrize("path", [*PAGES, pages.NOTEBOOK], ids=lambda path: path.name)
def test_page_is_up_to_date(path, monkeypatch):
    monkeypatch.setattr(plots, "save", lambda figure, file: None)
    assert pages.filled(path) == path.read_text(encoding="utf-8"), "run `python -m helpers draw`"


def test_a_table_leaves_a_gap_where_nothing_was_measured():
    cells = {("a", "ours"): "1", ("b", "ours"): "2", ("b", "peft_eager"): "3"}
    lines = ["| us | this kernel | PEFT, eager |", "| --- | --- | --- |", "| a | 1 | - |", "| b | 2 | 3 |"]
    assert pages.table("us", cells) == "\n".join(lines)


def test_a_page_and_a_notebook_are_filled(copied):
    block = "<!-- claim -->\nold\n<!-- /claim -->\n<!-- figure t4 -->\n<!-- /figure t4 -->"
    page, book = copied / "page.md", copied / "book.ipynb"
    page.write_text(f"Before.\n{block}\nAfter.\n")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(block)]), book)
    text = pages.filled(page)
    assert "1.57 times the speed" in text and "(median of 3 runs, 1.50 to 1.60)" in text
    assert text.startswith("Before.\n") and "](t4.png)\n<!-- /figure t4 -->\nAfter." in text
    assert (copied / "t4.png").exists() and "](data:image/png;base64," in pages.filled(book)


@pytest.mark.parametrize("name", pages.BLOCKS)
def test_a_block_without_rows_says_so(copied, name):
    store.save(plots.CARD, [], store.meta(plots.CARD))
    store.save(plots.T4, [], {})
    text = pages.body(name, copied / "page.md")
    assert text == "Not measured yet." or name == "environment"


def test_an_unknown_block_is_an_error(copied):
    with pytest.raises(KeyError, match="no_such_block"):
        pages.body("no_such_block", copied)


def test_results_of_an_earlier_version_are_named(copied):
    meta, now = store.meta(plots.CARD), store.hashes()
    for name in meta["sections"]:
        meta["sections"][name] |= now
    meta["sections"]["gpu_time"]["launch"] = meta["sections"]["soak"]["launch"] = "old"
    meta["sections"]["training"]["kernel"] = "old"
    store.save(plots.CARD, store.rows(plots.CARD), meta)
    store.save(plots.T4, store.rows(plots.T4), {})
    assert pages.environment().endswith("Measured with an earlier version of this code: soak, training.")


def test_measured_speed_of_a_t4_replaces_the_prediction(copied):
    assert pages.t4_claim().startswith("Predicted ")
    rows = [Row(*LINE, (1.177,)), Row("score", "One fused kernel", "today", "points", (3,))]
    rows += [Row("protocol", "total", who, "s", (s,)) for who, s in (("ours", 2), ("unsloth_classic", 3))]
    store.save("tesla-t4", rows, {"card": "Tesla T4"})
    assert pages.t4_claim().startswith("Measured on one Tesla T4: 3 of 14 points; 1.17 times ")
    assert "| seconds, Tesla T4 | speedup, Tesla T4 |" in pages.BLOCKS["protocol"]()


def test_draw_names_a_file_that_is_no_result(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        pages.main([str(tmp_path)])
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.endswith("is not a result file of the notebook: Is a directory\n")


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
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"```.*?```|<!--.*?-->|!\[.*?\]\(.*?\)", "", text, flags=re.S)
        lines = text.splitlines()
        words += sum(len(line.split()) for line in lines if not line.startswith("|"))
        rows += sum(line.startswith("|") - 2 * line.startswith("| ---") for line in lines)
    assert words <= 3_200 and rows <= 130
