"""Clocks: contenders take turns under one clock, on the host or on the GPU.

Outer loop rounds, inner loop contenders: drifting clocks and temperatures hit all of them alike. Neither
`do_bench` nor torch.utils.benchmark interleaves. On a CPU every function here runs, so that a benchmark can
be tried without a GPU, and its times mean nothing.
"""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from helpers.nf4.reference import default_device

ON_GPU = default_device() == "cuda"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


@contextlib.contextmanager
def collector_off():
    """Keep Python's garbage collector from running inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
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
    drain, clock = synchronize, time.perf_counter
    with collector_off():
        for name in turns(calls, rounds):
            call = calls[name]
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


def first_seconds(calls: dict[str, list[Callable]]) -> dict[str, list[float]]:
    """Return host seconds until return of every function of each list, called once; the lists take turns."""
    times = {name: [] for name in calls}
    with collector_off():
        for index in range(min(map(len, calls.values()))):
            for name in calls:
                synchronize()
                start = time.perf_counter()
                calls[name][index]()
                times[name].append(time.perf_counter() - start)
    synchronize()
    return times


@dataclasses.dataclass
class _Recording:
    """Stands in for a CUDA graph where there is no GPU: replay() calls the function again."""

    call: Callable
    count: int
    out: object

    def replay(self):
        for index in range(self.count):
            last = self.call(index)
        if isinstance(self.out, torch.Tensor):
            self.out.copy_(last)

    def pool(self):
        return None


@functools.cache
def _capture_stream():
    return torch.cuda.Stream()


def capture(call: Callable[[int], object], count: int, warm: int = 1, pool=None, keep: bool = False) -> tuple:
    """Return (CUDA graph of call(0), ..., call(count - 1), what the last call returned).

    The first `warm` calls run before the capture on the same stream, to compile kernels. keep: hold what the
    calls return until the capture ends, so that each gets memory of its own. pool: that of another graph,
    whose memory may be overwritten. Passes on a call's errors. By hand: `torch.cuda.graph` empties the
    allocator's cache each time.
    """
    if not ON_GPU:
        last = [call(index) for index in range(count)][-1]
        return _Recording(call, count, last), last
    torch.cuda.synchronize()
    graph, held = torch.cuda.CUDAGraph(), []
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


def gpu_seconds(graphs: dict[str, tuple], rounds: int) -> dict[str, list[float]]:
    """Return GPU seconds per call of each captured graph ({name: (graph, calls in it)}), one value a round.

    Each timed replay follows an untimed one of the same graph: the queue is never empty when the clock
    starts, so launch overhead is not counted, and the caches are as that contender leaves them.
    """
    times = {name: [] for name in graphs}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if ON_GPU else (None, None)
    for name in turns(graphs, rounds):
        graph, count = graphs[name]
        if not ON_GPU:
            began = time.perf_counter()
            graph.replay()
            times[name].append((time.perf_counter() - began) / count)
            continue
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times[name].append(start.elapsed_time(stop) * 1e-3 / count)
    return times


def free_bytes() -> int:
    """Return the bytes of free GPU memory, after torch has given back what it does not use."""
    if not ON_GPU:
        return 1 << 33
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
