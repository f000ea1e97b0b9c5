"""A mixture-of-experts layer in 4 bits whose step dequantizes only the experts that its tokens use.

pip install ".[train]"    in a checkout of this repository
python moe_active_experts.py
    8 of 64 experts dequantized; the same output as with all: True
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

    def forward(x, ids):
        """Return x (tokens, size) through the expert ids[token] of each token: (tokens, size)."""
        used, place = ids.unique(return_inverse=True)
        weights = dequantize((layer, "stack"), rows=used)  # (len(used), size, size), one launch
        y = torch.empty_like(x)
        for index in range(len(used)):
            mine = place == index
            y[mine] = x[mine] @ weights[index].t()
        return y

    x = torch.randn(256, size, device=device, requires_grad=True)
    ids = torch.randint(active, (256,), device=device)
    y = forward(x, ids)
    y.square().mean().backward()  # to what is trained before this layer, such as a LoRA adapter
    expected = torch.einsum("toi,ti->to", layer.stack[ids], x)  # layer.stack dequantizes all experts
    same = torch.allclose(y, expected, atol=1e-4)
    print(f"{len(ids.unique())} of {experts} experts dequantized; the same output as with all: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--active", type=int, default=8)
    parser.add_argument("--size", type=int, default=256)
    main(**vars(parser.parse_args()))
