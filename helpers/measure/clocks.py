"""Clocks: interleaved host timing, GPU timing by graph replay, and the statistics every row carries.

Candidates are always interleaved (outer loop rounds, inner loop candidates), so that drifting clocks and
temperatures hit all of them alike.
"""

import contextlib
import ctypes
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch


def percentiles(values: list[float]) -> dict[str, float]:
    """p20, p50 and p80 of `values` (linear interpolation between neighbours); ValueError when empty."""
    if not values:
        raise ValueError("percentiles of nothing: at least one value is needed")
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": deciles[1], "p50": deciles[4], "p80": deciles[7]}


def median_interval(values: list[float]) -> tuple[float, float]:
    """A 95% confidence interval of the median of `values`, whatever their distribution.

    Its ends are two of the values: how many lie below the true median is binomial (here its normal
    approximation). For fewer than 6 values it spans all of them, with less confidence.
    """
    ordered, count = sorted(values), len(values)
    low = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[low], ordered[count - 1 - low]


def paired_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median over rounds of numerator / denominator: both were timed in the same round, so drift cancels."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """numerator / denominator: the paired median where both have the same rounds, else a ratio of medians."""
    if len(numerator) == len(denominator):
        return paired_ratio(numerator, denominator)
    return statistics.median(numerator) / statistics.median(denominator)


def row(seconds: list[float], nbytes: int | None = None, **extra) -> dict:
    """One result row: p20/p50/p80 in microseconds and rounds; with `nbytes` bytes and GB/s at the median."""
    result = {key: value * 1e6 for key, value in percentiles(seconds).items()} | {"rounds": len(seconds)}
    if nbytes is not None:
        result |= {"bytes": nbytes, "gb_s": nbytes / result["p50"] / 1e3}
    return result | extra


def _device_synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _collector_off():
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def time_interleaved(
    fns: dict[str, Callable],
    rounds: int = 30,
    inner: int = 100,
    synchronize: bool = False,
    *,
    drain: Callable | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Host seconds per call of each function, one value a round.

    synchronize=False times `inner` calls until they return; the device is drained between batches, off the
    clock. synchronize=True waits for the device after every single call, on the clock. Which candidate goes
    first changes every round. One untimed call precedes each batch. `inner` must stay below the launch
    queue's depth (about 1000 kernels), or the calls would wait for the GPU. `drain`, `clock`: for tests.
    """
    drain = drain or _device_synchronize
    times: dict[str, list[float]] = {name: [] for name in fns}
    order = list(fns)
    calls = range(inner)
    with _collector_off():
        for _ in range(rounds):
            for name in order:
                fn = fns[name]
                fn()
                drain()
                start = clock()
                if synchronize:
                    for _ in calls:
                        fn()
                        drain()
                else:
                    for _ in calls:
                        fn()
                times[name].append((clock() - start) / inner)
                drain()
            order.append(order.pop(0))
    return times


@functools.cache
def _capture_stream():
    return torch.cuda.Stream()


def capture(
    call: Callable[[int], object], count: int, warm: int = 1, pool=None, keep: bool = False, graph=None
) -> tuple:
    """(CUDA graph of call(0), ..., call(count - 1), what the last call returned). Errors are passed on.

    The first `warm` calls run before the capture on the same stream: kernels are compiled, launches planned,
    workspaces allocated. keep=True holds what the calls return until the capture ends, so that each gets
    memory of its own. pool: that of another graph, whose memory may be overwritten. graph: what to capture
    into, a new one by default. By hand because `torch.cuda.graph` empties the allocator's cache each time.
    """
    torch.cuda.synchronize()
    graph, held = graph or torch.cuda.CUDAGraph(), []
    with _collector_off(), torch.cuda.stream(_capture_stream()):
        for index in range(warm):
            call(index)
        torch.cuda.synchronize()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for index in range(count):
                last = call(index)
                if keep:
                    held.append(last)
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    return graph, last


def graph_nodes(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call starts on the GPU, counted as nodes of its CUDA graph.

    Unlike a profiler this leaves nothing behind that slows later launches. Raises where torch is too old to
    give the graph away, or where the call cannot be captured.
    """
    graph, _ = capture(lambda _: call(), 1, graph=torch.cuda.CUDAGraph(keep_graph=True))
    nodes = ctypes.c_size_t()
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes))
    if status:
        raise RuntimeError(f"cuGraphGetNodes failed with CUDA error {status}")
    return nodes.value


def replay_interleaved(graphs: dict[str, tuple], rounds: int) -> dict[str, list[float]]:
    """GPU seconds per call of each captured graph ({name: (graph, calls in it)}), one value a round.

    Each timed replay follows an untimed one of the same graph: the queue is never empty when the clock
    starts, so the host's launch time is not counted, and the caches are as the candidate leaves them.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(rounds):
        for name in order:
            graph, count = graphs[name]
            graph.replay()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e-3 / count)
        order.append(order.pop(0))
    return times


def device_events(call: Callable[[int], object], count: int = 1) -> list[tuple[str, float]]:
    """(name, seconds) of everything the profiler saw on the GPU during call(0), ..., call(count - 1)."""
    call(0)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for index in range(count):
            call(index)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.elapsed_us() * 1e-6) for event in on_device]
