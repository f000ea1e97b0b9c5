"""The notebook: cells in step with the modules, execution, and the file alone as the submission."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from helpers import machine
from helpers.puzzle import notebook as book

STAND_IN = Path(__file__).with_name("stand_in.py")
MODULE = '''"""What the module is for."""

# %% tags=["module-only"]
from somewhere import name

# %% id="first" call="f()"
x = 1


# %% The details id="second" folded=true
y = 2
'''


def cell(notebook, name):
    return next(cell for cell in notebook.cells if cell.id == name)


def printed(notebook, name):
    return "".join(output.get("text", "") for output in cell(notebook, name).outputs)


@pytest.fixture
def notebook():
    return nbformat.read(book.NOTEBOOK, as_version=4)


# --- what is stored ---


def test_the_notebook_has_the_modules_sections(notebook):
    assert book.sync(notebook) == [], "python -m helpers sync"


# --- sync ---


def test_sections_become_cells_where_these_stand(tmp_path, monkeypatch):
    (tmp_path / "some.py").write_text(MODULE)
    monkeypatch.setattr(book, "MODULES", ["some.py"])
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    first, gone = (code("old", id=name, metadata={"tags": ["some"]}) for name in ("first", "gone"))
    first.outputs = [nbformat.v4.new_output("stream", text="kept")]
    small = nbformat.v4.new_notebook(cells=[text("Some", id="text"), gone, first, code("own", id="own")])
    assert book.sync(small, tmp_path) == ["gone", "first", "second"]
    assert [one.id for one in small.cells] == ["text", "first", "own", "second"]
    assert cell(small, "first").source == "x = 1\n\nf()" and printed(small, "first") == "kept"
    assert cell(small, "second").source.startswith("#@title The details")


# --- run ---

FACTS = "import pathlib, sys\nprint(sys.executable, pathlib.Path.home())"
SCORE = "print('sum 14')"


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """execute({id: source}, *options) -> (exit status, executed copy, the notebook's path)."""
    monkeypatch.setattr(book.subprocess, "call", lambda command, **_: print(*command[1:]))
    for name in ("NF4_QUICK", "NF4_FORCE"):  # run() sets one: undone after each test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(sources, *options):
        cells = [nbformat.v4.new_code_cell(source, id=name) for name, source in sources.items()]
        path = tmp_path / "some.ipynb"
        monkeypatch.setattr(book, "NOTEBOOK", path)
        kernelspec = {"name": "not-registered", "display_name": "gone", "language": "python"}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)
        status = book.run(["--out", str(tmp_path / "out"), *options])
        return status, nbformat.read(tmp_path / "out" / "some.executed.ipynb", 4), path

    return run


def test_it_prints_the_score_and_stores_where_asked(execute, capsys, tmp_path, monkeypatch):
    """This very Python runs it; no folder of this machine is in the outputs; in place only if asked."""
    same = f"import sys\nassert sys.executable == {sys.executable!r}"
    status, copy, path = execute({"facts": FACTS, "same": same, "score": SCORE})
    assert status == 0 and not cell(nbformat.read(path, 4), "score").outputs
    assert capsys.readouterr().out.endswith("sum 14\n")
    text = printed(copy, "facts")
    assert str(Path.home()) not in text and sys.prefix not in text
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    status, copy, path = execute({"install": SCORE, "score": SCORE}, "--in-place")
    written = nbformat.read(path, 4)
    assert status == 0 and printed(written, "score") == "sum 14\n"
    assert not cell(written, "install").outputs, "pip's messages are no result"
    assert f"-m helpers draw {tmp_path / 'out' / 'some.executed.ipynb'}\n" in capsys.readouterr().out


@pytest.mark.parametrize("forced, drawn", [("", 3), ("t4", 0)], ids=["drawing fails", "forced settings"])
def test_the_repositorys_notebook_stays(execute, monkeypatch, forced, drawn):
    monkeypatch.setenv("NF4_FORCE", forced)
    # The repository's notebook runs in its folder.
    monkeypatch.setenv("PYTHONPATH", str(machine.ROOT), os.pathsep)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(book.subprocess, "call", lambda command, **_: drawn)
    status, copy, path = execute({"score": SCORE}, "--in-place")
    assert status == drawn and copy.cells[0].outputs and not nbformat.read(path, 4).cells[0].outputs


INTERRUPT = "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\nimport time; time.sleep(60)"
KILL = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    "bad, expected, message",
    [
        ("1 / 0", 1, "cell b failed: ZeroDivisionError: division by zero"),
        ("import time; time.sleep(60)", 1, "cell b took more than 3 s"),
        (KILL, 1, "the kernel was killed in cell b"),
        (INTERRUPT, 130, "interrupted in cell b"),
    ],
)
def test_what_ran_is_kept_and_one_line_says_why_it_stopped(
    bad, expected, message, execute, capsys, monkeypatch
):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(book, "LIMIT", 3)
    status, copy, path = execute({"a": SCORE, "b": bad}, "--in-place")
    shown = capsys.readouterr()
    assert status == expected and message in shown.err and shown.err.count("\n") == 1
    assert printed(copy, "a") and not cell(nbformat.read(path, 4), "a").outputs


def test_options_are_checked_before_anything_runs(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(book, "execute", None)
    for on_gpu, options in (
        (False, ["--out", str(file / "x")]),
        (False, ["--in-place"]),
        (True, ["--in-place", "--quick"]),
    ):
        monkeypatch.setattr(machine, "has_gpu", lambda on_gpu=on_gpu: on_gpu)
        with pytest.raises(SystemExit):
            book.run(options)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert book.options_of(["--out", "~/x"]).path.parent == tmp_path / "x"


# --- alone ---


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """alone(notebook): execute it in an empty folder; no repository, nothing prepared in the environment."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("NF4_QUICK", "1")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [path for path in paths if path and not (Path(path) / "helpers").exists()]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(packages))

    def run(notebook):
        nbformat.write(notebook, tmp_path / book.NOTEBOOK.name)
        check = "import importlib.util\nassert importlib.util.find_spec('helpers') is None"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(check, id="check"))
        assert book.execute(notebook, tmp_path) == ""

    return run


def test_it_runs_alone_after_the_puzzles_own_cells_and_each_cell_twice(notebook, alone, monkeypatch):
    """On a CPU, in the puzzle's namespace: its names are defined before, and its own test passes, too. A cell
    that runs again, unedited, takes no points."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    new = nbformat.v4.new_code_cell
    code = [one for one in notebook.cells if one.cell_type == "code"]
    again = [new(one.source, id=f"{one.id}-2") for one in code]
    notebook.cells = [one for pair in zip(code, again, strict=True) for one in pair]
    names = [one.id for one in notebook.cells]
    notebook.cells.insert(names.index("machine-2") + 1, new(STAND_IN.read_text(), id="stand-in"))
    notebook.cells.insert(-4, new(cell(notebook, "checks-tools").source, id="tools-3"))  # before the score
    alone(notebook)
    for ending in ("", "-2"):
        said = printed(notebook, f"ratio{ending}")
        assert said == "all weights are correct; not timed (needs an NVIDIA GPU)\n"
        for name in ("format", "one-call", "exact"):
            assert printed(notebook, name + ending).endswith("passed\n")
        needing = ("turns", "single-kernel", "custom-asm", "cache-eviction", "memory")
        assert {printed(notebook, name + ending) for name in needing} == {
            "not measured (needs an NVIDIA GPU)\n"
        }
        assert printed(notebook, f"rows{ending}") == ""
        score = printed(notebook, f"score{ending}")
        assert score.startswith("Nothing but correctness was measured")
        assert "1 of 14 points on this CPU (Triton's interpreter)" in score


@pytest.mark.long
def test_without_bitsandbytes_every_cell_says_so(notebook, alone, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    absent = "import sys\nsys.modules['bitsandbytes'] = None  # as if it were not installed"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(absent, id="absent"))
    alone(notebook)
    for name in ("ratio", "exact"):
        assert printed(notebook, name).startswith("not measured (needs a working bitsandbytes")
    assert "0 of 14 points" in book.score_text(notebook)


@pytest.mark.gpu
@pytest.mark.long
def test_a_gpu_run_alone_prints_its_rows(notebook, alone, monkeypatch):
    alone(notebook)
    assert printed(notebook, "rows") == "", "nothing of a quick run"
    assert "14 of 14 points" in book.score_text(notebook)


# --- the install cell, with a stand-in for pip ---


def test_the_install_cell_adds_what_is_missing_and_torch_and_triton_stay(notebook, monkeypatch):
    commands, installed = [], {"torch": "2.11", "triton": "3.6", "peft": "0.17.0", "transformers": "5.17.0"}

    def run(command, **options):
        if command[0] != "nvidia-smi":
            commands.append([*command, Path(command[command.index("-c") + 1]).read_text()])
        return SimpleNamespace(returncode=0)

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    distributions = [SimpleNamespace(name=name) for name in installed]
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: distributions)
    exec(compile(cell(notebook, "install").source, "install", "exec"), {})
    needed, for_unsloth, unsloth = commands
    assert needed[-3].startswith("bitsandbytes>=") and needed[-2].startswith("peft>="), "one is too old"
    assert needed[-1] == "torch==2.11\ntransformers==5.17.0\ntriton==3.6"
    assert "torch==2.11" in unsloth[-1] and "--no-deps" in unsloth and "--no-deps" not in for_unsloth
