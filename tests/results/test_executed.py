"""The executed notebook that people send: its rows are stored, or one line says what is wrong."""

import json
import os
import re
from unittest.mock import Mock

import nbformat
import pytest

from helpers.results import executed, pages, store

LINE = """{"environment":
{"card":"Tesla T4","capability":[7,5],"date":"2026-11-22","forced":null,"commit":"theirs","more":0},"rows":[
["protocol","total","ours","s",[3.5]],
["protocol","total","bitsandbytes","s",[4]],
["protocol","puzzle's line","unsloth_today","x",[1.17,1.16,1.18]],
["protocol","puzzle's line","unsloth_classic","x",[1.3]],
["score","One criterion","today","points",[2]]]}""".replace("\n", "")
CODE = LINE  # has the names in quotes, as the code that prints them


@pytest.fixture
def draw(folder, monkeypatch):
    """Draw with an executed copy of a notebook of one cell; the only page is the claim."""
    monkeypatch.setattr(executed, "NOTEBOOK", folder / "own.ipynb")
    monkeypatch.setattr(pages, "draw", lambda stored: {folder / "page": pages.claim(stored)})

    def write(path, source, outputs):
        ran, empty = nbformat.v4.new_code_cell(source, outputs=outputs), nbformat.v4.new_code_cell("")
        nbformat.write(nbformat.v4.new_notebook(cells=[ran, empty]), path)  # Colab adds an empty one

    def run(line, *options, source=CODE):
        path = folder / "sent.ipynb"
        write(path, source, [nbformat.v4.new_output("stream", text=f"a\n{line}\n")])
        return pages.main([str(path), *options])

    write(executed.NOTEBOOK, CODE, [])
    return run


def test_its_rows_are_stored_and_drawn(draw, folder):
    assert draw(LINE) == draw(LINE) == 0  # the second replaces the first
    environment, rows = store.records("tesla-t4")["notebook"]
    assert json.loads(json.dumps(rows)) == json.loads(LINE)["rows"]
    page = (folder / "page").read_text()
    assert re.search("Tesla T4 .* 2 .* 1.17x .* 1.30x .* 1.14x ", page) and "predicted" not in page
    assert environment["commit"] == store.commit() and "more" not in environment


def test_another_version_is_named(draw):
    with pytest.raises(SystemExit, match="code cell 1 .x = 1. was edited"):
        draw(LINE, source="x = 1")
    assert draw(LINE, "--commit", "v1", source="x = 1") == 0
    assert store.records("tesla-t4")["notebook"].environment["commit"] == "v1"


@pytest.mark.parametrize(
    "problem, right, wrong",
    [
        ("capability is .9, 0., expected .7, 5. of Tesla T4", "[7,5]", "[9,0]"),
        ("AttributeError: 'list'", '"Tesla T4"', '["Tesla T4"]'),
        ("unknown name or wrong unit", '"ours","s"', '"ours","x"'),
        ("unknown name or wrong unit", '"ours"', '"mine"'),
        ("a row stands twice", '"bitsandbytes"', '"ours"'),
        ("of 0.01 to 3600 s", "[3.5]", "[0]"),
        ("of 0.01 to 3600 s", "[3.5]", "[-3]"),
        ("of 0.01 to 3600 s", "[3.5]", "[NaN]"),
        ("of 0.01 to 3600 s", "[3.5]", "[]"),
        ("of 0.01 to 3600 s", "[3.5]", f"[1{400 * '0'}]"),
        ("of 0.01 to 100 x", "[1.3]", "[1e300]"),
        ("of -3 to 3 points", "[2]", "[900000]"),
        ("RecursionError", "[2]", 100_000 * "["),
        ("0 rows for .*'total', 'ours'", '"ours"', '"today"'),  # what the claim needs
        ("0 lines of rows, expected 1: run all its cells", "environment", "other"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(draw, folder, problem, right, wrong):
    with pytest.raises(SystemExit, match=f"^.*{problem}.*$"):
        draw(LINE.replace(right, wrong))
    assert not (folder / "page").exists() and "tesla-t4" not in store.cards()


def test_a_full_disk_leaves_what_was_there(draw, monkeypatch):
    draw(LINE)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SystemExit, match="^OSError: .*No space left on device: .*tesla-t4/notebook.jsonl"):
        draw(LINE)
    assert store.rows("tesla-t4")


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"nbformat": 4}', b"PK\x03\x04\xff", b"", b"[" * 10**5])
def test_a_file_that_is_no_notebook_is_refused_in_one_line(draw, tmp_path, content):
    (tmp_path / "sent.ipynb").write_bytes(content)
    with pytest.raises(SystemExit, match=r"^\w+Error: [^\n]+$"):
        pages.main([str(tmp_path / "sent.ipynb")])
