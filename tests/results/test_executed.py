"""The executed notebook that people send: its rows are stored, or one line says what is wrong."""

import json
import re

import nbformat
import pytest

from helpers import machine
from helpers.names import CRITERIA
from helpers.puzzle import notebook as book
from helpers.results import pages, store

RATIOS = {"unsloth_today": [1.17, 1.16, 1.18], "unsloth_classic": [1.3, 1.2, 1.4]}
TIMES = {
    "function": ["this kernel", "bitsandbytes", "Unsloth today"] * 2,
    "size": ["4.2M bf16"] * 3 + ["58.7M bf16"] * 3,
    "turn": [1] * 6,
    "us until a call returns": [9.5, 50, 27, 9, 51, 28],
    "us on the GPU": [4, 11, 5, 39, 71, 40],
    "ms for 100 rounds": [0.5, 1, 1, 3, 3, 4],
}
POINTS = {criterion: met for criterion, met, *_ in CRITERIA}
MACHINE = {"card": "Tesla T4", "forced": None}


def written(content):
    return json.dumps(content, separators=(",", ":"))


LINE = written({"environment": MACHINE, "points": POINTS, "ratios": RATIOS, "times": TIMES})
CODE = "show_all()"


@pytest.fixture
def draw(folder, monkeypatch):
    """Draw with an executed copy of a notebook of one cell; the only page is the claim."""
    monkeypatch.setattr(machine, "NOTEBOOK", folder / "own.ipynb")
    monkeypatch.setattr(pages, "draw", lambda: {folder / "page": pages.claim()})

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
    found = {row[:3]: row.median for row in store.rows("tesla-t4")}
    assert found["protocol", "until return", "ours"] == 9.5
    assert found["protocol", "100 rounds", "bitsandbytes"] == 0.004
    assert found["protocol", "over this kernel", "unsloth_today"] == 5 / 3.5
    assert found["protocol_gpu", "58.7M bf16", "bitsandbytes"] == 71
    on_gpu = {row[1:]: value for row, value in found.items() if row[0] == "on_gpu"}
    assert on_gpu == {("4.2M bf16", "unsloth_today"): 1.25, ("58.7M bf16", "unsloth_today"): 40 / 39}
    page = (folder / "page").read_text()
    assert re.search(r"Tesla T4 .* 14 .* 1.17x \(1.16x to 1.18x\) .* 1.30x \(.* 1.14x ", page)


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
    with pytest.raises(SystemExit, match="code cell 1 .x = 1. was edited.* check out that version"):
        draw(LINE, source="x = 1")


@pytest.mark.parametrize(
    "problem, right, wrong",
    [
        ("not measured: unsloth_classic. Install", written(RATIOS["unsloth_classic"]), "[]"),  # not loaded
        ("not measured: One fused kernel, .*", written(POINTS), "{}"),  # a broken rule
        ("0 outputs with rows, expected 1: run all its cells", "environment", "other"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(draw, folder, problem, right, wrong):
    with pytest.raises(SystemExit, match=f"^.*{problem}.*$"):
        draw(LINE.replace(right, wrong, 1))
    assert not (folder / "page").exists() and not store.rows("tesla-t4")


@pytest.mark.parametrize("content", [b"{}", b"PK\x03\x04\xff", b"[" * 10**5])
def test_a_file_that_is_no_notebook_is_refused_in_one_line(draw, tmp_path, content):
    (tmp_path / "sent.ipynb").write_bytes(content)
    with pytest.raises(SystemExit, match=r"sent.ipynb: \w+Error: [^\n]+$"):
        pages.main(tmp_path / "sent.ipynb")
