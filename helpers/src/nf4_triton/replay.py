"""Cached launches: checked and compiled once, replayed on other tensors of the same layout.

`keep` takes an ordinary launch. launch.py replays the plain call; `replay_other` those with `out` or
`rows`. Without this file every call is an ordinary launch: the same results, slower. `# %%`: cells.
"""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
from .kernel import INTERPRETED, TRITON
from .private import (
    GUARDED, TensorGuards, current_device, current_stream, dispatch_modes, dynamo_callback,
    empty_cuda, is_compiling, plain_tensors,
)
from .settings import cached
from .state import extent, is_freed, overlaps

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
    """Return the launches kept under a key: a spec, or that of `other_key`."""
    try:
        return cached.get(key, ())
    except TypeError:  # a list among the fields is no key, nor is it a valid state
        return ()


def other_key(tensors, spec, out, selection):
    """Return the key of a call with `out` or a selection, and the tensors that its guards compare."""
    ids = selection.ids if selection else None
    guarded = [*tensors, *(tensor for tensor in (out, ids) if tensor is not None)]
    kind = "ids" if ids is not None else "range" if selection else "whole"
    return (spec, out is not None, kind), guarded


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
    if out is not None or selection is not None:
        key, guarded = other_key(guarded, key, out, selection)
    # How many slices are selected changes from call to call: no guard on the sizes of `ids` and `out`.
    free = () if selection is None else (out, selection.ids)
    sizes = [[None if any(t is one for one in free) and i == 0 else size
              for i, size in enumerate(t.shape)] for t in guarded]
    guards = TensorGuards(*guarded, dynamic_dims_sizes=sizes,
                          dynamic_dims_strides=[list(t.stride()) for t in guarded])
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


def replay_other(tensors, spec, out=None, selection=None):
    """Replay a call with `out`, a selection, or both. Return the result, None if no launch fits."""
    if is_compiling() or not CAN_REPLAY or dynamo_callback() is not None:
        return None
    with plain_tensors():
        key, guarded = other_key(tensors, spec, out, selection)
        for launch in find(key):
            if not launch.guards(*guarded) or is_observed():
                continue
            if launch.device != current_device():
                with torch.cuda.device(launch.device):
                    return replay_other(tensors, spec, out, selection)
            weight, absmax, *second = tensors
            shape, strides, dtype = launch.layout
            numbers, grid = launch.numbers, launch.grid
            if selection is not None:
                shape = (selection.count, *shape[1:])
                numbers, grid = extent(spec[0], selection, launch.tile)
            address = weight.data_ptr() + numbers[1] // 2
            if is_freed(weight) or (address % 16 == 0) is not launch.aligned:
                continue
            if out is None:
                result = empty_cuda(shape, strides, dtype)
            elif can_write(out, tensors, launch, shape):
                torch.autograd.graph.increment_version(out)
                result = out
            else:
                continue
            code2, absmax2, offset = second or (absmax, absmax, absmax)  # flat: not read
            ids = absmax if selection is None or selection.ids is None else selection.ids
            if grid:
                launch.run(
                    grid, 1, 1, current_stream(launch.device), *launch.before, weight.data_ptr(),
                    result.data_ptr(), absmax.data_ptr(), code2.data_ptr(), absmax2.data_ptr(),
                    offset.data_ptr(), ids.data_ptr(), *numbers, *launch.constexprs)
            transposed = out is not None and selection is None and weight.shape[0] == 1
            return result.t() if transposed else result
    return None


def can_write(out, tensors, launch, shape):
    """Return whether `out` has the shape and memory of its own, aligned as it was for the launch."""
    if out.shape != shape and out.t().shape != shape:
        return False
    if is_freed(out) or (out.data_ptr() % 16 == 0) is not launch.out_aligned:
        return False
    return not any(overlaps(out, tensor) for tensor in tensors)
