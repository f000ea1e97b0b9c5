"""The executed notebook that people send: its rows are stored, or an error names what is wrong."""

import json
import re

import nbformat
import pytest

from helpers.results import executed, pages, store

FACTS = {"card": "Tesla T4", "date": "2026-11-22T10:00:00+00:00"}
TOTAL = ["protocol", "total", "ours", "s", [3.5]]
ROWS = [
    ["protocol", "puzzle's line", "unsloth_today", "x", [1.17, 1.16, 1.18]],
    ["protocol", "puzzle's line", "unsloth_classic", "x", [1.3]],
    ["protocol", "total", "bitsandbytes", "s", [4]],
    ["score", "Penalty: speedup at most 1.00", "today", "points", [0]],
]


@pytest.fixture
def draw(folder, monkeypatch):
    """Draw with an executed copy of a notebook of one cell; the only page is the claim."""
    monkeypatch.setattr(executed, "NOTEBOOK", folder / "own.ipynb")
    monkeypatch.setattr(pages, "draw", lambda stored: {folder / "page": pages.claim(stored).encode()})

    def write(path, source, outputs):
        ran, empty = nbformat.v4.new_code_cell(source, outputs=outputs), nbformat.v4.new_code_cell("")
        nbformat.write(nbformat.v4.new_notebook(cells=[ran, empty]), path)  # Colab adds an empty one

    def run(rows, *options, source="print()"):
        line = json.dumps({"environment": FACTS, "rows": rows}, separators=(",", ":"))
        output = nbformat.v4.new_output("stream", text=f"a\n{line}\n")
        write(folder / "sent.ipynb", source, [output])
        return pages.main([str(folder / "sent.ipynb"), *options])

    write(executed.NOTEBOOK, "print()", [])
    return run


def test_its_rows_are_stored_and_drawn(draw, folder):
    assert draw([TOTAL, *ROWS]) == draw([TOTAL, *ROWS]) == 0  # the second replaces the first
    assert [[*key, [*values]] for *key, values in store.rows("tesla-t4")] == [TOTAL, *ROWS]
    page = (folder / "page").read_text()
    assert re.search("Tesla T4 .* 1.17x .* 1.30x .* 1.14x ", page) and "predicted" not in page
    assert store.meta("tesla-t4")["sections"]["score"]["kernel"] == store.kernel_hash()


def test_another_version_is_named(draw):
    with pytest.raises(SystemExit, match="code cell 1 .x = 1. was edited"):
        draw([TOTAL, *ROWS], source="x = 1")
    assert draw([TOTAL, *ROWS], "--commit", "v1", source="x = 1") == 0
    score = store.meta("tesla-t4")["sections"]["score"]
    assert (score["commit"], score["kernel"]) == ("v1", "of v1")


@pytest.mark.parametrize(
    "problem, rows",
    [
        ("'ours', 'us'. is unknown or of the wrong unit", [["protocol", "total", "ours", "us", [1]]]),
        ("'ours', 's'. stands twice", [TOTAL, TOTAL]),
        ("'ours', 's'. has the values .nan", [["protocol", "total", "ours", "s", [float("nan")]]]),
        ("'ours', 's'. has the values ..:", [["protocol", "total", "ours", "s", []]]),
        ("0 rows for .*'total', 'ours'", ROWS),  # what the claim needs
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(draw, folder, problem, rows):
    with pytest.raises(SystemExit, match=problem):
        draw(rows)
    assert not (folder / "page").exists() and "tesla-t4" not in store.cards()


def test_a_notebook_that_did_not_run_is_refused(draw):
    with pytest.raises(ValueError, match="0 lines of rows, expected 1: run all its cells"):
        executed.read(executed.NOTEBOOK)
