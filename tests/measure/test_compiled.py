import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.measure import compiled
from helpers.measure.contenders import FULL, Bench
from helpers.submission import protocol

EVERYONE = {compiled.DECODED, "kernel", "bitsandbytes"}


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
    for failures in (found.failures, *(case.failures for case in found.cases)):
        assert failures.keys() == {f"{name} compiled" for name in EVERYONE}
        assert all("not compiled: 0 s" in reason for reason in failures.values())
    assert all(set(case.eager) == EVERYONE and case.compiled == {} for case in found.cases)
    assert set(found.call_eager) == EVERYONE and found.call_compiled == {}


def test_one_graph_serves_every_number_of_tokens(bench):
    """In each pass one graph for each contender, and one for a single call that decodes."""
    bench.scope = dataclasses.replace(bench.scope, tokens=(8, 16, 24))
    counters.clear()
    assert all(case.failures == {} for case in compiled.compile(bench).cases)
    assert counters["stats"]["unique_graphs"] == 3 * len(EVERYONE) - 1


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
    assert found.failures == {} and [case.failures for case in found.cases] == [{}, {}]
    assert {"kernel", "unsloth_today", "bitsandbytes"} <= found.cases[0].compiled.keys()
