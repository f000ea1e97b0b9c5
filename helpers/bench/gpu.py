"""The section gpu_time of `python -m helpers bench`: time on the GPU, by the notebook's clock.

It replays CUDA graphs of one call on each of many weights, which together fill the L2 cache many times, so
every call finds it cold. The weights are stored as rows of 64: a kernel's time depends on their number of
elements, not on their shape.
"""

import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import triton

from helpers.bench import clocks, contenders
from helpers.puzzle import turns
from helpers.puzzle.layers import ON_GPU, quantized_layer
from nf4_triton import dequantize

# In elements: the puzzle's weights have 2**22, 2**24, and 58,720,256; 1K and 4K square are 2**20 and 2**24.
SIZES = 2**16, 2**20, 2**22, 2**23, 2**24, 58_720_256, 234_881_024, 603_979_776
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROTATE = 220_000_000  # elements that a graph dequantizes, as in the notebook: 0.5 GB read and written
MOST_LAYERS = 2048  # in a graph
# Unsloth's configuration for a B200: bytes per program, warps, 32-bit words, evict_first, table by tl.gather.
B200 = (1024, 2, True, True, 2)


def layers_of(numel: int, dtype: str, **more) -> list:
    """Return layers of `numel` elements each, through which the calls of a graph rotate. more: arguments of
    quantized_layer."""
    count = max(2, min(MOST_LAYERS, ROTATE // numel))
    return [quantized_layer(64, numel // 64, DTYPES[dtype], seed=index, **more) for index in range(count)]


def gpu_us(function: Callable, layers: list) -> float:
    """Return the GPU microseconds of a call on one of the layers, NaN on a CPU.

    Raises AssertionError if a result or a replay differs from bitsandbytes.
    """
    if not ON_GPU:
        return math.nan
    mlp = types.SimpleNamespace(up_proj=layers[0], gate_proj=layers[0], down_proj=layers[0])
    _, us, _ = turns.times_of(function, layers, mlp, None)
    return us


def timers_of(functions: dict[str, Callable], layers: list, problems: list[str], where: str) -> dict:
    """Return {name: function that returns GPU microseconds} of those that are exact on these layers."""
    calls = {name: functools.partial(function, layers[-1]) for name, function in functions.items()}
    exact = contenders.exact(calls, contenders.exact_weight(layers[-1]), problems, where)
    return {name: functools.partial(gpu_us, functions[name], layers) for name in exact}


def copy_us(layers: list) -> float:
    """Return the GPU microseconds in which torch copies as many bytes as dequantizing a layer moves."""
    if not ON_GPU:
        return math.nan
    packed, state = layers[0].weight, layers[0].weight.quant_state
    moved = packed.nbytes + state.absmax.nbytes + state.dtype.itemsize * math.prod(state.shape)
    read = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=packed.device)  # as many are written
    sources = [read.clone() for _ in layers]
    return 1e3 * triton.testing.do_bench_cudagraph(lambda: [x.clone() for x in sources]) / len(sources)


def as_on_b200(unsloth_today: Callable, layer) -> torch.Tensor:
    """Dequantize with Unsloth in its B200 configuration, which is part of the key of its launch cache."""
    with mock.patch.object(sys.modules["unsloth.kernels.nf4"], "_CONFIG_OVERRIDE", B200):
        return unsloth_today(layer)


def time_sizes(problems: list[str]) -> Iterator[tuple]:
    """Yield GPU time by size, of every kernel, and of torch's copy of as many bytes.

    Weights are nested, or flat if the contender's name says so.
    """
    # PEFT launches bitsandbytes' kernel.
    functions = contenders.installed("ours", "unsloth_today", "unsloth_classic", "bitsandbytes")
    of_flat = {"dequantize, flat": dequantize, "bitsandbytes, flat": functions["bitsandbytes"]}
    if unsloth_today := functions.get("unsloth_today"):
        functions["unsloth_b200"] = functools.partial(as_on_b200, unsloth_today)
    for numel, dtype in itertools.product(SIZES, DTYPES):
        case = f"{numel} {dtype}"
        layers, flat = layers_of(numel, dtype), layers_of(numel, dtype, nested=False)
        timers = timers_of(functions, layers, problems, case) | timers_of(of_flat, flat, problems, case)
        timers["torch's copy"] = functools.partial(copy_us, layers)
        yield case, "us", clocks.in_turns(timers, clocks.GPU_ROUNDS)
