"""The official protocol's timed rounds for a kernel that only moves the bytes, on our own launch path.

The ceilings' kernel takes the arguments of ours, in its place: checks, plan, allocation and launch are the
same code, and so is the tile. What ours loses against it is what decoding costs.
"""

import copy
import gc
import time
from unittest import mock

import torch

from helpers.measure import clocks
from helpers.measure.ceilings import moving_kernel
from helpers.measure.contenders import Bench
from helpers.record.names import BYTE_MOVER, dtype_name
from helpers.record.results import ByteMover
from helpers.submission import protocol

KERNEL = "_your_dequantize_nf4_kernel"


def _seconds(dequantize, X, mlp, rounds: int) -> float:
    """The protocol's rounds and nothing else, after one untimed."""
    protocol.mlp_dequantize(X, mlp, dequantize)
    start = time.perf_counter()
    for _ in range(rounds):
        protocol.mlp_dequantize(X, mlp, dequantize)
    return time.perf_counter() - start


def label(config: protocol.Config) -> str:
    return f"{config.hidden}x{config.intermediate} {dtype_name(config.dtype)}"


def byte_mover(bench: Bench) -> ByteMover:
    """Seconds of ours and of the byte-mover, who take turns on layers of their own."""
    configs, rounds, repeats = bench.scope.configs, bench.rounds(1000, 1000), bench.rounds(5, 3)
    dequantize, parts = bench.module.your_dequantize_nf4, {"kernel": [], BYTE_MOVER: []}
    with bench.bar(len(configs) * repeats, "byte mover") as bar:
        for config in configs:
            mlp, X = protocol.build(config)
            others = copy.deepcopy(mlp)  # a copied state starts without a plan
            seconds = {name: [] for name in parts}
            for repeat in range(repeats):
                for name in list(parts) if repeat % 2 else list(parts)[::-1]:
                    ours = name == "kernel"
                    kernel = getattr(bench.module, KERNEL) if ours else moving_kernel
                    with mock.patch.object(bench.module, KERNEL, kernel), clocks.collector_off():
                        seconds[name].append(_seconds(dequantize, X, mlp if ours else others, rounds))
                bar.update()
            for name in parts:
                parts[name].append(seconds[name])
            del mlp, others, X
            gc.collect()
            torch.cuda.empty_cache()
    totals = {name: [sum(each) for each in zip(*of, strict=True)] for name, of in parts.items()}
    return ByteMover(rounds=rounds, configs=[label(config) for config in configs], seconds=totals)
