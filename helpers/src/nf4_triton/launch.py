"""The launch path: a cached launch that fits, else all checks and Triton's ordinary launch, kept.

No address of a layer's tensors is kept. `# %%`: notebook cells.
"""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
from .kernel import INTERPRETED, _your_dequantize_nf4_kernel
from .private import (
    current_device, current_stream, dynamo_callback, empty_cuda, in_transform, is_compiling,
    is_fake, is_traced, plain_tensors,
)
from .settings import forced, launch_options, settings
from .state import (
    Packed, Selection, UnsupportedState, check, check_call, extent, make_packed, read_fields, read_rows,
    read_state, result_shape, slice_elements,
)

try:
    from .replay import CAN_REPLAY, can_write, find, is_observed, keep, key_with
except ModuleNotFoundError:  # every call is then an ordinary launch
    CAN_REPLAY = False

    def keep(packed, out, selection, ordinary, result):
        pass


__all__ = ["Packed", "UnsupportedState", "dequantize_packed", "is_traced", "launch_ordinary",
           "read_state", "your_dequantize_nf4"]

# %% id="launch-path" part="launch" tags=["launch"]
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
    """Return a weight dequantized in one launch, bit-identical to bitsandbytes, or fill `out` with
    it. Transposed if weight.shape[0] is 1, as in bitsandbytes. Raises UnsupportedState."""
    tensors, spec = read_fields(weight, quant_state)
    result = replay(tensors, spec, out)
    return check_and_launch(make_packed(tensors, spec), out) if result is None else result


def replay(tensors, spec, out=None, selection=None):
    """Launch again on tensors of a cached layout. Return the result, None if no launch fits."""
    if is_compiling() or not CAN_REPLAY or dynamo_callback() is not None:
        return None  # torch.compile must see the operator
    key, guarded = spec, tensors
    if out is not None or selection is not None:
        key, guarded = key_with(spec, tensors, out, selection)
    with plain_tensors():
        for launch in find(key):
            if not launch.guards(*guarded) or is_observed():
                continue  # another type, dtype, device, size, or stride; or a profiler
            if launch.device != current_device():
                with torch.cuda.device(launch.device):
                    return replay(tensors, spec, out, selection)
            grid, skip, after, layout = launch.whole if selection is None else launch.part(selection)
            weight, absmax, *second = tensors
            address, scales = weight.data_ptr(), absmax.data_ptr()
            freed = address == weight.storage_offset() * weight.itemsize
            if freed or ((address + skip) % 16 == 0) is not launch.aligned:
                continue
            # A guard leaves the first size open, and the stride that follows from it.
            if not all(tensor.is_contiguous() for tensor in guarded[len(tensors):]):
                continue
            if out is not None and not can_write(out, guarded[:-1], launch, layout):
                continue
            result = empty_cuda(*layout) if out is None else out
            code2, absmax2, offset = second or (absmax, absmax, absmax)  # flat: not read
            ids = scales if selection is None or selection.ids is None else selection.ids.data_ptr()
            if grid:
                launch.run(grid, 1, 1, current_stream(launch.device), *launch.before, address,
                           result.data_ptr(), scales, code2.data_ptr(), absmax2.data_ptr(),
                           offset.data_ptr(), ids, *after)
            return result if out is None or selection else maybe_transpose(out, weight)


# %% Launch the ordinary way id="launch-plain" part="launch" folded=true tags=["launch"]
import contextlib
import math
import typing

import torch

KERNEL_DEVICE = "cpu" if INTERPRETED else "cuda"


class Ordinary(typing.NamedTuple):
    """One ordinary launch: what it wrote, and all that is needed to launch again."""

    result: torch.Tensor  # not transposed
    compiled: object  # Triton's CompiledKernel; None if interpreted or nothing was launched
    grid: int  # programs
    pointers: tuple  # the kernel's seven tensors
    numbers: tuple  # n, first, slices
    constexprs: tuple
    options: dict  # Triton's launch options
    tile: int  # elements of a program
    aligned: bool  # where the kernel starts to read the weight is a multiple of 16
    out_aligned: bool

    @property
    def arguments(self):
        """All of the kernel's arguments."""
        return (*self.pointers, *self.numbers, *self.constexprs)


def launch_ordinary(packed, out=None, selection=None):
    """Check, allocate, and launch with kernel[grid](...). Return Ordinary.

    Raises UnsupportedState for a state or an `out` that the kernel cannot take.
    """
    with plain_tensors():
        weight = packed.weight
        sizes = check_call(packed, out, selection, KERNEL_DEVICE)
        if out is None:
            shape = result_shape(packed, selection)
            out = torch.empty(shape, dtype=packed.dtype, device=weight.device)
        else:
            torch.autograd.graph.increment_version(out)  # so that autograd notices the change
        ready = prepare(packed, sizes, out, selection, weight.data_ptr(), out.data_ptr())
        compiled = None
        with torch.cuda.device(weight.device) if weight.is_cuda else contextlib.nullcontext():
            if ready.grid:
                kernel = _your_dequantize_nf4_kernel[(ready.grid,)]
                compiled = kernel(*ready.arguments, **ready.options)
        return ready._replace(compiled=compiled)


def prepare(packed, sizes, out, selection, address, out_address):
    """Return an Ordinary that is not launched yet. sizes: of check(packed)."""
    weight, absmax = packed.weight, packed.absmax
    s = settings(weight.device)
    tile = 64 * s.rows
    numbers, grid = extent(packed.shape, selection, tile)
    aligned = (address + numbers[1] // 2) % 16 == 0
    out_aligned = out_address % 16 == 0
    ids = absmax if selection is None or selection.ids is None else selection.ids
    # What a launch does not read is absmax.
    second = (packed.code2, packed.absmax2, packed.offset) if packed.nested else (absmax,) * 3
    if weight.dtype != torch.uint8:  # quant_storage
        weight = weight.view(-1).view(torch.uint8)
    constexprs = kernel_constexprs(packed, sizes, aligned, out_aligned, s, selection)
    return Ordinary(
        result=out, compiled=None, grid=grid, pointers=(weight, out, absmax, *second, ids),
        numbers=numbers, constexprs=tuple(constexprs.values()), options=launch_options(s),
        tile=tile, aligned=aligned, out_aligned=out_aligned)


def kernel_constexprs(packed, sizes, aligned, out_aligned, s, selection=None):
    """Return the kernel's constexprs, in its order, under Settings s. sizes: of check(packed)."""
    n, log2_block, log2_block2 = sizes
    log2_row = min(6, log2_block)
    select = selection is not None and selection.ids is not None
    if selection is not None:  # a slice begins at a row
        n = slice_elements(packed)
        while n % (1 << log2_row):
            log2_row -= 1
    return dict(
        NESTED=packed.nested,
        QUANT_TYPE=packed.quant_type,
        LOG2_BLOCK=log2_block,
        LOG2_BLOCK2=log2_block2,
        SELECT=select,
        BYTES=not aligned or n % (32 if select else 8) != 0,
        LOG2_ROW=log2_row,
        UNIT=math.gcd(n, 1 << log2_row),
        ALIGNED=out_aligned,
        ROWS=s.rows,
        ASM=s.asm,
        SM75=s.int_bf16,
        LOAD_HINT="evict_first" if s.hints else "",
        STORE_HINT=".cs" if s.hints else "",
    )


def maybe_transpose(result, weight):
    """Return the result transposed if weight.shape[0] is 1, as bitsandbytes and Unsloth do. A (1, 1)
    is its own transpose, and Inductor of torch 2.11 fails on it in a second graph (KeyError: op2)."""
    return result.t() if weight.shape[0] == 1 and result.shape != (1, 1) else result


def check_and_launch(packed, out, selection=None):
    """Check everything, launch the ordinary way, and keep the launch for later calls."""
    if is_traced(packed.weight):
        return call_operator(packed, out, selection)
    ordinary = launch_ordinary(packed, out, selection)
    with plain_tensors():
        result = ordinary.result
        if selection is None:
            result = maybe_transpose(result, packed.weight)
        keep(packed, out, selection, ordinary, result)
    return result


# %% torch.compile, export, and torch.func id="launch-operator" part="launch" folded=true tags=["launch"]
@torch.compiler.assume_constant_result
def has_no_bf16(device):
    """Return whether Inductor compiles no bf16 on a device: a GPU without bf16 arithmetic."""
    if device.type != "cuda" or not torch.cuda.is_available():  # a fake tensor needs no GPU
        return False
    with torch.cuda.device(device):
        return not torch.cuda.is_bf16_supported(including_emulation=False)


@torch.compiler.disable
def launch_eagerly(packed, out, selection):
    """Dequantize between two graphs: on a T4 torch 2.11 raises an error for a graph with bf16."""
    return check_and_launch(packed, out, selection)


def call_operator(packed, out, selection=None):
    """Dequantize by the operator, which tracers record as one call."""
    if is_compiling() and packed.dtype is torch.bfloat16 and has_no_bf16(packed.weight.device):
        return launch_eagerly(packed, out, selection)
    weight, p = packed.weight, packed
    traced = is_compiling() or in_transform() or is_fake(weight) or is_fake(out)
    check_call(packed, out, selection, KERNEL_DEVICE, memory=out is not None and not traced)
    selected = {} if selection is None else selection._asdict()
    if forced():  # so that code compiled under other settings is not taken for this
        selected["forced"] = forced()
    result = dequantize_operator(
        weight.detach(), p.absmax, p.code2, p.absmax2, p.offset, list(p.shape), p.dtype,
        p.quant_type, p.blocksize, p.blocksize2, p.nested, **selected)
    if out is not None:
        result = out.copy_(result)
    return maybe_transpose(result, weight) if selection is None else result


def _dequantize(
    weight: torch.Tensor, absmax: torch.Tensor, code2: torch.Tensor | None,
    absmax2: torch.Tensor | None, offset: torch.Tensor | None, shape: typing.Sequence[int],
    dtype: torch.dtype, quant_type: str, blocksize: int, blocksize2: int | None, nested: bool,
    ids: torch.Tensor | None = None, first: int = 0, number: int | None = None, forced: str = "",
) -> torch.Tensor:
    """Dequantize the fields of a Packed, and of a Selection if `number` is given. Real tensors take
    the ordinary launch. forced: part of what compiled code is cached by, not read."""
    packed = Packed(weight=weight, absmax=absmax, code2=code2, absmax2=absmax2, offset=offset,
                    shape=tuple(shape), dtype=dtype, quant_type=quant_type, blocksize=blocksize,
                    blocksize2=blocksize2, nested=nested)
    selection = None if number is None else Selection(ids, first, number)
    if not is_fake(weight):
        return launch_ordinary(packed, None, selection).result
    sizes = check(packed, KERNEL_DEVICE)
    out = torch.empty(result_shape(packed, selection), dtype=dtype, device=weight.device)
    # If an input is 16-byte aligned here, Inductor copies it when it is less aligned at run time. It
    # does not check an nn.Parameter, whose storage must not move to such an address.
    ready = prepare(packed, sizes, out, selection, weight.storage_offset() * weight.itemsize, 0)
    launched = not isinstance(ready.grid, int) or ready.grid > 0  # a dynamic grid may be empty
    if launched and not INTERPRETED:
        # It takes no enable_fp_fusion. Bits stay the same: no product feeds a sum directly.
        kernel = torch.library.wrap_triton(_your_dequantize_nf4_kernel)
        kernel[(ready.grid,)](*ready.arguments, num_warps=ready.options["num_warps"])
    return out


def register():
    """Register the operator.

    Inductor inlines the kernel of a triton_op. Triton's interpreter cannot be traced, so there the
    operator is opaque.
    """
    register_as = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    registered = register_as("nf4_triton::dequantize", _dequantize, mutates_args=())
    if INTERPRETED:
        registered.register_fake(_dequantize)
    return registered


dequantize_operator = register()


# %% tags=["module-only"]
import subprocess

import triton

# Raised before a launch: full disk, killed ptxas, damaged cache. CUDA errors are RuntimeErrors.
CANNOT_LAUNCH = (OSError, ImportError, subprocess.SubprocessError, triton.TritonError)


def dequantize_packed(packed, out=None, rows=None):
    """Return the weight of a Packed; `out` and errors as for _your_dequantize_nf4.

    rows: of read_rows: only these slices along the first dimension of packed.shape, (len(rows),
    *packed.shape[1:]), never transposed. An id on a GPU that is out of range gives a slice of NaN.
    """
    selection = None if rows is None else read_rows(rows, packed)
    result = replay(packed.tensors, packed.spec, out, selection)
    return check_and_launch(packed, out, selection) if result is None else result
