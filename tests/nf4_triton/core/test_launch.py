"""Cached launches: replays see changed contents; tensors that no launch matches are checked again.

In both launch modules: the puzzle's, and the package's entry on top of it (more: test_launch_general.py).
"""

import copy
import re
import weakref
from pathlib import Path

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nf4_triton.core import launch, private, settings
from states import SECOND, exact, get, noise, replace, right

pytest.importorskip("bitsandbytes")


# Hooks and tracers
HOOKS = triton.knobs.runtime


@pytest.mark.parametrize("how", ["in a chain", "assigned"])
@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_hook_sees_every_launch(watched, layer, monkeypatch, which, how):
    """Triton launches then, and calls the hook."""
    weight, state = watched.warm(layer)
    hook, chain = (lambda metadata: None), type(getattr(HOOKS, which))
    if how == "in a chain":
        if not hasattr(chain, "add"):
            pytest.skip("this Triton has no chains of hooks")
        call, hook = hook, chain()
        hook.add(call)
    kept = list(launch.launches.values())
    with monkeypatch.context() as patched:
        patched.setattr(HOOKS, which, hook)
        assert not watched.check(weight, state) and kept == list(launch.launches.values())
    assert watched.check(weight, state), "not replayed without the hook"


def test_fake_tensors_get_fake_results(case, layer):
    """Under their mode and outside of it."""
    watched, weight, state = case
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = copy.deepcopy(layer)
    for name in SECOND:
        replace(fake, name, mode.from_tensor)
    results = [watched(mode.from_tensor(weight), fake.weight.quant_state)[0]]
    with mode:
        for given in (mode.from_tensor(weight), weight):
            results.append(watched(given, state)[0])
    for result in results:
        assert isinstance(result, FakeTensor)
        assert (result.shape, result.dtype) == (state.shape, state.dtype)
    watched.check(weight, state)


@pytest.mark.parametrize("how", ["make_fx", "make_fx, early", "jit.trace", "compile", "vmap"])
@pytest.mark.filterwarnings("ignore")
def test_a_traced_call_follows_its_weight(case, how):
    """A replay, unseen by the tracer, would leave the traced weight's values in the graph."""
    watched, weight, state = case

    def call(w):
        return watched(w, state)[0]

    if how.startswith("make_fx"):  # early: before dispatch
        graph = make_fx(call, pre_dispatch=how != "make_fx")(weight)
        assert "nf4_triton" in graph.code
    elif how == "compile":
        graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    elif how == "vmap":

        def graph(w):
            return torch.vmap(call)(torch.stack([weight, w]))[1]

    else:
        graph = torch.jit.trace(call, (weight,), check_trace=False)
    other = noise(weight)
    assert exact(graph(other), other, state)
    watched.check(weight, state)


IMPORTS = re.findall(r"from (torch\._\S+) import (.+)", Path(private.__file__).read_text())
PRIVATE = [f"{module}.{name.split()[0]}" for module, names in IMPORTS for name in names.split(", ")]


@pytest.mark.parametrize("path", PRIVATE)
def test_without_a_private_name(kernel_module, make_layer, monkeypatch, path):
    """Then Triton or an operator launches every call."""
    assert len(PRIVATE) >= 8
    with monkeypatch.context() as patched:
        patched.delattr(path, raising=False)
        module = kernel_module("without")
    assert not module.CAN_RELAUNCH
    call, layer = module._your_dequantize_nf4, make_layer(64, 320, torch.bfloat16)
    traced = torch.compile(call, backend="aot_eager", fullgraph=True)
    for function in (call, call, traced):
        assert right(function(layer.weight, layer.weight.quant_state), layer)


# The cache
def test_a_layout_has_at_most_32_cached_launches(watched, layer):
    weight, state = layer.weight, layer.weight.quant_state
    scales = state.state2.absmax
    for i in range(34):
        state.state2.absmax = torch.cat([scales, noise(scales.new_empty(i))])
        assert not watched.check(weight, state)
    assert watched.check(weight, state)
    assert [len(known) for known in launch.launches.values()] == [32]


def test_forced_settings_use_no_launch_of_others(watched, layer):
    weight, state = watched.warm(layer)
    with settings.force(tile_rows=16):
        assert not watched.check(weight, state)
    assert not watched.check(weight, state) and watched.check(weight, state)


def test_nothing_about_a_layer_is_kept(watched, make_layer):
    """Its tensors are freed with it, at once; a call leaves nothing on the layer."""
    layer = make_layer(64, 320, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    before = [sorted(vars(x)) for x in (layer, weight, state)]
    watched.warm(layer)
    assert [sorted(vars(x)) for x in (layer, weight, state)] == before
    tensors = [weakref.ref(get(layer, name)) for name in ("weight", *SECOND)]
    del layer, weight, state
    assert launch.launches and not any(tensor() is not None for tensor in tensors)
