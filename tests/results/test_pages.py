"""Blocks of README, docs and notebook: what they say, and whether the pages are up to date."""

import re

import nbformat
import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store

DOCS = sorted((store.ROOT / "docs").glob("*.md"))
PAGES = [store.ROOT / "README.md", *DOCS]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]


@pytest.mark.parametrize("path", [*PAGES, pages.NOTEBOOK], ids=lambda path: path.name)
def test_page_is_up_to_date(path, monkeypatch):
    monkeypatch.setattr(plots, "save", lambda figure, file: None)
    assert pages.filled(path) == path.read_text(encoding="utf-8"), "run `python -m helpers draw`"


def test_a_table_leaves_a_gap_where_nothing_was_measured():
    cells = {("a", "ours"): "1", ("b", "ours"): "2", ("b", "peft_eager"): "3"}
    lines = ["| us | this kernel | PEFT, eager |", "| --- | --- | --- |", "| a | 1 | - |", "| b | 2 | 3 |"]
    assert pages.table("us", cells) == "\n".join(lines)


def test_a_page_and_a_notebook_are_filled(stored):
    block = "<!-- claim -->\nold\n<!-- /claim -->\n<!-- figure t4 -->\n<!-- /figure t4 -->"
    page = stored / "page.md"
    page.write_text(f"Before.\n{block}\nAfter.\n")
    text = pages.filled(page)
    assert text.startswith(
        "Before.\n<!-- claim -->\nMeasured on one NVIDIA H200: 3 of 14 points; 1.57 times "
    )
    assert "(median of 3 runs, 1.50 to 1.60). With contenders alternating, medians give 1.05 times " in text
    assert "](t4.png)\n<!-- /figure t4 -->\nAfter." in text and (stored / "t4.png").exists()
    book = stored / "book.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(block)]), book)
    assert "](data:image/png;base64," in pages.filled(book)


@pytest.mark.parametrize("name", [name for name in pages.BLOCKS if name != "environment"])
def test_a_block_without_rows_says_so(stored, name):
    store.save(plots.CARD, [], {})
    store.save(plots.T4, [], {})
    assert "Not measured yet." in pages.body(name, stored)


def test_results_of_an_earlier_version_are_named(stored):
    meta = store.meta(plots.CARD)
    meta["sections"]["gpu_time"]["launch"] = "old"  # it depends on the kernel only
    meta["sections"]["soak"]["launch"] = "old"
    meta["sections"]["training"]["kernel"] = "old"
    store.save(plots.CARD, [], meta)
    assert pages.environment().endswith("Measured with an earlier version of this code: soak, training.")
    assert pages.stale("protocol", "score") == ""


def test_what_a_t4_measures_replaces_the_prediction(stored):
    assert pages.t4_claim().startswith("Predicted ")
    store.save("tesla-t4", store.rows(plots.CARD), {"card": "Tesla T4"})
    assert pages.t4_claim().startswith("Measured on one Tesla T4: 3 of 14 points; 1.57 times ")
    assert "| seconds, Tesla T4 | speedup of this kernel, Tesla T4 |" in pages.BLOCKS["protocol"]()


def test_draw_refuses_what_is_no_file(tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        pages.main([str(tmp_path)])
    assert capsys.readouterr().err.endswith("is not a result file of the notebook: Is a directory\n")


@pytest.mark.parametrize("path", [*PAGES, store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)


def test_docs_stay_short():
    words = 0
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"```.*?```|<!--.*?-->|!\[.*?\]\(.*?\)", "", text, flags=re.S)
        words += len(re.sub(r"^\|.*", "", text, flags=re.M).split())
    assert words <= 3_200
