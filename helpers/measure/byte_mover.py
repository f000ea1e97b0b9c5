"""The official protocol's timed rounds for a kernel that only moves the bytes, on our own launch path.

The ceilings' kernel takes the arguments of ours, in its place: checks, plan, allocation and launch are the
same code, and so is the tile. What ours loses against it is what decoding costs.
"""

import copy
import functools
import gc
import time
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
    totals = {name: [0.0] * repeats for name in kernels}
    for config in bench.progress(bench.scope.configs, "byte mover"):
        mlp, X = protocol.build(config)
        layers = {"kernel": mlp, BYTE_MOVER: copy.deepcopy(mlp)}  # a copied state starts without a plan
        for turn, name in enumerate(clocks.turns(kernels, repeats)):
            one_round = functools.partial(
                protocol.mlp_dequantize, X, layers[name], bench.module.your_dequantize_nf4
            )
            with mock.patch.object(bench.module, KERNEL, kernels[name]), clocks.collector_off():
                one_round()
                start = time.perf_counter()
                for _ in range(rounds):
                    one_round()
                totals[name][turn // len(kernels)] += time.perf_counter() - start
        del mlp, layers, X, one_round
        gc.collect()
        torch.cuda.empty_cache()
    return ByteMover(rounds=rounds, seconds=totals)
