"""Exact 4-bit dequantization in plain PyTorch: the oracle of all tests and the fallback without Triton.

It begins with the format, one step a line. `# %%`: notebook cells.
"""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import math

import torch


# %% id="format"
def dequantize_in_pytorch(layer):
    """Return the weight of a double-quantized NF4 layer, one step of the format a line."""
    state = layer.weight.quant_state
    code2, absmax2 = state.state2.code, state.state2.absmax
    byte = layer.weight.data.view(-1)  # two 4-bit codes each, the high nibble first
    code = torch.stack((byte >> 4, byte & 15), dim=1).view(-1, 64)  # 64 codes share a scale
    scale = code2[state.absmax.int()]  # scales are quantized, too: absmax is an index into 256 values
    scale = scale * absmax2.repeat_interleave(256)[: len(scale)]  # 256 scales share an absmax2
    scale = scale + state.offset
    weight = state.code[code.int()] * scale[:, None]  # state.code: the 16 values of NF4
    return weight.to(state.dtype).view(state.shape)


# %% tags=["module-only"]
# bitsandbytes looks codes up in these tables, not in quant_state.code.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_VALUES: tuple[float, ...] = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
FP4_VALUES += tuple(-x for x in FP4_VALUES)  # code 8 is -0.0, as in bitsandbytes' CUDA kernels


def dequantize(packed, flush_subnormal=None, selection=None):
    """Return the dequantized weight, or a Selection of its slices, bit-identical to bitsandbytes.

        scale[k] = fp32(code2[absmax[k]] * absmax2[k // blocksize2]) + offset    nested: rounded twice, no FMA
        out[i]   = dtype(fp32(table[code[i]] * scale[i // blocksize]))           flat: scale is absmax

    packed: a Packed of nf4 or fp4, nested or flat. If weight.shape[0] is 1, the result is transposed.
    flush_subnormal: treat subnormal fp32 numbers as zeros. Default: only on a GPU, as bitsandbytes does.
    """
    weight = packed.weight
    if flush_subnormal is None:
        flush_subnormal = weight.is_cuda
    multiply = multiply_flushing if flush_subnormal else torch.mul
    n = math.prod(packed.shape)

    blocks = -(-n // packed.blocksize)
    scale = packed.absmax.reshape(-1)[:blocks]
    if packed.nested:
        scale = packed.code2[scale.int()]
        scale = by_block(multiply, scale, packed.absmax2, packed.blocksize2)
        scale += packed.offset

    values = FP4_VALUES if packed.quant_type == "fp4" else NF4_VALUES
    table = torch.tensor(values, dtype=torch.float32, device=weight.device)
    data = weight.detach().contiguous().view(-1)
    data = data.view(torch.uint8).int()
    high, low = data >> 4, data & 15
    codes = torch.stack([high, low], dim=1)
    codes = codes.view(-1)[:n]
    out = by_block(multiply, table[codes], scale.float(), packed.blocksize)
    out = out.to(packed.dtype).view(tuple(packed.shape))
    if selection is not None:
        return select(out, selection)
    return out.t() if weight.shape[0] == 1 else out


def select(weight, selection):
    """Return copies of the slices that a Selection names, NaN for an id out of range; never transposed."""
    if selection.ids is None:
        return weight[selection.first : selection.first + selection.number].clone()
    ids = selection.ids.long()
    exists = (ids >= 0) & (ids < len(weight))
    found = weight[torch.where(exists, ids, 0)]
    return found.masked_fill(~exists.view(-1, *[1] * (weight.dim() - 1)), math.nan)


def by_block(multiply, values, scale, blocksize):
    """Return values[i] * scale[i // blocksize] for each i, without a scale per element in memory."""
    n = values.numel()
    blocksize = max(1, min(blocksize, n))
    blocks = -(-n // blocksize)
    padded = torch.nn.functional.pad(values, (0, blocks * blocksize - n))
    padded = padded.view(blocks, blocksize)
    scale = scale[:blocks].view(blocks, 1)
    return multiply(padded, scale).view(-1)[:n]


def multiply_flushing(a, b):
    """Return a * b for |a| <= 1 as the GPU's `mul.rn.ftz.f32` does: subnormal factors and products become
    zeros of their sign. The GPU looks after rounding to 24 bits, which fp32 keeps 2**64 times as large."""
    smallest = torch.finfo(torch.float32).tiny  # normal number: 2**-126

    def flush(x, subnormal):
        zero = torch.copysign(torch.zeros_like(x), x)
        return torch.where(subnormal, zero, x)

    a = flush(a, a.abs() < smallest)
    b = flush(b, b.abs() < smallest)
    enlarged = (a * 2.0**64 * b).abs()
    return flush(a * b, enlarged < smallest * 2.0**64)


def different(x, y):
    """Count the elements whose bits differ; NaN equals NaN. Raises ValueError if shape or dtype differ."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"cannot compare {x.dtype} {tuple(x.shape)} with {y.dtype} {tuple(y.shape)}")
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    x_bits = x.contiguous().view(bits)
    y_bits = y.contiguous().view(bits)
    both_nan = x.isnan() & y.isnan()
    differ = (x_bits != y_bits) & ~both_nan
    return int(differ.sum())


def same_bits(x, y):
    """Return whether dtype, shape, and every bit agree; NaN equals NaN."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return different(x, y) == 0
