"""Axolotl: its LoRA kernels' dequantization, FSDP2's, and the experts that ScatterMoE selects."""

import math

import torch

from ..settings import UnsupportedState
from .site import Site, dequantize_rows, launch_general, small_stack

DEQUANT = "axolotl.kernels.quantize._ctypes_nf4_dequant"
FSDP2 = "axolotl.utils.nf4.dequantize_bnb_4bit"  # from 0.21 on
EXPERTS = "axolotl.integrations.kernels.libs.scattermoe_lora.selective_dequant._selective_dequant_bnb4"

CHUNK = 2**26  # elements of its launches; other sizes bound the caller's memory


def ctypes_nf4_dequant(site, W, absmax, code2, absmax2, offset, blocksize, blocksize2, shape, dtype):
    """Answer for layers: the LoRA kernels and the operator axolotl::nf4_dequantize call it."""
    tensors = W, absmax, code2, absmax2, offset
    layout = tuple(shape), dtype, "nf4", blocksize, blocksize2, True
    return site.dequantize(launch_general.run_kernel, tensors, layout)


def dequantize_bnb_4bit(site, data, state, *, out=None, chunk_size=CHUNK):
    """Answer for weights of the sharded loader and merges. The original fills `out` by chunks, on any device,
    and never transposes."""
    if data.shape[0] == 1 or chunk_size != CHUNK:
        return None
    return site.dequantize(launch_general.dequantize_weight, data, state, out)


def selective_dequant_bnb4(site, raw_param, quant_state, active_experts, expert_shape):
    """Answer for the experts that a batch is routed to."""
    return site.dequantize(selected_experts, raw_param, quant_state, active_experts, expert_shape)


def selected_experts(raw_param, quant_state, active_experts, expert_shape):
    if raw_param.dtype != torch.uint8:
        raise UnsupportedState("Axolotl selects experts by bytes, and this stack is not stored in uint8")
    experts = math.prod(quant_state.shape) // max(1, math.prod(expert_shape))
    return dequantize_rows(raw_param, quant_state, (experts, *expert_shape), active_experts)


def dequantized_from_parts(function, packed, quant_state):
    second = quant_state.state2
    parts = second.code, second.absmax, quant_state.offset, quant_state.blocksize, second.blocksize
    return [function(packed, quant_state.absmax, *parts, quant_state.shape, quant_state.dtype)]


def selected(function, packed, quant_state):
    ids, (_, *expert_shape) = small_stack(packed, quant_state)
    return [function(packed, quant_state, ids, tuple(expert_shape))]


SITES = (
    Site(DEQUANT, ctypes_nf4_dequant, dequantized_from_parts),
    Site(FSDP2, dequantize_bnb_4bit),
    Site(EXPERTS, selective_dequant_bnb4, selected),
)
