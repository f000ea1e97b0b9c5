"""The sections host_time and compiled of `python -m helpers bench`, timed on the host.

host_time is one call of every public path, on nested and flat weights; compiled is 24 weights and their
products under torch.compile.
"""

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from helpers.bench import clocks, contenders
from helpers.puzzle import turns
from helpers.puzzle.layers import DEVICE, ON_GPU, quantized_layer
from nf4_triton import dequantize, use_nf4_kernel
from nf4_triton.core.settings import has_no_bf16

LAYER = (4096, 1024)  # (in, out) of the puzzle's smallest weight
NESTED = "nested NF4"  # the puzzle's kind: all libraries take it
KINDS = {NESTED: {}, "flat NF4": {"nested": False}, "nested FP4": {"quant_type": "fp4"}}
PRODUCT = 64  # rows of the input of a forward pass
MODES = ("default", "reduce-overhead")
WEIGHTS = 24  # under one torch.compile
TOKENS = (64, 512, 2048)


# --- host_time ---


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
    layer = quantized_layer(*LAYER, torch.bfloat16, **KINDS[kind])
    packed, state = layer.weight.data, layer.weight.quant_state
    weight = contenders.exact_weight(layer)
    out, ids = torch.empty_like(weight), torch.arange(len(weight), device=DEVICE)
    libraries = contenders.installed() if kind == NESTED else contenders.installed("bitsandbytes", "peft")
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

    All of it takes turns. bitsandbytes is switched only where the name says so.
    """
    from bitsandbytes import functional

    timers = {}
    with use_nf4_kernel("bitsandbytes", quiet=True, strict=True):
        switched = functional.dequantize_4bit
        with turns.own_libraries():  # for PEFT
            for kind in KINDS:
                for name, call in calls_of(kind, switched, problems).items():
                    timers[kind, name] = clocks.host_timer(call, clocks.INNER)
                    if kind == NESTED:
                        timers[f"{kind}, synchronized", name] = clocks.host_timer(call, clocks.INNER, wait=1)
            found = clocks.in_turns(timers, clocks.ROUNDS)
    for case in dict.fromkeys(case for case, _ in timers):
        yield case, "us", {name: us for (of, name), us in found.items() if of == case}


# --- compiled ---


def network(layers: list, fn: Callable, mode: str) -> Callable:
    """Return x -> its products with all weights, dequantized by `fn`, compiled in a mode."""

    def products(x):
        return [linear(x, fn(layer)) for layer in layers]

    # Dynamo keeps what it compiled, and its guards, with the code: each contender has its own.
    code = products.__code__.replace()
    own = types.FunctionType(code, products.__globals__, closure=products.__closure__)
    return torch.compile(own, mode=mode, backend="inductor" if ON_GPU else "eager")


@torch.no_grad()
def time_compiled(problems: list[str]) -> Iterator[tuple]:
    """Yield the time of all weights, each followed by its product, under one torch.compile."""
    torch._dynamo.reset()
    dtype = torch.float16 if has_no_bf16(torch.device(DEVICE)) else torch.bfloat16
    layers = [quantized_layer(*LAYER, dtype, seed=index) for index in range(WEIGHTS)]
    for layer in layers:
        layer.exact = torch.nn.Parameter(contenders.exact_weight(layer), requires_grad=False)
    fns = {
        "products_only": lambda layer: layer.exact,
        **contenders.installed("ours", "unsloth_today", "bitsandbytes"),
    }
    for mode in MODES:
        networks = {name: network(layers, fn, mode) for name, fn in fns.items()}
        for tokens in TOKENS:
            x = torch.randn(tokens, LAYER[0], dtype=dtype, device=DEVICE)
            torch._dynamo.maybe_mark_dynamic(x, 0)  # one graph serves every number of tokens
            case = f"forward {tokens} tokens, {mode}"
            # Inductor may round sums otherwise than eager mode does.
            expected = torch.stack(networks["products_only"](x))
            calls = {name: partial(network, x) for name, network in networks.items()}
            calls = contenders.exact(calls, expected, problems, case)
            timers = {name: clocks.host_timer(call, 10, wait=1) for name, call in calls.items()}
            yield case, "us", clocks.in_turns(timers, clocks.ROUNDS)
    torch._dynamo.reset()
