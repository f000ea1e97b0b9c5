"""Time the kernel beside the libraries' own functions, for the doctor."""

import statistics
import sys
import time
from functools import partial

import torch
from bitsandbytes import functional

from .core import launch_general

LEAST = 1.03  # speedup; below it the noise of a host decides
SIZE = 4096, 4096
ROUNDS = 300
OURS = "this kernel"
FAST = "unsloth.kernels.utils"


def compare() -> dict[str, float]:
    """Print the microseconds of a call and a synchronize. Return {library: speedup of the kernel}.

    It times the functions of the imported libraries as they are: call it before the switch replaces them.
    Calls take turns; a fifth is warm-up.
    """
    functions = {OURS: launch_general.dequantize_weight, "bitsandbytes": functional.dequantize_4bit}
    if FAST in sys.modules:
        # As its training's forward pass calls it: every result in one buffer.
        functions["Unsloth"] = partial(sys.modules[FAST].fast_dequantize, use_global_buffer=True)
    values = torch.randn(SIZE, dtype=torch.float16, device="cuda")
    weight, state = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    seconds: dict = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            function(weight, state)
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    us = {name: 1e6 * statistics.median(times[ROUNDS // 5 :]) for name, times in seconds.items()}
    print(f"{SIZE[0]} x {SIZE[1]} float16:", ", ".join(f"{name} {time:.0f} us" for name, time in us.items()))
    return {name: theirs / us[OURS] for name, theirs in us.items() if name != OURS}


def verdict(speedups: dict[str, float]) -> str:
    """Return what to do: use the kernel where it is faster, and leave the other libraries as they are."""
    texts = " and ".join(f"{speedup:.2f}x as fast as {name}" for name, speedup in speedups.items())
    faster = [name.lower() for name, speedup in speedups.items() if speedup >= LEAST]
    if not faster:
        return f"Do: leave it. On this machine the kernel is {texts}."
    names = ", ".join(f'"{name}"' for name in faster) if len(faster) < len(speedups) else ""
    return f"Do: use it, use_nf4_kernel({names}) before training. The kernel is {texts}."
