"""The launch path: a Packed, its cached launch, else all checks and Triton's ordinary launch.

    read_fields -> replay: the first cached launch that fits
                -> none fits: check, Triton's ordinary launch, keep it

No address of a layer's tensors is kept. `# %%`: notebook cells.
"""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
from .kernel import INTERPRETED, _your_dequantize_nf4_kernel
from .private import is_fake, is_traced, plain_tensors
from .settings import kernel_constexprs, launch_options, settings
from .state import (
    Packed, check, check_memory, check_out, make_packed, read_fields, read_state, UnsupportedState,
)

try:
    from .replay import keep, replay
except ModuleNotFoundError:  # every call is then an ordinary launch

    def replay(tensors, spec, out=None):
        return None

    def keep(tensors, spec, out, ordinary, result):
        pass


__all__ = ["Packed", "UnsupportedState", "dequantize_packed", "is_traced", "launch_ordinary",
           "read_state", "your_dequantize_nf4"]

# %% Launch the ordinary way id="launch-plain" part="launch" folded=true tags=["launch"]
import contextlib
import typing

import torch


class Ordinary(typing.NamedTuple):
    """One ordinary launch: what it wrote, and all that is needed to launch again."""

    result: torch.Tensor  # not transposed
    compiled: object  # Triton's CompiledKernel; None if interpreted or nothing was launched
    grid: int  # programs
    arguments: list  # all of the kernel's arguments: six pointers, n, constexprs
    aligned: tuple  # whether the addresses of weight and result are multiples of 16


def launch_ordinary(packed, out=None):
    """Check, allocate, and launch with kernel[grid](...). Return Ordinary.

    Raises UnsupportedState for a state or an `out` that the kernel cannot take.
    """
    with plain_tensors():
        weight = packed.weight
        sizes = check(packed)
        if out is not None:
            check_out(out, packed)
        check_memory(packed, out)
        if out is None:
            out = torch.empty(packed.shape, dtype=packed.dtype, device=weight.device)
        else:
            torch.autograd.graph.increment_version(out)  # so that autograd notices the change
        aligned = weight.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
        grid, arguments, options = kernel_arguments(packed, sizes, out, *aligned)
        compiled = None
        with torch.cuda.device(weight.device) if weight.is_cuda else contextlib.nullcontext():
            if grid:
                compiled = _your_dequantize_nf4_kernel[(grid,)](*arguments, **options)
        return Ordinary(out, compiled, grid, arguments, aligned)


def kernel_arguments(packed, sizes, out, aligned, out_aligned):
    """Return (grid, all arguments of the kernel, launch options)."""
    n = sizes[0]
    weight, absmax = packed.weight, packed.absmax
    s = settings(weight.device)
    constexprs = kernel_constexprs(packed, sizes, aligned, out_aligned, s)
    grid = -(-n // (64 * s.rows))
    # A flat launch reads absmax alone.
    second = packed[2:5] if packed.nested else (absmax, absmax, absmax)
    if weight.dtype != torch.uint8:  # quant_storage
        weight = weight.view(-1).view(torch.uint8)
    arguments = [weight, out, absmax, *second, n, *constexprs.values()]
    return grid, arguments, launch_options(s)


def maybe_transpose(result, weight):
    """Return the result transposed if weight.shape[0] is 1, as bitsandbytes and Unsloth do."""
    return result.t() if weight.shape[0] == 1 else result


# %% The call id="launch-call" part="launch" tags=["launch"]
def your_dequantize_nf4(layer):
    """Return the weight of a bitsandbytes Linear4bit, of its quant_state's shape and dtype."""
    try:
        weight = layer._parameters["weight"]  # 0.4 us faster than layer.weight
    except (AttributeError, KeyError):
        weight = getattr(layer, "weight", None)
    # FSDP and torch.export replace the weight; then the layer still has the state.
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    return _your_dequantize_nf4(weight, state)


def _your_dequantize_nf4(weight, quant_state, out=None):
    """Return a weight dequantized in one kernel launch, bit-identical to bitsandbytes.

    weight: packed 4-bit codes, two a byte. quant_state: bitsandbytes' QuantState. out: optional
    contiguous tensor for the result, of quant_state's shape and dtype. Transposed if
    weight.shape[0] is 1, as in bitsandbytes and Unsloth. Raises UnsupportedState on bad input.
    """
    tensors, spec = read_fields(weight, quant_state)
    result = replay(tensors, spec, out)
    return check_and_launch(tensors, spec, out) if result is None else result


def check_and_launch(tensors, spec, out):
    """Check everything, launch the ordinary way, and keep the launch for later calls."""
    packed = make_packed(tensors, spec)
    if is_traced(packed.weight):
        return call_operator(packed, out)
    ordinary = launch_ordinary(packed, out)
    with plain_tensors():
        result = maybe_transpose(ordinary.result, packed.weight)
        keep(tensors, spec, out, ordinary, result)
    return result


# %% torch.compile, export, torch.func, and calls without a quant_state id="launch-operator" part="launch" folded=true tags=["launch"]
def dequantize_packed(packed, out=None):
    """Return the weight of a Packed; `out` and errors as for _your_dequantize_nf4."""
    tensors, spec = packed.tensors, packed[5:]
    result = replay(tensors, spec, out)
    return check_and_launch(tensors, spec, out) if result is None else result


def call_operator(packed, out):
    """Dequantize by the operator, which tracers record as one call."""
    check(packed)
    if out is not None:
        check_out(out, packed)
    weight, p = packed.weight, packed
    result = dequantize_operator(
        weight.detach(), p.absmax, p.code2, p.absmax2, p.offset, list(p.shape), p.dtype,
        p.quant_type, p.blocksize, p.blocksize2, p.nested)
    if out is not None:
        result = out.copy_(result)
    return maybe_transpose(result, weight)


def _dequantize(
    weight: torch.Tensor, absmax: torch.Tensor, code2: torch.Tensor | None,
    absmax2: torch.Tensor | None, offset: torch.Tensor | None, shape: typing.Sequence[int],
    dtype: torch.dtype, quant_type: str, blocksize: int, blocksize2: int | None, nested: bool
) -> torch.Tensor:
    """Dequantize the fields of a Packed. Real tensors take the ordinary launch."""
    packed = Packed(weight, absmax, code2, absmax2, offset, tuple(shape), dtype, quant_type,
                    blocksize, blocksize2, nested)
    if not is_fake(weight):
        return launch_ordinary(packed).result
    sizes = check(packed)
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    # If an input is 16-byte aligned here, Inductor copies it when it is less aligned at run time. It
    # does not check an nn.Parameter, whose storage must not move to such an address.
    aligned = weight.storage_offset() * weight.itemsize % 16 == 0
    grid, arguments, options = kernel_arguments(packed, sizes, out, aligned, True)
    if grid and not INTERPRETED:
        # It takes no enable_fp_fusion. Bits stay the same: no product feeds a sum directly.
        kernel = torch.library.wrap_triton(_your_dequantize_nf4_kernel)
        kernel[(grid,)](*arguments, num_warps=options["num_warps"])
    return out


def register():
    """Register the operator, with a namespace of its own in a notebook.

    Inductor inlines the kernel of a triton_op. Triton's interpreter cannot be traced, so there the
    operator is opaque.
    """
    name = "nf4_triton_live" if __name__ == "__main__" else "nf4_triton"
    register_as = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    registered = register_as(f"{name}::dequantize", _dequantize, mutates_args=())
    if INTERPRETED:
        registered.register_fake(_dequantize)
    return registered


dequantize_operator = register()
