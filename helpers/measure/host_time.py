"""Time of a call on the host, and what it consists of."""

import contextlib
import functools
from collections.abc import Callable

import torch

from helpers.measure import ceilings, clocks
from helpers.measure.contenders import DTYPES, Bench, wrong_bits
from helpers.oracle.layers import quantized_layer
from helpers.measure.clocks import time_interleaved

CASES = (((1024, 4096), "bfloat16"), ((2048, 8192), "float16"), ((4096, 14336), "bfloat16"))
INNER = 100  # calls a round; far below the launch queue's depth
YARDSTICK = "empty_strided + fill_"
_LAUNCHES = ("triton kernel[grid]", "aten fill_", "triton compiled launcher")
# How each gets its output, where it is not torch.empty.
_ALLOCATES = {"kernel": "Inductor's empty_strided", YARDSTICK: "empty_strided"}


def _allocations(call: Callable) -> int:
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def _kernels(call: Callable) -> int | None:
    """GPU kernels, copies and fills of one call; None where they cannot be counted."""
    with contextlib.suppress(Exception):
        return clocks.graph_nodes(call)
    return None


def _launch_unit(out) -> dict[str, Callable]:
    """Ways to launch one tiny kernel: Triton's compiled launcher, its public path, and an ATen operation."""
    kernel = ceilings.trivial_kernel
    compiled = kernel[(1,)](out)
    public, aten, launcher = _LAUNCHES
    ways = {public: lambda: kernel[(1,)](out), aten: lambda: out.fill_(0)}
    stream = torch.cuda.current_stream().cuda_stream
    with contextlib.suppress(Exception):
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        address = out.data_ptr()

        def direct():
            run(1, 1, 1, stream, function, metadata, None, None, None, address)

        direct()
        ways[launcher] = direct
    return ways


def _unit_costs(bench: Bench, like) -> dict:
    """Microseconds of the single steps that a call is made of; `like` is a tensor such as it returns."""
    shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    launches = _launch_unit(torch.zeros(4, dtype=torch.int32, device=device))
    fns = {
        "python call": lambda: None,
        "empty_strided": lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device),
        "empty": lambda: torch.empty(shape, dtype=dtype, device=device),
        "current_stream": lambda: torch.cuda.current_stream(device),
        "current_device": torch.cuda.current_device,
        "synchronize": torch.cuda.synchronize,
    } | launches
    private = {
        "Inductor's empty_strided": (
            lambda: torch._C._dynamo.guards._empty_strided_cuda,
            shape,
            strides,
            dtype,
        ),
        "raw stream": (lambda: torch._C._cuda_getCurrentRawStream, device.index),
    }
    for name, (find, *arguments) in private.items():
        with contextlib.suppress(Exception):  # these names change between versions of torch
            call = functools.partial(find(), *arguments)
            call()
            fns[name] = call
    rounds = bench.rounds(40, 10)
    units = {name: clocks.row(found) for name, found in time_interleaved(fns, rounds, INNER).items()}
    waited = time_interleaved(launches, rounds, INNER, synchronize=True)
    return units | {f"{name} + synchronize": clocks.row(found) for name, found in waited.items()}


def _parts(name: str, call: Callable, units: dict, case: dict) -> dict:
    """Where one call's microseconds go: allocations and launches, each at its cheapest measured cost."""
    returned, synchronized = (case[what][name]["p50"] for what in ("returned", "synchronized"))
    allocations, kernels = _allocations(call), _kernels(call)
    allocate = units.get(_ALLOCATES.get(name, "empty"), units["empty_strided"])["p50"]
    launch = min(units[way]["p50"] for way in _LAUNCHES if way in units)
    parts = {
        "allocations": allocations,
        "kernels": kernels,
        "returned_us": returned,
        "wait_us": synchronized - returned,
        "allocate_us": allocations * allocate,
    }
    if kernels is not None:
        parts["launch_us"] = kernels * launch
        parts["rest_us"] = returned - parts["allocate_us"] - parts["launch_us"]
    return parts


def _yardstick(like) -> Callable:
    """Allocate and fill a tensor such as `like`: the least a call can cost that returns new memory."""
    shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(0)


def _case(bench: Bench, shape, dtype_name: str) -> tuple[dict, dict[str, Callable], torch.Tensor]:
    """(one layer's rows, what was timed, what bitsandbytes returns for the layer)."""
    layer = quantized_layer(shape[1], shape[0], DTYPES[dtype_name], device=bench.device)
    expected = bench.found["bitsandbytes"].fn(layer)
    fns, failures = {}, {}
    for name, candidate in bench.candidates().items():
        call = functools.partial(candidate, layer)
        wrong = wrong_bits(call, expected)
        if wrong:
            failures[name] = wrong
        else:
            fns[name] = call
    fns[YARDSTICK] = _yardstick(expected)
    nbytes, rounds = ceilings.bytes_moved(expected.numel()), bench.rounds(60, 10)
    case = {"shape": list(shape), "dtype": dtype_name, "bytes": nbytes, "calls_a_round": INNER}
    for what, synchronize in (("returned", False), ("synchronized", True)):
        times = time_interleaved(fns, rounds, INNER, synchronize)
        case[what] = {
            name: clocks.row(found, nbytes, ratio=clocks.ratio(found, times[YARDSTICK]))
            for name, found in times.items()
        }
    return case | {"failures": failures}, fns, expected


def host(bench: Bench) -> dict:
    """Time until a call returns and until it is done, and what the call consists of."""
    cases, units, parts = [], {}, {}
    with bench.bar(len(CASES), "host") as bar:
        for shape, dtype_name in CASES:
            case, fns, expected = _case(bench, shape, dtype_name)
            cases.append(case)
            if not parts:  # of the first layer, where the call weighs most
                units = _unit_costs(bench, expected)
                parts = {name: _parts(name, call, units, case) for name, call in fns.items()}
            bar.update()
    return {"cases": cases, "units": units, "parts": parts}
