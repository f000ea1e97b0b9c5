"""Read a bitsandbytes state as two tuples, and `rows` as a Selection. Needs no Triton.

tensors: (weight, absmax, code2, absmax2, offset), or (weight, absmax) for a flat state.
layout: (shape, dtype, quant_type, blocksize, blocksize2, nested); blocksize2 is None if flat.
The weight holds packed codes, two per byte, high nibble first. absmax has one entry per block: a uint8 index
into the 256 fp32 values of code2, or the fp32 scale itself (flat). absmax2 is fp32, one for every blocksize2
blocks. offset is one value. shape and dtype are the result's.
"""

import operator
import typing

import torch

from .checks import check_ids, check_plain, check_state
from .private import is_traced
from .supported import UnsupportedState


class Selection(typing.NamedTuple):
    """Slices of a weight along its first dimension."""

    ids: torch.Tensor | None  # (number,) int32 or int64 on the weight's device; None: consecutive slices
    start: int  # the first of consecutive slices
    number: int


def read_state(weight, quant_state):
    """Return the tensors and the layout of a bitsandbytes weight and its QuantState. Checks only that all
    fields exist. Raises UnsupportedState if a field is missing or if bitsandbytes repacked the layer."""
    q = quant_state
    try:
        shape = tuple(q.shape)
        if q.nested:
            q2 = q.state2
            if q2.dtype is torch.float32:
                return (weight, q.absmax, q2.code, q2.absmax, q.offset), (
                    shape, q.dtype, q.quant_type, q.blocksize, q2.blocksize, True
                )  # fmt: skip
            problem = f"state2.dtype is {q2.dtype}, expected torch.float32: quantize the layer again"
        else:
            if not getattr(q, "packing_format_for_cpu", False):  # repacking also sets nested=False
                return (weight, q.absmax), (shape, q.dtype, q.quant_type, q.blocksize, None, False)
            problem = (
                "bitsandbytes repacked this layer for its CPU matmul and rounded the scales, expected the "
                "usual layout: reload the layer, and dequantize it before its first forward pass"
            )
    except (AttributeError, TypeError) as error:
        problem = missing_field(quant_state, error)
    raise UnsupportedState(problem)  # here: torch 2.11 cannot trace `raise ... from error`


def missing_field(quant_state, error):
    """Return the error text for a state that cannot be read."""
    if quant_state is None:
        return (
            "there is no quant_state, expected bitsandbytes' QuantState: move the layer to the GPU first "
            "(layer.to('cuda')), which quantizes it. Plain and 8-bit layers have none"
        )
    if not hasattr(quant_state, "nested"):
        return (
            f"quant_state is a {type(quant_state).__name__}, expected a QuantState or None: the order of"
            " arguments is dequantize(weight, quant_state, out, dtype, rows)"
        )
    return (
        f"the quant_state is incomplete ({error}), expected bitsandbytes' QuantState with all "
        "fields: reload the layer"
    )


def read_rows(rows, tensors, layout):
    """Return the Selection of `rows`: a slice of step 1, a tensor of ids, or a list of ints.

    A tensor of several dimensions is flattened. Ids on a CPU are checked, which raises IndexError, and copied
    to the weight's device.
    """
    if isinstance(rows, slice):
        return read_slice(rows, layout[0])
    if isinstance(rows, torch.Tensor) and rows.dim() != 1:
        check_plain("rows", rows)
        rows = rows.reshape(-1)
    if not isinstance(rows, torch.Tensor) or rows.device.type == "cpu":
        check_state(tensors, layout)  # first: the weight may have no device
        rows = read_ids(rows, layout[0][0]).to(tensors[0].device)
    return Selection(rows, 0, rows.numel())


def read_slice(rows, shape):
    """Return the Selection of a slice."""
    try:
        start, stop, step = rows.indices(shape[0])
    except TypeError:
        step = None
    if step != 1:
        raise UnsupportedState(f"rows is {rows}, expected ints and step 1: pass a list of ids")
    return Selection(None, start, max(0, stop - start))


def read_ids(rows, size):
    """Return ids as a tensor on the CPU. Raises UnsupportedState, or IndexError if an id is out of range."""
    if isinstance(rows, torch.Tensor):
        check_plain("rows", rows)
        rows = rows.contiguous()
        check_ids(rows)
        if not is_traced(rows):  # traced ids have no values
            for row in rows[(rows < 0) | (rows >= size)].tolist():
                read_id(row, size)
        return rows
    if not isinstance(rows, (list, tuple, range)):
        raise UnsupportedState(
            f"rows is {type(rows).__name__}, expected a slice, a list of ints, or a tensor of int32 "
            "or int64 ids"
        )
    return torch.tensor([read_id(row, size) for row in rows], dtype=torch.int64, device="cpu")


def read_id(row, size):
    """Return a caller's id as an int. Raises UnsupportedState, or IndexError if it is out of range."""
    if isinstance(row, (bool, torch.Tensor)) or not hasattr(row, "__index__"):
        do = "mask.nonzero().view(-1) instead of a mask" if isinstance(row, bool) else "a tensor of ids"
        raise UnsupportedState(f"rows has {row!r}, expected ints: pass {do}")
    if not 0 <= row < size:
        raise IndexError(f"rows has {row}, expected ids from 0 to {size - 1}")
    return operator.index(row)


def to_fields(tensors, layout, selection=None):
    """Return an operator's arguments: None for tensors that a flat layout lacks."""
    shape, *rest = layout
    unread = (None,) * (5 - len(tensors))
    return *tensors, *unread, list(shape), *rest, *(selection or (None, 0, None))


def from_fields(*fields):
    """Return the tensors, the layout, and the Selection or None from an operator's arguments."""
    shape, *rest = fields[5:11]
    nested, number = fields[10], fields[13]
    tensors = fields[:5] if nested else fields[:2]
    selection = None if number is None else Selection(*fields[11:])
    return tensors, (tuple(shape), *rest), selection


def transposed(result, weight):
    """Return the result transposed if weight.shape[0] is 1, as bitsandbytes and Unsloth do. A (1, 1) result
    stays as it is: Inductor of torch 2.11 fails on its transpose in a second graph (KeyError: op2)."""
    return result.t() if weight.shape[0] == 1 and result.shape != (1, 1) else result
