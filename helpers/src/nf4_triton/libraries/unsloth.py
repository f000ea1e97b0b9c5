"""Unsloth: fast_dequantize for layers, and unsloth_zoo's functions for stacks of experts."""

import importlib

import torch

from ..core.supported import UnsupportedState
from .self_test import dequantized, small_stack
from .site import Site, dequantize_stack, launch_general

FAST_DEQUANTIZE = "unsloth.kernels.utils.fast_dequantize"
EXPERT_STACK = "unsloth_zoo.temporary_patches.moe_triton_kernels.nf4_dequant_triton"
EXPERTS = "unsloth_zoo.temporary_patches.moe_utils._dequantize_bnb4bit_experts"
# unsloth_zoo runs copies of moe_utils.py from its compiled cache, under these names.
COPIES = ("unsloth_cached_moe_utils", "moe_utils")


def fast_dequantize(site, W, quant_state=None, out=None, use_global_buffer=False, *, dtype=None):
    """Dequantize a layer. The result is always a new tensor, which `use_global_buffer` permits; `dtype` is
    for other formats (8 bit, NVFP4, MXFP4), which have other state types."""
    if type(quant_state).__name__ != "QuantState":
        return None
    return site.by_kernel(launch_general.dequantize_weight, W, quant_state, out)


def nf4_dequant_triton(site, packed, quant_state, out_shape=None, *, out=None):
    """Dequantize a whole stack of experts, for batches that need most of them. Never transposed."""
    return site.by_kernel(expert_stack, packed, quant_state, out_shape, None, out)


def expert_stack(weight, quant_state, shape, rows=None, out=None):
    """Return a stack or its rows. Raises UnsupportedState for fp16, where Unsloth's own tests allow an error
    of one unit in the last place."""
    if quant_state.dtype is torch.float16:
        raise UnsupportedState("Unsloth rounds some fp16 experts differently from bitsandbytes")
    return dequantize_stack(weight, quant_state, shape or quant_state.shape, rows, out)


def dequantize_experts(site, param, experts, target_dtype=None):
    """Dequantize the experts of a stack that a small batch uses: a slice, or ids on the GPU."""
    while hasattr(param, "base_layer"):  # PEFT's wrappers
        param = param.base_layer
    return site.by_kernel(selected_experts, param, experts, target_dtype)


def selected_experts(param, experts, target_dtype):
    shape = getattr(param, "_original_shape", None)
    result = expert_stack(param.data, param.quant_state, shape, experts)
    return result.to(target_dtype or result.dtype)


def stacked(packed, quant_state, weight):
    """Return the self-test's calls: as two experts of 4 x 4096, and into `out`; none for fp16."""
    if quant_state.dtype is torch.float16:
        return []
    shape = 2, 4, 4096
    _, into_out, _ = dequantized(packed, quant_state, weight)
    return [((packed, quant_state, shape), {}, weight.view(shape)), into_out]


def selected(packed, quant_state, weight):
    """Return the self-test's calls: with ids and with a slice; none for fp16."""
    if quant_state.dtype is torch.float16:
        return []
    ids, shape = small_stack(packed)
    quant_state.shape = torch.Size(shape)
    nn = importlib.import_module("bitsandbytes.nn")
    param = nn.Params4bit(packed, requires_grad=False, quant_state=quant_state, bnb_quantized=True)
    experts = weight.view(shape)
    return [((param, ids, torch.float32), {}, experts[ids].float()), ((param, slice(1, 4)), {}, experts[1:4])]


SITES = (
    Site(FAST_DEQUANTIZE, fast_dequantize, relaunches=True),
    Site(EXPERT_STACK, nf4_dequant_triton, stacked),
    Site(EXPERTS, dequantize_experts, selected),
    *(Site(f"{copy}._dequantize_bnb4bit_experts", dequantize_experts, selected) for copy in COPIES),
)
