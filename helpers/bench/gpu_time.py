"""GPU time by graph replay over rotated layers: all sizes, dequantize + multiply, one decision changed."""

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable

import torch

from helpers.bench import ceilings, clocks
from helpers.bench.contenders import Bench, random_layers, why, wrong_bits
from helpers.results.names import CEILING, DTYPES, bytes_moved
from helpers.results.store import Cases, Gpu, GpuCase, Rows, Times
from helpers.puzzle import protocol

UNITS = 8  # products in a graph
ALONE = "multiplication alone"
# {name: (layer -> weight, what is changed of the kernel's settings)}
Candidates = dict[str, tuple[Callable, dict]]


def _capture(bench: Bench, candidates: Candidates, layers: list, multiply: Callable | None = None) -> tuple:
    """({name: (graph, calls in it)}, {name: why not}) of all whose weights have the right bits.

    Outputs rotate; the graphs share one pool for them. A graph must write the last output's right bits when
    it is replayed: a launch that went past the capture would leave an empty graph, which takes no time.
    multiply(weight): done after each dequantization; what it returns does not rotate and is not compared.
    """
    count, (first, last) = len(layers), (protocol.expected(layers[index]) for index in (0, -1))
    graphs, failures, pool = {}, {}, None
    for name, (dequantize, overrides) in candidates.items():

        def unit(index, dequantize=dequantize):
            weight = dequantize(layers[index])
            return multiply(weight) if multiply else weight

        with bench.module.force(**overrides) if overrides else contextlib.nullcontext():
            if wrong := wrong_bits(functools.partial(dequantize, layers[0]), first):
                failures[name] = wrong
                continue
            try:
                graph, out = bench.gpu.capture(unit, count, warm=count, pool=pool, keep=not multiply)
            except Exception as error:
                failures[name] = f"cannot be captured: {why(error)}"
                clocks.synchronize()
                continue
        if not multiply and (wrong := wrong_bits(graph.replay, last, out)):
            failures[name] = f"its graph does not write the result: {wrong}"
        else:
            graphs[name], pool = (graph, count), graph.pool()
    return graphs, failures


def _rows(times: dict[str, list[float]]) -> Rows:
    return {name: Times.of(seconds) for name, seconds in times.items()}


def _case(bench: Bench, numel: int, dtype: str, candidates: Candidates, rounds: int, choices=()):
    """The GpuCase of one size; choices: `ceilings.launches()`, of which the fastest counts."""
    case = GpuCase(numel=numel, dtype=dtype)
    # The layers, a second set of outputs in the graphs' pool, and what the checks need.
    count, free = bench.rotation(numel), bench.gpu.free_bytes()
    need = count * (bytes_moved(numel) + 2 * numel) + 8 * numel
    if need > 0.9 * free:
        case.skipped = f"needs {need / 1e9:.1f} GB of free GPU memory, {free / 1e9:.1f} GB are free"
        return case
    columns = 4096 if numel % 4096 == 0 else 64
    shape, dtype = (numel // columns, columns), getattr(torch, dtype)
    layers = random_layers(shape, dtype, count, device=bench.device)
    outs = [torch.empty(shape, dtype=dtype, device=bench.device) for _ in layers] if choices else []
    graphs, case.failures = _capture(bench, candidates, layers)
    for place, launch in enumerate(choices):

        def move(index, launch=launch):
            launch(*_moved(layers[index]), outs[index])

        graphs[place] = (bench.gpu.capture(move, count)[0], count)
    times = bench.gpu.replay_interleaved(graphs, rounds)
    if choices:
        times[CEILING] = min((times.pop(place) for place in range(len(choices))), key=statistics.median)
    case.rows = _rows(times)
    return case


def _moved(layer) -> tuple[torch.Tensor, ...]:
    """What the ceiling reads of a layer."""
    state = layer.weight.quant_state
    return layer.weight, state.absmax, state.state2.absmax


def _gate(device: str, launches: list[Callable]):
    """Every launch choice of the ceiling against its oracle: one that skips bytes would be no ceiling."""
    (layer,) = random_layers((256, 1024), torch.float16, 1, device=device)
    out = torch.empty((256, 1024), dtype=torch.float16, device=device)
    for launch in launches:
        launch(*_moved(layer), out.fill_(math.nan))
        choice = launch.keywords
        expected = ceilings.oracle(*_moved(layer), out.numel(), choice["words"], choice["threads"])
        if not torch.equal(out.view(torch.int32).view(-1, 4), expected):
            raise AssertionError(f"the ceiling, {choice}, does not write what its oracle says")


def gpu(bench: Bench) -> Gpu:
    """From 64K to 1G elements: every contender, and what only moves the bytes."""
    choices, rounds = ceilings.launches(bench.quick), bench.rounds(21, 7)
    _gate(bench.device, choices)
    candidates = {name: (dequantize, {}) for name, dequantize in bench.on_gpu().items()}
    sizes = bench.progress(itertools.product(bench.scope.sizes, DTYPES), "gpu")
    return Gpu(sizes=[_case(bench, *size, candidates, rounds, choices) for size in sizes])


def gemm(bench: Bench) -> Cases:
    """Dequantize and X @ W.t() as one unit, as training runs it, under each store policy."""
    cases, ours, streams = [], bench.module.your_dequantize_nf4, bench.module.settings().hints
    other = "plain stores, no hints" if streams else "streaming stores"
    policies = {"kernel": (ours, {}), f"kernel, {other}": (ours, {"hints": not streams})}
    if today := bench.baselines["unsloth_today"].fn:
        policies["unsloth_today"] = today, {}
    for config, turned in bench.progress(itertools.product(bench.scope.gemm, (1, -1)), "gemm"):
        shape, tokens = (config.intermediate, config.hidden)[::turned], config.batch * config.seq
        layers = random_layers(shape, config.dtype, UNITS, device=bench.device)
        generator = torch.Generator(device=bench.device).manual_seed(config.seed)
        X = torch.randn(tokens, shape[1], dtype=config.dtype, device=bench.device, generator=generator)
        ready = protocol.expected(layers[0])
        candidates = policies | {ALONE: (lambda layer, ready=ready: ready, {})}
        graphs, failures = _capture(bench, candidates, layers, lambda weight, X=X: X @ weight.t())
        rows = _rows(bench.gpu.replay_interleaved(graphs, bench.rounds(15, 5)))
        dtype = protocol.name_of(config.dtype)
        cases.append(GpuCase(shape=shape, tokens=tokens, dtype=dtype, rows=rows, failures=failures))
    return Cases(cases=cases)


def decisions(settings, numel: int) -> dict[str, dict]:
    """{decision that is changed: the override that does it}, of those that change something at this size."""
    words = "words_small" if numel <= settings.small_up_to else "words"
    hinted = numel <= settings.hint_loads_up_to
    changes = {
        "portable path (general, no assembly)": {"asm": False},
        "no cache hints": {"hints": False},
        "no hints on loads" if hinted else "hints on loads": {"hint_loads_up_to": 0 if hinted else numel},
        **{f"{count} words per thread": {words: count} for count in (1, 2, 4, 8)},
        **{f"{warps} warps": {"num_warps": warps} for warps in (2, 4, 8)},
        "code2 not staged in shared memory": {"stage": False},
        "bf16 rounded in integers": {"int_bf16": True},
    }
    for most in (0, 4, 6, 8):
        name = f"{most or 'any number of'} programs per SM"
        changes[name] = {"programs_per_sm": most, "programs_per_sm_huge": most}
    chosen = dataclasses.asdict(settings)
    return {name: override for name, override in changes.items() if not override.items() <= chosen.items()}


def ablation(bench: Bench) -> Cases:
    """GPU time with one decision changed at a time."""
    settings, rounds, cases = bench.module.settings(), bench.rounds(15, 5), []
    for numel, dtype in bench.progress(itertools.product(bench.scope.ablation, DTYPES), "ablation"):
        changes = {"as chosen": {}} | decisions(settings, numel)
        if dtype == "float16":
            changes.pop("bf16 rounded in integers", None)
        candidates = {n: (bench.module.your_dequantize_nf4, change) for n, change in changes.items()}
        cases.append(_case(bench, numel, dtype, candidates, rounds))
    return Cases(cases=cases)
