"""States of random contents, made without quantizing anything, and a comparison that never waits."""

from collections.abc import Callable
from types import SimpleNamespace

import torch


def state_of(
    shape,
    codes: Callable,
    floats: Callable,
    dtype: torch.dtype,
    nested: bool = True,
    quant_type: str = "nf4",
    blocksize: int = 64,
    blocksize2: int = 256,
) -> tuple[torch.Tensor, SimpleNamespace]:
    """(packed weight, state) for a result of `shape` and `dtype`, of exactly the bytes that it needs.

    codes(count) returns uint8 and floats(count) fp32 tensors of that many elements: the contents, and the
    device. The weight is (bytes, 1); the state has the attributes of a bitsandbytes QuantState.
    """
    shape = torch.Size(shape)
    blocks = -(-shape.numel() // blocksize)
    common = {"shape": shape, "dtype": dtype, "quant_type": quant_type, "blocksize": blocksize}
    state = SimpleNamespace(**common, nested=nested, state2=None, offset=None)
    packed = codes((shape.numel() + 1) // 2).view(-1, 1)
    if not nested:
        state.absmax = floats(blocks)
        return packed, state
    state.absmax, state.offset = codes(blocks), floats(1)[0]
    state.state2 = SimpleNamespace(
        absmax=floats(-(-blocks // blocksize2)), code=floats(256), blocksize=blocksize2, dtype=torch.float32
    )
    return packed, state


def random_contents(seed: int, made_on: str, device: str) -> tuple[Callable, Callable]:
    """`codes` and `floats` for state_of: random, each tensor in an allocation of its own on `device`."""
    generator = torch.Generator(made_on).manual_seed(seed)
    same = {"generator": generator, "device": made_on}
    return (
        lambda count: torch.randint(256, (count,), dtype=torch.uint8, **same).to(device),
        lambda count: (torch.rand(count, **same) + 0.1).to(device),
    )


def mismatches(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How many elements differ in their bits (NaN equals NaN), on the device: nothing waits for it.

    Raises AssertionError where shapes or dtypes differ.
    """
    assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{x.shape} {x.dtype}, expected {y.shape} {y.dtype}"
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    differ = x.contiguous().view(bits) != y.contiguous().view(bits)
    return (differ & ~(x.isnan() & y.isnan())).sum()
