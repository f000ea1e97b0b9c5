"""What stands at each call site while the kernel is switched on (integrate.py does the switching).

Each function here makes the replacement of one library function: same arguments, same result bit for bit.
Where the kernel does not cover a state, where the library multiplies without dequantizing, and while switched
off, it calls the library's own function. The kernel's functions are looked up at each call, so a kernel that
was loaded again is the one that decodes.
"""

import collections
import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

_compiling = torch.compiler.is_dynamo_compiling
_functorch = torch._C._are_functorch_transforms_active
_plain_tensors = torch._C.DisableTorchFunctionSubclass  # Params4bit answers every method through Python
_lock = threading.Lock()


@dataclass(eq=False)
class Library:
    """One library's switch: `on` is read by all its call sites, so they change over together."""

    on: bool = False
    sites: list["Site"] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # function: why it stays the library's
    holders: set = field(default_factory=set)  # the Switches that want it on

    def originals(self) -> list[tuple]:
        """What it replaces and how: the same again takes the same replacements."""
        return [(site.original, site.watched) for site in self.sites]


@dataclass(eq=False)
class Site:
    """One function of a library, what stands in for it, and who decoded since it was put there.

    kernel: calls the kernel decoded; library: calls left to the library, by `reasons`; fused: products the
    library forms from packed weights in one kernel of its own, where nothing is dequantized.
    Calls inside a compiled graph are not seen here. Counts of threads that run at once may miss a few.
    """

    name: str  # module and attribute
    original: Callable
    library_switch: Library
    replacement: Callable | None = None
    watched: bool = False  # the replacement only counts
    kernel: int = 0
    library: int = 0
    fused: int = 0
    reasons: collections.Counter = field(default_factory=collections.Counter)

    def stand_in(self, function: Callable) -> Callable:
        """Make `function` the replacement, under the original's name, module and signature: so it is pickled
        by reference as the original is, and says by `nf4_site` what it is."""
        functools.update_wrapper(function, self.original, updated=())
        function.nf4_site = self
        self.replacement = function
        return function

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


class State:
    """Fields of a quant_state, for one call: nothing is kept, so nothing is kept alive or shared."""

    def __init__(self, fields=(), **others):
        self.__dict__.update(fields, **others)


def in_dtype(state, dtype):
    """`state`, or its fields with another dtype: bitsandbytes' forward decodes to the input's dtype,
    whatever the state's."""
    return state if state.dtype is dtype else State(vars(state), dtype=dtype)


def _covered(kernel, weight, state) -> bool:
    """May this be traced as the kernel's operator? What the operator would refuse takes the library's path,
    as in eager code. Metadata only, and Dynamo guards all of it."""
    n, float32, sizes = math.prod(state.shape), torch.float32, [state.blocksize]
    blocks = -(-n // state.blocksize)
    needed = [(state.absmax, torch.uint8 if state.nested else float32, blocks)]
    if state.nested:
        second, offset = state.state2, state.offset
        if second is None or second.dtype is not float32 or offset is None:
            return False
        if offset.dtype not in kernel.OFFSETS or offset.numel() != 1:
            return False
        sizes.append(second.blocksize)
        needed += [(second.absmax, float32, -(-blocks // second.blocksize)), (second.code, float32, 256)]
        needed += [(offset, offset.dtype, 1)]
    if (
        not (weight.is_cuda or kernel.INTERPRETED)
        or state.dtype not in kernel.DTYPES
        or state.quant_type not in ("nf4", "fp4")
        or getattr(state, "packing_format_for_cpu", False)
        or weight.dtype not in kernel.STORAGES
        or not weight.is_contiguous()
        or weight.numel() * weight.element_size() * 2 < n
        or (weight.is_floating_point() and n > 3 and tuple(weight.shape) == tuple(state.shape))
        or any([size & (size - 1) for size in sizes])
    ):
        return False
    for tensor, dtype, count in needed:
        if tensor is None or tensor.dtype != dtype or tensor.device != weight.device:
            return False
        if tensor.numel() < count or not tensor.is_contiguous():
            return False
    return True


def _decoded(site: Site, kernel, weight, state, out=None):
    """The weight as the kernel decodes it, counted; None where that is the library's to do."""
    if _compiling():
        return kernel._your_dequantize_nf4(weight, state, out) if _covered(kernel, weight, state) else None
    try:
        result = kernel._your_dequantize_nf4(weight, state, out)
    except kernel.UnsupportedState as error:
        return site.left(error)
    site.kernel += 1
    return result


def unsloth_fast_dequantize(site: Site, kernel, state_type) -> None:
    """For Unsloth's fast_dequantize. `use_global_buffer` only allows a result that the next call overwrites:
    here each is fresh. Other formats (8 bit, NVFP4, int4, MXFP4) have other state types and pass through."""
    original, library = site.original, site.library_switch

    @site.stand_in
    def fast_dequantize(W, quant_state=None, out=None, *more, **named):
        if type(quant_state) is state_type and library.on:
            if (result := _decoded(site, kernel, W, quant_state, out)) is not None:
                return result
        return original(W, quant_state, out, *more, **named)


def dequantize_4bit(site: Site, kernel) -> None:
    """For bitsandbytes.functional.dequantize_4bit, all arguments included: without quant_state, `absmax`
    (fp32) and `out` stand for a flat state. Arguments that a newer release adds are the library's."""
    original, library = site.original, site.library_switch

    @site.stand_in
    def dequantize_4bit(
        A, quant_state=None, absmax=None, out=None, blocksize=64, quant_type="fp4", *more, **named
    ):
        state = quant_state
        if state is None and absmax is not None and out is not None and not _compiling():
            fields = dict(absmax=absmax, shape=out.shape, dtype=out.dtype, quant_type=quant_type)
            state = State(fields, nested=False, blocksize=64 if blocksize is None else blocksize)
        if library.on and state is not None and not more and not named:
            if (result := _decoded(site, kernel, A, state, out)) is not None:
                return result
        return original(A, quant_state, absmax, out, blocksize, quant_type, *more, **named)


def gemm_fallback(site: Site, kernel) -> None:
    """For the dequantize-then-multiply branch inside bitsandbytes' CUDA operator gemm_4bit: what compiled
    graphs run, and eager calls that `matmul_4bit` below leaves to the operator."""
    original, library = site.original, site.library_switch

    @site.stand_in
    def replacement(
        A, B, shapeB, absmax, blocksize, quant_type, bias=None,
        absmax_8bit=None, absmax_code=None, absmax_offset=None,
    ):  # fmt: skip
        if library.on:
            state = State(shape=torch.Size(shapeB), dtype=A.dtype, quant_type=quant_type, blocksize=blocksize)
            state.nested, state.absmax = absmax_8bit is not None, absmax
            if state.nested:
                state.state2 = State(absmax=absmax, code=absmax_code, blocksize=256, dtype=torch.float32)
                state.absmax, state.offset = absmax_8bit, absmax_offset
            if (weight := _decoded(site, kernel, B, state)) is not None:  # here a row is no transposed weight
                return linear(A, weight.t() if B.shape[0] == 1 else weight, bias)
        return original(
            A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset
        )


def matmul_4bit(site: Site, kernel, functional, cuda_ops) -> None:
    """For bitsandbytes' matmul_4bit, where it dequantizes and multiplies: the same decoded weight into the
    same `linear` (forward) and `matmul` (backward), without the operator's dispatch, two helper kernels and
    the subclass views between them. Which product is taken is asked of bitsandbytes itself (`cuda_ops`; None
    on a CPU, where it always dequantizes): few rows go to its fused kernels, whose sums round differently.
    """
    original, library, tensor = site.original, site.library_switch, torch.Tensor
    fused = getattr(cuda_ops, "_gemm_4bit_use_custom_fn", None)
    most_rows = getattr(cuda_ops, "_gemm_4bit_custom_max_m", 0)
    on_cpu = kernel.INTERPRETED and cuda_ops is None

    class MatMul4Bit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, A, B, bias, quant_state):
            weight = kernel._your_dequantize_nf4(B, in_dtype(quant_state, A.dtype))
            ctx.packed, ctx.state = B, quant_state
            return linear(A, weight, bias)

        @staticmethod
        def backward(ctx, grad):
            weight = functional.dequantize_4bit(ctx.packed, ctx.state)
            return torch.matmul(grad, weight.to(grad.dtype)), None, None, None

    # Function.apply itself only adds the look for functorch, which is done below.
    apply = super(torch.autograd.Function, MatMul4Bit).apply

    @site.stand_in
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
                        weight = kernel._your_dequantize_nf4(B, in_dtype(quant_state, A.dtype))
                        result = linear(A, weight, bias)
                    site.kernel += 1
                    return result
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                # Whatever is wrong with these arguments, bitsandbytes' own text says it best.
                site.left(error)
        return original(A, B, quant_state, out, bias)


def watch(site: Site) -> None:
    """Count the calls of a function that stays the library's; changes nothing."""
    original, site.watched = site.original, True

    @site.stand_in
    def watched(*arguments, **named):
        if not _compiling():
            site.library += 1
        return original(*arguments, **named)
