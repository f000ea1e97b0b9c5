"""Bad input gets a clear error, whether or not a launch is cached."""

import pytest
import torch
import triton

from nf4_triton import dequantize
from nf4_triton.core import launch, launch_general
from nf4_triton.core.reference import same_bits
from nf4_triton.core.supported import UnsupportedState
from states import SECOND, freed, random_state, replace, right, strided

bitsandbytes = pytest.importorskip("bitsandbytes")
BAD_SCALES = {
    "None": lambda x: None,
    "too short": lambda x: x.reshape(-1)[:-1],
    "in int32": lambda x: x.int(),
    "on another device": lambda x: x.to("meta"),
    "freed": freed,
}
BAD_WEIGHTS = {
    "one byte short": lambda x: x[:-1],
    "one byte long": lambda x: torch.cat([x, x[:1]]),
    "of converted bytes": lambda x: x.float(),
    "partitioned": lambda x: x[:0],  # by FSDP or DeepSpeed ZeRO-3
    "strided": strided,
    "of no dimension": lambda x: x[0, 0],
    "in int64": lambda x: x.long(),
    "freed": freed,
}
BAD_VALUES = {
    "quant_type": ["af4", ["nf4"]],
    "blocksize": [96, 0, 64.5, [64]],
    "state2.blocksize": [96, None],
    "dtype": [torch.float64],
    "state2.dtype": [torch.float16],
    "shape": [512, (-64, -512), (64.0, 512.0), (513, 64), (2**17, 2**17)],
    "state2": [None],
    "nested": [False],
}
OTHERS = [
    ("absmax", "strided", strided),
    ("absmax", "sparse", lambda x: x.to_sparse()),
    ("state2.code", "negated", torch._neg_view),
    ("offset", "of two", lambda x: torch.stack([x, x])),
    ("offset", "(1,) in fp64", lambda x: x.double().view(1)),
]
# How errors name a field, if not by its name.
CALLED = {"state2.absmax": "absmax2", "state2.code": "code2", "nested": "absmax"}
CALLED |= {"state2": "quant_state", "shape": "quant_state|the weight"}


@pytest.fixture
def layer(make_layer):
    return make_layer(64, 512, torch.float16)


def cases():
    """Yield (field, what is wrong, the change)."""
    for name in SECOND:
        for what, change in BAD_SCALES.items():
            yield name, what, change
    for what, change in BAD_WEIGHTS.items():
        yield "weight", what, change
    for name, values in BAD_VALUES.items():
        for value in values:
            yield name, repr(value), lambda x, value=value: value
    yield from OTHERS


def refused(watched, weight, state, pattern):
    """Fail unless there is one clear error. The notebook's cells refer to the package; the package says
    what is wrong."""
    if watched.module is launch:
        pattern = "dequantize takes other layouts"
    with pytest.raises(UnsupportedState, match=pattern) as caught:
        watched(weight, state)
    assert "expected" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name, what, change", list(cases()))
def test_broken(watched, make_layer, layer, name, what, change):
    if what != "freed" or name == "weight":  # a cached launch checks only the weight's memory
        watched.warm(make_layer(64, 512, torch.float16, seed=1))
    replace(layer, name, change)
    refused(watched, layer.weight, layer.weight.quant_state, CALLED.get(name, name))


def test_without_the_last_scale(watched, layer):
    """512 blocks are half a group of 1024. The last block is not whole, either: both need their scales."""
    state = layer.weight.quant_state
    state.shape, state.state2.blocksize = torch.Size([512 * 64 - 1]), 1024
    absmax = state.absmax
    state.absmax = absmax[:511]
    refused(watched, layer.weight, state, "absmax has 511 elements .*expected 512")
    state.absmax, state.state2.absmax = absmax, state.state2.absmax[:0]
    refused(watched, layer.weight, state, "absmax2 has 0 elements .*expected 1 or more")


def test_a_transposed_weight_of_three_dimensions(watched, layer):
    """Only a matrix can be transposed."""
    state = layer.weight.quant_state
    state.shape = torch.Size([8, 64, 64])
    refused(watched, layer.weight.t(), state, "packed as one row.*expected a matrix")
    rows = dequantize(layer.weight.data.t(), state, rows=[3])  # never transposed
    assert same_bits(rows, dequantize(layer)[[3]])


@pytest.mark.parametrize("given", [None, torch.nn.Linear(64, 64)], ids=str)
def test_not_a_quantized_layer(given):
    with pytest.raises(UnsupportedState, match="'state2', expected a Linear4bit on a GPU"):
        launch.your_dequantize_nf4(given)
    with pytest.raises(UnsupportedState, match="no quant_state.*quantize.*8-bit layers have none"):
        launch_general.dequantize_weight(getattr(given, "weight", None), None)


def test_repacked_by_bitsandbytes_for_the_cpu(make_layer):
    """With bitsandbytes' own function, as in evaluation mode on a CPU with AVX512-BF16."""
    functional = bitsandbytes.functional
    if not hasattr(functional, "_convert_weight_packed_for_cpu"):
        pytest.skip("this bitsandbytes does not repack")
    layer = make_layer(64, 96, torch.bfloat16, device="cpu")
    packed = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    layer.weight.data, layer.weight.quant_state = packed
    with pytest.raises(UnsupportedState, match="repacked this layer for its CPU matmul"):
        launch_general.dequantize_weight(layer.weight, layer.weight.quant_state)


# Decided at import
def test_a_triton_never_tested(kernel_module, layer, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    module = kernel_module("newest")
    assert not module.CAN_RELAUNCH
    monkeypatch.undo()
    assert right(module.your_dequantize_nf4(layer), layer)


@pytest.mark.parametrize("value", ["1", "true", "0"])
def test_the_interpreter_switched_on_or_off(kernel_module, monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    module = kernel_module(f"interpreted_{value}")
    assert module.INTERPRETED == (type(module._scale).__name__ == "InterpretedFunction")
    if not module.INTERPRETED:
        with pytest.raises(module.UnsupportedState, match="expected a Linear4bit on a GPU"):
            module._your_dequantize_nf4(*random_state((64, 64), torch.float16, device="cpu"))
