"""Read a bitsandbytes state into a Packed, and check it. Needs no Triton."""

import math
import operator
import typing

import torch

from .private import has_memory, in_transform, is_compiling, is_fake, is_traced
from .settings import UnsupportedState

MAX_ELEMENTS = 1 << 34  # of one tensor: the kernel counts rows of 8 elements in 31 bits
STORAGES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# bitsandbytes loads the offset in torch's default dtype.
OFFSETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Packed(typing.NamedTuple):
    """A 4-bit weight, whichever library holds it."""

    weight: torch.Tensor  # packed codes, two a byte, high nibble first
    absmax: torch.Tensor  # one per block: uint8 index into code2, or the fp32 scale (flat)
    code2: torch.Tensor | None  # (256,) fp32; this and the next two are None if flat
    absmax2: torch.Tensor | None  # fp32, one for every blocksize2 blocks
    offset: torch.Tensor | None  # one value
    shape: tuple  # of the result
    dtype: torch.dtype  # of the result
    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # elements
    blocksize2: int | None = None  # blocks
    nested: bool = False  # absmax is quantized too

    @property
    def tensors(self):
        """The tensors that the kernel reads: five, or two if flat."""
        return self[:5] if self.nested else self[:2]

    def detached(self):
        """The same without gradients, which scales have if bitsandbytes quantized a parameter."""
        tensors = (tensor.detach() for tensor in self.tensors)
        return self._replace(**dict(zip(self._fields, tensors, strict=False)))

    @property
    def layout(self):
        """The other fields."""
        return tuple(self.shape), *self[6:]


class Selection(typing.NamedTuple):
    """Slices of a weight along its first dimension."""

    ids: torch.Tensor | None  # (number,) int32 or int64 on the weight's device; None: consecutive
    first: int  # of consecutive slices
    number: int


def read_fields(weight, quant_state):
    """Return the tensors (five, or two if flat) and the layout of a Packed. Raises UnsupportedState."""
    q = quant_state
    try:
        if q.nested:
            q2 = q.state2
            if q2.dtype is not torch.float32:
                raise UnsupportedState(
                    f"state2.dtype is {q2.dtype}, expected torch.float32: quantize the layer again"
                )
            return (weight, q.absmax, q2.code, q2.absmax, q.offset), (
                tuple(q.shape),
                q.dtype,
                q.quant_type,
                q.blocksize,
                q2.blocksize,
                True,
            )
        repacked = getattr(q, "packing_format_for_cpu", False)  # repacking also sets nested=False
        tensors = weight, q.absmax
        layout = tuple(q.shape), q.dtype, q.quant_type, q.blocksize, None, False
        if not repacked:
            return tensors, layout
        problem = (
            "bitsandbytes repacked this layer for its CPU matmul and rounded its scales, "
            "expected the usual layout: reload the layer, and dequantize it before its first "
            "forward pass"
        )
    except (AttributeError, TypeError) as error:
        problem = missing_field(quant_state, error)
    raise UnsupportedState(problem)  # here: torch 2.11 cannot trace `raise ... from error`


def make_packed(tensors, layout):
    """Return the Packed of read_fields' two tuples."""
    weight, absmax, *second = tensors
    return Packed(weight, absmax, *(second or (None, None, None)), *layout)


def read_state(weight, quant_state):
    """Return the Packed of a bitsandbytes weight and its QuantState. Checks only that all fields
    exist. Raises UnsupportedState if one is missing, or if bitsandbytes repacked the layer."""
    return make_packed(*read_fields(weight, quant_state))


def missing_field(quant_state, error):
    """Return the text of an error for a state that cannot be read."""
    if quant_state is None:
        return (
            "there is no quant_state, expected bitsandbytes' QuantState: quantize the layer "
            "first by moving it with layer.to(device); plain and 8-bit layers have none"
        )
    return (
        f"the quant_state is incomplete ({error}), expected bitsandbytes' QuantState with all "
        "fields: reload the layer"
    )


def check(packed, device=None):
    """Return (elements, log2 blocksize, log2 blocksize2 or 0). Raises UnsupportedState.

    Reads only metadata, which torch.compile can trace. device: the type of device where the weight
    must be, None for any.
    """
    p = packed
    if not isinstance(p.quant_type, str) or p.quant_type not in ("nf4", "fp4"):
        raise UnsupportedState(
            f"quant_type is {p.quant_type!r}, expected 'nf4' or 'fp4': use the library's own "
            "dequantization for other states"
        )
    if p.dtype not in DTYPES:
        raise UnsupportedState(
            f"quant_state.dtype is {p.dtype}, expected one of {DTYPES}: set quant_state.dtype to one of them"
        )
    if not all(isinstance(size, (int, torch.SymInt)) and size >= 0 for size in p.shape):
        raise UnsupportedState(
            f"quant_state.shape is {p.shape}, expected the weight's shape: reload the layer"
        )
    log2_block = log2_of("quant_state.blocksize", p.blocksize, 8, 37)
    n = math.prod(p.shape)
    blocks = -(-n // p.blocksize)
    if n >= MAX_ELEMENTS:
        raise UnsupportedState(
            f"the weight has {n} elements, expected fewer than 2**34: dequantize it in parts"
        )
    check_weight(p.weight, n, p.shape, device)
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
            "in float64 without a dimension: reload the layer"
        )
    return n, log2_block, log2_block2


def log2_of(name, size, least, most):
    """Return log2 of a power of two, capped at `most`, where one block already spans the tensor."""
    if not isinstance(size, (int, torch.SymInt)) or size < least or size & (size - 1):
        raise UnsupportedState(
            f"{name} is {size!r}, expected a power of two from {least} on (bitsandbytes uses 32 to "
            "4096): quantize the layer again"
        )
    return min(int(size).bit_length() - 1, most)


def check_weight(weight, n, shape, device):
    """Check that the weight holds packed codes for n elements, where the kernel can read them."""
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedState(
            f"the weight is {type(weight).__name__}, expected a tensor of packed 4-bit codes: pass "
            "a Linear4bit, or its weight and weight.quant_state"
        )
    if type(weight).__name__ == "DTensor":
        raise UnsupportedState("the weight is a DTensor, expected a plain tensor: pass weight.full_tensor()")
    if weight.device.type == "meta":
        raise UnsupportedState(
            "the weight is on meta, expected its values, which accelerate loses when it offloads a 4-bit "
            "layer: reload it, and move it with layer.to(device) or accelerate.cpu_offload_with_hook"
        )
    if device and weight.device.type not in ("cuda", device):
        raise UnsupportedState(
            f"the weight is on {weight.device}, expected CUDA: move the layer, or set "
            "TRITON_INTERPRET=1 before Python starts to run on the CPU"
        )
    if weight.dtype not in STORAGES or not weight.dim():
        raise UnsupportedState(
            f"the weight is {weight.dtype} of shape {tuple(weight.shape)}, expected packed 4-bit "
            f"codes, as (n / 2, 1) in one of {STORAGES}: quantize the layer again"
        )
    check_tensor("weight", weight, weight, 0, *STORAGES)
    held = weight.numel() * weight.itemsize
    needed = -(-n // (2 * weight.itemsize)) * weight.itemsize  # whole elements of the storage type
    if held != needed:
        do = (
            "it belongs to another state, or .float() or .half() converted it; reload the layer"
            if held > needed
            else "gather it first if FSDP or DeepSpeed ZeRO-3 sharded it; for a part of a weight, pass "
            "the whole with rows="
        )
        raise UnsupportedState(
            f"the weight holds {held} bytes, expected {needed} for the shape {tuple(shape)}: {do}"
        )


def check_tensor(name, tensor, weight, least, *dtypes):
    """Check that a tensor of a state is on the weight's device, contiguous, of one of the dtypes,
    and has at least `least` elements."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedState(
            f"{name} is {type(tensor).__name__}, expected a tensor: the quant_state is incomplete; "
            "reload the layer"
        )
    if tensor.dtype not in dtypes or tensor.numel() < least:
        raise UnsupportedState(
            f"{name} has {tensor.numel()} elements of {tensor.dtype}, expected {least} or more of "
            f"{dtypes[0]}: state and weight do not belong together; reload the layer"
        )
    if tensor.device != weight.device:
        raise UnsupportedState(
            f"{name} is on {tensor.device}, expected {weight.device}, where the weight is: move "
            "the whole layer with layer.to(device)"
        )
    if not tensor.is_contiguous():
        raise UnsupportedState(
            f"{name} is not contiguous, expected contiguous memory: use {name}.contiguous()"
        )


def check_memory(packed, out=None, ids=None):
    """Check that real tensors have memory, not freed by FSDP, that none is a negated view, and that
    writing into `out` overwrites nothing that the kernel reads."""
    read = dict(zip(Packed._fields, packed.tensors, strict=False))
    if ids is not None:
        read["rows"] = ids
    for name, tensor in {**read, "out": out}.items():
        if tensor is None:
            continue
        if tensor.is_neg():
            raise UnsupportedState(
                f"{name} is a negated view, expected plain memory: use {name}.resolve_neg()"
            )
        if not has_memory(tensor):
            raise UnsupportedState(
                f"{name} has no memory, expected its values: gather it first if FSDP freed it"
            )
    if out is None:
        return
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, tensor in read.items():
        first = tensor.data_ptr()
        if start < first + tensor.nbytes and first < end:
            raise UnsupportedState(
                f"out shares memory with {name}, expected its own: pass another tensor, or None"
            )


def check_out(out, packed, selection=None):
    """Check that `out` can hold the result. Raises UnsupportedState."""
    if not isinstance(out, torch.Tensor):
        raise UnsupportedState(f"out is {type(out).__name__}, expected a tensor, or None for a new one")
    shape = result_shape(packed, selection)
    expected = (shape, packed.dtype, packed.weight.device, True, False)
    given = (tuple(out.shape), out.dtype, out.device, out.is_contiguous(), out.requires_grad)
    if given != expected:
        raise UnsupportedState(
            f"out has (shape, dtype, device, contiguous, requires_grad) {given}, expected "
            f"{expected}: pass such a tensor, or None for a new one"
        )


def result_shape(packed, selection=None):
    """Return the shape of the result, not transposed."""
    if selection is None:
        return tuple(packed.shape)
    return (selection.number, *packed.shape[1:])


def slice_elements(packed):
    """Return the elements of one slice. Raises UnsupportedState for one that no row can begin at."""
    n = math.prod(packed.shape[1:]) if packed.shape else 0
    if n % 8 or not n:
        raise UnsupportedState(
            f"a slice of {tuple(packed.shape)} has {n} elements, expected a multiple of 8: "
            "dequantize the whole weight, then index it"
        )
    return n


def check_selection(packed, selection):
    """Check that slices begin at rows and exist. Raises UnsupportedState."""
    slice_elements(packed)
    ids, first, number = selection
    if ids is None:
        if first < 0 or number < 0 or first + number > packed.shape[0]:
            raise UnsupportedState(
                f"rows are {first} to {first + number}, expected within 0 to {packed.shape[0]}"
            )
        return
    check_ids(ids)
    if ids.shape[0] != number:
        raise UnsupportedState(
            f"rows has {ids.shape[0]} ids, expected {number}: a traced call keeps the number that it saw"
        )
    if not packed.shape[0] and number:
        raise IndexError("rows has ids, expected none: the weight has no slices")
    if ids.device != packed.weight.device:
        raise UnsupportedState(
            f"rows is on {ids.device}, expected {packed.weight.device}, where the weight is"
        )


def check_ids(ids):
    """Check that the kernel can read ids. Raises UnsupportedState."""
    if ids.dtype not in (torch.int32, torch.int64):
        do = "mask.nonzero().view(-1)" if ids.dtype == torch.bool else "rows.long()"
        raise UnsupportedState(f"rows is {ids.dtype}, expected int32 or int64 ids: use {do}")
    if ids.dim() != 1 or not ids.is_contiguous():
        raise UnsupportedState(
            f"rows has shape {tuple(ids.shape)} and strides {ids.stride()}, expected contiguous ids in one "
            "dimension: use rows.contiguous()"
        )


def check_call(packed, out=None, selection=None, device=None):
    """Check all that a call was given. Return check's sizes."""
    sizes = check(packed, device)
    if selection is not None:
        check_selection(packed, selection)
    elif packed.weight.shape[0] == 1 and len(packed.shape) > 2:
        raise UnsupportedState(
            f"the weight is packed as one row, so its result is transposed, and quant_state.shape is "
            f"{tuple(packed.shape)}, expected a matrix: pass weight.view(-1, 1)"
        )
    if out is not None:
        check_out(out, packed, selection)
    ids = selection and selection.ids
    if not (is_compiling() or in_transform() or any(map(is_fake, (*packed.tensors, out, ids)))):
        check_memory(packed, out, ids)
    return sizes


def read_rows(rows, packed):
    """Return the Selection of `rows`: a slice of step 1, a tensor of ids, or a list of ints.

    Ids on a CPU are checked, which raises IndexError, and copied to the weight's device.
    """
    if isinstance(rows, torch.Tensor) and rows.device.type != "cpu":
        return Selection(rows, 0, rows.numel())
    size = packed.shape[0] if len(packed.shape) else 0
    if isinstance(rows, slice):
        try:
            first, stop, step = rows.indices(size)
        except TypeError:
            check(packed)  # of its shape
            step = None
        if step != 1:
            raise UnsupportedState(f"rows is {rows}, expected ints and step 1: pass a list of ids")
        return Selection(None, first, max(0, stop - first))
    check(packed)  # before its device is asked for
    if isinstance(rows, (list, tuple, range)):
        rows = torch.tensor([read_id(row, size) for row in rows], dtype=torch.int64, device="cpu")
    elif isinstance(rows, torch.Tensor):
        rows = rows.contiguous()
        check_ids(rows)
        if not is_traced(rows):  # a tracer knows no values
            for row in rows[(rows < 0) | (rows >= size)].tolist():
                read_id(row, size)
    else:
        raise UnsupportedState(
            f"rows is {type(rows).__name__}, expected a slice, a list of ints, or a tensor of int32 "
            "or int64 ids"
        )
    rows = rows.to(packed.weight.device)
    return Selection(rows, 0, rows.numel())


def read_id(row, size):
    """Return an id that a caller gave as an int. Raises UnsupportedState, or IndexError out of range."""
    if isinstance(row, (bool, torch.Tensor)) or not hasattr(row, "__index__"):
        do = "mask.nonzero().view(-1) of a mask" if isinstance(row, bool) else "a tensor of ids"
        raise UnsupportedState(f"rows has {row!r}, expected ints: pass {do}")
    if not 0 <= row < size:
        raise IndexError(f"rows has {row}, expected ids from 0 to {size - 1}")
    return operator.index(row)
