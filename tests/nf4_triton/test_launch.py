"""Replayed launches: what changes between two calls is honored, and what does not fit is checked anew."""

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
from torch.utils.flop_counter import FlopCounterMode

from nf4_triton import launch, private, replay, settings
from nf4_triton.reference import same_bits
from nf4_triton.state import read_state
from states import CHANGES, DTYPES, SECOND, exact, freed, get, moved, noise, oracle, replace, right

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
    result, replayed = watched(weight, state)
    assert replayed and exact(result, weight, state) and not torch.equal(result, before)


@pytest.mark.parametrize("name, change", CHANGES)
def test_a_field_changes(watched, layer, name, change):
    weight, state = watched.warm(layer)
    before = watched(weight, state)[0]
    replace(layer, name, change)
    for again in (False, True):
        assert watched.check(weight, state) == (again or change is noise)
    result, _ = watched(weight, state)
    assert result.shape != before.shape or not torch.equal(result.float(), before.float())


def test_a_new_layer_of_a_known_spec_is_replayed(watched, make_layer):
    """In turns with flat layers, whose states have fewer tensors."""
    for seed in range(3):
        for nested in (True, False):
            layer = make_layer(64, 320, torch.bfloat16, nested=nested, seed=seed)
            assert watched.check(layer.weight, layer.weight.quant_state) == (seed > 0)


def test_every_layout_of_a_weight(watched, layer):
    """All are replayed. A misaligned weight has a launch that loads bytes, which no other weight gets."""
    state, packed = layer.weight.quant_state, layer.weight.data.as_subclass(torch.Tensor)
    memory = torch.cat([packed, packed])
    size = len(packed)
    stored = [packed.view(-1).view(dtype) for dtype in DTYPES]
    views = [packed, layer.weight, packed.t(), packed.view(-1), torch.nn.Parameter(stored[0]), *stored]
    views += [memory[size:], memory[64:][:size], memory[4:][:size], moved(packed, 3)]
    for turn in range(3):
        for i, weight in enumerate(views):
            result, replayed = watched(weight, state)
            assert exact(result, weight, state), f"view {i}"
            assert result.shape == (state.shape[::-1] if weight.shape[0] == 1 else state.shape)
            assert replayed >= (turn > 0), f"view {i}"


# The state of torch
def test_every_state_of_torch(watched, layer, make_layer, device):
    """Guards depend on these, so one spec has several launches; after one round all are replayed."""
    modes = {
        "none": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
    }
    with torch.inference_mode():
        inference = make_layer(64, 320, torch.bfloat16, seed=1).weight
    floats = layer.weight.data.view(-1).view(torch.bfloat16).clone().as_subclass(torch.Tensor)
    for turn in range(3):
        for weight in (layer.weight, torch.nn.Parameter(floats), inference):
            state = getattr(weight, "quant_state", layer.weight.quant_state)
            for name, mode in modes.items():
                with mode():
                    result, replayed = watched(weight, state)
                assert exact(result, weight, state) and replayed >= (turn > 0), name
                assert result.is_inference() == (name == "inference_mode")
                assert not result.requires_grad
    assert len(replay.cached) == 1


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
    assert not replay.cached  # no guards accept it


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
        with pytest.raises(launch.UnsupportedState, match=text):
            watched(kind(weight), state)


# `out`
@pytest.fixture
def out(layer):
    state = layer.weight.quant_state
    return torch.full(state.shape, float("nan"), dtype=state.dtype, device=layer.weight.device)


BAD_OUT = {
    "of another dtype": lambda out: out.half(),
    "on another device": lambda out: out.to("meta"),
    "strided": lambda out: out.new_zeros(320, 128)[:, ::2],
    "a list": lambda out: out.tolist(),
    "that requires grad": lambda out: out.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", BAD_OUT)
def test_an_out_that_does_not_fit(case, out, name):
    watched, weight, state = case
    watched(weight, state, torch.empty_like(out))  # keeps a launch
    with pytest.raises(launch.UnsupportedState, match=r"out (has \(shape|is list).*expected.*None"):
        watched(weight, state, BAD_OUT[name](out))
    assert out.isnan().all()
    watched.check(weight, state, out)


MODES = {"eager": contextlib.nullcontext, "dispatch mode": lambda: FlopCounterMode(display=False)}


@pytest.mark.parametrize("mode", MODES)
def test_an_out_without_memory_of_its_own(case, out, mode):
    """Under a dispatch mode the operator copies its result into `out`."""
    watched, weight, state = case
    watched(weight, state, torch.empty_like(out))  # keeps a launch
    memory = torch.zeros(2 * out.numel(), dtype=torch.uint8, device=weight.device)
    over = memory.view(out.dtype).view(out.shape)
    inside = memory[out.numel() :][: weight.numel()].view(weight.shape).copy_(weight)
    bad = (
        (freed(out), weight, "out has no memory"),
        (over, inside, "out shares memory with"),
        (torch._neg_view(out), weight, "out is a negated view"),
    )
    with MODES[mode]():
        for given_out, given, text in bad:
            with pytest.raises(launch.UnsupportedState, match=text):
                watched(given, state, given_out)
        watched.check(weight, state, out)
    assert torch.equal(inside, weight) and exact(out, weight, state)


def test_a_packed_whose_shape_is_a_list(watched, layer):
    packed = launch.read_state(layer.weight, layer.weight.quant_state)
    packed = packed._replace(shape=list(packed.shape))
    for _ in range(2):
        assert right(watched.module.dequantize_packed(packed), layer)


def test_a_replayed_out(case, out):
    """Its address may change between calls; each alignment has a launch of its own."""
    watched, weight, state = case
    memory = torch.empty(out.numel() + 1, dtype=out.dtype, device=out.device)
    for given in (out, memory[1:].view(out.shape)):
        for turn in range(3):
            given.fill_(float("nan"))
            result, replayed = watched(weight, state, given)
            assert result.data_ptr() == given.data_ptr() and exact(result, weight, state)
            assert replayed == (turn > 0)
        assert watched.check(weight, state, out)


def test_autograd_notices_that_out_was_overwritten(watched, layer, out):
    weight, state = layer.weight, layer.weight.quant_state
    for replayed in (False, True):
        out.zero_()
        loss = (torch.ones_like(out, requires_grad=True) * out).sum()
        assert watched.check(weight, state, out) == replayed
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        out = torch.empty_like(out)  # which has no version
    watched.check(weight, state, out)


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
    assert watched.check(weight, state), "not replayed again without the hook"


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
        call = functools.partial(launch.dequantize_packed, packed._replace(**fake))
        result = torch.compile(call, backend="eager", fullgraph=True)()
    assert (result.shape, result.device.type) == (packed.shape, "cuda")


@pytest.mark.parametrize("how", ["make_fx", "jit.trace"])
@pytest.mark.filterwarnings("ignore")
def test_a_traced_call_follows_its_weight(case, how):
    """A launch replayed past the tracer would leave the traced weight's values in the graph."""
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
        assert not module.CAN_REPLAY
    call = module._your_dequantize_nf4
    weight, state = layer.weight, layer.weight.quant_state
    for _ in range(3):
        assert exact(call(weight, state), weight, state)
        state.absmax = noise(state.absmax)
    traced = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert exact(traced(weight, state), weight, state)


# The cache
def test_a_spec_keeps_32_launches_and_the_cache_1024_specs(watched, layer):
    weight, state = layer.weight, layer.weight.quant_state
    scales = state.state2.absmax
    for i in range(34):
        state.state2.absmax = torch.cat([scales, noise(scales.new_empty(i))])
        assert not watched.check(weight, state)
    assert [len(known) for known in replay.cached.values()] == [32]
    assert watched.check(weight, state)
    replay.cached.update({(i,): () for i in range(1100)})
    state.dtype = torch.float16
    watched.check(weight, state)
    assert watched.check(weight, state) and len(replay.cached) <= 1024


def test_nothing_about_a_layer_is_kept(watched, make_layer):
    """Its tensors are freed with it, at once; and a use leaves nothing on it."""
    layer = make_layer(64, 320, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    before = [sorted(vars(x)) for x in (layer, weight, state)]
    watched.warm(layer)
    launch.call_operator(launch.read_state(weight, state), None)
    assert [sorted(vars(x)) for x in (layer, weight, state)] == before
    tensors = [weakref.ref(get(layer, name)) for name in ("weight", *SECOND)]
    del layer, weight, state
    assert replay.cached and not any(tensor() is not None for tensor in tensors)


def test_eight_threads(watched, make_layer, device):
    """First and replayed calls at the same time, in two states of torch."""
    made = [make_layer(64, 320, torch.bfloat16, seed=i) for i in range(4)] * 2
    count = 5 if device == "cpu" else 100
    start = threading.Barrier(8)

    def work(i):
        start.wait()
        with torch.inference_mode(i % 2 == 0):
            return [launch.your_dequantize_nf4(made[i]) for _ in range(count)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for layer, of_layer in zip(made, results, strict=True):
        expected = oracle(layer.weight, layer.weight.quant_state)
        assert all(same_bits(result, expected) for result in of_layer)
