"""The notebook: cells in step with the modules, execution, and the file alone as the submission."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

import processes
from helpers import machine
from helpers.puzzle import notebook as book
from helpers.results import store
from helpers.results.plots import CARD

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
    return nbformat.read(machine.NOTEBOOK, as_version=4)


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

FACTS = """
import pathlib, sys
print(sys.executable, pathlib.Path.home())
assert sys.executable == {!r} and not pathlib.Path({!r}).exists()
"""
SCORE = "print('sum 14')"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """small({id: source}): the repository's notebook is one with these cells."""
    monkeypatch.delenv("NF4_FORCE", raising=False)

    def write(sources):
        cells = [nbformat.v4.new_code_cell(source, id=name) for name, source in sources.items()]
        kernelspec = {"name": "not-registered", "display_name": "gone", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec})
        monkeypatch.setattr(machine, "NOTEBOOK", tmp_path / "some.ipynb")
        book.save(notebook, machine.NOTEBOOK)

    write.executed = tmp_path / "some.executed.ipynb"
    monkeypatch.setattr(book, "EXECUTED", write.executed)
    return write


def test_it_prints_the_score_and_keeps_the_outputs(small, capsys):
    """This very Python runs it, an earlier copy is gone, and no folder of this machine is in the outputs."""
    small.executed.write_text("of an earlier run")
    small({"facts": FACTS.format(sys.executable, str(small.executed)), "score": SCORE})
    assert book.run() == 0
    assert capsys.readouterr().out.endswith(f"\nsum 14\n\nthe executed notebook is {small.executed}\n")
    text = printed(nbformat.read(small.executed, 4), "facts")
    assert str(Path.home()) not in text and sys.prefix not in text
    assert not nbformat.read(machine.NOTEBOOK, 4).cells[-1].outputs


@pytest.mark.parametrize(
    "bad, message",
    [
        ("1 / 0", "cell b failed: ZeroDivisionError: division by zero"),
        ("import time; time.sleep(60)", "cell b took more than 3 s"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "the kernel was killed in cell b"),
    ],
)
def test_what_ran_is_kept_and_one_line_says_why_it_stopped(bad, message, small, capsys, monkeypatch):
    monkeypatch.setattr(book, "LIMIT", 3)
    small({"a": SCORE, "b": bad})
    assert book.run() == 1
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1
    assert printed(nbformat.read(small.executed, 4), "a") == "sum 14\n"


START = "import os, signal, subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid)"
KILL = "os.kill(os.getppid(), signal.{})\ntime.sleep(60)"
RUN = """
import pathlib, signal, sys
from helpers import __main__ as commands, machine
from helpers.puzzle import notebook
signal.signal(signal.{}, signal.SIG_DFL)  # nohup ignores SIGHUP
machine.prepare = lambda: None  # it imports torch, as describe() does
notebook.describe = lambda: {{"card": "none"}}
machine.NOTEBOOK = pathlib.Path({!r})
notebook.EXECUTED = machine.NOTEBOOK.with_suffix('.executed.ipynb')
sys.exit(commands.main(["run"]))
"""


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGHUP"])
def test_a_killed_run_keeps_what_ran_and_ends_what_it_started(ending, small):
    small({"a": START, "b": KILL.format(ending)})
    code = RUN.format(ending, str(machine.NOTEBOOK))
    done = processes.python(["-c", code], check=False, timeout=60)
    assert done.err == f"stopped: interrupted in cell b; what ran is in {small.executed}\n"
    process = Path("/proc", printed(nbformat.read(small.executed, 4), "a").strip(), "cmdline")
    until = time.monotonic() + 5
    with contextlib.suppress(OSError):  # it is gone
        while process.read_bytes():  # empty: a zombie
            assert time.monotonic() < until, "it runs on"


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
        nbformat.write(notebook, tmp_path / machine.NOTEBOOK.name)
        check = "import importlib.util\nassert importlib.util.find_spec('helpers') is None"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(check, id="check"))
        assert book.execute(notebook, tmp_path) == ""

    return run


def test_it_runs_alone_after_the_puzzles_own_cells_and_twice(notebook, alone, monkeypatch):
    """On a CPU, in the puzzle's namespace: its names are defined before, and its own test passes, too. What
    runs again takes no points. `ratio` runs once: 10 s in the interpreter."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    new = nbformat.v4.new_code_cell
    first, *code = [one for one in notebook.cells if one.cell_type == "code"]
    again = [new(one.source, id=f"{one.id}-2") for one in code if one.id != "ratio"]
    notebook.cells = [first, new(STAND_IN.read_text(), id="stand-in"), *code, *again]
    alone(notebook)
    assert printed(notebook, "ratio").startswith("all weights are correct\n")
    for ending in ("", "-2"):
        assert printed(notebook, f"exact{ending}").endswith("passed\n")
        needing = ("turns", "single-kernel", "custom-asm", "cache-eviction", "memory")
        assert {printed(notebook, name + ending) for name in needing} == {
            "not measured (needs an NVIDIA GPU)\n"
        }
        assert printed(notebook, f"rows{ending}") == ""
        assert printed(notebook, f"score{ending}").startswith("1 of 14 points on this CPU")


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


def test_the_stored_outputs_are_of_these_code_cells():
    """They are the cells of the commit that the stored run names: since then, only text changed."""
    if os.environ.get("NF4_COMMIT"):
        pytest.skip("NF4_COMMIT is set: this run makes new outputs")
    commit = store.records(CARD)["notebook"].environment["commit"]
    show = ["git", "show", f"{commit}:{machine.NOTEBOOK.name}"]
    done = subprocess.run(show, cwd=machine.ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"git does not have {commit}")
    ran, now = nbformat.reads(done.stdout, as_version=4), nbformat.read(machine.NOTEBOOK, as_version=4)
    assert code_of(ran) == code_of(now)


def code_of(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]
