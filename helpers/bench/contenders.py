"""The contenders, and the comparison of bits that comes before any clock."""

import functools
import math
import sys
from collections.abc import Callable

import torch

from helpers.bench import clocks
from helpers.puzzle import protocol
from helpers.results.store import Row
from nf4_triton import launch
from nf4_triton.reference import dequantize, same_bits
from nf4_triton.state import read_state

ON_GPU = ("ours", "unsloth_today", "unsloth_classic", "bitsandbytes")  # PEFT launches bitsandbytes' kernels


def all_contenders() -> dict[str, Callable]:
    """Return {name: layer -> weight}: ours, its two public launch forms, and every library installed here."""
    forms = protocol.launch_forms(launch.your_dequantize_nf4)  # without a GPU ours alone
    return forms | {name: one.fn for name, one in protocol.baselines().items() if one.fn}


def writing_into_out(layer) -> dict[str, Callable]:
    """Return {name: layer -> weight} of calls with `out=`, a tensor that suits layers like this one."""
    ours, theirs = (torch.full_like(exact_weight(layer), math.nan) for _ in range(2))

    def ours_out(layer):
        weight = layer._parameters["weight"]
        return launch._your_dequantize_nf4(weight, weight.quant_state, ours)

    forms = {"ours_out": ours_out}
    if protocol.baselines()["unsloth_today"].fn:
        fast = sys.modules["unsloth.kernels.utils"].fast_dequantize
        forms["unsloth_out"] = lambda layer: fast(layer.weight, layer.weight.quant_state, theirs)
    return forms


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
    same = same_bits if expected.is_floating_point() else torch.equal  # move_bytes writes integers
    if not same(result if out is None else out, expected):
        raise AssertionError("not bit-identical to the reference: not timed")


def exact_weight(layer) -> torch.Tensor:
    """Return the layer's weight from the plain torch reference."""
    return dequantize(read_state(layer.weight.data, layer.weight.quant_state))


def exact_calls(functions: dict[str, Callable], layer, problems: list[str]) -> dict[str, Callable]:
    """Return {name: call on the layer} of the functions whose result is exact; `problems` has the others."""
    kept, expected = {}, exact_weight(layer)
    with protocol.own_libraries():
        for name, function in functions.items():
            call = functools.partial(function, layer)
            try:
                check(call, expected)
                kept[name] = call
            except Exception as error:  # also of a result that is no tensor
                problems.append(f"{name}: {why(error)}")
    return kept


def us(section: str, case: str, seconds: dict[str, list[float]]) -> list[Row]:
    """Return a row in microseconds for each contender."""
    return [Row(section, case, name, "us", [1e6 * s for s in values]) for name, values in seconds.items()]
