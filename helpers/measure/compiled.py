"""24 weights, each followed by its product, eager and under one torch.compile: forward, and a LoRA step.

Each contender has a network function of its own with its own code object, since Dynamo keeps what it compiled
(and the guards it tries in order) with the code.
"""

import functools
import types
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from helpers.measure import clocks
from helpers.measure.contenders import Bench, Scope, why
from helpers.oracle.layers import quantized_layer
from helpers.record.names import BASELINES_ON_GPU, dtype_name
from helpers.record.results import Compile, CompileCase, Rows, Times
from helpers.submission import protocol

DTYPE, RANK = torch.bfloat16, 16
ROUNDS, INNER = 7, 10
Result = tuple[torch.Tensor, ...]


def _own_code(function: Callable) -> Callable:
    """The function with a code object of its own."""
    code = function.__code__.replace()
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return copy


def _sizes(scope: Scope) -> list[tuple[int, int]]:
    """(in_features, out_features) of each layer: there and back in turn."""
    return [scope.shape if index % 2 else scope.shape[::-1] for index in range(scope.weights)]


def _layers(bench: Bench) -> list:
    """Real layers, scaled to keep activations small."""
    layers = []
    for index, sizes in enumerate(_sizes(bench.scope)):
        layer = quantized_layer(*sizes, DTYPE, device=bench.device, seed=index)
        state = layer.weight.quant_state
        for scales in (state.state2.absmax, state.offset):
            scales.mul_(sizes[0] ** -0.5)
        layer.exact = protocol.expected(layer)
        layers.append(layer)
    return layers


def _exact(layer) -> torch.Tensor:
    """The weight, decoded beforehand."""
    return layer.exact


def _adapters(bench: Bench) -> list[tuple[torch.Tensor, ...]]:
    """LoRA matrices (RANK, in_features) and (out_features, RANK) of each layer, to be trained."""
    generator = torch.Generator(bench.device).manual_seed(0)

    def matrix(*size):
        values = torch.randn(size, dtype=DTYPE, device=bench.device, generator=generator)
        return values.mul_(0.01).requires_grad_()

    return [(matrix(RANK, inputs), matrix(outputs, RANK)) for inputs, outputs in _sizes(bench.scope)]


def _forward(dequantize: Callable, layers: list) -> Callable:
    def forward(x):
        for layer in layers:
            x = linear(x, dequantize(layer))
        return x

    return _own_code(forward)


def _with_adapters(dequantize: Callable, layers: list, adapters: list) -> Callable:
    """As QLoRA has it: a weight is dequantized in the forward pass and once more in the backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, index):
            ctx.index = index
            return linear(x, dequantize(layers[index]))

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ dequantize(layers[ctx.index]), None

    def forward(x):
        for index, (down, up) in enumerate(adapters):
            x = Product.apply(x, index) + linear(linear(x, down), up)
        return x

    return _own_code(forward)


class Network:
    """Makes the calls that are timed: of one contender, forward or a LoRA step, eager or compiled."""

    def __init__(self, bench: Bench):
        self.bench, self.layers, self.adapters = bench, _layers(bench), _adapters(bench)
        self.trained = [matrix for pair in self.adapters for matrix in pair]
        self.compiled = {}  # one graph for every number of tokens: compiling takes most of the time

    def call(self, dequantize: Callable, tokens: int, backward: bool, compiled: bool) -> Callable[[], Result]:
        device, scope = self.bench.device, self.bench.scope
        generator = torch.Generator(device).manual_seed(tokens)
        x = torch.randn(tokens, scope.shape[1], dtype=DTYPE, device=device, generator=generator)
        kind = dequantize, backward
        forward = self.compiled.get(kind) if compiled else None
        if forward is None and backward:
            forward = _with_adapters(dequantize, self.layers, self.adapters)
        elif forward is None:
            forward = _forward(dequantize, self.layers)
        if compiled and kind not in self.compiled:
            forward = self.compiled[kind] = torch.compile(forward, backend=scope.backend, dynamic=True)
        return functools.partial(self._step if backward else self._infer, forward, x)

    def _infer(self, forward: Callable, x: torch.Tensor) -> Result:
        with torch.no_grad():
            return (forward(x),)

    def _step(self, forward: Callable, x: torch.Tensor) -> Result:
        result = forward(x)
        return result.detach(), *torch.autograd.grad(result, self.trained, torch.ones_like(result))

    def references(self, tokens: int, backward: bool):
        """The same step with weights decoded beforehand: eager, then compiled, where sums may be fused.

        Made one after the other, as far as they are asked for.
        """
        for compiled in (False, True):
            yield self.call(_exact, tokens, backward, compiled)()


class _Gate:
    """Are a call's results those of one of the references, bit for bit?"""

    def __init__(self, references):
        self.left, self.made = references, []

    def wrong(self, call: Callable[[], Result]) -> str:
        try:
            call()
            result = call()  # of the launches that are repeated, not of the first call
        except Exception as error:
            return why(error)
        for index in range(2):
            if index == len(self.made):
                self.made.append(next(self.left))
            if all(protocol.same_bits(a, b) for a, b in zip(result, self.made[index], strict=True)):
                return ""
        return "not bit-identical to the same step with exact weights: not timed"


def _contenders(bench: Bench) -> dict[str, Callable]:
    wanted = ("kernel", *(name for name in BASELINES_ON_GPU if name != "unsloth_classic"))
    return {name: fn for name, fn in bench.contenders().items() if name in wanted}


def _case(bench: Bench, network: Network, tokens: int, backward: bool) -> CompileCase:
    gate, calls, failures = _Gate(network.references(tokens, backward)), {}, {}
    for name, dequantize in _contenders(bench).items():
        for compiled in (False, True):
            call = network.call(dequantize, tokens, backward, compiled)
            if wrong := gate.wrong(call):
                failures[f"{name} {'compiled' if compiled else 'eager'}"] = wrong
            else:
                calls[name, compiled] = call
    inner = min(INNER, bench.scope.inner)
    times = clocks.time_interleaved(calls, bench.rounds(ROUNDS, ROUNDS), inner, wait=True)
    eager, compiled = ({n: Times.of(times[n, c]) for n, c in times if c is way} for way in (False, True))
    return CompileCase(tokens=tokens, backward=backward, eager=eager, compiled=compiled, failures=failures)


def _one_call(bench: Bench, network: Network) -> tuple[Rows, Rows, dict[str, str]]:
    """Microseconds until one dequantization alone returns: eager, compiled; and failures."""
    layer, calls, failures = network.layers[0], {}, {}
    gate = _Gate(iter([(layer.exact,)] * 2))
    for name, dequantize in _contenders(bench).items():

        def one(dequantize=dequantize):
            return dequantize(layer)

        for compiled in (False, True):
            call = torch.compile(_own_code(one), backend=bench.scope.backend) if compiled else one
            if wrong := gate.wrong(lambda call=call: (call(),)):
                failures[f"{name} {'compiled' if compiled else 'eager'}"] = wrong
            else:
                calls[name, compiled] = call
    times = clocks.time_interleaved(calls, bench.rounds(ROUNDS, ROUNDS), bench.scope.inner)
    eager, compiled = ({n: Times.of(times[n, c]) for n, c in times if c is way} for way in (False, True))
    return eager, compiled, failures


def compile(bench: Bench) -> Compile:
    """Forward with a synchronize, and forward with backward; then one compiled call alone."""
    torch._dynamo.reset()
    network, cases, scope = Network(bench), [], bench.scope
    with bench.bar(2 * len(scope.tokens), "compile") as bar:
        for backward in (False, True):
            for tokens in scope.tokens:
                cases.append(_case(bench, network, tokens, backward))
                bar.update()
    eager, compiled, failures = _one_call(bench, network)
    torch._dynamo.reset()
    return Compile(
        weights=scope.weights,
        shape=scope.shape,
        dtype=dtype_name(DTYPE),
        cases=cases,
        call_eager=eager,
        call_compiled=compiled,
        failures=failures,
    )
