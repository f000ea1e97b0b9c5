"""The sections `training` and `several_gpus` of the benchmark."""

import contextlib
import copy
import types

import pytest
import torch
from sameness import SMALLEST  # beside this file

from helpers import machine
from helpers.bench import training

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return training.make_model(str(tmp_path_factory.mktemp("toy")), **SMALLEST)


@pytest.mark.skipif(machine.has_gpu(), reason="the section itself runs on a GPU")
def test_one_library_is_compared_and_timed(toy, monkeypatch):
    monkeypatch.setattr(training, "REPEATS", 1)  # the interpreter is slow
    monkeypatch.setattr(training, "ROUNDS", 1)
    found = training.steps("peft", toy, sizes=((1, 16, 1),))
    assert found["problems"] == [] and found["ms"].keys() == {"PEFT, 16 tokens"}
    assert [len(ms) for ms in found["ms"]["PEFT, 16 tokens"].values()] == [1, 1]


@pytest.fixture
def log(monkeypatch):
    """The order of arms, with a switch whose `kernel` counts in place of the real one."""
    log = types.SimpleNamespace(arms=[], kernel=1)

    def arm(library, name):
        log.arms.append(name)
        switch = types.SimpleNamespace(counts=lambda: {"a": {"kernel": log.kernel, "library": 0}})
        return contextlib.nullcontext(switch if name == "with" else None)

    monkeypatch.setattr(training, "arm", arm)
    return log


@pytest.mark.parametrize(
    ("without", "with_it", "kernel", "problem"),
    [("aaa", "aaa", 1, ""), ("aaa", "aba", 1, "results differ"), ("aaa", "aaa", 0, "dequantized nothing")],
)
def test_results_are_compared_over_several_steps(log, without, with_it, kernel, problem):
    """One step that agrees by chance says nothing of a backward pass that varies now and then."""
    results = iter([digest for pair in zip(without, with_it, strict=True) for digest in pair])
    log.kernel = kernel
    found = training.unequal("peft", lambda: next(results))
    assert problem in found and bool(problem) == bool(found)


def test_arms_take_turns_and_slow_steps_have_fewer_rounds(log, monkeypatch):
    monkeypatch.setattr(training, "ROUNDS", 3)
    runs = []
    found = training.times("peft", lambda: runs.append(1), count=2)
    assert [len(values) for values in found.values()] == [3, 3] and len(runs) == 3 * 2 * (1 + 2)
    assert log.arms == ["without", "with", "with", "without", "without", "with"]
    monkeypatch.setattr(training, "LONGEST", -1)
    assert [len(values) for values in training.times("peft", int, 7).values()] == [1, 1]


def test_a_library_that_fails_is_reported_and_the_other_still_runs(monkeypatch):
    def child(*command, library=None, **options):
        if library == "peft":
            raise machine.ChildFailed("no memory")
        arms = {"without": [2.0], "with": [1.0]}
        return [{"ms": {"Unsloth, 8 tokens": arms}, "problems": ["Unsloth, 9 tokens: not timed"]}]

    monkeypatch.setattr(training.machine, "has_gpu", lambda: True)
    monkeypatch.setattr(training, "in_processes", child)
    problems = []
    rows = [(row.section, row.case, row.contender) for row in training.training(None, problems)]
    assert rows == [("training", "Unsloth, 8 tokens", name) for name in ("without", "with")]
    assert problems == ["peft: no memory", "Unsloth, 9 tokens: not timed"]


@pytest.mark.skipif(machine.has_gpu(), reason="there is a GPU")
def test_without_gpus_nothing_is_measured(capsys):
    assert [*training.training(None, []), *training.several_gpus(None, [])] == []
    shown = capsys.readouterr().out
    assert "training: not measured" in shown and "needs two GPUs, this machine has 0" in shown


# --- several processes ---


def report(factor=1.0):
    """Steps of 30 ms without the kernel, 20 ms with it; 9 s in the first turns and at the start of each."""
    seconds = [[9.0] * 2 + [factor * (0.02 if turn % 2 else 0.03)] * 3 for turn in range(7)]
    seconds[:2] = [[9.0] * 5] * 2
    run = {"losses": [[2.0, 2.1]] * 35, "seconds": seconds, "handled": 6}
    return copy.deepcopy({"without": run | {"handled": 0}, "in turns": run})


def test_turns_of_the_slowest_process_are_timed_after_the_warm_up():
    reports = [report(), report(2.0)]
    assert training.several_problem(reports) == ""
    found = training.turns_ms(reports)
    assert found == {"without": pytest.approx([60.0] * 3), "with": pytest.approx([40.0] * 2)}


@pytest.mark.parametrize(
    ("run", "field", "value", "problem"),
    [
        ("without", "losses", [[2.0, 2.2]] * 35, "losses differ"),
        ("in turns", "losses", [[2.0, 2.2]] * 35, "losses differ"),
        ("in turns", "handled", 0, "dequantized nothing"),
    ],
)
def test_what_is_wrong_in_any_process_is_said(run, field, value, problem, monkeypatch):
    def child(*command, fsdp, **options):
        other = report()
        if fsdp == 1:
            other[run][field] = value
        return [report(), other]

    monkeypatch.setattr(training.machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(training, "make_model", lambda folder, **sizes: None)
    monkeypatch.setattr(training, "in_processes", child)
    problems = []
    rows = list(training.several_gpus(None, problems))
    assert len(problems) == 1 and problems[0].startswith("FSDP1: ") and problem in problems[0]
    assert [row.case for row in rows] == ["DDP"] * 2 + ["FSDP2"] * 2


def trained(reports):
    """Check four tiny steps: all processes agree, and dequantize with the kernel in every other one."""
    assert training.several_problem(reports) == ""
    for one in reports:
        assert one["without"]["handled"] == 0 and len(one["in turns"]["seconds"]) == 4
        assert len({str(losses) for losses in one["without"]["losses"]}) == 4


TINY = dict(turns=4, turn=1, rows=1, length=16)
on_cpu = pytest.mark.skipif(machine.has_gpu(), reason="on a GPU machine accelerate takes the GPUs: see below")


@on_cpu
def test_one_process_on_the_cpu(toy):
    pytest.importorskip("accelerate")
    trained([training.ranks(toy, 0, **TINY)])


def several(processes, toy, fsdp):
    command = ("-m", training.__name__, "ranks")
    trained(training.in_processes(*command, processes=processes, folder=toy, fsdp=fsdp, **TINY))


@pytest.mark.long
@on_cpu
def test_two_processes_on_the_cpu(toy):
    """DDP in the interpreter; accelerate runs FSDP on GPUs only."""
    several(2, toy, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("fsdp", training.ENGINES.values(), ids=list(training.ENGINES))
def test_every_gpu_here(toy, fsdp):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    several(torch.cuda.device_count(), toy, fsdp)
