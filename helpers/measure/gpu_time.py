"""GPU time by graph replay over rotated buffers: all sizes, dequantize + multiply, one decision changed."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from helpers.measure import ceilings, clocks, workload
from helpers.measure.contenders import DTYPES, Bench, why, wrong_bits
from helpers.record.names import bytes_moved, dtype_name
from helpers.record.results import Ablation, AblationCase, Gemm, GemmCase, Gpu, GpuCase, Rows, Times
from helpers.submission import protocol

UNITS = 8  # products in a graph
ALONE = "multiplication alone"


class Candidate(NamedTuple):
    """A dequantization as a user runs it, of set i, under settings that differ from the card's."""

    call: Callable[[int], torch.Tensor]
    overrides: dict = {}


def _capture(bench: Bench, candidates: dict[str, Candidate], buffers: workload.Buffers) -> tuple[dict, dict]:
    """({name: (graph, calls in it)}, {name: why not}) of all whose bits are right.

    Outputs rotate; the graphs share one pool for them. A graph must write the last output's right bits when
    it is replayed: a launch that went past the capture would leave an empty graph, which takes no time.
    """
    count = len(buffers.layers)
    first, last = buffers.expected(0), buffers.expected(count - 1)
    graphs, failures, pool = {}, {}, None
    for name, (call, overrides) in candidates.items():
        with bench.forced(overrides):
            if wrong := wrong_bits(lambda call=call: call(0), first):
                failures[name] = wrong
                continue
            try:
                graph, out = bench.gpu.capture(call, count, warm=count, pool=pool, keep=True)
            except Exception as error:
                failures[name] = f"cannot be captured: {why(error)}"
                clocks.synchronize()
                continue
        if wrong := wrong_bits(lambda graph=graph, out=out: (graph.replay(), out)[1], last, out):
            failures[name] = f"its graph does not write the result: {wrong}"
        else:
            graphs[name], pool = (graph, count), graph.pool()
    return graphs, failures


def _of(dequantize: Callable, buffers: workload.Buffers, **overrides) -> Candidate:
    return Candidate(lambda i: dequantize(buffers.layers[i]), overrides)


def _ceilings(buffers: workload.Buffers, quick: bool) -> dict[str, Callable]:
    """Calls of every launch choice of the ceilings that can run here; all write into buffers.outs."""
    calls = {}
    for kind, kernel in ceilings.kinds().items():
        for choice in ceilings.variants(kind, quick):

            def call(i, kernel=kernel, choice=choice):
                weight = buffers.layers[i].weight
                state = weight.quant_state
                kernel(weight, state.absmax, state.state2.absmax, buffers.outs[i], **choice)

            calls[f"{kind} {choice['words']} {choice['threads']} {choice['store'] or 'plain'}"] = call
    return calls


def _rows(times: dict[str, list[float]], nbytes: int) -> Rows:
    """A row for each name; of a ceiling that of its fastest launch choice."""
    rows = {}
    for name, seconds in times.items():
        kind, _, choice = name.partition(" ")
        row = Times.of(seconds, nbytes, variant=choice)
        if kind not in rows or row.p50 < rows[kind].p50:
            rows[kind] = row
    return rows


def _gpu_case(bench: Bench, numel: int, dtype_name: str, rounds: int) -> GpuCase:
    """GPU time of one size: every contender, and what only moves the bytes."""
    dtype, shape = DTYPES[dtype_name], workload.as_shape(numel)
    count = bench.sets(numel)
    case = GpuCase(shape=shape, numel=numel, dtype=dtype_name, buffers=count)
    # The buffers, a second set of outputs in the graphs' pool, and what the checks need.
    need, free = count * (bytes_moved(numel) + 2 * numel) + 8 * numel, bench.gpu.free_bytes()
    if need > 0.9 * free:
        case.skipped = f"needs {need / 1e9:.1f} GB of free GPU memory, {free / 1e9:.1f} GB are free"
        return case
    buffers = workload.make_buffers(shape, dtype, count, outputs=True, device=bench.device)
    candidates = {name: _of(fn, buffers) for name, fn in bench.on_gpu().items()}
    graphs, case.failures = _capture(bench, candidates, buffers)
    for name, call in _ceilings(buffers, bench.quick).items():
        graphs[name] = (bench.gpu.capture(call, count)[0], count)
    case.rows = _rows(bench.gpu.replay_interleaved(graphs, rounds), buffers.bytes_moved)
    case.bytes_rotated = buffers.bytes_rotated
    missing = ceilings.cuda_missing()
    case.absent = {"ceiling_cuda": missing} if missing else {}
    return case


def _gate(device: str, quick: bool):
    """Every launch choice of the ceilings against their oracle: one that skips bytes would be no ceiling."""
    buffers = workload.make_buffers((256, 1024), torch.float16, 2, outputs=True, device=device)
    weight, out = buffers.layers[1].weight, buffers.outs[1]
    scales = weight.quant_state.absmax, weight.quant_state.state2.absmax
    for kind, kernel in ceilings.kinds().items():
        for choice in ceilings.variants(kind, quick):
            out.fill_(math.nan)
            kernel(weight, *scales, out, **choice)
            expected = ceilings.oracle(weight, *scales, out.numel(), choice["words"], choice["threads"])
            if not torch.equal(out.view(torch.int32).view(-1, 4), expected):
                raise AssertionError(f"{kind} {choice} does not write what its oracle says")


def gpu(bench: Bench) -> Gpu:
    """GPU time by graph replay over rotated buffers, from 64K to 1G elements."""
    rounds = bench.rounds(21, 7)
    _gate(bench.device, bench.quick)
    sizes = bench.progress(itertools.product(bench.scope.sizes, DTYPES), "gpu")
    cases = [_gpu_case(bench, numel, name, rounds) for numel, name in sizes]
    return Gpu(sizes=cases, l2_bytes=bench.gpu.l2_bytes())


def gemm(bench: Bench) -> Gemm:
    """Dequantize and X @ W.t() as one unit, as training runs it, under each store policy."""
    layers = bench.progress(itertools.product(bench.scope.gemm, ("up", "down")), "gemm")
    return Gemm(cases=[_gemm_case(bench, config, layer) for config, layer in layers])


def _gemm_case(bench: Bench, config: protocol.Config, layer: str) -> GemmCase:
    ours, rows = bench.module.your_dequantize_nf4, config.batch * config.seq
    shape = (config.intermediate, config.hidden)[:: 1 if layer == "up" else -1]
    buffers = workload.make_buffers(shape, config.dtype, UNITS, device=bench.device)
    generator = torch.Generator(device=bench.device).manual_seed(config.seed)
    X = torch.randn(rows, shape[1], dtype=config.dtype, device=bench.device, generator=generator)
    streams, ready = bench.module.settings().hints, buffers.expected(0)
    other = "plain stores, no hints" if streams else "streaming stores"
    candidates = {
        "kernel": _of(ours, buffers),
        f"kernel, {other}": _of(ours, buffers, hints=not streams),
    }
    if today := bench.baselines["unsloth_today"].fn:
        candidates["unsloth_today"] = _of(today, buffers)
    graphs, failures = {}, {}
    for name, (call, overrides) in candidates.items():
        with bench.forced(overrides):
            if wrong := wrong_bits(lambda call=call: call(0), ready):
                failures[name] = wrong
            else:
                graph, _ = bench.gpu.capture(lambda i, call=call: X @ call(i).t(), UNITS, warm=UNITS)
                graphs[name] = (graph, UNITS)
    graphs[ALONE] = (bench.gpu.capture(lambda i: X @ ready.t(), UNITS)[0], UNITS)
    times = bench.gpu.replay_interleaved(graphs, bench.rounds(15, 5))
    return GemmCase(
        shape=shape,
        layer=layer,
        tokens=rows,
        dtype=dtype_name(config.dtype),
        units_in_graph=UNITS,
        rows={name: Times.of(seconds) for name, seconds in times.items()},
        failures=failures,
    )


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


def ablation(bench: Bench) -> Ablation:
    """GPU time with one decision changed at a time."""
    sizes = bench.progress(itertools.product(bench.scope.ablation, DTYPES), "ablation")
    return Ablation(cases=[_ablation_case(bench, numel, name) for numel, name in sizes])


def _ablation_case(bench: Bench, numel: int, dtype_name: str) -> AblationCase:
    bench.gpu.free_bytes()
    shape, count = workload.as_shape(numel), bench.sets(numel)
    buffers = workload.make_buffers(shape, DTYPES[dtype_name], count, device=bench.device)
    changes = decisions(bench.module.settings(), numel)
    if dtype_name == "float16":
        changes.pop("bf16 rounded in integers", None)
    dequantize = bench.module.your_dequantize_nf4
    candidates = {
        n: _of(dequantize, buffers, **change) for n, change in ({"as chosen": {}} | changes).items()
    }
    graphs, failures = _capture(bench, candidates, buffers)
    times = bench.gpu.replay_interleaved(graphs, bench.rounds(15, 5))
    return AblationCase(
        numel=numel,
        dtype=dtype_name,
        bytes_rotated=buffers.bytes_rotated,
        rows={name: Times.of(seconds, buffers.bytes_moved) for name, seconds in times.items()},
        failures=failures,
    )
