"""Exact 4-bit dequantization in plain PyTorch: the oracle of all tests and the fallback without Triton.

Its sections are cells of the notebook and need only torch.
"""

# %% id="reference-dequantize"
import torch

# bitsandbytes looks codes up in these tables, not in quant_state.code.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_VALUES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
FP4_VALUES += tuple(-x for x in FP4_VALUES)  # code 8 is -0.0, as in bitsandbytes' CUDA kernels


def dequantize(weight, quant_state, flush_subnormal=None):
    """Return the dequantized weight, bit-identical to bitsandbytes, on the device of `weight`.

        scale[k] = fp32(code2[absmax[k]] * absmax2[k // blocksize2]) + offset    nested: rounded twice, no FMA
        out[i]   = dtype(fp32(table[code[i]] * scale[i // blocksize]))           flat: scale is absmax

    weight: 4-bit codes in any dtype, two a byte, high nibble first. If weight.shape[0] is 1, the result is
    transposed.
    quant_state: bitsandbytes' QuantState, nf4 or fp4, nested or flat. It gives shape and dtype of the result.
    flush_subnormal: treat subnormal fp32 numbers as zeros. Default: only on a GPU, as bitsandbytes does.
    Raises ValueError if a tensor is too short.
    """
    flush = weight.is_cuda if flush_subnormal is None else flush_subnormal
    multiply = multiply_flushing if flush else torch.mul
    state, shape = quant_state, torch.Size(quant_state.shape)
    blocks = -(-shape.numel() // state.blocksize)
    scale = first(state.absmax, blocks, "absmax")
    if state.nested:
        code2 = state.state2.code[scale.int()]
        absmax2 = first(state.state2.absmax, -(-blocks // state.state2.blocksize), "state2.absmax")
        scale = by_block(multiply, code2, absmax2, state.state2.blocksize)
        scale += state.offset
    packed = weight.detach().contiguous().view(-1).view(torch.uint8)
    packed = first(packed, -(-shape.numel() // 2), "weight").int()
    values = FP4_VALUES if state.quant_type == "fp4" else NF4_VALUES
    table = torch.tensor(values, dtype=torch.float32, device=weight.device)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # of each possible byte
    codes = pairs[packed].view(-1)[: shape.numel()]
    out = by_block(multiply, codes, scale.float(), state.blocksize).to(state.dtype).view(shape)
    return out.t() if weight.shape[0] == 1 else out


def first(tensor, count, name):
    """Return the first `count` elements of `tensor`, flattened. Raises ValueError if it has fewer."""
    if tensor.numel() < count:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {count} for quant_state.shape")
    return tensor.reshape(-1)[:count]


def by_block(multiply, values, scale, blocksize):
    """Return values[i] * scale[i // blocksize] for each i, without a scale per element in memory."""
    n = values.numel()
    blocksize = min(blocksize, n) or 1
    blocks = torch.nn.functional.pad(values, (0, -n % blocksize)).view(-1, blocksize)
    return multiply(blocks, scale[:, None]).view(-1)[:n]


def multiply_flushing(a, b):
    """Return a * b for |a| <= 1 as the GPU's `mul.rn.ftz.f32` does: subnormal factors and products become
    zeros of their sign. The GPU rounds to 24 bits before it looks; 2**64 times as large, they fit."""
    smallest = torch.finfo(torch.float32).tiny

    def flush(x, subnormal):
        return torch.where(subnormal, torch.copysign(torch.zeros_like(x), x), x)

    a, b = flush(a, a.abs() < smallest), flush(b, b.abs() < smallest)
    return flush(a * b, (a * 2.0**64 * b).abs() < smallest * 2.0**64)


# %% id="reference-compare"
def different(x: torch.Tensor, y: torch.Tensor) -> int:
    """Count the elements whose bits differ; NaN equals NaN. Raises ValueError if shape or dtype differ."""
    return int(differences(x, y))


def differences(x, y):
    """Return that count as a tensor on the device, without waiting for it."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"cannot compare {x.dtype} {tuple(x.shape)} with {y.dtype} {tuple(y.shape)}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    differ = x.contiguous().view(bits) != y.contiguous().view(bits)
    return (differ & ~(x.isnan() & y.isnan())).sum()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit agree; NaN equals NaN."""
    return x.dtype == y.dtype and x.shape == y.shape and different(x, y) == 0


# %% id="reference-layers"
import os  # noqa: E402


def default_device():
    """Return "cuda" if the kernel runs on a GPU, "cpu" if Triton's interpreter runs it."""
    on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    return "cuda" if on_gpu else "cpu"


def quantized_layer(
    in_features, out_features, dtype, nested=True, quant_type="nf4", blocksize=64, device=None, seed=3407
):
    """Return a bitsandbytes Linear4bit: its (out, in) weight is standard normal, its output dtype `dtype`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = device or default_device()
    how = dict(compress_statistics=nested, quant_type=quant_type)
    layer = Linear4bit(in_features, out_features, False, dtype, device="meta", **how)
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, device=device)
    layer.weight = Params4bit(weight, requires_grad=False, blocksize=blocksize, **how)
    layer.to(device).weight.quant_state.dtype = dtype
    return layer


def every_code(dtype, device=None):
    """Return a layer with all 256 bytes under each of the 256 absmax codes: 131,072 elements."""
    layer = quantized_layer(64, 2048, dtype, device=device)
    device = layer.weight.device
    layer.weight.data.copy_(torch.arange(256, device=device).repeat(256).view(-1, 1))
    layer.weight.quant_state.absmax.copy_(torch.arange(2048, device=device) // 8)
    return layer
