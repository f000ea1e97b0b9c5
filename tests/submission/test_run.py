import json
import sys
from pathlib import Path

import nbformat
import pytest

from helpers.machine import environment
from helpers.record import results
from helpers.submission import execute

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
    for name in ("NF4_BUILD", "NF4_RESULTS", "NF4_QUICK", "NF4_FORCE", "PYTHON"):
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


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """What is stored is as on an H200, in a results folder of its own; the cells run where they can."""
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(environment, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(environment, "capability", lambda device=None: (9, 0))
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


SHOWS = """
import pathlib
found = pathlib.Path(os.environ['NF4_RESULTS']).glob('*/notebook.json')
print('times stored' if list(found) else 'no times yet')
"""
PICTURE = "from IPython.display import Image\nimport os\nImage(data=os.urandom(1_600_000), format='png')"


def test_the_seconds_of_each_cell_are_stored_and_shown_in_the_same_run(run, on_a_gpu, monkeypatch):
    ids = {0: execute.SETUP, 1: execute.PROTOCOL, 2: execute.SHOWS_TIMES}
    named = nbformat.v4.new_code_cell
    order = iter(range(9))
    monkeypatch.setattr(
        nbformat.v4,
        "new_code_cell",
        lambda source, **more: named(source, id=ids.get(next(order), "x"), **more),
    )
    status, copy, *_ = run(["#@title Set up\nimport os", "2", SHOWS, SCORE], "--in-place")
    assert status == 0
    stored = results.read("notebook", on_a_gpu / "nvidia-h200")
    assert stored["environment"]["gpu"] == "NVIDIA H200" and len(stored["kernel_hash"]) == 16
    cells = stored["data"]["cells"]
    assert [cell["setup"] for cell in cells] == [True, False, False, False]
    assert [cell["protocol"] for cell in cells] == [False, True, False, False]
    assert cells[0]["title"] == "Set up" and all(cell["seconds"] >= 0 for cell in cells)
    assert copy.cells[2].outputs[0].text.strip() == "times stored"
    assert [cell.execution_count for cell in copy.cells] == [1, 2, 3, 4]


def test_times_of_a_cpu_of_a_failed_and_of_a_quick_run_are_not_stored(run, monkeypatch, tmp_path, request):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    assert run([SCORE], "--in-place")[0] == 0
    folder = request.getfixturevalue("on_a_gpu")
    assert run(["1 / 0", SCORE], "--in-place")[0] == 1
    assert run([SCORE], "--in-place", "--quick")[0] == 0
    assert not folder.exists()


def test_a_forced_run_is_stored_apart_and_labelled(run, on_a_gpu, monkeypatch):
    monkeypatch.setenv("NF4_FORCE", "t4")
    status, _, untouched, _ = run([PICTURE, "print('small')", SCORE], "--in-place")
    assert status == 0 and untouched, "the notebook itself is not of this run"
    folder = on_a_gpu / "nvidia-h200-forced-t4"
    assert {path.name for path in on_a_gpu.iterdir()} == {folder.name}
    assert {path.name for path in folder.iterdir()} == {
        f"{execute.NAME}.executed.ipynb",
        "score.json",
        "notebook.json",
    }
    path = folder / f"{execute.NAME}.executed.ipynb"
    stored = nbformat.read(path, 4)
    first = stored.cells[0].source
    assert "NVIDIA H200, T4's decisions forced" in first and "Not a run on a T4" in first
    assert stored.metadata["nf4"]["environment"]["forced"] == "t4"
    assert path.stat().st_size < execute.LARGEST_COPY
    assert list(stored.cells[1].outputs[0].data) == ["text/plain"]
    assert stored.cells[2].outputs[0].text.strip() == "small"
    assert results.read("notebook", folder)["environment"]["forced"] == "t4"


def test_a_forced_run_without_a_gpu_stores_nothing(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NF4_FORCE", "t4")
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    status, _, untouched, _ = run([SCORE], "--in-place")
    assert status == 0 and untouched and not (tmp_path / "results").exists()
    assert "nothing stored" in capsys.readouterr().out


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


def test_cells_that_show_files_are_drawn_again_and_nothing_else(monkeypatch):
    cell = nbformat.v4.new_code_cell
    printed = [nbformat.v4.new_output("stream", text="old")]
    cells = [
        cell("raise RuntimeError('not run again')", id="protocol", outputs=printed, execution_count=1),
        cell("print(notebook.floor())", id="ceiling", outputs=printed, execution_count=2),
        cell("notebook.stored_gemm()", id="gemm", outputs=printed, execution_count=3),
    ]
    book = nbformat.v4.new_notebook(cells=cells, metadata={"nf4": {"kernel_hash": "x"}})
    execute.redraw(book, environment.ROOT)
    kept, floor, table = book.cells
    assert kept.outputs[0].text == "old" and kept.execution_count == 1
    assert "that only moves these bytes" in floor.outputs[0].text and floor.execution_count == 2
    assert "text/html" in table.outputs[0].data and table.outputs[0].execution_count == 3
    assert book.metadata.nf4.kernel_hash == "x" and "gemm" in book.metadata.nf4.drawn_from_files["cells"]
