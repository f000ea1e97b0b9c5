"""python -m helpers bench: time the kernel against every library, section by section.

All contenders take turns in one process, and none is timed before its result is bit-identical to the plain
torch reference. A section is printed and stored under results/<card>/ as soon as it is done, so a run that is
cut short keeps what it has. Without a GPU results are compared at small sizes, and no time is shown.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from helpers import machine
from helpers.bench import clocks, contenders, copy_kernel, training
from helpers.bench.contenders import random_layers, right, why, wrong
from helpers.nf4 import kernel
from helpers.nf4.launch import your_dequantize_nf4
from helpers.nf4.reference import default_device, dequantize, quantized_layer, same_bits
from helpers.puzzle import protocol as official
from helpers.results import store
from helpers.results.store import Row

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a run covers. Sizes are in elements."""

    configs: tuple = official.OFFICIAL
    # 1K, 4K and 8K square are 2**20, 2**24 and 2**26; 2**22, 2**24 and 58,720,256 are the official weights.
    sizes: tuple[int, ...] = (2**16, 2**18, 2**20, 2**22, 2**24, 58_720_256, 2**26, 234_881_024, 2**30)
    settings: tuple = ((2**20, "bf16"), (2**24, "bf16"), (2**24, "fp16"), (234_881_024, "bf16"))
    layer: tuple[int, int] = (1024, 4096)  # (out, in) for host times: the smallest official one
    tokens: tuple[int, ...] = (64, 512, 2048)
    weights: int = 24  # under one torch.compile
    shape: tuple[int, int] = (1024, 2816)  # of each of them
    backend: str = "inductor"
    rotate: int = 1_100_000_000  # bytes through which GPU calls rotate: many times any L2 cache
    most_layers: int = 2048  # ... in at most so many layers
    rounds: int = 15  # of GPU and compiled times
    host_rounds: int = 40
    inner: int = 100  # calls a round of host times; far below the launch queue's depth
    first_calls: int = 2  # new processes
    new_layers: int = 40


FULL = Scope()
QUICK = Scope(sizes=FULL.sizes[2:8:2], settings=FULL.settings[1:2], rounds=5, host_rounds=10, first_calls=1)
ON_CPU = Scope(
    configs=official.SMALL[1:2], sizes=(2**10, 2**12), settings=((2**10, "bf16"),), layer=(64, 128),
    tokens=(8,), weights=2, shape=(64, 64), backend="aot_eager", rotate=1, rounds=2,
    host_rounds=2, inner=1, new_layers=2,
)  # fmt: skip


def us(section: str, case: str, seconds: dict[str, list[float]]) -> list[Row]:
    """Return a row in microseconds for each contender."""
    return [Row(section, case, name, "us", [1e6 * s for s in values]) for name, values in seconds.items()]


# --- the official protocol ---


def protocol(scope: Scope, problems: list[str]) -> list[Row]:
    """Seconds of the official protocol: every library, and the kernel in its three launch forms."""
    forms = {name: fn for name, fn in contenders.all_contenders().items() if name not in official.baselines()}
    entries = official.compare(forms, configs=scope.configs).entries
    problems += [f"{name}: {entry.failure}" for name, entry in entries.items() if entry.failure]
    rows = []
    for name, entry in entries.items():
        if entry.failure or entry.reason:
            continue
        total = entry.seconds or [math.nan]  # without a GPU
        cases = {"total": total}
        for config, seconds in zip(scope.configs, entry.per_config.values(), strict=False):
            short = "fp16" if config.dtype == torch.float16 else "bf16"
            cases[f"{config.hidden}x{config.intermediate} {short}"] = seconds
        if name not in ("ordinary", "compiled_grid"):
            rows += [Row("protocol", case, name, "s", values) for case, values in cases.items()]
        if name in ("ours", "ordinary", "compiled_grid", "unsloth_today", "unsloth_classic"):
            form = "direct" if name == "ours" else name
            rows.append(Row("launch_forms", "total", form, "s", total))
    return rows


# --- time on the GPU ---


def captured(layers: list, candidates: dict, problems: list[str], where: str) -> dict[str, tuple]:
    """Return {name: (graph, calls in it)} of the candidates ({name: (layer -> weight, settings to force)}).

    Outputs rotate; the graphs share one pool for them. A replayed graph must write the last output's bits: a
    launch that went past the capture would leave an empty graph, which takes no time.
    """
    count, pool, graphs = len(layers), None, {}
    first, last = (dequantize(layer.weight, layer.weight.quant_state) for layer in (layers[0], layers[-1]))
    for name, (fn, forced) in candidates.items():
        with kernel.force(**forced) if forced else contextlib.nullcontext():
            reason = wrong(functools.partial(fn, layers[0]), first)
            if not reason:
                try:
                    call = lambda index, fn=fn: fn(layers[index])  # noqa: E731
                    graph, out = clocks.capture(call, count, warm=count, pool=pool, keep=True)
                    reason = wrong(graph.replay, last, out)
                except Exception as error:
                    clocks.synchronize()
                    reason = f"cannot be captured: {why(error)}"
        if reason:
            problems.append(f"{name} at {where}: {reason}")
        else:
            graphs[name], pool = (graph, count), graph.pool()
    return graphs


def gpu_seconds(
    scope, numel: int, dtype: str, candidates: dict, problems: list[str], reference=False
) -> dict:
    """Return {contender: GPU seconds of each round} at one size; {} if the size does not fit into memory."""
    moved = numel // 2 + numel // 64 + numel // 4096 + 2 * numel
    count = max(2, min(scope.most_layers, math.ceil(scope.rotate / moved)))
    need = count * (moved + 4 * numel) + 40 * numel  # layers, two sets of outputs, what the comparison takes
    if need > clocks.free_bytes():
        problems.append(f"{numel} elements: not measured (needs {need / 1e9:.1f} GB of free GPU memory)")
        return {}
    shape = (numel // 4096, 4096) if numel % 4096 == 0 else (numel // 64, 64)
    layers = random_layers(shape, DTYPES[dtype], count)
    graphs = captured(layers, candidates, problems, f"{numel} {dtype}")
    if reference:
        graphs |= copies(layers, problems)
    seconds = clocks.gpu_seconds(graphs, scope.rounds)
    variants = [seconds.pop(name) for name in list(seconds) if isinstance(name, tuple)]
    if variants:
        seconds["copy_kernel"] = min(variants, key=statistics.median)
    return seconds


def copies(layers: list, problems: list[str]) -> dict[tuple, tuple]:
    """Return {variant: (graph, calls in it)} of the memory-bound reference, checked on the last layer."""
    graphs, state = {}, layers[0].weight.quant_state
    outs = [torch.empty(state.shape, dtype=state.dtype, device=default_device()) for _ in layers]
    for variant in copy_kernel.VARIANTS:
        move = lambda index, variant=variant: copy_kernel.copy(layers[index], outs[index], *variant)  # noqa: E731
        graph = clocks.capture(move, len(layers))[0]
        outs[-1].zero_()
        graph.replay()
        if torch.equal(
            outs[-1].view(torch.int32).view(-1, 4), copy_kernel.written(layers[-1], outs[-1], *variant)
        ):
            graphs[variant] = graph, len(layers)
        else:
            problems.append(f"copy_kernel {variant}: does not move every byte: not timed")
    return graphs


def gpu_time(scope: Scope, problems: list[str]) -> list[Row]:
    """GPU time by size: every contender with kernels of its own, and the memory-bound reference."""
    everyone, rows = contenders.all_contenders(), []
    candidates = {name: (everyone[name], {}) for name in contenders.ON_GPU if name in everyone}
    for numel in scope.sizes:
        for dtype in DTYPES:
            seconds = gpu_seconds(scope, numel, dtype, candidates, problems, reference=True)
            rows += us("gpu_time", f"{numel} {dtype}", seconds)
    return rows


def changes(settings, numel: int, dtype: str) -> dict[str, dict]:
    """Return {name: settings to force}: one setting changed at a time, those that matter at this size."""
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


def settings(scope: Scope, problems: list[str]) -> list[Row]:
    """GPU time with one setting changed at a time, beside the default."""
    rows, ours = [], contenders.all_contenders()["ours"]
    for numel, dtype in scope.settings:
        changed = {"default": {}} | changes(kernel.settings(), numel, dtype)
        candidates = {name: (ours, change) for name, change in changed.items()}
        seconds = gpu_seconds(scope, numel, dtype, candidates, problems)
        default = seconds.pop("default", None)
        for name, values in seconds.items() if default else ():
            rows += us("settings", f"{name} at {numel} {dtype}", {"default": default, "changed": values})
    return rows


# --- time on the host ---


def print_first_call() -> None:
    """Print the seconds of the first call in this process, with the layer on the GPU already."""
    layer = quantized_layer(*FULL.layer[::-1], torch.bfloat16)
    print(*clocks.first_seconds({"ours": [lambda: your_dequantize_nf4(layer)]})["ours"])


def first_call(scope: Scope, problems: list[str]) -> list[Row]:
    """The first call of new processes: the kernel compiled before, and Triton's cache empty."""
    code = f"from helpers.bench import bench; bench.{print_first_call.__name__}()"
    rows = []
    for name in ("ours", "ours_empty_cache"):
        times = []
        for _ in range(scope.first_calls):
            with contextlib.ExitStack() as stack:
                cache = {}
                if name != "ours":
                    cache["TRITON_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
                times.append(float(machine.python(["-c", code], variables=cache).out.split()[-1]))
        rows.append(Row("host_time", "first_call", name, "s", times))
    return rows


def host_time(scope: Scope, problems: list[str]) -> list[Row]:
    """Time until a call returns; with a synchronize; of the first call of a new layer and of a process."""
    everyone, sizes = contenders.all_contenders(), (*scope.layer[::-1], torch.bfloat16)
    layer = quantized_layer(*sizes)
    with official.own_libraries():
        calls = {name: functools.partial(fn, layer) for name, fn in everyone.items()}
        if clocks.ON_GPU:
            try:
                calls["allocate_and_launch"] = contenders.allocate_and_launch(layer)
            except Exception as error:
                problems.append(f"allocate_and_launch: {why(error)}")
        calls = right(calls, dequantize(layer.weight, layer.weight.quant_state), problems)
        rows = us("host_time", "until_return", clocks.host_seconds(calls, scope.host_rounds, scope.inner))
        waited = clocks.host_seconds(calls, scope.host_rounds, scope.inner, wait=True)
        rows += us("host_time", "synchronized", waited)
        new = {
            name: [
                functools.partial(everyone[name], quantized_layer(*sizes, seed=i))
                for i in range(scope.new_layers)
            ]
            for name in calls
            if name in everyone
        }
        rows += us("host_time", "first_call_new_layer", clocks.first_seconds(new))
    return rows + (first_call(scope, problems) if clocks.ON_GPU else [])


# --- under torch.compile ---


class Network:
    """Layers whose weights are dequantized and multiplied one after another."""

    def __init__(self, scope: Scope, dtype: torch.dtype):
        self.scope, self.layers = scope, []
        for index in range(scope.weights):  # there and back in turn
            inputs, outputs = scope.shape[:: 1 if index % 2 else -1]
            layer = quantized_layer(inputs, outputs, dtype, seed=index)
            for scales in (layer.weight.quant_state.state2.absmax, layer.weight.quant_state.offset):
                scales.mul_(inputs**-0.5)  # activations stay small
            layer.exact = dequantize(layer.weight, layer.weight.quant_state)
            self.layers.append(layer)

    def function(self, fn: Callable) -> Callable:
        """Return x -> the product of all weights, dequantized by `fn`."""

        def forward(x):
            for layer in self.layers:
                x = linear(x, fn(layer))
            return x

        # Dynamo keeps what it compiled, and its guards, with the code: each contender has its own.
        return types.FunctionType(
            forward.__code__.replace(), forward.__globals__, None, None, forward.__closure__
        )

    def call(self, function: Callable, tokens: int) -> Callable:
        """Return () -> what the function returns for so many tokens."""
        device, dtype = default_device(), self.layers[0].exact.dtype
        generator = torch.Generator(device).manual_seed(tokens)
        x = torch.randn(tokens, self.scope.shape[1], dtype=dtype, device=device, generator=generator)
        torch._dynamo.maybe_mark_dynamic(x, 0)  # one graph for every number of tokens

        def run():
            with torch.no_grad():
                return function(x)

        return run


def compiled(scope: Scope, problems: list[str]) -> list[Row]:
    """24 weights, each followed by its product: eager, and under one torch.compile."""
    torch._dynamo.reset()
    half = torch.float16 if clocks.ON_GPU and not machine.native_bf16() else torch.bfloat16
    network, everyone = Network(scope, half), contenders.all_contenders()
    fns = {name: everyone[name] for name in ("ours", "unsloth_today", "bitsandbytes") if name in everyone}
    functions = {}
    for name, fn in {"products_only": lambda layer: layer.exact, **fns}.items():
        functions[f"{name}_eager"] = network.function(fn)
        try:
            function = torch.compile(network.function(fn), backend=scope.backend)
            network.call(function, scope.tokens[0])()
            functions[name] = function
        except Exception as error:
            problems.append(f"{name}: does not compile: {why(error)}")
    rows, medians = [], {}
    for tokens in scope.tokens:
        case, kept, exact = f"forward {tokens} tokens", {}, []
        for name, function in functions.items():
            call = network.call(function, tokens)
            call(), call()  # also the second launch of each layer, which goes another way than the first
            try:
                result = call()
            except Exception as error:
                problems.append(f"{name} at {tokens} tokens: {why(error)}")
                continue
            # Inductor may round sums otherwise than eager mode: the bits of either will do.
            exact += [result] if name.startswith("products_only") else []
            if any(same_bits(result, one) for one in exact):
                kept[name] = call
            else:
                problems.append(f"{name} at {tokens} tokens: not bit-identical with exact weights: not timed")
        found = us("compiled", case, clocks.host_seconds(kept, scope.rounds, min(scope.inner, 10), wait=True))
        rows += found
        for row in found:
            medians.setdefault(row.contender, []).append(row.median)
    for name, values in medians.items():
        ours = medians.get("ours_eager" if name.endswith("_eager") else "ours", [])
        if len(ours) == len(values) and not name.startswith(("ours", "products")):
            ratio = statistics.geometric_mean(a / b for a, b in zip(values, ours, strict=True))
            rows.append(Row("compiled", "geometric mean", name, "x", [ratio]))
    torch._dynamo.reset()
    return rows


# --- the command ---

SECTIONS: dict[str, Callable[[Scope, list[str]], list[Row]]] = {
    "protocol": protocol,
    "gpu_time": gpu_time,
    "settings": settings,
    "host_time": host_time,
    "compiled": compiled,
    "training": training.training,
    "several_gpus": training.several_gpus,
}
DEFAULT = tuple(SECTIONS)[:5]  # the last two train for minutes, in processes of their own


def text(rows: list[Row], timed: bool = True) -> str:
    """Return a line for each row: median, lowest to highest, and the ratio to the first row of its case."""
    lines, first = [], {}
    for row in rows:
        base = first.setdefault((row.section, row.case, row.unit), row)
        line = f"{row.case if base is row else '':32} {row.contender:20} "
        if timed:
            spread = f"({row.low:.4g} to {row.high:.4g})" if len(row.values) > 1 else ""
            line += f"{row.median:10.4g} {row.unit:3} {row.median / base.median:6.2f}x  {spread}"
        else:
            line += "bit-identical, not timed"
        lines.append(line.rstrip())
    return "\n".join(lines)


def run(name: str, scope: Scope) -> tuple[list[Row], list[str]]:
    """Return a section's rows and what went wrong in it."""
    problems = []
    try:
        rows = SECTIONS[name](scope, problems)
    except Exception as error:
        traceback.print_exc()
        rows, problems = [], [*problems, why(error)]
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
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds; stores nothing")
    options = parser.parse_args(argv)
    scope = ON_CPU if not clocks.ON_GPU else QUICK if options.quick else FULL
    if not clocks.ON_GPU:
        print(f"{machine.no_gpu()}\nResults are compared at small sizes; nothing is timed or stored.")
    for library, reason in contenders.missing().items():
        print(f"{library}: not measured (needs {reason})")
    failed = False
    for name in options.only:
        start = time.perf_counter()
        rows, problems = run(name, scope)
        print(f"\n{name}, {time.perf_counter() - start:.0f} s\n{text(rows, clocks.ON_GPU)}")
        for problem in problems:
            print("FAILED", problem)
        failed |= bool(problems)
        if rows and clocks.ON_GPU and not options.quick:
            for section in dict.fromkeys(row.section for row in rows):
                path = store.write(section, store.select(rows, section), note="; ".join(problems))
            print(f"stored in {path}", flush=True)
    return int(failed)
