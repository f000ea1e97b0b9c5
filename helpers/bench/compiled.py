"""The section `compiled` of `python -m helpers bench`: 24 weights and their products under torch.compile."""

import functools
import statistics
import types
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import linear

from helpers import machine
from helpers.bench import clocks, contenders
from helpers.bench.contenders import exact_weight, us, why
from helpers.puzzle.layers import DEVICE, quantized_layer
from helpers.results.store import Row
from nf4_triton.reference import same_bits

MODES = {"eager": "_eager", "default": "", "reduce-overhead": "_reduce_overhead"}  # what names of rows end in
LIBRARIES = ("unsloth_today", "bitsandbytes")


def network(layers: list, fn: Callable, mode: str) -> Callable:
    """Return x -> its products with all weights, dequantized by `fn`, eager or compiled in a mode."""

    def products(x):
        return [linear(x, fn(layer)) for layer in layers]

    # Dynamo keeps what it compiled, and its guards, with the code: each contender has its own.
    code = products.__code__.replace()
    own = types.FunctionType(code, products.__globals__, None, None, products.__closure__)
    if mode == "eager":
        return own
    if not clocks.ON_GPU:
        return torch.compile(own, backend="eager")
    return torch.compile(own, mode=mode)


def exact_networks(networks: dict, x, problems: list[str]) -> dict[str, Callable]:
    """Return {name: call on x} of the networks whose results are those of exact weights, bit for bit.

    Inductor may round sums otherwise than eager mode: the bits of `products_only` in any mode will do.
    """
    kept, allowed = {}, []
    for name, function in networks.items():
        call = functools.partial(function, x)
        try:
            call(), call()  # also the second launch of each layer, which goes another way than the first
            result = torch.stack(call())  # a copy: CUDA graphs write the next results to the same memory
        except Exception as error:
            problems.append(f"{name} at {len(x)} tokens: {why(error)}")
            continue
        if name.startswith("products_only"):
            allowed.append(result)
        if any(same_bits(result, one) for one in allowed):
            kept[name] = call
        else:
            problems.append(f"{name} at {len(x)} tokens: not bit-identical with exact weights: not timed")
    return kept


@torch.no_grad()
def time_compiled(scope, problems: list[str]) -> Iterator[Row]:
    """Yield the time of all weights, each followed by its product: eager, and under one torch.compile."""
    torch._dynamo.reset()
    dtype = torch.float16 if clocks.ON_GPU and not machine.native_bf16() else torch.bfloat16
    layers = [quantized_layer(*scope.layer, dtype, seed=index) for index in range(scope.weights)]
    for layer in layers:
        layer.exact = torch.nn.Parameter(exact_weight(layer), requires_grad=False)
    everyone, networks = contenders.all_contenders(), {}
    fns = {"products_only": lambda layer: layer.exact}
    for name in ("ours", *LIBRARIES):
        if name in everyone:
            fns[name] = everyone[name]
    for mode, ending in MODES.items():
        for name, fn in fns.items():
            networks[name + ending] = network(layers, fn, mode)
    medians = {name: [] for name in networks}
    for tokens in scope.tokens:
        x = torch.randn(tokens, scope.layer[0], dtype=dtype, device=DEVICE)
        torch._dynamo.maybe_mark_dynamic(x, 0)  # one graph serves every number of tokens
        calls = exact_networks(networks, x, problems)
        seconds = clocks.host_seconds(calls, scope.rounds, min(scope.inner, 10), wait=True)
        yield from us("compiled", f"forward {tokens} tokens", seconds)
        for name, values in seconds.items():
            medians[name].append(statistics.median(values))
    for name in LIBRARIES:
        for ending in MODES.values():
            ours = medians["ours" + ending]
            theirs = medians.get(name + ending, [])
            if len(ours) == len(theirs) == len(scope.tokens):
                ratio = statistics.geometric_mean(theirs) / statistics.geometric_mean(ours)
                yield Row("compiled", "geometric mean", name + ending, "x", [ratio])
    torch._dynamo.reset()
