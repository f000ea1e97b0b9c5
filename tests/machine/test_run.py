"""`python -m helpers run`: which files and outputs it replaces."""

import nbformat
import pytest

from helpers import machine
from helpers.puzzle import notebook as book

SENT = "nf4_tesla-t4.json"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that a run starts; the notebook is a stand-in that writes a result file, as on a GPU."""
    started = []
    cells = [nbformat.v4.new_code_cell("1", id="score")]
    monkeypatch.setattr(book, "NOTEBOOK", tmp_path / "some.ipynb")
    nbformat.write(nbformat.v4.new_notebook(cells=cells), book.NOTEBOOK)
    ran = nbformat.read(book.NOTEBOOK, as_version=4)
    ran.cells[0].outputs = [nbformat.v4.new_output("stream", text="sum 14")]

    def executed(out):
        (out / SENT).write_text("{}")
        return ran, ""

    monkeypatch.setattr(book, "executed", executed)
    monkeypatch.setattr(book.subprocess, "call", lambda command, **_: started.append(command[3:]))
    for name in ("NF4_BUILD", "NF4_QUICK", "NF4_FORCE"):  # run() sets some: undone after each test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return started


def test_files_that_were_in_the_folder_stay_and_are_not_stored(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    other = tmp_path / "nf4_nvidia-a100.json"
    other.write_text("of last week")
    assert book.run(["--in-place", "--out", str(tmp_path)]) == 0
    assert other.read_text() == "of last week"
    assert commands == [["draw", "--replace", str(tmp_path / SENT)]]


def test_a_failing_run_deletes_nothing(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(book, "executed", lambda out: (None, "a cell failed"))
    (tmp_path / SENT).write_text("of last week")
    assert book.run(["--out", str(tmp_path)]) == 1
    assert (tmp_path / SENT).read_text() == "of last week"


def test_without_a_gpu_nothing_stored_is_replaced(commands, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    stored = book.NOTEBOOK.read_text()
    with pytest.raises(SystemExit):
        book.run(["--in-place", "--out", str(tmp_path)])
    assert "--in-place stores what a GPU measured" in capsys.readouterr().err
    assert book.NOTEBOOK.read_text() == stored and not (tmp_path / SENT).exists()
