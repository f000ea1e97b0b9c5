"""python -m helpers bench: time the kernel against every library, section by section.

All contenders take turns in one process, and none is timed before its result is bit-identical to the plain
torch reference. A section is printed and stored under results/<card>/ as soon as it is done, so a run that is
cut short keeps what it has. Without a GPU results are compared at small sizes, and no time is shown.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import linear

from helpers import machine
from helpers.bench import clocks, contenders, copy_kernel, training
from helpers.bench.contenders import check, right, why
from helpers.nf4 import kernel
from helpers.nf4.launch import your_dequantize_nf4
from helpers.nf4.reference import default_device, dequantize, quantized_layer, same_bits
from helpers.puzzle import protocol as official
from helpers.results import store
from helpers.results.store import Row

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FORMS = {"your_dequantize_nf4": "ours", "kernel[grid]": "ordinary", "compiled[grid]": "compiled_grid"}
ROTATE = 1_100_000_000  # bytes through which GPU calls rotate: many times any L2 cache
MOST_LAYERS = 2048  # ... in at most so many layers


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a run covers. Sizes are in elements."""

    configs: tuple = official.OFFICIAL
    # 1K, 4K and 8K square are 2**20, 2**24 and 2**26; 2**22, 2**24 and 58,720,256 are the official weights.
    sizes: tuple[int, ...] = (2**16, 2**18, 2**20, 2**22, 2**24, 58_720_256, 2**26, 234_881_024, 2**30)
    settings: tuple = ((2**20, "bf16"), (2**24, "bf16"), (2**24, "fp16"), (234_881_024, "bf16"))
    layer: tuple[int, int] = (4096, 1024)  # (in, out) of host and compiled times: the smallest official one
    tokens: tuple[int, ...] = (64, 512, 2048)
    weights: int = 24  # under one torch.compile
    rounds: int = 20
    inner: int = 100  # calls a round of host times; far below the launch queue's depth


FULL = Scope()
ON_CPU = Scope(official.SMALL[1:2], (2**10, 2**12), ((2**10, "bf16"),), (128, 64), (8,), 2, 2, 1)


def us(section: str, case: str, seconds: dict[str, list[float]]) -> list[Row]:
    """Return a row in microseconds for each contender."""
    return [Row(section, case, name, "us", [1e6 * s for s in values]) for name, values in seconds.items()]


def exact(layer) -> torch.Tensor:
    """Return the layer's weight from the plain torch reference."""
    return dequantize(layer.weight, layer.weight.quant_state)


# --- the official protocol ---


def protocol(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield the official protocol: every library, and the kernel in its three launch forms."""
    comparison = official.compare(official.launch_forms(your_dequantize_nf4), configs=scope.configs)
    problems += [f"{name}: {entry.failure}" for name, entry in comparison.entries.items() if entry.failure]
    if not clocks.ON_GPU:
        print(comparison)
    timed = {FORMS.get(name, name): entry for name, entry in comparison.entries.items() if entry.seconds}
    for name, entry in timed.items():
        for case, seconds in ({"total": entry.seconds} | entry.per_config).items():
            if name not in ("ordinary", "compiled_grid"):
                yield Row("protocol", case, name, "s", seconds)
    for name in (*FORMS.values(), "unsloth_today", "unsloth_classic"):
        if name in timed:
            yield Row("launch_forms", "total", name.replace("ours", "direct"), "s", timed[name].seconds)


# --- time on the GPU ---


def captured(layers: list, candidates: dict, problems: list[str], where: str) -> dict:
    """Return {name: graph of a call on each layer} of {name: (fn, settings to change, reference)}.

    fn and reference: layer -> tensor. Outputs rotate; the graphs share one pool for them. A replayed graph
    must write the last output's bits: a launch that went past the capture would leave an empty graph.
    """
    pool, graphs = None, {}
    for name, (fn, change, reference) in candidates.items():
        try:
            with kernel.force(**dataclasses.asdict(kernel.settings()) | change):
                check(functools.partial(fn, layers[0]), reference(layers[0]))
                graph, out = clocks.capture([functools.partial(fn, layer) for layer in layers], pool)
                check(graph.replay, reference(layers[-1]), out)
            graphs[name], pool = graph, graph.pool()
        except Exception as error:
            problems.append(f"{name} at {where}: {why(error)}")
    return graphs


def gpu_seconds(scope: Scope, numel: int, dtype: str, candidates: dict, problems: list[str]) -> dict:
    """Return {contender: GPU seconds a call, of each round} at one size."""
    moved = numel // 2 + numel // 64 + numel // 4096 + 2 * numel
    count = max(2, min(MOST_LAYERS, math.ceil(ROTATE / moved))) if clocks.ON_GPU else 2
    layers = [quantized_layer(64, numel // 64, DTYPES[dtype], seed=index) for index in range(count)]
    graphs = captured(layers, candidates, problems, f"{numel} {dtype}")
    seconds = clocks.gpu_seconds(graphs, scope.rounds)
    return {name: [value / count for value in values] for name, values in seconds.items()}


def gpu_time(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield GPU time by size: every contender with kernels of its own, and the memory-bound reference."""
    everyone = contenders.all_contenders()
    candidates = {name: (everyone[name], {}, exact) for name in contenders.ON_GPU if name in everyone}
    movers = {
        f"copy_kernel {how}": (
            functools.partial(copy_kernel.copy, **how), {}, functools.partial(copy_kernel.written, **how)
        )
        for how in copy_kernel.VARIANTS
    }  # fmt: skip
    for numel in scope.sizes:
        for dtype in DTYPES:
            seconds = gpu_seconds(scope, numel, dtype, candidates | movers, problems)
            moved = [seconds.pop(name) for name in movers if name in seconds]
            if moved:
                seconds["copy_kernel"] = min(moved, key=statistics.median)
            yield from us("gpu_time", f"{numel} {dtype}", seconds)


def changes(settings, numel: int, dtype: str) -> dict[str, dict]:
    """Return {name: settings to change}: one setting changed at a time, those that matter at this size."""
    words = "words_small" if numel <= settings.small_up_to else "words"
    programs = "programs_per_sm_huge" if numel > settings.huge_above else "programs_per_sm"
    hinted = numel <= settings.hint_loads_up_to
    found = {
        "asm=False": {"asm": False},
        "hints=False": {"hints": False},
        **{f"hint_loads_up_to={most}": {"hint_loads_up_to": most} for most in (0 if hinted else kernel.ALL,)},
        "stage=False": {"stage": False},
        "int_bf16=True": {"int_bf16": dtype == "bf16" or settings.int_bf16},
        **{f"words={count}": {words: count} for count in (1, 2, 4, 8)},
        **{f"num_warps={count}": {"num_warps": count} for count in (2, 4, 8)},
        **{f"programs_per_sm={most}": {programs: most} for most in (0, 4, 6, 8)},
    }
    now = dataclasses.asdict(settings)
    return {name: change for name, change in found.items() if not change.items() <= now.items()}


def settings(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield GPU time with one setting changed at a time, beside the default."""
    ours = contenders.all_contenders()["ours"]
    for numel, dtype in scope.settings:
        changed = {"default": {}} | changes(kernel.settings(), numel, dtype)
        candidates = {name: (ours, change, exact) for name, change in changed.items()}
        seconds = gpu_seconds(scope, numel, dtype, candidates, problems)
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
    code = f"from helpers.bench import bench; bench.{print_first_call.__name__}()"
    for name in ("ours", "ours_empty_cache"):
        times = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                cache = {} if name == "ours" else {"TRITON_CACHE_DIR": folder}
                times.append(float(machine.python(["-c", code], variables=cache).out.split()[-1]))
        yield Row("host_time", "first_call", name, "s", times)


def host_time(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time until a call returns, with a synchronize, and of first calls: new layer, new process."""
    everyone, sizes = contenders.all_contenders(), (*scope.layer, torch.bfloat16)
    layer = quantized_layer(*sizes)
    with official.own_libraries():
        calls = {name: functools.partial(fn, layer) for name, fn in everyone.items()}
        calls = right(calls, exact(layer), problems)
        yield from us("host_time", "until_return", clocks.host_seconds(calls, scope.rounds, scope.inner))
        waited = clocks.host_seconds(calls, scope.rounds, scope.inner, wait=True)
        yield from us("host_time", "synchronized", waited)
        layers = [quantized_layer(*sizes, seed=index) for index in range(2 * scope.rounds)]
        new = {name: map(everyone[name], layers).__next__ for name in calls}  # each call takes another layer
        yield from us("host_time", "first_call_new_layer", clocks.host_seconds(new, scope.rounds, 1))
    if clocks.ON_GPU:
        yield from first_call()


# --- under torch.compile ---


def scaled_layers(scope: Scope, dtype: torch.dtype) -> list:
    """Return layers to multiply with one after another, there and back in turn; activations stay small."""
    layers = []
    for index in range(scope.weights):
        inputs, outputs = scope.layer[:: -1 if index % 2 else 1]
        layer = quantized_layer(inputs, outputs, dtype, seed=index)
        for scales in (layer.weight.quant_state.state2.absmax, layer.weight.quant_state.offset):
            scales.mul_(inputs**-0.5)
        layer.exact = exact(layer)
        layers.append(layer)
    return layers


def network(layers: list, fn: Callable) -> Callable:
    """Return x -> the product with all weights, dequantized by `fn`."""

    def run(x):
        for layer in layers:
            x = linear(x, fn(layer))
        return x

    # Dynamo keeps what it compiled, and its guards, with the code: each contender has its own.
    return types.FunctionType(run.__code__.replace(), run.__globals__, None, None, run.__closure__)


def tokens_of(count: int, scope: Scope, dtype: torch.dtype) -> torch.Tensor:
    """Return random activations of so many tokens; one compiled graph serves every number of them."""
    generator = torch.Generator(default_device()).manual_seed(count)
    x = torch.randn(count, scope.layer[0], dtype=dtype, device=default_device(), generator=generator)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


@torch.no_grad()
def compiled(scope: Scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time of 24 weights, each followed by its product: eager, and under one torch.compile."""
    torch._dynamo.reset()
    dtype = torch.float16 if clocks.ON_GPU and not machine.native_bf16() else torch.bfloat16
    layers, everyone = scaled_layers(scope, dtype), contenders.all_contenders()
    fns = {"products_only": lambda layer: layer.exact}
    fns |= {name: everyone[name] for name in ("ours", "unsloth_today", "bitsandbytes") if name in everyone}
    functions = {f"{name}_eager": network(layers, fn) for name, fn in fns.items()}
    backend = "inductor" if clocks.ON_GPU else "eager"
    functions |= {name: torch.compile(network(layers, fn), backend=backend) for name, fn in fns.items()}
    medians = {}
    for tokens in scope.tokens:
        x, kept, allowed = tokens_of(tokens, scope, dtype), {}, []
        for name, function in functions.items():
            call = functools.partial(function, x)
            try:
                call(), call()  # also the second launch of each layer, which goes another way than the first
                result = call()
            except Exception as error:
                problems.append(f"{name} at {tokens} tokens: {why(error)}")
                continue
            # Inductor may round sums otherwise than eager mode: the bits of either will do.
            allowed += [result] if name.startswith("products_only") else []
            if any(same_bits(result, one) for one in allowed):
                kept[name] = call
            else:
                problems.append(f"{name} at {tokens} tokens: not bit-identical with exact weights: not timed")
        seconds = clocks.host_seconds(kept, scope.rounds, min(scope.inner, 10), wait=True)
        yield from us("compiled", f"forward {tokens} tokens", seconds)
        for name, values in seconds.items():
            medians.setdefault(name, []).append(statistics.median(values))
    for name, values in medians.items():
        ours = medians.get("ours_eager" if name.endswith("_eager") else "ours", [])
        if len(ours) == len(values) and not name.startswith(("ours", "products")):
            ratio = statistics.geometric_mean(a / b for a, b in zip(values, ours, strict=True))
            yield Row("compiled", "geometric mean", name, "x", [ratio])
    torch._dynamo.reset()


# --- the command ---

SECTIONS: dict[str, Callable[[Scope, list[str]], Iterator[Row]]] = {
    "protocol": protocol,
    "gpu_time": gpu_time,
    "settings": settings,
    "host_time": host_time,
    "compiled": compiled,
    "training": training.training,
    "several_gpus": training.several_gpus,
}
DEFAULT = tuple(SECTIONS)[:5]  # the last two train for minutes, in processes of their own


def text(rows: list[Row]) -> str:
    """Return a line for each row: median, lowest to highest, and the ratio to the first row of its case."""
    lines, first = [], {}
    for row in rows:
        base = first.setdefault((row.section, row.case, row.unit), row)
        line = f"{row.case if base is row else '':32} {row.contender:20} "
        if clocks.ON_GPU:
            line += f"{row.median:10.4g} {row.unit:3} {row.median / base.median:6.2f}x"
            line += f"  ({row.low:.4g} to {row.high:.4g})" * (len(row.values) > 1)
        else:
            line += "bit-identical, not timed"
        lines.append(line)
    return "\n".join(lines)


def run(name: str, scope: Scope) -> tuple[list[Row], list[str]]:
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
        help=f"any of {', '.join(SECTIONS)}; all but the last two by default",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not clocks.ON_GPU:
        print(f"{machine.no_gpu()}\nResults are compared at small sizes; nothing is timed or stored.")
    for library, reason in contenders.missing().items():
        print(f"{library}: not measured (needs {reason})")
    failed = False
    for name in options.only:
        start = time.perf_counter()
        rows, problems = run(name, FULL if clocks.ON_GPU else ON_CPU)
        print(f"\n{name}, {time.perf_counter() - start:.0f} s\n{text(rows)}")
        for problem in problems:
            print("FAILED", problem)
        failed |= bool(problems)
        for section in dict.fromkeys(row.section for row in rows) if clocks.ON_GPU else ():
            path = store.write(section, store.select(rows, section), note="; ".join(problems))
            print(f"stored in {path}", flush=True)
    return int(failed)
