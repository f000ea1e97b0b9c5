import json
import sys
from pathlib import Path

import nbformat
import pytest

from helpers import machine
from helpers.results import store as results
from helpers.puzzle import run

FACTS = (
    "import os, pathlib, sys\nprint(sys.executable, pathlib.Path.home(), os.environ['NF4_BUILD'], sep='|')"
)
SCORE = "print('sum 14')"
KEPT = """
import json, os, pathlib
score = dict(headline="14", totals={"today": 14}, lines=[], also={}, evidence={}, maximum=14)
protocol = dict(entries={"mine": {"label": "mine", "seconds": [1.0], "per_config": {}}}, rounds=9, repeats=1,
                checked_against="x", device="cuda", configs=[])
content = {"environment": {}, "data": {"score": score, "protocol": protocol}}
pathlib.Path(os.environ["NF4_BUILD"], "nf4_some-card.json").write_text(json.dumps(content))
print("sum 14")
"""


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """execute({id: source}, *options) -> (exit status, executed copy, the notebook's path)."""
    monkeypatch.setattr(run.subprocess, "call", lambda command, **_: print(*command[1:]))

    def cells(sources, *options):
        cells = [nbformat.v4.new_code_cell(source, id=name, metadata={"tags": ["kept"]})
                 for name, source in sources.items()]  # fmt: skip
        path = tmp_path / "some.ipynb"
        kernelspec = {"name": "not-registered", "display_name": "gone", "language": "python"}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)
        status = run.main(["--notebook", str(path), "--out", str(tmp_path / "out"), *options])
        return status, nbformat.read(tmp_path / "out" / f"{run.NAME}.executed.ipynb", 4), path

    return cells


@pytest.fixture(autouse=True)
def own_variables(monkeypatch):
    """main() sets variables for the notebook's kernel: undo that after each test."""
    for name in ("NF4_BUILD", "NF4_RESULTS", "NF4_QUICK", "NF4_FORCE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """What is stored is as on an H200, in a results folder of its own; the cells run where they can."""
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(machine, "capability", lambda device=None: (9, 0))
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


def test_it_prints_the_score_and_leaves_the_notebook_alone(execute, capsys, tmp_path):
    status, copy, path = execute({"facts": FACTS, "score": SCORE})
    assert status == 0 and not nbformat.read(path, 4).cells[0].outputs
    shown = capsys.readouterr().out
    assert shown.endswith("sum 14\n") and "s  facts" in shown
    assert str(tmp_path / "out" / f"{run.NAME}.executed.ipynb") in shown
    printed = copy.cells[0].outputs[0].text
    assert str(Path.home()) not in printed and sys.prefix not in printed and printed.endswith("|out\n")


def test_the_kernel_is_this_very_python(execute):
    assert execute({"a": f"import sys\nassert sys.executable == {sys.executable!r}", "score": SCORE})[0] == 0


def test_a_failing_cell_fails_the_command_and_keeps_what_ran(execute, capsys):
    status, copy, path = execute({"a": "1 + 1", "b": "1 / 0", "score": SCORE}, "--in-place")
    assert status == 1 and "ZeroDivisionError" in capsys.readouterr().err
    assert copy.cells[0].outputs and not copy.cells[2].outputs
    assert not nbformat.read(path, 4).cells[0].outputs


def test_a_notebook_without_a_score_fails(execute, capsys):
    assert execute({"a": "1", "score": "x = 1"})[0] == 1
    assert "no score" in capsys.readouterr().err


def test_in_place_keeps_ids_tags_and_metadata_and_draws_what_shows_results(execute, capsys):
    status, copy, path = execute({"score": SCORE}, "--in-place")
    written = nbformat.read(path, 4)
    assert status == 0 and written.cells[0].outputs == copy.cells[0].outputs != []
    assert written.cells[0].id == "score" and written.cells[0].metadata.tags == ["kept"]
    assert written.metadata.kernelspec.name == "not-registered"
    assert written.metadata.nf4.environment.python and len(written.metadata.nf4.kernel) == 17
    assert "-m helpers draw" in capsys.readouterr().out


def test_a_run_on_a_gpu_leaves_score_protocol_and_the_cells_times(execute, on_a_gpu):
    status, *_ = execute({"install": "1", "protocol": "2", "t4-ptx": "3", "score": KEPT}, "--in-place")
    assert status == 0
    folder = on_a_gpu / "nvidia-h200"
    assert results.read("score", folder).data["totals"] == {"today": 14}
    protocol = results.read("protocol", folder)
    assert protocol.environment.gpu == "NVIDIA H200" and protocol.data.entries["mine"].p50 == 1.0
    cells = {cell.title: cell for cell in results.read("notebook", folder).data.cells}
    assert cells["install"].setup and cells["protocol"].protocol and cells["t4-ptx"].not_on_a_t4
    assert not cells["score"].protocol and all(cell.seconds >= 0 for cell in cells.values())


def test_what_marking_writes_is_what_is_stored(tmp_path, on_a_gpu):
    from helpers.puzzle import marking, protocol
    from helpers.puzzle.checks import Evidence

    entries = {name: protocol.Entry(name, seconds=[s], per_config={"a": [s]})
               for name, s in (("mine", 1.0), ("unsloth_today", 1.5), ("unsloth_classic", 2.0))}  # fmt: skip
    comparison = protocol.Comparison(entries, 9, 1, "x", "cuda", ["a"])
    score = marking.mark(comparison, {"exact": Evidence("fp16 and bf16", True, "text")})
    marking.keep_result(score, comparison, tmp_path, cells=["source"])
    run.keep(tmp_path, {"score": 1.0})
    folder = on_a_gpu / "nvidia-h200"
    assert results.read("score", folder).data["headline"] == score.headline
    stored = results.read("protocol", folder).data
    assert stored.speedup("mine", "unsloth_today") == 1.5


@pytest.mark.parametrize("options", [("--in-place", "--quick"), ()])
def test_other_runs_store_nothing(execute, on_a_gpu, options):
    assert execute({"score": KEPT}, *options)[0] == 0
    assert not on_a_gpu.exists()


def test_a_forced_run_is_stored_apart(execute, on_a_gpu, monkeypatch):
    monkeypatch.setenv("NF4_FORCE", "t4")
    monkeypatch.setenv("PYTHONPATH", str(machine.ROOT))  # the repository's notebook runs in its folder
    status, copy, path = execute({"score": KEPT}, "--in-place")
    assert status == 0 and not nbformat.read(path, 4).cells[0].outputs, "the notebook is not of this run"
    assert "prepare()" in copy.cells[0].source
    folder = on_a_gpu / "nvidia-h200-forced-t4"
    assert [place.name for place in on_a_gpu.iterdir()] == [folder.name]
    assert {place.name for place in folder.iterdir()} == {"notebook.json", "protocol.json", "score.json"}
    assert results.read("notebook", folder).environment.forced == "t4"


def test_folders_of_this_machine_are_not_stored():
    places = run.folders(Path("/somewhere/out"))
    value = {"text": [f"{Path.home()}/a {machine.ROOT}/b"], "image/png": str(Path.home())}
    text = json.dumps(run.scrub(value, places))
    assert json.loads(text)["text"] == ["~/a ./b"] and json.loads(text)["image/png"] == str(Path.home())
