"""Small and large quantized layers, for the notebook's checks, the benchmarks, and the tests."""

# %% Layers to dequantize id="layers" folded=true
import torch
import triton

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret  # TRITON_INTERPRET=1
DEVICE = "cuda" if ON_GPU else "cpu"
LARGE = (4096, 14336) if ON_GPU else (128, 64)  # in and out features; the interpreter is slow


def quantized_layer(
    in_features,
    out_features,
    dtype,
    nested=True,
    quant_type="nf4",
    blocksize=64,
    device=None,
    seed=3407,
):
    """Return a bitsandbytes Linear4bit: its (out, in) weight is standard normal, its output dtype `dtype`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = device or DEVICE
    generator = torch.Generator(device).manual_seed(seed)
    shape = (out_features, in_features)
    weight = torch.randn(shape, generator=generator, device=device)
    layer = Linear4bit(in_features, out_features, bias=False, compute_dtype=dtype, device="meta")
    layer.weight = Params4bit(
        weight,
        requires_grad=False,
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=quant_type,
    )
    layer.to(device)  # quantizes the weight
    layer.weight.quant_state.dtype = dtype
    return layer


def every_code(dtype, device=None):
    """Return a layer with all 256 bytes under each of the 256 absmax codes: 131,072 elements."""
    layer = quantized_layer(64, 2048, dtype, device=device)
    weight = layer.weight
    every = torch.arange(256, device=weight.device)
    weight.data.copy_(every.repeat(256).view(-1, 1))
    weight.quant_state.absmax.copy_(every.repeat_interleave(8))
    return layer
