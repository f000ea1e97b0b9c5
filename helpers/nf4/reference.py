"""Exact 4-bit dequantization in plain PyTorch: the oracle of all tests and the fallback without Triton.

The first three sections are cells of the notebook and need only torch. `dequantize_layer`, which the package
exports as `dequantize`, picks the kernel or plain PyTorch.
"""

# %% id="reference-dequantize"
import torch

# bitsandbytes looks codes up in these tables, not in quant_state.code.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_VALUES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
FP4_VALUES += tuple(-x for x in FP4_VALUES)  # code 8 is -0.0, as in bitsandbytes' CUDA kernels


def dequantize(weight, quant_state, flush_subnormal=None):
    """Return the dequantized weight, bit-identical to bitsandbytes, on the device of `weight`.

        scale[k] = fp32(code2[absmax[k]] * absmax2[k // blocksize2]) + offset    nested: rounded twice, no FMA
        out[i]   = dtype(fp32(table[code[i]] * scale[i // blocksize]))           flat: scale is absmax

    weight: 4-bit codes in any dtype, two a byte, high nibble first. If weight.shape[0] is 1, the result is
    transposed.
    quant_state: bitsandbytes' QuantState, nf4 or fp4, nested or flat. It gives shape and dtype of the result.
    flush_subnormal: treat subnormal fp32 numbers as zeros. Default: only on a GPU, as bitsandbytes does.
    Raises ValueError if a tensor is too short.
    """
    flush = weight.is_cuda if flush_subnormal is None else flush_subnormal
    multiply = multiply_flushing if flush else torch.mul
    state, shape = quant_state, torch.Size(quant_state.shape)
    blocks = -(-shape.numel() // state.blocksize)
    scale = first(state.absmax, blocks, "absmax")
    if state.nested:
        code2 = state.state2.code[scale.int()]
        absmax2 = first(state.state2.absmax, -(-blocks // state.state2.blocksize), "state2.absmax")
        scale = by_block(multiply, code2, absmax2, state.state2.blocksize)
        scale += state.offset
    packed = weight.detach().contiguous().view(-1).view(torch.uint8)
    packed = first(packed, -(-shape.numel() // 2), "weight").int()
    values = FP4_VALUES if state.quant_type == "fp4" else NF4_VALUES
    table = torch.tensor(values, dtype=torch.float32, device=weight.device)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # of each possible byte
    codes = pairs[packed].view(-1)[: shape.numel()]
    out = by_block(multiply, codes, scale.float(), state.blocksize).to(state.dtype).view(shape)
    return out.t() if weight.shape[0] == 1 else out


def first(tensor, count, name):
    """Return the first `count` elements of `tensor`, flattened. Raises ValueError if it has fewer."""
    if tensor.numel() < count:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {count} for quant_state.shape")
    return tensor.reshape(-1)[:count]


def by_block(multiply, values, scale, blocksize):
    """Return values[i] * scale[i // blocksize] for each i, without a scale per element in memory."""
    n = values.numel()
    blocksize = min(blocksize, n) or 1
    blocks = torch.nn.functional.pad(values, (0, -n % blocksize)).view(-1, blocksize)
    return multiply(blocks, scale[:, None]).view(-1)[:n]


def multiply_flushing(a, b):
    """Return a * b for |a| <= 1 as the GPU's `mul.rn.ftz.f32` does: subnormal factors and products become
    zeros of their sign. The GPU rounds to 24 bits before it looks; 2**64 times as large, they fit."""
    smallest = torch.finfo(torch.float32).tiny

    def flush(x, subnormal):
        return torch.where(subnormal, torch.copysign(torch.zeros_like(x), x), x)

    a, b = flush(a, a.abs() < smallest), flush(b, b.abs() < smallest)
    return flush(a * b, (a * 2.0**64 * b).abs() < smallest * 2.0**64)


# %% id="reference-compare"
def different(x: torch.Tensor, y: torch.Tensor) -> int:
    """Count the elements whose bits differ; NaN equals NaN. Raises ValueError if shape or dtype differ."""
    return int(differences(x, y))


def differences(x, y):
    """Return that count as a tensor on the device, without waiting for it."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"cannot compare {x.dtype} {tuple(x.shape)} with {y.dtype} {tuple(y.shape)}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    differ = x.contiguous().view(bits) != y.contiguous().view(bits)
    return (differ & ~(x.isnan() & y.isnan())).sum()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit agree; NaN equals NaN."""
    return x.dtype == y.dtype and x.shape == y.shape and different(x, y) == 0


# %% id="reference-layers"
import os  # noqa: E402


def default_device():
    """Return "cuda" if the kernel runs on a GPU, "cpu" if Triton's interpreter runs it."""
    on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    return "cuda" if on_gpu else "cpu"


def quantized_layer(
    in_features, out_features, dtype, nested=True, quant_type="nf4", blocksize=64, device=None, seed=3407
):
    """Return a bitsandbytes Linear4bit: its (out, in) weight is standard normal, its output dtype `dtype`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    device = device or default_device()
    how = dict(compress_statistics=nested, quant_type=quant_type)
    layer = Linear4bit(in_features, out_features, False, dtype, device="meta", **how)
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, device=device)
    layer.weight = Params4bit(weight, requires_grad=False, blocksize=blocksize, **how)
    layer.to(device).weight.quant_state.dtype = dtype
    return layer


def every_code(dtype, device=None):
    """Return a layer with all 256 bytes under each of the 256 absmax codes: 131,072 elements."""
    layer = quantized_layer(64, 2048, dtype, device=device)
    device = layer.weight.device
    layer.weight.data.copy_(torch.arange(256, device=device).repeat(256).view(-1, 1))
    layer.weight.quant_state.absmax.copy_(torch.arange(2048, device=device) // 8)
    return layer


# %% tags=["module-only"]
import functools  # noqa: E402
import logging  # noqa: E402
import math  # noqa: E402
from types import SimpleNamespace  # noqa: E402

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
    fields = dict(shape=shape, dtype=dtype, quant_type=quant_type, blocksize=blocksize, nested=nested)
    weight, absmax = codes(-(-shape.numel() // 2)).view(-1, 1), (codes if nested else floats)(blocks)
    state = SimpleNamespace(**fields, absmax=absmax, state2=None, offset=None)
    if nested:
        second = dict(absmax=floats(-(-blocks // blocksize2)), code=floats(256), blocksize=blocksize2)
        state.state2, state.offset = SimpleNamespace(dtype=torch.float32, **second), floats(1)[0]
    return weight, state


def odd_states(device=None):
    """Return {name: (weight, state)} of every layout that bitsandbytes, checkpoints, FSDP and views produce.
    All are exact, but for the two that are not contiguous: the kernel refuses those."""
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


# Which code dequantizes: NF4_BACKEND=triton|torch|auto.
BACKENDS = ("triton", "torch", "auto")
log = logging.getLogger(__name__)


def dequantize_layer(weight, quant_state=None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a dequantized 4-bit weight (nf4 or fp4, nested or flat), bit-identical to bitsandbytes.

    weight: a bitsandbytes Linear4bit, or its Params4bit, or packed codes (two a byte, high nibble first, any
    storage dtype) with their `quant_state`.
    out: optional contiguous tensor of quant_state.shape and quant_state.dtype to fill.
    NF4_BACKEND picks the code: "triton" the kernel, "torch" plain PyTorch, "auto" (the default) the kernel
    if it runs on this device and dequantizes a small weight right, else PyTorch; the reason is logged.
    Returns a tensor of `quant_state.shape` in `quant_state.dtype`, transposed if weight.shape[0] is 1.
    Raises UnsupportedState (a ValueError) for malformed input, ValueError for an unknown NF4_BACKEND.
    """
    if quant_state is None:
        layer, weight = weight, getattr(weight, "weight", weight)
        quant_state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    device = getattr(weight, "device", torch.device("cpu"))
    return backends()[choose(device, getattr(quant_state, "dtype", None))](weight, quant_state, out)


def backends() -> dict:
    """Return both ways to dequantize, each (weight, quant_state, out=None) -> tensor."""
    return {"triton": _launch()._your_dequantize_nf4, "torch": dequantize_in_torch}


def choose(device: torch.device, dtype: torch.dtype) -> str:
    """Return "triton" or "torch". Raises ValueError for an unknown NF4_BACKEND."""
    name = os.environ.get("NF4_BACKEND", "").strip().lower() or "auto"
    if name not in BACKENDS:
        raise ValueError(f"NF4_BACKEND={name!r}: expected one of {', '.join(BACKENDS)}")
    return _auto(device, dtype) if name == "auto" else name


@functools.cache  # a torch.OutOfMemoryError passes through and is not remembered
def _auto(device, dtype):
    problem = why_not_triton(device, dtype)
    if problem:
        log.warning("NF4_BACKEND=auto on %s, %s: torch (%s)", device, dtype, problem)
    return "torch" if problem else "triton"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot dequantize to `dtype` on `device`, None if it can."""
    if device.type == "cpu" and not _launch().INTERPRETED:
        return "the weight is on the CPU"
    if problem := cannot_run():
        return problem
    state = random_state((64, 64), dtype if dtype in DTYPES else DTYPES[0], device=device)
    try:
        triton, exact = (run(*state) for run in backends().values())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever stops the kernel here, PyTorch still works
        return f"the kernel cannot run here: {type(error).__name__}: {error}"
    return None if same_bits(triton, exact) else "the kernel is not bit-exact here: please report it"


def cannot_run() -> str | None:
    """Return why the kernel cannot run on the current device and what to do, None if it can."""
    if torch.version.hip is not None:
        return f"AMD GPU (ROCm {torch.version.hip}): the kernel was never run there; use an NVIDIA GPU."
    from . import environment

    return None if _launch().INTERPRETED else environment.no_gpu() or environment.old_gpu()


def dequantize_in_torch(weight, quant_state, out=None):
    """Return what the kernel returns, by `dequantize` above; malformed input raises the kernel's errors."""
    launch = _launch()
    launch.check_state(weight, quant_state, any_device=True)
    result = dequantize(weight, quant_state)
    if out is None:
        return result
    if problem := launch._out_problem(out, weight, quant_state.shape, quant_state.dtype):
        raise launch.UnsupportedState(problem)
    transposed = weight.shape[0] == 1
    out.copy_(result.t() if transposed else result)
    return out.t() if transposed else out


def _launch():
    from . import launch

    return launch
