"""Real bitsandbytes layers to dequantize."""


def quantized_layer(
    in_features: int,
    out_features: int,
    dtype,
    nested: bool = True,
    quant_type: str = "nf4",
    blocksize: int = 64,
    device: str = "cpu",
    seed: int = 3407,
):
    """A bitsandbytes `Linear4bit` without bias, its (out_features, in_features) weight quantized on `device`.

    The weight is standard normal, drawn on `device` from `seed` (so another one on a GPU than on the CPU);
    `weight.quant_state.dtype` is `dtype`. The layer stays in training mode: in evaluation mode a forward pass
    on a CPU with AVX512-BF16 repacks the weight in place.
    """
    import bitsandbytes as bnb
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    layer = bnb.nn.Linear4bit(
        in_features,
        out_features,
        bias=False,
        compute_dtype=dtype,
        compress_statistics=nested,
        quant_type=quant_type,
        device="meta",  # its own initial values, on the CPU, would take longer than all the rest
    )
    layer.weight = bnb.nn.Params4bit(
        torch.randn(out_features, in_features, generator=generator, device=device),
        requires_grad=False,
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=quant_type,
    )
    layer = layer.to(device)
    layer.weight.quant_state.dtype = dtype
    return layer
