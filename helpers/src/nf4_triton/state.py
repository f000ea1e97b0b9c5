"""Read a bitsandbytes state into a Packed, and check it. The section is a notebook cell."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
from .kernel import INTERPRETED
from .settings import MAX_ELEMENTS

# %% Read and check a state id="state" part="state" folded=true tags=["launch"]
import math
import typing

import torch

STORAGES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# bitsandbytes loads the offset in torch's default dtype.
OFFSETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class UnsupportedState(ValueError):
    """A weight or quant_state that cannot be dequantized. The message says what is wrong, what was
    expected, and what to do."""


class Packed(typing.NamedTuple):
    """A 4-bit weight, whichever library holds it. The last three tensors are None if it is flat."""

    weight: torch.Tensor  # packed codes, two a byte, high nibble first
    absmax: torch.Tensor  # one per block: uint8 index into code2, or the fp32 scale (flat)
    code2: torch.Tensor | None  # (256,) fp32
    absmax2: torch.Tensor | None  # fp32, one for every blocksize2 blocks
    offset: torch.Tensor | None  # one value
    shape: tuple  # of the result
    dtype: torch.dtype  # of the result
    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # elements
    blocksize2: int | None  # blocks
    nested: bool

    @property
    def tensors(self):
        """The tensors that the kernel reads: five, or two if flat."""
        return self[:5] if self.nested else self[:2]


def read_fields(weight, quant_state):
    """Return the tensors (five, or two if flat) and the other fields of a Packed, as two tuples.

    A record costs 0.33 us a call, so the replay takes these. Raises UnsupportedState.
    """
    q = quant_state
    try:
        if q.nested:
            q2 = q.state2
            if q2.dtype is not torch.float32:
                raise UnsupportedState(
                    f"state2.dtype is {q2.dtype}, expected torch.float32: quantize the layer again")
            return (weight, q.absmax, q2.code, q2.absmax, q.offset), (
                tuple(q.shape), q.dtype, q.quant_type, q.blocksize, q2.blocksize, True)
        repacked = getattr(q, "packing_format_for_cpu", False)  # repacking also sets nested=False
        tensors = weight, q.absmax
        spec = tuple(q.shape), q.dtype, q.quant_type, q.blocksize, None, False
    except (AttributeError, TypeError) as error:
        raise UnsupportedState(missing_field(quant_state, error)) from error
    if repacked:
        raise UnsupportedState(
            "bitsandbytes repacked this layer for its CPU matmul and rounded its scales, expected "
            "the usual layout: reload the layer, and dequantize it before its first forward pass")
    return tensors, spec


def read_state(weight, quant_state):
    """Return the Packed of a bitsandbytes weight and its QuantState. Checks only that all fields
    exist. Raises UnsupportedState if one is missing, or if bitsandbytes repacked the layer."""
    return make_packed(*read_fields(weight, quant_state))


def make_packed(tensors, spec):
    """Return the Packed of read_fields' two tuples."""
    none = (None,) * (5 - len(tensors))
    return Packed(*tensors, *none, *spec)


def missing_field(quant_state, error):
    """Return the text of an error for a state that cannot be read."""
    if quant_state is None:
        return ("there is no quant_state, expected bitsandbytes' QuantState: quantize the layer "
                "first by moving it with layer.to(device); plain and 8-bit layers have none")
    return (f"the quant_state is incomplete ({error}), expected bitsandbytes' QuantState with all "
            "fields: reload the layer")


def check(packed, any_device=False):
    """Return (elements, log2 blocksize, log2 blocksize2 or 0). Raises UnsupportedState.

    Reads only metadata, which torch.compile can trace. any_device: accept a weight on the CPU, for
    dequantizing in plain PyTorch.
    """
    p = packed
    if not isinstance(p.quant_type, str) or p.quant_type not in ("nf4", "fp4"):
        raise UnsupportedState(
            f"quant_type is {p.quant_type!r}, expected 'nf4' or 'fp4': use the library's own "
            "dequantization for other states")
    if p.dtype not in DTYPES:
        raise UnsupportedState(f"quant_state.dtype is {p.dtype}, expected one of {DTYPES}: set "
                               "quant_state.dtype to one of them")
    if not all(isinstance(size, (int, torch.SymInt)) and size >= 0 for size in p.shape):
        raise UnsupportedState(
            f"quant_state.shape is {p.shape}, expected the weight's shape: reload the layer")
    log2_block = log2_of("quant_state.blocksize", p.blocksize, 8, 37)
    n = math.prod(p.shape)
    blocks = -(-n // p.blocksize)
    if n >= MAX_ELEMENTS:
        raise UnsupportedState(f"the weight has {n} elements, expected fewer than 2**34: "
                               "dequantize it in parts")
    check_weight(p.weight, n, p.shape, any_device)
    kind = torch.uint8 if p.nested else torch.float32
    check_tensor("absmax", p.absmax, p.weight, blocks, kind)
    if not p.nested:
        return n, log2_block, 0
    log2_block2 = log2_of("state2.blocksize", p.blocksize2, 1, 31)
    check_tensor("code2", p.code2, p.weight, 256, torch.float32)
    check_tensor("absmax2", p.absmax2, p.weight, -(-blocks // p.blocksize2), torch.float32)
    check_tensor("offset", p.offset, p.weight, 1, *OFFSETS)
    # bitsandbytes adds a one-dimensional fp64 offset in fp64, which rounds differently.
    if p.offset.numel() != 1 or (p.offset.dim() and p.offset.dtype == torch.float64):
        raise UnsupportedState(
            f"offset has shape {tuple(p.offset.shape)} and {p.offset.dtype}, expected one value, "
            "in float64 without a dimension: reload the layer")
    return n, log2_block, log2_block2


def log2_of(name, size, least, most):
    """Return log2 of a power of two, capped at `most`, where one block already spans the tensor."""
    if not isinstance(size, (int, torch.SymInt)) or size < least or size & (size - 1):
        raise UnsupportedState(
            f"{name} is {size!r}, expected a power of two from {least} on (bitsandbytes uses 32 to "
            "4096): quantize the layer again")
    return min(int(size).bit_length() - 1, most)


def check_weight(weight, n, shape, any_device):
    """Check that the weight holds packed codes for n elements, where the kernel can read them."""
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedState(
            f"the weight is {type(weight).__name__}, expected a tensor of packed 4-bit codes: pass "
            "a Linear4bit, or its weight and weight.quant_state")
    on_cpu = weight.device.type == "cpu" and INTERPRETED
    if weight.device.type != "cuda" and not (on_cpu or any_device):
        raise UnsupportedState(
            f"the weight is on {weight.device}, expected CUDA: move the layer, or set "
            "TRITON_INTERPRET=1 before Python starts to run on the CPU")
    # A float tensor in the full shape is an unpacked weight, unless it has at most 3 elements.
    unpacked = weight.is_floating_point() and n > 3 and tuple(weight.shape) == tuple(shape)
    if weight.dtype not in STORAGES or not weight.dim() or unpacked:
        raise UnsupportedState(
            f"the weight is {weight.dtype} of shape {tuple(weight.shape)}, expected packed 4-bit "
            f"codes, as (n / 2, 1) in one of {STORAGES}: quantize the layer again")
    check_tensor("weight", weight, weight, 0, *STORAGES)
    held = weight.numel() * weight.itemsize
    if held * 2 < n:
        raise UnsupportedState(
            f"the weight holds {held} bytes, expected {(n + 1) // 2} for the shape {shape}: gather "
            "it first if FSDP or DeepSpeed ZeRO-3 sharded it, else reload the layer")


def check_tensor(name, tensor, weight, least, *dtypes):
    """Check that a tensor of a state is on the weight's device, contiguous, of one of the dtypes,
    and has at least `least` elements."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedState(
            f"{name} is {type(tensor).__name__}, expected a tensor: the quant_state is incomplete; "
            "reload the layer")
    if tensor.dtype not in dtypes or tensor.numel() < least:
        raise UnsupportedState(
            f"{name} has {tensor.numel()} elements of {tensor.dtype}, expected {least} or more of "
            f"{dtypes[0]}: state and weight do not belong together; reload the layer")
    if tensor.device != weight.device:
        raise UnsupportedState(
            f"{name} is on {tensor.device}, expected {weight.device}, where the weight is: move "
            "the whole layer with layer.to(device)")
    if not tensor.is_contiguous():
        raise UnsupportedState(
            f"{name} is not contiguous, expected contiguous memory: use {name}.contiguous()")


def check_memory(packed, out=None):
    """Check that real tensors have memory, not freed by FSDP, that none is a negated view, and that
    writing into `out` overwrites nothing that the kernel reads."""
    named = dict(zip(Packed._fields, packed.tensors, strict=False))
    if out is not None:
        named["out"] = out
    for name, tensor in named.items():
        if tensor.is_neg():
            raise UnsupportedState(
                f"{name} is a negated view, expected plain memory: use {name}.resolve_neg()")
        if is_freed(tensor):
            raise UnsupportedState(
                f"{name} has no memory, expected its values: gather it first if FSDP freed it, or "
                "pass full_tensor() of a DTensor")
    if out is None:
        return
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, tensor in zip(Packed._fields, packed.tensors, strict=False):
        first = tensor.data_ptr()
        if start < first + tensor.nbytes and first < end:
            raise UnsupportedState(
                f"out shares memory with {name}, expected its own: pass another tensor, or None")


def is_freed(tensor):
    """Return whether a tensor lost its storage: its address is then its offset in bytes."""
    try:
        offset = tensor.storage_offset() * tensor.itemsize
        return tensor.numel() > 0 and tensor.data_ptr() == offset
    except RuntimeError:  # a wrapper such as a DTensor has no storage
        return True


def check_out(out, packed):
    """Check that `out` can hold the result. Raises UnsupportedState."""
    if not isinstance(out, torch.Tensor):
        raise UnsupportedState(
            f"out is {type(out).__name__}, expected a tensor, or None for a new one")
    expected = (tuple(packed.shape), packed.dtype, packed.weight.device, True, False)
    given = (tuple(out.shape), out.dtype, out.device, out.is_contiguous(), out.requires_grad)
    if given != expected:
        raise UnsupportedState(
            f"out has (shape, dtype, device, contiguous, requires_grad) {given}, expected "
            f"{expected}: pass such a tensor, or None for a new one")
