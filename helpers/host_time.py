"""Time of a call on the host, and what it consists of."""

import contextlib
from collections.abc import Callable

import torch

from helpers import floor, timing
from helpers.contest import DTYPES, Bench, wrong_bits
from helpers.layers import quantized_layer
from helpers.timing import time_interleaved

CASES = (((1024, 4096), "bfloat16"), ((2048, 8192), "float16"), ((4096, 14336), "bfloat16"))
YARDSTICK = "empty_strided + fill_"


def _allocations(call: Callable) -> int:
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def _kernels(call: Callable) -> int | None:
    """GPU kernels, copies and fills of one call; None where the profiler sees nothing."""
    with contextlib.suppress(Exception):
        return len(timing.device_events(lambda _: call())) or None
    return None


def _launch_unit(out) -> dict[str, Callable]:
    """Ways to launch one tiny kernel: Triton's compiled launcher, its public path, and an ATen operation."""
    kernel = floor.trivial_kernel
    compiled = kernel[(1,)](out)
    units = {"triton kernel[grid]": lambda: kernel[(1,)](out), "aten fill_": lambda: out.fill_(0)}
    stream = torch.cuda.current_stream().cuda_stream
    with contextlib.suppress(Exception):
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        address = out.data_ptr()

        def direct():
            run(1, 1, 1, stream, function, metadata, None, None, None, address)

        direct()
        units["triton compiled launcher"] = direct
    return units


def _unit_costs(bench: Bench, shape, dtype) -> dict:
    """Microseconds of single steps that calls are made of."""
    device = torch.device("cuda", torch.cuda.current_device())
    strides = (shape[1], 1)
    launches = _launch_unit(torch.zeros(4, dtype=torch.int32, device=device))
    fns = {
        "python call": lambda: None,
        "empty_strided": lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device),
        "empty": lambda: torch.empty(shape, dtype=dtype, device=device),
        "current_stream": lambda: torch.cuda.current_stream(device),
        "current_device": torch.cuda.current_device,
        "synchronize": torch.cuda.synchronize,
    } | launches
    with contextlib.suppress(AttributeError):
        raw, index = torch._C._cuda_getCurrentRawStream, device.index
        fns["raw stream"] = lambda: raw(index)
    rounds = bench.rounds(40, 10)
    units = {name: timing.row(found) for name, found in time_interleaved(fns, rounds, 100).items()}
    waited = time_interleaved(launches, rounds, 100, synchronize=True)
    return units | {f"{name} + synchronize": timing.row(found) for name, found in waited.items()}


def _parts(call: Callable, units: dict, allocate: str, returned: float, synchronized: float) -> dict:
    """Where one call's microseconds go: allocations and launches, each at its cheapest measured cost."""
    allocations, kernels = _allocations(call), _kernels(call)
    launch = min(
        row["p50"] for name, row in units.items() if name.startswith(("triton", "aten")) and "+" not in name
    )
    parts = {
        "allocations": allocations,
        "kernels": kernels,
        "allocate_us": allocations * units[allocate]["p50"],
        "launch_us": None if kernels is None else kernels * launch,
        "wait_us": synchronized - returned,
        "returned_us": returned,
    }
    if kernels is not None:
        parts["rest_us"] = returned - parts["allocate_us"] - parts["launch_us"]
    return parts


def host(bench: Bench) -> dict:
    """Time until a call returns and until it is done, and what the call consists of."""
    cases, inner, units, parts = [], 100, {}, {}
    rounds = bench.rounds(60, 10)
    with bench.bar(len(CASES), "host") as bar:
        for shape, dtype_name in CASES:
            dtype = DTYPES[dtype_name]
            layer = quantized_layer(shape[1], shape[0], dtype, device="cuda")
            expected = bench.found["bitsandbytes"].fn(layer)
            device = expected.device
            fns, failures = {}, {}
            for name, candidate in bench.candidates().items():
                call = _bind(candidate, layer)
                wrong = wrong_bits(call, expected)
                if wrong:
                    failures[name] = wrong
                else:
                    fns[name] = call
            fns[YARDSTICK] = _yardstick(shape, dtype, device)
            nbytes = floor.bytes_moved(expected.numel())
            case = {
                "shape": list(shape),
                "dtype": dtype_name,
                "bytes": nbytes,
                "calls_a_round": inner,
                "failures": failures,
            }
            for what, synchronize in (("returned", False), ("synchronized", True)):
                times = time_interleaved(fns, rounds, inner, synchronize)
                case[what] = {
                    name: timing.row(found, nbytes, ratio=timing.ratio(found, times[YARDSTICK]))
                    for name, found in times.items()
                }
            if not units:
                units = _unit_costs(bench, shape, dtype)
                for name, call in fns.items():
                    allocate = "empty_strided" if name in ("kernel", YARDSTICK) else "empty"
                    medians = [case[what][name]["p50"] for what in ("returned", "synchronized")]
                    parts[name] = _parts(call, units, allocate, *medians)
            cases.append(case)
            bar.update()
    return {"cases": cases, "units": units, "parts": parts, "parts_of": cases[0]["shape"]}


def _bind(candidate: Callable, layer) -> Callable:
    return lambda: candidate(layer)


def _yardstick(shape, dtype, device) -> Callable:
    strides = (shape[1], 1)
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(0)
