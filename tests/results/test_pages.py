"""Blocks of README, docs and notebook: what they say, and whether the pages are up to date."""

import re

import nbformat
import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store

DOCS = sorted((store.ROOT / "docs").glob("*.md"))
PAGES = [store.ROOT / "README.md", *DOCS]
TESTS = [str(path.relative_to(store.ROOT)) for path in store.ROOT.glob("tests/**/*")]


OLD_CODE = re.compile(r" \(earlier code\)| Measured with an earlier version of this code: [\w, ]+\.")


@pytest.mark.parametrize("path", [*PAGES, pages.NOTEBOOK], ids=lambda path: path.name)
def test_page_is_up_to_date(path, monkeypatch):
    """But for what is marked as measured with earlier code: a change of the code fails no test."""
    monkeypatch.setattr(plots, "save", lambda figure, alt, file: None)
    now, stored = pages.filled(path), path.read_text(encoding="utf-8")
    assert OLD_CODE.sub("", now) == OLD_CODE.sub("", stored), "run `python -m helpers draw`"


def test_every_block_is_shown_somewhere():
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, pages.NOTEBOOK)]
    shown = {
        name.removeprefix("figure ") for text in texts for name in re.findall(r"<!-- ([\w ]+) -->", text)
    }
    assert shown == pages.BLOCKS.keys() | plots.PICTURES.keys()


def test_a_page_and_a_notebook_are_filled(stored):
    block = "<!-- claim -->\nold\n<!-- /claim -->\n<!-- figure t4 -->\n<!-- /figure t4 -->"
    page = stored / "page.md"
    page.write_text(f"Before.\n{block}\nAfter.\n")
    text = pages.filled(page)
    assert text.startswith("Before.\n<!-- claim -->\n3 of 14 points in 3 runs of the puzzle's benchmark on ")
    assert "](t4.png)\n<!-- /figure t4 -->\nAfter." in text and (stored / "t4.png").exists()
    book = stored / "book.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(block)]), book)
    assert "](data:image/png;base64," in pages.filled(book)


@pytest.mark.parametrize("name", [*pages.BLOCKS, *(name for name in plots.PICTURES if name != "idea")])
def test_a_block_or_a_picture_without_rows_says_so(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    assert "Not measured yet." in pages.body(name, tmp_path)


def test_results_of_an_earlier_version_are_named(stored):
    meta = store.meta(plots.CARD)
    meta["sections"]["gpu_time"]["launch"] = "old"  # it depends on the kernel only
    meta["sections"]["soak"]["launch"] = "old"
    meta["sections"]["training"]["kernel"] = "old"
    store.save(plots.CARD, [], meta)
    marked = re.findall(r"(\w+) \(earlier code\)", pages.provenance())
    assert marked == ["training", "soak"]
    assert (
        pages.stale(plots.CARD, "soak", "training")
        == " Measured with an earlier version of this code: soak, training."
    )
    assert pages.stale(plots.CARD, "protocol", "score") == pages.stale(plots.T4, "published") == ""


def test_both_halves_of_the_win(stored):
    text = pages.halves()
    assert "moves 2.11 to 7.39 TB/s" in text and "Unsloth's 2.01 to 7.03.\n" in text
    assert "takes 0.500 s" in text and "after 18.0 us. This one returns after 13.9 us" in text


def test_a_step_within_noise_says_so(stored):
    """Also where the interval is shown from 1.00."""
    for low, high, noise in ((1.049, 1.3, ""), (1.008, 1.11, ", within noise"), (0.9, 0.95, "")):
        row = store.Row("training", "PEFT, 128 tokens", "speedup", "x", (low, (low + high) / 2, high))
        assert pages.shown(row).endswith(f"{plots.extent(row.values)}){noise}")


def test_what_a_t4_measures_replaces_the_prediction(stored):
    assert "| Unsloth today | 1.09 to 1.23 times (10 to 14 points) |" in pages.t4_claim()
    store.save("tesla-t4", store.rows(plots.CARD), {"card": "Tesla T4"})
    assert pages.t4_claim().startswith("3 of 14 points in 3 runs of the puzzle's benchmark on one Tesla")


def test_draw_refuses_what_is_no_file(tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        pages.main([str(tmp_path)])
    assert "is not a result file of the notebook: IsADirectoryError" in capsys.readouterr().err


@pytest.mark.parametrize("path", [*PAGES, store.ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", re.sub(r"`.*?`", "", text))
    assert not [link for link in links if not (path.parent / link).exists()]
    tests = re.findall(r"\btests/[\w/.]*\w|\btest_\w+\.py", text)
    assert not [name for name in tests if not any(name in test for test in TESTS)]
    assert set(re.findall(r"python -m helpers ([a-z][\w-]*)", text)) <= set(commands.COMMANDS)
