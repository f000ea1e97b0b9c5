"""`nf4_triton.dequantize`: its arguments, its errors, and NF4_BACKEND=triton|torch|auto."""

import pytest
import torch

from nf4_triton import backend, launch
from nf4_triton.backend import choose, dequantize
from nf4_triton.reference import same_bits
from states import DTYPES, odd_states, oracle, random_state

ODD = odd_states("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No choice remembered from another test."""
    monkeypatch.delenv("NF4_BACKEND", raising=False)
    backend.choose_once.cache_clear()
    yield
    backend.choose_once.cache_clear()


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
        assert choose(torch.device("cuda"), torch.float16) == name
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*triton, torch, auto"):
        choose(torch.device("cuda"), torch.float16)


def test_auto_tries_the_kernel_once_for_each_dtype(monkeypatch, device, caplog):
    tried = []
    kernel = launch._your_dequantize_nf4
    monkeypatch.setattr(launch, "_your_dequantize_nf4", lambda *state: tried.append(1) or kernel(*state))
    for dtype in DTYPES * 2:
        assert choose(torch.device(device), dtype) == "triton"
    assert len(tried) == 3 and not caplog.text


@pytest.mark.parametrize(
    "problem", ["not bit-exact", "RuntimeError", "OutOfMemoryError", "too old", "on the CPU"]
)
def test_auto_falls_back_to_torch_and_says_why(monkeypatch, device, caplog, problem):
    def broken(weight, state):
        if problem != "not bit-exact":
            raise getattr(torch, problem, RuntimeError)
        return oracle(weight, state).neg()

    monkeypatch.setattr(launch, "_your_dequantize_nf4", broken)
    if problem == "too old":
        monkeypatch.setattr(backend, "cannot_run", lambda: "sm_60 is too old")
    if problem == "on the CPU":
        monkeypatch.setattr(launch, "INTERPRETED", False)
        device = "cpu"
    if problem == "OutOfMemoryError":  # the next call may find memory
        with pytest.raises(torch.OutOfMemoryError):
            choose(torch.device(device), torch.float16)
    else:
        assert choose(torch.device(device), torch.float16) == "torch" and problem in caplog.text


@pytest.mark.parametrize("name", ODD)
def test_the_fallback_accepts_and_refuses_what_the_kernel_does(monkeypatch, name):
    weight, state = ODD[name]
    monkeypatch.setenv("NF4_BACKEND", "torch")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    if "not contiguous" in name:
        with pytest.raises(launch.UnsupportedState, match="is not contiguous.*expected"):
            dequantize(weight, state)
        return
    expected = oracle(weight, state)
    out = torch.full(tuple(state.shape), torch.nan, dtype=state.dtype)
    assert same_bits(dequantize(weight, state, out), expected)
    assert same_bits(out, expected.t() if name == "W.t()" else expected)


@pytest.mark.parametrize("name", ["triton", "torch", "auto"])
def test_malformed_input_is_named_without_a_log_line(monkeypatch, caplog, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((32, 64), torch.bfloat16)
    array = weight.cpu().numpy()
    out = torch.zeros(32, 64, dtype=torch.bfloat16, device=weight.device, requires_grad=True)
    for arguments, text in (
        ((torch.nn.Linear(4, 4),), "there is no quant_state"),
        ((None,), "there is no quant_state"),
        ((array, state), "the weight is ndarray"),
        ((weight.to("meta"), state), "the weight is on meta"),
        ((weight[:9], state), "the weight holds 9 bytes, expected 1024"),
        ((weight, state, out), "requires_grad"),
        ((weight, state, array), "out is ndarray"),
        ((weight, state, None, torch.float64), "quant_state.dtype is torch.float64"),
    ):
        with pytest.raises(launch.UnsupportedState, match=text):
            dequantize(*arguments)
    with pytest.raises(TypeError, match=r"^dequantize\(\) missing"):
        dequantize()
    assert not caplog.text


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_memory_that_is_not_there_is_refused(monkeypatch, name):
    """A freed storage, which torch's own operators would read; an `out` over the codes."""
    monkeypatch.setenv("NF4_BACKEND", name)
    for field in ("weight", "absmax", "out"):
        weight, state = random_state((32, 64), torch.bfloat16)
        out = torch.zeros(32, 64, dtype=torch.bfloat16, device=weight.device)
        freed = {"weight": weight, "absmax": state.absmax, "out": out}[field]
        freed.untyped_storage().resize_(0)
        with pytest.raises(launch.UnsupportedState, match=f"{field} has no memory"):
            dequantize(weight, state, out if field == "out" else None)
    memory = torch.zeros(2048, dtype=torch.bfloat16, device=weight.device)
    weight, state = random_state((32, 64), torch.bfloat16)
    inside = memory.view(torch.uint8)[: weight.numel()].view(weight.shape).copy_(weight)
    with pytest.raises(launch.UnsupportedState, match="out shares memory with weight"):
        dequantize(inside, state, memory.view(32, 64))
    assert torch.equal(inside, weight)
