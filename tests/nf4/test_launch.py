"""Replayed launches: whatever changes between two calls is honored, and what does not fit is checked anew."""

import contextlib
import copy
import gc
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.nf4 import kernel, launch, reference
from helpers.nf4.reference import same_bits
from states import DTYPES

pytest.importorskip("bitsandbytes")
ON_GPU = pytest.mark.gpu
FIELDS = {  # where each tensor of a nested layer is
    "weight": lambda layer: layer.weight,
    "absmax": lambda layer: layer.weight.quant_state.absmax,
    "state2.code": lambda layer: layer.weight.quant_state.state2.code,
    "state2.absmax": lambda layer: layer.weight.quant_state.state2.absmax,
    "offset": lambda layer: layer.weight.quant_state.offset,
}


@pytest.fixture
def layer(make_layer):
    """64 x 320 in bf16: 320 blocks of scales, 2 of the second level."""
    return make_layer(64, 320, torch.bfloat16)


def exact(result, weight, state):
    return same_bits(result, reference.dequantize(weight, state))


def noise(x):
    """Return other contents of the same shape and dtype."""
    return torch.randint_like(x, 256) if x.dtype == torch.uint8 else torch.rand_like(x) + 0.25


def other_data(x):
    x.data = noise(x)


def other_storage(x):
    with torch.no_grad():
        x.set_(noise(x))


def free_and_refill(x):
    """As FSDP does: the tensor stays, its memory goes and comes back elsewhere."""
    values, storage = noise(x), x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    keep = torch.empty(size + 4096, dtype=torch.uint8, device=x.device)
    storage.resize_(size)
    x.data.copy_(values)
    del keep


IN_PLACE = {
    "copy_": lambda x: x.data.copy_(noise(x)),
    ".data =": other_data,
    "set_": other_storage,
    "freed and refilled": free_and_refill,
    "swap_tensors": lambda x: torch.utils.swap_tensors(x, noise(x)),
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("name", FIELDS)
def test_a_tensor_changes_in_place(watched, layer, name, how):
    if (name, how) == ("weight", "swap_tensors"):
        pytest.skip("a Params4bit is swapped with its attributes: another layer's weight")
    weight, state = watched.warm(layer)
    before = watched(weight, state)[0]
    IN_PLACE[how](FIELDS[name](layer))
    result, replayed = watched(weight, state)
    assert replayed and exact(result, weight, state) and not torch.equal(result, before)


def set_to(name, change):
    def apply(layer):
        owner = layer.weight.quant_state
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        field = name.split(".")[-1]
        setattr(owner, field, change(getattr(owner, field)))

    return apply


def smaller_blocks(layer):
    state = layer.weight.quant_state
    state.blocksize, state.absmax = 32, torch.cat([state.absmax, noise(state.absmax)])
    state.state2.absmax = torch.cat([state.state2.absmax, noise(state.state2.absmax)])


def flatten(layer):
    state = layer.weight.quant_state
    state.absmax = torch.rand(state.absmax.numel(), device=layer.weight.device)
    state.nested, state.state2 = False, None


def fresh(layer):
    out_features, in_features = layer.weight.quant_state.shape
    dtype, device = layer.weight.quant_state.dtype, layer.weight.device
    return reference.quantized_layer(in_features, out_features, dtype, device=device, seed=1)


# name: (change, is the cached launch still the right one?)
CHANGES = {
    **{f"{name} replaced": (set_to(name, noise), True) for name in list(FIELDS)[1:]},
    "absmax longer": (set_to("absmax", lambda x: torch.cat([noise(x), x])), False),
    "offset in bf16": (set_to("offset", lambda x: (x + 1).bfloat16()), False),
    "offset of shape (1,)": (set_to("offset", lambda x: x.view(1) + 1), False),
    "dtype": (set_to("dtype", lambda _: torch.float16), False),
    "dtype fp32": (set_to("dtype", lambda _: torch.float32), False),
    "quant_type": (set_to("quant_type", lambda _: "fp4"), False),
    "blocksize": (set_to("blocksize", lambda _: 128), False),
    "blocksize 32": (smaller_blocks, False),
    "state2.blocksize": (set_to("state2.blocksize", lambda _: 512), False),
    "shape transposed": (set_to("shape", lambda x: torch.Size(reversed(x))), False),
    "shape smaller": (set_to("shape", lambda _: torch.Size([63, 5])), False),
    "shape of rank 3": (set_to("shape", lambda _: torch.Size([5, 64, 64])), False),
    "flat": (flatten, False),
    "another state": (lambda x: setattr(x.weight, "quant_state", fresh(x).weight.quant_state), True),
    "another weight": (lambda x: setattr(x, "weight", fresh(x).weight), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes(watched, layer, name):
    before = watched(*watched.warm(layer))[0]
    change, fits = CHANGES[name]
    change(layer)
    for again in range(2):
        result, replayed = watched(layer.weight, layer.weight.quant_state)
        assert exact(result, layer.weight, layer.weight.quant_state)
        assert replayed == (fits or again == 1)
    assert result.shape != before.shape or not torch.equal(result.float(), before.float())


@pytest.mark.parametrize(
    "other",
    [
        {"quant_type": "fp4"},
        {"nested": False},
        {"nested": False, "quant_type": "fp4", "dtype": torch.float16},
        {"blocksize": 128},
        {"in_features": 128, "out_features": 160},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_a_new_layer_of_a_known_key_is_replayed_and_no_other(watched, make_layer, other):
    same = {"in_features": 64, "out_features": 320, "dtype": torch.bfloat16}
    for seed in range(3):
        for options in (same, same | other):
            layer = make_layer(**options, seed=seed)
            result, replayed = watched(layer.weight, layer.weight.quant_state)
            assert replayed == (seed > 0) and exact(result, layer.weight, layer.weight.quant_state)


def test_every_layout_of_a_weight(watched, layer):
    """Transposed, plain, longer, in another storage dtype, from the middle of a storage: each is replayed,
    but for those that are not aligned to 4 bytes."""
    state, packed = layer.weight.quant_state, layer.weight.data.as_subclass(torch.Tensor)
    memory = torch.cat([packed[:64], packed, packed[:64]])
    views = [layer.weight, packed, packed.t(), packed.view(-1), memory, memory[64:]]
    views += [packed.view(-1).view(dtype) for dtype in DTYPES]
    views += [torch.nn.Parameter(views[-1]), memory[64:][: len(packed)]]
    views += [memory[start:] for start in (1, 2, 3, 4)]
    for turn in range(3):
        for i, weight in enumerate(views):
            result, replayed = watched(weight, state)
            assert replayed >= (turn > 0 and weight.data_ptr() % 4 == 0), f"view {i}"
            assert exact(result, weight, state), f"view {i}"
            assert result.shape == (state.shape[::-1] if weight.shape[0] == 1 else state.shape)


def test_the_launch_of_an_unaligned_weight_is_not_kept(watched, layer):
    """It is the portable path, which aligned weights of the same layout must not inherit."""
    packed, state = layer.weight.data.as_subclass(torch.Tensor), layer.weight.quant_state
    unaligned = torch.cat([packed[:1], packed])[1:]
    aligned = unaligned.clone()
    for weight, known in ((unaligned, False), (aligned, False), (aligned, True), (unaligned, False)):
        result, replayed = watched(weight, state)
        assert replayed == known and exact(result, weight, state)


def test_the_shard_of_a_freed_flat_parameter(watched, layer):
    """FSDP frees the storage: the address is then the view's offset, not 0. Refused until it is back."""
    weight, state = watched.warm(layer)
    for start in (0, 64):
        memory = torch.cat([weight.data.view(-1)[:start], weight.data.view(-1)])
        values, size = memory.clone(), memory.untyped_storage().nbytes()
        weight.data = memory[start:].view(weight.shape)
        assert exact(watched(weight, state)[0], weight, state)
        for _ in range(2):
            memory.untyped_storage().resize_(0)
            for _ in range(2):
                with pytest.raises(launch.UnsupportedState, match="weight has no memory.*gather it first"):
                    watched(weight, state)
            memory.untyped_storage().resize_(size)
            memory.copy_(values)
            result, replayed = watched(weight, state)
            assert replayed and exact(result, weight, state)


def autograd_thread(call):
    """Run call() in the thread of a backward pass."""
    results = []

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            results.append(call())
            return gradient

    Step.apply(torch.ones(1, requires_grad=True)).backward()
    return results[0]


def test_every_state_of_torch(watched, layer, device):
    """Guards depend on these, so one key has several launches; after one round all are replayed."""
    modes = {
        "none": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
    }
    with torch.inference_mode():
        loaded = fresh(layer)
    packed = layer.weight.data.view(-1).view(torch.bfloat16).clone()
    weights = [layer.weight, torch.nn.Parameter(packed.as_subclass(torch.Tensor)), loaded.weight]
    for turn in range(3):
        for weight in weights:
            state = getattr(weight, "quant_state", layer.weight.quant_state)
            for name, mode in modes.items():
                with mode():
                    result, replayed = watched(weight, state)
                assert exact(result, weight, state) and replayed >= (turn > 0), name
                assert result.is_inference() == (name == "inference_mode") and not result.requires_grad
            result, replayed = autograd_thread(lambda w=weight, s=state: watched(w, s))
            assert exact(result, weight, state) and replayed >= (turn > 0)
    assert len(launch.launches) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_defaults_of_torch_change_nothing(watched, device, layer, dtype):
    launch.codebooks.cache_clear()  # as in the first call of a process
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta" if device == "cuda" else "cpu"):  # the interpreter allocates, too
            results = [watched(layer.weight, layer.weight.quant_state)[0] for _ in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    for result in results:
        assert result.device == layer.weight.device
        assert exact(result, layer.weight, layer.weight.quant_state)


def test_a_state_gone_bad_is_refused_at_once(watched, layer):
    """And a good one again is replayed."""
    weight, state = watched.warm(layer)
    bad = {
        "offset": None,
        "blocksize": 96,
        "quant_type": "int8",
        "dtype": torch.float64,
        "absmax": state.absmax[:-1],
        "state2": None,
        "shape": torch.Size([321, 64]),
    }
    for name, value in bad.items():
        good = getattr(state, name)
        setattr(state, name, value)
        with pytest.raises(launch.UnsupportedState):
            watched(weight, state)
        setattr(state, name, good)
        result, replayed = watched(weight, state)
        assert replayed and exact(result, weight, state), name
    packed = weight.data.as_subclass(torch.Tensor)
    twice = torch.cat([packed, packed], 1)
    for strided in (twice[:, :1], packed[:1].expand(packed.shape), packed[:-1]):
        with pytest.raises(launch.UnsupportedState, match="weight"):
            watched(strided, state)


def test_a_nested_state_is_not_taken_for_a_flat_one(watched, make_layer):
    """Their keys are equal if state2 lost its dtype and blocksize."""
    watched.warm(make_layer(64, 320, torch.bfloat16, nested=False))
    layer = make_layer(64, 320, torch.bfloat16)
    state2 = layer.weight.quant_state.state2
    state2.dtype = state2.blocksize = None
    with pytest.raises(launch.UnsupportedState, match=r"state2\.dtype is None"):
        watched(layer.weight, layer.weight.quant_state)


def test_the_same_tensor_twice_in_a_state(watched, layer):
    state = layer.weight.quant_state
    state.state2.absmax = state.state2.code
    for _ in range(2):
        assert exact(watched(layer.weight, state)[0], layer.weight, state)


# `out`
def new_out(state, weight):
    return torch.full(state.shape, float("nan"), dtype=state.dtype, device=weight.device)


@pytest.mark.parametrize("before", [0, 1, 8], ids="address + {}".format)
def test_out_of_any_alignment(watched, layer, before):
    weight, state = watched.warm(layer)
    n = state.shape.numel()
    for _ in range(2):
        memory = torch.full((n + before + 8,), float("nan"), dtype=state.dtype, device=weight.device)
        out = memory[before:][:n].view(state.shape)
        result, replayed = watched(weight, state, out)
        assert result is out and replayed == (before != 1) and exact(out, weight, state)
        assert memory[:before].isnan().all() and memory[before + n :].isnan().all()


BAD_OUT = {
    "transposed": lambda good: good.t(),
    "of another shape": lambda good: good[:-1],
    "one-dimensional": lambda good: good.view(-1),
    "of another dtype": lambda good: good.half(),
    "on another device": lambda good: good.to("meta"),
    "strided": lambda good: good.new_zeros(320, 128)[:, ::2],
    "a list": lambda good: good.tolist(),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", BAD_OUT)
def test_an_out_that_does_not_fit(watched, layer, name, warm):
    weight, state = watched.warm(layer) if warm else (layer.weight, layer.weight.quant_state)
    good = new_out(state, weight).zero_()
    with pytest.raises(launch.UnsupportedState, match=r"out (has \(shape|is list).*expected.*None for a new"):
        watched(weight, state, BAD_OUT[name](good))
    assert not good.any() and exact(watched(weight, state)[0], weight, state)


@pytest.mark.parametrize("warm", [False, True])
def test_an_out_without_memory_of_its_own(watched, layer, warm):
    weight, state = watched.warm(layer) if warm else (layer.weight, layer.weight.quant_state)
    freed, n = new_out(state, weight), state.shape.numel()
    freed.untyped_storage().resize_(0)
    memory = torch.zeros(2 * n, dtype=torch.uint8, device=weight.device)
    inside = memory[n:][: weight.numel()].view(weight.shape).copy_(weight.data)
    over, negated = memory.view(state.dtype).view(state.shape), torch._neg_view(new_out(state, weight))
    for given, out in ((weight, freed), (inside, over), (weight, negated)):
        for _ in range(2):
            with pytest.raises(launch.UnsupportedState, match="out has no memory"):
                watched(given, state, out)
    assert torch.equal(inside, weight.data)


def test_a_fake_weight_outside_its_mode_gives_a_fake_result(layer):
    mode, state = FakeTensorMode(), layer.weight.quant_state
    weight = mode.from_tensor(layer.weight.data)
    fake = copy.copy(state)
    fake.state2 = copy.copy(state.state2)
    fake.absmax, fake.offset = mode.from_tensor(state.absmax), mode.from_tensor(state.offset)
    fake.state2.absmax, fake.state2.code = map(mode.from_tensor, (state.state2.absmax, state.state2.code))
    result = launch._your_dequantize_nf4(weight, fake)
    assert isinstance(result, FakeTensor) and result.shape == state.shape and result.dtype == state.dtype


def test_autograd_notices_that_out_was_overwritten(watched, layer):
    weight, state = layer.weight, layer.weight.quant_state
    for _ in range(3):  # a first call, then two replayed ones
        out = new_out(state, weight).zero_()
        x = torch.ones_like(out, requires_grad=True)
        loss = (x * out).sum()
        watched(weight, state, out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        out = new_out(state, weight)  # which has no version
    assert exact(watched(weight, state, out)[0], weight, state)


def test_strides_of_out_are_not_kept(watched, make_layer):
    """In a dimension of one element any stride is contiguous; a new result has torch's own."""
    layer = make_layer(320, 1, torch.float16)
    weight, state = layer.weight, layer.weight.quant_state
    out = torch.empty_strided(state.shape, (0, 1), dtype=state.dtype, device=weight.device)
    watched(weight, state, out)
    result, replayed = watched(weight, state)
    assert replayed and result.stride() == (320, 1) and exact(result, weight, state)


# What wants to see a launch
HOOKS = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
WHICH = ["launch_enter_hook", "launch_exit_hook"]


@contextlib.contextmanager
def hook(which, how, seen):
    def call(metadata):
        seen.append(metadata.get()["name"])

    before = getattr(HOOKS, which)
    if how == "assigned":
        setattr(HOOKS, which, call)
    elif hasattr(before, "add"):
        before.add(call)
    else:
        pytest.skip("this Triton has no chains of hooks")
    try:
        yield
    finally:
        setattr(HOOKS, which, before)
        if how == "added":
            before.remove(call)


@pytest.mark.parametrize("how", ["added", "assigned"])
@pytest.mark.parametrize("which", WHICH)
def test_a_launch_hook_sees_every_launch(watched, device, layer, which, how):
    weight, state = watched.warm(layer)
    seen = []
    with hook(which, how, seen):
        for _ in range(3):
            result, replayed = watched(weight, state)
            assert exact(result, weight, state) and not replayed
    if device == "cuda":  # the interpreter calls no hooks
        assert seen == ["_your_dequantize_nf4_kernel"] * 3
    assert watched(weight, state)[1], "replayed again without the hook"


@pytest.mark.parametrize("how", ["added", "assigned"])
@pytest.mark.parametrize("which", WHICH)
def test_a_hook_that_was_there_before_the_import(watch, changed_kernel, layer, which, how):
    with hook(which, how, []):
        watched = watch(changed_kernel("hooked"))
        for _ in range(3):
            result, replayed = watched(layer.weight, layer.weight.quant_state)
            assert exact(result, layer.weight, layer.weight.quant_state) and not replayed


@pytest.fixture(params=[False, True], ids=["first", "warm"])
def case(request, watched, layer):
    """(watched, plain weight, state), before and after a launch was cached."""
    weight, state = layer.weight.data.as_subclass(torch.Tensor), layer.weight.quant_state
    if request.param:
        watched.warm(layer), watched(weight, state), watched(weight, state)
    return watched, weight, state


def test_fake_tensors_get_fake_results(case):
    watched, weight, state = case
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for given in (mode.from_tensor(weight), weight):
            result = watched(given, state)[0]
            assert isinstance(result, FakeTensor)
            assert (result.shape, result.dtype) == (state.shape, state.dtype)
    result = watched(weight.to("meta"), state)[0]
    assert result.is_meta and (result.shape, result.dtype) == (state.shape, state.dtype)
    assert exact(watched(weight, state)[0], weight, state)


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
    assert exact(watched(weight, state)[0], weight, state)


@pytest.mark.filterwarnings("ignore:.*performance drop because we have not yet implemented")
def test_torch_func_transforms(case):
    """grad and vmap over activations, vmap over stacked weights."""
    watched, weight, state = case
    decoded = reference.dequantize(weight, state).float()
    x = torch.ones(64, device=weight.device)

    def product(x, weight=weight):
        return watched(weight, state)[0].float() @ x

    gradient = torch.func.grad(lambda x: product(x).sum())(x)
    torch.testing.assert_close(gradient, decoded.sum(0))
    result = torch.vmap(product)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(result[1], decoded @ (2 * x))
    stack = torch.stack([weight, 255 - weight])
    result = torch.vmap(lambda w: watched(w, state)[0])(stack)
    assert all(exact(result[i], stack[i], state) for i in range(2))
    assert exact(watched(weight, state)[0], weight, state)


def test_modes_of_the_user(case):
    """A function mode changes nothing; a dispatch mode sees the operator."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    watched, weight, state = case
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for mode in (Functions(), Operators()):
        with mode:
            for _ in range(2):
                assert exact(watched(weight, state)[0], weight, state)
    assert sum("nf4_triton" in name for name in seen) == 2


class Wrapper(torch.Tensor):
    """A size, a device and no memory, like a DTensor."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a wrapper")


def test_a_tensor_that_only_wraps_others_is_refused(case):
    watched, weight, state = case
    with pytest.raises(launch.UnsupportedState, match="full_tensor.. of a DTensor"):
        watched(Wrapper(weight), state)


# Settings and the kernel itself
def test_forced_settings_are_honored_at_once(watched, layer):
    weight, state = watched.warm(layer)
    for forced in ({"card": "t4"}, {"words_small": 4}):
        with kernel.force(**forced):
            for expected in (False, True):
                result, replayed = watched(weight, state)
                assert replayed == expected and exact(result, weight, state)
        result, replayed = watched(weight, state)
        assert not replayed, "back to the GPU's own settings"
        watched(weight, state)


def test_a_kernel_cell_that_ran_again(watched, layer, monkeypatch):
    """A launch belongs to the kernel it was compiled from; those of the old one go."""
    weight, state = watched.warm(layer)
    original, used = launch._your_dequantize_nf4_kernel, []

    class Edited:
        def __getitem__(self, grid):
            used.append(grid)
            return original[grid]

    monkeypatch.setattr(launch, "_your_dequantize_nf4_kernel", Edited())
    for expected in (False, True):
        result, replayed = watched(weight, state)
        assert replayed == expected and used and exact(result, weight, state)
    assert [len(known) for known in launch.launches.values()] == [1]


def test_the_plain_wrapper_returns_the_same(layer):
    weight, state = layer.weight, layer.weight.quant_state
    out = new_out(state, weight)
    for given in (weight, weight.data.t()):
        assert exact(launch.plain_dequantize_nf4(given, state), given, state)
    assert launch.plain_dequantize_nf4(weight, state, out) is out and exact(out, weight, state)
    with pytest.raises(launch.UnsupportedState, match="no quant_state"):
        launch.plain_dequantize_nf4(weight, None)


def private_names():
    text = Path(launch.__file__).read_text(encoding="utf-8")
    found = re.findall(r'_private\(\s*([\w.]+), "([\w.]+)"', text)
    assert len(found) >= 8
    return [f"{root}.{path}" for root, path in found]


@pytest.mark.parametrize("name", private_names())
def test_without_a_private_name_of_torch(watch, changed_kernel, layer, monkeypatch, name):
    holder, path = torch, name.split(".")[1:]
    for part in path[:-1]:
        holder = getattr(holder, part)
    with monkeypatch.context() as patched:
        patched.delattr(holder, path[-1], raising=False)
        module = changed_kernel("without")
    direct, weight, state = module.DIRECT, layer.weight, layer.weight.quant_state
    if path[-1] == "TensorGuards":
        assert not direct
        call = module._your_dequantize_nf4
    else:
        call = watch(module).module._your_dequantize_nf4
    for _ in range(3):
        assert exact(call(weight, state), weight, state)
        state.absmax = noise(state.absmax)
    assert exact(call(weight, state, new_out(state, weight)), weight, state)
    assert exact(module._call_operator(*module._fields(weight, state), None), weight, state)
    with pytest.raises(module.UnsupportedState, match="weight is not contiguous"):
        call(torch.cat([weight.data, weight.data], 1)[:, :1], state)


# The cache itself
def test_a_key_keeps_32_launches_and_the_cache_1024_keys(watched, layer):
    weight, state = layer.weight, layer.weight.quant_state
    scales = state.state2.absmax
    for i in range(34):
        state.state2.absmax = torch.cat([scales, noise(scales.new_empty(i))])
        result, replayed = watched(weight, state)
        assert not replayed and exact(result, weight, state)
    assert [len(known) for known in launch.launches.values()] == [32]
    assert watched(weight, state)[1]
    launch.launches.update({(i,): () for i in range(1100)})
    state.dtype = torch.float16
    for expected in (False, True):
        result, replayed = watched(weight, state)
        assert replayed == expected and exact(result, weight, state)
    assert len(launch.launches) <= 1024


def test_nothing_about_a_layer_is_kept(watched, make_layer):
    """Its tensors are freed with it, at once; and a use leaves nothing on it."""
    layer = make_layer(64, 320, torch.bfloat16)
    before = [sorted(vars(x)) for x in (layer, layer.weight, layer.weight.quant_state)]
    watched.warm(layer)
    launch._call_operator(*launch._fields(layer.weight, layer.weight.quant_state), None)
    assert [sorted(vars(x)) for x in (layer, layer.weight, layer.weight.quant_state)] == before
    tensors = [weakref.ref(find(layer)) for find in FIELDS.values()]
    gc.collect()
    gc.disable()
    try:
        del layer
        assert launch.launches and not any(tensor() is not None for tensor in tensors)
    finally:
        gc.enable()


@pytest.mark.parametrize("shared", [True, False], ids=["one layer", "many layers"])
def test_eight_threads(watched, make_layer, device, shared):
    """First and replayed calls at the same time, in several states of torch and, on a GPU, streams."""
    made = [make_layer(64, 320, torch.bfloat16, seed=0 if shared else i) for i in range(8)]
    made = made[:1] * 8 if shared else made
    expected = [reference.dequantize(layer.weight, layer.weight.quant_state) for layer in made]
    if device == "cuda":
        torch.cuda.synchronize()
    faults, start = [], threading.Barrier(8)

    def work(i):
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
        try:
            start.wait()
            with stream, torch.inference_mode(i % 2 == 0):
                results = [launch.your_dequantize_nf4(made[i]) for _ in range(5 if device == "cpu" else 100)]
                if device == "cuda":
                    torch.cuda.current_stream().synchronize()
                faults.extend(i for result in results if not same_bits(result, expected[i]))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
