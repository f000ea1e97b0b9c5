import logging
import time

import pytest
import torch

from helpers.nf4 import backend
from helpers.oracle import reference


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No choice remembered from another test, and toys to measure on."""
    backend._choose.cache_clear()
    monkeypatch.delenv("NF4_BACKEND", raising=False)
    monkeypatch.setattr(backend, "SIZES", dict.fromkeys(("cuda", "cpu"), ((64, 16),)))
    yield
    backend._choose.cache_clear()


@pytest.fixture
def layer(make_layer):
    return make_layer(64, 32, torch.bfloat16)


def exact(layer):
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def slow(layer):
    time.sleep(0.05)
    return exact(layer)


def wrong(layer):
    return exact(layer) + 1


def broken(layer):
    raise RuntimeError("cannot compile")


def test_an_invalid_name_is_refused_with_the_valid_ones(monkeypatch, layer):
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*triton, torch, auto"):
        backend.dequantize(layer)


@pytest.mark.parametrize("name", ["triton", "torch", " Torch "])
def test_a_named_path_is_taken_without_measuring(monkeypatch, device, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    monkeypatch.setattr(backend, "_measure", lambda *_: pytest.fail("measured"))
    choice = backend.choose(device, torch.float16)
    assert choice.name == name.strip().lower() and not choice.measured


@pytest.mark.parametrize("name", ["triton", "torch", "auto"])
def test_every_path_gives_the_same_bits(monkeypatch, layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    assert reference.same_bits(backend.dequantize(layer), exact(layer))


@pytest.mark.parametrize("triton, torch_path, expected", [(exact, slow, "triton"), (slow, exact, "torch")])
def test_auto_takes_the_faster_one_and_says_so(monkeypatch, device, caplog, triton, torch_path, expected):
    monkeypatch.setattr(backend, "paths", lambda: {"triton": triton, "torch": torch_path})
    with caplog.at_level(logging.WARNING):
        choice = backend.choose(device, torch.float16)
    assert choice.name == expected and "64x16" in choice.measured
    assert f"{expected} (the faster one here" in caplog.text


@pytest.mark.parametrize("triton, why", [(wrong, "bits differ"), (broken, "RuntimeError: cannot compile")])
def test_auto_never_takes_a_kernel_that_is_wrong_or_fails(monkeypatch, device, caplog, triton, why):
    monkeypatch.setattr(backend, "paths", lambda: {"triton": triton, "torch": slow})
    choice = backend.choose(device, torch.float16)
    assert choice.name == "torch" and why in choice.reason and why in caplog.text


def test_auto_measures_once_for_each_dtype(monkeypatch, device):
    seen = []

    def measure(where, dtype):
        seen.append(dtype)
        return backend.Choice("torch", "test")

    monkeypatch.setattr(backend, "_measure", measure)
    for dtype in (torch.float16, torch.float16, torch.bfloat16):
        backend.choose(device, dtype)
    assert seen == [torch.float16, torch.bfloat16]


def test_auto_does_not_measure_on_a_card_that_is_too_old(monkeypatch, device):
    monkeypatch.setattr(backend.environment, "old_gpu", lambda: "sm_60 is too old")
    monkeypatch.setattr(backend, "_measure", lambda *_: pytest.fail("measured"))
    assert backend.choose(device, torch.float16).reason == "sm_60 is too old"
