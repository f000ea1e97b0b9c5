"""`nf4_triton.dequantize`: its arguments, its errors, and NF4_BACKEND=triton|torch|auto."""

import logging

import pytest
import torch

from helpers.nf4 import backend, launch, reference
from helpers.nf4.backend import choose, dequantize
from helpers.nf4.reference import same_bits
from states import DTYPES, odd_states, random_state

ODD = odd_states("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No choice remembered from another test."""
    backend.choose_once.cache_clear()
    monkeypatch.delenv("NF4_BACKEND", raising=False)
    yield
    backend.choose_once.cache_clear()


@pytest.fixture(params=["triton", "torch"])
def both(monkeypatch, request):
    """Run the test with each of the two."""
    monkeypatch.setenv("NF4_BACKEND", request.param)


@pytest.mark.parametrize("name", ["triton", "torch", "auto", " Torch "])
def test_every_backend_gives_the_same_bits(monkeypatch, make_layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    layer = make_layer(64, 32, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    expected = reference.dequantize(weight, state)
    out = torch.full_like(expected, torch.nan)
    for arguments in ((layer,), (weight,), (weight.data, state), (weight.data, state, out)):
        assert same_bits(dequantize(*arguments), expected)
    assert same_bits(out, expected)


def test_dtype_overrides_the_dtype_of_the_state(both):
    weight, state = random_state((33, 70), torch.float16)
    results = [dequantize(weight, state, dtype=dtype) for dtype in DTYPES]
    assert state.dtype == torch.float16
    for result in results:
        state.dtype = result.dtype
        assert same_bits(result, reference.dequantize(weight, state))
    assert [result.dtype for result in results] == list(DTYPES)


def test_a_named_backend_is_used_without_a_trial(monkeypatch, device):
    monkeypatch.setattr(backend, "why_not_triton", lambda *_: pytest.fail("tried"))
    for name in ("triton", "torch"):
        monkeypatch.setenv("NF4_BACKEND", name)
        assert choose(torch.device(device), torch.float16) == name
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*triton, torch, auto"):
        choose(torch.device(device), torch.float16)


def test_auto_tries_the_kernel_once_for_each_dtype(monkeypatch, device, caplog):
    tried = []
    monkeypatch.setattr(backend, "why_not_triton", lambda *of: tried.append(of))
    for dtype in DTYPES * 2:
        assert choose(torch.device(device), dtype) == "triton"
    assert len(tried) == 3 and not caplog.text


@pytest.mark.parametrize("problem", ["not bit-exact", "RuntimeError: cannot compile"])
def test_auto_rejects_a_kernel_that_is_wrong_or_fails(monkeypatch, device, caplog, problem):
    def broken(weight, state):
        if "compile" in problem:
            raise RuntimeError("cannot compile")
        return reference.dequantize(weight, state).neg()

    monkeypatch.setattr(launch, "_your_dequantize_nf4", broken)
    assert choose(torch.device(device), torch.float16) == "torch" and problem in caplog.text


def test_auto_forgets_an_out_of_memory_error(monkeypatch, device):
    def full(weight, state):
        raise torch.OutOfMemoryError("as a test")

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_your_dequantize_nf4", full)
        with pytest.raises(torch.OutOfMemoryError):
            choose(torch.device(device), torch.float16)
    assert choose(torch.device(device), torch.float16) == "triton"


def test_auto_does_not_try_where_the_kernel_cannot_run(monkeypatch, caplog):
    weight, state = random_state((33, 70), torch.bfloat16, device="cpu")
    monkeypatch.setattr(launch, "_your_dequantize_nf4", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(backend, "cannot_run", lambda: "sm_60 is too old")
    assert choose(torch.device("cuda:0"), torch.float16) == "torch"
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert same_bits(dequantize(weight, state), reference.dequantize(weight, state))
    assert "sm_60 is too old" in caplog.text and "the weight is on the CPU" in caplog.text


@pytest.mark.parametrize("name", ODD)
def test_the_fallback_accepts_and_refuses_what_the_kernel_does(monkeypatch, name):
    (weight, state), fallback = ODD[name], backend.dequantize_in_torch
    monkeypatch.setattr(launch, "INTERPRETED", False)
    if "not contiguous" in name:
        with pytest.raises(launch.UnsupportedState, match="is not contiguous.*expected"):
            fallback(weight, state)
        return
    expected = reference.dequantize(weight, state)
    out = torch.full(tuple(state.shape), torch.nan, dtype=state.dtype)
    assert same_bits(fallback(weight, state), expected)
    assert same_bits(fallback(weight, state, out), expected)
    assert same_bits(out, expected.t() if name == "W.t()" else expected)


def test_a_compiled_call(both):
    weight, state = random_state((64, 96), torch.float16)
    compiled = torch.compile(lambda weight: dequantize(weight, state) + 0, fullgraph=True)
    assert same_bits(compiled(weight), reference.dequantize(weight, state) + 0)


def test_malformed_input_has_one_answer_and_no_log_line(monkeypatch, caplog):
    weight, state = random_state((32, 64), torch.bfloat16)
    numpy = weight.cpu().numpy()
    needs_grad = torch.zeros(32, 64, dtype=torch.bfloat16, device=weight.device, requires_grad=True)
    for arguments, text in (
        ((torch.nn.Linear(4, 4),), "there is no quant_state.*to"),
        ((None,), "there is no quant_state"),
        ((numpy,), "there is no quant_state"),
        ((numpy, state), "the weight is ndarray"),
        ((weight.to("meta"), state), "the weight is on meta"),
        ((weight[:9], state), "the weight holds 9 bytes, expected 1024"),
        ((weight, state, needs_grad), "requires_grad"),
        ((weight, state, needs_grad.detach().double()), "out has .*expected"),
        ((weight, state, numpy), "out is ndarray"),
        ((weight, state, None, torch.float64), "quant_state.dtype is torch.float64"),
    ):
        for name in ("triton", "torch"):
            monkeypatch.setenv("NF4_BACKEND", name)
            with pytest.raises(launch.UnsupportedState, match=text):
                dequantize(*arguments)
    with pytest.raises(TypeError, match=r"^dequantize\(\) missing"):
        dequantize()
    assert not caplog.text
