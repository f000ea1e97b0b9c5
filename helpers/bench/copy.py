"""A kernel that moves the bytes of a dequantization and does no math: the copy of the section gpu_time."""

import torch
import triton
import triton.language as tl


@triton.jit
def _move_bytes_kernel(words_ptr, absmax_ptr, out_ptr, n_words, TILE: tl.constexpr):
    """Write each word four times: a dequantization reads 8 codes in a word and writes 8 results."""
    # max_contiguous: a word's results stay with their thread, as one 128-bit store
    index = tl.program_id(0) * TILE + tl.max_contiguous(tl.arange(0, TILE), 1)
    exists = index < n_words
    word = tl.load(words_ptr + index, mask=exists, other=0)
    word ^= tl.load(absmax_ptr + (index >> 3), mask=exists, other=0)  # one absmax for 64 codes
    words = tl.reshape(tl.join(tl.join(word, word), tl.join(word, word)), (TILE, 4))
    to = index[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + to, words, mask=exists[:, None], cache_modifier=".cs")


def move_bytes(layer, tile=1024, num_warps=8):
    """Read a layer's codes and absmax, write as many bytes as its 16-bit weight has; return these.

    tile: words that a program reads.
    """
    words, absmax = layer.weight.data.view(-1).view(torch.int32), layer.weight.quant_state.absmax
    out = torch.empty(4 * len(words), dtype=torch.int32, device=words.device)
    grid = (triton.cdiv(len(words), tile),)
    _move_bytes_kernel[grid](words, absmax, out, len(words), TILE=tile, num_warps=num_warps)
    return out
