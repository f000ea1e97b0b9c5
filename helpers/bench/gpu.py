"""The sections gpu_time, experts and settings of `python -m helpers bench`: time on the GPU, in CUDA graphs.

A graph holds one call on each of many weights that together fill the L2 cache many times, so every call finds
it cold. The weights are stored as rows of 64: a kernel's time depends on their number of elements, not on
their shape.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch

from helpers.bench import clocks, contenders
from helpers.bench.contenders import check, exact_weight, us, why
from helpers.puzzle.checks import move_bytes
from helpers.puzzle.layers import quantized_layer
from helpers.results.store import Row
from nf4_triton import settings
from nf4_triton.launch import your_dequantize_nf4

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROTATE = 1_100_000_000  # bytes read and written by a graph
MOST_LAYERS = 2048  # of a graph

CHANGES = {"asm": [False], "hints": [False], "rows": [16, 32, 64, 128], "num_warps": [1, 2, 4]}


def layers_of(numel: int) -> list:
    """Return layers of `numel` elements each, through which the calls of a graph rotate."""
    moved = numel // 2 + numel // 64 + numel // 4096 + 2 * numel
    count = 2
    if clocks.ON_GPU:
        count = max(2, min(MOST_LAYERS, math.ceil(ROTATE / moved)))
    return [quantized_layer(64, numel // 64, torch.bfloat16, seed=index) for index in range(count)]


def moved(layer) -> torch.Tensor:
    """Return what `move_bytes` must write, in plain PyTorch. It depends on every byte that it reads."""
    words = layer.weight.data.view(-1).view(torch.int32)
    return (words ^ layer.weight.quant_state.absmax.int().repeat_interleave(8)).repeat_interleave(4)


def set_dtype(layers: list, dtype: str) -> None:
    """Let layers be dequantized to a dtype."""
    for layer in layers:
        layer.weight.quant_state.dtype = DTYPES[dtype]


def captured(layers: list, functions: dict[str, Callable], problems: list[str], where: str) -> dict:
    """Return {name: graph of a call on each layer}; the graphs share one pool for their outputs.

    A replayed graph must write the last output's bits: a launch that went past the capture would leave an
    empty graph.
    """
    pool, graphs = None, {}
    for name, fn in functions.items():
        expected = moved if fn is move_bytes else exact_weight
        try:
            check(functools.partial(fn, layers[0]), expected(layers[0]))
            graph, out = clocks.capture([functools.partial(fn, layer) for layer in layers], pool)
            check(graph.replay, expected(layers[-1]), out)
            graphs[name], pool = graph, graph.pool()
        except Exception as error:
            problems.append(f"{name} at {where}: {why(error)}")
    return graphs


def gpu_seconds(layers: list, functions: dict, rounds: int, problems: list[str], where: str) -> dict:
    """Return {name: GPU seconds a call, of each round} of functions of a layer."""
    graphs = captured(layers, functions, problems, where)
    found = {}
    for name, values in clocks.gpu_seconds(graphs, rounds).items():
        found[name] = [value / len(layers) for value in values]
    return found


def time_sizes(scope, problems: list[str]) -> Iterator[Row]:
    """Yield GPU time by size: every contender with kernels of its own, and the memory-bound reference."""
    everyone = contenders.all_contenders()
    functions = {name: everyone[name] for name in contenders.ON_GPU if name in everyone}
    functions["copy_kernel"] = move_bytes
    for numel in scope.sizes:
        layers = layers_of(numel)
        for dtype in DTYPES:
            set_dtype(layers, dtype)
            case = f"{numel} {dtype}"
            yield from us("gpu_time", case, gpu_seconds(layers, functions, scope.rounds, problems, case))


def time_experts(scope, problems: list[str]) -> Iterator[Row]:
    """Yield GPU time of stacks of experts, each stack one state. Unsloth has a kernel for them."""
    everyone = contenders.all_contenders()
    functions = {"ours": everyone["ours"], "bitsandbytes": everyone["bitsandbytes"]}
    if "unsloth_today" in everyone:
        from unsloth_zoo.temporary_patches.moe_triton_kernels import nf4_dequant_triton

        functions["unsloth_stack"] = lambda layer: nf4_dequant_triton(
            layer.weight.data, layer.weight.quant_state
        )
    for shape in scope.experts:
        layers = layers_of(math.prod(shape))
        for layer in layers:
            layer.weight.quant_state.shape = torch.Size(shape)
        case = f"{'x'.join(map(str, shape))} bf16"
        yield from us("experts", case, gpu_seconds(layers, functions, scope.rounds, problems, case))


def changes() -> dict[str, Callable]:
    """Return {name: the kernel with that change}, of CHANGES and a T4's settings, where they differ."""
    now, wanted = settings.settings(), {}
    for field, values in CHANGES.items():
        for value in values:
            wanted[f"{field}={value}"] = dataclasses.replace(now, **{field: value})
    with settings.force(card="t4"):
        wanted["T4 settings"] = settings.settings()

    def changed(layer, fields):
        with settings.force(**fields):
            return your_dequantize_nf4(layer)

    found = {}
    for name, one in wanted.items():
        if one != now:
            found[name] = functools.partial(changed, fields=dataclasses.asdict(one))
    return found


def time_settings(scope, problems: list[str]) -> Iterator[Row]:
    """Yield GPU time with one setting changed at a time, and with a T4's, beside the default."""
    functions = {"default": your_dequantize_nf4} | changes()
    for numel, dtype in scope.settings:
        layers = layers_of(numel)
        set_dtype(layers, dtype)
        seconds = gpu_seconds(layers, functions, scope.rounds, problems, f"{numel} {dtype}")
        default = seconds.pop("default", None)
        if default is None:
            continue  # it was wrong, as `problems` says
        for name, values in seconds.items():
            yield from us("settings", f"{name} at {numel} {dtype}", {"default": default, "changed": values})
