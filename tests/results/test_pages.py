"""Blocks of README, docs and notebook: what they say, and whether the pages are up to date."""

import re

import nbformat
import pytest

from helpers import __main__ as commands
from helpers.results import pages, plots, store
from helpers.results.store import Row

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
        "Before.\n<!-- claim -->\n3 of 14 points in 3 runs of the puzzle's benchmark on one NVIDIA H200. "
    )
    assert (
        "was published (1.90 to 2.10). With contenders taking turns, as in the picture, it has 1.05 " in text
    )
    assert "](t4.png)\n<!-- /figure t4 -->\nAfter." in text and (stored / "t4.png").exists()
    book = stored / "book.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(block)]), book)
    assert "](data:image/png;base64," in pages.filled(book)


@pytest.mark.parametrize("name", pages.BLOCKS)
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
    marked = re.findall(r"(\w+) \(earlier code\)", pages.provenance())
    assert marked == ["training", "soak"]
    assert (
        pages.stale(plots.CARD, "soak", "training")
        == " Measured with an earlier version of this code: soak, training."
    )
    assert pages.stale(plots.CARD, "protocol", "score") == pages.stale(plots.T4, "published") == ""


def test_sections_of_other_versions_have_their_own_line(stored):
    meta = store.meta(plots.CARD)
    meta["sections"]["soak"] |= {"versions": {"torch": "2.12"}, "commit": "abc"}
    store.save(plots.CARD, [], meta)
    one, two = pages.provenance().splitlines()
    assert one.startswith("- NVIDIA H200, driver 580, CUDA 13.0, torch 2.11; 2026-11-23: protocol, ")
    assert two == "- NVIDIA H200, driver 580, CUDA 13.0, commit abc, torch 2.12; 2026-11-23: soak."


def test_both_halves_of_the_win(stored):
    text = pages.halves()
    assert "moves 2.11 to 7.39 TB/s" in text and "Unsloth's 2.01 to 7.03.\n" in text
    assert "takes 0.500 s" in text and "after 18.0 us. This one returns after 13.9 us" in text


def test_a_step_within_noise_says_so(stored):
    rows = [Row("training", "PEFT, 128 tokens", "speedup", "x", (1.049, 1.168, 1.30))]
    rows.append(Row("training", "Unsloth, 128 tokens", "speedup", "x", (0.999, 1.02, 1.04)))
    store.save(plots.CARD, rows, {})
    lines = pages.BLOCKS["training_speedup"]().splitlines()
    assert lines[0] == "| tokens per step | PEFT | Unsloth |"
    assert lines[2] == "| 128 | 1.16 (1.04 to 1.30) | 1.02 (0.99 to 1.04), within noise |"


def test_versions_of_triton_stand_side_by_side(stored):
    rows = [
        Row(f"triton {version}", "until_return", "ours", "us", [us])
        for version, us in (("3.6.0", 10), ("3.9.0", 12))
    ]
    store.save(plots.CARD, rows, {})
    lines = pages.BLOCKS["triton"]().splitlines()
    assert lines[0] == "| Triton's version | Triton 3.6.0 | Triton 3.9.0 |"
    assert lines[2] == "| until it returns, this kernel, us | 10 | 12 |"


def test_the_headline_ends_with_the_second_card(stored):
    assert "80GB" not in pages.claim()
    store.save(pages.SECOND, store.rows(plots.CARD), {"card": "NVIDIA H100 80GB"})
    assert pages.claim().endswith(
        "On one NVIDIA H100 80GB: 3 of 14 points, 1.57 times the speed of Unsloth today (1.50 to 1.60), "
        "and 2.00 times that of Unsloth classic (1.90 to 2.10)."
    )


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
