"""python -m helpers bench: time the kernel against every library, section by section.

All contenders take turns in one process, and none is timed before its result is bit-identical to the plain
torch reference. A section is printed and stored under results/<card>/ as soon as it is done, so a run that is
cut short keeps what it has. Without a GPU results are compared at small sizes, and no time is shown.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from helpers import machine
from helpers.bench import clocks, compiled, contenders, training
from helpers.bench.contenders import check, exact_calls, exact_weight, us, why
from helpers.bench.copy_kernel import VARIANTS
from helpers.puzzle import protocol
from helpers.puzzle.layers import quantized_layer
from helpers.results import store
from helpers.results.store import Row
from nf4_triton import kernel
from nf4_triton.launch import your_dequantize_nf4

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROTATE = 1_100_000_000  # bytes through which GPU calls rotate: many times any L2 cache
MOST_LAYERS = 2048  # ... in at most so many layers


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a run covers. Sizes are in elements."""

    # 1K, 4K and 8K square are 2**20, 2**24 and 2**26; 2**22, 2**24 and 58,720,256 are the official weights.
    sizes: tuple[int, ...] = (2**16, 2**18, 2**20, 2**22, 2**24, 58_720_256, 2**26, 234_881_024, 2**30)
    settings: tuple = ((2**20, "bf16"), (2**24, "bf16"), (2**24, "fp16"), (234_881_024, "bf16"))
    layer: tuple[int, int] = (4096, 1024)  # (in, out) of host and compiled times: the smallest official one
    tokens: tuple[int, ...] = (64, 512, 2048)
    weights: int = 24  # under one torch.compile
    rounds: int = 20
    inner: int = 100  # calls a round of host times; far below the launch queue's depth


FULL = Scope()
ON_CPU = Scope((2**10, 2**12), ((2**10, "bf16"),), (128, 64), (8,), 2, 2, 1)


def in_new_process(function: Callable, **variables) -> str:
    """Call a function of this module in a new process; return the last line that it prints."""
    code = f"from helpers.bench import bench; bench.{function.__name__}()"
    return machine.python(["-c", code], variables=variables, timeout=600).out.splitlines()[-1]


# --- the puzzle's protocol ---


def time_protocol(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield the puzzle's line, then its test: every library, the kernel in three launch forms, and the
    ordinary launches of Unsloth's kernel and ours."""
    ratios = protocol.puzzles_line(your_dequantize_nf4)
    if ratios:
        yield Row("protocol", "puzzle's line", "unsloth_today", "x", ratios)
    everyone = contenders.all_contenders()
    exact = exact_calls(everyone, quantized_layer(*scope.layer, torch.bfloat16), problems)
    seconds, errors = protocol.in_turns({name: everyone[name] for name in exact})
    problems += [f"{name}: {error}" for name, error in errors.items()]
    for name, values in seconds.items():
        yield Row("protocol", "total", name, "s", values)
    if clocks.ON_GPU and "unsloth_today" in seconds:
        # Unsloth reads the variable when it is imported.
        printed = in_new_process(print_ordinary_launches, UNSLOTH_TRITON_FAST_LAUNCH="0")
        for name, values in json.loads(printed).items():
            yield Row("protocol", "ordinary launches", name, "s", values)


def print_ordinary_launches() -> None:
    """Print the seconds of Unsloth's kernel without its launch replay, and of ours by kernel[grid]."""
    everyone = contenders.all_contenders()
    both = {"unsloth_ordinary": everyone["unsloth_today"], "ordinary": everyone["ordinary"]}
    seconds, errors = protocol.in_turns(both)
    if errors:
        raise RuntimeError(errors)
    print("\n" + json.dumps(seconds))


# --- time on the GPU ---


def captured(layers: list, functions: dict[str, Callable], problems: list[str], where: str) -> dict:
    """Return {name: graph of a call on each layer}; the graphs share one pool for their outputs.

    A replayed graph must write the last output's bits: a launch that went past the capture would leave an
    empty graph.
    """
    pool, graphs = None, {}
    for name, fn in functions.items():
        expected = getattr(fn, "expected", exact_weight)  # a copy kernel's result is no weight
        try:
            check(functools.partial(fn, layers[0]), expected(layers[0]))
            graph, out = clocks.capture([functools.partial(fn, layer) for layer in layers], pool)
            check(graph.replay, expected(layers[-1]), out)
            graphs[name], pool = graph, graph.pool()
        except Exception as error:
            problems.append(f"{name} at {where}: {why(error)}")
    return graphs


def gpu_seconds(scope: Scope, numel: int, dtype: str, functions: dict, problems: list[str]) -> dict:
    """Return {name: GPU seconds a call, of each round} of functions of a layer, at one size."""
    moved = numel // 2 + numel // 64 + numel // 4096 + 2 * numel
    count = max(2, min(MOST_LAYERS, math.ceil(ROTATE / moved))) if clocks.ON_GPU else 2
    layers = [quantized_layer(64, numel // 64, DTYPES[dtype], seed=index) for index in range(count)]
    graphs = captured(layers, functions, problems, f"{numel} {dtype}")
    seconds = clocks.gpu_seconds(graphs, scope.rounds)
    return {name: [value / count for value in values] for name, values in seconds.items()}


def time_on_gpu(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield GPU time by size: every contender with kernels of its own, and the memory-bound reference."""
    everyone, copies = contenders.all_contenders(), {str(copy): copy for copy in VARIANTS}
    functions = {name: everyone[name] for name in contenders.ON_GPU if name in everyone}
    for numel in scope.sizes:
        for dtype in DTYPES:
            seconds = gpu_seconds(scope, numel, dtype, functions | copies, problems)
            of_copies = [seconds.pop(name) for name in copies if name in seconds]
            if of_copies:
                seconds["copy_kernel"] = min(of_copies, key=statistics.median)
            yield from us("gpu_time", f"{numel} {dtype}", seconds)


CHANGES = {  # of Settings, one at a time; words for small tensors too
    "asm=False": {"asm": False},
    "hints=False": {"hints": False},
    "stage=False": {"stage": False},
    "words=2": {"words": 2, "words_small": 2},
    "words=4": {"words": 4, "words_small": 4},
    "words=8": {"words": 8, "words_small": 8},
    "num_warps=2": {"num_warps": 2},
    "num_warps=8": {"num_warps": 8},
}


def changes(numel: int, dtype: str) -> dict[str, Callable]:
    """Return {name: the kernel with that change}, of CHANGES that change the launch of such a tensor."""
    now, found = kernel.settings(), {}

    def constexprs(settings):
        return kernel.kernel_constexprs(DTYPES[dtype], True, 6, 8, numel, settings)

    def changed(layer, settings):
        with kernel.force(**dataclasses.asdict(settings)):
            return your_dequantize_nf4(layer)

    for name, change in CHANGES.items():
        settings = dataclasses.replace(now, **change)
        if constexprs(settings) != constexprs(now):
            found[name] = functools.partial(changed, settings=settings)
    return found


def time_settings(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield GPU time with one setting changed at a time, beside the default."""
    for numel, dtype in scope.settings:
        functions = {"default": your_dequantize_nf4} | changes(numel, dtype)
        seconds = gpu_seconds(scope, numel, dtype, functions, problems)
        default = seconds.pop("default", None)
        for name, values in seconds.items() if default else ():
            yield from us("settings", f"{name} at {numel} {dtype}", {"default": default, "changed": values})


# --- time on the host ---


def print_first_call() -> None:
    """Print the seconds of the first call in this process, with the layer on the GPU already."""
    layer = quantized_layer(*FULL.layer, torch.bfloat16)
    clocks.synchronize()
    start = time.perf_counter()
    your_dequantize_nf4(layer)
    print(time.perf_counter() - start)


def first_call() -> Iterator[Row]:
    """Yield the first call of new processes: with the kernel compiled before, and with an empty cache."""
    warm, cold = [], []
    for _ in range(2):
        warm.append(float(in_new_process(print_first_call)))
        with tempfile.TemporaryDirectory() as folder:
            cold.append(float(in_new_process(print_first_call, TRITON_CACHE_DIR=folder)))
    yield Row("host_time", "first_call", "ours", "s", warm)
    yield Row("host_time", "first_call", "ours_empty_cache", "s", cold)


def time_on_host(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time until a call returns, with a synchronize, and of first calls: new layer, new process."""
    everyone, sizes = contenders.all_contenders(), (*scope.layer, torch.bfloat16)
    calls = exact_calls(everyone, quantized_layer(*sizes), problems)
    with protocol.own_libraries():
        yield from us("host_time", "until_return", clocks.host_seconds(calls, scope.rounds, scope.inner))
        waited = clocks.host_seconds(calls, scope.rounds, scope.inner, wait=True)
        yield from us("host_time", "synchronized", waited)
        layers = [quantized_layer(*sizes, seed=index) for index in range(2 * scope.rounds)]
        new = {name: map(everyone[name], layers).__next__ for name in calls}  # each call takes another layer
        yield from us("host_time", "first_call_new_layer", clocks.host_seconds(new, scope.rounds, 1))
    if clocks.ON_GPU:
        yield from first_call()


def time_axolotl(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time of Axolotl's own dequantization, without the switch and with it."""
    try:
        from axolotl.kernels.quantize import dequantize as axolotls
    except Exception as error:  # it reaches for bitsandbytes' CUDA library
        print(f"axolotl: not measured ({why(error)})")
        return
    layer, seconds = quantized_layer(*scope.layer, torch.bfloat16), {}
    call = functools.partial(axolotls, layer.weight.data, layer.weight.quant_state)
    for name in clocks.turns(training.ARMS, scope.rounds):
        with training.arm("axolotl", name):
            check(call, exact_weight(layer))
            found = clocks.host_seconds({name: call}, 1, scope.inner, wait=True)
        seconds.setdefault(name, []).extend(found[name])
    yield from us("axolotl", "synchronized", seconds)


# --- the command ---

SECTIONS: dict[str, Callable[[Scope, list[str]], Iterator[Row]]] = {
    "protocol": time_protocol,
    "gpu_time": time_on_gpu,
    "settings": time_settings,
    "host_time": time_on_host,
    "compiled": compiled.time_compiled,
    "axolotl": time_axolotl,
    "training": training.time_training,
}
DEFAULT = tuple(SECTIONS)[:-1]  # the last trains for minutes, in processes of its own


def text(rows: list[Row]) -> str:
    """Return a line for each row: median, lowest to highest, and the ratio to the first row of its case."""
    lines, first = [], {}
    for row in rows:
        base = first.setdefault((row.section, row.case, row.unit), row)
        result = "bit-identical, not timed"
        if clocks.ON_GPU:
            result = f"{row.median:10.4g} {row.unit:3} {row.median / base.median:6.2f}x"
            if len(row.values) > 1:
                result += f"  ({row.low:.4g} to {row.high:.4g})"
        lines.append(f"{row.case if base is row else '':32} {row.contender:28} {result}")
    return "\n".join(lines)


def run_section(name: str, scope: Scope) -> tuple[list[Row], list[str]]:
    """Return a section's rows, as far as it comes, and what went wrong in it."""
    rows, problems = [], []
    try:
        for row in SECTIONS[name](scope, problems):
            rows.append(row)
    except Exception as error:
        traceback.print_exc()
        problems.append(why(error))
    utils = sys.modules.get("unsloth.kernels.utils")
    if getattr(utils, "_USE_NF4_KERNELS", True) is False:
        problems.append("unsloth_today: Unsloth gave up its fused kernel and took its classic path")
    if clocks.ON_GPU:
        torch.cuda.empty_cache()
    return rows, problems


def main(argv: list[str] | None = None) -> int:
    """Run, print and store the sections. Returns 1 if a contender was wrong or a section failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m helpers bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), default=DEFAULT, metavar="SECTION",
        help=f"any of {', '.join(SECTIONS)}; all but the last by default",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not clocks.ON_GPU:
        print(f"{machine.no_gpu()}\nResults are compared at small sizes; nothing is timed or stored.")
    for library, reason in contenders.missing().items():
        print(f"{library}: not measured (needs {reason})")
    failed = False
    for name in options.only:
        start = time.perf_counter()
        rows, problems = run_section(name, FULL if clocks.ON_GPU else ON_CPU)
        print(f"\n{name}, {time.perf_counter() - start:.0f} s\n{text(rows)}")
        for problem in problems:
            print("FAILED", problem)
        failed |= bool(problems)
        if rows and clocks.ON_GPU:
            path = store.write(name, rows, note="; ".join(problems))
            print(f"stored in {path}", flush=True)
    return int(failed)
