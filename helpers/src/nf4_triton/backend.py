"""Dequantize with the kernel or with plain PyTorch: NF4_BACKEND=triton|torch|auto."""

import logging
import os

import torch

from . import environment, launch, reference
from .kernel import INTERPRETED
from .state import DTYPES, Packed, UnsupportedState, check, check_memory, check_out, read_state

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
        if quant_state is None:
            raise UnsupportedState(no_state(layer))
    elif isinstance(quant_state, torch.dtype):
        raise UnsupportedState(
            f"quant_state is {quant_state}, expected a QuantState or None: pass dtype={quant_state}"
        )
    packed = read_state(weight, quant_state)
    if dtype is not None:
        if dtype not in DTYPES:
            raise UnsupportedState(f"dtype is {dtype}, expected one of {DTYPES}")
        packed = packed._replace(dtype=dtype)
    # The kernel's own checks refuse other weights and dtypes, so nothing is tried for them.
    if isinstance(weight, torch.Tensor) and not weight.is_meta and packed.dtype in DTYPES:
        if choose(weight, packed.dtype) == "torch":
            return dequantize_in_torch(packed, out)
    return launch.dequantize_packed(packed, out)


def no_state(given) -> str:
    """Return the text of an error for what is not a 4-bit layer: what it is, and what to pass."""
    kind = type(given).__name__
    expected = f"{kind} has no quant_state, expected bitsandbytes' Linear4bit:"
    if isinstance(given, torch.Tensor):
        return f"{expected} pass the layer, or the packed codes and their quant_state"
    if not isinstance(given, torch.nn.Module):
        return f"{expected} pass such a layer"
    if hasattr(getattr(given, "weight", None), "quant_state"):
        return f"{expected} its weight is not quantized yet; move it with layer.to('cuda')"
    for name, module in given.named_modules():
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            return f"{expected} pass one layer at a time, such as model.get_submodule({name!r})"
    return f"{expected} other formats (8-bit, GPTQ, HQQ, AWQ) have functions of their own in their libraries"


def dequantize_in_torch(packed, out=None):
    """Return what the kernel returns. Malformed input raises the kernel's errors."""
    check(packed, any_device=True)
    if out is not None:
        check_out(out, packed)
    if not launch.is_traced(packed.weight):
        check_memory(packed, out)
    result = reference.dequantize(packed)
    if out is None:
        return result
    if packed.weight.shape[0] == 1:
        return out.copy_(result.t()).t()
    return out.copy_(result)


def choose(weight: torch.Tensor, dtype: torch.dtype) -> str:
    """Return "triton" or "torch". Raises ValueError for an unknown NF4_BACKEND.

    A traced call decides without trying the kernel: a tracer would record the trial.
    """
    name = os.environ.get("NF4_BACKEND", "").strip().lower() or "auto"
    if name not in BACKENDS:
        raise ValueError(f"NF4_BACKEND={name!r}: expected one of {', '.join(BACKENDS)}")
    if name != "auto":
        return name
    if launch.is_traced(weight):
        return "torch" if weight.device.type == "cpu" and not INTERPRETED else "triton"
    return choose_once(weight.device, dtype)


verdicts: dict = {}  # {(device, dtype): "triton" or "torch"}; an accident is not remembered


def choose_once(device: torch.device, dtype: torch.dtype) -> str:
    """Return the verdict on a device and dtype, with one trial for each."""
    if (device, dtype) in verdicts:
        return verdicts[device, dtype]
    try:
        problem = why_not_triton(device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a full disk, a graph capture: PyTorch serves this call
        log.warning(
            "NF4_BACKEND=auto on %s, %s: torch for this call (%s: %s)",
            device,
            dtype,
            type(error).__name__,
            error,
        )
        return "torch"
    if problem:
        log.warning("NF4_BACKEND=auto on %s, %s: torch (%s)", device, dtype, problem)
    verdicts[device, dtype] = "torch" if problem else "triton"
    return verdicts[device, dtype]


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot dequantize to `dtype` on `device`, None if it can.

    Raises what stopped the kernel.
    """
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return f"the weight is on {device}"
    if problem := cannot_run(device):
        return problem
    packed = small_weight(device, dtype)
    result = launch.dequantize_packed(packed)
    if not reference.same_bits(result, reference.dequantize(packed)):
        return "the kernel is not bit-exact here: please report it"
    return None


def small_weight(device: torch.device, dtype: torch.dtype) -> Packed:
    """Return 64 x 64 packed weights: every byte, nested scales."""
    codes = torch.arange(2048, device=device).to(torch.uint8)
    floats = torch.linspace(0.1, 1.1, 256, device=device, dtype=torch.float32)
    return Packed(
        weight=codes.view(-1, 1),
        absmax=codes[:64],
        code2=floats,
        absmax2=floats[:1],
        offset=floats[9],
        shape=(64, 64),
        dtype=dtype,
        quant_type="nf4",
        blocksize=64,
        blocksize2=256,
        nested=True,
    )


def cannot_run(device: torch.device | str | None = None) -> str | None:
    """Return why the kernel cannot run on a device (default: the current) and what to do, None if it can."""
    if torch.version.hip is not None:
        return f"AMD GPU (ROCm {torch.version.hip}): the kernel was never run there; use an NVIDIA GPU."
    return None if INTERPRETED else environment.no_gpu(device)
