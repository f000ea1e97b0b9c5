"""Exact 4-bit dequantization in plain PyTorch: the fallback without Triton, and the reference for benchmarks,
self-tests, and the export. It begins with the format, one step per line.

The tests' oracle is their own (tests/nf4_triton/states.py). `# %%`: notebook cells.
"""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import math

import torch

from .private import is_traced


# %% id="format"
def dequantize_in_pytorch(layer):
    """Return the weight of a double-quantized NF4 layer, one step of the format per line."""
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
# The values of the 16 codes by quant_type. bitsandbytes, too, has them built in and ignores quant_state.code.
VALUES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (  # code 8 is -0.0, as in bitsandbytes' CUDA kernels
        0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25,
        -0.0, -0.0625 / 12, -8 / 12, -1.0, -4 / 12, -0.5, -2 / 12, -0.25,
    ),
}  # fmt: skip
CHUNK = 1 << 18  # elements that a CPU dequantizes at once: they fit its caches


def exact_weight(tensors, layout, selection=None):
    """Return the weight, or a Selection of its slices, bit-identical to bitsandbytes, not transposed.

        scale[k] = fp32(code2[absmax[k]] * absmax2[k // blocksize2]) + offset    nested: rounded twice, no FMA
        out[i]   = dtype(fp32(table[code[i]] * scale[i // blocksize]))           flat: scale is absmax

    tensors, layout: as read_state returns them. A selected id that is out of range gives a slice of NaN.
    """
    if selection is not None:
        slices, layout, missing = select(tensors, layout, selection)
        out = exact_weight(slices, layout)
        out.flatten(1).masked_fill_(missing[:, None], math.nan)
        return out
    shape, dtype, quant_type, blocksize, *_ = layout
    codes, n = codes_of(tensors[0]), math.prod(shape)
    block = min(blocksize, n or 1)
    scale = scales_of(tensors, layout, torch.arange(-(-n // block), device=codes.device))
    table = torch.tensor(VALUES[quant_type], dtype=torch.float32, device=codes.device)
    pairs = torch.cartesian_prod(table, table)  # the values of each byte's two codes, the high nibble first
    if is_traced(codes):  # not in place: vmap may batch only the codes or only the scales
        return products(pairs, codes, scale, block)[:n].to(dtype).view(shape)
    result = codes.new_empty(shape, dtype=dtype)
    size = max(block, CHUNK * 64 if codes.is_cuda else CHUNK)
    parts = result.view(-1).split(size), codes.split(-(-size // 2)), scale.split(size // block)
    for out, codes, scale in zip(*parts, strict=False):  # a weight may hold more codes than it needs
        out.copy_(products(pairs, codes, scale, block)[: len(out)])
    return result


def products(pairs, codes, scale, block):
    """Return each code's value times the scale of its block."""
    values, scale = pairs.index_select(0, codes.int()).view(-1), scale.repeat_interleave(block)
    n = min(len(values), len(scale))
    return multiply(values[:n], scale[:n])


def select(tensors, layout, selection):
    """Return slices as the tensors and the layout of a flat weight, and a mask of ids that do not exist."""
    shape, dtype, quant_type, blocksize, *_ = layout
    ids, codes = selection.ids, codes_of(tensors[0])
    if ids is None:
        ids = torch.arange(selection.number, device=codes.device) + selection.start
    n = math.prod(shape[1:])
    unit = math.gcd(n, blocksize)  # elements that lie in one block
    known = ids.long().clamp(0, shape[0] - 1)
    units = known[:, None] * (n // unit) + torch.arange(n // unit, device=ids.device)
    units = units.view(-1)
    codes = codes[: shape[0] * n // 2].view(-1, unit // 2)
    slices = codes[units].view(-1, 1), scales_of(tensors, layout, units * unit // blocksize)
    return slices, ((selection.number, *shape[1:]), dtype, quant_type, unit, None, False), ids != known


def codes_of(weight):
    """Return the bytes of the packed weight."""
    return weight.contiguous().view(-1).view(torch.uint8)


def scales_of(tensors, layout, blocks):
    """Return the scales of these blocks."""
    _, absmax, *second = tensors
    scale = absmax.reshape(-1)[blocks]
    if second:
        code2, absmax2, offset = second
        scale = multiply(code2.reshape(-1)[scale.int()], absmax2.reshape(-1)[blocks // layout[4]])
        scale = scale + offset.reshape(())
    return scale


def multiply(a, b):
    """Return a * b as bitsandbytes' build for the device rounds it. On a GPU, subnormals become zeros."""
    return multiply_flushing(a, b) if a.is_cuda else a * b


def multiply_flushing(a, b):
    """Return a * b for |a| <= 1 as the GPU's `mul.rn.ftz.f32` does: subnormal factors and products become
    zeros of their sign. The GPU tests for subnormals after rounding to 24 bits; scaled by 2**64, fp32 keeps
    all 24."""
    smallest = torch.finfo(torch.float32).tiny  # normal number: 2**-126
    a = a * (a.abs() >= smallest)  # times False is a zero of its sign; NaN stays NaN
    b = b * (b.abs() >= smallest)
    enlarged = (a * 2.0**64 * b).abs()
    return a * b * (enlarged >= smallest * 2.0**64)


def same_bits(x, y):
    """Return whether dtype, shape, and every bit agree; NaN equals NaN."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    same = x.contiguous().view(bits) == y.contiguous().view(bits)
    both_nan = x.isnan() & y.isnan()
    return bool((same | both_nan).all())
