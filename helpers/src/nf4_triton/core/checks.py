"""Check a call's arguments: tensors and layout from state.py, `out`, a Selection. Needs no Triton.

Each check raises UnsupportedState, which says what is wrong, what was expected, and what to do.
"""

import math

import torch
from torch.autograd.forward_ad import unpack_dual

from .private import has_memory, in_transform, is_compiling, is_fake, is_traced
from .reference import VALUES
from .supported import UnsupportedState

MAX_ELEMENTS = 1 << 34  # of one tensor: the kernel counts rows of 8 elements in 31 bits
STORAGES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# bitsandbytes loads the offset in torch's default dtype.
OFFSETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES = ("weight", "absmax", "code2", "absmax2", "offset")


def check_call(tensors, layout, out=None, selection=None, device=None):
    """Check all arguments of a call. Return check_state's sizes."""
    sizes = check_state(tensors, layout, device)
    (weight, *_), (shape, dtype, *_) = tensors, layout
    if selection is not None:
        check_selection(selection, shape, weight.device)
    elif weight.shape[0] == 1 and len(shape) > 2:
        raise UnsupportedState(
            f"the weight is packed as one row, so its result is transposed, and quant_state.shape is "
            f"{tuple(shape)}, expected a matrix: pass weight.view(-1, 1)"
        )
    if out is not None:
        check_out(out, result_shape(shape, selection), dtype, weight.device)
    ids = selection and selection.ids
    if is_compiling() or in_transform():
        return sizes
    # A fake tensor with a real weight is an error, unless a mode makes every result fake.
    if not (is_traced(weight) and any(map(is_fake, (*tensors, out, ids)))):
        check_memory(tensors, out, ids)
    return sizes


def check_state(tensors, layout, device=None):
    """Return (elements, log2 blocksize, log2 blocksize2 or 0). Raises UnsupportedState.

    Reads only metadata, which torch.compile can trace. device: the type of device where the weight must be,
    or None for any.
    """
    n, log2_block = check_layout(layout)
    shape, _, _, blocksize, blocksize2, nested = layout
    weight, absmax, *second = tensors
    check_weight(weight, n, shape, device)
    blocks = -(-n // blocksize)
    check_tensor("absmax", absmax, weight, blocks, torch.uint8 if nested else torch.float32)
    if not nested:
        return n, log2_block, 0
    log2_block2 = log2_of("state2.blocksize", blocksize2, 1, 31)
    code2, absmax2, offset = second
    check_tensor("code2", code2, weight, 256, torch.float32)
    check_tensor("absmax2", absmax2, weight, -(-blocks // blocksize2), torch.float32)
    check_tensor("offset", offset, weight, 1, *OFFSETS)
    # bitsandbytes adds a one-dimensional fp64 offset in fp64, which rounds differently.
    if offset.numel() != 1 or (offset.dim() and offset.dtype == torch.float64):
        raise UnsupportedState(
            f"offset has shape {tuple(offset.shape)} and {offset.dtype}, expected one value, "
            "in float64 without a dimension: reload the layer"
        )
    return n, log2_block, log2_block2


def check_layout(layout):
    """Return (elements, log2 blocksize). Raises UnsupportedState."""
    shape, dtype, quant_type, blocksize, *_ = layout
    if not isinstance(quant_type, str) or quant_type not in VALUES:
        raise UnsupportedState(
            f"quant_type is {quant_type!r}, expected one of {', '.join(VALUES)}: dequantize other states "
            "with the library that made them"
        )
    if dtype not in DTYPES:
        raise UnsupportedState(
            f"quant_state.dtype is {dtype}, expected one of {DTYPES}: set quant_state.dtype to one of them"
        )
    if not all(isinstance(size, (int, torch.SymInt)) and size >= 0 for size in shape):
        raise UnsupportedState(f"quant_state.shape is {shape}, expected the weight's shape: reload the layer")
    log2_block = log2_of("quant_state.blocksize", blocksize, 8, 34)
    n = math.prod(shape)
    if n >= MAX_ELEMENTS:
        raise UnsupportedState(
            f"the weight has {n} elements, expected fewer than 2**34: dequantize it in parts"
        )
    return n, log2_block


def log2_of(name, size, least, most):
    """Return log2 of a power of two, capped at `most`, at which one block already spans the tensor."""
    if not isinstance(size, (int, torch.SymInt)) or not least <= size < 1 << 63 or size & (size - 1):
        raise UnsupportedState(
            f"{name} is {size!r}, expected a power of two, {least} or more (bitsandbytes uses 32 to 4096): "
            "quantize the layer again"
        )
    return min(int(size).bit_length() - 1, most)


def check_weight(weight, n, shape, device):
    """Check that the weight holds packed codes for n elements, where the kernel can read them."""
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedState(
            f"the weight is {type(weight).__name__}, expected a tensor of packed 4-bit codes: pass "
            "a Linear4bit, or its weight and weight.quant_state"
        )
    if weight.device.type == "meta":
        raise UnsupportedState(
            "the weight is on meta, expected its values (accelerate loses them when it offloads a 4-bit "
            "layer): reload it, and move it with layer.to(device) or accelerate.cpu_offload_with_hook"
        )
    if device and weight.device.type not in ("cuda", device):
        raise UnsupportedState(
            f"the weight is on {weight.device}, expected CUDA: move the layer, or set "
            "TRITON_INTERPRET=1 before Python starts to run on the CPU"
        )
    if weight.dtype not in STORAGES or not weight.dim():
        raise UnsupportedState(
            f"the weight is {weight.dtype} of shape {tuple(weight.shape)}, expected packed 4-bit codes "
            f"of shape (n / 2, 1) in one of {STORAGES}: quantize the layer again"
        )
    check_tensor("weight", weight, weight, 0, *STORAGES)
    held = weight.numel() * weight.itemsize
    needed = -(-n // (2 * weight.itemsize)) * weight.itemsize  # whole elements of the storage type
    if held != needed:
        do = (
            "it belongs to another state, or .float() or .half() converted it; reload the layer"
            if held > needed
            else "gather it first if FSDP or DeepSpeed ZeRO-3 sharded it; for a part of a weight, pass "
            "the whole weight and rows="
        )
        raise UnsupportedState(
            f"the weight holds {held} bytes, expected {needed} for the shape {tuple(shape)}: {do}"
        )


def check_tensor(name, tensor, weight, least, *dtypes):
    """Check that a tensor of a state is plain and contiguous, on the weight's device, of one of the dtypes,
    and has at least `least` elements."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedState(
            f"{name} is {type(tensor).__name__}, expected a tensor: the quant_state is incomplete; "
            "reload the layer"
        )
    check_plain(name, tensor)
    if tensor.dtype not in dtypes or tensor.numel() < least:
        raise UnsupportedState(
            f"{name} has {tensor.numel()} elements of {tensor.dtype}, expected {least} or more of "
            f"{dtypes[0]}: state and weight do not belong together; reload the layer"
        )
    if tensor.device != weight.device:
        raise UnsupportedState(
            f"{name} is on {tensor.device}, expected {weight.device} like the weight: move the whole layer "
            "with layer.to(device)"
        )
    if not tensor.is_contiguous():
        raise UnsupportedState(
            f"{name} is not contiguous, expected contiguous memory: use {name}.contiguous()"
        )


def check_plain(name, tensor):
    """Check that a tensor is strided and not a DTensor."""
    if type(tensor).__name__ == "DTensor":
        raise UnsupportedState(f"{name} is a DTensor, expected a plain tensor: pass {name}.full_tensor()")
    if not is_compiling() and tensor.layout != torch.strided:  # Dynamo cannot trace this in a backward pass
        raise UnsupportedState(f"{name} is {tensor.layout}, expected a plain tensor: pass {name}.to_dense()")


def check_memory(tensors, out=None, ids=None):
    """Check that real tensors have memory (FSDP frees it), that none is a negated view, and that writing into
    `out` overwrites nothing that the kernel reads."""
    named = dict(zip(NAMES, tensors, strict=False)) | {"rows": ids, "out": out}
    named = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in named.items():
        if tensor.is_neg():
            raise UnsupportedState(
                f"{name} is a negated view, expected plain memory: use {name}.resolve_neg()"
            )
        if not has_memory(tensor):
            raise UnsupportedState(
                f"{name} has no memory, expected its values: gather it first if FSDP freed it, and do not "
                "mix fake tensors with a real weight"
            )
    if out is None:
        return
    del named["out"]
    for name, tensor in named.items():
        if overlap(out, tensor):
            raise UnsupportedState(
                f"out shares memory with {name}, expected its own: pass another tensor, or None"
            )


def overlap(out, tensor):
    """Return whether two tensors share memory."""
    start, address = out.data_ptr(), tensor.data_ptr()
    return start < address + tensor.nbytes and address < start + out.nbytes


def check_out(out, shape, dtype, device):
    """Check that `out` can hold a result. Raises UnsupportedState."""
    if not isinstance(out, torch.Tensor):
        raise UnsupportedState(f"out is {type(out).__name__}, expected a tensor, or None for a new one")
    check_plain("out", out)
    expected = (tuple(shape), dtype, device, True, False)
    given = (tuple(out.shape), out.dtype, out.device, out.is_contiguous(), has_derivative(out))
    if given != expected:
        raise UnsupportedState(
            f"out has (shape, dtype, device, contiguous, gradient or tangent) {given}, expected "
            f"{expected}: pass such a tensor, or None for a new one"
        )


def has_derivative(out):
    """Return whether autograd tracks `out`, backward or forward: a launch would not update its tangent."""
    return out.requires_grad or (not is_compiling() and unpack_dual(out).tangent is not None)


def check_selection(selection, shape, device):
    """Check that slices exist and that each begins at a row. Raises UnsupportedState."""
    slice_elements(shape)
    ids, start, number = selection
    if ids is None:
        if start < 0 or number < 0 or start + number > shape[0]:
            raise UnsupportedState(f"rows are {start} to {start + number}, expected within 0 to {shape[0]}")
        return
    check_ids(ids)
    if ids.shape[0] != number:
        raise UnsupportedState(
            f"rows has {ids.shape[0]} ids, expected {number}: a traced call keeps the number that it saw"
        )
    if not shape[0] and number:
        raise IndexError("rows has ids, expected none: the weight has no slices")
    if ids.device != device:
        raise UnsupportedState(f"rows is on {ids.device}, expected {device} like the weight")


def slice_elements(shape):
    """Return the number of elements of a slice. Raises UnsupportedState if slices do not begin at rows."""
    n = math.prod(shape[1:])
    if n % 8 or not n:
        raise UnsupportedState(
            f"a slice of {tuple(shape)} has {n} elements, expected a multiple of 8: "
            "dequantize the whole weight, then index it"
        )
    return n


def check_ids(ids):
    """Check that the kernel can read ids. Raises UnsupportedState."""
    check_plain("rows", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        do = "mask.nonzero().view(-1)" if ids.dtype == torch.bool else "rows.long()"
        raise UnsupportedState(f"rows is {ids.dtype}, expected int32 or int64 ids: use {do}")
    if ids.dim() != 1 or not ids.is_contiguous():
        raise UnsupportedState(
            f"rows has shape {tuple(ids.shape)} and strides {ids.stride()}, expected contiguous ids in one "
            "dimension: use rows.contiguous()"
        )


def result_shape(shape, selection=None):
    """Return the shape of the result, not transposed."""
    return tuple(shape) if selection is None else (selection.number, *shape[1:])
