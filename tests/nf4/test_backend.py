import logging

import pytest
import torch

from helpers.nf4 import backend, kernel
from helpers.nf4 import reference


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No choice remembered from another test."""
    backend._auto.cache_clear()
    monkeypatch.delenv("NF4_BACKEND", raising=False)
    yield
    backend._auto.cache_clear()


@pytest.fixture
def layer(make_layer):
    return make_layer(64, 32, torch.bfloat16)


def exact(weight, state, out=None):
    state.shape = torch.Size(state.shape)
    return reference.dequantize(weight, state)


def wrong(weight, state, out=None):
    return exact(weight, state) + 1


def broken(weight, state, out=None):
    raise RuntimeError("cannot compile")


def test_an_invalid_name_is_refused_with_the_valid_ones(monkeypatch, layer):
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*triton, torch, auto"):
        backend.dequantize(layer)


@pytest.mark.parametrize("name", ["triton", "torch", " Torch "])
def test_a_named_path_is_taken_untried(monkeypatch, device, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    monkeypatch.setattr(backend, "_problem", lambda *_: pytest.fail("tried"))
    assert backend.choose(torch.device(device), torch.float16) == name.strip().lower()


@pytest.mark.parametrize("name", ["triton", "torch", "auto"])
def test_every_path_gives_the_same_bits(monkeypatch, layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    assert reference.same_bits(backend.dequantize(layer), exact(layer.weight, layer.weight.quant_state))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_auto_takes_the_kernel_where_its_bits_are_right(device, dtype, caplog):
    with caplog.at_level(logging.WARNING):
        assert backend.choose(torch.device(device), dtype) == "triton"
    assert not caplog.text


@pytest.mark.parametrize("triton, why", [(wrong, "bits are wrong"), (broken, "RuntimeError: cannot compile")])
def test_auto_never_takes_a_kernel_that_is_wrong_or_fails(monkeypatch, device, caplog, triton, why):
    monkeypatch.setattr(backend, "paths", lambda: {"triton": triton, "torch": exact})
    assert backend.choose(torch.device(device), torch.float16) == "torch" and why in caplog.text


def test_auto_tries_once_for_each_dtype(monkeypatch, device):
    seen = []
    monkeypatch.setattr(backend, "_problem", lambda device, dtype: seen.append(dtype))
    for dtype in (torch.float16, torch.float16, torch.bfloat16):
        assert backend.choose(torch.device(device), dtype) == "triton"
    assert seen == [torch.float16, torch.bfloat16]


def test_auto_does_not_try_where_the_kernel_cannot_run(monkeypatch, caplog):
    monkeypatch.setattr(backend, "cannot_run", lambda: "sm_60 is too old")
    monkeypatch.setattr(backend, "paths", lambda: pytest.fail("tried"))
    assert backend.choose(torch.device("cuda:0"), torch.float16) == "torch"
    assert "sm_60 is too old" in caplog.text


STATES = [
    {},
    {"quant_type": "fp4"},
    {"nested": False},
    {"blocksize": 128},
    {"quant_type": "fp4", "nested": False, "blocksize": 4096},
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", STATES, ids=str)
def test_the_torch_path_is_exact(make_layer, options, dtype):
    layer = make_layer(96, 40, dtype, **options)
    weight, state = layer.weight, layer.weight.quant_state
    expected = exact(weight, state)
    assert reference.same_bits(backend.in_torch(weight, state), expected)
    out = torch.full_like(expected, torch.nan)
    assert backend.in_torch(weight, state, out) is out and reference.same_bits(out, expected)
    packed = weight.data.t()
    assert reference.same_bits(backend.in_torch(packed, state), expected.t())


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_what_cannot_be_decoded_is_an_error(monkeypatch, layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    with pytest.raises(kernel.UnsupportedState):
        backend.dequantize(torch.nn.Linear(4, 4))
    state = layer.weight.quant_state
    with pytest.raises(kernel.UnsupportedState):
        backend.dequantize(layer.weight.data[:9], state)
