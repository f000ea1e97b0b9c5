"""The contenders, and the comparison of their bits before anything is timed."""

import os
from collections.abc import Callable
from unittest import mock

import torch

from helpers.puzzle import protocol
from nf4_triton import dequantize
from nf4_triton.core import launch
from nf4_triton.core.reference import same_bits


def installed(*names: str) -> dict[str, Callable]:
    """Return {name: layer -> weight}: ours, ours with kernel[grid], and every library that is installed here.

    names: return only these.
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


def check(call: Callable, expected: torch.Tensor) -> None:
    """Raise AssertionError unless call() returns `expected` bit for bit.

    The memory that a new result is likely to get is filled with NaN first, so that unwritten elements show.
    """
    torch.full_like(expected, torch.nan)
    if not same_bits(call(), expected):
        raise AssertionError("not bit-identical to the reference: not timed")


def exact(calls: dict[str, Callable], expected, problems: list[str], where: str) -> dict[str, Callable]:
    """Return the calls whose first and second results are `expected`; add the others to `problems`.

    A function may launch differently the second time.
    """
    kept = {}
    for name, call in calls.items():
        try:
            check(call, expected)
            check(call, expected)
            kept[name] = call
        except Exception as error:  # also from comparing a result that is not a tensor
            problems.append(f"{name} at {where}: {why(error)}")
    return kept
