"""Which code dequantizes in real use: NF4_BACKEND=triton|torch|auto (default auto).

`triton` is the notebook's kernel, `torch` the exact oracle in plain PyTorch (any device, no compiler), `auto`
measures both once per device and dtype and says what it chose. None of this takes part in the score: the
protocol and the checks are given the kernel itself.
"""

import functools
import logging
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from helpers.nf4 import kernel as nf4_kernel
from helpers.machine import environment
from helpers.oracle import reference
from helpers.oracle.layers import quantized_layer
from helpers.measure.clocks import time_interleaved

NAMES = ("triton", "torch", "auto")
# (in_features, out_features) of a small and a mid-size layer; Triton's interpreter is timed on toys
SIZES = {"cuda": ((1024, 1024), (4096, 4096)), "cpu": ((64, 64), (128, 256))}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What was chosen, why, and microseconds a call by layer size and name where it was measured."""

    name: str
    reason: str
    measured: dict[str, dict[str, float]] = field(default_factory=dict)


def requested() -> str:
    """NF4_BACKEND in lower case, 'auto' when unset. Raises ValueError for any other name."""
    name = os.environ.get("NF4_BACKEND", "").strip().lower() or "auto"
    if name not in NAMES:
        raise ValueError(f"NF4_BACKEND={name!r}: expected one of {', '.join(NAMES)}")
    return name


def paths() -> dict[str, Callable]:
    """Both ways, each layer -> weight."""
    return {
        "triton": nf4_kernel.your_dequantize_nf4,
        "torch": lambda layer: reference.dequantize(layer.weight, layer.weight.quant_state),
    }


def choose(device="cuda", dtype: torch.dtype = torch.float16) -> Choice:
    """The path for layers of this output dtype on this device. `auto` measures at the first call only."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _choose(requested(), str(device), dtype)


@functools.cache
def _choose(name: str, device: str, dtype: torch.dtype) -> Choice:
    if name != "auto":
        return Choice(name, f"NF4_BACKEND={name}")
    if problem := environment.old_triton() or environment.old_gpu():
        choice = Choice("torch", problem)
    else:
        choice = _measure(device, dtype)
    log.warning("NF4_BACKEND=auto on %s, %s: %s (%s)", device, dtype, choice.name, choice.reason)
    return choice


def _measure(device: str, dtype: torch.dtype) -> Choice:
    gpu = device.startswith("cuda")
    measured = {}
    for size in SIZES["cuda" if gpu else "cpu"]:
        layer = quantized_layer(*size, dtype, device=device)
        calls = {name: functools.partial(call, layer) for name, call in paths().items()}
        try:
            equal = reference.same_bits(calls["triton"](), calls["torch"]())
        except Exception as error:  # whatever stops the kernel here, the other path still works
            return Choice("torch", f"the kernel cannot run here: {type(error).__name__}: {error}", measured)
        if not equal:
            return Choice(
                "torch", "the kernel's bits differ from the oracle's here: please report it", measured
            )
        times = time_interleaved(calls, rounds=5, inner=20 if gpu else 1, synchronize=True)
        measured["x".join(map(str, size))] = {
            name: statistics.median(seconds) * 1e6 for name, seconds in times.items()
        }
    best = min(("triton", "torch"), key=lambda name: sum(row[name] for row in measured.values()))
    rows = "; ".join(
        f"{size}: triton {row['triton']:.1f} us, torch {row['torch']:.1f} us"
        for size, row in measured.items()
    )
    return Choice(best, f"the faster one here: {rows}", measured)


def dequantize(layer) -> torch.Tensor:
    """The weight of a bitsandbytes `Linear4bit` layer by the chosen path, in `quant_state.dtype`."""
    weight = layer.weight
    return paths()[choose(weight.device, weight.quant_state.dtype).name](layer)
