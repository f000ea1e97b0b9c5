"""GPU time of training steps."""

import contextlib
import itertools
import math
import types

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from driver import SMALLEST
from helpers import machine
from helpers.bench import training

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


@pytest.mark.skipif(machine.has_gpu(), reason="the section itself runs on a GPU")
def test_nested_and_flat_are_compared_and_measured(monkeypatch, capsys):
    """With gradient checkpointing, the backward pass also dequantizes for the forward pass that it
    repeats."""
    modes, backward = [], training.Trainer.backward
    mode = torch.get_deterministic_debug_mode  # 0: off, 2: an error where nothing is deterministic
    monkeypatch.setattr(training.Trainer, "backward", lambda *given: modes.append(mode()) or backward(*given))
    monkeypatch.setattr(training, "CHECKPOINTED", [(1, 16)])
    found, problems = training.time_steps("peft", SMALLEST, [(1, 16)])
    reports = capsys.readouterr().out
    # Each case compares two results, then runs three steps of each variant; the first one warms up.
    assert modes == 3 * [2, 2, *[0] * 6]
    cases = {"PEFT nested": 4, "PEFT nested, checkpointing": 7, "PEFT flat": 4}
    for label, dequantized in cases.items():
        assert f"{label}, 16 tokens: The kernel dequantized {dequantized} of " in reports
    labels = [f"{label}, 16 tokens" for label in cases]
    steps = itertools.product(labels, training.VARIANTS, (*training.sums([]), "wall ms"))
    assert not problems and [(case, name, unit) for case, unit, name, _ in found] == list(steps)


def test_the_sums_of_what_the_gpu_ran(monkeypatch):
    def event(name, us, device=DeviceType.CUDA, marked=False):
        one = FunctionEvent(0, name, 0, 0, us, device_type=device)
        one.is_user_annotation = marked
        return one

    ran = [event("gemm", 500), event("kDequantizeBlockwise<__half>", 30), event("_nf4_dequant_kernel", 70)]
    ran += [event("cudaLaunchKernel", 9, DeviceType.CPU), event("## Call", 600, marked=True)]
    profiled = types.SimpleNamespace(events=lambda: ran)
    monkeypatch.setattr(training, "profile", lambda activities: contextlib.nullcontext(profiled))
    taken = training.sums(training.gpu_events(lambda: None))
    assert taken == {"GPU ms": 0.6, "GPU ms dequantizing": 0.1, "launches": 3}


def test_other_results_are_not_measured(monkeypatch):
    results = iter([1.5, 1.25, math.nan, math.nan])
    trainer = types.SimpleNamespace(results=lambda ids: [torch.tensor(next(results))])
    monkeypatch.setattr(training, "trainers_of", lambda *_: [("A", trainer, [(1, 16), (1, 32)])])
    found, problems = training.time_steps("peft", {"vocab_size": 320}, [])
    assert not found and [problem.split(": ", 2)[::2] for problem in problems] == [
        ["A, 16 tokens", "loss or gradients differ with the kernel: not measured"],
        ["A, 32 tokens", "the kernel dequantized nothing: not measured"],
    ]
