"""Cached launches: checked and compiled once, replayed on other tensors of the same layout.

`keep` takes an ordinary launch; launch.py replays it, and `replay_selected` that of selected slices.
Without this file every call is an ordinary launch: the same results, slower. `# %%`: notebook cells.
"""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
from .kernel import INTERPRETED, TRITON
from .private import (
    GUARDED, TensorGuards, current_device, current_stream, dispatch_modes, dynamo_callback,
    empty_cuda, is_compiling, plain_tensors,
)
from .settings import cached
from .state import extent

# %% Keep a launch, and replay it id="replay" part="replay" folded=true tags=["launch"]
import dataclasses
from collections.abc import Callable

import torch
import triton

# Replays call what Triton compiled, past Triton's own launch code: checked for these versions.
CAN_REPLAY = (GUARDED and TensorGuards is not None and not INTERPRETED
              and (3, 4) <= TRITON <= (3, 9) and torch.version.hip is None)
# Saves 1.8 us (0.8 on a fast host): skips the Python part of Triton's launcher.
SKIP_PYTHON_LAUNCHER = TRITON in ((3, 5), (3, 6))
hooks = triton.knobs.runtime  # public: profilers add launch hooks here


@dataclasses.dataclass
class CachedLaunch:
    """A launch that was checked and compiled."""

    guards: Callable  # compares tensors with those that were checked, in one call into torch
    layout: tuple  # shape, strides, and dtype of the result, as callers get it
    device: int  # index of the GPU
    aligned: bool  # where the kernel starts to read the weight is a multiple of 16
    out_aligned: bool
    run: Callable  # Triton's launcher: run(grid, 1, 1, stream, *before, *kernel arguments)
    grid: int  # programs
    before: tuple  # what the launcher takes before the kernel's own arguments
    numbers: tuple  # n, first, slices
    constexprs: tuple
    tile: int  # elements of a program
    owner: object  # Triton's CompiledKernel, which owns what `before` points to


def is_observed():
    """Return whether a dispatch mode or a profiler's launch hook must see the next launch."""
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return dispatch_modes() or getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


def find(key):
    """Return the launches kept under a key: a spec, or one with what else the call has."""
    try:
        return cached.get(key, ())
    except TypeError:  # a list among the fields is no key, nor is it a valid state
        return ()


def keep(packed, out, selection, ordinary, result):
    """Keep an ordinary launch for later calls. result: as callers get it."""
    compiled = ordinary.compiled
    if not CAN_REPLAY or compiled is None:
        return
    run, before = compiled.run, (compiled.packed_metadata, None, None, None)  # no hooks
    if SKIP_PYTHON_LAUNCHER and not (run.global_scratch_size or run.profile_scratch_size):
        run = run.launch
        before = (0, 0, None, None, *before)  # no cooperative or dependent launch, no scratch
    key, guarded = packed.spec, packed.tensors
    sizes = [list(tensor.shape) for tensor in guarded]
    if selection is not None:
        key, guarded, sizes = selected_key(key, guarded, sizes, selection, out)
    elif out is not None:
        key, guarded, sizes = (key, "out"), (*guarded, out), [*sizes, list(out.shape)]
    strides = [list(tensor.stride()) for tensor in guarded]
    guards = TensorGuards(*guarded, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    if not guards.check(*guarded):  # one tensor given twice
        return
    launch = CachedLaunch(
        guards=guards.check,
        layout=(tuple(result.shape), result.stride(), result.dtype),
        device=result.get_device(),
        aligned=ordinary.aligned,
        out_aligned=ordinary.out_aligned,
        run=run,
        grid=ordinary.grid,
        before=(compiled.function, *before),
        numbers=ordinary.numbers,
        constexprs=ordinary.constexprs,
        tile=ordinary.tile,
        owner=compiled)
    if len(cached) >= 1024:  # a model has few shapes, a test may have many
        cached.clear()
    # Guards also depend on autocast and inference mode: a state may need several.
    cached[key] = [launch, *cached.get(key, ())][:32]


def can_write(out, tensors, launch):
    """Return whether `out` has memory of its own, aligned as it was for the launch. If so, tell
    autograd that it changes."""
    start, size = out.data_ptr(), out.nbytes
    freed = start == out.storage_offset() * out.itemsize
    if freed or (start % 16 == 0) is not launch.out_aligned:
        return False
    for tensor in tensors:
        first = tensor.data_ptr()
        if start < first + tensor.nbytes and first < start + size:
            return False
    torch.autograd.graph.increment_version(out)
    return True


# %% Replay a launch of selected slices id="replay-selected" part="replay" folded=true tags=["launch"]
def selected_key(spec, tensors, sizes, selection, out):
    """Return (key, tensors that the guards compare, their sizes): None for a number of slices, which
    changes from call to call."""
    key = spec, selection.ids is None, out is None
    for tensor in (selection.ids, out):
        if tensor is not None:
            tensors, sizes = (*tensors, tensor), [*sizes, [None, *tensor.shape[1:]]]
    return key, tensors, sizes


def replay_selected(tensors, spec, selection, out=None):
    """Launch again on slices of a weight of a cached layout. Return the result, None if none fits."""
    if is_compiling() or not CAN_REPLAY or dynamo_callback() is not None:
        return None
    ids, _, count = selection
    whole, *_ = spec  # the weight's shape
    guarded = tensors if ids is None else (*tensors, ids)
    guarded = guarded if out is None else (*guarded, out)
    with plain_tensors():
        for launch in find((spec, ids is None, out is None)):
            if not launch.guards(*guarded) or is_observed():
                continue
            if launch.device != current_device():
                with torch.cuda.device(launch.device):
                    return replay_selected(tensors, spec, selection, out)
            weight, absmax, *second = tensors
            shape, strides, dtype = launch.layout
            if ids is None:
                (n, first, slices), grid = extent(whole, selection, launch.tile)
            else:
                n, first, slices = launch.numbers
                grid = count * -(-n // launch.tile)
            address = weight.data_ptr()
            freed = address == weight.storage_offset() * weight.itemsize
            if freed or ((address + first // 2) % 16 == 0) is not launch.aligned:
                continue
            if out is None:
                result = empty_cuda((count, *shape[1:]), strides, dtype)
            elif len(out) == count and can_write(out, tensors, launch):
                result = out
            else:
                continue
            code2, absmax2, offset = second or (absmax, absmax, absmax)  # flat: not read
            rows = absmax if ids is None else ids
            if grid:
                launch.run(grid, 1, 1, current_stream(launch.device), *launch.before, address,
                           result.data_ptr(), absmax.data_ptr(), code2.data_ptr(), absmax2.data_ptr(),
                           offset.data_ptr(), rows.data_ptr(), n, first, slices, *launch.constexprs)
            return result
    return None
