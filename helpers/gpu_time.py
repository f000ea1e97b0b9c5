"""GPU time by graph replay over rotated buffers: all sizes, dequantize + multiply, one decision changed."""

import contextlib
import dataclasses
import importlib
import math
import statistics
from collections.abc import Callable

import torch

from helpers import floor, harness, timing, workload
from helpers.contest import BASELINES_ON_GPU, DEQUANTIZERS, DTYPES, Bench, why, wrong_bits

SAME_AS_BITSANDBYTES = "calls bitsandbytes' kernels: its GPU time is the row of bitsandbytes"


def _ceilings(buffers: workload.Buffers) -> tuple[dict[str, Callable], dict[str, str]]:
    """Calls of every floor variant and of plain copy and fill, and what is missing with its reason."""
    weights, states, outs = buffers.weights, buffers.states, buffers.outs
    count = len(outs)
    calls: dict[str, Callable] = {
        "copy": lambda i: outs[i].copy_(outs[(i + 1) % count]),
        "fill": lambda i: outs[i].fill_(0),
    }
    missing = floor.cuda_missing()
    for kind, kernel in (("cuda", floor.cuda_floor), ("triton", floor.triton_floor)):
        if kind == "cuda" and missing:
            continue
        for choice in floor.variants(kind):

            def call(i, kernel=kernel, choice=choice):
                state = states[i]
                kernel(weights[i], state.absmax, state.state2.absmax, outs[i], **choice)

            calls[f"floor_{kind} {choice['words']} {choice['threads']} {choice['store'] or 'plain'}"] = call
    return calls, {"floor_cuda": missing} if missing else {}


def _gpu_times(calls: dict[str, Callable], buffers: workload.Buffers, rounds: int) -> tuple[dict, dict, dict]:
    """({name: seconds by round}, {name: how it was timed}, {name: why a graph was not possible}).

    A captured graph must write the last buffer's right bits when replayed: a launch that went past the
    capture would leave an empty graph, which takes no time.
    """
    count, out = len(buffers.outs), buffers.outs[-1]
    expected = buffers.expected(count - 1)
    graphs, ways, reasons = {}, {}, {}
    for name, call in calls.items():
        try:
            graph = timing.capture(call, count)
        except Exception as error:
            reasons[name] = why(error)
            torch.cuda.synchronize()
            continue
        if name in DEQUANTIZERS:
            wrong = wrong_bits(lambda graph=graph: (graph.replay(), out)[1], expected, out)
            if wrong:
                reasons[name] = f"its graph does not write the result: {wrong}"
                continue
        graphs[name], ways[name] = (graph, count), "graph"
    times = timing.replay_interleaved(graphs, rounds)
    for name in reasons:
        calls_a_round = min(count, 64)
        events = [timing.device_events(calls[name], calls_a_round) for _ in range(3)]
        if all(events):
            times[name] = [sum(seconds for _, seconds in found) / calls_a_round for found in events]
            ways[name] = "profiler"
    return times, ways, reasons


def _gpu_case(bench: Bench, shape, dtype_name: str, rounds: int, ceilings: bool) -> dict:
    """GPU time of one size: every candidate, and with `ceilings` everything that only moves bytes."""
    dtype, numel = DTYPES[dtype_name], math.prod(shape)
    count = workload.rotation(numel)
    case = {"shape": list(shape), "numel": numel, "dtype": dtype_name, "buffers": count}
    torch.cuda.empty_cache()
    need, free = count * floor.bytes_moved(numel) + 6 * numel, torch.cuda.mem_get_info()[0]
    if need > 0.9 * free:
        return case | {
            "skipped": f"needs {need / 1e9:.1f} GB of free GPU memory, {free / 1e9:.1f} GB are free"
        }
    buffers = workload.make_buffers(shape, dtype, count)
    weights, states, outs = buffers.weights, buffers.states, buffers.outs
    calls, failures = {}, {}
    for name, launch in bench.launchers().items():

        def call(i, launch=launch):
            launch(weights[i], states[i], outs[i])
            return outs[i]

        wrong = wrong_bits(lambda call=call: call(0), buffers.expected(0), outs[0])
        if wrong:
            failures[name] = wrong
        else:
            calls[name] = call
    absent = {}
    if ceilings:
        more, absent = _ceilings(buffers)
        calls |= more
    times, ways, reasons = _gpu_times(calls, buffers, rounds)
    own_bytes = {"copy": 2 * numel * dtype.itemsize, "fill": numel * dtype.itemsize}
    rows = {
        name: timing.row(times[name], own_bytes.get(name, buffers.bytes_moved), way=ways[name])
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
            name: timing.ratio(times[name], times["kernel"]) for name in BASELINES_ON_GPU if name in times
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
                name: timing.ratio(floor_times, times[name]) for name in DEQUANTIZERS if name in times
            }


def _floor_gate() -> dict[str, str]:
    """Every floor variant against its oracle: a ceiling that skips bytes would be no ceiling."""
    buffers = workload.make_buffers((256, 1024), torch.float16, count=2)
    weight, state, out = buffers.weights[1], buffers.states[1], buffers.outs[1]
    wrong = {}
    kinds = {"triton": floor.triton_floor} | ({} if floor.cuda_missing() else {"cuda": floor.cuda_floor})
    for kind, kernel in kinds.items():
        for choice in floor.variants(kind):
            out.fill_(math.nan)
            kernel(weight, state.absmax, state.state2.absmax, out, **choice)
            expected = floor.oracle(
                weight, state.absmax, state.state2.absmax, out.numel(), choice["words"], choice["threads"]
            )
            if not torch.equal(out.view(torch.int32).view(-1, 4), expected):
                wrong[f"{kind} {choice}"] = "does not write what its oracle says"
    return wrong


def gpu(bench: Bench) -> dict:
    """GPU time by graph replay over rotated buffers: sizes from 64K to 1G elements, and real layer shapes."""
    sizes = (2**16, *workload.TARGET_SIZES) if bench.quick else workload.SIZES
    rounds = bench.rounds(21, 7)
    layers = {} if bench.quick else _layer_sizes()
    with bench.bar(2 * (len(sizes) + len(layers)) + 1, "gpu") as bar:
        wrong = _floor_gate()
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
    """Store policies to compare, as arguments of module.force."""
    fields = {field.name for field in dataclasses.fields(module.settings())}
    policies = {"kernel": {}}
    if "store" in fields:
        return policies | {f"kernel, store {value or 'plain'}": {"store": value} for value in (".cs", "")}
    if "hints" in fields:
        policies |= {f"kernel, hints {'on' if value else 'off'}": {"hints": value} for value in (True, False)}
    return policies


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
    buffers = workload.make_buffers(shape, dtype, count)
    weights, states = buffers.weights, buffers.states
    generator = torch.Generator(device="cuda").manual_seed(config.seed)
    X = torch.randn(config.batch, config.seq, shape[1], dtype=dtype, device="cuda", generator=generator)
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
            graph = timing.capture(lambda i, f=dequantize: X @ f(weights[i], states[i]).t(), count)
            graphs[name] = (graph, count)
    graphs["multiplication alone"] = (timing.capture(lambda i: X @ ready.t(), count), count)
    times = timing.replay_interleaved(graphs, rounds)
    alone = times["multiplication alone"]
    return {
        "shape": list(shape),
        "layer": layer,
        "tokens": config.batch * config.seq,
        "dtype": str(dtype).removeprefix("torch."),
        "units_in_graph": count,
        "rows": {
            name: timing.row(found, vs_multiplication_alone=timing.ratio(found, alone))
            for name, found in times.items()
        },
        "failures": failures,
    }


def _steps(module, dtype_name: str) -> dict[str, dict]:
    """Name of the step that is switched, and the override that does it."""
    chosen = module.settings()
    steps = {"as chosen": {}, "no inline assembly": {"asm": False}, "no cache hints": {"hints": False}}
    steps |= {f"{words} words a thread": {"words": words} for words in (1, 2, 4, 8)}
    steps |= {f"{warps} warps": {"num_warps": warps} for warps in (2, 4, 8)}
    if dtype_name == "bfloat16":
        steps["bf16 rounded in integers"] = {"int_bf16": True}
    fields = {field.name for field in dataclasses.fields(chosen)}
    return {name: override for name, override in steps.items() if set(override) <= fields}


def ablation(bench: Bench) -> dict:
    """GPU time with one decision changed at a time."""
    sizes = workload.TARGET_SIZES[:2] if bench.quick else workload.TARGET_SIZES
    rounds, cases, module = bench.rounds(15, 5), [], bench.module
    with bench.bar(len(sizes) * len(DTYPES), "ablation") as bar:
        for numel in sizes:
            for dtype_name, dtype in DTYPES.items():
                torch.cuda.empty_cache()
                count = workload.rotation(numel)
                buffers = workload.make_buffers(workload.as_shape(numel), dtype, count)
                cases.append(_ablation_case(module, buffers, count, dtype_name, rounds))
                del buffers
                bar.update()
    return {"settings": dataclasses.asdict(module.settings()), "cases": cases}


def _ablation_case(module, buffers, count: int, dtype_name: str, rounds: int) -> dict:
    weights, states, outs = buffers.weights, buffers.states, buffers.outs
    expected = buffers.expected(0)

    def call(i):
        return module._your_dequantize_nf4(weights[i], states[i], out=outs[i])

    graphs, failures = {}, {}
    for name, override in _steps(module, dtype_name).items():
        with module.force(**override) if override else contextlib.nullcontext():
            wrong = wrong_bits(lambda: call(0), expected, outs[0])
            if wrong:
                failures[name] = wrong
                continue
            graphs[name] = (timing.capture(call, count), count)
    times = timing.replay_interleaved(graphs, rounds)
    chosen = times.get("as chosen")
    return {
        "numel": buffers.numel,
        "dtype": dtype_name,
        "bytes_rotated": buffers.bytes_rotated,
        "rows": {
            name: timing.row(
                found, buffers.bytes_moved, **({"vs_chosen": timing.ratio(found, chosen)} if chosen else {})
            )
            for name, found in times.items()
        },
        "failures": failures,
    }
