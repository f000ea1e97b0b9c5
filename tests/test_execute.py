import json
import sys
from pathlib import Path

import nbformat
import pytest

from helpers import execute

SCORE = (
    "#@title The score { display-mode: 'form' }\n"
    "import os, pathlib, sys\n"
    "build = pathlib.Path(os.environ['NF4_BUILD'])\n"
    "(build / 'score.txt').write_text('sum 14')\n"
    "(build / 'score.json').write_text('{}')\n"
    "print(sys.executable, pathlib.Path.home(), build, os.environ['NF4_RESULTS'], sep='|')\n"
)


@pytest.fixture
def run(tmp_path):
    """run(sources, *options) -> (exit status, notebook written, folder with its copy)."""

    def execute_cells(sources, *options):
        cells = [nbformat.v4.new_code_cell(source, metadata={"tags": ["kept"]}) for source in sources]
        path = tmp_path / "some.ipynb"
        kernelspec = {"name": "not-registered", "display_name": "gone", "language": "python"}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)
        before = path.read_bytes()
        out = tmp_path / "out"
        status = execute.main(["--notebook", str(path), "--out", str(out), *options])
        return (
            status,
            nbformat.read(out / f"{execute.NAME}.executed.ipynb", 4),
            path.read_bytes() == before,
            path,
        )

    return execute_cells


@pytest.fixture(autouse=True)
def own_variables(monkeypatch):
    """main() sets variables for the notebook's kernel: undo that after each test."""
    for name in ("NF4_BUILD", "NF4_RESULTS", "NF4_QUICK", "PYTHON"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_it_runs_prints_the_score_and_leaves_the_notebook_alone(run, capsys, tmp_path):
    status, notebook, untouched, _ = run([SCORE])
    shown = capsys.readouterr().out
    assert status == 0 and untouched
    assert "sum 14" in shown and "The score" in shown and f"{execute.NAME}.html" in shown
    assert notebook.cells[0].outputs
    assert (tmp_path / "out" / f"{execute.NAME}.html").stat().st_size > 1000


def test_the_kernel_is_this_python_and_no_folder_of_the_machine_is_stored(run):
    code = SCORE + f"assert sys.executable == {sys.executable!r}\n"
    status, notebook, *_ = run([code])
    assert status == 0
    text = json.dumps([cell.outputs for cell in notebook.cells])
    assert str(Path.home()) not in text and sys.prefix not in text and "build|build/results" in text


def test_a_failing_cell_fails_the_command_and_shows_the_error(run, capsys):
    status, notebook, untouched, _ = run(["1 + 1", "raise RuntimeError('here')", SCORE])
    assert status == 1 and untouched
    assert "RuntimeError: here" in capsys.readouterr().err
    assert notebook.cells[0].outputs and not notebook.cells[2].outputs


def test_a_notebook_without_a_score_fails(run, capsys):
    assert run(["1"])[0] == 1
    assert "no score" in capsys.readouterr().err


def test_in_place_keeps_ids_tags_and_metadata(run):
    status, copy, untouched, path = run([SCORE.replace(", os.environ['NF4_RESULTS']", "")], "--in-place")
    written = nbformat.read(path, 4)
    assert status == 0 and not untouched
    assert written.cells[0].id == copy.cells[0].id and written.cells[0].metadata.tags == ["kept"]
    assert written.metadata.kernelspec.name == "not-registered" and written.cells[0].outputs


def test_cells_are_called_by_title_by_the_text_above_or_by_their_first_line():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [
        code("#@title Set up { display-mode: 'form' }\nimport x"),
        text("## The **kernel**\nand more"),
        code("import x\n# then this"),
        code("y = 1"),
        code(""),
    ]
    names = execute.titles(cells)
    assert [names[i] for i in (0, 2, 3, 4)] == ["Set up", "The kernel", "y = 1", "(empty cell)"]
