"""The puzzle's operator, which torch.compile, torch.export, and torch.func see instead of a launch.

`# %%`: a notebook cell.
"""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from .kernel import _your_dequantize_nf4_kernel
from .launch import fits, launch_by_triton, not_the_puzzles, prepare
from .private import address_of, is_fake
from .settings import INTERPRETED

# %% The operator for torch.compile, export, and torch.func id="operator" folded=true
def _dequantize(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    code2: torch.Tensor,
    absmax2: torch.Tensor,
    offset: torch.Tensor,
    shape: list[int],
    dtype: torch.dtype,
    blocksize: int,
    blocksize2: int,
    cache_key: str,
) -> torch.Tensor:
    """Dequantize double-quantized NF4. Real tensors are launched through Triton. cache_key is not read: torch
    caches compiled code by it. An exported program picks its settings on the machine that loads it."""
    if address_of(weight) % 16:
        weight = weight.clone()
    tensors = weight, absmax, code2, absmax2, offset
    layout = tuple(shape), dtype, "nf4", blocksize, blocksize2, True
    if not fits(tensors, layout):
        raise not_the_puzzles()
    result = torch.empty(shape, dtype=dtype, device=weight.device)
    grid, pointers, after, options = prepare(tensors, layout, result)
    if not is_fake(weight):
        launch_by_triton(_your_dequantize_nf4_kernel, grid, pointers, after, options)
    elif not INTERPRETED:
        # wrap_triton takes no enable_fp_fusion. The bits are the same: no product feeds a sum directly.
        kernel = torch.library.wrap_triton(_your_dequantize_nf4_kernel)
        kernel[(grid,)](*pointers, *after, num_warps=options["num_warps"])
    return result


def register(name, function):
    """Register an operator. Inductor inlines the kernel of a triton_op. Triton's interpreter cannot be
    traced, so with it the operator is opaque."""
    register_as = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    registered = register_as(name, function, mutates_args=())
    if INTERPRETED:
        registered.register_fake(function)
    return registered


dequantize_operator = register("nf4_triton::dequantize", _dequantize)
