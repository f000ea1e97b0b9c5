"""The memory-bound reference: a kernel that moves the bytes of a dequantization and computes nothing.

It loads every packed weight and every scale of a layer once and writes 16 bits an element, as the NF4 kernel
does. No kernel can be faster for long, so its time is the limit that GPU times are compared with.
"""

import torch
import triton
import triton.language as tl

# words: of a thread. All are timed, and the fastest at a size is the reference. Within 1% of the best of
# 16 variants in CUDA C from 4M elements on (H200); plain stores were never faster than streaming ones.
VARIANTS = tuple(dict(words=words, num_warps=warps) for words in (2, 4, 8) for warps in (4, 8))


@triton.jit
def _copy_kernel(
    weight_ptr,  # int32: 8 codes a word
    absmax_ptr,  # uint8, one for 8 words
    absmax2_ptr,  # int32: the bits of an fp32, one for 256 absmax
    out_ptr,  # int32, 4 for each word of the weight
    n_words,
    WORDS: tl.constexpr,  # words a thread
    THREADS: tl.constexpr,
):
    """Write every word four times, XORed with scales of its tile, so that the compiler keeps all loads."""
    tile: tl.constexpr = THREADS * WORDS
    thread = tl.arange(0, THREADS)
    first = tl.program_id(0).to(tl.int64) * tile
    left = n_words - first
    block = thread & (tile // 8 - 1)
    exists = block * 8 < left
    block += first // 8
    mix = tl.load(absmax_ptr + block, mask=exists, other=0).to(tl.int32)
    mix ^= tl.load(absmax2_ptr + (block >> 8), mask=exists, other=0)
    words = ()
    for row in tl.static_range(WORDS):
        index = row * THREADS + tl.max_contiguous(thread, 1)  # one word's results stay with their thread
        words = words + (tl.load(weight_ptr + first + index, mask=index < left),)
    for row in tl.static_range(WORDS):
        index = row * THREADS + tl.max_contiguous(thread, 1)
        value = words[row] ^ mix
        quad = tl.reshape(tl.join(tl.join(value, value), tl.join(value, value)), (THREADS, 4))
        target = (first + index)[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(out_ptr + target, quad, mask=(index < left)[:, None], cache_modifier=".cs")


def copy(layer, words, num_warps, out=None) -> torch.Tensor:
    """Move the bytes of a nested layer of n weights (blocks of 64 and 256) into `out`, and return it.

    words, num_warps: see VARIANTS. out: int32 (n / 2), overwritten with no weight; new by default.
    """
    weight, state = layer.weight.data.view(-1).view(torch.int32), layer.weight.quant_state
    out = weight.new_empty(4 * weight.numel()) if out is None else out
    absmax2, threads = state.state2.absmax.view(torch.int32), 32 * num_warps
    _copy_kernel[(triton.cdiv(weight.numel(), words * threads),)](
        weight, state.absmax, absmax2, out, weight.numel(), words, threads, num_warps=num_warps
    )
    return out


def written(layer, words, num_warps) -> torch.Tensor:
    """Return what `copy` must write, in plain torch: int32 (n / 2). It depends on every byte of the layer."""
    state, threads = layer.weight.quant_state, 32 * num_warps
    packed = layer.weight.data.view(-1).view(torch.int32)
    word, scales = torch.arange(packed.numel(), device=packed.device), words * threads // 8
    block = word // (words * threads) * scales + (word % threads & (scales - 1))
    exists = block * 8 < packed.numel()
    block = torch.where(exists, block, 0)
    mix = state.absmax[block].int() ^ state.state2.absmax.view(torch.int32)[block // 256]
    return (packed ^ torch.where(exists, mix, 0)).repeat_interleave(4)
