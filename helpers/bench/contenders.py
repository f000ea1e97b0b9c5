"""The contenders, and the comparison of bits that comes before any clock."""

from collections.abc import Callable

import torch

from helpers.bench import clocks
from helpers.nf4 import launch
from helpers.nf4.reference import same_bits
from helpers.puzzle import protocol

ON_GPU = ("ours", "unsloth_today", "unsloth_classic", "bitsandbytes")  # PEFT launches bitsandbytes' kernels


def all_contenders() -> dict[str, Callable]:
    """Return {name: layer -> weight}: ours, its two public launch forms, and every library installed here."""
    forms = protocol.launch_forms(launch.your_dequantize_nf4).values()  # without a GPU ours alone
    found = dict(zip(("ours", "ordinary", "compiled_grid"), forms, strict=False))
    return found | {name: one.fn for name, one in protocol.baselines().items() if one.fn}


def missing() -> dict[str, str]:
    """Return {name: why} of the libraries that cannot take part here."""
    return {name: one.reason for name, one in protocol.baselines().items() if not one.fn}


def why(error: BaseException) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def check(call: Callable[[], torch.Tensor], expected: torch.Tensor, out=None) -> None:
    """Raise AssertionError unless call() returns `expected` bit for bit, or writes it into `out`.

    NaN goes first into `out`, else into the memory that a new result is likely to get, so that elements left
    unwritten show.
    """
    poison = torch.empty_like(expected) if out is None else out
    poison.view(torch.uint8).fill_(255)
    del poison
    result = call()
    clocks.synchronize()
    if not same_bits(result if out is None else out, expected):
        raise AssertionError("not bit-identical to the reference: not timed")


def right(calls: dict[str, Callable], expected: torch.Tensor, problems: list[str]) -> dict[str, Callable]:
    """Return the calls whose result is `expected`, bit for bit; say of the others why not in `problems`."""
    kept = {}
    for name, call in calls.items():
        try:
            check(call, expected)
            kept[name] = call
        except Exception as error:  # also of a result that is no tensor
            problems.append(f"{name}: {why(error)}")
    return kept
