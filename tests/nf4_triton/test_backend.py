"""`nf4_triton.dequantize`: its arguments, its errors, and NF4_BACKEND=triton|torch|auto."""

import pytest
import torch

from nf4_triton import backend, launch
from nf4_triton import state as state_module
from nf4_triton.backend import choose, dequantize, dequantize_in_torch
from nf4_triton.reference import same_bits
from states import DTYPES, freed, odd_states, oracle, random_state

ODD = odd_states("cpu")
WEIGHT = torch.zeros(4, 1, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No choice remembered from another test."""
    monkeypatch.delenv("NF4_BACKEND", raising=False)
    monkeypatch.setattr(backend, "verdicts", {})


@pytest.mark.parametrize("name", ["triton", "torch", "auto", " Torch "])
def test_every_backend_gives_the_same_bits(monkeypatch, make_layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    layer = make_layer(64, 32, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    expected = oracle(weight, state)
    out = torch.full_like(expected, torch.nan)
    for arguments in ((layer,), (weight,), (weight.data, state), (weight.data, state, out)):
        assert same_bits(dequantize(*arguments), expected)
    assert same_bits(out, expected)
    compiled = torch.compile(lambda packed: dequantize(packed, state), fullgraph=True)
    assert same_bits(compiled(weight.data), expected)
    result = dequantize(layer, dtype=torch.float32)
    assert state.dtype == torch.bfloat16 and result.dtype == torch.float32
    assert same_bits(result.bfloat16(), expected)


def test_a_named_backend_is_used_without_a_trial(monkeypatch):
    monkeypatch.setattr(backend, "why_not_triton", lambda *_: pytest.fail("tried"))
    for name in ("triton", "torch"):
        monkeypatch.setenv("NF4_BACKEND", name)
        assert choose(WEIGHT, torch.float16) == name
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*triton, torch, auto"):
        choose(WEIGHT, torch.float16)


def test_auto_tries_the_kernel_once_for_each_dtype(monkeypatch, device, caplog):
    tried = []
    kernel = launch.dequantize_packed
    monkeypatch.setattr(launch, "dequantize_packed", lambda packed: tried.append(1) or kernel(packed))
    for dtype in DTYPES * 2:
        assert choose(WEIGHT.to(device), dtype) == "triton"
    assert len(tried) == 3 and not caplog.text


@pytest.mark.parametrize("problem", ["not bit-exact", "OSError", "OutOfMemoryError", "too old", "is on cpu"])
def test_auto_falls_back_to_torch_and_says_why(monkeypatch, device, caplog, problem):
    def broken(packed):
        if problem != "not bit-exact":
            raise getattr(torch, problem, OSError)
        return dequantize_in_torch(packed).neg()

    with monkeypatch.context() as patch:
        patch.setattr(launch, "dequantize_packed", broken)
        if problem == "too old":
            patch.setattr(backend, "cannot_run", lambda device: "sm_60 is too old")
        if problem == "is on cpu":
            patch.setattr(backend, "INTERPRETED", False)
            device = "cpu"
        weight = WEIGHT.to(device)
        if problem == "OutOfMemoryError":
            with pytest.raises(torch.OutOfMemoryError):
                choose(weight, torch.float16)
        else:
            assert choose(weight, torch.float16) == "torch" and problem in caplog.text
    accident = problem in ("OSError", "OutOfMemoryError")  # the next call may find a disk or memory
    assert choose(weight, torch.float16) == ("triton" if accident else "torch")


def test_a_default_dtype_does_not_turn_the_kernel_off(device):
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert choose(WEIGHT.to(device), torch.float16) == "triton"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ODD)
def test_the_fallback_accepts_and_refuses_what_the_kernel_does(monkeypatch, name):
    weight, state = ODD[name]
    monkeypatch.setenv("NF4_BACKEND", "torch")
    monkeypatch.setattr(state_module, "INTERPRETED", False)
    if "not contiguous" in name:
        with pytest.raises(launch.UnsupportedState, match="is not contiguous.*expected"):
            dequantize(weight, state)
        return
    expected = oracle(weight, state)
    out = torch.full(tuple(state.shape), torch.nan, dtype=state.dtype)
    assert same_bits(dequantize(weight, state, out), expected)
    assert same_bits(out, expected.t() if name == "W.t()" else expected)


@pytest.mark.parametrize("name", ["triton", "torch", "auto"])
def test_malformed_input_is_named_without_a_log_line(monkeypatch, make_layer, caplog, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((32, 64), torch.bfloat16)
    array, layer = weight.cpu().numpy(), make_layer(64, 64, torch.bfloat16)
    out = torch.zeros(32, 64, dtype=torch.bfloat16, device=weight.device, requires_grad=True)
    for arguments, text in (
        ((torch.nn.Linear(4, 4),), "Linear has no quant_state.*other formats"),
        ((torch.nn.Sequential(layer),), "Sequential has .*one layer at a time.*get_submodule.'0'"),
        ((layer.weight.data.clone(),), "Tensor has no quant_state.*packed codes and their quant_state"),
        ((layer, torch.bfloat16), "quant_state is torch.bfloat16.*pass dtype=torch.bfloat16"),
        (("a text",), "str has no quant_state, expected bitsandbytes' Linear4bit"),
        ((None,), "NoneType has no quant_state"),
        ((array, state), "the weight is ndarray"),
        ((weight.to("meta"), state), "the weight is on meta"),
        ((weight[:9], state), "the weight holds 9 bytes, expected 1024"),
        ((freed(weight), state), "weight has no memory"),  # torch's own operators would read it
        ((weight, state, out), "requires_grad"),
        ((weight, state, array), "out is ndarray"),
        ((weight, state, None, torch.float64), "^dtype is torch.float64, expected one of"),
    ):
        with pytest.raises(launch.UnsupportedState, match=text):
            dequantize(*arguments)
    with pytest.raises(TypeError, match=r"^dequantize\(\) missing"):
        dequantize()
    assert not caplog.text
