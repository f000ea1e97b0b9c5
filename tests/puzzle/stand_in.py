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


bnb_Linear4bit = assert_same = MLP = mlp_forward = mlp_dequantize = test_dequantize = None
