"""Time the kernel beside the libraries' own functions: all sizes in `bench`, one in `doctor`."""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from bitsandbytes import functional

from .core import launch_general

LEAST = 1.03  # speedup; below it the noise of a host decides
SIZES = ((1024, 1024), (1024, 4096), (4096, 4096), (4096, 14336), (8192, 28672))
OURS = "this kernel"
FAST = "unsloth.kernels.utils"


def medians(calls: Mapping[str, Callable], rounds: int) -> dict[str, float]:
    """Return the microseconds of a call and a synchronize. Calls take turns; a fifth is warm-up."""
    seconds: dict = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(times[rounds // 5 :]) for name, times in seconds.items()}


def compare(sizes: Iterable[tuple[int, int]] = SIZES, rounds: int = 500) -> dict[str, float]:
    """Print a line per size and dtype. Return {library: speedup of the kernel, as a geometric mean}.

    It times the functions of the imported libraries as they are: call it before the switch replaces them.
    """
    functions = {OURS: launch_general.dequantize_weight, "bitsandbytes": functional.dequantize_4bit}
    if FAST in sys.modules:
        # As its training's forward pass calls it: every result in one buffer.
        functions["Unsloth"] = partial(sys.modules[FAST].fast_dequantize, use_global_buffer=True)
    ratios = defaultdict(list)
    for rows, columns in sizes:
        for dtype in (torch.float16, torch.bfloat16):
            values = torch.randn(rows, columns, dtype=dtype, device="cuda")
            weight, state = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
            del values
            calls = {name: partial(function, weight, state) for name, function in functions.items()}
            us = medians(calls, rounds)
            texts = [f"{name} {time:.0f} us" for name, time in us.items()]
            print(f"{rows} x {columns} {str(dtype).removeprefix('torch.')}: {', '.join(texts)}", flush=True)
            ours = us.pop(OURS)
            for name, theirs in us.items():
                ratios[name].append(theirs / ours)
    return {name: statistics.geometric_mean(found) for name, found in ratios.items()}


def verdict(speedups: dict[str, float]) -> str:
    """Return what to do: use the kernel where it is faster, and leave the other libraries as they are."""
    texts = " and ".join(f"{speedup:.2f}x as fast as {name}" for name, speedup in speedups.items())
    faster = [name.lower() for name, speedup in speedups.items() if speedup >= LEAST]
    if not faster:
        return f"Do: leave it. On this machine the kernel is {texts}."
    names = ", ".join(f'"{name}"' for name in faster) if len(faster) < len(speedups) else ""
    return f"Do: use it, use_nf4_kernel({names}) before training. The kernel is {texts}."
