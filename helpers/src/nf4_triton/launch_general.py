"""Dequantize any layout: what backend and libraries call. It stands on top of launch.py.

Whole weights try the puzzle's kept launches first. Then all of state.py's checks run, and `fits` chooses the
kernel. `out=`, selected rows, and layouts that are not the puzzle's have kept launches of their own, and an
operator.
"""

import contextlib
import math
import subprocess
import typing

import torch
import triton

from . import launch, tracing
from .kernel import TRITON
from .kernel_general import _dequantize_general_kernel
from .launch import CAN_RELAUNCH, is_watched, launch_text
from .private import (
    TensorGuards,
    address_of,
    current_device,
    current_stream,
    empty_cuda,
    is_compiling,
    is_fake,
    is_traced,
    launcher,
    plain_tensors,
)
from .settings import INTERPRETED, KERNEL_DEVICE, has_no_bf16, launch_options, of_card, settings, when_forced
from .state import (
    Packed,
    Selection,
    check,
    check_call,
    make_packed,
    read_fields,
    read_rows,
    result_shape,
    slice_elements,
)

# Raised before a launch: full disk, killed ptxas, damaged cache. CUDA errors are RuntimeErrors.
CANNOT_LAUNCH = (OSError, ImportError, subprocess.SubprocessError, triton.TritonError)


def dequantize_weight(weight, quant_state, out=None):
    """Return a weight dequantized in one launch, bit-identical to bitsandbytes, or fill `out` with it.

    Transposed if weight.shape[0] is 1, as in bitsandbytes. Raises UnsupportedState.
    """
    return dequantize(*read_fields(weight, quant_state), out)


def dequantize_packed(packed, out=None, rows=None):
    """Return the weight of a Packed; `out` and errors as for dequantize_weight.

    rows: of read_rows: only these slices along the first dimension of packed.shape, (len(rows),
    *packed.shape[1:]), never transposed. An id on a GPU that is out of range gives a slice of NaN.
    """
    selection = None if rows is None else read_rows(rows, packed)
    return dequantize(packed.tensors, packed.layout, out, selection)


def dequantize(tensors, layout, out=None, selection=None):
    """Return the weight of the two parts of a Packed, by a kept launch or by a new one."""
    result, quant_type = None, layout[2]
    if quant_type == "nf4" and out is None and selection is None:
        result = launch.relaunch(tensors, layout)
    if result is None:
        result = relaunch(tensors, layout, out, selection)
    if result is None:
        result = check_and_launch(make_packed(tensors, layout), out, selection)
    return result


# --- kept launches ---


launches: dict = {}  # {a layout, or key_of(...): what keep() made for it}
when_forced.append(launches.clear)


def key_of(tensors, layout, out, selection):
    """Return the key of a call's kept launches, and what their guards compare: `out` last."""
    ids = None if selection is None else selection.ids
    if ids is not None:
        tensors = (*tensors, ids)
    if out is not None:
        tensors = (*tensors, out)
    return (layout, out is None, selection is None, ids is None), tensors


def relaunch(tensors, layout, out, selection):
    """Launch again on tensors of a layout that was checked. Return the result, None if no launch fits."""
    if is_compiling():
        return None  # torch.compile must see the operator
    key, guarded = layout, tensors
    if out is not None or selection is not None:
        key, guarded = key_of(tensors, layout, out, selection)
    try:
        known = launches.get(key, ())
    except TypeError:  # a list among the fields
        return None
    with plain_tensors():
        for fits_again, device, run, before, grid, after, like, more, _ in known:
            if not fits_again(*guarded) or is_watched():
                continue  # another type, dtype, device, size, or stride; or a profiler
            if device != current_device():
                with torch.cuda.device(device):
                    return relaunch(tensors, layout, out, selection)
            weight, absmax, *second = tensors
            size, stride, dtype = like
            tile, constexprs, aligned, out_aligned = more
            first = 0
            if selection is not None:
                # Guards leave the first size of ids and out open, and the stride that follows from it.
                if not all(tensor.is_contiguous() for tensor in guarded[len(tensors) :]):
                    continue
                ids = 0 if selection.ids is None else selection.ids.data_ptr()
                numbers, grid = extent(layout[0], selection, tile)
                after, first = (ids, *numbers, *constexprs), numbers[1]
                size = selection.number, *size[1:]
            address = weight.data_ptr()
            freed = address == weight.storage_offset() * weight.itemsize
            if freed or ((address + first // 2) % 16 == 0) is not aligned:
                continue
            if out is not None and not can_write(out, guarded[:-1], size, out_aligned):
                continue
            result = empty_cuda(size, stride, dtype) if out is None else out
            code2, absmax2, offset = second or (absmax, absmax, absmax)  # flat: not read
            if grid:
                run(
                    grid, 1, 1, current_stream(device), *before, address, result.data_ptr(),
                    absmax.data_ptr(), code2.data_ptr(), absmax2.data_ptr(), offset.data_ptr(), *after,
                )  # fmt: skip
            return result if out is None or selection else maybe_transpose(out, weight)


def can_write(out, tensors, size, aligned):
    """Return whether `out` has the result's size and memory of its own, aligned as for the launch. If
    so, tell autograd that it changes."""
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    freed = start == out.storage_offset() * out.itemsize
    if freed or out.shape[:1] != size[:1] or (start % 16 == 0) is not aligned:
        return False
    for tensor in tensors:
        first = tensor.data_ptr()
        if start < first + tensor.nbytes and first < end:
            return False
    torch.autograd.graph.increment_version(out)
    return True


def keep(packed, out, selection, ready, compiled, result):
    """Keep a launch for later calls. result: as callers get it."""
    if not CAN_RELAUNCH or compiled is None:
        return
    key, guarded = packed.layout, packed.tensors
    if out is not None or selection is not None:
        key, guarded = key_of(packed.tensors, packed.layout, out, selection)
    sizes, strides = [list(x.shape) for x in guarded], [list(x.stride()) for x in guarded]
    if selection is not None:  # another call selects another number of slices
        for of_ids_and_out in (sizes[len(packed.tensors) :], strides[len(packed.tensors) :]):
            for numbers in of_ids_and_out:
                numbers[0] = None
    guards = TensorGuards(*guarded, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    if not guards.check(*guarded):  # one tensor given twice
        return
    run, before = launcher(compiled, TRITON)
    after = tuple(0 if isinstance(x, torch.Tensor) else x for x in ready.arguments[6:])
    kept = (
        guards.check,  # compares tensors with those that were checked, in one call into torch
        result.get_device(),
        *(run, before),  # Triton's launcher, and what it takes before the kernel's own arguments
        ready.grid,
        after,  # the kernel's arguments after six pointers
        (tuple(result.shape), result.stride(), result.dtype),  # what to allocate
        (ready.tile, after[4:], ready.aligned, ready.out_aligned),
        compiled,  # owns what `before` points to
    )
    launch.remember(launches, key, kept)


# --- the first launch ---


class Ready(typing.NamedTuple):
    """A launch that was checked and not yet made."""

    kernel: typing.Any
    grid: int  # programs
    arguments: tuple  # six pointers; the general kernel's ids, n, first, slices, or n; constexprs
    options: dict  # Triton's launch options
    tile: int  # elements of a program
    aligned: bool  # where the kernel starts to read the weight is a multiple of 16
    out_aligned: bool


def check_and_launch(packed, out=None, selection=None):
    """Check everything, launch the ordinary way, and keep the launch for later calls."""
    if is_traced(packed.weight):
        return call_operator(packed, out, selection)
    sizes = check_call(packed, out, selection, KERNEL_DEVICE)
    with plain_tensors():
        weight = packed.weight
        if out is None:
            result = torch.empty(result_shape(packed, selection), dtype=packed.dtype, device=weight.device)
        else:
            result = out
            torch.autograd.graph.increment_version(out)  # so that autograd notices the change
        aligned = result.data_ptr() % 16 == 0
        of_puzzle = puzzles_tensors(packed) if selection is None and aligned else None
        if of_puzzle:
            ready = prepare_puzzles(of_puzzle, packed.layout, result)
        else:
            ready = prepare(packed, sizes, result, selection)
        compiled = launch_ordinary(ready, weight)
        if selection is None:
            result = maybe_transpose(result, weight)
        if of_puzzle and out is None and weight.dtype == torch.uint8:
            launch.keep(packed.tensors, packed.layout, compiled, result)
        else:
            keep(packed, out, selection, ready, compiled, result)
        return result


def puzzles_tensors(packed, memory=True):
    """Return the tensors as the puzzle's kernel takes them, or None: codes as (n / 2, 1) in uint8."""
    weight, *scales = packed.tensors
    if weight.dtype != torch.uint8:  # quant_storage
        weight = weight.view(-1).view(torch.uint8)
    tensors = weight.view(-1, 1), *scales
    return tensors if packed.nested and launch.fits(tensors, packed.layout, memory) else None


def prepare_puzzles(tensors, layout, result):
    """Return the launch of the puzzle's kernel as Ready."""
    grid, arguments, options = launch.prepare(tensors, layout, result)
    return Ready(launch._your_dequantize_nf4_kernel, grid, arguments, options, 0, True, True)


def prepare(packed, sizes, result, selection=None):
    """Return the launch of the general kernel. sizes: of check(packed)."""
    weight, absmax = packed.weight, packed.absmax
    s = settings(weight.device)
    tile = 64 * s.rows
    numbers, grid = extent(packed.shape, selection, tile)
    aligned = (address_of(weight) + numbers[1] // 2) % 16 == 0
    out_aligned = address_of(result) % 16 == 0
    if weight.dtype != torch.uint8:  # quant_storage
        weight = weight.view(-1).view(torch.uint8)
    # What a launch does not read is absmax.
    second = (packed.code2, packed.absmax2, packed.offset) if packed.nested else (absmax,) * 3
    select = selection is not None and selection.ids is not None
    ids = selection.ids if select else absmax

    n, log2_block, log2_block2 = sizes
    log2_row = min(6, log2_block)
    if selection is not None:  # a slice begins at a row
        n = slice_elements(packed)
        while n % (1 << log2_row):
            log2_row -= 1
    by_bytes = not aligned or n % (32 if select else 8) != 0
    unit = math.gcd(n, 1 << log2_row)
    layout = packed.nested, packed.quant_type, log2_block, log2_block2
    access = select, by_bytes, log2_row, unit, out_aligned
    arguments = weight, result, absmax, *second, ids, *numbers, *layout, *access, *of_card(s)
    kernel, options = _dequantize_general_kernel, launch_options(s)
    return Ready(kernel, grid, arguments, options, tile, aligned, out_aligned)


def extent(shape, selection, tile):
    """Return the kernel's (n, first, slices), and how many programs of `tile` elements it needs."""
    if selection is None:
        n = math.prod(shape)
        return (n, 0, 1), -(-n // tile)
    n = math.prod(shape[1:])
    if selection.ids is not None:
        return (n, 0, shape[0]), selection.number * -(-n // tile)
    size = selection.number * n
    return (size, selection.first * n, shape[0]), -(-size // tile)


def launch_ordinary(ready, weight):
    """Launch with kernel[grid](...). Return Triton's CompiledKernel; None if interpreted or empty."""
    if not ready.grid:
        return None
    with torch.cuda.device(weight.device) if weight.is_cuda else contextlib.nullcontext():
        return ready.kernel[(ready.grid,)](*ready.arguments, **ready.options)


def maybe_transpose(result, weight):
    """Return the result transposed if weight.shape[0] is 1, as bitsandbytes and Unsloth do. A (1, 1) is its
    own transpose, and Inductor of torch 2.11 fails on it in a second graph (KeyError: op2)."""
    return result.t() if weight.shape[0] == 1 and result.shape != (1, 1) else result


# --- torch.compile, export, and torch.func ---


@torch.compiler.disable
def launch_eagerly(packed, out, selection):
    """Dequantize between two graphs: on a T4 torch 2.11 raises an error for a graph with bf16."""
    return check_and_launch(packed, out, selection)


def call_operator(packed, out, selection=None):
    """Dequantize by an operator, which tracers record as one call."""
    check_call(packed, out, selection, KERNEL_DEVICE)
    weight = packed.weight
    if packed.dtype is torch.bfloat16 and is_compiling() and has_no_bf16(weight.device):
        return launch_eagerly(packed, out, selection)
    packed = packed.detached()  # after the break, which loses a replaced Packed in torch 2.11
    of_puzzle = puzzles_tensors(packed, memory=False) if selection is None else None
    if of_puzzle:
        result = launch.call_operator(of_puzzle, packed.layout)
    else:
        fields = packed._replace(shape=list(packed.shape))
        result = general_operator(*fields, *(selection or (None, 0, None)), launch_text())
    if out is not None:
        result = out.copy_(result)
    return maybe_transpose(result, weight) if selection is None else result


def _dequantize_general(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    code2: torch.Tensor | None,
    absmax2: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: typing.Sequence[int],
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
    blocksize2: int | None,
    nested: bool,
    ids: torch.Tensor | None,
    first: int,
    number: int | None,
    launch_text: str,
) -> torch.Tensor:
    """Dequantize the fields of a Packed, and of a Selection if `number` is given. Real tensors take the
    ordinary launch. launch_text is not read: compiled code is cached by it, and an exported program chooses
    its settings where it loads."""
    packed = Packed(weight, absmax, code2, absmax2, offset, tuple(shape), dtype, quant_type, blocksize,
                    blocksize2, nested)  # fmt: skip
    selection = None if number is None else Selection(ids, first, number)
    fake = is_fake(weight)
    sizes = check(packed, KERNEL_DEVICE) if fake else check_call(packed, None, selection, KERNEL_DEVICE)
    result = torch.empty(result_shape(packed, selection), dtype=dtype, device=weight.device)
    ready = prepare(packed, sizes, result, selection)
    if not fake:
        launch_ordinary(ready, weight)
    elif not INTERPRETED and (
        not isinstance(ready.grid, int) or ready.grid > 0
    ):  # a dynamic grid may be empty
        # It takes no enable_fp_fusion. Bits stay the same: no product feeds a sum directly.
        kernel = torch.library.wrap_triton(ready.kernel)
        kernel[(ready.grid,)](*ready.arguments, num_warps=ready.options["num_warps"])
    return result


general_operator = tracing.register("nf4_triton::dequantize_general", _dequantize_general)
