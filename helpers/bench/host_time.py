"""Time of a call on the host, what it consists of, and what it executes in Python."""

import collections
import contextlib
import functools
import sys
from collections.abc import Callable
from unittest import mock

import torch

from helpers.bench import ceilings, clocks
from helpers.bench.contenders import Bench, users_bitsandbytes, wrong_bits
from helpers.nf4.layers import quantized_layer
from helpers.results.names import ALLOCATE_FILL
from helpers.results.store import Host, HostCase, Parts, Rows, Times
from helpers.puzzle import protocol

LAUNCHES = ("aten fill_", "triton compiled launcher")
BARE = "torch.empty + a bare launch"
# How each gets its output, where it is not torch.empty.
_ALLOCATES = {"kernel": "Inductor's empty_strided", ALLOCATE_FILL: "empty_strided"}


def _rows(bench: Bench, calls: dict[str, Callable], rounds: int, wait=False, **more) -> Rows:
    times = clocks.time_interleaved(calls, rounds, bench.scope.inner, wait, **more)
    return {name: Times.of(seconds) for name, seconds in times.items()}


def _launches(out) -> dict[str, Callable]:
    """The cheapest ways to launch one tiny kernel: an ATen operation, Triton's compiled launcher."""
    compiled = ceilings.trivial_kernel[(1,)](out)
    aten, launcher = LAUNCHES
    ways = {aten: lambda: out.fill_(0)}
    with contextlib.suppress(Exception):  # private: its arguments change between versions of Triton
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        stream, address = torch.cuda.current_stream().cuda_stream, out.data_ptr()

        def direct():
            run(1, 1, 1, stream, function, metadata, None, None, None, address)

        direct()
        ways[launcher] = direct
    return ways


def _units(bench: Bench, like: torch.Tensor) -> Rows:
    """Microseconds of an allocation and of a launch, each way; `like`: a tensor such as a call returns."""
    shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    calls = {
        "empty_strided": lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device),
        "empty": lambda: torch.empty(shape, dtype=dtype, device=device),
        **_launches(torch.zeros(4, dtype=torch.int32, device=device)),
    }
    with contextlib.suppress(Exception):  # private: the name changes between versions of torch
        empty = functools.partial(torch._C._dynamo.guards._empty_strided_cuda, shape, strides, dtype)
        empty()
        calls["Inductor's empty_strided"] = empty
    return _rows(bench, calls, bench.rounds(40, 10))


def _parts(bench: Bench, name: str, call: Callable, units: Rows, case: HostCase) -> Parts:
    """Where one call's microseconds go: allocations and launches, each at its cheapest measured cost."""
    returned, allocations = case.returned[name].p50, bench.gpu.allocations(call)
    parts = Parts(
        allocations=allocations,
        kernels=None,
        returned_us=returned,
        wait_us=case.synchronized[name].p50 - returned,
        allocate_us=allocations * units.get(_ALLOCATES.get(name, "empty"), units["empty_strided"]).p50,
    )
    with contextlib.suppress(Exception):  # where kernels cannot be counted, the rest is not split
        parts.kernels = bench.gpu.graph_nodes(call)
        parts.launch_us = parts.kernels * min(units[way].p50 for way in LAUNCHES if way in units)
        parts.rest_us = returned - parts.allocate_us - parts.launch_us
    return parts


def _calls(bench: Bench, shape, dtype: str) -> tuple[torch.Tensor, dict[str, Callable], dict[str, str]]:
    """One layer's (expected weight, {name: call} of all whose bits are right, {name: why not} of others)."""
    layer = _layer(bench, shape, dtype)
    expected = protocol.expected(layer)
    contenders, calls, failures = bench.contenders(), {}, {}
    if users := users_bitsandbytes():
        contenders["bitsandbytes_zoo"] = users
    for name, contender in contenders.items():
        call = functools.partial(contender, layer)
        if wrong := wrong_bits(call, expected):
            failures[name] = wrong
        else:
            calls[name] = call
    return expected, calls, failures


def _layer(bench: Bench, shape, dtype: str):
    return quantized_layer(*shape[::-1], getattr(torch, dtype), device=bench.device)


def _allocate_fill(like: torch.Tensor) -> Callable:
    """The least that a call can cost which returns new memory like this."""
    shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(0)


def host(bench: Bench) -> Host:
    """Time until a call returns and until it is done, and what the call consists of."""
    cases, parts, rounds = [], {}, bench.rounds(60, 10)
    for shape, dtype in bench.progress(bench.scope.layers, "host"):
        expected, calls, failures = _calls(bench, shape, dtype)
        calls[ALLOCATE_FILL] = _allocate_fill(expected)
        times = {"returned": _rows(bench, calls, rounds), "synchronized": _rows(bench, calls, rounds, True)}
        cases.append(HostCase(shape=shape, dtype=dtype, failures=failures, **times))
        if not parts:  # where the call weighs most
            units = _units(bench, expected)
            parts = {name: _parts(bench, name, call, units, cases[0]) for name, call in calls.items()}
    return Host(cases=cases, units=units, parts=parts, steps=steps(bench))


class _NoPlans(dict):
    """In place of the kernel's plans: every call is a first call."""

    def get(self, key, default=None):
        return default


def _public_launch(module) -> dict:
    """What makes a planned call launch as anyone would, `kernel[grid](...)`, into the output it allocated."""
    empty, last, options = module._empty_cuda, [None], module._options(module.settings())

    def allocate(*arguments):
        last[0] = empty(*arguments)
        return last[0]

    def repeat(compiled, grid, arguments, constexprs, limit):
        kernel = module._your_dequantize_nf4_kernel

        def launch(stream, *addresses):
            kernel[(grid,)](arguments[0], last[0], *arguments[2:], **constexprs, **options)

        return launch

    return {"_empty_cuda": allocate, "_repeat": repeat}


def steps(bench: Bench) -> Rows:
    """Our call with one of its shortcuts taken away at a time, until it returns."""
    module, (shape, dtype_name) = bench.module, bench.scope.layers[0]

    def plain_empty(size, stride, dtype):
        return torch.empty(size, dtype=dtype, device=bench.device)

    changes = {
        "as chosen": {},
        "torch.empty": {"_empty_cuda": plain_empty},
        "no direct launch: Triton's wrapper of the compiled launcher": {"IN_C": False},
        "public launch: kernel[grid](...)": _public_launch(module),
        "no plan: every call is checked and launched as the first": {"_plans": _NoPlans()},
    }
    kinds = {name: _NoPlans() if "_plans" in change else {} for name, change in changes.items()}

    def around(name):  # no launch that another step planned
        return mock.patch.multiple(module, _kinds=kinds[name], **changes[name])

    calls = {}
    for name in changes:  # each with a layer of its own
        layer = _layer(bench, shape, dtype_name)
        calls[name] = functools.partial(module.your_dequantize_nf4, layer)
        with around(name):
            calls[name]()
            if wrong := wrong_bits(calls[name], protocol.expected(layer)):
                raise AssertionError(f"{name}: {wrong}")
    return _rows(bench, calls, bench.rounds(40, 10), around=around)


def _count(call: Callable) -> dict[str, int]:
    """What one call executes: bytecodes and calls of Python functions, at any depth, and calls into C."""
    seen = collections.Counter()

    def trace(frame, event, argument):
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        seen[event] += 1
        return trace

    def profile(frame, event, argument):
        seen["into C"] += event == "c_call" and argument not in (sys.settrace, sys.setprofile)

    before = sys.gettrace(), sys.getprofile()
    call()
    for _ in range(2):  # Python 3.12 counts bytecodes only once it was told to for some frame
        seen.clear()
        try:
            sys.setprofile(profile)
            sys.settrace(trace)
            call()
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
    return {"bytecodes": seen["opcode"], "python_calls": seen["call"], "c_calls": seen["into C"]}


def call_cost(bench: Bench) -> dict[str, dict[str, int]]:
    """What a call costs free of noise, of every contender and of the least there can be."""
    shape, dtype = bench.scope.layers[0]
    expected, calls, _ = _calls(bench, shape, dtype)
    dtype, device = expected.dtype, expected.device
    launch = _launches(torch.zeros(4, dtype=torch.int32, device=device)).get(LAUNCHES[-1])
    if launch:

        def bare():
            out = torch.empty(shape, dtype=dtype, device=device)
            launch()
            return out

        calls[BARE] = bare
    with clocks.collector_off():
        return {name: _count(call) for name, call in calls.items()}
