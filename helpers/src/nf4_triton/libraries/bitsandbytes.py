"""bitsandbytes, for PEFT and transformers, too: dequantize_4bit, and the operator that dequantizes and
multiplies."""

import torch
from torch.nn.functional import linear

from .site import Site, launch_general

DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
FALLBACK = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"  # imported only with a GPU


def dequantize_4bit(site, A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
    """Dequantize a weight with a quant_state. The original reads the other arguments only without one."""
    if quant_state is None:
        return None
    return site.by_kernel(launch_general.dequantize_weight, A, quant_state, out)


def dequant_linear_fallback(
    site, A, B, shapeB, absmax, blocksize, quant_type, bias=None,
    absmax_8bit=None, absmax_code=None, absmax_offset=None,
):  # fmt: skip
    """Dequantize and multiply, as one branch of the CUDA operator gemm_4bit does."""
    nested = absmax_8bit is not None  # then `absmax` is absmax2
    tensors = (B, absmax_8bit, absmax_code, absmax, absmax_offset) if nested else (B, absmax)
    layout = tuple(shapeB), A.dtype, quant_type, blocksize, 256 if nested else None, nested
    weight = site.by_kernel(launch_general.dequantize_tensors, tensors, layout)
    if weight is None:
        return None
    return linear(A, weight.t() if B.shape[0] == 1 else weight, bias)  # here a row is not a transposed weight


def multiplied_from_parts(packed, quant_state, weight):
    """Return the self-test's call: a product with the identity, which shows every bit of the weight."""
    weight = weight.view(512, 64)
    x = torch.eye(64, dtype=weight.dtype, device=packed.device)
    bias = x.view(8, 512)[0]
    q, second = quant_state, quant_state.state2
    scales = (second or q).absmax
    nested = (q.absmax, second.code, q.offset) if second else ()
    given = x, packed, weight.shape, scales, q.blocksize, q.quant_type, bias, *nested
    return [(given, {}, linear(x, weight, bias))]


SITES = (
    Site(DEQUANTIZE, dequantize_4bit),
    Site(FALLBACK, dequant_linear_fallback, multiplied_from_parts),
)
