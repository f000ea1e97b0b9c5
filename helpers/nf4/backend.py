"""Can the kernel run here, and which code decodes when a user asks: NF4_BACKEND=triton|torch|auto.

`triton` is the kernel, `torch` the same bits in plain PyTorch (any device, no compiler), `auto` (the default)
measures both once a device and dtype and says what it chose.
"""

import functools
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from . import kernel

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

NAMES = ("triton", "torch", "auto")
MIN_CAPABILITY = (7, 5)  # Tesla T4: the oldest card the kernel is compiled and checked for
# Elements of a small and a mid-size weight that `auto` times; Triton's interpreter gets toys.
SIZES = {"cuda": (1 << 20, 1 << 24), "cpu": (1 << 12, 1 << 15)}
_TINY = torch.finfo(torch.float32).tiny
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What decodes, why, and microseconds a call by number of elements and name, where measured."""

    name: str
    reason: str
    measured: dict[int, dict[str, float]] = field(default_factory=dict)


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
        if isinstance(weight, torch.nn.Module):
            layer, weight = weight, weight.weight
            quant_state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
        else:
            quant_state = getattr(weight, "quant_state", None)
    dtype = getattr(quant_state, "dtype", torch.float16)
    return paths()[choose(weight.device, dtype).name](weight, quant_state, out)


def paths() -> dict[str, Callable]:
    """Both ways to decode, each (weight, quant_state, out=None) -> tensor."""
    return {"triton": kernel._your_dequantize_nf4, "torch": in_torch}


def requested() -> str:
    """NF4_BACKEND in lower case, 'auto' when unset. Raises ValueError for any other name."""
    name = os.environ.get("NF4_BACKEND", "").strip().lower() or "auto"
    if name not in NAMES:
        raise ValueError(f"NF4_BACKEND={name!r}: expected one of {', '.join(NAMES)}")
    return name


def choose(device: torch.device | str = "cuda", dtype: torch.dtype = torch.float16) -> Choice:
    """What decodes to this dtype on this device. `auto` measures at the first call only."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _choose(requested(), device, dtype)


@functools.cache
def _choose(name: str, device: torch.device, dtype: torch.dtype) -> Choice:
    if name != "auto":
        return Choice(name, f"NF4_BACKEND={name}")
    if device.type == "cpu" and not kernel.INTERPRETED:
        choice = Choice("torch", "the weight is on the CPU")
    elif problem := cannot_run():
        choice = Choice("torch", problem)
    else:
        choice = _measure(device, dtype)
    log.warning("NF4_BACKEND=auto on %s, %s: %s (%s)", device, dtype, choice.name, choice.reason)
    return choice


def _measure(device: torch.device, dtype: torch.dtype) -> Choice:
    measured = {}
    for elements in SIZES[device.type]:
        weight, state = _random_weight(elements, device, dtype)
        calls = {name: functools.partial(call, weight, state) for name, call in paths().items()}
        try:
            equal = torch.equal(calls["triton"](), calls["torch"]())
        except Exception as error:  # whatever stops the kernel here, the other path still works
            return Choice("torch", f"the kernel cannot run here: {type(error).__name__}: {error}", measured)
        if not equal:
            return Choice("torch", "the kernel's bits are wrong here: please report it", measured)
        measured[elements] = {name: _microseconds(call, device) for name, call in calls.items()}
    best = min(("triton", "torch"), key=lambda name: sum(row[name] for row in measured.values()))
    rows = "; ".join(
        f"{elements} elements: triton {row['triton']:.1f} us, torch {row['torch']:.1f} us"
        for elements, row in measured.items()
    )
    return Choice(best, f"the faster one here: {rows}", measured)


def _random_weight(elements: int, device: torch.device, dtype: torch.dtype):
    """Random packed codes of `elements` weights and a nested nf4 state for them, without bitsandbytes."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (elements // 2, 1), dtype=torch.uint8, generator=draw).to(device)
    state = _State()
    state.shape, state.dtype, state.quant_type = torch.Size((64, elements // 64)), dtype, "nf4"
    state.blocksize, state.nested, state.state2 = 64, True, _State()
    absmax = torch.randint(0, 256, (elements // 64,), dtype=torch.uint8, generator=draw)
    state.absmax, state.offset = absmax.to(device), torch.tensor(0.05, device=device)
    state.state2.absmax = torch.rand(-(-elements // 16384), generator=draw).to(device)
    state.state2.code = torch.linspace(-1, 1, 256).to(device)
    state.state2.blocksize, state.state2.dtype = 256, torch.float32
    return weight, state


class _State:
    """Fields of a bitsandbytes QuantState."""


def _microseconds(call: Callable, device: torch.device) -> float:
    """Median time of a call that is waited for."""
    seconds = []
    for _ in range(20 if device.type == "cuda" else 3):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def in_torch(weight: torch.Tensor, quant_state, out: torch.Tensor | None = None) -> torch.Tensor:
    """`dequantize` in plain PyTorch, bit for bit: two roundings a scale and one more for its product with the
    code; subnormal numbers become zeros on CUDA, as in bitsandbytes' CUDA build, and stay on a CPU."""
    state, n = quant_state, 1
    if getattr(state, "quant_type", None) not in ("nf4", "fp4") or getattr(
        state, "packing_format_for_cpu", None
    ):
        raise kernel.UnsupportedState(
            "expected the packed 4-bit weight of a bitsandbytes Linear4bit (nf4 or fp4) and its quant_state"
        )
    for size in state.shape:
        n *= size
    multiply = _multiply_flushing if weight.is_cuda else torch.mul
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
