"""A mixture-of-experts layer in 4 bits whose step dequantizes only the experts that its tokens use.

pip install ".[train]"    in a checkout of this repository
python moe_active_experts.py
"""

import argparse


def main(experts, active, size):
    import torch
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    from nf4_triton import dequantize

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = torch.nn.Module()
    layer.stack = torch.nn.Parameter(torch.randn(experts, size, size, device=device) / size**0.5)
    replace_parameter_4bit(layer, "stack", compress_statistics=True, quant_type="nf4")
    packed = layer.parametrizations.stack.original  # layer.stack would dequantize all experts
    quant_state = layer.parametrizations.stack[0].quant_state

    def forward(x, ids):
        """Return x (tokens, size) through the expert ids[token] of each token: (tokens, size)."""
        used, place = ids.unique(return_inverse=True)
        weights = dequantize(packed, quant_state, rows=used)  # (len(used), size, size), one launch
        y = torch.empty_like(x)
        for index in range(len(used)):
            mine = place == index
            y[mine] = x[mine] @ weights[index].t()
        return y

    x = torch.randn(64, size, device=device, requires_grad=True)
    ids = torch.randint(active, (64,), device=device)
    y = forward(x, ids)
    y.square().mean().backward()  # to what is trained before this layer, such as a LoRA adapter
    expected = torch.einsum("toi,ti->to", layer.stack[ids], x)
    print(f"{len(ids.unique())} of {experts} experts; largest difference {(y - expected).abs().max():.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--active", type=int, default=8)
    parser.add_argument("--size", type=int, default=256)
    main(**vars(parser.parse_args()))
