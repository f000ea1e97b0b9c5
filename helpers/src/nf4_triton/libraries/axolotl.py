"""Axolotl: dequantization for its LoRA kernels, for FSDP2, and for the experts that ScatterMoE selects."""

import math

import torch

from ..core.supported import UnsupportedState
from .self_test import dequantized, small_stack
from .site import Site, dequantize_stack, launch_general

DEQUANT = "axolotl.kernels.quantize._ctypes_nf4_dequant"
FSDP2 = "axolotl.utils.nf4.dequantize_bnb_4bit"  # since 0.21
EXPERTS = "axolotl.integrations.kernels.libs.scattermoe_lora.selective_dequant._selective_dequant_bnb4"

CHUNK = 2**26  # Axolotl's default chunk, in elements; other sizes are there to limit memory


def ctypes_nf4_dequant(site, W, absmax, code2, absmax2, offset, blocksize, blocksize2, shape, dtype):
    """Dequantize a layer. The LoRA kernels and the operator axolotl::nf4_dequantize call this."""
    tensors = W, absmax, code2, absmax2, offset
    layout = tuple(shape), dtype, "nf4", blocksize, blocksize2, True
    return site.by_kernel(launch_general.dequantize_tensors, tensors, layout)


def dequantize_bnb_4bit(site, data, state, *, out=None, chunk_size=CHUNK):
    """Dequantize a weight of the sharded loader or of a merge. The original fills `out` in chunks, on any
    device, and never transposes."""
    if data.shape[0] == 1 or chunk_size != CHUNK:
        return None
    return site.by_kernel(launch_general.dequantize_weight, data, state, out)


def selective_dequant_bnb4(site, raw_param, quant_state, active_experts, expert_shape):
    """Dequantize the experts that a batch is routed to."""
    return site.by_kernel(selected_experts, raw_param, quant_state, active_experts, expert_shape)


def selected_experts(raw_param, quant_state, active_experts, expert_shape):
    if raw_param.dtype != torch.uint8:
        raise UnsupportedState("Axolotl selects experts by bytes, and this stack is not stored in uint8")
    experts = math.prod(quant_state.shape) // max(1, math.prod(expert_shape))
    return dequantize_stack(raw_param, quant_state, (experts, *expert_shape), active_experts)


def dequantized_from_parts(packed, quant_state, weight):
    """Return the self-test's calls: only nested NF4."""
    q, second = quant_state, quant_state.state2
    if not second or q.quant_type != "nf4":
        return []
    scales = q.absmax, second.code, second.absmax, q.offset
    rest = *scales, q.blocksize, second.blocksize, q.shape, q.dtype
    return [((packed, *rest), {}, weight), ((packed.t(), *rest), {}, weight.t())]


def selected(packed, quant_state, weight):
    ids, shape = small_stack(packed)
    return [((packed, quant_state, ids, shape[1:]), {}, weight.view(shape)[ids])]


SITES = (
    Site(DEQUANT, ctypes_nf4_dequant, dequantized_from_parts),
    Site(FSDP2, dequantize_bnb_4bit, lambda *layer: dequantized(*layer)[:2]),  # never transposed
    Site(EXPERTS, selective_dequant_bnb4, selected),
)
