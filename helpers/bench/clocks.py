"""Clocks, and the loop in which contenders take turns under them.

Outer loop rounds, inner loop contenders: drifting clocks and temperatures hit all of them alike. Neither
`do_bench` nor torch.utils.benchmark interleaves. On a CPU everything runs, but its times mean nothing.

Two such loops are elsewhere, because their files must run without this one: that of the notebook's cells
(helpers/puzzle/protocol.py) and that of the installed package (nf4_triton/doctor.py).
"""

import timeit
from collections.abc import Callable, Hashable

import torch

from helpers.puzzle.protocol import synchronize

ROUNDS = 20
INNER = 100  # calls a round of host times; far below the launch queue's depth
REPLAYS = 10  # of a graph, in a row, a round


def in_turns(timers: dict[Hashable, Callable[[], float]], rounds: int) -> dict:
    """Return {name: what its timer returned in each round}. Another one goes first every round."""
    found = {name: [] for name in timers}
    order = list(timers)
    for _ in range(rounds):
        for name in order:
            found[name].append(timers[name]())
        order = order[1:] + order[:1]
    return found


def host_timer(call: Callable, count: int) -> Callable:
    """Return a function that times `count` calls until they return, after an untimed one, and returns the
    microseconds of one.

    `count` must stay below the depth of the launch queue (about 1,000 kernels), or calls wait for the GPU.
    """
    timer = timeit.Timer(call)  # which keeps the garbage collector off

    def us():
        call()
        synchronize()
        elapsed = timer.timeit(count)
        synchronize()
        return 1e6 * elapsed / count

    return us


def gpu_timer(graph, count: int) -> Callable:
    """Return a function that replays a captured graph of `count` calls REPLAYS times in a row and returns the
    GPU microseconds of one call.

    An untimed replay comes first: the queue is never empty when the clock starts, so launch overhead is not
    counted, and the caches are as this graph leaves them. Nothing is flushed: a flush leaves lines in the
    cache that are written back on the clock. With the notebook's layers, times are within 1.5% of its
    do_bench_cudagraph (H200), which makes a new graph for each value: 0.3 s.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def us():
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / (REPLAYS * count)

    return us


def capture(calls: list[Callable], pool=None) -> tuple:
    """Return (CUDA graph of the calls, what the last one returned).

    The calls run before the capture, to compile kernels. Each gets memory of its own for its result; that of
    another graph's `pool` may be overwritten. Passes on a call's errors.
    """
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    # The outer context leaves the capture's stream, which an error in torch.cuda.graph does not.
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            results = [call() for call in calls]
    return graph, results[-1]
