"""The sections `training` and `several_gpus` of the benchmark."""

import contextlib
import copy
import json
import types

import pytest
import torch

from helpers import machine
from helpers.bench import training

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
SMALLEST = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return str(training.make_model(tmp_path_factory.mktemp("toy"), **SMALLEST))


@pytest.mark.skipif(machine.has_gpu(), reason="the section itself runs on a GPU")
def test_one_library_is_compared_and_timed(toy, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "REPEATS", 1)  # the interpreter is slow
    monkeypatch.setattr(training, "times", lambda switch, prepare, *more: bool(prepare()))
    out = tmp_path / "peft.json"
    found = training.steps("peft", toy, str(out), sizes=((1, 16, 1),), prompt=16)
    assert found["problems"] == [] and json.loads(out.read_text()) == found
    cases = ["16 tokens", "prefill (16 tokens)", "dequantize the model", "merge the adapter"]
    assert found["ms"] == {f"PEFT, {case}": True for case in cases}


@contextlib.contextmanager
def switched(name, kernel=1):
    """In place of the switch: a context that counts, in the arm with the kernel."""
    counts = {"a": {"kernel": kernel, "library": 0}}
    yield types.SimpleNamespace(name=name, counts=lambda: counts) if name == "with" else None


@pytest.mark.parametrize(
    ("without", "with_it", "kernel", "problem"),
    [("aaa", "aaa", 1, ""), ("aaa", "aba", 1, "results differ"), ("aaa", "aaa", 0, "dequantized nothing")],
)
def test_results_are_compared_over_several_steps(without, with_it, kernel, problem):
    """One step that agrees by chance says nothing of a backward pass that varies now and then."""
    results = iter([digest for pair in zip(without, with_it, strict=True) for digest in pair])
    found = training.unequal(lambda name: switched(name, kernel), lambda: next(results), 3)
    assert problem in found and bool(problem) == bool(found)


def test_arms_take_turns_and_what_is_prepared_is_off_the_clock(monkeypatch):
    log = []

    def arm(name):
        log.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(training, "LONGEST", 1000)
    found = training.times(arm, lambda: lambda: log.append("run"), 2, count=2)
    assert [len(values) for values in found.values()] == [2, 2]
    order = ["without", "with", "with", "without", "without", "with"]
    assert [entry for entry in log if entry != "run"] == order and log.count("run") == 2 * 2 * 3
    monkeypatch.setattr(training, "LONGEST", -1)
    assert [len(values) for values in training.times(arm, lambda: int, 7).values()] == [1, 1]


def test_a_library_that_fails_is_reported_and_the_other_still_runs(monkeypatch):
    def child(arguments, folder, **options):
        _, module, function, options = arguments
        options = json.loads(options)
        if options.get("library") == "unsloth":
            raise machine.ChildFailed("no memory")
        if function == "steps":
            arms = {"without": [2.0], "with": [1.0]}
            found = {"ms": {"PEFT, 8 tokens": arms, "PEFT, merge": arms}, "problems": ["PEFT, x: not timed"]}
            with open(options["out"], "w") as file:
                json.dump(found, file)

    monkeypatch.setattr(training.machine, "no_gpu", lambda: None)
    monkeypatch.setattr(training.machine, "old_gpu", lambda: None)
    monkeypatch.setattr(training.machine, "python", child)
    problems = []
    rows = training.training(None, problems)
    assert problems == ["PEFT, x: not timed", "unsloth: no memory"]
    assert [(row.section, row.case, row.contender) for row in rows] == [
        ("training", "PEFT, 8 tokens", "without"),
        ("training", "PEFT, 8 tokens", "with"),
        ("whole_model", "PEFT, merge", "without"),
        ("whole_model", "PEFT, merge", "with"),
    ]


@pytest.mark.skipif(machine.has_gpu(), reason="there is a GPU")
def test_without_gpus_nothing_is_measured(capsys):
    assert training.training(None, []) == training.several_gpus(None, []) == []
    shown = capsys.readouterr().out
    assert "training: not measured" in shown and "needs two GPUs, this machine has 0" in shown


# --- several processes ---

TURNS, TURN = training.WARM_UP + 5, training.TURN
KERNEL = [turn % 2 == 1 for turn in range(TURNS) for _ in range(TURN)]


def report(factor=1.0):
    """Steps of 30 ms without the kernel, 20 ms with it; 9 s in the first turns and at the start of each."""
    untimed = [s // TURN < training.WARM_UP or s % TURN < training.SETTLE for s in range(len(KERNEL))]
    seconds = [9.0 if no else factor * (0.02 if on else 0.03) for no, on in zip(untimed, KERNEL, strict=True)]
    run = {"losses": [[2.0, 2.1]] * len(KERNEL), "seconds": seconds, "kernel": KERNEL, "handled": 6}
    return copy.deepcopy({"without": run | {"handled": 0}, "in turns": run})


def test_turns_of_the_slowest_process_are_timed_after_the_warm_up():
    reports = [report(), report(2.0)]
    assert training.several_problem(reports) == ""
    found = training.turns_ms(reports)
    assert found == {"without": pytest.approx([60.0] * 3), "with": pytest.approx([40.0] * 2)}


@pytest.mark.parametrize(
    ("run", "field", "value", "problem"),
    [
        ("without", "losses", [[2.0, 2.2]] * len(KERNEL), "losses differ"),
        ("in turns", "losses", [[2.0, 2.2]] * len(KERNEL), "losses differ"),
        ("in turns", "handled", 0, "dequantized nothing"),
    ],
)
def test_what_is_wrong_in_any_process_is_said(run, field, value, problem, monkeypatch):
    other = report()
    other[run][field] = value
    assert problem in training.several_problem([report(), other])
    monkeypatch.setattr(training.machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(training, "make_model", lambda folder, **sizes: None)
    monkeypatch.setattr(
        training, "launch", lambda *a, fsdp, **o: [report(), other if fsdp == 1 else report()]
    )
    problems = []
    rows = training.several_gpus(None, problems)
    assert len(problems) == 1 and problems[0].startswith("FSDP1: ") and problem in problems[0]
    assert [row.case for row in rows] == ["DDP"] * 2 + ["FSDP2"] * 2


def trained(reports):
    """Records of four tiny steps: all processes agree, and dequantize with the kernel in every other one."""
    assert training.several_problem(reports) == ""
    for one in reports:
        assert one["without"]["handled"] == 0 and one["in turns"]["kernel"] == [False, True] * 2
        assert len({str(losses) for losses in one["without"]["losses"]}) == 4
    return reports


TINY = dict(count=4, rows=1, length=16, turn=1)


@pytest.mark.skipif(machine.has_gpu(), reason="on a GPU machine accelerate takes the GPUs: see below")
def test_one_process_on_the_cpu(toy, tmp_path):
    pytest.importorskip("accelerate")
    training.ranks(toy, 0, out=str(tmp_path / "records"), **TINY)
    trained([json.loads((tmp_path / "records.0").read_text())])


@pytest.mark.long
@pytest.mark.skipif(machine.has_gpu(), reason="on a GPU machine accelerate takes the GPUs: see below")
def test_two_processes_on_the_cpu(toy):
    """DDP in the interpreter; accelerate runs FSDP on GPUs only."""
    trained(training.launch(2, folder=toy, fsdp=0, **TINY))


@pytest.mark.gpu
@pytest.mark.parametrize("fsdp", training.ENGINES.values(), ids=list(training.ENGINES))
def test_every_gpu_here(toy, fsdp):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    reports = trained(training.launch(torch.cuda.device_count(), folder=toy, fsdp=fsdp, **TINY))
    devices = [one["in turns"]["device"] for one in reports]
    assert devices == [f"cuda:{rank}" for rank in range(len(reports))]
