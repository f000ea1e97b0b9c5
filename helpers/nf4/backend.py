"""Can the kernel run here, and which code decodes when a user asks: NF4_BACKEND=triton|torch|auto.

`triton` is the kernel, `torch` the same bits in plain PyTorch (any device, no compiler), `auto` (the default)
the kernel wherever it runs and a small weight has the right bits.
"""

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import kernel
from .call_sites import State

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

NAMES = ("triton", "torch", "auto")
MIN_CAPABILITY = (7, 5)  # Tesla T4: the oldest card the kernel is compiled and checked for
FP32 = torch.float32
_TINY = torch.finfo(FP32).tiny
log = logging.getLogger(__name__)


def cannot_run() -> str | None:
    """Why the kernel cannot run on the current device and what to do, in one line; None where it can."""
    if torch.version.hip is not None:
        return f"AMD GPU (ROCm {torch.version.hip}): the kernel is not checked there; use an NVIDIA GPU."
    if kernel.INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return (
            "No CUDA GPU that torch can use: run on one (nvidia-smi, and a torch built with CUDA). "
            "To try it without, slowly, set TRITON_INTERPRET=1 before Python starts."
        )
    have = torch.cuda.get_device_capability()
    if have < MIN_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} is sm_{have[0]}{have[1]}: the kernel needs sm_75 (a Tesla T4) or newer."
    return None


def dequantize(
    weight: torch.nn.Module | torch.Tensor,
    quant_state: "QuantState | None" = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode a 4-bit weight (nf4 or fp4, nested or flat) with bitsandbytes' bits.

    weight: a bitsandbytes Linear4bit; or its Params4bit; or packed codes (two a byte, high nibble first, any
        storage dtype; n / 2 bytes) with their `quant_state`.
    out: optional contiguous tensor of the result's shape, dtype and device, which is filled and returned.
    Returns a tensor of `quant_state.shape` in `quant_state.dtype` (fp16, bf16 or fp32) on the weight's
    device; transposed if `weight.shape[0] == 1`, as bitsandbytes does.
    Raises UnsupportedState (a ValueError) for a weight or state that cannot be decoded, with what to do,
    and ValueError for an unknown NF4_BACKEND.
    """
    if quant_state is None:
        layer, weight = weight, getattr(weight, "weight", weight)
        quant_state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    dtype = getattr(quant_state, "dtype", torch.float16)
    return paths()[choose(weight.device, dtype)](weight, quant_state, out)


def paths() -> dict[str, Callable]:
    """Both ways to decode, each (weight, quant_state, out=None) -> tensor."""
    return {"triton": kernel._your_dequantize_nf4, "torch": in_torch}


def choose(device: torch.device, dtype: torch.dtype) -> str:
    """The path that decodes to this dtype on this device. Raises ValueError for an unknown NF4_BACKEND."""
    name = os.environ.get("NF4_BACKEND", "").strip().lower() or "auto"
    if name not in NAMES:
        raise ValueError(f"NF4_BACKEND={name!r}: expected one of {', '.join(NAMES)}")
    return _auto(device, dtype) if name == "auto" else name


@functools.cache
def _auto(device: torch.device, dtype: torch.dtype) -> str:
    problem = _problem(device, dtype)
    if problem:
        log.warning("NF4_BACKEND=auto on %s, %s: torch (%s)", device, dtype, problem)
    return "torch" if problem else "triton"


def _problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot decode to this dtype on this device; None where it can."""
    if device.type == "cpu" and not kernel.INTERPRETED:
        return "the weight is on the CPU"
    if problem := cannot_run():
        return problem
    with device:
        packed = (torch.arange(2048) % 256).to(torch.uint8).view(-1, 1)
        absmax, offset = torch.arange(0, 256, 4, dtype=torch.uint8), torch.tensor(0.05)
        absmax2, code2 = torch.full((1,), 0.7, dtype=FP32), torch.linspace(-1, 1, 256, dtype=FP32)
    second = State(absmax=absmax2, code=code2, blocksize=256, dtype=FP32)
    fields = dict(shape=torch.Size((64, 64)), dtype=dtype, quant_type="nf4", blocksize=64)
    state = State(fields, nested=True, absmax=absmax, offset=offset, state2=second)
    try:
        results = [decode(packed, state) for decode in paths().values()]
    except Exception as error:  # whatever stops the kernel here, the other path still works
        return f"the kernel cannot run here: {type(error).__name__}: {error}"
    return None if torch.equal(*results) else "the kernel's bits are wrong here: please report it"


def in_torch(weight: torch.Tensor, quant_state, out: torch.Tensor | None = None) -> torch.Tensor:
    """`dequantize` in plain PyTorch, bit for bit: two roundings a scale and one more for its product with the
    code; subnormal numbers become zeros on CUDA, as in bitsandbytes' CUDA build, and stay on a CPU."""
    state, known = quant_state, getattr(quant_state, "quant_type", None) in ("nf4", "fp4")
    if not known or getattr(state, "packing_format_for_cpu", None):
        raise kernel.UnsupportedState(
            "expected the packed 4-bit weight of a bitsandbytes Linear4bit (nf4 or fp4) and its quant_state"
        )
    n, multiply = math.prod(state.shape), _multiply_flushing if weight.is_cuda else torch.mul
    packed, blocks = weight.detach().contiguous().view(-1).view(torch.uint8), -(-n // state.blocksize)
    scale = state.absmax.reshape(-1)[:blocks]
    if state.nested:
        scale2 = state.state2.absmax.repeat_interleave(state.state2.blocksize)[:blocks]
        scale = multiply(state.state2.code[scale.int()], scale2) + state.offset
    if packed.numel() * 2 < n or scale.numel() < blocks:
        raise kernel.UnsupportedState(
            f"the weight holds {packed.numel()} bytes and the state {scale.numel()} scales, expected "
            f"{(n + 1) // 2} and {blocks} for the shape {tuple(state.shape)}: reload the layer"
        )
    table = kernel.codebooks(packed.device)[16 * (state.quant_type == "fp4") :][:16]
    codes = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)[packed.int()].view(-1)
    codes = torch.nn.functional.pad(codes[:n], (0, blocks * state.blocksize - n)).view(blocks, -1)
    result = multiply(codes, scale.float()[:, None]).view(-1)[:n].to(state.dtype).view(state.shape)
    result = result if out is None else out.copy_(result)
    return result.t() if weight.shape[0] == 1 else result


def _multiply_flushing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b for |a| <= 1 as the GPU's `mul.ftz`: a subnormal factor or product is a zero of its sign."""
    a, b = (torch.where(x.abs() < _TINY, torch.copysign(torch.zeros_like(x), x), x) for x in (a, b))
    product = a * b
    tiny = (a * 2.0**64 * b).abs() < _TINY * 2.0**64  # rounded to 24 bits before it is compared
    return torch.where(tiny, torch.copysign(torch.zeros_like(product), product), product)
