"""Sections of the bench that time whole calls: protocol, host_time, launcher, axolotl, triton."""

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import triton

from helpers import machine
from helpers.bench import clocks, contenders, gpu, training
from helpers.bench.contenders import check, exact_calls, exact_weight, us, why
from helpers.puzzle import protocol
from helpers.puzzle.layers import quantized_layer
from helpers.results.store import Row
from nf4_triton import replay
from nf4_triton.launch import your_dequantize_nf4

LAYER = (4096, 1024)  # (in, out) of the puzzle's smallest weight


def in_new_process(function: Callable, **variables) -> str:
    """Call a function of this module in a new process; return the last line that it prints."""
    code = f"from helpers.bench import host; host.{function.__name__}()"
    return machine.python(["-c", code], variables=variables, timeout=600).out.splitlines()[-1]


# --- the puzzle's protocol ---


def time_protocol(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the puzzle's line, then its test: every library, and the kernel in three launch forms."""
    for version, ratios in (protocol.puzzles_line(your_dequantize_nf4) or {}).items():
        if ratios:
            yield Row("protocol", "puzzle's line", f"unsloth_{version}", "x", ratios)
    yield from time_totals(scope, problems)


def time_totals(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the puzzle's test, contenders in turns."""
    everyone = contenders.all_contenders()
    exact = exact_calls(everyone, quantized_layer(*scope.layer, torch.bfloat16), problems)
    seconds, errors = protocol.in_turns({name: everyone[name] for name in exact})
    problems += [f"{name}: {error}" for name, error in errors.items()]
    for name, values in seconds.items():
        yield Row("protocol", "total", name, "s", values)


def time_ordinary_launches(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the puzzle's test of Unsloth's kernel without its launch replay, and of ours by kernel[grid]."""
    if not clocks.ON_GPU or "unsloth_today" in contenders.missing():
        return
    # Unsloth reads the variable when it is imported.
    printed = in_new_process(print_ordinary_launches, UNSLOTH_TRITON_FAST_LAUNCH="0")
    for name, values in json.loads(printed).items():
        yield Row("ordinary_launches", "total", name, "s", values)


def print_ordinary_launches() -> None:
    """Print {contender: seconds of each turn} for time_ordinary_launches."""
    everyone = contenders.all_contenders()
    both = {"unsloth_ordinary": everyone["unsloth_today"], "ordinary": everyone["ordinary"]}
    seconds, errors = protocol.in_turns(both)
    if errors:
        raise RuntimeError(errors)
    print("\n" + json.dumps(seconds))


# --- one call ---


def time_call(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time until a call returns, with a synchronize, and of the first call of a new layer."""
    sizes = (*scope.layer, torch.bfloat16)
    layer = quantized_layer(*sizes)
    functions = contenders.all_contenders() | contenders.writing_into_out(layer)
    calls = exact_calls(functions, layer, problems)
    with protocol.own_libraries():
        yield from us("host_time", "until_return", clocks.host_seconds(calls, scope.rounds, scope.inner))
        waited = clocks.host_seconds(calls, scope.rounds, scope.inner, wait=True)
        yield from us("host_time", "synchronized", waited)
        layers = [quantized_layer(*sizes, seed=index) for index in range(2 * scope.rounds)]
        new = {name: map(functions[name], layers).__next__ for name in calls}  # each takes another layer
        yield from us("host_time", "first_call_new_layer", clocks.host_seconds(new, scope.rounds, 1))


def time_host(scope, problems: list[str]) -> Iterator[Row]:
    """Yield every time of one call: see time_call and first_calls."""
    yield from time_call(scope, problems)
    yield from first_calls(scope, problems)


def time_launcher(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time until a call returns: replayed by the launcher that Triton compiles, where its arguments
    are known, and by the public Python function around it."""
    calls = {"ours": your_dequantize_nf4, "public_launcher": your_dequantize_nf4}
    calls = exact_calls(calls, quantized_layer(*scope.layer, torch.bfloat16), problems)
    usual, seconds = replay.SKIP_PYTHON_LAUNCHER, {name: [] for name in calls}
    for name in clocks.turns(calls, scope.rounds):
        replay.cached.clear()
        with mock.patch.object(replay, "SKIP_PYTHON_LAUNCHER", usual and name == "ours"):
            calls[name]()  # keeps a launch
        seconds[name] += clocks.host_seconds({name: calls[name]}, 1, scope.inner)[name]
    replay.cached.clear()
    yield from us("launcher", "until_return", seconds)


def print_first_call() -> None:
    """Print the seconds of the first call in this process, with the layer on the GPU already."""
    layer = quantized_layer(*LAYER, torch.bfloat16)
    clocks.synchronize()
    start = time.perf_counter()
    your_dequantize_nf4(layer)
    print(time.perf_counter() - start)


def first_calls(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the first call of new processes: with the kernel compiled before, and with an empty cache."""
    if not clocks.ON_GPU:
        return
    warm, cold = [], []
    for _ in range(2):
        warm.append(float(in_new_process(print_first_call)))
        with tempfile.TemporaryDirectory() as folder:
            cold.append(float(in_new_process(print_first_call, TRITON_CACHE_DIR=folder)))
    yield Row("host_time", "first_call", "ours", "s", warm)
    yield Row("host_time", "first_call", "ours_empty_cache", "s", cold)


# --- what else calls the kernel, and what it is compiled by ---


def time_axolotl(scope, problems: list[str]) -> Iterator[Row]:
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


def time_triton(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the kernel's time and the time of calls again, in a section that names Triton's version."""
    if clocks.ON_GPU:
        scope = dataclasses.replace(scope, sizes=(2**22, 2**24, 58_720_256))  # the puzzle's
    for section in (time_totals, gpu.time_sizes, time_call, time_launcher):
        for row in section(scope, problems):
            case = "launcher" if row.section == "launcher" else row.case
            yield dataclasses.replace(row, section=f"triton {triton.__version__}", case=case)
