import contextlib
import json

import msgspec
import pytest
import torch

from helpers import machine
from helpers.results import store as results
from helpers.training import tiny_models, train_bench

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


def test_worker_and_table(tmp_path, monkeypatch):
    """The worker on a toy: the real thing in miniature, whose times mean nothing."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    folder = tiny_models.make(tmp_path, **sizes)
    monkeypatch.setattr(train_bench, "REPEATS", 2)  # the interpreter is slow
    monkeypatch.setattr(train_bench, "WARM_UP", 0)
    measured = train_bench.worker("peft", str(folder), sizes=((1, 16, 1),), prompts=(24,), rounds=1)
    [size] = measured["sizes"]
    assert size["same_bits"] and size["repeatable"] and size["tokens"] == 16
    assert size["strict"] and size["different_results"] == {"without": 1, "with": 1}
    # seven forward, and backward all but the first layer's q, k and v, whose input needs no gradient
    assert size["calls"]["library"] == 0
    assert size["calls"]["kernel"] + size["calls"]["fused"] == 7 + 4
    assert {"low", "p20", "p50", "p80", "high"} <= size["speedup"].keys() and size["with"]["ms"]["p50"] > 0
    json.dumps(measured)
    rows = {row["name"]: row for row in measured["operations"]}
    assert list(rows) == ["prefill, 24 tokens", "dequantize the model", "merge the adapter"]
    for row in rows.values():  # some libraries decode a layer more than once
        assert "failed" not in row, row["failed"]
        assert row["same_bits"] and row["calls"]["library"] == 0
        assert row["calls"]["kernel"] >= 7 and row["calls"]["kernel"] % 7 == 0 and row["with"]["p50"] > 0
    assert rows["merge the adapter"]["calls"]["kernel"] == 7
    for arm in train_bench.ARMS:  # no GPU, no GPU time
        size[arm] |= {"gpu_ms": 2.0, "dequantize_ms": 0.5}
    data = {"libraries": {"peft": measured, "unsloth": {"failed": "no such thing"}}}
    data = msgspec.convert(data, results.Training)
    [_, row] = train_bench.steps(data)
    assert row[:2] == ["PEFT + bitsandbytes", "16"]
    assert row[-3:] == ["25% -> 25%", f"{size['calls']['kernel']} of {size['calls']['kernel']}", "yes"]
    merge = train_bench.operations(data)[-1]
    assert merge[0] == "PEFT + bitsandbytes: merge the adapter" and merge[-2:] == ["7 of 7", "yes"]
    assert "all of 1 rounds" in merge[3], "no interval of 95%"


def test_an_operation_that_fails_is_reported():
    def prepare():
        raise RuntimeError("out of memory")

    row = train_bench.operation("merge", lambda name: contextlib.nullcontext(), prepare, 1)
    assert row == {"name": "merge", "failed": "RuntimeError: out of memory"}
    data = msgspec.convert({"libraries": {"peft": {"operations": [row]}}}, results.Training)
    cells = ["PEFT + bitsandbytes: merge", "failed", "", "", "", "RuntimeError: out of memory"]
    assert train_bench.operations(data)[1] == cells


def test_what_can_be_done_once_is_made_outside_of_the_clock():
    made, done = [], []

    def prepare():
        made.append(len(made))
        return lambda made=made[-1]: done.append(made)

    row = train_bench.times(lambda name: contextlib.nullcontext(), prepare, 3)
    assert row["rounds"] == 3 and made == done == list(range(2 * 5))


@pytest.mark.parametrize(
    ("without", "with_it", "repeatable", "same"),
    [("aaaaa", "aaaaa", True, True), ("aaaaa", "aabaa", True, False), ("aaaab", "aabaa", False, True)],
)
@pytest.mark.parametrize("strict", [True, False])
def test_bits_are_compared_over_several_steps(without, with_it, repeatable, same, strict):
    """One step that repeats by chance says nothing of a backward that varies now and then."""
    steps, now = {"without": iter(without), "with": iter(with_it)}, []
    parameter = torch.nn.Parameter(torch.zeros(1))
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )

    def arm(name):
        now[:] = [name]
        return contextlib.nullcontext()

    def backward():
        assert torch.are_deterministic_algorithms_enabled()
        if not strict and not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError("some_backward does not have a deterministic implementation")
        parameter.grad = torch.full((1,), float(ord(next(steps[now[0]]))))
        return torch.zeros(())

    optimizer = torch.optim.SGD([parameter], lr=0.0)
    assert train_bench.sameness(arm, backward, optimizer, [parameter]) == {
        "repeatable": repeatable,
        "same_bits": same,
        "different_results": {"without": len(set(without)), "with": len(set(with_it))},
        "strict": strict,
    }
    after = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    assert before == after == (False, False)


def test_another_failure_of_a_compared_step_is_not_hidden():
    def backward():
        raise RuntimeError("out of memory")

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        train_bench.sameness(lambda name: contextlib.nullcontext(), backward, optimizer, [])


@pytest.mark.parametrize(("longest", "rounds"), [(1000, 7), (-1, 1)])
def test_a_slow_card_measures_fewer_rounds_and_says_so(monkeypatch, longest, rounds):
    monkeypatch.setattr(train_bench, "LONGEST", longest)
    row = train_bench.times(lambda name: contextlib.nullcontext(), lambda: int, 7)
    assert row["rounds"] == rounds and row["speedup"]["low"] <= row["speedup"]["p50"]


def test_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    assert train_bench.main([]) == 0
    assert "not measured (No CUDA GPU" in capsys.readouterr().out and not any(tmp_path.iterdir())


def test_a_worker_that_fails_is_reported(monkeypatch, tmp_path, capsys):
    def fail(arguments, **options):
        if "make" not in arguments:
            raise machine.ChildFailed("no memory")

    monkeypatch.setattr(machine, "python", fail)
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    path = train_bench.measure()
    libraries = results.read(path.name, path.parent).data.libraries
    assert {name: each.failed for name, each in libraries.items()} == dict.fromkeys(
        train_bench.LIBRARIES, "no memory"
    )
    assert "unsloth: failed: no memory" in capsys.readouterr().out


def test_the_workers_leave_their_files_where_they_run(monkeypatch, tmp_path):
    """What is done with a GPU, by workers in this process that measure nothing."""
    seen = []

    def here(arguments, folder, **options):
        monkeypatch.chdir(folder)
        assert arguments[:3] == ["-m", "helpers", "train-bench"] and train_bench.main(arguments[3:]) == 0

    monkeypatch.setattr(machine, "no_gpu", lambda: None)
    monkeypatch.setattr(machine, "old_gpu", lambda: None)
    monkeypatch.setattr(machine, "python", here)
    monkeypatch.setattr(tiny_models, "make", lambda folder, **sizes: seen.append(sizes["num_hidden_layers"]))
    monkeypatch.setattr(train_bench, "worker", lambda library, folder: seen.append(folder) or {"sizes": []})
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    assert train_bench.main([]) == 0
    monkeypatch.chdir(tmp_path)
    data = results.read("training", machine.result_folder()).data
    assert list(data.libraries) == ["peft", "unsloth"] and data.layers == train_bench.LAYERS
    assert not any(one.failed for one in data.libraries.values())
    assert seen[0] == train_bench.LAYERS and seen[1] == seen[2]
