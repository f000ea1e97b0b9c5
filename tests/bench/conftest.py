"""A small benchmark without a GPU: the kernel in Triton's interpreter, and a stand-in for the GPU's clocks.

Times of the stand-in mean nothing and are not looked at; what is timed, gated, named and counted is.
"""

import dataclasses

import pytest
import torch

from helpers import machine
from helpers.bench.contenders import QUICK, Bench
from helpers.puzzle import protocol


class Recording:
    """Instead of a CUDA graph: calls again what was captured."""

    def __init__(self, call, count, out):
        self.call, self.count, self.out = call, count, out

    def replay(self):
        for index in range(self.count):
            last = self.call(index)
        if isinstance(self.out, torch.Tensor):
            self.out.copy_(last)

    def pool(self):
        return None


class StandIn:
    """The GPU's part of helpers.bench.clocks."""

    def __init__(self):
        self.free = 10**12

    def capture(self, call, count, warm=1, pool=None, keep=False):
        for index in range(count):
            out = call(index)
        return Recording(call, count, out), out

    def replay_interleaved(self, graphs, rounds):
        """A microsecond a call for the first candidate, two for the second, ..."""
        return {name: [(place + 1) * 1e-6] * rounds for place, name in enumerate(graphs)}

    def graph_nodes(self, call):
        return 3

    def allocations(self, call):
        return 1

    def free_bytes(self):
        return self.free


CONFIGS = (protocol.Config(1, 3, 64, 128, 3407, torch.float16),)
TINY = dataclasses.replace(
    QUICK,
    sizes=(1024, 2048),
    ablation=(1024,),
    layers=(((64, 64), "bfloat16"), ((64, 128), "float16")),
    configs=CONFIGS,
    gemm=CONFIGS,
    tokens=(8,),
    weights=2,
    shape=(64, 64),
    backend="aot_eager",
    inner=1,
    most_rounds=2,
    rotate=1,  # two layers of each size
)


@pytest.fixture
def bench(kernel):
    if machine.has_gpu():
        pytest.skip("there is a GPU: the stand-in is for the CPU")
    pytest.importorskip("bitsandbytes")
    return Bench(kernel, protocol.baselines(), True, TINY, "cpu", StandIn())
