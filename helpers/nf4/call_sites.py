"""What stands at each call site while the kernel is switched on (helpers.nf4.integrate does the switching).

Each function here makes the replacement of one library function: same arguments, same result bit for bit.
Where the kernel does not cover a state, where the library multiplies without dequantizing, and while switched
off, it calls the library's own function. The fast path adds a few attribute reads to the kernel's call.
"""

import collections
import threading
import types
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

_compiling = torch.compiler.is_dynamo_compiling
_functorch = torch._C._are_functorch_transforms_active
_plain_tensors = torch._C.DisableTorchFunctionSubclass  # Params4bit answers every method through Python
_lock = threading.Lock()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Library:
    """One library's switch: `on` is read by all its call sites, so they change over together."""

    __slots__ = ("name", "on")

    def __init__(self, name: str):
        self.name, self.on = name, False


@dataclass(eq=False)
class Site:
    """One function of a library, what stands in for it, and who decoded since the switch was made.

    kernel: calls the kernel decoded; library: calls left to the library, by `reasons`; fused: products the
    library forms from packed weights in one kernel of its own, where nothing is dequantized.
    Calls inside a compiled graph are not seen here. Counts of threads that run at once may miss a few.
    """

    name: str
    original: object
    replacement: object = None
    watched: bool = False  # the replacement only counts
    places: list = field(default_factory=list)  # (module, attribute) that hold the replacement now
    kernel: int = 0
    library: int = 0
    fused: int = 0
    reasons: collections.Counter = field(default_factory=collections.Counter)

    def tally(self) -> dict:
        """What was counted so far."""
        with _lock:
            reasons = collections.Counter(self.reasons)
        return {"kernel": self.kernel, "library": self.library, "fused": self.fused, "reasons": reasons}

    def left(self, reason) -> None:
        """Count a call that the library decodes itself."""
        with _lock:
            self.library += 1
            self.reasons[str(reason).split(":")[0]] += 1


class _InDtype:
    """A quant_state seen with another output dtype; the tensors are the state's own. bitsandbytes' forward
    decodes straight to the input's dtype, whatever the state's."""

    def __init__(self, dtype):
        self.dtype = dtype

    def follow(self, state):
        self.absmax, self.shape, self.quant_type = state.absmax, state.shape, state.quant_type
        self.blocksize, self.nested, self.state2, self.offset = (
            state.blocksize,
            state.nested,
            state.state2,
            state.offset,
        )
        return self

    def __reduce__(self):
        return (type(None), ())  # copies and pickles of a model start without it


def in_dtype(state, dtype):
    """`state`, or a view of it that decodes to `dtype`."""
    if state.dtype is dtype:
        return state
    views = state.__dict__.get("_nf4_views")
    if views is None:
        views = state._nf4_views = {}
    view = views.get(dtype)
    if view is None:
        view = views[dtype] = _InDtype(dtype)
    return view.follow(state)


def _traceable(kernel, weight, state) -> bool:
    """May this be traced as the kernel's operator? Metadata only; the operator checks the rest."""
    return (
        (weight.is_cuda or kernel.INTERPRETED)
        and state.dtype in DTYPES
        and state.quant_type in ("nf4", "fp4")
        and not getattr(state, "packing_format_for_cpu", False)
        and state.blocksize & (state.blocksize - 1) == 0
        and (not state.nested or state.state2.blocksize & (state.state2.blocksize - 1) == 0)
    )


def unsloth_fast_dequantize(site: Site, library: Library, kernel, state_type):
    """For Unsloth's fast_dequantize. `use_global_buffer` only allows a result that the next call overwrites:
    here each is fresh. Other formats (8 bit, NVFP4, int4, MXFP4) have other state types and pass through."""
    original, decode, unsupported = site.original, kernel._your_dequantize_nf4, kernel.UnsupportedState

    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
        if type(quant_state) is state_type and library.on:
            if _compiling():
                if _traceable(kernel, W, quant_state):
                    return kernel._traced(W, quant_state, out)
                return original(W, quant_state, out, use_global_buffer, dtype)
            try:
                result = decode(W, quant_state, out)
            except unsupported as error:
                site.left(error)
            else:
                site.kernel += 1
                return result
        return original(W, quant_state, out, use_global_buffer, dtype)

    return fast_dequantize


def dequantize_4bit(site: Site, library: Library, kernel):
    """For bitsandbytes.functional.dequantize_4bit, all arguments included: without quant_state, `absmax`
    (fp32) and `out` stand for a flat state."""
    original, decode, unsupported = site.original, kernel._your_dequantize_nf4, kernel.UnsupportedState

    def flat(A, absmax, out, blocksize, quant_type):
        state = types.SimpleNamespace(
            absmax=absmax, shape=out.shape, dtype=out.dtype, blocksize=64 if blocksize is None else blocksize,
            quant_type=quant_type, nested=False, state2=None, offset=None,
        )  # fmt: skip
        return decode(A, state, out)

    def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        if library.on:
            if _compiling():
                if quant_state is not None and _traceable(kernel, A, quant_state):
                    return kernel._traced(A, quant_state, out)
                return original(A, quant_state, absmax, out, blocksize, quant_type)
            try:
                if quant_state is not None:
                    result = decode(A, quant_state, out)
                elif absmax is not None and out is not None:
                    result = flat(A, absmax, out, blocksize, quant_type)
                else:
                    return original(A, quant_state, absmax, out, blocksize, quant_type)
            except unsupported as error:
                site.left(error)
            else:
                site.kernel += 1
                return result
        return original(A, quant_state, absmax, out, blocksize, quant_type)

    return dequantize_4bit


def gemm_fallback(site: Site, library: Library, kernel):
    """For the dequantize-then-multiply branch inside bitsandbytes' CUDA operator gemm_4bit: what compiled
    graphs run, and eager calls that `matmul_4bit` below leaves to the operator."""
    original, unsupported = site.original, kernel.UnsupportedState
    operator = torch.ops.nf4_triton.dequantize

    def _dequant_linear_fallback(
        A, B, shapeB, absmax, blocksize, quant_type, bias=None,
        absmax_8bit=None, absmax_code=None, absmax_offset=None,
    ):  # fmt: skip
        if library.on:
            nested = absmax_8bit is not None
            try:
                weight = operator(
                    B, absmax_8bit if nested else absmax, absmax_code, absmax if nested else None,
                    absmax_offset, list(shapeB), str(A.dtype), quant_type, blocksize, 256 if nested else 0,
                )  # fmt: skip
            except unsupported as error:
                site.left(error)
            else:
                site.kernel += 1
                return linear(A, weight, bias)
        return original(
            A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset
        )

    return _dequant_linear_fallback


def matmul_4bit(site: Site, library: Library, kernel, functional, cuda_ops):
    """For bitsandbytes' matmul_4bit, where it dequantizes and multiplies: the same decoded weight into the
    same `linear` (forward) and `matmul` (backward), without the operator's dispatch, two helper kernels and
    the subclass views between them. Which product is taken is asked of bitsandbytes itself (`cuda_ops`; None
    on a CPU, where it always dequantizes): few rows go to its fused kernels, whose sums round differently.
    """
    original, decode, unsupported = site.original, kernel._your_dequantize_nf4, kernel.UnsupportedState
    fused = getattr(cuda_ops, "_gemm_4bit_use_custom_fn", None)
    most_rows = getattr(cuda_ops, "_gemm_4bit_custom_max_m", 0)
    tensor = torch.Tensor
    on_cpu = kernel.INTERPRETED and cuda_ops is None

    class MatMul4Bit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, A, B, bias, quant_state):
            weight = decode(B, in_dtype(quant_state, A.dtype))
            ctx.packed, ctx.state = B, quant_state
            return linear(A, weight, bias)

        @staticmethod
        def backward(ctx, grad):
            weight = functional.dequantize_4bit(ctx.packed, ctx.state)
            return torch.matmul(grad, weight.to(grad.dtype)), None, None, None

    # Function.apply itself only adds the look for functorch, which is done below.
    apply = super(torch.autograd.Function, MatMul4Bit).apply

    def matmul_4bit(A, B, quant_state, out=None, bias=None):
        if library.on and out is None and not _compiling() and type(A) is tensor and not _functorch():
            try:
                outputs, inputs = quant_state.shape
                elements = A.numel()
                rows = elements // inputs
                if (
                    A.shape[-1] == inputs
                    and elements
                    and inputs * outputs >= 64  # below, the packed column may be one row, read as transposed
                    and (A.is_cuda or on_cpu)
                    and (bias is None or not bias.requires_grad)
                    and (not quant_state.nested or quant_state.state2.blocksize == 256)
                ):
                    if fused and rows <= most_rows:
                        if inputs % quant_state.blocksize:
                            return original(A, B, quant_state, out, bias)  # it warns, then dequantizes
                        if fused(A.device.index, A.dtype, rows, outputs, inputs):
                            site.fused += 1
                            return original(A, B, quant_state, out, bias)
                    with _plain_tensors():
                        B = B.data  # keeps the storage of now, as bitsandbytes' view does, at half the cost
                        if B.size(0) == 1:
                            B = B.view(-1, 1)
                    if A.requires_grad and torch.is_grad_enabled():
                        result = apply(A, B, bias, quant_state)
                    else:
                        result = linear(A, decode(B, in_dtype(quant_state, A.dtype)), bias)
                    site.kernel += 1
                    return result
            except (unsupported, AttributeError, IndexError, TypeError, ValueError) as error:
                # Whatever is wrong with these arguments, bitsandbytes' own text says it best.
                site.left(error)
        return original(A, B, quant_state, out, bias)

    return matmul_4bit


def watch(site: Site):
    """Count what bitsandbytes' CUDA build still dequantizes itself; changes nothing."""
    original = site.original

    def _dequantize_4bit_impl(A, absmax, blocksize, quant_type, dtype, out):
        site.library += 1
        return original(A, absmax, blocksize, quant_type, dtype, out)

    return _dequantize_4bit_impl
