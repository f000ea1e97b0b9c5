import dataclasses
import sys

import pytest

from helpers.bench import contenders, host_time
from helpers.bench.contenders import FULL, Bench
from helpers.results.names import ALLOCATE_FILL
from helpers.results.store import ratio
from helpers.puzzle import protocol


def test_rows_hold_everyone_and_the_least_a_call_can_cost(bench):
    found = host_time.host(bench)
    for case, (shape, dtype) in zip(found.cases, bench.scope.layers, strict=True):
        assert (case.shape, case.dtype, case.failures) == (shape, dtype, {})
        for rows in (case.returned, case.synchronized):
            assert {"kernel", "bitsandbytes", ALLOCATE_FILL} <= rows.keys()
            assert ratio(rows, "kernel", ALLOCATE_FILL) > 0
    for parts in found.parts.values():
        total = parts.allocate_us + parts.launch_us + parts.rest_us
        assert total == pytest.approx(parts.returned_us) and parts.kernels == 3


def test_a_call_whose_kernels_cannot_be_counted_is_not_split(bench):
    bench.gpu.graph_nodes = lambda call: 1 / 0
    parts = host_time.host(bench).parts["kernel"]
    assert parts.kernels is None and parts.rest_us is None and parts.returned_us > 0


def test_every_shortcut_is_taken_away_alone_and_put_back(bench):
    before = dict(vars(bench.module))
    rows = host_time.steps(bench)
    assert [name.partition(":")[0] for name in rows] == [
        "as chosen",
        "torch.empty",
        "no direct launch",
        "public launch",
        "no plan",
    ]
    after = vars(bench.module)  # to which Triton's interpreter may have added names
    assert {name: after[name] for name in before} == before


def test_a_step_uses_no_launch_that_was_planned_before(bench, monkeypatch):
    class Used(dict):
        def get(self, *arguments):
            raise AssertionError("the plan of another step's layer")

    monkeypatch.setattr(bench.module, "_kinds", Used())
    assert len(host_time.steps(bench)) == 5


def test_what_a_call_executes_is_counted_at_any_depth():
    def inner(x):
        return abs(x)

    def outer():
        return inner(1) + inner(2)

    once, twice = host_time._count(lambda: inner(1)), host_time._count(outer)
    assert (once["python_calls"], twice["python_calls"]) == (2, 3)
    assert (once["c_calls"], twice["c_calls"]) == (1, 2)
    assert 3 < once["bytecodes"] < twice["bytecodes"] < 60
    assert host_time._count(outer) == twice, "free of noise"
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())


def test_call_costs_are_of_every_contender(bench):
    costs = host_time.call_cost(bench)
    assert {"kernel", "bitsandbytes", "peft"} <= costs.keys()
    assert all(cost["bytecodes"] > 10 and cost["c_calls"] > 0 for cost in costs.values())


def test_a_replaced_bitsandbytes_is_a_contender_of_its_own(bench, monkeypatch):
    from bitsandbytes import functional

    assert contenders.users_bitsandbytes() is None
    own = functional.dequantize_4bit

    def wrapper(*arguments, **more):
        return own(*arguments, **more)

    wrapper.__wrapped__ = own
    monkeypatch.setattr(functional, "dequantize_4bit", wrapper)
    case = host_time.host(bench).cases[0]
    assert {"bitsandbytes", "bitsandbytes_zoo"} <= case.returned.keys() and not case.failures


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_a_call_is_one_allocation_and_one_launch(kernel):
    bench = Bench(kernel, protocol.baselines(), True, dataclasses.replace(FULL, inner=20))
    found, costs = host_time.host(bench), host_time.call_cost(bench)
    assert not any(case.failures for case in found.cases)
    assert found.parts["kernel"].kernels == 1 and found.parts["kernel"].allocations == 1
    assert {"Inductor's empty_strided", "triton compiled launcher"} <= found.units.keys()
    ours, *others = (row.p50 for row in found.steps.values())
    assert ours < min(others[2:]) and ours < 1.1 * min(others), "public launch and no plan cost most"
    bytecodes = [costs[name]["bytecodes"] for name in (host_time.BARE, "kernel", "unsloth_today")]
    assert bytecodes == sorted(bytecodes)
