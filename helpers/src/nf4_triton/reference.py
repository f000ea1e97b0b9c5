"""Exact 4-bit dequantization in plain PyTorch: the oracle of all tests and the fallback without Triton.

It begins with the format, one step a line. `# %%`: notebook cells.
"""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import math

import torch

from .private import is_traced


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
CHUNK = 1 << 18  # elements that a CPU computes at once, in its caches: 4 times as fast as 67M at once


def dequantize(packed, flush_subnormal=None, selection=None):
    """Return the dequantized weight, or a Selection of its slices, bit-identical to bitsandbytes.

        scale[k] = fp32(code2[absmax[k]] * absmax2[k // blocksize2]) + offset    nested: rounded twice, no FMA
        out[i]   = dtype(fp32(table[code[i]] * scale[i // blocksize]))           flat: scale is absmax

    packed: a Packed of nf4 or fp4, nested or flat. If weight.shape[0] is 1, the result is transposed, but
    not with a selection, of which an id that is out of range gives a slice of NaN.
    flush_subnormal: treat subnormal fp32 numbers as zeros. Default: only on a GPU, as bitsandbytes does.
    """
    weight, shape = packed.weight, tuple(packed.shape)
    codes = weight.detach().contiguous().view(-1).view(torch.uint8)
    if selection is None:
        n = math.prod(shape)
        unit = min(packed.blocksize, n or 1)
        blocks = torch.arange(-(-n // unit), device=weight.device)
    else:
        codes, blocks, unit, missing = select(packed, codes, selection)
        shape = (selection.number, *shape[1:])

    if flush_subnormal is None:
        flush_subnormal = weight.is_cuda
    multiply = multiply_flushing if flush_subnormal else torch.mul
    scale = packed.absmax.reshape(-1)[blocks]
    if packed.nested:
        scale = packed.code2[scale.int()]
        scale = multiply(scale, packed.absmax2.reshape(-1)[blocks // packed.blocksize2])
        scale += packed.offset
    values = FP4_VALUES if packed.quant_type == "fp4" else NF4_VALUES
    table = torch.tensor(values, dtype=torch.float32, device=weight.device)
    out = codes.new_empty(shape, dtype=packed.dtype)  # batched under vmap where the codes are
    fill(out.view(-1), table, codes, scale, unit, multiply)
    if selection is not None:
        out.flatten(1).masked_fill_(missing[:, None], math.nan)
        return out
    return out.t() if weight.shape[0] == 1 else out


def select(packed, codes, selection):
    """Return the slices' codes, the block of each unit of elements, its size, and which ids do not exist."""
    ids = selection.ids
    if ids is None:
        ids = torch.arange(selection.number, device=codes.device) + selection.first
    n = math.prod(packed.shape[1:])
    unit = math.gcd(n, packed.blocksize)  # lies in one block
    known = ids.long().clamp(0, packed.shape[0] - 1)
    units = known[:, None] * (n // unit) + torch.arange(n // unit, device=ids.device)
    units = units.view(-1)
    codes = codes[: packed.shape[0] * n // 2].view(-1, unit // 2)
    return codes[units].view(-1), units * unit // packed.blocksize, unit, ids != known


def fill(out, table, codes, scale, unit, multiply):
    """Write table[code[i]] * scale[i // unit] into out[i], in chunks."""
    pairs = torch.cartesian_prod(table, table)  # the values of each byte's two codes, the high nibble first
    pairs = pairs.view(torch.int64).view(-1)  # one lookup copies both
    chunks = [(out, codes, scale)]
    if not is_traced(codes):
        chunk = max(unit, CHUNK * 64 if codes.is_cuda else CHUNK)
        parts = out.split(chunk), codes.split(-(-chunk // 2)), scale.split(chunk // unit)
        chunks = zip(*parts, strict=False)  # a weight may hold more codes than it needs
    for out, codes, scale in chunks:
        n = out.shape[0]
        values = pairs.index_select(0, codes.int()).view(torch.float32)[:n]
        out.copy_(multiply(values, scale.repeat_interleave(unit)[:n]))


def multiply_flushing(a, b):
    """Return a * b for |a| <= 1 as the GPU's `mul.rn.ftz.f32` does: subnormal factors and products become
    zeros of their sign. The GPU looks after rounding to 24 bits, which fp32 keeps 2**64 times as large."""
    smallest = torch.finfo(torch.float32).tiny  # normal number: 2**-126
    a = a * (a.abs() >= smallest)  # times False is a zero of its sign; NaN stays NaN
    b = b * (b.abs() >= smallest)
    enlarged = (a * 2.0**64 * b).abs()
    return a * b * (enlarged >= smallest * 2.0**64)


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
    return x.dtype == y.dtype and x.shape == y.shape and different(x, y) == 0
