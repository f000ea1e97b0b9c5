"""The choice between kernel and plain PyTorch: NF4_BACKEND=triton|torch|auto."""

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


@pytest.mark.parametrize("name", ["triton", "torch", "auto", " Torch "])
def test_every_choice_gives_the_same_bits(monkeypatch, make_layer, name):
    """Of a layer, its weight, and codes with their state; an `out` is filled."""
    monkeypatch.setenv("NF4_BACKEND", name)
    layer = make_layer(64, 32, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    expected, out = reference.dequantize(weight, state), torch.full((32, 64), torch.nan, dtype=state.dtype)
    out = out.to(weight.device)
    for arguments in ((layer,), (weight,), (weight.data, state), (weight.data, state, out)):
        assert same_bits(dequantize(*arguments), expected), len(arguments)
    assert same_bits(out, expected)


def test_a_named_choice_is_taken_untried(monkeypatch, device):
    monkeypatch.setattr(backend, "why_not_triton", lambda *_: pytest.fail("tried"))
    for name in ("triton", "torch", " Torch "):
        monkeypatch.setenv("NF4_BACKEND", name)
        assert choose(torch.device(device), torch.float16) == name.strip().lower()
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*triton, torch, auto"):
        choose(torch.device(device), torch.float16)


def test_auto_takes_the_kernel_and_tries_once_for_each_dtype(monkeypatch, device, caplog):
    tried, why_not = [], backend.why_not_triton
    monkeypatch.setattr(backend, "why_not_triton", lambda *of: tried.append(of) or why_not(*of))
    for dtype in DTYPES * 2:
        assert choose(torch.device(device), dtype) == "triton"
    assert len(tried) == 3 and not caplog.text


def fails(weight, state):
    raise RuntimeError("cannot compile")


def wrong(weight, state):
    return reference.dequantize(weight, state).neg()


@pytest.mark.parametrize("triton, why", [(wrong, "not bit-exact"), (fails, "RuntimeError: cannot compile")])
def test_auto_takes_no_kernel_that_is_wrong_or_fails(monkeypatch, device, caplog, triton, why):
    monkeypatch.setattr(backend, "backends", lambda: {"triton": triton, "torch": reference.dequantize})
    with caplog.at_level(logging.WARNING):
        assert choose(torch.device(device), torch.float16) == "torch" and why in caplog.text


def test_auto_does_not_remember_an_out_of_memory(monkeypatch, device):
    def full(weight, state):
        raise torch.OutOfMemoryError("as a test")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "backends", lambda: {"triton": full, "torch": reference.dequantize})
        with pytest.raises(torch.OutOfMemoryError):
            choose(torch.device(device), torch.float16)
    assert choose(torch.device(device), torch.float16) == "triton"


def test_auto_does_not_try_where_the_kernel_cannot_run(monkeypatch, caplog):
    weight, state = random_state((33, 70), torch.bfloat16, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(backend, "backends", lambda: pytest.fail("tried"))
        patch.setattr(backend, "cannot_run", lambda: "sm_60 is too old")
        assert choose(torch.device("cuda:0"), torch.float16) == "torch"
        patch.setattr(launch, "INTERPRETED", False)
        assert choose(weight.device, torch.bfloat16) == "torch"
    assert "sm_60 is too old" in caplog.text and "the weight is on the CPU" in caplog.text
    assert same_bits(dequantize(weight, state), reference.dequantize(weight, state))


@pytest.mark.parametrize("name", ODD)
def test_the_fallback_does_what_the_kernel_does(monkeypatch, name):
    """Exact, also into `out`, or refused with the kernel's own text; without a GPU or interpreter."""
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
    with pytest.raises(launch.UnsupportedState, match="expected .*pass such a tensor"):
        fallback(weight, state, out.double())


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_malformed_input_is_an_error_of_the_kernel(monkeypatch, make_layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    layer = make_layer(64, 32, torch.bfloat16)
    weight, state = layer.weight.data, layer.weight.quant_state
    for arguments, text in (
        ((torch.nn.Linear(4, 4),), "there is no quant_state"),
        ((None,), "the weight is NoneType"),
        ((weight[:9], state), "the weight holds 9 bytes, expected 1024"),
    ):
        with pytest.raises(launch.UnsupportedState, match=text):
            dequantize(*arguments)
