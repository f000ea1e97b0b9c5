"""The official protocol's timed rounds for a kernel that only moves the bytes, on our own launch path.

Its kernel takes the arguments of ours, in its place: checks, plan, allocation and launch are the same code,
and so is the tile. What ours loses against it is what decoding costs.
"""

import copy
import gc
import time
from unittest import mock

import torch
import triton
import triton.language as tl

from helpers.measure import clocks
from helpers.measure.contenders import Bench
from helpers.record.names import BYTE_MOVER, dtype_name
from helpers.record.results import ByteMover
from helpers.submission import protocol

KERNEL = "_your_dequantize_nf4_kernel"


@triton.jit(
    do_not_specialize=["n_words", "n_tail"],
    do_not_specialize_on_alignment=[
        "weight_ptr",
        "absmax_ptr",
        "table_ptr",
        "code2_ptr",
        "absmax2_ptr",
        "offset_ptr",
    ],
)
def moving_kernel(
    weight_ptr,
    out_ptr,
    absmax_ptr,
    table_ptr,
    code2_ptr,
    absmax2_ptr,
    offset_ptr,
    n_words,
    n_tail,
    ASM: tl.constexpr,
    NESTED: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    LOG2_BLOCK2: tl.constexpr,
    MODE: tl.constexpr,
    TAIL: tl.constexpr,
    WORDS: tl.constexpr,
    THREADS: tl.constexpr,
    STAGE: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    STORE_HINT: tl.constexpr,
    FLUSH: tl.constexpr,
):
    """Writes every 32-bit word four times, mixed with its scales by XOR: 16-bit outputs of whole words."""
    tile: tl.constexpr = THREADS * WORDS
    pid = tl.program_id(0)
    thread = tl.arange(0, THREADS)
    left = n_words - pid * tile
    first = pid.to(tl.int64) * tile
    block = thread & (tile // 8 - 1)  # every scale of the tile is read
    exists = block * 8 < left
    block = (block + pid * (tile // 8)) >> (LOG2_BLOCK - 6)
    mix = tl.load(absmax_ptr + block, mask=exists, other=0, eviction_policy=LOAD_HINT).to(tl.int32)
    mix ^= tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=exists, other=0).to(tl.int32, bitcast=True)
    words_ptr = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first
    words = ()
    for row in tl.static_range(WORDS):
        index = row * THREADS + tl.max_contiguous(thread, 1)
        words = words + (tl.load(words_ptr + index, mask=index < left, eviction_policy=LOAD_HINT),)
    to = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first * 4
    for row in tl.static_range(WORDS):
        index = row * THREADS + tl.max_contiguous(thread, 1)
        value = words[row] ^ mix
        quad = tl.reshape(tl.join(tl.join(value, value), tl.join(value, value)), (THREADS, 4))
        target = index[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(to + target, quad, mask=(index < left)[:, None], cache_modifier=STORE_HINT)


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
