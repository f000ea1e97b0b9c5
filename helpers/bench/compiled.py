"""24 weights, each followed by its product, eager and under one torch.compile: forward, and a LoRA step.

Every function that is compiled has a code object of its own, since Dynamo keeps what it compiled (and the
guards it tries in order) with the code. One graph serves every number of tokens. What compiling adds to our
forward pass is told apart by taking one thing after another away from it.
"""

import contextlib
import functools
import time
import types
from collections.abc import Callable
from unittest import mock

import torch
from torch.nn.functional import linear

from helpers.bench import clocks
from helpers.bench.contenders import Bench, why
from helpers.nf4.layers import quantized_layer
from helpers.results.store import Compile, CompileCase, Rows, Times
from helpers.puzzle import protocol

DTYPE, RANK = torch.bfloat16, 16
ROUNDS, INNER = 7, 10
DECODED = "decoded beforehand"  # the products alone; of one call, what it costs to be compiled
NO_GUARDS, NO_ASSERTS, NO_BODY = "no guards", "no size asserts either", "no operator's body either"
PRODUCTS = "the products alone, compiled so"
LAUNCHES = "only launches"  # in a plain loop: an allocation, a launch and a product for each weight
Calls = dict[tuple[str, str], Callable]  # by contender and way, "eager" or "compiled"


class Network:
    """Real layers with LoRA adapters, and what each contender makes of them: forward, or a LoRA step."""

    def __init__(self, bench: Bench):
        self.scope, self.device, self.layers, self.adapters = bench.scope, bench.device, [], []
        self.compile_until, self.longest = time.perf_counter() + bench.scope.compile_seconds, 0.0
        others = {name: fn for name, fn in bench.on_gpu().items() if name != "unsloth_classic"}
        self.contenders = {DECODED: lambda layer: layer.exact} | others
        generator = torch.Generator(bench.device).manual_seed(0)
        for index in range(self.scope.weights):  # there and back in turn
            inputs, outputs = self.scope.shape[:: 1 if index % 2 else -1]
            layer = quantized_layer(inputs, outputs, DTYPE, device=bench.device, seed=index)
            for scales in (layer.weight.quant_state.state2.absmax, layer.weight.quant_state.offset):
                scales.mul_(inputs**-0.5)  # activations stay small
            layer.exact = protocol.expected(layer)
            sizes = (RANK, inputs), (outputs, RANK)
            pair = [torch.randn(s, dtype=DTYPE, device=bench.device, generator=generator) for s in sizes]
            self.layers.append(layer)
            self.adapters.append([matrix.mul_(0.01).requires_grad_() for matrix in pair])

    def function(self, dequantize: Callable, backward: bool) -> Callable:
        """The network of one contender, with a code object of its own."""
        layers, adapters = self.layers, self.adapters

        class Product(torch.autograd.Function):
            """As QLoRA has it: a weight is dequantized in the forward pass and once more in the backward."""

            @staticmethod
            def forward(ctx, x, index):
                ctx.index = index
                return linear(x, dequantize(layers[index]))

            @staticmethod
            def backward(ctx, gradient):
                return gradient @ dequantize(layers[ctx.index]), None

        def with_adapters(x):
            for index, (down, up) in enumerate(adapters):
                x = Product.apply(x, index) + linear(linear(x, down), up)
            return x

        def without(x):
            for layer in layers:
                x = linear(x, dequantize(layer))
            return x

        return _own_code(with_adapters if backward else without)

    def call(self, function: Callable, tokens: int, backward: bool) -> Callable:
        """() -> the output, and with backward the gradient of every adapter's matrices."""
        generator = torch.Generator(self.device).manual_seed(tokens)
        size = tokens, self.scope.shape[1]
        x = torch.randn(size, dtype=DTYPE, device=self.device, generator=generator)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        trained = [matrix for pair in self.adapters for matrix in pair]

        def infer():
            with torch.no_grad():
                return (function(x),)

        def step():
            result = function(x)
            return result.detach(), *torch.autograd.grad(result, trained, torch.ones_like(result))

        return step if backward else infer

    def compiled(self, function: Callable, run: Callable[[Callable], object], **options) -> Callable:
        """The function compiled, by `run`. TimeoutError where that would likely end too late."""
        start = time.perf_counter()
        if start + self.longest > self.compile_until:
            raise TimeoutError(f"not compiled: {self.scope.compile_seconds:g} s for all were (nearly) over")
        function = torch.compile(function, backend=self.scope.backend, options=options or None)
        run(function)
        self.longest = max(self.longest, time.perf_counter() - start)
        return function


def _own_code(function: Callable) -> Callable:
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)


def _make(makers: Calls, functions: Calls) -> dict[str, str]:
    """Add to `functions` what each maker returns; why the others return nothing."""
    failures = {}
    for key, make in makers.items():
        try:
            functions[key] = make()
        except Exception as error:
            failures[" ".join(key)] = why(error)
    return failures


def _both_ways(network: Network, make: Callable, run: Callable) -> tuple[Calls, dict[str, str]]:
    """({(name, way): function} of what compiles, failures). make(dequantize), run(function)."""
    functions, makers = {}, {}
    for name, dequantize in network.contenders.items():
        one = functools.partial(make, dequantize)
        makers[name, "eager"] = one
        makers[name, "compiled"] = lambda one=one: network.compiled(one(), run)
    return functions, _make(makers, functions)


def _time(
    bench: Bench, calls: Calls, failures: dict, inner: int, wait: bool, around=contextlib.nullcontext
) -> dict[str, Rows]:
    """{way: rows} of the calls whose bits are those of weights decoded beforehand; adds failures.

    Compiled, sums may be rounded otherwise than in eager mode: either way's bits will do.
    """
    right, references = {}, []
    for (name, way), call in calls.items():
        try:
            with around((name, way)):
                call()
                result = call()  # of the launches that are repeated, not of the first call
        except Exception as error:
            failures[f"{name} {way}"] = why(error)
            continue
        references += [result] if name == DECODED else []
        if any(all(map(protocol.same_bits, result, reference)) for reference in references):
            right[name, way] = call
        else:
            failures[f"{name} {way}"] = "not bit-identical to the same with exact weights: not timed"
    times = clocks.time_interleaved(right, bench.rounds(ROUNDS, ROUNDS), inner, wait, around=around)
    return {
        way: {name: Times.of(times[name, of]) for name, of in times if of == way}
        for way in ("eager", "compiled")
    }


def _case(
    bench: Bench, network: Network, functions: Calls, failures: dict, tokens: int, backward=False, **more
) -> CompileCase:
    """The network's rows for one number of tokens, with a synchronize."""
    calls, failures = {k: network.call(f, tokens, backward) for k, f in functions.items()}, dict(failures)
    rows = _time(bench, calls, failures, min(INNER, bench.scope.inner), wait=True, **more)
    return CompileCase(tokens=tokens, backward=backward, **rows, failures=failures)


def _bare_launch(module, layer) -> Callable:
    """() -> the weight, by an allocation and the launch that our call repeats, nothing else."""
    like, (tensors, values) = layer.exact, module._snapshot(layer.weight, layer.weight.quant_state)
    sizes, settings = module._check(tensors, values), module.settings(like.device)
    grid, arguments, *more = module._configure(tensors, values, sizes, torch.empty_like(like))
    compiled = module._launch(module._your_dequantize_nf4_kernel, grid, arguments, more[0], settings)
    repeat = module._repeat(compiled, grid, arguments, *more)
    weight, _, absmax, _, *second = (x.data_ptr() for x in arguments[:7])
    empty, size, stride, dtype = module._empty_cuda, tuple(like.shape), like.stride(), like.dtype
    stream = module._stream(like.get_device())

    def launch():
        out = empty(size, stride, dtype)
        repeat(stream, weight, out.data_ptr(), absmax, *second)
        return out

    return launch


def _parts(bench: Bench, network: Network, functions: Calls) -> CompileCase:
    """Our forward pass with one thing after another taken away, and one that only launches.

    functions: what is known both ways. Without guards by a filter: set_stance(skip_guard_eval_unsafe=True)
    keeps those of tensors, which are most of ours.
    """
    module, tokens = bench.module, bench.scope.tokens[0]
    functions = {key: function for key, function in functions.items() if key[0] in (DECODED, "kernel")}
    ready = {layer.weight.quant_state.absmax.data_ptr(): layer.exact for layer in network.layers}

    def run(function):
        return network.call(function, tokens, False)()

    def unguarded(dequantize=module.your_dequantize_nf4, **options):
        options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe  # torch 2.10 and newer
        return network.compiled(network.function(dequantize, False), run, **options)

    def replaced(key):
        if key[0] != NO_BODY:
            return contextlib.nullcontext()
        return mock.patch.object(module._operator, "run", lambda _, absmax, *more: ready[absmax.data_ptr()])

    def without_body():
        function = functions[NO_ASSERTS, "compiled"]
        with mock.patch.object(module._operator, "run", wraps=module._operator.run) as body:
            run(function)
        if not body.called:
            raise RuntimeError("the compiled code does not call what is to be replaced")
        return function

    def launches():
        decode = {layer: _bare_launch(module, layer) for layer in network.layers}
        return network.function(lambda layer: decode[layer](), False)

    makers = {
        (PRODUCTS, "compiled"): lambda: unguarded(network.contenders[DECODED], size_asserts=False),
        (NO_GUARDS, "compiled"): unguarded,
        (NO_ASSERTS, "compiled"): lambda: unguarded(size_asserts=False),
        (NO_BODY, "compiled"): without_body,
        (LAUNCHES, "eager"): launches,
    }
    failures = _make(makers, functions)
    return _case(bench, network, functions, failures, tokens, around=replaced)


def compile(bench: Bench) -> Compile:
    """Forward with a synchronize, and forward with backward; one compiled call alone, until it returns."""
    torch._dynamo.reset()
    network, cases, scope = Network(bench), [], bench.scope

    def cases_of(backward: bool) -> Calls:
        functions, missing = _both_ways(
            network,
            functools.partial(network.function, backward=backward),
            lambda function: network.call(function, scope.tokens[0], backward)(),
        )
        for tokens in bench.progress(scope.tokens, "compile"):
            cases.append(_case(bench, network, functions, missing, tokens, backward))
        return functions

    def one(dequantize: Callable) -> Callable:
        layer = network.layers[0]
        return _own_code(lambda: (dequantize(layer),))

    forward = cases_of(backward=False)
    calls, failures = _both_ways(network, one, lambda function: function())
    alone = _time(bench, calls, failures, scope.inner, wait=False)
    cases_of(backward=True)
    parts = _parts(bench, network, forward)
    torch._dynamo.reset()
    return Compile(
        weights=scope.weights,
        shape=scope.shape,
        dtype=protocol.name_of(DTYPE),
        cases=cases,
        call_eager=alone["eager"],
        call_compiled=alone["compiled"],
        failures=failures,
        parts=parts,
    )
