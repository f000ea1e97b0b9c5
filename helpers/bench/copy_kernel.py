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
    n_rows,  # of 8 words
    ROWS: tl.constexpr,  # per program
    WIDE: tl.constexpr,  # 128-bit loads; else a word's results stay with the thread that loads it
):
    """Write every word four times, XORed with the scales of its row, so that the compiler keeps all loads."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < n_rows
    mix = tl.load(absmax_ptr + row, mask=exists, other=0).to(tl.int32)
    mix ^= tl.load(absmax2_ptr + (row >> 8), mask=exists, other=0)
    column = tl.arange(0, 8)
    if not WIDE:
        column = tl.max_contiguous(column, 1)
    word = row[:, None] * 8 + column[None, :]
    value = tl.load(weight_ptr + word, mask=exists[:, None], other=0) ^ mix[:, None]
    four = tl.broadcast_to(value[:, :, None], (ROWS, 8, 4))
    target = word[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    tl.store(out_ptr + target, four, mask=exists[:, None, None], cache_modifier=".cs")


def parts(layer):
    """Return a layer's words, absmax, and the bits of its absmax2."""
    state = layer.weight.quant_state
    words = layer.weight.data.view(-1).view(torch.int32)
    return words, state.absmax, state.state2.absmax.view(torch.int32)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A variant of the memory-bound reference, for nested layers in blocks of 64 and 256, of whole rows."""

    rows: int  # per program
    num_warps: int
    wide: bool

    def __call__(self, layer, out=None) -> torch.Tensor:
        """Move the bytes of a layer of n weights into `out`, and return it: int32 (n / 2), no weights."""
        words, absmax, absmax2 = parts(layer)
        n = words.numel() // 8
        if out is None:
            out = words.new_empty(4 * words.numel())
        launch = _copy_kernel[(triton.cdiv(n, self.rows),)]
        launch(words, absmax, absmax2, out, n, self.rows, self.wide, num_warps=self.num_warps)
        return out

    def expected(self, layer) -> torch.Tensor:
        """Return what a call must write, in plain torch. It depends on every byte of the layer."""
        words, absmax, absmax2 = parts(layer)
        mix = absmax.int() ^ absmax2.repeat_interleave(256)[: absmax.numel()]
        return (words ^ mix.repeat_interleave(8)).repeat_interleave(4)


# All are timed, and the fastest at a size is the reference.
TILES = ((32, 1), (32, 2), (64, 4))
VARIANTS = [Copy(rows, num_warps, wide) for rows, num_warps in TILES for wide in (False, True)]
