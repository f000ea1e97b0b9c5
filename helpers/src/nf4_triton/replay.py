"""Cached launches: checked and compiled once, replayed on other tensors of the same layout.

`keep` takes an ordinary launch, launch.py replays it. Without this file every call is an ordinary
launch: the same results, slower. The section is a notebook cell.
"""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
from .kernel import INTERPRETED, TRITON
from .private import GUARDED, TensorGuards, dispatch_modes
from .settings import cached
from .state import extent

# %% Keep a launch, and replay it id="replay" part="replay" folded=true tags=["launch"]
import dataclasses
import math
from collections.abc import Callable

import torch
import triton

# Replays call what Triton compiled, past Triton's own launch code: checked for these versions.
CAN_REPLAY = (GUARDED and TensorGuards is not None and not INTERPRETED
              and (3, 4) <= TRITON <= (3, 9) and torch.version.hip is None)
# Saves 1.8 us (0.8 on a fast host): skips the Python part of Triton's launcher.
SKIP_PYTHON_LAUNCHER = TRITON in ((3, 5), (3, 6))
hooks = triton.knobs.runtime  # public: profilers add launch hooks here


@dataclasses.dataclass(slots=True)
class CachedLaunch:
    """A launch that was checked and compiled."""

    guards: Callable  # compares tensors with those that were checked, in one call into torch
    device: int  # index of the GPU
    aligned: bool  # where the kernel starts to read the weight is a multiple of 16
    out_aligned: bool
    run: Callable  # Triton's launcher: run(grid, 1, 1, stream, *before, *kernel arguments)
    before: tuple  # what the launcher takes before the kernel's own arguments
    constexprs: tuple
    # Programs; bytes before the first code; n, first, slices, and constexprs; the result's layout.
    whole: tuple
    shape: tuple  # of the weight
    tile: int  # elements of a program
    owner: object  # Triton's CompiledKernel, which owns what `before` points to

    def part(self, selection):
        """Return `whole` for another selection of slices."""
        *_, (_, strides, dtype) = self.whole
        numbers, grid = extent(self.shape, selection, self.tile)
        _, first, _ = numbers
        layout = (selection.number, *self.shape[1:]), strides, dtype
        return grid, first // 2, (*numbers, *self.constexprs), layout


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


def key_with(spec, tensors, out, selection):
    """Return the key of a call with `out` or a selection, and the tensors that its guards compare,
    `out` last."""
    ids = None if selection is None else selection.ids
    if ids is not None:
        tensors = (*tensors, ids)
    if out is not None:
        tensors = (*tensors, out)
    return (spec, out is None, selection is None, ids is None), tensors


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
    if out is not None or selection is not None:
        key, guarded = key_with(key, guarded, out, selection)
        # Another call selects another number of slices: no guard on the first size of ids and out,
        # nor on its stride, which means nothing for one slice. replay asks whether they are contiguous.
        for tensor in guarded[len(sizes):]:
            size = list(tensor.shape)
            sizes.append([None, *size[1:]] if selection else size)
    strides = [list(tensor.stride()) for tensor in guarded]
    if selection is not None:
        for stride in strides[len(packed.tensors):]:
            stride[0] = None
    guards = TensorGuards(*guarded, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    if not guards.check(*guarded):  # one tensor given twice
        return
    _, first, _ = ordinary.numbers
    launch = CachedLaunch(
        guards=guards.check,
        device=result.get_device(),
        aligned=ordinary.aligned,
        out_aligned=ordinary.out_aligned,
        run=run,
        before=(compiled.function, *before),
        constexprs=ordinary.constexprs,
        whole=(ordinary.grid, first // 2, (*ordinary.numbers, *ordinary.constexprs),
               (tuple(result.shape), result.stride(), result.dtype)),
        shape=tuple(packed.shape),
        tile=ordinary.tile,
        owner=compiled)
    if len(cached) >= 1024:  # a model has few shapes, a test may have many
        cached.clear()
    # Guards also depend on autocast and inference mode: a state may need several.
    cached[key] = [launch, *cached.get(key, ())][:32]


def can_write(out, tensors, launch, layout):
    """Return whether `out` has the result's size and memory of its own, aligned as it was for the
    launch. If so, tell autograd that it changes."""
    shape, *_ = layout
    start, size = out.data_ptr(), out.nbytes
    freed = start == out.storage_offset() * out.itemsize
    if freed or out.numel() != math.prod(shape) or (start % 16 == 0) is not launch.out_aligned:
        return False
    for tensor in tensors:
        first = tensor.data_ptr()
        if start < first + tensor.nbytes and first < start + size:
            return False
    torch.autograd.graph.increment_version(out)
    return True
