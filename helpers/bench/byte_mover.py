"""The official protocol's timed rounds for a kernel that only moves the bytes, on our own launch path.

It takes the arguments of our kernel, in its place: checks, plan, allocation and launch are the same code, and
so is the tile. What ours loses against it is what decoding costs.
"""

import copy
import functools
import gc
from unittest import mock

import torch
import triton
import triton.language as tl

from helpers.bench import clocks
from helpers.bench.contenders import Bench
from helpers.results.names import BYTE_MOVER
from helpers.results.store import ByteMover
from helpers.puzzle import protocol

KERNEL = "_your_dequantize_nf4_kernel"
_READ = ["weight_ptr", "absmax_ptr", "table_ptr", "code2_ptr", "absmax2_ptr", "offset_ptr"]


@triton.jit(do_not_specialize=["n_words", "n_tail"], do_not_specialize_on_alignment=_READ)
def moving_kernel(
    weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, n_words, n_tail,
    ASM: tl.constexpr, NESTED: tl.constexpr, LOG2_BLOCK: tl.constexpr, LOG2_BLOCK2: tl.constexpr,
    MODE: tl.constexpr, TAIL: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
    STAGE: tl.constexpr, LOAD_HINT: tl.constexpr, STORE_HINT: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """Writes every 32-bit word four times, mixed with scales of its tile: 16-bit outputs of whole words."""
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
