"""The official protocol's timed rounds for a kernel that only moves the bytes, on our own launch path.

The ceilings' kernel takes the arguments of ours, in its place: checks, plan, allocation and launch are the
same code, and so is the tile. What ours loses against it is what decoding costs.
"""

import copy
import functools
import gc
from unittest import mock

import torch

from helpers.measure import clocks
from helpers.measure.ceilings import moving_kernel
from helpers.measure.contenders import Bench
from helpers.record.names import BYTE_MOVER
from helpers.record.results import ByteMover
from helpers.submission import protocol

KERNEL = "_your_dequantize_nf4_kernel"


def byte_mover(bench: Bench) -> ByteMover:
    """Seconds of ours and of the byte-mover for the protocol's rounds; in turns, on layers of their own."""
    rounds, repeats = bench.rounds(1000, 1000), bench.rounds(5, 3)
    kernels = {"kernel": getattr(bench.module, KERNEL), BYTE_MOVER: moving_kernel}
    seconds = {name: [0.0] * repeats for name in kernels}

    def in_place(name):
        return mock.patch.object(bench.module, KERNEL, kernels[name])

    for config in bench.progress(bench.scope.configs, "byte mover"):
        mlp, X = protocol.build(config)
        calls = {
            name: functools.partial(protocol.mlp_dequantize, X, layers, bench.module.your_dequantize_nf4)
            for name, layers in zip(kernels, (mlp, copy.deepcopy(mlp)), strict=True)  # a copy has no plan
        }
        for name, times in clocks.time_interleaved(calls, repeats, rounds, around=in_place).items():
            seconds[name] = [a + rounds * b for a, b in zip(seconds[name], times, strict=True)]
        del mlp, calls, X
        gc.collect()
        torch.cuda.empty_cache()
    return ByteMover(rounds=rounds, seconds=seconds)
