"""Dequantize any layout, for backend.py and the libraries, on top of launch.py.

launch.py replays whole weights, and launches those that fit the puzzle's kernel. Everything else is checked
by checks.py and takes the general kernel. This file replays launches with `out=` or selected rows. A traced
call becomes one of two operators.
"""

import math
import subprocess

import torch
import triton

from . import launch, operators
from .checks import (
    check_call,
    has_derivative,
    overlap,
    result_shape,
    slice_elements,
)
from .kernel_general import _dequantize_general_kernel
from .launch import has_hooks
from .private import (
    address_of,
    current_device,
    current_stream,
    empty_cuda,
    is_compiling,
    is_fake,
    is_traced,
    plain_tensors,
)
from .settings import (
    INTERPRETED,
    KERNEL_DEVICE,
    cache_key,
    has_no_bf16,
    of_card,
    settings,
)
from .state import from_fields, read_state, to_fields, transposed

# Raised before a launch: a full disk, a killed ptxas, a damaged cache. CUDA errors are RuntimeErrors.
CANNOT_LAUNCH = (OSError, ImportError, subprocess.SubprocessError, triton.TritonError)


def dequantize_weight(weight, quant_state, out=None):
    """Return a weight dequantized in one launch, bit-identical to bitsandbytes, or fill `out` with it.

    Transposed if weight.shape[0] is 1, as in bitsandbytes. Raises UnsupportedState.
    """
    tensors, layout = read_state(weight, quant_state)
    return dequantize_tensors(tensors, layout, out)


def dequantize_tensors(tensors, layout, out=None, selection=None):
    """Return the weight of read_state's tensors and layout, by a cached launch or a new one.

    selection: what read_rows returned: only these slices along the first dimension, never transposed. An id
    on a GPU that is out of range gives a slice of NaN. Raises UnsupportedState.
    """
    if out is None and selection is None:
        result = launch.relaunch(tensors, layout)
    else:
        result = relaunch(tensors, layout, out, selection)
    if result is not None:
        return result
    if is_traced(tensors[0]):
        return call_operator(tensors, layout, out, selection)
    return launch_first(tensors, layout, out, selection)


dequantize_eagerly = torch.compiler.disable(dequantize_tensors)

# --- cached launches with `out=` or selected rows ---


def relaunch(tensors, layout, out, selection):
    """Replay a cached launch into `out` or of selected slices. Return the result, or None if none matches."""
    if is_compiling():
        return None  # torch.compile must see the operator
    key, more = key_and_more(layout, out, selection)
    try:
        known = launch.launches.get(key, ())
    except TypeError:  # a list among the fields
        return None
    compared, weight = (*tensors, *more), tensors[0]
    unread = (0,) * (5 - len(tensors))  # pointers that a flat layout lacks
    with plain_tensors():
        for same_kind, device, run, before, output, tiling, after, was_aligned, _ in known:
            if not same_kind(*compared) or has_hooks():
                continue  # another type, dtype, device, size, or stride; or a profiler
            if device != current_device():
                with torch.cuda.device(device):
                    return relaunch(tensors, layout, out, selection)
            elements, tile = tiling
            n, skip, grid = extent(elements, tile, selection)
            address, *scales = map(torch.Tensor.data_ptr, tensors)
            freed = address == weight.storage_offset() * weight.itemsize
            if freed or ((address + skip // 2) % 16 == 0) is not was_aligned:
                continue  # FSDP freed the weight, or its alignment differs
            result = memory_for(output, compared, more, out, selection)
            if result is None:
                continue
            ids = 0 if selection is None or selection.ids is None else selection.ids.data_ptr()
            if grid:
                run(
                    grid, 1, 1, current_stream(device), *before, address, result.data_ptr(),
                    *scales, *unread, ids, n, skip, *after,
                )  # fmt: skip
            return transposed(result, weight) if selection is None else result


def key_and_more(layout, out, selection):
    """Return the key of a call's cached launches, and what guards compare, too: ids and `out`."""
    ids = selection and selection.ids
    more = () if ids is None else (ids,)
    if out is not None:
        more = *more, out
    return (layout, out is None, selection and ids is None), more


def extent(elements, tile, selection):
    """Return the kernel's n and skip, and how many programs of `tile` elements it needs.

    elements: the size of a slice; without a selection, of the whole weight.
    """
    if selection is None:
        return elements, 0, -(-elements // tile)
    ids, start, number = selection
    if ids is not None:
        return elements, 0, number * -(-elements // tile)
    return number * elements, start * elements, -(-number * elements // tile)


def memory_for(output, compared, more, out, selection):
    """Return the memory that a cached launch writes: `out` or a new tensor; None if it does not fit."""
    if selection is not None and not are_whole(selection.number, more):
        return None
    if out is None:
        size, stride, dtype = output
        return empty_cuda((selection.number, *size[1:]), stride, dtype)
    return out if can_write(compared) else None


def are_whole(number, tensors):
    """Return whether ids and `out` are contiguous with `number` slices. Guards do not compare the first size
    and its stride."""
    for tensor in tensors:
        if tensor.shape[0] != number or not tensor.is_contiguous():
            return False
    return True


def can_write(compared):
    """Return whether `out`, the last of these, is aligned and shares no memory with the others. If so, tell
    autograd that it changes."""
    *tensors, out = compared
    start = out.data_ptr()
    if start % 16 or start == out.storage_offset() * out.itemsize or has_derivative(out):
        return False
    for tensor in tensors:
        if overlap(out, tensor):
            return False
    torch.autograd.graph.increment_version(out)
    return True


# --- the first launch ---


def launch_first(tensors, layout, out=None, selection=None):
    """Check everything, launch through Triton, and cache the launch for later calls."""
    with plain_tensors():
        sizes = check_call(tensors, layout, out, selection, KERNEL_DEVICE)
        weight, (shape, dtype, *_), result = tensors[0], layout, out
        whole = out is None and selection is None
        if whole and launch.fits(tensors, layout) and weight.data_ptr() % 16 == 0:
            return launch.launch_first(tensors, layout)
        if out is None:
            result = torch.empty(result_shape(shape, selection), dtype=dtype, device=weight.device)
        else:
            torch.autograd.graph.increment_version(out)  # so that autograd notices the change
        grid, pointers, after, options = prepare(tensors, layout, sizes, result, selection)
        compiled = None
        if grid:
            compiled = launch.launch_by_triton(_dequantize_general_kernel, grid, pointers, after, options)
        if selection is None:
            result = transposed(result, weight)
        if whole:
            unread = (0,) * (6 - len(tensors))  # pointers that a flat layout lacks, and that of the ids
            aligned = weight.data_ptr() % 16 == 0
            launch.keep(layout, tensors, compiled, result, grid, (*unread, *after), aligned)
        elif result.data_ptr() % 16 == 0:  # launches into other memory are not cached
            keep(tensors, layout, out, selection, compiled, result, after)
        return result


def prepare(tensors, layout, sizes, result, selection=None):
    """Return the grid, the kernel's pointers, its arguments after them, and Triton's options. sizes: what
    check_state() returned."""
    (weight, absmax, *second), (shape, _, quant_type, _, _, nested) = tensors, layout
    n, log2_block, log2_block2 = sizes
    s, log2_row, slices = settings(weight.device), min(6, log2_block), 1
    if selection is not None:  # a slice begins at a row
        n, slices = slice_elements(shape), shape[0]
        while n % (1 << log2_row):
            log2_row -= 1
    select = selection is not None and selection.ids is not None
    unit = math.gcd(n, 1 << log2_row)
    count, skip, grid = extent(n, 64 * s.tile_rows, selection)
    by_bytes = (address_of(weight) + skip // 2) % 16 != 0 or n % (32 if select else 8) != 0
    if weight.dtype != torch.uint8:  # quant_storage
        weight = weight.view(-1).view(torch.uint8)
    # absmax stands in for pointers that a launch does not read.
    pointers = weight, result, absmax, *(second or (absmax,) * 3), selection.ids if select else absmax
    constexprs = nested, quant_type, log2_block, log2_block2, select, by_bytes, log2_row, unit
    aligned = address_of(result) % 16 == 0
    last, options = of_card(s)
    return grid, pointers, (count, skip, slices, *constexprs, aligned, *last), options


def keep(tensors, layout, out, selection, compiled, result, after):
    """Cache a launch into `out` or of selected slices, for any number of slices."""
    weight, (elements, skip, *rest) = tensors[0], after
    aligned = (weight.data_ptr() + skip // 2) % 16 == 0
    key, more = key_and_more(layout, out, selection)
    compared = *tensors, *more
    sizes, strides = [list(x.shape) for x in compared], [list(x.stride()) for x in compared]
    if selection is not None:
        elements = slice_elements(layout[0])
        for numbers in (*sizes[len(tensors) :], *strides[len(tensors) :]):
            numbers[0] = None
    tiling = elements, 64 * settings(weight.device).tile_rows
    launch.keep(key, compared, compiled, result, tiling, rest, aligned, sizes, strides)


# --- torch.compile, export, and torch.func ---


def call_operator(tensors, layout, out=None, selection=None):
    """Dequantize through an operator, which tracers record as one call."""
    check_call(tensors, layout, out, selection, KERNEL_DEVICE)
    weight, dtype = tensors[0], layout[1]
    if dtype is torch.bfloat16 and is_compiling() and has_no_bf16(weight.device):
        return dequantize_eagerly(tensors, layout, out, selection)
    # Scales have gradients if bitsandbytes quantized a parameter.
    tensors = tuple(tensor.detach() for tensor in tensors)
    if selection is None and launch.fits(tensors, layout):
        result = launch.call_operator(tensors, layout)
    else:
        result = general_operator(*to_fields(tensors, layout, selection), cache_key())
    if out is not None:
        result = out.copy_(result)
    return transposed(result, weight) if selection is None else result


def _dequantize_general(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    code2: torch.Tensor | None,
    absmax2: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: list[int],
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
    blocksize2: int | None,
    nested: bool,
    ids: torch.Tensor | None,
    start: int,
    number: int | None,
    cache_key: str,
) -> torch.Tensor:
    """Dequantize read_state's tensors of a layout, or a Selection if `number` is given. Real tensors are
    launched through Triton. cache_key is not read: torch caches compiled code by it. An exported program
    picks its settings on the machine that loads it."""
    tensors, layout, selection = from_fields(
        weight, absmax, code2, absmax2, offset, shape, dtype, quant_type, blocksize, blocksize2, nested,
        ids, start, number,
    )  # fmt: skip
    sizes = check_call(tensors, layout, None, selection, KERNEL_DEVICE)
    result = torch.empty(result_shape(shape, selection), dtype=dtype, device=weight.device)
    grid, pointers, after, options = prepare(tensors, layout, sizes, result, selection)
    if not is_fake(weight):
        if grid:
            launch.launch_by_triton(_dequantize_general_kernel, grid, pointers, after, options)
    elif not INTERPRETED and (not isinstance(grid, int) or grid > 0):  # a dynamic grid may be empty
        # wrap_triton takes no enable_fp_fusion. The bits are the same: no product feeds a sum directly.
        kernel = torch.library.wrap_triton(_dequantize_general_kernel)
        kernel[(grid,)](*pointers, *after, num_warps=options["num_warps"])
    return result


general_operator = operators.register("nf4_triton::dequantize_general", _dequantize_general)
