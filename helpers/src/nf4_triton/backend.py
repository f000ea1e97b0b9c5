"""Dequantize with the kernel or with plain PyTorch: NF4_BACKEND=triton|torch|auto."""

import contextlib
import functools
import logging
import os

import torch

from . import environment, private, reference
from .log import say
from .state import (
    DTYPES,
    Packed,
    Selection,
    UnsupportedState,
    check_call,
    check_out,
    read_rows,
    read_state,
    result_shape,
)

BACKENDS = ("triton", "torch", "auto")


def dequantize(
    weight,
    quant_state=None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    rows=None,
) -> torch.Tensor:
    """Return a dequantized 4-bit weight (nf4 or fp4, nested or flat), bit-identical to bitsandbytes.

    weight: a bitsandbytes Linear4bit or 4-bit embedding, or its Params4bit, or packed codes (two a byte, high
    nibble first, any storage dtype) with their `quant_state`, as read_checkpoint returns both, or
    (module, "name") of a parameter that bitsandbytes quantized in place, such as a stack of experts.
    out: optional contiguous tensor of the result's shape and dtype to fill.
    dtype: torch.float16, bfloat16, or float32. Default: quant_state.dtype. Another dtype differs from a
    library's result converted with .to(dtype), which was rounded to quant_state.dtype before.
    rows: dequantize only these slices along the first dimension of quant_state.shape, in the same single
    launch: a slice of step 1, an int32 or int64 tensor of ids such as (batch, tokens), or a list of ints. Ids
    may repeat. One out of range raises IndexError on a CPU; on a GPU, where checking would wait, and in
    traced code its slice is NaN. Ids on a CPU are copied to the GPU, which may wait.
    NF4_BACKEND picks the code: "triton" the kernel, "torch" plain PyTorch, "auto" (the default) the kernel
    where it can run, else PyTorch.
    Returns a tensor of shape quant_state.shape, transposed if weight.shape[0] is 1; with rows, of shape
    (*ids.shape, *quant_state.shape[1:]), never transposed.
    Raises UnsupportedState (a ValueError) for malformed input, ValueError for an unknown NF4_BACKEND.
    """
    packed = read_state(*with_state(weight, quant_state))
    if dtype is not None:
        if dtype not in DTYPES:
            raise UnsupportedState(f"dtype is {dtype}, expected one of {DTYPES}")
        packed = packed._replace(dtype=dtype)
    if not isinstance(rows, torch.Tensor) or rows.dim() == 1:
        return run(packed, out, rows)
    ids, shape = rows.reshape(-1), (*rows.shape, *packed.shape[1:])
    if out is None:
        return run(packed, None, ids).view(shape)
    check_out(out, packed._replace(shape=shape))
    run(packed, out.view(ids.numel(), *packed.shape[1:]), ids)
    return out


def run(packed, out, rows):
    """Return the weight of a Packed, or its slices, by the kernel or by PyTorch."""
    # Where the weight is, too, or the checks say so: a Params4bit takes longer to say its device.
    if choose(getattr(packed.absmax, "device", None)) == "torch":
        return dequantize_in_torch(packed, out, rows)
    from . import launch_general  # needs Triton

    try:
        return launch_general.dequantize_packed(packed, out, rows)
    except launch_general.CANNOT_LAUNCH as error:
        problem = f"the kernel could not be launched ({type(error).__name__}: {error})"
        raise RuntimeError(f"{problem}: set NF4_BACKEND=torch to dequantize in PyTorch") from error


def with_state(weight, quant_state) -> tuple:
    """Return (packed codes, quant_state) of dequantize()'s first two arguments."""
    if isinstance(quant_state, (torch.Tensor, torch.dtype, torch.nn.Module)):
        raise UnsupportedState(
            f"quant_state is a {type(quant_state).__name__}, expected a QuantState or None: the order is"
            " dequantize(weight, quant_state, out, dtype, rows)"
        )
    if quant_state is not None:
        return weight, quant_state
    if isinstance(weight, tuple) and len(weight) == 2 and isinstance(weight[1], str):
        return parametrized(*weight)
    packed = getattr(weight, "weight", weight)
    quant_state = getattr(packed, "quant_state", None) or getattr(weight, "quant_state", None)
    if quant_state is None:
        raise UnsupportedState(no_state(weight))
    return packed, quant_state


def parametrized(module, name) -> tuple:
    """Return (packed, quant_state) of a parameter that bitsandbytes quantized by a parametrization."""
    while hasattr(module, "base_layer"):  # PEFT's wrappers
        module = module.base_layer
    chain = getattr(module, "parametrizations", {})
    if name not in chain or not hasattr(chain[name][0], "quant_state"):
        raise UnsupportedState(
            f"{name!r} of {type(module).__name__} is not quantized by a parametrization, expected a parameter"
            " that bitsandbytes' replace_parameter_4bit made: pass packed codes and their quant_state"
        )
    return chain[name].original, chain[name][0].quant_state


def no_state(given) -> str:
    """Return the text of an error for what is not a 4-bit layer: what it is, and what to pass."""
    kind = type(given).__name__
    expected = f"{kind} has no quant_state, expected bitsandbytes' Linear4bit:"
    if not isinstance(given, torch.nn.Module):
        return f"{expected} pass the layer, (module, 'name'), or the packed codes and their quant_state"
    weight = getattr(given, "weight", None)
    if hasattr(weight, "quant_state"):
        return f"{expected} its weight is not quantized yet; move it with layer.to('cuda')"
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return f"{expected} its weight is not quantized but {weight.dtype}; use it as it is"
    for name, module in given.named_modules():
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            return f"{expected} pass one layer at a time, such as model.get_submodule({name!r})"
        for parameter, chain in getattr(module, "parametrizations", {}).items():
            if hasattr(chain[0], "quant_state"):
                where = f"model.get_submodule({name!r})" if name else "module"
                return f"{expected} pass ({where}, {parameter!r})"
    return f"{expected} other formats (8-bit, GPTQ, HQQ, AWQ) have functions of their own in their libraries"


def dequantize_in_torch(packed, out=None, rows=None):
    """Return what the kernel returns. Malformed input raises the kernel's errors."""
    selection = None if rows is None else read_rows(rows, packed)
    check_call(packed, out, selection)
    with private.plain_tensors():
        packed = packed.detached()
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            result = torch_operator(*packed, *(selection or (None, 0, None)))
        else:
            result = reference.dequantize(packed, selection)
        if out is None:
            return result
        if selection is None and packed.weight.shape[0] == 1:
            out = out.t()
        # Outside inference mode torch refuses to write an inference tensor. Dynamo cannot ask for one.
        inference = not private.is_compiling() and out.is_inference()
        with torch.inference_mode() if inference else contextlib.nullcontext():
            return out.copy_(result)


def from_fields(fields) -> tuple:
    """Return the operator's arguments as a Packed, and a Selection if its number is given."""
    selection = Selection(*fields[11:])
    return Packed(*fields[:11]), None if selection.number is None else selection


def dequantize_fields(*fields) -> torch.Tensor:
    """Check and dequantize."""
    packed, selection = from_fields(fields)
    check_call(packed, None, selection)
    return reference.dequantize(packed, selection)


def allocate_fields(*fields) -> torch.Tensor:
    """Return what a tracer sees as the result."""
    packed, selection = from_fields(fields)
    result = packed.weight.new_empty(result_shape(packed, selection), dtype=packed.dtype)
    return result.t() if selection is None and packed.weight.shape[0] == 1 else result


# Opaque: Inductor would fuse it, with an FMA for the scales and without the rounding to 16 bits.
torch_operator = torch.library.custom_op(
    "nf4_triton::dequantize_in_torch",
    dequantize_fields,
    mutates_args=(),
    schema="(Tensor weight, Tensor absmax, Tensor? code2, Tensor? absmax2, Tensor? offset, SymInt[] shape, "
    "ScalarType dtype, str quant_type, SymInt blocksize, SymInt? blocksize2, bool nested, Tensor? ids, "
    "SymInt first, SymInt? number) -> Tensor",
)
torch_operator.register_fake(allocate_fields)


def choose(device) -> str:
    """Return "triton" or "torch" for a weight on a device. Raises ValueError for an unknown NF4_BACKEND."""
    name = os.environ.get("NF4_BACKEND", "").strip().lower() or "auto"
    if name not in BACKENDS:
        raise ValueError(f"NF4_BACKEND={name!r}: expected one of {', '.join(BACKENDS)}")
    if name != "auto":
        return name
    if private.is_compiling():  # what why_torch asks cannot be traced
        return "torch" if device.type == "cpu" and not environment.interpreted() else "triton"
    return "torch" if why_torch(device) else "triton"


@functools.cache
def why_torch(device: torch.device | None) -> str | None:
    """Return why the kernel cannot dequantize on a device, None if it can. Log what is unexpected there."""
    problem, version = environment.cannot_run(device), environment.triton_version()
    if problem and device is not None and device.type == "cuda":
        say(f"dequantize() uses PyTorch: {problem}", logging.WARNING)
    elif not problem and version and version > environment.NEWEST_TRITON:
        text = "Triton is newer here than the tested ones (up to 3.9). If it fails, set NF4_BACKEND=torch."
        say(text, logging.WARNING)
    return problem
