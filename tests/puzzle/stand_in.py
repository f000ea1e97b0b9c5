"""A stand-in for the puzzle's own notebook: its names, defined before our cells run."""

# ruff: noqa: B905, E402, F401
import os
from inspect import currentframe

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import torch.nn as nn
import triton
import triton.language as tl
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import set_seed
from transformers.activations import ACT2FN
from triton import jit

DEVICE_COUNT = 1
_F = currentframe
W = V = _C = None  # short names of its own, which our cells must not need


def unsloth_dequantize(weight):
    return dequantize_4bit(weight.weight.data, weight.weight.quant_state)


def bnb_Linear4bit(hd, m, dtype=torch.float16):
    return Linear4bit(hd, m, bias=None, compute_dtype=dtype, compress_statistics=True, quant_type="nf4")


def assert_same(x, y, line, dtype):
    assert x.dtype == dtype, line
    torch.testing.assert_close(x, y, check_stride=True)


class MLP(nn.Module):
    def __init__(self, hd=4096, m=14336, dtype=torch.float16):
        super().__init__()
        self.gate_proj = bnb_Linear4bit(hd, m, dtype=dtype).to(DEVICE)
        self.up_proj = bnb_Linear4bit(hd, m, dtype=dtype).to(DEVICE)
        self.down_proj = bnb_Linear4bit(m, hd, dtype=dtype).to(DEVICE)
        for layer in (self.gate_proj, self.up_proj, self.down_proj):
            layer.weight.quant_state.dtype = dtype
        self.act_fn = ACT2FN["silu"]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def mlp_forward(X, mlp, fx):
    up, gate = X @ fx(mlp.up_proj).t(), X @ fx(mlp.gate_proj).t()
    return mlp.act_fn(gate) * up @ fx(mlp.down_proj).t()


def mlp_dequantize(X, mlp, fx):
    return fx(mlp.up_proj).t(), fx(mlp.gate_proj).t(), fx(mlp.down_proj).t()


def test_dequantize(dequantize_fx):
    for bsz, qlen, hd, m, seed, dt in (
        (2, 33, 128, 192, 3407, torch.float16),
        (3, 20, 64, 128, 3408, torch.bfloat16),
    ):
        set_seed(seed)
        torch.set_default_dtype(torch.float32)
        mlp = MLP(hd=hd, m=m, dtype=dt)
        X = torch.randn((bsz, qlen, hd), dtype=dt, device=DEVICE)
        assert_same(mlp_forward(X, mlp, dequantize_fx), mlp(X), _F().f_lineno, dt)
        mine, theirs = (mlp_dequantize(X, mlp, fx) for fx in (dequantize_fx, unsloth_dequantize))
        for a, b in zip(mine, theirs):
            assert_same(a, b, _F().f_lineno, dt)
    return "passed"
