import contextlib
import json

import pytest
import torch

from helpers.machine import environment
from helpers.training import tiny_models, train_bench

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The worker on a toy: the real thing in miniature, whose times mean nothing."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    folder = tiny_models.make(tmp_path_factory.mktemp("model"), **sizes)
    return train_bench.worker("peft", str(folder), sizes=((1, 16),), rounds=1)


def test_worker(measured):
    [size] = measured["sizes"]
    assert size["same_bits"] and size["repeatable"] and size["tokens"] == 16
    assert size["strict"] and size["different_results"] == {"without": 1, "with": 1}
    # seven forward, and backward all but the first layer's q, k and v, whose input needs no gradient
    assert size["calls"]["library"] == 0
    assert size["calls"]["kernel"] + size["calls"]["fused"] == 7 + 4
    assert {"low", "p20", "p50", "p80", "high"} <= size["speedup"].keys() and size["with"]["ms"]["p50"] > 0
    assert "matmul_4bit, with the kernel" in measured["host"]
    json.dumps(measured)


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
    found = train_bench._sameness(arm, backward, optimizer, [parameter])
    assert found == {
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
        train_bench._sameness(lambda name: contextlib.nullcontext(), backward, optimizer, [])


@pytest.mark.parametrize(("longest", "rounds"), [(1000, 7), (-1, 1)])
def test_a_slow_card_measures_fewer_rounds_and_says_so(monkeypatch, longest, rounds):
    monkeypatch.setattr(train_bench, "LONGEST", longest)
    found = train_bench._times(lambda name: contextlib.nullcontext(), lambda: None, 8192, 7)
    assert found["rounds"] == rounds and found["speedup"]["low"] <= found["speedup"]["p50"]


def test_table(measured):
    text = train_bench.table({"libraries": {"peft": measured, "unsloth": {"failed": "no such thing"}}})
    assert "16 tokens" in text and "caught 11 of 11" in text and "same bits: True" in text
    assert "unsloth: failed: no such thing" in text and "the kernel alone" in text


def test_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    assert train_bench.main(["--json", str(tmp_path / "found.json")]) == 0
    assert "not measured (No CUDA GPU" in capsys.readouterr().out
    assert "not_measured" in json.loads((tmp_path / "found.json").read_text())["data"]


@pytest.mark.gpu
def test_a_worker_that_fails_is_reported(monkeypatch):
    def fail(arguments, folder):
        if arguments[0] == "--worker":
            raise OSError("no memory")

    monkeypatch.setattr(train_bench, "_run", fail)
    assert train_bench.measure(["peft"])["libraries"]["peft"]["failed"] == "no memory"
