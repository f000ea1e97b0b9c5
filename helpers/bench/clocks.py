"""The host's clock, and the loop in which contenders take turns.

Each round runs every contender once, so drifting clocks and temperatures hit all of them alike. Neither
`do_bench` nor torch.utils.benchmark interleaves. On a CPU everything runs, but the times mean nothing.

Two more such loops run without this file: the notebook's (helpers/puzzle/turns.py) and the installed
package's (nf4_triton/doctor.py).
"""

import timeit
from collections.abc import Callable, Hashable

from helpers.puzzle.protocol import synchronize

ROUNDS = 20  # of host times
INNER = 100  # calls in each; far below 1,000, the depth of the launch queue, where calls wait for the GPU
GPU_ROUNDS = 3  # of GPU times: each takes about 0.4 s, and is the mean of ten replays of a new graph


def in_turns(timers: dict[Hashable, Callable[[], float]], rounds: int) -> dict:
    """Return {name: what its timer returned in each round}. Each round starts with the next contender."""
    found = {name: [] for name in timers}
    order = list(timers)
    for _ in range(rounds):
        for name in order:
            found[name].append(timers[name]())
        order = order[1:] + order[:1]
    return found


def host_us(call: Callable) -> float:
    """Return the microseconds until a call returns: the mean of INNER calls, after an untimed one."""

    def once():
        call()
        synchronize()

    return 1e6 * timeit.timeit(call, once, number=INNER) / INNER
