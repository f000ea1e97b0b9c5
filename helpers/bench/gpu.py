"""The sections gpu_time and settings of `python -m helpers bench`: time on the GPU, in CUDA graphs.

A graph holds one call on each of many weights that together fill the L2 cache many times, so every call finds
it cold. The weights are stored as rows of 64: a kernel's time depends on their number of elements, not on
their shape.
"""

import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch

from helpers.bench import clocks, contenders
from helpers.bench.contenders import check, exact_weight, us, why
from helpers.bench.copy import move_bytes
from helpers.puzzle.layers import quantized_layer
from helpers.results.store import Row
from nf4_triton import settings
from nf4_triton.launch import your_dequantize_nf4

# In elements: 2**22, 2**24, and 58,720,256 are the puzzle's weights, 2**20 and 2**24 1K and 4K square.
SIZES = (
    *(2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25),
    *(58_720_256, 117_440_512, 234_881_024, 603_979_776),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BYTES = 2.516  # read and written per element
ROTATE = 1_100_000_000  # bytes read and written by a graph
MOST_LAYERS = 2048  # of a graph
# Tiles in 32-bit words, and warps, of the kernel that only moves the bytes: the best at a size counts.
COPIES = [(256, 2), (512, 4), (1024, 8), (512, 2), (1024, 4), (2048, 8)]
# Unsloth's configuration for a B200: bytes a program, warps, 32-bit words, evict_first, table by tl.gather.
B200 = (1024, 2, True, True, 2)
CHANGES = {  # arguments of settings.force; one of them may be the default
    "default": {},
    "asm=False": {"asm": False},
    "hints=False": {"hints": False},
    **{f"rows={rows}": {"rows": rows} for rows in (16, 32, 64, 128)},
    **{f"num_warps={warps}": {"num_warps": warps} for warps in (1, 2, 4)},
    "T4 settings": {"card": "t4"},
}
CHANGED = ((2**20, "bf16"), (2**24, "bf16"), (2**24, "fp16"), (234_881_024, "bf16"))  # elements


class Work(NamedTuple):
    """What one contender does in a graph."""

    calls: list[Callable[[], torch.Tensor]]
    expected: torch.Tensor  # of the last call


def captured(works: dict[str, Work], problems: list[str], where: str) -> dict:
    """Return {name: graph of its calls}; the graphs share one pool for their outputs.

    A replayed graph must write the last output's bits: a launch that went past the capture would leave an
    empty graph.
    """
    pool, graphs = None, {}
    for name, work in works.items():
        try:
            if not clocks.ON_GPU:
                check(work.calls[-1], work.expected)
                graphs[name] = None
                continue
            graph, out = clocks.capture(work.calls, pool)
            check(graph.replay, work.expected, out)
            graphs[name], pool = graph, graph.pool()
        except Exception as error:
            problems.append(f"{name} at {where}: {why(error)}")
    return graphs


def gpu_seconds(works: dict[str, Work], problems: list[str], where: str) -> dict:
    """Return {name: GPU seconds a call, of each round}."""
    graphs = captured(works, problems, where)
    found = {}
    for name, values in clocks.gpu_seconds(graphs, clocks.ROUNDS).items():
        found[name] = [value / len(works[name].calls) for value in values]
    return found


# --- weights ---


def layers_of(numel: int, dtype: str) -> list:
    """Return layers of `numel` elements each, through which the calls of a graph rotate."""
    count = 2
    if clocks.ON_GPU:
        count = max(count, min(MOST_LAYERS, math.ceil(ROTATE / (BYTES * numel))))
    return [quantized_layer(64, numel // 64, DTYPES[dtype], seed=index) for index in range(count)]


def works_of(functions: dict[str, Callable], layers: list, expected: torch.Tensor) -> dict[str, Work]:
    """Return {name: Work of a call on each layer}. expected: what each returns for the last layer."""
    works = {}
    for name, function in functions.items():
        works[name] = Work([functools.partial(function, layer) for layer in layers], expected)
    return works


# --- gpu_time ---


def moved(layer) -> torch.Tensor:
    """Return what `move_bytes` must write, in plain PyTorch. It depends on every byte that it reads."""
    words = layer.weight.data.view(-1).view(torch.int32)
    return (words ^ layer.weight.quant_state.absmax.int().repeat_interleave(8)).repeat_interleave(4)


def with_kernels() -> dict[str, Callable]:
    """Return {name: layer -> weight} of every kernel. PEFT launches bitsandbytes'."""
    functions = contenders.some_contenders("ours", "unsloth_today", "unsloth_classic", "bitsandbytes")
    if unsloth_today := functions.get("unsloth_today"):

        def as_on_b200(layer):
            """In its B200 configuration, which is part of its launch cache's key."""
            with mock.patch.object(sys.modules["unsloth.kernels.nf4"], "_CONFIG_OVERRIDE", B200):
                return unsloth_today(layer)

        functions["unsloth_b200"] = as_on_b200
    return functions


def time_sizes(problems: list[str]) -> Iterator[Row]:
    """Yield GPU time by size: every kernel, and the best of the copies as the memory-bound reference."""
    functions = with_kernels()
    copies = {}
    for tile, warps in COPIES:
        copies[f"copy {tile}/{warps}"] = functools.partial(move_bytes, tile=tile, num_warps=warps)
    for numel in SIZES:
        for dtype in DTYPES:
            layers, case = layers_of(numel, dtype), f"{numel} {dtype}"
            works = works_of(functions, layers, exact_weight(layers[-1]))
            works |= works_of(copies, layers, moved(layers[-1]))
            seconds = gpu_seconds(works, problems, case)
            tried = [seconds.pop(name) for name in copies if name in seconds]
            if tried:
                seconds["copy_kernel"] = min(tried, key=statistics.median)
            yield from us("gpu_time", case, seconds)


# --- settings ---


def changed(fields: dict, layer) -> torch.Tensor:
    """Dequantize with these settings forced."""
    with settings.force(**fields):
        return your_dequantize_nf4(layer)


def time_settings(problems: list[str]) -> Iterator[Row]:
    """Yield GPU time with one setting changed at a time, and with a T4's, beside the default."""
    functions = {name: functools.partial(changed, fields) for name, fields in CHANGES.items()}
    for numel, dtype in CHANGED:
        layers, case = layers_of(numel, dtype), f"{numel} {dtype}"
        works = works_of(functions, layers, exact_weight(layers[-1]))
        yield from us("settings", case, gpu_seconds(works, problems, case))
