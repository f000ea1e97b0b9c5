"""The sections host_time and compiled of `python -m helpers bench`, timed on the host.

host_time is one call, without and with the wait for the GPU; compiled is 24 weights and their products under
torch.compile.
"""

import types
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import linear

from helpers.bench import clocks, contenders
from helpers.bench.contenders import exact_weight
from helpers.puzzle import turns
from helpers.puzzle.layers import DEVICE, ON_GPU, quantized_layer
from nf4_triton.backend import dequantize
from nf4_triton.settings import has_no_bf16

LAYER = (4096, 1024)  # (in, out) of the puzzle's smallest weight
MODES = ("default", "reduce-overhead")
WEIGHTS = 24  # under one torch.compile
TOKENS = (64, 512, 2048)


def host_us(calls: dict[str, Callable], count: int, wait: int = 0) -> dict[str, list[float]]:
    """Return {name: microseconds of a call, one value a round}; count, wait: as for host_timer."""
    timers = {name: clocks.host_timer(call, count, wait) for name, call in calls.items()}
    return clocks.in_turns(timers, clocks.ROUNDS)


# --- host_time ---


def time_host(problems: list[str]) -> Iterator[tuple]:
    """Yield the time until a call returns, and with a synchronize after every call.

    Beside the contenders: the package's dequantize() with `out=`, and with all rows chosen by their ids.
    """
    layer = quantized_layer(*LAYER, torch.bfloat16)
    state = layer.weight.quant_state
    expected = exact_weight(layer)
    out = torch.empty_like(expected)
    ids = torch.arange(len(expected), device=expected.device)
    functions = {
        **contenders.installed(),
        "ours_out": lambda layer: dequantize(layer.weight, state, out=out),
        "ours_rows": lambda layer: dequantize(layer.weight, state, rows=ids),
    }
    with turns.own_libraries():
        calls = contenders.exact(functions, layer, expected, problems, "host_time")
        yield "until_return", "us", host_us(calls, clocks.INNER)
        yield "synchronized", "us", host_us(calls, clocks.INNER, wait=1)


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
        layer.exact = torch.nn.Parameter(exact_weight(layer), requires_grad=False)
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
            calls = contenders.exact(networks, x, expected, problems, case)
            yield case, "us", host_us(calls, 10, wait=1)
    torch._dynamo.reset()
