"""Random quantized weights without bitsandbytes, and the layouts that bitsandbytes and its users produce."""

import copy
import math
import operator
from types import SimpleNamespace

import torch

from helpers.puzzle.layers import DEVICE
from nf4_triton.core import reference, settings
from nf4_triton.core.checks import OFFSETS
from nf4_triton.core.state import read_state

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, 6e4, 1e30, 3e38)
SPECIAL += (1e-38, 3e-39, 1.2e-38, 2e-38, 1e-40, 5e-45, -3e-39)
FP4 = [x / 192 for x in (0, 1, 128, 192, 64, 96, 32, 48)]
TABLES = {  # typed again: the oracle must not share a mistake with the package
    "nf4": [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0]
    + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1],
    "fp4": [*FP4, *(-x for x in FP4)],
}
WAYS = {  # arguments of settings.force
    "own": {"tile_rows": 32},
    "t4": settings.T4,
    "portable": {"asm": False},
    "integer bf16": {"asm": False, "sm75": True},
    "large tile": {"tile_rows": 128, "num_warps": 4},
    "no hints, small tile": {"hints": False, "tile_rows": 16, "num_warps": 1},
}
SECOND = ("absmax", "state2.code", "state2.absmax", "offset")


def exact(result, weight, state):
    """Return whether a result is bit-identical to the oracle's."""
    return reference.same_bits(result, oracle(weight, state))


def oracle(weight, state, flush_subnormal=None):
    """Return a weight dequantized in plain PyTorch, all at once, with a scale for each element."""
    (_, absmax, *second), layout = read_state(weight, state)
    shape, dtype, quant_type, blocksize, blocksize2, nested = layout
    flush = weight.is_cuda if flush_subnormal is None else flush_subnormal
    multiply = reference.multiply_flushing if flush else torch.mul
    n = math.prod(shape)
    blocks = -(-n // blocksize)
    scale = absmax[:blocks]
    if nested:
        code2, absmax2, offset = second
        absmax2 = absmax2.repeat_interleave(min(blocksize2, blocks))[:blocks]
        scale = multiply(code2[scale.int()], absmax2) + offset
    scale = scale.float().repeat_interleave(min(blocksize, n))[:n]
    table = torch.tensor(TABLES[quant_type], dtype=torch.float32, device=weight.device)
    byte = weight.detach().contiguous().view(-1).view(torch.uint8).int()
    code = torch.stack([byte >> 4, byte & 15], dim=1).view(-1)[:n]
    result = multiply(table[code], scale).to(dtype).view(shape)
    return result.t() if weight.shape[0] == 1 else result


def right(result, layer):
    """Return whether a result is bit-identical to a layer's weight."""
    return exact(result, layer.weight, layer.weight.quant_state)


def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
    """Stand in for Unsloth's function where Unsloth is not installed."""
    if not hasattr(quant_state, "absmax"):
        return "another format"
    result = oracle(W, quant_state)
    return result if out is None else out.copy_(result)


def strided(x):
    """Return the same values, not contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def moved(x, skip):
    """Return the same values in other memory, `skip` elements off alignment."""
    flat = x.reshape(-1)
    return torch.cat([flat[:1].repeat(skip), flat])[skip:].view(x.shape)


def freed(x):
    """Return a copy without memory, as FSDP leaves one: the address is the offset in bytes."""
    x = moved(x, 16)
    x.untyped_storage().resize_(0)
    return x


def noise(x):
    """Return other contents of the same shape and dtype."""
    return torch.randint_like(x, 256) if x.dtype == torch.uint8 else torch.rand_like(x) + 0.25


def get(layer, name):
    """Return "weight" or a field of a layer's state, such as "state2.absmax"."""
    holder = layer if name == "weight" else layer.weight.quant_state
    return operator.attrgetter(name)(holder)


def replace(layer, name, change):
    """Replace the weight's data, or a field of the state, by change(it)."""
    new = change(get(layer, name))
    if name == "weight":  # a Parameter takes no plain tensor
        layer.weight.data = new.data
    elif name.startswith("state2."):
        setattr(layer.weight.quant_state.state2, name.removeprefix("state2."), new)
    else:
        setattr(layer.weight.quant_state, name, new)


# Changes between two calls, besides those of contents.
CHANGES = [
    ("absmax", lambda x: torch.cat([x, x])),
    ("state2.absmax", lambda x: torch.cat([x, x])),
    ("offset", lambda x: x.reshape(()).to(OFFSETS[OFFSETS.index(x.dtype) - 1])),
    ("offset", lambda x: x.float().reshape(1)),
    ("dtype", lambda x: DTYPES[DTYPES.index(x) - 1]),
    ("quant_type", lambda x: "fp4" if x == "nf4" else "nf4"),
    ("state2.blocksize", lambda x: 2 * x),
    ("blocksize", lambda x: 2 * x),
    ("blocksize", lambda x: 2 * x),  # Dynamo then makes a symbol of it
    ("shape", list),
    ("shape", lambda x: torch.Size(x[::-1])),
    ("shape", lambda x: torch.Size((1, math.prod(x)))),
]


def random_state(
    shape, dtype, nested=True, quant_type="nf4", blocksize=64, blocksize2=256, device=None, seed=0
):
    """Return (packed weight, state) with random contents, of exactly the bytes that `shape` needs."""
    device, shape = device or DEVICE, torch.Size(shape)
    how = dict(generator=torch.Generator(device).manual_seed(seed), device=device)

    def codes(count):
        return torch.randint(256, (count,), dtype=torch.uint8, **how)

    def floats(count):
        return torch.rand(count, dtype=torch.float32, **how) + 0.1

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
            nested=False,
        )
        state.offset = floats(1)[0]
    return weight, state


def every_byte(dtype, **options):
    """256 bytes x 256 absmax codes: 2048 blocks of 32 bytes, block k with absmax code k // 8."""
    weight, state = random_state((2048, 64), dtype, **options)
    weight.copy_(torch.arange(256).repeat(256).view(-1, 1))
    state.absmax.copy_(torch.arange(2048) // 8)
    return weight, state


def subnormal_scales(dtype):
    """Yield (weight, state) of nested scales and offsets that are subnormal."""
    weight, state = random_state((512, 64), dtype)
    state.absmax.copy_(torch.arange(512) // 2)
    state.state2.absmax.copy_(torch.tensor([2e-38, 5e-39]))
    for offset in (0.0, 1e-38, -1e-39):
        state.offset.fill_(offset)
        yield weight, state


def part(weight, state, start, shape):
    """Return (weight, state) of the elements that start at `start`, within one group of 256 blocks."""
    few = copy.copy(state)
    few.shape = shape
    few.absmax = state.absmax[start // 64 :]
    few.state2 = copy.copy(state.state2)
    few.state2.absmax = state.state2.absmax[start // 64 // 256 :]
    return weight[start // 2 :][: math.prod(shape) // 2], few


def odd_states(device=None):
    """Return {name: (weight, state)}: each layout that bitsandbytes, checkpoints, and views produce."""
    states = {}

    def add(name, shape=(320, 64), dtype=torch.bfloat16, **options):
        weight, state = states[name] = random_state(shape, dtype, device=device, **options)
        return weight, state

    for dtype in DTYPES:
        add(str(dtype), dtype=dtype)
    for quant_type in ("nf4", "fp4"):
        add(f"{quant_type} flat", nested=False, quant_type=quant_type)
    add("fp4 nested", quant_type="fp4")
    for k in (3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 40):
        add(f"blocksize 2**{k}", blocksize=1 << k)
    for k in (0, 6, 7, 9, 31, 40):
        add(f"blocksize2 2**{k}", blocksize2=1 << k)
    for shape in ((0, 64), (1, 1), (33, 70), (83, 99), (20480,), (5, 64, 64)):
        add(f"shape {shape}", shape)

    weight, state = add("usual")
    for dtype in DTYPES:
        states[f"stored as {dtype}"] = weight.view(-1).view(dtype).view(-1, 1), state
    states["W.t()"] = weight.t(), state
    states["odd address"] = moved(weight, 1), state

    _, state = add("no code")
    state.code = None
    _, state = add("shape of a list")
    state.shape = list(state.shape)
    _, state = add("offset of shape (1,)")
    state.offset = state.offset.view(1)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):  # loaded under this default dtype
        _, state = add(f"offset in {dtype}")
        state.offset = state.offset.to(dtype)
    return states
