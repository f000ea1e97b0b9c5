"""Random quantized weights without bitsandbytes, and the layouts that bitsandbytes and its users produce."""

import functools
import math
from types import SimpleNamespace

import torch

from helpers.nf4.reference import default_device

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, 6e4, 1e30, 3e38)
SPECIAL += (1e-38, 3e-39, 1.2e-38, 2e-38, 1e-40, 5e-45, -3e-39)


def random_state(
    shape, dtype, nested=True, quant_type="nf4", blocksize=64, blocksize2=256, device=None, seed=0, draw=None
):
    """Return (packed weight, state) with random contents, of exactly the bytes that `shape` needs.

    draw: optional (codes, floats), functions of a count that return the uint8 and fp32 contents.
    """
    device, shape = device or default_device(), torch.Size(shape)
    how = dict(generator=torch.Generator(device).manual_seed(seed), device=device)
    codes, floats = draw or (
        lambda count: torch.randint(256, (count,), dtype=torch.uint8, **how),
        lambda count: torch.rand(count, dtype=torch.float32, **how) + 0.1,
    )
    blocks = -(-shape.numel() // blocksize)
    weight = codes(-(-shape.numel() // 2)).view(-1, 1)
    state = SimpleNamespace(
        shape=shape,
        dtype=dtype,
        quant_type=quant_type,
        blocksize=blocksize,
        nested=nested,
        absmax=codes(blocks) if nested else floats(blocks),
        state2=None,
        offset=None,
    )
    if nested:
        state.state2 = SimpleNamespace(
            absmax=floats(-(-blocks // blocksize2)),
            code=floats(256),
            blocksize=blocksize2,
            dtype=torch.float32,
        )
        state.offset = floats(1)[0]
    return weight, state


def odd_states(device=None):
    """Return {name: (weight, state)} of every layout that bitsandbytes, checkpoints, FSDP, and views produce.
    The kernel refuses the two that are not contiguous."""
    device = device or default_device()
    base = ((320, 64), torch.bfloat16)
    make = functools.partial(random_state, device=device)
    states = {str(dtype): make(base[0], dtype) for dtype in DTYPES}
    states |= {f"{kind} flat": make(*base, nested=False, quant_type=kind) for kind in ("nf4", "fp4")}
    states |= {"fp4 nested": make(*base, quant_type="fp4")}
    states |= {f"blocksize 2**{k}": make(*base, blocksize=1 << k) for k in (5, 7, 8, 9, 10, 11, 12, 13, 40)}
    states |= {f"blocksize2 2**{k}": make(*base, blocksize2=1 << k) for k in (0, 6, 7, 9, 31, 40)}
    shapes = ((0, 64), (1, 1), (3, 1), (83, 99), (20480,), (5, 64, 64))
    states |= {f"shape {shape}": make(shape, base[1]) for shape in shapes}
    weight, state = make(*base)
    views = {f"stored as {dtype}": weight.view(-1).view(dtype).view(-1, 1) for dtype in DTYPES}
    views |= {"W.t()": weight.t(), "odd address": torch.cat([weight[:1], weight])[1:]}
    states |= {name: (view, state) for name, view in views.items()}
    states["weight not contiguous"] = torch.cat([weight, weight + 1], 1)[:, :1], state

    def with_state(name, flat=False, **fields):
        weight, state = make(*base, nested=not flat)
        for field, change in fields.items():
            setattr(state, field, change(getattr(state, field, None)))
        states[name] = weight, state

    special = torch.tensor(SPECIAL, device=device)
    with_state("special scales", flat=True, absmax=lambda x: torch.cat([special, x[len(special) :]]))
    with_state("no code", code=lambda x: None)
    with_state("shape of a list", shape=list)
    with_state("offset of shape (1,)", offset=lambda x: x.view(1))
    with_state("offset in bf16", offset=lambda x: x.bfloat16())  # of Unsloth's prequantized models
    with_state("absmax not contiguous", absmax=lambda x: torch.stack([x, 255 - x], 1)[:, 0])
    return states
