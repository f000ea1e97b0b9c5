"""Blocks of README, docs and notebook: what they hold, and whether the pages are up to date."""

import re

import nbformat
import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store
from helpers.results.plots import H200
from helpers.results.store import Row

PAGES = [store.ROOT / "README.md", *sorted((store.ROOT / "docs").glob("*.md")), pages.NOTEBOOK]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]


def cells(text):
    """Return a Markdown table as lists of cells, without the line below its head."""
    lines = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()]
    return [lines[0], *lines[2:]]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_is_up_to_date(path, stored):
    drawn = pages.filled(path, stored, dict.fromkeys(plots.TEXTS, b""))
    now, then = (re.sub("base64,[^)]*", "", text) for text in (drawn, path.read_text(encoding="utf-8")))
    assert now == then, "run `python -m helpers draw`"


def test_a_cell_is_a_median_with_its_range_and_a_column_has_even_digits():
    rows = [
        Row("training", "PEFT", "with", "ms", (9.87, 10.2, 10.04)),
        Row("training", "PEFT", "speedup", "x", (1.049, 1.0999, 1.2)),
        Row("training", "Unsloth", "with", "ms", [1153]),
    ]
    expected = [["ms, x", "with", "speedup"], ["PEFT", "10.0 (9.9 to 10.2)", "1.09 (1.04 to 1.20)"]]
    table = pages.table({H200: rows}, "training", [H200])
    assert cells(table) == [*expected, ["Unsloth", "1,153.0", "-"]]
    assert pages.table({H200: rows}, "experts", [H200]) == "Not measured yet."


def test_the_longer_side_goes_down_and_cards_are_named():
    rows = [Row("protocol", "total", who, "s", (0.25, 0.5)) for who in ("ours", "unsloth_today", "peft")]
    table = pages.table({H200: rows, pages.H100: rows[:1]}, "protocol", [H200, pages.H100])
    expected = [["s", "seconds, H200", "seconds, H100"], ["this kernel", "0.25 to 0.50", "0.25 to 0.50"]]
    assert cells(table)[:2] == expected and cells(table)[3] == ["PEFT", "0.25 to 0.50", "-"]


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
