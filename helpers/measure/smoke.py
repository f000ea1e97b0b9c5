"""The smallest Triton kernel that proves something: a masked load, arithmetic, a masked store."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double_plus_one_kernel(
    x_ptr,  # int32 (n,)
    out_ptr,  # int32 (n,)
    n,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n)
    tl.store(out_ptr + index, x * 2 + 1, mask=index < n)


def works(device: str) -> bool:
    """Whether 1000 integers come back doubled plus one and the element after them is left alone."""
    n = 1000
    x = torch.arange(n, dtype=torch.int32, device=device)
    out = torch.full((n + 1,), -7, dtype=torch.int32, device=device)
    _double_plus_one_kernel[(triton.cdiv(n, 128),)](x, out, n, BLOCK=128)
    return torch.equal(out[:n], x * 2 + 1) and out[n].item() == -7
