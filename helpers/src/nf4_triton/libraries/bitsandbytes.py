"""bitsandbytes, also for PEFT and transformers: dequantize_4bit, and the products that dequantize."""

import sys

import torch
from torch.nn.functional import linear

from .. import launch, private
from ..state import Packed, UnsupportedState, read_state
from .site import CANNOT_LAUNCH, Site, current

DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
PRODUCT = "bitsandbytes.autograd._functions.matmul_4bit"
CUDA_OPS = "bitsandbytes.backends.cuda.ops"  # imported only where there is a GPU
FALLBACK = f"{CUDA_OPS}._dequant_linear_fallback"


def dequantize_4bit(site, A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
    """Answer for a weight. The other arguments are read only if there is no quant_state."""
    if quant_state is None:
        return None
    return site.dequantize(launch._your_dequantize_nf4, A, quant_state, out)


def dequant_linear_fallback(
    site, A, B, shapeB, absmax, blocksize, quant_type, bias=None,
    absmax_8bit=None, absmax_code=None, absmax_offset=None,
):  # fmt: skip
    """Answer for the branch of the CUDA operator gemm_4bit that dequantizes and multiplies. It runs in
    compiled graphs, and in eager calls that `matmul_4bit` leaves to the operator."""
    nested = absmax_8bit is not None  # then `absmax` scales the scales
    packed = Packed(
        weight=B, absmax=absmax_8bit if nested else absmax, code2=absmax_code, offset=absmax_offset,
        absmax2=absmax if nested else None, shape=tuple(shapeB), dtype=A.dtype, quant_type=quant_type,
        blocksize=blocksize, blocksize2=256 if nested else None, nested=nested,
    )  # fmt: skip
    weight = site.dequantize(launch.dequantize_packed, packed)
    if weight is None:
        return None
    return linear(A, weight.t() if B.shape[0] == 1 else weight, bias)  # here a row is not a transposed weight


def matmul_4bit(site, A, B, quant_state, out=None, bias=None):
    """Answer for a product that dequantizes: the same weight into the same `linear` (forward) and `matmul`
    (backward), without the operator's dispatch and two helper kernels."""
    if out is not None or private.is_compiling() or not product_applies(A, quant_state, bias):
        return None
    if is_fused(A, quant_state):
        site.count("fused")
        return None
    multiply = Product.apply if A.requires_grad and torch.is_grad_enabled() else product
    try:
        result = multiply(A, parameter_of(B), quant_state, bias)
    except UnsupportedState:
        return None  # the operator then calls FALLBACK or DEQUANTIZE, which counts it
    except CANNOT_LAUNCH as error:
        site.fail(error)
        return None
    site.count("kernel")
    return result


def product_applies(A: torch.Tensor, quant_state, bias: torch.Tensor | None) -> bool:
    """Return whether bitsandbytes forms the product of a plain tensor and a weight that was quantized as
    (outputs, inputs), in whole blocks."""
    if type(A) is not torch.Tensor or private.in_transform():
        return False
    if quant_state is None or len(quant_state.shape) != 2:
        return False
    outputs, inputs = quant_state.shape
    return (
        A.numel() > 0
        and A.shape[-1] == inputs
        and inputs % quant_state.blocksize == 0
        and A.is_cuda == (CUDA_OPS in sys.modules)  # beside a GPU the CPU's product is another
        and (bias is None or not bias.requires_grad)
        and (not quant_state.nested or quant_state.state2.blocksize == 256)
    )


def is_fused(A: torch.Tensor, quant_state) -> bool:
    """Return whether bitsandbytes takes a fused kernel for so few rows, whose sums round differently."""
    cuda_ops = sys.modules.get(CUDA_OPS)
    if cuda_ops is None:  # on a CPU it always dequantizes
        return False
    outputs, inputs = quant_state.shape
    rows = A.numel() // inputs
    if rows > cuda_ops._gemm_4bit_custom_max_m:
        return False
    return cuda_ops._gemm_4bit_use_custom_fn(A.device.index, A.dtype, rows, outputs, inputs)


def parameter_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the Parameter that a packed weight is a view of, else the weight. Hooks that offload saved
    tensors skip Parameters, which are in memory anyway."""
    base = weight._base
    if isinstance(base, torch.nn.Parameter) and base.numel() == weight.numel():
        return base
    return weight


def as_column(weight: torch.Tensor) -> torch.Tensor:
    with private.plain_tensors():  # Params4bit answers every method through Python
        return weight.view(-1, 1)


def product(A, weight, quant_state, bias):
    """Return linear(A, weight, bias) of the weight dequantized to A's dtype, whatever the state's is."""
    packed = read_state(as_column(weight), quant_state)
    if packed.dtype is not A.dtype:
        packed = packed._replace(dtype=A.dtype)
    return linear(A, launch.dequantize_packed(packed), bias)


class Product(torch.autograd.Function):
    """`product`, and its gradient for A. The packed weight is a saved tensor: checkpointing then gives the
    backward pass the weight of the recomputed forward pass, also if layers share a buffer."""

    @staticmethod
    def forward(ctx, A, weight, quant_state, bias):
        ctx.save_for_backward(weight)
        ctx.quant_state = quant_state
        return product(A, weight, quant_state, bias)

    @staticmethod
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        weight = current(DEQUANTIZE)(as_column(packed), ctx.quant_state)
        return torch.matmul(grad, weight.to(grad.dtype)), None, None, None


def small_input(rows: int, quant_state) -> torch.Tensor:
    inputs = quant_state.shape[1]
    values = torch.linspace(-1, 1, rows * inputs, device=quant_state.absmax.device)
    return values.view(rows, inputs).to(quant_state.dtype)


def multiplied_from_parts(function, packed, quant_state):
    x, bias = small_input(64, quant_state), small_input(1, quant_state)[0, :128]
    second = quant_state.state2
    sizes = quant_state.blocksize, quant_state.quant_type
    scales = quant_state.absmax, second.code, quant_state.offset
    return [function(x, packed, quant_state.shape, second.absmax, *sizes, bias, *scales)]


def products_and_gradients(function, packed, quant_state):
    """Of 1, 64, and 2,048 rows: bitsandbytes takes a fused kernel up to some hundred rows, at most 1,536."""
    results = []
    for rows in (1, 64, 2048):
        x = small_input(rows, quant_state).requires_grad_()
        y = function(x, packed, quant_state, bias=small_input(1, quant_state)[0, :128])
        y.backward(y.detach())
        results += [y.detach(), x.grad]
    return results


SITES = (
    Site(DEQUANTIZE, dequantize_4bit),
    Site(FALLBACK, dequant_linear_fallback, multiplied_from_parts),
    Site(PRODUCT, matmul_4bit, products_and_gradients),
)
