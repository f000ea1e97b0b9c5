"""Blocks of README, docs and notebook: what they hold, and whether the pages are up to date."""

import re

import nbformat
import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store

PAGES = [store.ROOT / "README.md", *sorted((store.ROOT / "docs").glob("*.md")), pages.NOTEBOOK]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_is_up_to_date(path, stored):
    drawn = pages.filled(path, stored, dict.fromkeys(plots.TEXTS, b""))
    now, then = (re.sub("base64,[^)]*", "", text) for text in (drawn, path.read_text(encoding="utf-8")))
    assert now == then, "run `python -m helpers draw`"


def test_what_has_no_rows_is_not_measured_yet():
    assert pages.table({}, "experts", [pages.H200]) == "Not measured yet."


def test_a_page_and_a_notebook_are_filled(stored, tmp_path):
    block = "<!-- claim -->\nold\n<!-- /claim -->\n<!-- figure protocol -->\n<!-- /figure protocol -->"
    page, book = tmp_path / "page.md", tmp_path / "book.ipynb"
    page.write_text(f"Before.\n{block}\nAfter.\n")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(block)]), book)
    images = {"protocol": b"png"}
    text = pages.filled(page, stored, images)
    assert text.startswith("Before.\n<!-- claim -->\n| speedup ") and "old" not in text
    assert re.search(r"!\[Bars: .*]\(.*/protocol.png\)\n<!-- /figure protocol -->\nAfter.\n$", text)
    assert "](data:image/png;base64,cG5n)" in pages.filled(book, stored, images)
    page.write_text(block.replace("claim", "no such block"))
    with pytest.raises(KeyError, match="no such block"):
        pages.filled(page, stored, images)


@pytest.mark.parametrize("path", [*PAGES[:-1], store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)
