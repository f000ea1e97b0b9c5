"""The memory-bound reference: a kernel that moves the bytes of a dequantization and computes nothing.

It loads every packed weight and every scale of a layer once and writes 16 bits an element, as the NF4 kernel
does. No kernel can be faster for long, so its time is the limit that GPU times are compared with.
"""

import dataclasses

import torch
import triton
import triton.language as tl


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


def parts(layer):
    """Return a layer's words, absmax, and the bits of its absmax2."""
    state = layer.weight.quant_state
    words = layer.weight.data.view(-1).view(torch.int32)
    return words, state.absmax, state.state2.absmax.view(torch.int32)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A variant of the memory-bound reference, for nested layers in blocks of 64 and 256."""

    words: int  # per thread
    num_warps: int

    def __call__(self, layer, out=None) -> torch.Tensor:
        """Move the bytes of a layer of n weights into `out`, and return it: int32 (n / 2), no weights."""
        words, absmax, absmax2 = parts(layer)
        n, threads = words.numel(), 32 * self.num_warps
        if out is None:
            out = words.new_empty(4 * n)
        grid = (triton.cdiv(n, self.words * threads),)
        _copy_kernel[grid](
            words,
            absmax,
            absmax2,
            out,
            n,
            WORDS=self.words,
            THREADS=threads,
            num_warps=self.num_warps,
        )
        return out

    def expected(self, layer) -> torch.Tensor:
        """Return what a call must write, in plain torch. It depends on every byte of the layer."""
        words, absmax, absmax2 = parts(layer)
        threads = 32 * self.num_warps
        scales = threads * self.words // 8  # of a tile
        index = torch.arange(words.numel(), device=words.device)
        tile, thread = index // (threads * self.words), index % threads
        block = tile * scales + thread % scales
        exists = block * 8 < words.numel()
        block = torch.where(exists, block, 0)
        mix = torch.where(exists, absmax[block].int() ^ absmax2[block // 256], 0)
        return (words ^ mix).repeat_interleave(4)


# All are timed, and the fastest at a size is the reference. Within 1% of the best of 16 variants in CUDA C
# from 4M elements on (H200); plain stores were never faster than streaming ones.
VARIANTS = [Copy(words, num_warps) for words in (2, 4, 8) for num_warps in (4, 8)]
