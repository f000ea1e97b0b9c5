"""A first call on a layer that is like one checked before launches at once, and is right or refused.

Without a GPU the interpreter stands in for the repeated launch (see conftest.py).
"""

import concurrent.futures
import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from layer_tensors import TENSORS  # beside this file

from helpers.nf4 import reference

pytest.importorskip("bitsandbytes")


def counted(kernel, monkeypatch, name):
    """The arguments of every call of the kernel's function of that name."""
    calls, function = [], getattr(kernel, name)

    def count(*arguments):
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(kernel, name, count)
    return calls


@pytest.fixture
def launched(planned, kernel, monkeypatch):
    """Every launch on the public path."""
    return counted(kernel, monkeypatch, "_launch")


@pytest.fixture
def made(kernel, monkeypatch):
    """Every time that guards were made."""
    return counted(kernel, monkeypatch, "_guards")


def exact(result, layer):
    return reference.same_bits(result, reference.dequantize(layer.weight, layer.weight.quant_state))


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_one_layer_of_a_kind_is_launched_publicly(launched, kernel, make_layer, nested, dtype):
    layers = [make_layer(64, 320, dtype, nested=nested, seed=seed) for seed in range(6)]
    assert all(exact(kernel.your_dequantize_nf4(layer), layer) for layer in layers for _ in range(2))
    assert len(launched) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"quant_type": "fp4"},
        {"nested": False},
        {"blocksize": 128},
        {"in_features": 128, "out_features": 160},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_layers_of_another_kind_are_not_taken_for_it(launched, kernel, make_layer, other):
    same = {"in_features": 64, "out_features": 320, "dtype": torch.bfloat16}
    for seed in range(2):
        for options in (same, same | other):
            layer = make_layer(**options, seed=seed)
            assert exact(kernel.your_dequantize_nf4(layer), layer)
    assert len(launched) == 2


def test_views_of_a_weight_are_kinds_of_their_own(launched, kernel, make_layer):
    for seed in range(3):
        layer = make_layer(64, 320, torch.bfloat16, seed=seed)
        weight, state = layer.weight, layer.weight.quant_state
        flat = weight.data.view(-1)
        for view in (weight, weight.data, weight.data.t(), flat.view(torch.float16)):
            result = kernel._your_dequantize_nf4(view, state)
            assert reference.same_bits(result, reference.dequantize(view, state))
    assert len(launched) == 4


def test_every_alignment_is_a_kind_of_its_own(launched, kernel, make_layer):
    layer = make_layer(64, 320, torch.bfloat16)
    for turn in range(2):
        for start in (0, 1, 2, 4, 8):
            state = copy.copy(layer.weight.quant_state)
            state.absmax = state.absmax.clone()
            memory = torch.cat([layer.weight.data.view(-1)[:start], layer.weight.data.view(-1)])
            result = kernel._your_dequantize_nf4(memory[start:].view(layer.weight.shape), state)
            assert exact(result, layer), (turn, start)
    assert len(launched) == 3


def test_a_given_out_is_filled(launched, kernel, make_layer):
    for seed in range(3):
        layer = make_layer(64, 320, torch.bfloat16, seed=seed)
        state = layer.weight.quant_state
        out = torch.full(state.shape, float("nan"), dtype=state.dtype, device=layer.weight.device)
        assert kernel._your_dequantize_nf4(layer.weight, state, out=out) is out and exact(out, layer)
        with pytest.raises(kernel.UnsupportedState, match="out has"):
            kernel._your_dequantize_nf4(make_layer(64, 320, torch.bfloat16).weight, state, out=out.t())
    assert len(launched) == 1


def test_a_kind_goes_with_its_kernel_and_settings(launched, kernel, make_layer, monkeypatch):
    """As when a notebook's cell runs again, or settings are forced."""

    class Another:
        def __getitem__(self, grid, original=kernel._your_dequantize_nf4_kernel):
            return original[grid]

    def call(seed):
        layer = make_layer(64, 320, torch.bfloat16, seed=seed)
        assert exact(kernel.your_dequantize_nf4(layer), layer)
        return len(launched)

    assert call(0) == call(1) == 1
    with kernel.force(words_small=4):
        assert call(2) == call(3) == 2
    assert call(4) == call(5) == 3
    monkeypatch.setattr(kernel, "_your_dequantize_nf4_kernel", Another())
    assert call(6) == call(7) == 4


def shorten(layer, name, owner):
    setattr(owner, name, getattr(owner, name)[:-1].clone())


def free(layer, name, owner):
    getattr(owner, name).untyped_storage().resize_(0)


def another_dtype(layer, name, owner):
    x = getattr(owner, name)
    setattr(owner, name, x.view({1: torch.int8, 4: torch.int32}[x.itemsize]))


def stride(layer, name, owner):
    setattr(owner, name, torch.stack([getattr(owner, name)] * 2, -1)[..., 0])


SPOILT = [
    (name, how)
    for name in ("absmax", "state2.absmax", "state2.code", "offset")
    for how in (shorten, free, another_dtype, stride)
    if name != "offset" or how not in (shorten, stride)
]


@pytest.mark.parametrize(("name", "how"), SPOILT, ids=[f"{name} {how.__name__}" for name, how in SPOILT])
def test_a_layer_unlike_the_others_is_refused(launched, kernel, make_layer, name, how):
    good, bad = (make_layer(128, 320, torch.bfloat16, seed=seed) for seed in range(2))
    kernel.your_dequantize_nf4(good)
    state = bad.weight.quant_state
    how(bad, name.removeprefix("state2."), state.state2 if name.startswith("state2.") else state)
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match=name):
            kernel.your_dequantize_nf4(bad)
    assert len(launched) == 1 and exact(kernel.your_dequantize_nf4(good), good)


def test_a_weight_too_short_or_freed_is_refused(launched, kernel, make_layer):
    good, short, freed = (make_layer(64, 320, torch.bfloat16, seed=seed) for seed in range(3))
    kernel.your_dequantize_nf4(good)
    short.weight.data = short.weight.data[:-1].clone()
    freed.weight.untyped_storage().resize_(64)
    for bad in (short, freed):
        with pytest.raises(kernel.UnsupportedState, match="the weight holds|weight has no memory"):
            kernel.your_dequantize_nf4(bad)
    assert len(launched) == 1


def test_a_new_codebook_is_a_new_kind(launched, kernel, make_layer, monkeypatch):
    """As when the notebook's cell of the codebooks was edited and is run again."""
    one, two = (make_layer(64, 320, torch.bfloat16, seed=seed) for seed in range(2))
    kernel.your_dequantize_nf4(one)
    double = kernel.codebooks(one.weight.device) * 2
    monkeypatch.setattr(kernel, "codebooks", lambda device: double)
    result = kernel.your_dequantize_nf4(two)
    expected = reference.dequantize(two.weight, two.weight.quant_state)
    assert len(launched) == 2 and torch.equal(result, expected * 2)


def test_a_scale_that_shrinks_while_it_is_planned_is_noticed(launched, kernel, make_layer, monkeypatch):
    kernel.your_dequantize_nf4(make_layer(128, 320, torch.bfloat16, seed=1))
    layer, asked, in_memory = make_layer(128, 320, torch.bfloat16), [], kernel._in_memory

    def shrinks_then(tensor):
        asked.append(in_memory(tensor))
        if len(asked) == 5:
            layer.weight.quant_state.absmax.untyped_storage().resize_(8)
        return asked[-1]

    with monkeypatch.context() as patched:
        patched.setattr(kernel, "_in_memory", shrinks_then)
        with pytest.raises(kernel.UnsupportedState, match="absmax"):
            kernel.your_dequantize_nf4(layer)
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match="absmax"):
            kernel.your_dequantize_nf4(layer)


def test_layers_of_one_kind_have_guards_of_their_own(launched, kernel, make_layer, made, device):
    """One was loaded in inference mode; each is called with and without autocast, in turns."""
    with torch.inference_mode():
        layers = [make_layer(64, 320, torch.bfloat16)]
    layers.append(make_layer(64, 320, torch.bfloat16))
    for turn in range(6):
        for layer in layers:
            kernel.your_dequantize_nf4(layer)
            with torch.autocast(device, dtype=torch.bfloat16):
                kernel.your_dequantize_nf4(layer)
        if turn == 1:
            made.clear()
    assert not made


def test_a_weight_that_requires_gradients_has_guards_that_fit(launched, kernel, make_layer, made):
    """quant_storage=bfloat16 as FSDP needs it: such a parameter may require gradients."""
    layer = make_layer(64, 320, torch.bfloat16)
    packed = layer.weight.data.view(-1).view(torch.bfloat16).clone()
    weight, state = torch.nn.Parameter(packed), layer.weight.quant_state
    for turn in range(6):
        assert reference.same_bits(
            kernel._your_dequantize_nf4(weight, state), reference.dequantize(weight, state)
        )
        if turn == 1:
            made.clear()
    assert not made


def test_kinds_keep_no_layer_alive(launched, kernel, make_layer):
    layer = make_layer(64, 320, torch.bfloat16)
    kernel.your_dequantize_nf4(layer)
    tensors = [weakref.ref(find(layer)) for find in TENSORS.values()]
    gc.collect()
    gc.disable()
    try:
        del layer
        assert kernel._kinds and not kernel._plans and not any(tensor() is not None for tensor in tensors)
    finally:
        gc.enable()


def test_kinds_of_endless_shapes_do_not_pile_up(launched, kernel, make_layer, monkeypatch):
    monkeypatch.setattr(kernel, "_launch", lambda *arguments: None)
    monkeypatch.setattr(kernel, "_repeat", lambda *arguments: lambda *addresses: None)
    layer = make_layer(64, 320, torch.bfloat16)
    for i in range(600):
        state = copy.copy(layer.weight.quant_state)
        state.shape = torch.Size([64, 320 - i % 300])
        state.blocksize = 64 << i % 3
        state.absmax = state.absmax.clone()
        kernel._your_dequantize_nf4(layer.weight, state)
        assert len(kernel._kinds) <= 256


def test_threads_call_new_layers_of_one_kind(launched, kernel, make_layer):
    layers = [make_layer(64, 320, torch.bfloat16, seed=seed) for seed in range(40)]
    kernel.your_dequantize_nf4(layers[0])
    start = threading.Barrier(4)

    def work(turn):
        start.wait()
        with torch.inference_mode(turn % 2 == 0):
            return [exact(kernel.your_dequantize_nf4(layer), layer) for layer in layers[turn::4]]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(itertools.chain(*threads.map(work, range(4))))
    assert len(launched) == 1
