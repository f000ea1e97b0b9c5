"""dequantize(): by the kernel or in plain PyTorch. NF4_BACKEND=triton|torch|auto chooses."""

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from . import environment
from .core import private, reference
from .core.checks import DTYPES, check_call, check_out, result_shape
from .core.state import from_fields, read_rows, read_state, to_fields, transposed
from .core.supported import NEWEST_TRITON, UnsupportedState
from .log import say

try:
    from .core import launch, launch_general
except (ImportError, AttributeError):  # no Triton, or one older than 3.4
    launch = launch_general = None  # type: ignore[assignment]

try:  # os.environ's own dict: a lookup of an unset variable takes 0.03 us here, 1.0 us in os.environ
    VARIABLES, VARIABLE = os.environ._data, os.environ.encodekey("NF4_BACKEND")  # type: ignore[attr-defined]
except AttributeError:
    VARIABLES, VARIABLE = os.environ, "NF4_BACKEND"


def dequantize(
    weight: torch.nn.Module | torch.Tensor | tuple[torch.nn.Module, str],
    quant_state: Any = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    rows: slice | Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a dequantized 4-bit weight (nf4 or fp4, nested or flat), bit-identical to bitsandbytes.

    weight: a bitsandbytes Linear4bit or 4-bit embedding, or its Params4bit; or packed codes (two per byte,
    high nibble first, any storage dtype) with their `quant_state`, as read_checkpoint returns both; or
    (module, "name") for a parameter that bitsandbytes quantized in place, such as a stack of experts.
    out: optional contiguous tensor of the result's shape and dtype to fill.
    dtype: torch.float16, bfloat16, or float32. Default: quant_state.dtype. A library's result converted with
    .to(dtype) differs from this one: it was rounded to quant_state.dtype first.
    rows: dequantize only these slices along the first dimension of quant_state.shape, in the same single
    launch: a slice of step 1, an int32 or int64 tensor of ids such as (batch, tokens), or a list of ints. Ids
    may repeat. An id out of range raises IndexError on a CPU; on a GPU, where checking would wait, and in
    traced code, its slice is NaN. Ids on a CPU are copied to the GPU, which may wait.
    NF4_BACKEND picks the code: "triton" runs the kernel, "torch" runs plain PyTorch, "auto" (the default)
    runs the kernel if it can, else PyTorch.
    Returns a tensor of shape quant_state.shape, transposed if weight.shape[0] is 1; with rows, of shape
    (*ids.shape, *quant_state.shape[1:]), never transposed.
    Raises UnsupportedState (a ValueError) for malformed input, ValueError for an unknown NF4_BACKEND,
    IndexError for ids on a CPU out of range, and RuntimeError if the kernel cannot be launched, such as on a
    full disk.
    """
    if quant_state is None:
        weight, quant_state = weight_and_state(weight)
    tensors, layout = read_state(weight, quant_state)
    if dtype is not None:
        if dtype not in DTYPES:
            raise UnsupportedState(f"dtype is {dtype}, expected one of {DTYPES}")
        layout = layout[0], dtype, *layout[2:]
    if rows is not None:
        return run_rows(rows, tensors, layout, out)
    if out is None and launch and not private.is_compiling() and VARIABLE not in VARIABLES:
        result = launch.relaunch(tensors, layout)
        if result is not None:
            return result
    return run(tensors, layout, out)


def run_rows(rows, tensors, layout, out) -> torch.Tensor:
    """Return the selected slices, or fill `out` with them."""
    selection = read_rows(rows, tensors, layout)
    if not isinstance(rows, torch.Tensor) or rows.dim() == 1:
        return run(tensors, layout, out, selection)
    inner = layout[0][1:]
    shape = *rows.shape, *inner
    if out is None:
        return run(tensors, layout, None, selection).view(shape)
    check_out(out, shape, layout[1], tensors[0].device)
    run(tensors, layout, out.view(selection.number, *inner), selection)
    return out


def run(tensors, layout, out, selection=None):
    """Return the weight, or its selected slices, from the kernel or from PyTorch."""
    # absmax's device is the weight's, or a check raises. Asking a Params4bit for its device takes longer.
    if choose(getattr(tensors[1], "device", None)) == "torch":
        return run_pytorch(tensors, layout, out, selection)
    # Importing it again raises an error that says what is missing.
    room = launch_general or importlib.import_module(f"{__package__}.core.launch_general")
    try:
        return room.dequantize_tensors(tensors, layout, out, selection)
    except room.CANNOT_LAUNCH as error:
        problem = f"the kernel could not be launched ({type(error).__name__}: {error})"
        raise RuntimeError(f"{problem}: set NF4_BACKEND=torch to dequantize in PyTorch") from error


def weight_and_state(given) -> tuple:
    """Return the packed codes and the quant_state of dequantize()'s first argument."""
    try:
        weight = given._parameters["weight"]  # without nn.Module's __getattr__
    except (AttributeError, KeyError):
        weight = getattr(given, "weight", given)
    quant_state = getattr(weight, "quant_state", None) or getattr(given, "quant_state", None)
    if quant_state is not None:
        return weight, quant_state
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], str):
        return parametrized(*given)
    raise UnsupportedState(no_state(given))


def parametrized(module, name) -> tuple:
    """Return (packed, quant_state) of a parameter that bitsandbytes quantized with a parametrization."""
    while hasattr(module, "base_layer"):  # PEFT's wrappers
        module = module.base_layer
    chain = getattr(module, "parametrizations", {})
    if name not in chain or not hasattr(chain[name][0], "quant_state"):
        raise UnsupportedState(
            f"{name!r} of {type(module).__name__} is not quantized by a parametrization, expected a parameter"
            " from bitsandbytes' replace_parameter_4bit: pass packed codes and their quant_state"
        )
    return chain[name].original, chain[name][0].quant_state


def no_state(given) -> str:
    """Return the error text for anything but a 4-bit layer: what it is, and what to pass."""
    weight = getattr(given, "weight", None)
    held = ""
    if isinstance(weight, torch.Tensor):
        held = f" (its weight is a {type(weight).__name__} on {weight.device})"
    text = f"{type(given).__module__}.{type(given).__name__}{held} has no quant_state"
    if type(weight).__name__ == "FakeTensor":  # torch.export's copy of a Params4bit has no state
        return f"{text}, expected one on the layer: first set layer.quant_state = layer.weight.quant_state"
    return (
        f"{text}, expected one bitsandbytes layer with its values, moved to the GPU with layer.to('cuda'), "
        "(module, 'name') of a quantized parameter, or packed codes and their quant_state: pass one of them; "
        "dequantize other weights with their own library"
    )


def run_pytorch(tensors, layout, out=None, selection=None):
    """Return the kernel's result, computed in PyTorch. Malformed input raises the kernel's errors."""
    check_call(tensors, layout, out, selection)
    weight = tensors[0]
    with private.plain_tensors():
        # Scales have gradients if bitsandbytes quantized a parameter.
        tensors = tuple(tensor.detach() for tensor in tensors)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            result = torch_operator(*to_fields(tensors, layout, selection))
        else:
            result = reference.exact_weight(tensors, layout, selection)
        if out is not None:
            # Outside inference mode, torch writes no inference tensor. Dynamo cannot trace is_inference().
            inference = not private.is_compiling() and out.is_inference()
            with torch.inference_mode() if inference else contextlib.nullcontext():
                result = out.copy_(result)
        return transposed(result, weight) if selection is None else result


def dequantize_fields(*fields) -> torch.Tensor:
    """Check and dequantize."""
    tensors, layout, selection = from_fields(*fields)
    check_call(tensors, layout, None, selection)
    return reference.exact_weight(tensors, layout, selection)


def allocate_fields(*fields) -> torch.Tensor:
    """Return the result's shape and dtype, for a tracer."""
    (weight, *_), (shape, dtype, *_), selection = from_fields(*fields)
    return weight.new_empty(result_shape(shape, selection), dtype=dtype)


# Opaque: Inductor would fuse it, use an FMA for the scales, and leave out the rounding to 16 bits.
torch_operator = torch.library.custom_op(
    "nf4_triton::dequantize_reference",
    dequantize_fields,
    mutates_args=(),
    schema="(Tensor weight, Tensor absmax, Tensor? code2, Tensor? absmax2, Tensor? offset, SymInt[] shape, "
    "ScalarType dtype, str quant_type, SymInt blocksize, SymInt? blocksize2, bool nested, Tensor? ids, "
    "SymInt start, SymInt? number) -> Tensor",
)
torch_operator.register_fake(allocate_fields)


def choose(device) -> str:
    """Return "triton" or "torch" for a weight on a device. Raises ValueError for an unknown NF4_BACKEND."""
    if private.is_compiling() or VARIABLE in VARIABLES:
        name = environment.word("NF4_BACKEND")
        if name != "auto":
            return name
    if private.is_compiling():  # Dynamo cannot trace why_torch()
        return "torch" if device.type == "cpu" and not environment.interpreted() else "triton"
    return "torch" if why_torch(device) else "triton"


@functools.cache
def why_torch(device: torch.device | None) -> str | None:
    """Return why the kernel cannot dequantize on a device, or None if it can. Log surprising reasons."""
    problem = environment.cannot_run(device)
    if problem and device is not None and device.type == "cuda":
        say(f"dequantize() uses PyTorch: {problem}", logging.WARNING)
    elif not problem and launch and launch.TRITON > NEWEST_TRITON:
        newest = ".".join(map(str, NEWEST_TRITON))
        text = f"Triton is newer than {newest}, the newest tested. If it fails, set NF4_BACKEND=torch."
        say(text, logging.WARNING)
    return problem
