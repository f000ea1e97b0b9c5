"""The section host_time of `python -m helpers bench`: the time until a call returns, for every public path,
on nested and flat weights."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from helpers.bench import clocks, contenders
from helpers.puzzle.layers import DEVICE, quantized_layer
from nf4_triton import dequantize, use_nf4_kernel

LAYER = (4096, 1024)  # (in, out) of the puzzle's smallest weight
KINDS = {  # arguments of quantized_layer
    "nested NF4": {},  # the puzzle's: every library dequantizes it
    "flat NF4": {"nested": False},
    "nested FP4": {"quant_type": "fp4"},
}


def calls_of(kind: str, switched: Callable, problems: list[str]) -> dict[str, Callable]:
    """Return {name: call} of the calls that are exact on this kind of layer. switched: dequantize_4bit."""
    layer = quantized_layer(*LAYER, torch.bfloat16, **KINDS[kind])
    packed, state = layer.weight.data, layer.weight.quant_state
    weight = contenders.exact_weight(layer)
    out, ids = torch.empty_like(weight), torch.arange(len(weight), device=DEVICE)
    libraries = contenders.installed("bitsandbytes") if KINDS[kind] else contenders.installed()
    weights = {
        **{name: partial(function, layer) for name, function in libraries.items()},
        "bitsandbytes, switched": partial(switched, packed, state),
        "dequantize(layer)": partial(dequantize, layer),
        "dequantize(packed, state)": partial(dequantize, packed, state),
        "dequantize(out=)": partial(dequantize, packed, state, out=out),
        "dequantize(rows=), all rows": partial(dequantize, packed, state, rows=ids),
    }
    calls = contenders.exact(weights, weight, problems, kind)
    calls["allocate and fill"] = lambda: torch.empty(LAYER, dtype=weight.dtype, device=DEVICE).fill_(0)
    return calls


def time_host(problems: list[str]) -> Iterator[tuple]:
    """Yield the time until a call returns on each kind of layer. The calls of a case take turns.

    The kernel is switched on only for the call whose name says so.
    """
    from bitsandbytes import functional

    with use_nf4_kernel("bitsandbytes", quiet=True, strict=True):
        switched = functional.dequantize_4bit
        for kind in KINDS:
            calls = calls_of(kind, switched, problems)
            timers = {name: partial(clocks.host_us, call) for name, call in calls.items()}
            yield kind, "us", clocks.in_turns(timers, clocks.ROUNDS)
