"""The executed notebook that people send: its rows are stored, or one line says what is wrong."""

import json
import re

import nbformat
import pytest

from helpers import machine
from helpers.names import CRITERIA
from helpers.puzzle import notebook as book
from helpers.results import pages, store

ROWS = [
    ["protocol", "100 rounds", "ours", "s", [3.5]],
    ["protocol", "100 rounds", "bitsandbytes", "s", [4]],
    ["protocol", "100 rounds", "Unsloth's kernel, kept launch", "s", [3.6]],
    ["protocol", "until return", "ours", "us", [9.5]],
    ["protocol", "puzzle's line", "unsloth_today", "x", [1.17, 1.16, 1.18]],
    ["protocol", "puzzle's line", "unsloth_classic", "x", [1.3]],
    *(["score", criterion, "today", "points", [won]] for criterion, won, _, _ in CRITERIA),
]
MACHINE = {"card": "Tesla T4", "capability": [7, 5], "date": "2026-11-22", "forced": None}


def written(content):
    return json.dumps(content, separators=(",", ":"))


LINE = written({"environment": MACHINE, "rows": ROWS})
CODE = "print_rows()"


@pytest.fixture
def draw(folder, monkeypatch):
    """Draw with an executed copy of a notebook of one cell; the only page is the claim."""
    monkeypatch.setattr(machine, "NOTEBOOK", folder / "own.ipynb")
    monkeypatch.setattr(pages, "draw", lambda stored: {folder / "page": pages.claim(stored)})

    def write(path, source, outputs):
        ran, empty = nbformat.v4.new_code_cell(source, outputs=outputs), nbformat.v4.new_code_cell("")
        nbformat.write(nbformat.v4.new_notebook(cells=[ran, empty]), path)  # Colab adds an empty one

    def run(line, source=CODE):
        path = folder / "sent.ipynb"
        page = {"text/html": f"<details>{line}</details>"}
        write(path, source, [nbformat.v4.new_output("display_data", page)])
        return pages.main(path)

    write(machine.NOTEBOOK, CODE, [])
    return run


def test_its_rows_are_stored_and_drawn(draw, folder):
    assert draw(LINE) == draw(LINE) == 0  # the second replaces the first
    environment, rows = store.records("tesla-t4")["notebook"]
    assert json.loads(json.dumps(rows)) == ROWS
    page = (folder / "page").read_text()
    assert re.search(r"Tesla T4 .* 14 .* 1.17x \(1.16x to 1.18x\) .* 1.30x \(.* 1.14x \(", page)
    assert "predicted" not in page
    assert environment["commit"] == store.commit()


def test_its_outputs_are_put_into_the_notebook_unless_settings_were_forced(draw, folder, monkeypatch):
    monkeypatch.setattr(book, "MODULES", [])
    draw(LINE)
    assert book.write(folder / "sent.ipynb") == 0
    synced = nbformat.read(machine.NOTEBOOK, as_version=4)
    assert synced.cells[0].outputs[0].data["text/html"] == f"<details>{LINE}</details>"
    draw(LINE.replace('"forced":null', '"forced":"t4"'))
    with pytest.raises(SystemExit, match="sent.ipynb ran with NF4_FORCE=t4, expected"):
        book.write(folder / "sent.ipynb")
    assert nbformat.read(machine.NOTEBOOK, as_version=4) == synced


def test_other_code_is_refused(draw):
    with pytest.raises(SystemExit, match="code cell 1 .x = 1. was edited.* check that out first"):
        draw(LINE, source="x = 1")


@pytest.mark.parametrize(
    "problem, right, wrong",
    [
        ("capability is .9, 0., expected .7, 5. of Tesla T4", "[7,5]", "[9,0]"),
        ("not scored: Custom assembly works, .*", written(ROWS), written(ROWS[:12])),  # a broken rule
        ("0 outputs with rows, expected 1: run all its cells", "environment", "other"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(draw, folder, problem, right, wrong):
    with pytest.raises(SystemExit, match=f"^.*{problem}.*$"):
        draw(LINE.replace(right, wrong, 1))
    assert not (folder / "page").exists() and "tesla-t4" not in store.cards()


@pytest.mark.parametrize("content", [b"{}", b"PK\x03\x04\xff", b"[" * 10**5])
def test_a_file_that_is_no_notebook_is_refused_in_one_line(draw, tmp_path, content):
    (tmp_path / "sent.ipynb").write_bytes(content)
    with pytest.raises(SystemExit, match=r"sent.ipynb: \w+Error: [^\n]+$"):
        pages.main(tmp_path / "sent.ipynb")
