"""The contenders, and the comparison of bits that comes before any clock."""

import os
from collections.abc import Callable
from unittest import mock

import torch

from helpers.puzzle import protocol
from nf4_triton import dequantize
from nf4_triton.core import launch
from nf4_triton.core.reference import same_bits


def installed(*names: str) -> dict[str, Callable]:
    """Return {name: layer -> weight}: ours, ours by kernel[grid], every library that is installed here.

    names: only these of them.
    """
    found = {"ours": launch.your_dequantize_nf4}
    if protocol.ON_GPU:
        found["ordinary"] = protocol.kernel_grid
    found |= protocol.baselines()
    return {name: found[name] for name in names or found if name in found}


def why(error: BaseException) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def exact_weight(layer) -> torch.Tensor:
    """Return the layer's weight from the plain torch reference."""
    with mock.patch.dict(os.environ, NF4_BACKEND="torch"):
        return dequantize(layer)


def check(call: Callable, expected: torch.Tensor, out=None) -> None:
    """Raise AssertionError unless call() returns `expected` bit for bit, or writes it into `out`.

    NaN goes first into `out`, else into the memory that a new result is likely to get, so that elements left
    unwritten show.
    """
    poison = torch.empty_like(expected) if out is None else out
    poison.view(torch.uint8).fill_(255)
    del poison
    result = call()
    protocol.synchronize()
    if out is not None:
        result = out
    if not same_bits(result, expected):
        raise AssertionError("not bit-identical to the reference: not timed")


def exact(calls: dict[str, Callable], expected, problems: list[str], where: str) -> dict[str, Callable]:
    """Return those calls whose first and second result is `expected`; the others are in `problems`.

    A function's second launch may go another way than its first.
    """
    kept = {}
    for name, call in calls.items():
        try:
            check(call, expected)
            check(call, expected)
            kept[name] = call
        except Exception as error:  # also of a result that is no tensor
            problems.append(f"{name} at {where}: {why(error)}")
    return kept
