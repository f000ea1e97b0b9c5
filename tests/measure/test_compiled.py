import dataclasses

import pytest
import torch

from helpers.measure import compiled
from helpers.measure.contenders import FULL, Bench
from helpers.submission import protocol


def test_eager_and_compiled_are_exact_and_timed(bench):
    found = compiled.compile(bench)
    steps = [(case.tokens, case.backward) for case in found.cases]
    assert steps == [(tokens, backward) for backward in (False, True) for tokens in bench.scope.tokens]
    for case in found.cases:
        assert case.failures == {}
        assert set(case.eager) == set(case.compiled) == {"kernel", "bitsandbytes"}
        rows = [*case.eager.values(), *case.compiled.values()]
        assert all(len(row.repeats) == row.rounds == bench.scope.most_rounds for row in rows)
    assert found.failures == {} and set(found.call_compiled) == {"kernel", "bitsandbytes"}


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
        assert "bitsandbytes compiled" in case.failures and set(case.eager) == {"kernel"}
    assert "bitsandbytes eager" in found.failures


def test_a_lora_step_gives_the_gradient_of_every_matrix(bench):
    network = compiled.Network(bench)
    kernel = bench.module.your_dequantize_nf4
    result, *gradients = network.call(kernel, 8, backward=True, compiled=False)()
    assert result.shape == (8, bench.scope.shape[1]) and result.isfinite().all()
    assert len(gradients) == 2 * bench.scope.weights and all(g.abs().sum() > 0 for g in gradients)
    (forward,) = network.call(kernel, 8, backward=False, compiled=False)()
    assert forward.shape == result.shape and not torch.equal(forward, result)


def test_each_contender_has_code_of_its_own(bench):
    network = compiled.Network(bench)
    first, second = (network.call(bench.module.your_dequantize_nf4, 8, False, False) for _ in range(2))
    assert first.args[0].__code__ is not second.args[0].__code__


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_nobody_fails(kernel):
    scope = dataclasses.replace(FULL, tokens=(64,), weights=4)
    found = compiled.compile(Bench(kernel, protocol.baselines(), True, scope))
    assert found.failures == {} and [case.failures for case in found.cases] == [{}, {}]
    assert {"kernel", "unsloth_today", "bitsandbytes"} <= found.cases[0].compiled.keys()
