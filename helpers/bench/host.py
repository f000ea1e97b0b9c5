"""The section host_time of `python -m helpers bench`: one call of every public path, on nested and flat
weights, timed on the host."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from helpers.bench import clocks, contenders
from helpers.puzzle.layers import DEVICE, quantized_layer
from nf4_triton import dequantize, use_nf4_kernel

LAYER = (4096, 1024)  # (in, out) of the puzzle's smallest weight
KINDS = {  # of quantized_layer; whether each call waits for the GPU
    "nested NF4": ({}, False),  # the puzzle's: all libraries take it
    "nested NF4, synchronized": ({}, True),
    "flat NF4": ({"nested": False}, False),
    "nested FP4": ({"quant_type": "fp4"}, False),
}
PRODUCT = 64  # rows of the input of a forward pass


def forward_calls(layer, x, weight) -> dict[str, Callable]:
    """Return {name: call that multiplies x by the layer's weight}: bitsandbytes' branch that dequantizes and
    multiplies, where there is a GPU, and the multiplication alone."""
    calls = {"product alone": partial(linear, x, weight)}
    if ops := sys.modules.get("bitsandbytes.backends.cuda.ops"):
        state, absmax, nested = layer.weight.quant_state, layer.weight.quant_state.absmax, ()
        if second := state.state2:
            absmax, nested = second.absmax, (absmax, second.code, state.offset)
        parts = x, layer.weight.data, state.shape, absmax, state.blocksize, state.quant_type, None, *nested
        switched = ops._dequant_linear_fallback
        calls["forward, switched"] = partial(switched, *parts)
        calls["forward"] = partial(switched.__wrapped__, *parts)
    return calls


def calls_of(kind: str, switched: Callable, problems: list[str]) -> dict[str, Callable]:
    """Return {name: call} of all that is exact on this kind of layer. switched: dequantize_4bit."""
    more, _ = KINDS[kind]
    layer = quantized_layer(*LAYER, torch.bfloat16, **more)
    packed, state = layer.weight.data, layer.weight.quant_state
    weight = contenders.exact_weight(layer)
    out, ids = torch.empty_like(weight), torch.arange(len(weight), device=DEVICE)
    libraries = contenders.installed("bitsandbytes") if more else contenders.installed()
    weights = {
        **{name: partial(function, layer) for name, function in libraries.items()},
        "bitsandbytes, switched": partial(switched, packed, state),
        "dequantize(layer)": partial(dequantize, layer),
        "dequantize(packed, state)": partial(dequantize, packed, state),
        "dequantize(out=)": partial(dequantize, packed, state, out=out),
        "dequantize(rows=), all rows": partial(dequantize, packed, state, rows=ids),
    }
    x = torch.randn(PRODUCT, LAYER[0], dtype=weight.dtype, device=DEVICE)
    calls = contenders.exact(weights, weight, problems, kind)
    calls |= contenders.exact(forward_calls(layer, x, weight), linear(x, weight), problems, kind)
    calls["allocate and fill"] = lambda: torch.empty(LAYER, dtype=weight.dtype, device=DEVICE).fill_(0)
    return calls


def time_host(problems: list[str]) -> Iterator[tuple]:
    """Yield the time until a call returns on each kind of layer, and with a synchronize after each call.

    The calls of a case take turns. bitsandbytes is switched only where the name says so.
    """
    from bitsandbytes import functional

    with use_nf4_kernel("bitsandbytes", quiet=True, strict=True):
        switched = functional.dequantize_4bit
        for kind, (_, wait) in KINDS.items():
            calls = calls_of(kind, switched, problems)
            timers = {name: clocks.host_timer(call, clocks.INNER, wait) for name, call in calls.items()}
            yield kind, "us", clocks.in_turns(timers, clocks.ROUNDS)
