"""GPU time by graph replay over rotated buffers: all sizes, dequantize + multiply, one decision changed."""

import contextlib
import dataclasses
import importlib
import math
import statistics
from collections.abc import Callable

import torch

from helpers.measure import ceilings, clocks, workload
from helpers.submission import harness
from helpers.measure.contenders import BASELINES_ON_GPU, DEQUANTIZERS, DTYPES, Bench, why, wrong_bits

QUICK_SIZES = (2**16, *workload.TARGET_SIZES)  # elements; the full sweep is workload.SIZES
ROUNDS = 21, 7  # of the sweep: full, quick
SMALL = 2**20  # elements of a tensor that does not fill a large card, for the ablation
SAME_AS_BITSANDBYTES = "calls bitsandbytes' kernels: its GPU time is the row of bitsandbytes"


def _ceilings(buffers: workload.Buffers, quick: bool) -> tuple[dict[str, Callable], dict[str, str]]:
    """Calls of every floor variant and of plain copy and fill, and what is missing with its reason."""
    weights, states, outs = buffers.weights, buffers.states, buffers.outs
    count = len(outs)
    calls: dict[str, Callable] = {}
    if count > 1:  # never onto itself
        calls["copy"] = lambda i: outs[i].copy_(outs[(i + 1) % count])
    calls["fill"] = lambda i: outs[i].fill_(0)
    missing = ceilings.cuda_missing()
    for kind, kernel in (("cuda", ceilings.cuda_floor), ("triton", ceilings.triton_floor)):
        if kind == "cuda" and missing:
            continue
        for choice in ceilings.variants(kind, quick):

            def call(i, kernel=kernel, choice=choice):
                state = states[i]
                kernel(weights[i], state.absmax, state.state2.absmax, outs[i], **choice)

            calls[f"floor_{kind} {choice['words']} {choice['threads']} {choice['store'] or 'plain'}"] = call
    return calls, {"floor_cuda": missing} if missing else {}


def ceiling(device: str = "cuda", side: int = 2**14) -> float:
    """GB/s, read and written, of a Triton kernel that moves this format's bytes and computes nothing.

    side: of the square weight it moves; the default is well past any cache. Graph replay, the best of the
    launch choices.
    """
    buffers = workload.make_buffers((side, side), torch.float16, count=2, outputs=True, device=device)
    movers, _ = _ceilings(buffers, quick=True)
    graphs = {
        name: (clocks.capture(call, 2)[0], 2)
        for name, call in movers.items()
        if name.startswith("floor_triton")
    }
    times = clocks.replay_interleaved(graphs, rounds=5)
    return buffers.bytes_moved / min(clocks.percentiles(found)["p50"] for found in times.values()) / 1e9


def _gpu_times(
    calls: dict[str, Callable], movers: dict[str, Callable], buffers: workload.Buffers, rounds: int
) -> tuple[dict, dict, dict]:
    """({name: seconds by round}, {name: how it was timed}, {name: why a graph was not possible}).

    calls: dequantizations, run as a user runs them; their outputs rotate, the graphs share one pool for them.
    movers: what writes into `buffers.outs`. A dequantization's graph must write the last output's right bits
    when replayed: a launch that went past the capture would leave an empty graph, which takes no time.
    """
    count = len(buffers.weights)
    expected = buffers.expected(count - 1)
    graphs, reasons, pool = {}, {}, None
    for name, call in calls.items():
        try:
            graph, out = clocks.capture(call, count, warm=count, pool=pool, keep=True)
        except Exception as error:
            reasons[name] = why(error)
            torch.cuda.synchronize()
            continue
        wrong = wrong_bits(lambda graph=graph, out=out: (graph.replay(), out)[1], expected, out)
        if wrong:
            reasons[name] = f"its graph does not write the result: {wrong}"
            continue
        graphs[name], pool = (graph, count), graph.pool()
    for name, call in movers.items():
        graphs[name] = (clocks.capture(call, count)[0], count)
    times = clocks.replay_interleaved(graphs, rounds)
    ways = dict.fromkeys(times, "graph")
    for name in reasons:
        calls_a_round = min(count, 64)
        events = [clocks.device_events(calls[name], calls_a_round) for _ in range(3)]
        if all(events):
            times[name] = [sum(seconds for _, seconds in found) / calls_a_round for found in events]
            ways[name] = "profiler"
    return times, ways, reasons


def _gpu_case(bench: Bench, shape, dtype_name: str, rounds: int, ceilings: bool) -> dict:
    """GPU time of one size: every candidate, and with `ceilings` everything that only moves bytes."""
    dtype, numel = DTYPES[dtype_name], math.prod(shape)
    rotated = workload.quick_bytes(_l2_bytes() or 0) if bench.quick else workload.ROTATE_BYTES
    count = workload.rotation(numel, nbytes=rotated)
    case = {"shape": list(shape), "numel": numel, "dtype": dtype_name, "buffers": count}
    torch.cuda.empty_cache()
    # The buffers, a second set of outputs in the graphs' pool, and what the checks need.
    need = count * (ceilings.bytes_moved(numel) + 2 * numel) + 8 * numel
    free = torch.cuda.mem_get_info()[0]
    if need > 0.9 * free:
        reason = f"needs {need / 1e9:.1f} GB of free GPU memory, {free / 1e9:.1f} GB are free"
        return case | {"skipped": reason}
    buffers = workload.make_buffers(shape, dtype, count, outputs=ceilings, device=bench.device)
    weights, states = buffers.weights, buffers.states
    calls, failures = {}, {}
    for name, launch in bench.launchers().items():

        def call(i, launch=launch):
            return launch(weights[i], states[i])

        wrong = wrong_bits(lambda call=call: call(0), buffers.expected(0))
        if wrong:
            failures[name] = wrong
        else:
            calls[name] = call
    movers, absent = _ceilings(buffers, bench.quick) if ceilings else ({}, {})
    times, ways, reasons = _gpu_times(calls, movers, buffers, rounds)
    own_bytes = {"copy": 2 * numel * dtype.itemsize, "fill": numel * dtype.itemsize}
    rows = {
        name: clocks.row(times[name], own_bytes.get(name, buffers.bytes_moved), way=ways[name])
        for name in times
    }
    case |= {
        "bytes": buffers.bytes_moved,
        "bytes_rotated": buffers.bytes_rotated,
        "rows": {name: row for name, row in rows.items() if not name.startswith("floor_")},
        "not_captured": reasons,
        "failures": failures,
        "absent": absent | {"peft": SAME_AS_BITSANDBYTES},
    }
    _add_floors(case, rows, times)
    if "kernel" in times:
        case["vs"] = {
            name: clocks.ratio(times[name], times["kernel"]) for name in BASELINES_ON_GPU if name in times
        }
    return case


def _add_floors(case: dict, rows: dict, times: dict):
    """The best floor of each kind as a row, all variants' medians, and every candidate's share of it."""
    for kind in ("floor_cuda", "floor_triton"):
        variants = {name: row for name, row in rows.items() if name.startswith(kind)}
        if variants:
            best = min(variants, key=lambda name: variants[name]["p50"])
            case["rows"][kind] = variants[best] | {"variant": best.removeprefix(f"{kind} ")}
            case.setdefault("floor_variants", {}).update({name: row["p50"] for name, row in variants.items()})
            floor_times = times[best]
            case.setdefault("share", {})[kind] = {
                name: clocks.ratio(floor_times, times[name]) for name in DEQUANTIZERS if name in times
            }


def _floor_gate(device: str, quick: bool) -> dict[str, str]:
    """Every floor variant to be timed against its oracle: a ceiling that skips bytes would be no ceiling."""
    buffers = workload.make_buffers((256, 1024), torch.float16, count=2, outputs=True, device=device)
    weight, state, out = buffers.weights[1], buffers.states[1], buffers.outs[1]
    wrong = {}
    kinds = {"triton": ceilings.triton_floor} | (
        {} if ceilings.cuda_missing() else {"cuda": ceilings.cuda_floor}
    )
    for kind, kernel in kinds.items():
        for choice in ceilings.variants(kind, quick):
            out.fill_(math.nan)
            kernel(weight, state.absmax, state.state2.absmax, out, **choice)
            expected = ceilings.oracle(
                weight, state.absmax, state.state2.absmax, out.numel(), choice["words"], choice["threads"]
            )
            if not torch.equal(out.view(torch.int32).view(-1, 4), expected):
                wrong[f"{kind} {choice}"] = "does not write what its oracle says"
    return wrong


def gpu(bench: Bench) -> dict:
    """GPU time by graph replay over rotated buffers: sizes from 64K to 1G elements, and real layer shapes."""
    sizes = QUICK_SIZES if bench.quick else workload.SIZES
    rounds = bench.rounds(*ROUNDS)
    layers = {} if bench.quick else _layer_sizes()
    with bench.bar(2 * (len(sizes) + len(layers)) + 1, "gpu") as bar:
        wrong = _floor_gate(bench.device, bench.quick)
        if wrong:
            raise AssertionError(f"the ceiling kernels are wrong: {wrong}")
        bar.update()
        cases = {"sizes": [], "layers": []}
        for kind, shapes in (("sizes", [workload.as_shape(n) for n in sizes]), ("layers", list(layers))):
            for shape in shapes:
                for dtype_name in DTYPES:
                    case = _gpu_case(bench, shape, dtype_name, rounds, kind == "sizes")
                    if kind == "layers":
                        case["layers"] = layers[shape]
                    cases[kind].append(case)
                    bar.update()
    return cases | _against_today(cases["sizes"]) | {"l2_bytes": _l2_bytes()}


def _l2_bytes() -> int | None:
    return getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", None)


def _layer_sizes() -> dict[tuple[int, int], list[str]]:
    """{shape: the layers it stands for}; shapes of equal size are the same work and measured once."""
    by_numel: dict[int, tuple[tuple[int, int], list[str]]] = {}
    for model, shapes in workload.LAYERS.items():
        for shape in shapes:
            by_numel.setdefault(math.prod(shape), (shape, []))[1].append(f"{model} {shape[0]}x{shape[1]}")
    return dict(by_numel[numel] for numel in sorted(by_numel))


def _against_today(cases: list[dict]) -> dict:
    ratios = {
        (case["numel"], case["dtype"]): case["vs"]["unsloth_today"]
        for case in cases
        if "unsloth_today" in case.get("vs", {})
    }
    if not ratios:
        return {}
    worst = min(ratios, key=ratios.get)
    return {
        "vs_unsloth_today": {
            "geometric_mean": statistics.geometric_mean(ratios.values()),
            "lowest": ratios[worst],
            "lowest_at": list(worst),
            "cases": len(ratios),
        }
    }


def _policies(module) -> dict[str, dict]:
    """Store policies to compare, as arguments of module.force: as chosen, and the other way round."""
    streams = module.settings().hints
    other = "plain stores, no hints" if streams else "streaming stores"
    return {"kernel": {}, f"kernel, {other}": {"hints": not streams}}


def gemm(bench: Bench) -> dict:
    """Dequantize and X @ W.t() as one unit, as training runs it, under each store policy."""
    configs = harness.OFFICIAL[:1] if bench.quick else harness.OFFICIAL
    rounds, cases, count = bench.rounds(15, 5), [], 8
    with bench.bar(2 * len(configs), "gemm") as bar:
        for config in configs:
            for layer, shape in (
                ("up", (config.intermediate, config.hidden)),
                ("down", (config.hidden, config.intermediate)),
            ):
                cases.append(_gemm_case(bench, config, layer, shape, count, rounds))
                bar.update()
    return {"cases": cases}


def _gemm_case(bench: Bench, config, layer: str, shape, count: int, rounds: int) -> dict:
    module, dtype = bench.module, config.dtype
    buffers = workload.make_buffers(shape, dtype, count, device=bench.device)
    weights, states = buffers.weights, buffers.states
    generator = torch.Generator(device=bench.device).manual_seed(config.seed)
    X = torch.randn(config.batch, config.seq, shape[1], dtype=dtype, device=bench.device, generator=generator)
    ready = buffers.expected(0)
    ways = {name: (overrides, module._your_dequantize_nf4) for name, overrides in _policies(module).items()}
    if bench.found["unsloth_today"].fn is not None:
        ways["unsloth_today"] = ({}, importlib.import_module("unsloth.kernels.utils").fast_dequantize)
    graphs, failures = {}, {}
    for name, (overrides, dequantize) in ways.items():
        with module.force(**overrides) if overrides else contextlib.nullcontext():
            wrong = wrong_bits(lambda dequantize=dequantize: dequantize(weights[0], states[0]), ready)
            if wrong:
                failures[name] = wrong
                continue
            unit = clocks.capture(lambda i, f=dequantize: X @ f(weights[i], states[i]).t(), count, warm=count)
            graphs[name] = (unit[0], count)
    graphs["multiplication alone"] = (clocks.capture(lambda i: X @ ready.t(), count)[0], count)
    times = clocks.replay_interleaved(graphs, rounds)
    alone = times["multiplication alone"]
    return {
        "shape": list(shape),
        "layer": layer,
        "tokens": config.batch * config.seq,
        "dtype": str(dtype).removeprefix("torch."),
        "units_in_graph": count,
        "rows": {
            name: clocks.row(found, vs_multiplication_alone=clocks.ratio(found, alone))
            for name, found in times.items()
        },
        "failures": failures,
    }


def _steps(module, numel: int, dtype_name: str) -> dict[str, dict]:
    """Name of the decision that is changed, and the override that does it."""
    chosen = dataclasses.asdict(module.settings())
    words = "words_small" if numel <= chosen.get("small", 0) else "words"
    steps = {
        "no inline assembly": {"asm": False},
        "no cache hints": {"hints": False},
        "hints on loads": {"hint_loads": True},
        "no hints on loads": {"hint_loads": False, "hinted": 0},
        **{f"{count} words a thread": {words: count} for count in (1, 2, 4, 8)},
        **{f"{warps} warps": {"num_warps": warps} for warps in (2, 4, 8)},
        "code2 not staged in shared memory": {"stage": False},
        **{
            f"{limit or 'any number of'} programs an SM": {"resident": limit, "resident_huge": limit}
            for limit in (0, 4, 6, 8)
        },
    }
    if dtype_name == "bfloat16":
        steps["bf16 rounded in integers"] = {"int_bf16": True}
    changes = {
        name: override
        for name, override in steps.items()
        if override.keys() <= chosen.keys() and not override.items() <= chosen.items()
    }
    return {"as chosen": {}} | changes


def ablation(bench: Bench) -> dict:
    """GPU time with one decision changed at a time."""
    sizes = workload.TARGET_SIZES[:2] if bench.quick else (SMALL, *workload.TARGET_SIZES)
    rounds, cases, module = bench.rounds(15, 5), [], bench.module
    with bench.bar(len(sizes) * len(DTYPES), "ablation") as bar:
        for numel in sizes:
            for dtype_name, dtype in DTYPES.items():
                torch.cuda.empty_cache()
                count = workload.rotation(numel)
                buffers = workload.make_buffers(workload.as_shape(numel), dtype, count, device=bench.device)
                cases.append(_ablation_case(module, buffers, count, dtype_name, rounds))
                del buffers
                bar.update()
    return {"settings": dataclasses.asdict(module.settings()), "cases": cases}


def _ablation_case(module, buffers, count: int, dtype_name: str, rounds: int) -> dict:
    weights, states = buffers.weights, buffers.states
    expected = buffers.expected(0)

    def call(i):
        return module._your_dequantize_nf4(weights[i], states[i])

    graphs, failures, pool = {}, {}, None
    for name, override in _steps(module, buffers.numel, dtype_name).items():
        with module.force(**override) if override else contextlib.nullcontext():
            wrong = wrong_bits(lambda: call(0), expected)
            if wrong:
                failures[name] = wrong
                continue
            graph, _ = clocks.capture(call, count, warm=count, pool=pool, keep=True)
            graphs[name], pool = (graph, count), graph.pool()
    times = clocks.replay_interleaved(graphs, rounds)
    chosen = times.get("as chosen")
    return {
        "numel": buffers.numel,
        "dtype": dtype_name,
        "bytes_rotated": buffers.bytes_rotated,
        "rows": {
            name: clocks.row(
                found, buffers.bytes_moved, **({"vs_chosen": clocks.ratio(found, chosen)} if chosen else {})
            )
            for name, found in times.items()
        },
        "failures": failures,
    }
