"""Clocks: contenders take turns under one clock, on the host or on the GPU.

Outer loop rounds, inner loop contenders: drifting clocks and temperatures hit all of them alike. Neither
`do_bench` nor torch.utils.benchmark interleaves. On a CPU every function runs, but its times mean nothing.
"""

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from helpers.puzzle.layers import ON_GPU

ROUNDS = 20
INNER = 100  # calls a round of host times; far below the launch queue's depth


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


@contextlib.contextmanager
def collector_off():
    """Keep Python's garbage collector from running inside the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield every name once in every round; another one goes first each round."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order = order[1:] + order[:1]


def host_seconds(calls: dict[str, Callable], rounds: int, inner: int, wait: bool = False) -> dict[str, list]:
    """Return host seconds per call of each function, one value a round.

    wait=False: time `inner` calls until they return; the GPU is drained between batches, off the clock.
    wait=True: wait for the GPU after every call, on the clock. One untimed call precedes each batch. `inner`
    must stay below the depth of the launch queue (about 1,000 kernels), or the calls would wait for the GPU.
    """
    times = {name: [] for name in calls}
    with collector_off():
        for name in turns(calls, rounds):
            call = calls[name]
            call()
            synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                call()
                if wait:
                    synchronize()
            times[name].append((time.perf_counter() - start) / inner)
            synchronize()
    return times


@functools.cache
def _capture_stream():
    return torch.cuda.Stream()


def capture(calls: list[Callable], pool=None) -> tuple:
    """Return (CUDA graph of the calls, what the last one returned).

    The calls run before the capture on the same stream, to compile kernels. Each gets memory of its own for
    its result; that of another graph's `pool` may be overwritten. Passes on a call's errors. By hand:
    `torch.cuda.graph` empties the allocator's cache, and after an error it stays on its stream.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with collector_off(), torch.cuda.stream(_capture_stream()):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            results = [call() for call in calls]
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    return graph, results[-1]


def gpu_seconds(graphs: dict, rounds: int) -> dict[str, list[float]]:
    """Return GPU seconds of each captured graph ({name: graph}), one value a round.

    Each timed replay follows an untimed one of the same graph: the queue is never empty when the clock
    starts, so launch overhead is not counted, and the caches are as that contender leaves them.
    """
    if not ON_GPU:
        return {name: [math.nan] * rounds for name in graphs}
    times = {name: [] for name in graphs}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for name in turns(graphs, rounds):
        graphs[name].replay()
        start.record()
        graphs[name].replay()
        stop.record()
        stop.synchronize()
        times[name].append(start.elapsed_time(stop) * 1e-3)
    return times
