"""Kept launches: what changes between two calls is honored, and what does not fit is checked anew.

In both rooms: the puzzle's alone, and the package's entry on top of it. Its own: test_launch_general.py.
"""

import contextlib
import copy
import functools
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nf4_triton import launch, launch_general, private, settings
from nf4_triton.reference import same_bits
from nf4_triton.settings import UnsupportedState
from nf4_triton.state import read_state
from states import CHANGES, SECOND, exact, get, noise, oracle, replace, right

pytest.importorskip("bitsandbytes")


@pytest.fixture
def layer(make_layer):
    """64 x 320 in bf16: 320 blocks of scales, 2 of the second level."""
    return make_layer(64, 320, torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["first", "warm"])
def case(request, watched, layer):
    """(watched, plain weight, state), before and after a launch was cached."""
    weight, state = layer.weight.data.as_subclass(torch.Tensor), layer.weight.quant_state
    if request.param:
        watched.check(weight, state)
        assert watched.check(weight, state)
    return watched, weight, state


# A tensor changes in place
def other_data(x):
    x.data = noise(x)


def other_storage(x):
    with torch.no_grad():
        x.set_(noise(x))


IN_PLACE = {
    "copy_": lambda x: x.data.copy_(noise(x)),
    ".data =": other_data,
    "set_": other_storage,
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("name", ["weight", *SECOND])
def test_a_tensor_changes_in_place(watched, layer, name, how):
    weight, state = watched.warm(layer)
    before = watched(weight, state)[0]
    IN_PLACE[how](get(layer, name))
    result, relaunched = watched(weight, state)
    assert relaunched and exact(result, weight, state) and not torch.equal(result, before)


@pytest.mark.parametrize("name, change", CHANGES)
def test_a_field_changes(watched, layer, name, change):
    """The puzzle's room raises for what it does not take, and goes on where the field is as it was."""
    weight, state = watched.warm(layer)
    before, old = watched(weight, state)[0], get(layer, name)
    replace(layer, name, change)
    if watched.module is launch and not launch.fits(*launch.read(weight, state)):
        with pytest.raises(UnsupportedState, match="nf4_triton.dequantize takes other layouts"):
            watched(weight, state)
        replace(layer, name, lambda x: old)
        assert watched.check(weight, state)
        return
    for again in (False, True):
        assert watched.check(weight, state) == (again or change is noise)
    result, _ = watched(weight, state)
    assert result.shape != before.shape or not torch.equal(result.float(), before.float())


def test_a_new_layer_of_a_known_layout_is_launched_again(watched, make_layer):
    for seed in range(3):
        layer = make_layer(64, 320, torch.bfloat16, seed=seed)
        assert watched.check(layer.weight, layer.weight.quant_state) == (seed > 0)


# The state of torch
def test_every_state_of_torch(watched, layer, make_layer, device):
    """Guards depend on these, so one layout has several launches; after one round all are used again."""
    modes = {
        "none": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
    }
    with torch.inference_mode():
        inference = make_layer(64, 320, torch.bfloat16, seed=1).weight
    codes = layer.weight.data.clone().as_subclass(torch.Tensor)
    for turn in range(3):
        for weight in (layer.weight, codes, inference):
            state = getattr(weight, "quant_state", layer.weight.quant_state)
            for name, mode in modes.items():
                with mode():
                    result, relaunched = watched(weight, state)
                assert exact(result, weight, state) and relaunched >= (turn > 0), name
                assert result.is_inference() == (name == "inference_mode")
                assert not result.requires_grad
    assert len(launch.launches) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_defaults_of_torch_change_nothing(watched, device, layer, dtype):
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta" if device == "cuda" else "cpu"):  # the interpreter allocates, too
            results = [watched(layer.weight, layer.weight.quant_state)[0] for _ in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert all(right(result, layer) for result in results)


def test_the_same_tensor_twice_in_a_state(watched, layer):
    state = layer.weight.quant_state
    state.state2.absmax = state.state2.code
    for _ in range(2):
        watched.check(layer.weight, state)
    assert not launch.launches  # no guards accept it


class Wrapper(torch.Tensor):
    """A size, a device, and no memory."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a wrapper")


class DTensor(Wrapper):
    """Told by its name: torch.distributed.tensor may be missing."""


def test_a_tensor_that_only_wraps_others_is_refused(case):
    watched, weight, state = case
    for kind, text in ((Wrapper, "has no memory"), (DTensor, "weight is a DTensor.*full_tensor")):
        text = "takes other layouts" if watched.module is launch else text
        with pytest.raises(UnsupportedState, match=text):
            watched(kind(weight), state)


# What wants to see a launch
HOOKS = triton.knobs.runtime


@pytest.mark.parametrize("how", ["in a chain", "assigned"])
@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_hook_sees_every_launch(watched, layer, device, monkeypatch, which, how):
    weight, state = watched.warm(layer)
    seen, chain = [], type(getattr(HOOKS, which))

    def hook(metadata):
        seen.append(metadata.get()["name"])

    if how == "in a chain":
        if not hasattr(chain, "add"):
            pytest.skip("this Triton has no chains of hooks")
        call, hook = hook, chain()
        hook.add(call)
    with monkeypatch.context() as patched:
        patched.setattr(HOOKS, which, hook)
        for _ in range(3):
            assert not watched.check(weight, state)
    if device == "cuda":  # the interpreter calls no hooks
        assert seen == ["_your_dequantize_nf4_kernel"] * 3
    assert watched.check(weight, state), "not launched again without the hook"


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


def test_a_fake_weight_on_a_gpu_compiles_without_a_gpu(layer):
    packed = read_state(layer.weight.data, layer.weight.quant_state)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fields = ("weight", "absmax", "code2", "absmax2", "offset")
        fake = {name: torch.empty_like(getattr(packed, name), device="cuda") for name in fields}
        call = functools.partial(launch_general.dequantize_packed, packed._replace(**fake))
        result = torch.compile(call, backend="eager", fullgraph=True)()
    assert (result.shape, result.device.type) == (packed.shape, "cuda")


@pytest.mark.parametrize("how", ["make_fx", "jit.trace"])
@pytest.mark.filterwarnings("ignore")
def test_a_traced_call_follows_its_weight(case, how):
    """A kept launch, past the tracer, would leave the traced weight's values in the graph."""
    watched, weight, state = case

    def call(w):
        return watched(w, state)[0]

    if how == "make_fx":
        graph = make_fx(call)(weight)
    else:
        graph = torch.jit.trace(call, (weight,), check_trace=False)
    other = noise(weight)
    assert exact(graph(other), other, state)
    watched.check(weight, state)


@pytest.mark.filterwarnings("ignore:.*performance drop because we have not yet implemented")
def test_vmap_over_stacked_weights(case):
    watched, weight, state = case
    stack = torch.stack([weight, 255 - weight])
    result = torch.vmap(lambda w: watched(w, state)[0])(stack)
    assert all(exact(result[i], stack[i], state) for i in range(2))
    watched.check(weight, state)


# Settings, and the kernel itself
def test_forced_settings_are_honored_at_once(watched, layer):
    weight, state = watched.warm(layer)
    for forced in ({"card": "t4"}, {"rows": 64}):
        with settings.force(**forced):
            for expected in (False, True):
                assert watched.check(weight, state) == expected
        assert not watched.check(weight, state), "back to the GPU's own settings"
        assert watched.check(weight, state)


PRIVATE = re.findall(r' private\(\s*([\w.]+), "([\w.]+)"', Path(private.__file__).read_text())


@pytest.mark.parametrize("path", [f"{root}.{name}" for root, name in PRIVATE])
def test_without_a_private_name(watch, changed_kernel, layer, monkeypatch, path):
    assert len(PRIVATE) >= 8
    with monkeypatch.context() as patched:
        patched.delattr(path, raising=False)
        module = changed_kernel("without")
    if module.GUARDED and module.TensorGuards:
        watch(module)
    else:  # every call is then an ordinary launch
        assert not module.CAN_RELAUNCH
    call = module._your_dequantize_nf4
    weight, state = layer.weight, layer.weight.quant_state
    for _ in range(3):
        assert exact(call(weight, state), weight, state)
        state.absmax = noise(state.absmax)
    traced = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert exact(traced(weight, state), weight, state)


# The cache
def test_a_layout_keeps_32_launches_and_the_cache_1024_layouts(watched, layer):
    weight, state = layer.weight, layer.weight.quant_state
    scales = state.state2.absmax
    for i in range(34):
        state.state2.absmax = torch.cat([scales, noise(scales.new_empty(i))])
        assert not watched.check(weight, state)
    assert [len(known) for known in launch.launches.values()] == [32]
    assert watched.check(weight, state)
    launch.launches.update({(i,): () for i in range(1100)})
    state.dtype = torch.float16
    watched.check(weight, state)
    assert watched.check(weight, state) and len(launch.launches) <= 1024


def test_nothing_about_a_layer_is_kept(watched, make_layer):
    """Its tensors are freed with it, at once; and a use leaves nothing on it."""
    layer = make_layer(64, 320, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    before = [sorted(vars(x)) for x in (layer, weight, state)]
    watched.warm(layer)
    launch.call_operator(*launch.read(weight, state))
    assert [sorted(vars(x)) for x in (layer, weight, state)] == before
    tensors = [weakref.ref(get(layer, name)) for name in ("weight", *SECOND)]
    del layer, weight, state
    assert launch.launches and not any(tensor() is not None for tensor in tensors)


def test_eight_threads(watched, make_layer, device):
    """First and later calls at the same time, in two states of torch."""
    made = [make_layer(64, 320, torch.bfloat16, seed=i) for i in range(4)] * 2
    count = 5 if device == "cpu" else 100
    start = threading.Barrier(8)

    def work(i):
        start.wait()
        with torch.inference_mode(i % 2 == 0):
            return [watched.call(made[i].weight, made[i].weight.quant_state) for _ in range(count)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for layer, of_layer in zip(made, results, strict=True):
        expected = oracle(layer.weight, layer.weight.quant_state)
        assert all(same_bits(result, expected) for result in of_layer)
