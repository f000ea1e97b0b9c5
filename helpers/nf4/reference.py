"""The exact oracle: 4-bit dequantization in plain PyTorch, on the CPU or the GPU, with bitsandbytes' bits.

    scale[k] = fp32(code2[absmax[k]] * absmax2[k // blocksize2]) + offset    nested: two roundings, no FMA
    out[i]   = dtype(fp32(code[nibble[i]] * scale[i // blocksize]))          high nibble of a byte first

Slow and readable on purpose. It is compared with bitsandbytes itself (tests/oracle/test_reference.py).
"""

import torch

from helpers.puzzle.protocol import different, same_bits

__all__ = ["DTYPES", "NF4", "TABLES", "dequantize", "different", "same_bits"]

# bitsandbytes decodes with tables built into its kernels, not with quant_state.code.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022833424, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_MAGNITUDE = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
# fp4's code 8 is -0, as in bitsandbytes' CUDA kernels; its CPU code gives -0 or +0 depending on the position.
TABLES = {"nf4": NF4, "fp4": FP4_MAGNITUDE + tuple(-x for x in FP4_MAGNITUDE)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def dequantize(weight, quant_state, flush_subnormal=None):
    """Return the dequantized weight: `quant_state`'s shape and dtype, on the device of `weight`.

    weight: packed codes in any dtype (`quant_storage`), two a byte; a weight with `shape[0] == 1` is the
    transposed view, and the result is then transposed too.
    quant_state: a bitsandbytes QuantState (or anything with its attributes), nested or flat, nf4 or fp4.
    flush_subnormal: bitsandbytes' CUDA build multiplies with flush-to-zero, its CPU build does not; None
    follows the build that would serve `weight`'s device.

    Raises ValueError for a state that is malformed, too short for its shape, or of an unsupported kind.
    """
    if flush_subnormal is None:
        flush_subnormal = weight.is_cuda
    multiply = _multiply_flushing if flush_subnormal else torch.mul
    n, blocksize, dtype = quant_state.shape.numel(), quant_state.blocksize, quant_state.dtype
    if getattr(quant_state, "packing_format_for_cpu", False):
        raise ValueError(
            "bitsandbytes repacked this layer for CPU inference: call .train() before its first "
            "forward pass, or load it again, to keep the NF4 layout"
        )
    if quant_state.quant_type not in TABLES:
        raise ValueError(f"quant_type must be one of {sorted(TABLES)}, got {quant_state.quant_type!r}")
    if dtype not in DTYPES:
        raise ValueError(f"quant_state.dtype must be fp16, bf16 or fp32, got {dtype}")

    packed = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    packed = _first(packed, -(-n // 2), "weight", "bytes")
    blocks = -(-n // blocksize)
    scale = _scales(quant_state, blocks, multiply)

    table = torch.tensor(TABLES[quant_state.quant_type], dtype=torch.float32, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack([table[byte >> 4], table[byte & 15]], dim=1)
    codes = pairs.index_select(0, packed.int()).reshape(-1)[:n]
    out = multiply(codes, scale.repeat_interleave(blocksize)[:n]).to(dtype).reshape(quant_state.shape)
    return out.t() if weight.shape[0] == 1 else out


def _scales(quant_state, blocks, multiply):
    """The fp32 scale of each block, shape (blocks,), decoded as bitsandbytes decodes it."""
    absmax = _first(quant_state.absmax, blocks, "absmax", "blocks")
    state2 = getattr(quant_state, "state2", None)
    if state2 is None:
        if not absmax.is_floating_point():
            raise ValueError(f"a flat state needs floating-point absmax, got {absmax.dtype} and no state2")
        return absmax.float()
    if absmax.dtype != torch.uint8:
        raise ValueError(f"a nested state needs uint8 absmax, got {absmax.dtype}")
    if quant_state.offset is None:
        raise ValueError("a nested state needs an offset, got None")
    if state2.code.numel() != 256:
        raise ValueError(f"state2.code needs 256 values, got {state2.code.numel()}")
    absmax2 = _first(state2.absmax, -(-blocks // state2.blocksize), "state2.absmax", "blocks of scales")
    absmax2 = absmax2.float().repeat_interleave(state2.blocksize)[:blocks]
    product = multiply(state2.code.float().index_select(0, absmax.int()), absmax2)
    product = product.to(getattr(state2, "dtype", None) or torch.float32)
    product += quant_state.offset
    return product.float()


def _first(tensor, count, name, what):
    """The first `count` values of `tensor`, flattened; a clear error where it holds fewer."""
    if tensor.numel() < count:
        raise ValueError(f"{name} holds {tensor.numel()} {what}, quant_state.shape needs {count}")
    return tensor.reshape(-1)[:count]


def _flush(x):
    """What flush-to-zero arithmetic makes of fp32 `x`: subnormal numbers become zeros of the same sign."""
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)


def _multiply_flushing(a, b):
    """a * b for |a| <= 1 as `mul.rn.ftz.f32` does it: subnormal factors count as zeros, and so does a product
    that is subnormal once rounded to 24 bits (rounded here where 24 bits fit: 2**64 times as large)."""
    a, b = _flush(a), _flush(b)
    product = a * b
    tiny = (a * 2.0**64 * b).abs() < SMALLEST_NORMAL * 2.0**64
    return torch.where(tiny, torch.copysign(torch.zeros_like(product), product), product)
