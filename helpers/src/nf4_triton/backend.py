"""Dequantize with the kernel or with plain PyTorch: NF4_BACKEND=triton|torch|auto."""

import copy
import functools
import logging
import os
from types import SimpleNamespace

import torch

from . import environment, launch, reference

BACKENDS = ("triton", "torch", "auto")
log = logging.getLogger("nf4_triton")


def dequantize(
    weight,
    quant_state=None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a dequantized 4-bit weight (nf4 or fp4, nested or flat), bit-identical to bitsandbytes.

    weight: a bitsandbytes Linear4bit, or its Params4bit, or packed codes (two a byte, high nibble first, any
    storage dtype) with their `quant_state`.
    out: optional contiguous tensor of the result's shape and dtype to fill.
    dtype: torch.float16, bfloat16, or float32. Default: quant_state.dtype.
    NF4_BACKEND picks the code: "triton" the kernel, "torch" plain PyTorch, "auto" (the default) the kernel
    if it runs on this device and dequantizes a small weight correctly, else PyTorch; the reason is logged.
    Returns a tensor of shape quant_state.shape, transposed if weight.shape[0] is 1.
    Raises UnsupportedState (a ValueError) for malformed input, ValueError for an unknown NF4_BACKEND.
    """
    if quant_state is None:
        layer, weight = weight, getattr(weight, "weight", weight)
        quant_state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    if dtype is not None and quant_state is not None:
        quant_state = copy.copy(quant_state)
        quant_state.dtype = dtype
    dtype = getattr(quant_state, "dtype", None)
    # The kernel's own checks refuse other weights and dtypes, so nothing is tried for them.
    if isinstance(weight, torch.Tensor) and not weight.is_meta and dtype in launch.DTYPES:
        if choose(weight.device, dtype) == "torch":
            return dequantize_in_torch(weight, quant_state, out)
    return launch._your_dequantize_nf4(weight, quant_state, out)


def dequantize_in_torch(weight, quant_state, out=None):
    """Return what the kernel returns. Malformed input raises the kernel's errors."""
    tensors, spec = launch.read_state(weight, quant_state)
    launch.check(tensors, spec, any_device=True)
    if out is not None:
        launch.check_out(out, tensors, spec)
    if not launch.is_traced(weight):
        check_memory(tensors, out)
    result = reference.dequantize(weight, quant_state)
    if out is None:
        return result
    if weight.shape[0] == 1:
        return out.copy_(result.t()).t()
    return out.copy_(result)


def check_memory(tensors, out):
    """Refuse freed storages, which torch's operators read all the same, and an overlapping `out`."""
    for name, tensor in zip(launch.NAMES, tensors, strict=False):
        launch.check_memory(name, tensor)
    if out is not None:
        launch.check_memory("out", out)
        launch.check_overlap(out, tensors)


@torch.compiler.assume_constant_result  # a compiled call makes its choice once
def choose(device: torch.device, dtype: torch.dtype) -> str:
    """Return "triton" or "torch". Raises ValueError for an unknown NF4_BACKEND."""
    name = os.environ.get("NF4_BACKEND", "").strip().lower() or "auto"
    if name not in BACKENDS:
        raise ValueError(f"NF4_BACKEND={name!r}: expected one of {', '.join(BACKENDS)}")
    return choose_once(device, dtype) if name == "auto" else name


@functools.cache  # an exception, such as torch.OutOfMemoryError, is not remembered
def choose_once(device, dtype):
    problem = why_not_triton(device, dtype)
    if problem is None:
        return "triton"
    log.warning("NF4_BACKEND=auto on %s, %s: torch (%s)", device, dtype, problem)
    return "torch"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot dequantize to `dtype` on `device`, None if it can."""
    if device.type == "cpu" and not launch.INTERPRETED:
        return "the weight is on the CPU"
    if problem := cannot_run():
        return problem
    state = small_state(device, dtype)
    try:
        result = launch._your_dequantize_nf4(*state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # PyTorch works whatever stops the kernel
        return f"the kernel cannot run here: {type(error).__name__}: {error}"
    if not reference.same_bits(result, reference.dequantize(*state)):
        return "the kernel is not bit-exact here: please report it"
    return None


def small_state(device, dtype):
    """Return (weight, quant_state) of 64 x 64 weights: every byte, nested scales."""
    codes = torch.arange(2048, device=device).to(torch.uint8)
    floats = torch.linspace(0.1, 1.1, 256, device=device)
    state2 = SimpleNamespace(absmax=floats[:1], code=floats, blocksize=256, dtype=torch.float32)
    state = SimpleNamespace(
        absmax=codes[:64],
        shape=torch.Size((64, 64)),
        dtype=dtype,
        quant_type="nf4",
        blocksize=64,
        nested=True,
        offset=floats[9],
        state2=state2,
    )
    return codes.view(-1, 1), state


def cannot_run() -> str | None:
    """Return why the kernel cannot run on the current device and what to do, None if it can."""
    if torch.version.hip is not None:
        return f"AMD GPU (ROCm {torch.version.hip}): the kernel was never run there; use an NVIDIA GPU."
    return None if launch.INTERPRETED else environment.no_gpu()
