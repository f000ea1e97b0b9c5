import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

from helpers.bench import compiled
from helpers.bench.contenders import FULL, Bench
from helpers.results.store import CompileCase
from helpers.puzzle import protocol

EVERYONE = {compiled.DECODED, "kernel", "bitsandbytes"}
TAKEN = {compiled.NO_GUARDS, compiled.NO_ASSERTS, compiled.NO_BODY, compiled.PRODUCTS}


def test_eager_and_compiled_are_exact_and_timed(bench):
    found = compiled.compile(bench)
    steps = [(case.tokens, case.backward) for case in found.cases]
    assert steps == [(tokens, backward) for backward in (False, True) for tokens in bench.scope.tokens]
    for case in found.cases:
        assert case.failures == {}
        assert set(case.eager) == set(case.compiled) == EVERYONE
        rows = [*case.eager.values(), *case.compiled.values()]
        assert all(len(row.repeats) == row.rounds == bench.scope.most_rounds for row in rows)
    assert found.failures == {} and set(found.call_compiled) == EVERYONE
    assert set(found.parts.compiled) == {compiled.DECODED, "kernel"} | TAKEN - {compiled.NO_BODY}
    assert "does not call" in found.parts.failures[f"{compiled.NO_BODY} compiled"]  # a backend without code


@pytest.fixture
def forward(bench):
    """Network and functions of the forward pass, and the code that Inductor writes."""
    torch._dynamo.reset()
    bench.scope = dataclasses.replace(bench.scope, backend="inductor")
    network = compiled.Network(bench)
    made = compiled._both_ways(
        network,
        lambda dequantize: network.function(dequantize, False),
        lambda function: network.call(function, bench.scope.tokens[0], False)(),
    )
    yield network, made[0]
    torch._dynamo.reset()


def test_our_pass_is_exact_whatever_is_taken_from_it_and_without_its_body_decodes_nothing(bench, forward):
    run = bench.module._operator.run
    counters.clear()
    parts = compiled._parts(bench, *forward)
    assert set(parts.compiled) == {compiled.DECODED, "kernel"} | TAKEN
    assert parts.failures.keys() == {f"{compiled.LAUNCHES} eager"}  # the interpreter compiles nothing
    assert counters["stats"]["unique_graphs"] == 3 and bench.module._operator.run is run
    assert msgspec.json.decode(msgspec.json.encode(parts), type=CompileCase) == parts
    assert 10 * parts.compiled[compiled.NO_BODY].p50 < parts.compiled[compiled.NO_ASSERTS].p50


@pytest.mark.parametrize("in_c", [False, True])
def test_a_bare_launch_hands_over_what_the_kernel_takes(bench, monkeypatch, in_c):
    """The interpreter in place of Triton's launcher, which is given addresses."""
    module, layer = bench.module, compiled.Network(bench).layers[0]
    kernel, memory, given = module._your_dequantize_nf4_kernel, {}, []

    def known(*tensors):
        memory.update({x.data_ptr(): x for x in tensors if isinstance(x, torch.Tensor)})
        return tensors[0]

    class Launcher:
        global_scratch_size = profile_scratch_size = 0

        def __call__(self, grid, y, z, stream, function, metadata, *arguments):
            given.append((y, z, stream, function, metadata, *arguments[:3]))
            kernel[(grid,)](*(memory.get(x, x) for x in arguments[3:]))

        def launch(self, grid, y, z, stream, function, cooperative, pdl, scratch, profile, *arguments):
            given.append((cooperative, pdl, scratch, profile))
            self(grid, y, z, stream, function, *arguments)

    class Kernel:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                known(*arguments)
                return SimpleNamespace(run=Launcher(), function="function", packed_metadata="metadata")

            return launch

    def empty(size, stride, dtype):
        return known(torch.full(size, float("nan"), dtype=dtype).as_strided(size, stride))

    for name, value in dict(_empty_cuda=empty, _stream=lambda index: 7, IN_C=in_c).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "_your_dequantize_nf4_kernel", Kernel())
    launch = compiled._bare_launch(module, layer)
    assert all(protocol.same_bits(launch(), layer.exact) for _ in range(2))
    expected = [(0, 0, None, None)] * in_c + [(1, 1, 7, "function", "metadata", None, None, None)]
    assert given == 2 * expected


def test_one_wrong_weight_is_seen_in_every_step(bench):
    right = bench.baselines["bitsandbytes"].fn

    def nearly(layer):
        weight = right(layer)
        weight.view(-1)[0] += 1
        return weight

    bench.baselines = bench.baselines | {
        "bitsandbytes": dataclasses.replace(bench.baselines["bitsandbytes"], fn=nearly)
    }
    found = compiled.compile(bench)
    for case in found.cases:
        assert "not bit-identical" in case.failures["bitsandbytes eager"]
        assert "bitsandbytes compiled" in case.failures and set(case.eager) == EVERYONE - {"bitsandbytes"}
    assert "bitsandbytes eager" in found.failures


def test_what_would_be_compiled_too_late_is_left_out_and_the_rest_is_stored(bench):
    bench.scope = dataclasses.replace(bench.scope, compile_seconds=0)
    found = compiled.compile(bench)
    assert {f"{name} compiled" for name in TAKEN} < found.parts.failures.keys()
    for failures in (found.failures, *(case.failures for case in found.cases)):
        assert failures.keys() == {f"{name} compiled" for name in EVERYONE}
        assert all("not compiled: 0 s" in reason for reason in failures.values())
    assert all(set(case.eager) == EVERYONE and case.compiled == {} for case in found.cases)
    assert set(found.call_eager) == EVERYONE and found.call_compiled == {}


def test_one_graph_serves_every_number_of_tokens(bench):
    """In each pass one graph for each contender, one for a single call that decodes, and three of parts."""
    bench.scope = dataclasses.replace(bench.scope, tokens=(8, 16, 24))
    counters.clear()
    assert all(case.failures == {} for case in compiled.compile(bench).cases)
    assert counters["stats"]["unique_graphs"] == 3 * len(EVERYONE) - 1 + 3


def test_a_lora_step_gives_the_gradient_of_every_matrix(bench):
    network, results = compiled.Network(bench), {}
    for backward in (False, True):
        function = network.function(bench.module.your_dequantize_nf4, backward)
        results[backward] = network.call(function, 8, backward)()
    (forward,), (result, *gradients) = results.values()
    assert result.shape == (8, bench.scope.shape[1]) and result.isfinite().all()
    assert len(gradients) == 2 * bench.scope.weights and all(g.abs().sum() > 0 for g in gradients)
    assert forward.shape == result.shape and not torch.equal(forward, result)


def test_each_contender_has_code_of_its_own(bench):
    network = compiled.Network(bench)
    first, second = (network.function(bench.module.your_dequantize_nf4, False) for _ in range(2))
    assert first.__code__ is not second.__code__


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_nobody_fails(kernel):
    scope = dataclasses.replace(FULL, tokens=(64,), weights=4)
    found = compiled.compile(Bench(kernel, protocol.baselines(), True, scope))
    assert [case.failures for case in (found, found.parts, *found.cases)] == [{}] * 4
    assert set(found.parts.compiled) >= TAKEN and compiled.LAUNCHES in found.parts.eager
    assert {"kernel", "unsloth_today", "bitsandbytes"} <= found.cases[0].compiled.keys()
