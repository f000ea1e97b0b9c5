"""Which baselines are present, which function each one is, and what the absent ones say."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers.machine import environment
from helpers.oracle import baselines, reference

NAMES = ["unsloth_today", "unsloth_classic", "bitsandbytes", "peft"]


@pytest.fixture
def fresh():
    """Lets a test see what the machine's libraries would give it, without what was cached before or after."""
    baselines.available.cache_clear()
    yield
    baselines.available.cache_clear()


def test_importing_the_module_loads_no_library():
    libraries = "('unsloth', 'bitsandbytes', 'peft', 'transformers', 'triton')"
    code = f"import sys, helpers.oracle.baselines; print([m for m in {libraries} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=environment.ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_each_baseline_runs_or_says_why_not():
    found = baselines.available()
    assert list(found) == NAMES
    assert found is baselines.available(), "loaded once"
    for baseline in found.values():
        assert (baseline.fn is None) == bool(baseline.reason)


def test_present_baselines_give_the_exact_weight(make_layer):
    for baseline in baselines.available().values():
        if baseline.fn is None:
            continue
        for dtype in (torch.float16, torch.bfloat16):
            layer = make_layer(128, 192, dtype)
            expected = reference.dequantize(layer.weight, layer.weight.quant_state)
            assert reference.same_bits(baseline.fn(layer).detach(), expected), (baseline.name, dtype)


def test_without_a_gpu_unsloth_is_not_imported(fresh, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setitem(sys.modules, "unsloth", None)  # importing it would raise
    found = baselines.available()
    assert found["unsloth_today"].reason == found["unsloth_classic"].reason == "needs an NVIDIA GPU"


def test_absent_package(fresh, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    assert all("not installed" in baseline.reason for baseline in baselines.available().values())


def test_broken_installation(fresh, monkeypatch):
    def broken(name):
        raise RuntimeError("libcudart is missing")

    monkeypatch.setattr(baselines.importlib, "import_module", broken)
    assert "RuntimeError: libcudart is missing" in baselines.available()["bitsandbytes"].reason


def unsloth_with(monkeypatch, **contents):
    module = SimpleNamespace(fast_dequantize=lambda w, state: ("fast", w, state), **contents)
    monkeypatch.setattr(baselines, "_load", lambda *args, **kwargs: (module, {"version": "1.0"}))
    return baselines._unsloth()


LAYER = SimpleNamespace(weight=SimpleNamespace(quant_state="state"))


def test_unsloth_with_both_paths(monkeypatch):
    def ctypes_path(w, state, out, use_global_buffer):
        return ("ctypes", out, use_global_buffer)

    today, classic = unsloth_with(monkeypatch, _USE_NF4_KERNELS=True, _fast_dequantize_ctypes=ctypes_path)
    assert today.fn(LAYER) == ("fast", LAYER.weight, "state")
    assert classic.fn(LAYER) == ("ctypes", None, False)
    assert str(today) == "Unsloth today: 1.0, fast_dequantize as installed, one fused launch"
    assert "_fast_dequantize_ctypes" in classic.note and "three launches" in classic.note


def test_unsloth_that_is_classic_itself(monkeypatch):
    today, classic = unsloth_with(monkeypatch, _USE_NF4_KERNELS=False, _fast_dequantize_ctypes=None)
    assert today.fn is classic.fn
    assert today.fn(LAYER)[0] == "fast"
    assert "same function" in today.note and "same function" in classic.note


def test_unsloth_without_its_classic_path(monkeypatch):
    today, classic = unsloth_with(monkeypatch, _USE_NF4_KERNELS=True)
    assert today.fn is not None
    assert classic.fn is None and "has no _fast_dequantize_ctypes" in classic.reason
    assert str(classic) == f"Unsloth classic: absent, {classic.reason}"


def test_unsloth_that_does_not_say_which_path_it_takes(monkeypatch):
    """Its private flag is gone: nothing is claimed about launches, nor that two names are one function."""
    today, classic = unsloth_with(monkeypatch)
    assert today.note == "fast_dequantize as installed" and classic.fn is None
    today, classic = unsloth_with(monkeypatch, _fast_dequantize_ctypes=lambda *args: "ctypes")
    assert today.fn(LAYER)[0] == "fast" and classic.fn(LAYER) == "ctypes"
    assert "same function" not in today.note + classic.note


@pytest.mark.gpu
def test_both_unsloths_are_reached_on_the_gpu(make_layer):
    """One launch against three: the two names stand for different code."""
    pytest.importorskip("unsloth")
    from helpers.measure import clocks

    found = baselines.available()
    today, classic = found["unsloth_today"], found["unsloth_classic"]
    assert today.fn and classic.fn, (today.reason, classic.reason)
    layer = make_layer(1024, 1024, torch.float16)
    launches = [len(clocks.device_events(lambda _, fn=b.fn: fn(layer))) for b in (today, classic)]
    assert launches == ([3, 3] if today.fn is classic.fn else [1, 3])
