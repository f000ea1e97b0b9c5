"""Clocks: interleaved host timing and GPU timing by graph replay.

Candidates always take turns (outer loop rounds, inner loop candidates), so that drifting clocks and
temperatures hit all of them alike.
"""

import contextlib
import ctypes
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from helpers.puzzle.protocol import synchronize


def median_interval(values: list[float]) -> tuple[float, float]:
    """A 95% confidence interval of the median of `values`, whatever their distribution.

    Its ends are two of the values: how many lie below the true median is binomial (here its normal
    approximation). For fewer than 6 values it spans all of them, with less confidence.
    """
    ordered, count = sorted(values), len(values)
    low = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[low], ordered[count - 1 - low]


@contextlib.contextmanager
def collector_off():
    """Inside the block Python's garbage collector does not run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Every name once in every round; who goes first changes every round."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.append(order.pop(0))


def time_interleaved(
    calls: dict[str, Callable],
    rounds: int,
    inner: int,
    wait: bool = False,
    around: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
) -> dict[str, list[float]]:
    """Host seconds per call of each function, one value a round.

    wait=False times `inner` calls until they return; the device is drained between batches, off the clock.
    wait=True waits for the device after every single call, on the clock. One untimed call precedes each
    batch, both inside `around(name)`. `inner` must stay below the launch queue's depth (about 1000 kernels),
    or the calls would wait for the GPU.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    drain, clock = synchronize, time.perf_counter
    with collector_off():
        for name in turns(calls, rounds):
            call = calls[name]
            with around(name):
                call()
                drain()
                start = clock()
                if wait:
                    for _ in range(inner):
                        call()
                        drain()
                else:
                    for _ in range(inner):
                        call()
                times[name].append((clock() - start) / inner)
                drain()
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
    with collector_off(), torch.cuda.stream(_capture_stream()):
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
    driver = ctypes.CDLL("libcuda.so.1")
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
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for name in turns(graphs, rounds):
        graph, count = graphs[name]
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times[name].append(start.elapsed_time(stop) * 1e-3 / count)
    return times


def allocations(call: Callable) -> int:
    """How often one call asks torch's allocator for memory on the GPU."""
    call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


def free_bytes() -> int:
    """Of GPU memory, after torch has given back what it does not use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
