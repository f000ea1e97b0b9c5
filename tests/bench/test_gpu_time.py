import dataclasses
import types

import pytest
import torch

from helpers.bench import ceilings, gpu_time
from helpers.bench.contenders import FULL, Bench, random_layers, wrong_bits
from helpers.results.names import CEILING, bytes_moved
from helpers.results.store import ratio
from helpers.puzzle import protocol

CASES = {(numel, dtype) for numel in (1024, 2048) for dtype in ("float16", "bfloat16")}


@pytest.fixture
def broken(bench):
    """A kernel whose last element is one bit off."""
    right = bench.module.your_dequantize_nf4

    def one_bit_off(layer):
        result = right(layer)
        result.view(torch.int16).view(-1)[-1] ^= 1
        return result

    names = ("settings", "force", "_your_dequantize_nf4_kernel")
    module = types.SimpleNamespace(**{name: getattr(bench.module, name) for name in names})
    module.your_dequantize_nf4 = one_bit_off
    return dataclasses.replace(bench, module=module)


@pytest.fixture
def ceiling(monkeypatch):
    """In place of CUDA: writes what the oracle says, however it is launched.
    Of each launch: elements, words, threads, store."""
    launched = set()

    def move(weight, absmax, absmax2, out, words, threads, store):
        launched.add((out.numel(), words, threads, store))
        expected = ceilings.oracle(weight, absmax, absmax2, out.numel(), words, threads)
        out.view(torch.int32).view(-1, 4).copy_(expected)

    monkeypatch.setattr(ceilings, "_cuda_kernel", lambda *choice: None)
    monkeypatch.setattr(ceilings, "cuda_ceiling", move)
    return launched


def test_rows_are_the_contenders_and_what_only_moves_bytes(bench, ceiling):
    gpu = gpu_time.gpu(bench)
    assert {(case.numel, case.dtype) for case in gpu.sizes} == CASES
    for case in gpu.sizes:
        assert case.failures == {}
        assert list(case.rows) == ["kernel", "bitsandbytes", CEILING]
        assert [row.p50 for row in case.rows.values()] == pytest.approx([1, 2, 3])
        assert ratio(case.rows, "bitsandbytes", "kernel") == pytest.approx(2)


def test_the_ceiling_is_its_fastest_launch_choice(bench, ceiling):
    in_order = bench.gpu.replay_interleaved

    def last_is_fastest(graphs, rounds):
        return dict(zip(graphs, reversed(in_order(graphs, rounds).values()), strict=True))

    for replay, fastest in ((in_order, 3), (last_is_fastest, 1)):
        bench.gpu.replay_interleaved = replay
        assert gpu_time.gpu(bench).sizes[0].rows[CEILING].p50 == pytest.approx(fastest)
    every = {tuple(launch.keywords.values()) for launch in ceilings.launches(quick=True)}
    assert len(every) > 1 and ceiling >= {(numel, *choice) for numel in (1024, 2048) for choice in every}


def test_a_wrong_result_is_recorded_and_not_timed(broken):
    for case in gpu_time.gpu(broken).sizes:
        assert "not bit-identical" in case.failures["kernel"] and "kernel" not in case.rows
    for case in gpu_time.gemm(broken).cases:
        assert "kernel" in case.failures and "kernel" not in case.rows
    for case in gpu_time.ablation(broken).cases:
        assert case.failures and case.rows == {}


def test_a_ceiling_that_skips_bytes_stops_the_section(bench, ceiling, monkeypatch):
    monkeypatch.setattr(ceilings, "cuda_ceiling", lambda *tensors, **choice: None)
    with pytest.raises(AssertionError, match="its oracle"):
        gpu_time.gpu(bench)


def test_elements_left_unwritten_are_seen(bench):
    (layer,) = random_layers((64, 64), torch.float16, 1, device="cpu")
    expected = protocol.expected(layer)
    out = expected.clone()
    assert wrong_bits(lambda: out, expected, out)
    assert not wrong_bits(lambda: out.copy_(expected), expected, out)
    assert "ValueError: no" in wrong_bits(lambda: (_ for _ in ()).throw(ValueError("no")), expected)


def test_what_refuses_capture_says_so(bench):
    bench.baselines = bench.baselines | {}
    own, capture, capturing = bench.baselines["bitsandbytes"], bench.gpu.capture, []

    def refuse(layer):
        if capturing:
            raise RuntimeError("not permitted while capturing")
        return own.fn(layer)

    def watched(call, count, **more):
        capturing.append(call)
        try:
            return capture(call, count, **more)
        finally:
            capturing.pop()

    bench.baselines["bitsandbytes"] = dataclasses.replace(own, fn=refuse)
    bench.gpu.capture = watched
    case = gpu_time.gpu(bench).sizes[0]
    assert "not permitted" in case.failures["bitsandbytes"]
    assert "kernel" in case.rows and "bitsandbytes" not in case.rows


def test_an_empty_graph_is_not_taken_for_a_fast_one(bench):
    class Empty:
        def replay(self):
            pass

        def pool(self):
            return None

    capture = bench.gpu.capture
    bench.gpu.capture = lambda *arguments, **more: (Empty(), capture(*arguments, **more)[1])
    case = gpu_time.gpu(bench).sizes[0]
    assert "does not write the result" in case.failures["kernel"] and "kernel" not in case.rows


def test_sizes_that_do_not_fit_are_skipped_with_the_reason(bench):
    bench.gpu.free = 1000
    assert all("GB of free GPU memory" in case.skipped for case in gpu_time.gpu(bench).sizes)


def test_gemm_compares_store_policies_with_multiplication_alone(bench):
    cases, config = gpu_time.gemm(bench).cases, bench.scope.gemm[0]
    sizes = config.intermediate, config.hidden
    assert [case.shape for case in cases] == [sizes, sizes[::-1]]
    for case in cases:
        assert case.failures == {} and case.tokens == config.batch * config.seq
        assert set(case.rows) == {"kernel", "kernel, plain stores, no hints", gpu_time.ALONE}


def test_ablation_changes_one_decision_at_a_time_and_restores_it(bench):
    before = bench.module.settings()
    cases = gpu_time.ablation(bench).cases
    assert bench.module.settings() == before and {case.dtype for case in cases} == {"float16", "bfloat16"}
    for case in cases:
        assert case.failures == {} and "as chosen" in case.rows and len(case.rows) > 5


@pytest.mark.parametrize("card", [None, "t4"])
def test_decisions_are_real_changes_of_existing_settings(kernel, card):
    with kernel.force(card=card):
        chosen = vars(kernel.settings())
        for numel in (2**10, 2**28):
            decisions = gpu_time.decisions(kernel.settings(), numel)
            assert len(decisions) > 8
            for override in decisions.values():
                assert override.keys() <= chosen.keys()
                assert any(chosen[name] != value for name, value in override.items())
    with kernel.force(hints=True, stage=True, num_warps=4):
        names = gpu_time.decisions(kernel.settings(), 2**28)
    assert {"no cache hints", "code2 not staged in shared memory", "8 warps"} <= names.keys()
    assert "4 warps" not in names and "code2 staged in shared memory" not in names


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_everything_is_captured_and_right(kernel):
    scope = dataclasses.replace(FULL, sizes=(2**16, 2**22), ablation=(2**20,))
    bench = Bench(kernel, protocol.baselines(), True, scope)
    for case in gpu_time.gpu(bench).sizes:
        assert case.failures == {} and {"kernel", "unsloth_today", "bitsandbytes"} <= case.rows.keys()
        assert case.rows[CEILING].p50 <= 1.1 * case.rows["kernel"].p50
        slowest = max(row.p50 for row in case.rows.values())
        assert bytes_moved(case.numel) / slowest > 1e3  # bytes per us: 1 GB/s
    for case in gpu_time.ablation(bench).cases:
        assert case.failures == {} and len(case.rows) > 8
