"""Bad input is refused with a clear text, whether or not a launch is cached; odd but valid input is exact."""

import pytest
import torch
import triton

from nf4_triton import launch
from states import freed, random_state, replace, right, strided

bitsandbytes = pytest.importorskip("bitsandbytes")
# The tensors of a state, and the elements that they need for 64 x 512 weights.
NEEDED = {"absmax": 512, "state2.absmax": 2, "state2.code": 256, "offset": 1}
FIELDS = ["nested", "state2", "shape", "dtype", "blocksize", "quant_type"]
FIELDS += ["state2.blocksize", "state2.dtype", *NEEDED]


@pytest.fixture
def layer(make_layer):
    return make_layer(64, 512, torch.float16)


def word(name):
    """Return what errors call a tensor of the state."""
    return {"state2.absmax": "absmax2", "state2.code": "code2"}.get(name, name)


def bad_tensors():
    """Yield (field, what is wrong, the change, a pattern of the error)."""
    for name, needed in NEEDED.items():
        yield name, "a float", lambda x: 0.5, f"{word(name)} is float, expected a tensor"
        yield name, "None", lambda x: None, f"{word(name)} is NoneType"
        short = f"{word(name)} has {needed - 1} elements of .* expected {needed} or more"
        yield name, "too short", lambda x: x.reshape(-1)[:-1], short
        yield name, "in int32", lambda x: x.int(), f"{word(name)} has .* torch.int32, expected"
        yield name, "on meta", lambda x: x.to("meta"), f"{word(name)} is on meta, expected .*layer.to"
    for name in ("weight", "absmax", "state2.absmax", "state2.code"):
        yield name, "strided", strided, f"{word(name)} is not contiguous.*use {word(name)}.contiguous"
    for name in ("state2.absmax", "state2.code", "offset"):
        yield name, "negated", torch._neg_view, f"{word(name)} is a negated view"
    for name in ("weight", *NEEDED):
        yield name, "freed", freed, f"{word(name)} has no memory.*gather it first if FSDP"
    two = "offset has shape .2,. and .*one value"
    yield "offset", "of two", lambda x: torch.stack([x, x]), two
    yield "offset", "(1,) in fp64", lambda x: x.double().view(1), "offset has shape .1,. .*float64"
    yield "absmax", "in fp32", lambda x: x.float(), "absmax has 512 .* torch.float32, expected"


def bad_weights():
    yield "weight", "too short", lambda x: x[:-1], "weight holds 16383 bytes, expected 16384"
    yield "weight", "partitioned", lambda x: x[:0], "holds 0 bytes.*if FSDP or DeepSpeed ZeRO-3"
    yield "weight", "expanded", lambda x: x[:1].expand(x.shape), "weight is not contiguous"
    yield "weight", "of no dimension", lambda x: x[0, 0], r"weight is .* of shape \(\).*packed"
    for dtype in (torch.int64, torch.bool, torch.complex64):
        yield "weight", str(dtype), lambda x, d=dtype: x.to(d), f"weight is {dtype} .*packed"
    plain = "weight is torch.bfloat16 .*512, 64.*packed 4-bit"
    yield "weight", "not packed", lambda x: x.new_ones(512, 64, dtype=torch.bfloat16), plain


BAD_VALUES = {
    "quant_type": (["int8", "af4", ["nf4"], None], "expected 'nf4' or 'fp4'"),
    "blocksize": ([96, 0, -64, 64.5, "64", [64], None], "expected a power of two"),
    "state2.blocksize": ([96, 0, -64, 64.5, "64", None], "expected a power of two"),
    "dtype": ([torch.float64, torch.float8_e4m3fn, "float16", [torch.float16]], "expected one of"),
    "state2.dtype": ([torch.float16, None], "state2.dtype is .* expected torch.float32"),
    "shape": (["64x512", 512, (-64, -512), (64.0, 512.0), (None, 4), None], "quant_state"),
}


def bad_values():
    for name, (values, text) in BAD_VALUES.items():
        for value in values:
            yield name, repr(value), lambda x, value=value: value, text
    too_large = "weight holds 16384 bytes, expected 16416"
    yield "shape", "too large", lambda x: torch.Size([513, 64]), too_large
    yield "shape", "of 2**34", lambda x: torch.Size([2**17, 2**17]), "fewer than 2.*34"
    yield "state2", "None", lambda x: None, "quant_state is incomplete"
    yield "nested", "False", lambda x: False, "absmax has .*torch.uint8, expected .*torch.float32"


CASES = [*bad_tensors(), *bad_weights(), *bad_values()]


def ordinary(weight, state):
    return launch.launch_ordinary(launch.read_state(weight, state))


def refused(weight, state, pattern):
    for call in (launch._your_dequantize_nf4, ordinary):
        with pytest.raises(launch.UnsupportedState, match=pattern) as caught:
            call(weight, state)
        assert "expected" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name, what, change, pattern", CASES)
def test_broken(watched, make_layer, layer, name, what, change, pattern):
    if "freed" not in what or name == "weight":  # a replay looks for the weight's memory only
        watched.warm(make_layer(64, 512, torch.float16, seed=1))
    replace(layer, name, change)
    refused(layer.weight, layer.weight.quant_state, pattern)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field(watched, make_layer, layer, name):
    watched.warm(make_layer(64, 512, torch.float16, seed=1))
    state, field = layer.weight.quant_state, name.removeprefix("state2.")
    delattr(state if field == name else state.state2, field)
    refused(layer.weight, state, f"quant_state is incomplete .*'{field}'")


def test_without_the_scale_of_the_last_group(layer):
    """512 blocks are half a group of 1024, which needs its scale, too."""
    replace(layer, "state2.blocksize", lambda x: 1024)
    replace(layer, "state2.absmax", lambda x: x[:0])
    refused(layer.weight, layer.weight.quant_state, "absmax2 has 0 elements .*expected 1 or more")


def test_without_the_scale_of_the_last_block(layer):
    """511 columns end in the middle of the last block, which needs its scale, too."""
    replace(layer, "shape", lambda x: torch.Size([511 * 64 + 1]))
    replace(layer, "absmax", lambda x: x[:511])
    refused(layer.weight, layer.weight.quant_state, "absmax has 511 elements .*expected 512")


@pytest.mark.parametrize(
    "given",
    [
        None,
        torch.nn.Linear(64, 64),
        bitsandbytes.nn.Linear4bit(64, 64, bias=False),  # on no device yet
    ],
    ids=["None", "a Linear", "not quantized"],
)
def test_not_a_quantized_layer(given):
    with pytest.raises(launch.UnsupportedState, match="no quant_state.*quantize.*8-bit layers have none"):
        launch.your_dequantize_nf4(given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", *NEEDED])
def test_a_tensor_on_the_cpu(watched, layer, name):
    watched.warm(layer)
    replace(layer, name, lambda x: x.cpu())
    refused(layer.weight, layer.weight.quant_state, f"{word(name)} is on cpu.*move")


# What an import decides
@pytest.mark.parametrize("version", ["2.3.1", "3.3.1"])
def test_a_triton_too_old(changed_kernel, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(ImportError, match=rf"{version}.*3\.4 or newer.*update torch"):
        changed_kernel("old")


def test_a_triton_never_tested(changed_kernel, layer, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    module = changed_kernel("newest")
    assert not module.CAN_REPLAY
    monkeypatch.undo()
    assert right(module.your_dequantize_nf4(layer), layer)


@pytest.mark.parametrize("value", ["1", "true", "0"])
def test_the_interpreter_switched_on_or_off(changed_kernel, monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    module = changed_kernel(f"interpreted_{value}")
    assert module.INTERPRETED == (type(module._scale).__name__ == "InterpretedFunction")
    if not module.INTERPRETED:
        with pytest.raises(module.UnsupportedState, match="on cpu, expected CUDA.*TRITON_INTERPRET=1"):
            module._your_dequantize_nf4(*random_state((64, 64), torch.float16, device="cpu"))
