"""The section gpu_time of `python -m helpers bench`: time on the GPU, in CUDA graphs.

A graph holds one call on each of many weights that together fill the L2 cache many times, so every call finds
it cold. The weights are stored as rows of 64: a kernel's time depends on their number of elements, not on
their shape.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from helpers.bench import clocks, contenders
from helpers.bench.contenders import check, why
from helpers.puzzle.layers import ON_GPU, quantized_layer
from nf4_triton import dequantize

# In elements: 2**22, 2**24, and 58,720,256 are the puzzle's weights, 2**20 and 2**24 1K and 4K square.
SIZES = (
    2**16,
    2**18,
    2**20,
    2**22,
    2**23,
    2**24,
    2**25,
    58_720_256,
    117_440_512,
    234_881_024,
    603_979_776,
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROTATE = 220_000_000  # elements that a graph dequantizes, as in the notebook: 0.5 GB read and written
MOST_LAYERS = 2048  # of a graph
# Unsloth's configuration for a B200: bytes a program, warps, 32-bit words, evict_first, table by tl.gather.
B200 = (1024, 2, True, True, 2)


def gpu_us(works: dict[str, tuple], problems: list[str], where: str) -> dict[str, list[float]]:
    """Return {name: GPU microseconds of a call, one value a round}.

    works: {name: (calls of a graph, what the last one must return)}.
    A replayed graph must write the last output's bits: a launch that went past the capture would leave an
    empty graph. The graphs share one pool for their outputs.
    """
    timers = {}
    pool = None
    for name, (calls, expected) in works.items():
        try:
            if not ON_GPU:
                check(calls[-1], expected)
                timers[name] = lambda: math.nan
                continue
            graph, out = clocks.capture(calls, pool)
            check(graph.replay, expected, out)
            timers[name] = clocks.gpu_timer(graph, len(calls))
            pool = graph.pool()
        except Exception as error:
            problems.append(f"{name} at {where}: {why(error)}")
    return clocks.in_turns(timers, clocks.ROUNDS)


# --- weights ---


def layers_of(numel: int, dtype: str, **more) -> list:
    """Return layers of `numel` elements each, through which the calls of a graph rotate; more: of
    quantized_layer."""
    count = max(2, min(MOST_LAYERS, ROTATE // numel))
    return [quantized_layer(64, numel // 64, DTYPES[dtype], seed=index, **more) for index in range(count)]


def works_of(functions: dict[str, Callable], arguments: list, expected: torch.Tensor) -> dict[str, tuple]:
    """Return the works of a call on each argument. expected: what each function returns for the last one."""
    return {
        name: ([functools.partial(function, one) for one in arguments], expected)
        for name, function in functions.items()
    }


# --- gpu_time ---


def sources_of(layers: list, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor for each layer; copying it moves as many bytes as dequantizing the layer."""
    packed = layers[0].weight
    moved = packed.nbytes + packed.quant_state.absmax.nbytes + weight.nbytes
    numel = moved // 2 // weight.itemsize  # a copy reads one half and writes the other
    return [torch.randn(numel, dtype=weight.dtype, device=weight.device) for _ in layers]


def as_on_b200(unsloth_today: Callable, layer) -> torch.Tensor:
    """Dequantize by Unsloth in its B200 configuration, which is part of its launch cache's key."""
    with mock.patch.object(sys.modules["unsloth.kernels.nf4"], "_CONFIG_OVERRIDE", B200):
        return unsloth_today(layer)


def time_sizes(problems: list[str]) -> Iterator[tuple]:
    """Yield GPU time by size: every kernel, and torch's copy of as many bytes as the reference.

    Weights are nested, or flat where the contender's name says so.
    """
    # PEFT launches bitsandbytes' kernel.
    functions = contenders.installed("ours", "unsloth_today", "unsloth_classic", "bitsandbytes")
    of_flat = {"dequantize, flat": dequantize, "bitsandbytes, flat": functions["bitsandbytes"]}
    if unsloth_today := functions.get("unsloth_today"):
        functions["unsloth_b200"] = functools.partial(as_on_b200, unsloth_today)
    for numel in SIZES:
        for dtype in DTYPES:
            case = f"{numel} {dtype}"
            layers = layers_of(numel, dtype)
            expected = contenders.exact_weight(layers[-1])
            works = works_of(functions, layers, expected)
            sources = sources_of(layers, expected)
            works |= works_of({"torch's copy": torch.clone}, sources, sources[-1])
            flat = layers_of(numel, dtype, nested=False)
            works |= works_of(of_flat, flat, contenders.exact_weight(flat[-1]))
            yield case, "us", gpu_us(works, problems, case)
