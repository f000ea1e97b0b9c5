"""Blocks of README, docs and notebook: what they hold, and whether the pages are up to date."""

import re

import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store

PAGES = [store.ROOT / "README.md", *sorted((store.ROOT / "docs").glob("*.md")), pages.NOTEBOOK]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]


IMAGES = dict.fromkeys([*plots.PICTURES, "idea"], b"png")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_is_up_to_date(path, stored):
    now = re.sub("base64,[^)]*", "base64,cG5n", path.read_text(encoding="utf-8"))
    assert pages.filled(path, stored, IMAGES) == now, "run `python -m helpers draw`"


def test_what_has_no_rows_is_not_measured_yet():
    assert pages.table([], "experts") == "Not measured yet."


def test_blocks_are_filled(stored, tmp_path):
    page = tmp_path / "page.md"
    figure = "<!-- figure idea -->\n![](data:image/png;base64,old)\n<!-- /figure idea -->\nAfter.\n"
    page.write_text(f"Before.\n<!-- claim -->\nold\n<!-- /claim -->\n{figure}")
    text = pages.filled(page, stored, IMAGES)
    assert text.startswith("Before.\n<!-- claim -->\n| card ") and "old" not in text
    assert text.endswith(figure.replace("old", "cG5n"))
    page.write_text("<!-- no such block -->\n<!-- /no such block -->")
    with pytest.raises(KeyError, match="no such block"):
        pages.filled(page, stored, IMAGES)


@pytest.mark.parametrize("path", [*PAGES[:-1], store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)
