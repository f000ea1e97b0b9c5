"""Bad input: each case gives a clear error or the exact result; nothing is silently wrong.

A clear error is an UnsupportedState that says what was wrong, what was expected, and what to do.
"""

import copy
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
import triton

from helpers import machine
from helpers.nf4 import kernel as nf4_kernel
from helpers.nf4 import reference
from helpers.puzzle import protocol

pytest.importorskip("bitsandbytes")


@pytest.fixture(params=["the first of its kind", "like one before"])
def layer(request, make_layer, planned):
    """64 x 512 in fp16: 512 blocks, two blocks of scales."""
    if request.param == "like one before":
        planned.kernel.your_dequantize_nf4(make_layer(64, 512, torch.float16, seed=1))
    return make_layer(64, 512, torch.float16)


ADVICE = re.compile(r"quantize|reload|move|layer\.to|set it|pass |use |dequantizations of their own")


def clear(text, *words):
    """What was wrong and expected (`words`), and what to do."""
    assert all(word in text for word in (*words, "expected")), text
    assert ADVICE.search(text), text


def refused(kernel, weight, state, *words, out=None):
    """Both entry points refuse, with a clear text."""
    for call in (
        lambda: kernel._your_dequantize_nf4(weight, state, out=out),
        lambda: kernel.your_fast_dequantize(weight, state, out=out),
    ):
        with pytest.raises(kernel.UnsupportedState) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        if out is None:
            clear(str(caught.value), *words)
        else:
            assert all(word in str(caught.value) for word in words), caught.value


def test_plain_linear(kernel, device):
    with pytest.raises(kernel.UnsupportedState, match="no quant_state.*expected.*plain Linear"):
        kernel.your_dequantize_nf4(torch.nn.Linear(64, 64, device=device))


def test_not_yet_quantized(kernel):
    """A Linear4bit quantizes when it first moves to a device."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
    with pytest.raises(kernel.UnsupportedState, match=r"no quant_state.*expected.*layer\.to"):
        kernel.your_dequantize_nf4(layer)


def test_not_a_layer(kernel):
    for thing in (None, "layer", SimpleNamespace(), SimpleNamespace(weight=None), torch.nn.ReLU()):
        with pytest.raises(kernel.UnsupportedState, match="expected the packed 4-bit tensor: pass"):
            kernel.your_dequantize_nf4(thing)


def test_int8_layer_is_named(kernel, device):
    """bitsandbytes' 8-bit layers have a quantized weight and no quant_state."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to(device)
    with pytest.raises(kernel.UnsupportedState, match="(?i)int8|8-bit"):
        kernel.your_dequantize_nf4(layer)


@pytest.mark.gpu
def test_a_layer_left_on_the_cpu(kernel, make_layer):
    with pytest.raises(kernel.UnsupportedState, match=r"on cpu.*layer\.to\('cuda'\)"):
        kernel.your_dequantize_nf4(make_layer(64, 64, torch.float16, device="cpu"))


@pytest.mark.parametrize("quant_type", ["int8", "af4", None])
def test_other_quant_types_are_named(kernel, layer, quant_type):
    layer.weight.quant_state.quant_type = quant_type
    refused(kernel, layer.weight, layer.weight.quant_state, repr(quant_type), "'nf4' or 'fp4'")


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_fp4_is_supported(kernel, make_layer, dtype):
    layer = make_layer(64, 96, dtype, quant_type="fp4")
    result = kernel.your_dequantize_nf4(layer)
    assert reference.same_bits(result, reference.dequantize(layer.weight, layer.weight.quant_state))
    assert reference.same_bits(result + 0.0, protocol.expected(layer) + 0.0)


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_flat_is_supported(kernel, make_layer, dtype):
    layer = make_layer(64, 96, dtype, nested=False)
    assert layer.weight.quant_state.state2 is None
    assert reference.same_bits(kernel.your_dequantize_nf4(layer), protocol.expected(layer))


@pytest.mark.parametrize("blocksize", [96, 0, -64, 64.0, "64", None])
def test_blocksize_that_is_no_power_of_two(kernel, layer, blocksize):
    layer.weight.quant_state.blocksize = blocksize
    refused(kernel, layer.weight, layer.weight.quant_state, "blocksize", repr(blocksize), "power of two")


@pytest.mark.parametrize("blocksize", [100, 0, None])
def test_second_blocksize_that_is_no_power_of_two(kernel, layer, blocksize):
    layer.weight.quant_state.state2.blocksize = blocksize
    refused(
        kernel, layer.weight, layer.weight.quant_state, "state2.blocksize", repr(blocksize), "power of two"
    )


@pytest.mark.parametrize("blocksize, blocksize2", [(32, 256), (128, 64), (2048, 512), (4096, 1)])
def test_other_powers_of_two_are_supported(kernel, make_layer, blocksize, blocksize2):
    layer = make_layer(64, 512, torch.bfloat16, blocksize=blocksize)
    state = layer.weight.quant_state
    state.state2.blocksize = blocksize2
    state.state2.absmax = torch.rand(state.absmax.numel(), device=layer.weight.device)
    expected = reference.dequantize(layer.weight, state)
    assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


def test_weight_too_short(kernel, layer):
    refused(kernel, layer.weight.data[:-1], layer.weight.quant_state, "16383 bytes", "expected 16384")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_weight_of_a_dtype_that_holds_no_codes(kernel, layer, dtype):
    refused(
        kernel, layer.weight.data.to(dtype), layer.weight.quant_state, "weight", str(dtype), "torch.uint8"
    )


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_weight_that_is_not_quantized(kernel, layer, dtype):
    """The dequantized weight with its old state: decoding its bytes would be silently wrong."""
    weight = torch.randn(512, 64, dtype=dtype, device=layer.weight.device)
    refused(kernel, weight, layer.weight.quant_state, "weight", "(512, 64)", str(dtype), "packed")


def test_shape_too_large(kernel, layer):
    layer.weight.quant_state.shape = torch.Size([513, 64])
    refused(kernel, layer.weight, layer.weight.quant_state, "16384 bytes", "expected 16416")


TENSORS = ["absmax", "state2.absmax", "state2.code", "offset"]
NEEDED = {"absmax": 512, "state2.absmax": 2, "state2.code": 256, "offset": 1}


def replace(state, name, change):
    """Set a possibly nested attribute to `change` of its value."""
    owner = state.state2 if name.startswith("state2") else state
    attribute = name.removeprefix("state2.")
    setattr(owner, attribute, change(getattr(owner, attribute)))


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_too_short(kernel, layer, name):
    replace(layer.weight.quant_state, name, lambda x: x.reshape(-1)[:-1])
    least = NEEDED[name]
    refused(kernel, layer.weight, layer.weight.quant_state, name, str(least - 1), f"expected {least}")


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_tensor_of_the_wrong_dtype(kernel, layer, name, dtype):
    if name == "offset":
        dtype = torch.int32  # of any floating dtype it is decoded
    replace(layer.weight.quant_state, name, lambda x: x.to(dtype))
    wanted = "torch.uint8" if name == "absmax" else "torch.float32"
    refused(kernel, layer.weight, layer.weight.quant_state, name, str(dtype), f"expected {wanted}")


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("missing", [None, 0.5, [1.0]])
def test_tensor_missing(kernel, layer, name, missing):
    replace(layer.weight.quant_state, name, lambda x: missing)
    refused(kernel, layer.weight, layer.weight.quant_state, name, type(missing).__name__, "incomplete")


FIELDS = ["absmax", "shape", "dtype", "blocksize", "quant_type", "offset", "state2"]
FIELDS += ["nested"]
FIELDS += ["state2.absmax", "state2.code", "state2.blocksize", "state2.dtype"]


@pytest.mark.parametrize("name", FIELDS)
def test_field_missing(kernel, layer, name):
    """The attribute itself is gone, as in a state put together by hand."""
    state = layer.weight.quant_state
    delattr(state.state2 if name.startswith("state2.") else state, name.removeprefix("state2."))
    refused(kernel, layer.weight, state, name)


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_on_another_device(kernel, layer, name):
    """The meta device stands in for a second one on machines with a single device."""
    replace(layer.weight.quant_state, name, lambda x: x.to("meta"))
    refused(kernel, layer.weight, layer.weight.quant_state, name, "meta", f"expected {layer.weight.device}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS)
def test_tensor_left_on_the_cpu(kernel, layer, name):
    replace(layer.weight.quant_state, name, lambda x: x.cpu())
    refused(kernel, layer.weight, layer.weight.quant_state, name, "cpu", "expected cuda:0")


@pytest.mark.parametrize("name", ["absmax", "state2.absmax", "state2.code"])
def test_tensor_not_contiguous(kernel, layer, name):
    replace(layer.weight.quant_state, name, lambda x: torch.stack([x, x], dim=-1)[..., 0])
    refused(kernel, layer.weight, layer.weight.quant_state, name, "contiguous")


def test_weight_not_contiguous(kernel, layer):
    packed = layer.weight.data
    apart = torch.cat([packed, packed], dim=1)[:, :1]
    refused(kernel, apart, layer.weight.quant_state, "weight", "contiguous")


def test_flat_state_with_codes_for_scales(kernel, layer):
    """A nested state that lost its second level: uint8 codes must not be taken for scales."""
    state = layer.weight.quant_state
    state.state2, state.nested = None, False
    refused(kernel, layer.weight, state, "absmax", "torch.uint8", "torch.float32")


def test_nested_without_second_level(kernel, layer):
    layer.weight.quant_state.state2 = None
    refused(kernel, layer.weight, layer.weight.quant_state, "state2 None")


def test_second_level_of_another_dtype(kernel, layer):
    """bitsandbytes would round the scales to it."""
    layer.weight.quant_state.state2.dtype = torch.float16
    refused(kernel, layer.weight, layer.weight.quant_state, "state2.dtype", "torch.float16", "torch.float32")


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.float8_e4m3fn, None])
def test_output_dtype(kernel, layer, dtype):
    layer.weight.quant_state.dtype = dtype
    refused(kernel, layer.weight, layer.weight.quant_state, str(dtype), "torch.bfloat16")


def test_shape_missing(kernel, layer):
    layer.weight.quant_state.shape = None
    refused(kernel, layer.weight, layer.weight.quant_state, "shape is None")


def test_weight_without_dimensions(kernel, make_layer):
    layer = make_layer(2, 1, torch.float16)
    refused(kernel, layer.weight.data[0, 0], layer.weight.quant_state, "no dimension", "(n / 2, 1)")


def test_more_blocks_than_the_kernel_counts(kernel, layer):
    layer.weight.quant_state.blocksize, layer.weight.quant_state.shape = 4, torch.Size([1 << 16, 1 << 17])
    refused(kernel, layer.weight, layer.weight.quant_state, f"{1 << 31} blocks", "2**31")


def test_repacked_for_the_cpu(kernel, layer):
    """bitsandbytes' evaluation mode on AVX512-BF16 changes the layout in place."""
    layer.weight.quant_state.packing_format_for_cpu = True
    refused(kernel, layer.weight, layer.weight.quant_state, "repacked")


OUTS = {
    "shape": lambda good: good.new_empty(64, 512),
    "flat": lambda good: good.view(-1),
    "dtype": lambda good: good.to(torch.bfloat16),
    "device": lambda good: good.to("meta"),
    "not contiguous": lambda good: good.new_empty(64, 512).t(),
    "not a tensor": lambda good: good.tolist(),
}


@pytest.mark.parametrize("name", OUTS)
def test_out(kernel, layer, name):
    state = layer.weight.quant_state
    good = torch.zeros(state.shape, dtype=state.dtype, device=layer.weight.device)
    bad = OUTS[name](good)
    refused(kernel, layer.weight, state, "out ", "expected", out=bad)
    if isinstance(bad, torch.Tensor) and bad.device == good.device and name in ("flat", "dtype"):
        assert not bad.any(), "nothing was written"


def test_more_elements_than_the_kernel_counts_are_refused(kernel, make_layer):
    layer = make_layer(64, 96, torch.float16)
    layer.weight.quant_state.shape = torch.Size([2**17, 2**17])
    with pytest.raises(kernel.UnsupportedState, match="fewer than 2\\*\\*34"):
        kernel.your_dequantize_nf4(layer)


def test_a_view_of_a_freed_storage_is_refused(kernel, make_layer):
    """The shard of a flat parameter (FSDP), whose address is then its offset and not 0."""
    layer = make_layer(64, 96, torch.float16)
    packed = layer.weight.data.as_subclass(torch.Tensor)
    memory = torch.cat([torch.zeros_like(packed[:64]), packed])
    view = memory[64:]
    memory.untyped_storage().resize_(0)
    with pytest.raises(kernel.UnsupportedState, match="no memory"):
        kernel.check_state(view, layer.weight.quant_state)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)])
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_zero_elements(kernel, layer, shape, dtype):
    state = layer.weight.quant_state
    state.shape, state.dtype = torch.Size(shape), dtype
    empty = layer.weight.data[:0]
    for weight in (layer.weight, empty):
        result = kernel._your_dequantize_nf4(weight, state)
        assert result.shape == shape and result.dtype == dtype


@pytest.mark.parametrize("name", ["absmax", "state2.absmax", "state2.code"])
def test_longer_tensors_are_as_good(kernel, layer, name):
    """FSDP pads: what is beyond the shape is not read."""
    expected = protocol.expected(layer)
    replace(layer.weight.quant_state, name, lambda x: torch.cat([x, torch.full_like(x, 255)]))
    assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


def test_longer_weight(kernel, layer):
    expected = protocol.expected(layer)
    longer = torch.cat([layer.weight.data, torch.full_like(layer.weight.data, 0xEE)])
    assert reference.same_bits(kernel._your_dequantize_nf4(longer, layer.weight.quant_state), expected)


def test_a_good_state_that_went_bad_is_refused_at_once(kernel, layer):
    """A plan made for the good state must not hide any of it."""
    assert reference.same_bits(kernel.your_dequantize_nf4(layer), protocol.expected(layer))
    state = layer.weight.quant_state
    for name, bad in (
        ("offset", None),
        ("blocksize", 96),
        ("quant_type", "int8"),
        ("dtype", torch.float64),
        ("absmax", state.absmax[:-1]),
    ):
        good = getattr(state, name)
        setattr(state, name, bad)
        refused(kernel, layer.weight, state, name.removesuffix("type"))
        setattr(state, name, good)
        assert reference.same_bits(kernel.your_dequantize_nf4(layer), protocol.expected(layer))
    refused(kernel, layer.weight.data[:-1], state, "16383 bytes")
    state.state2.dtype = torch.float16
    refused(kernel, layer.weight, state, "state2.dtype")


def test_a_strided_view_at_a_known_address_is_refused(kernel, layer):
    """Same address and size as a weight seen before, other bytes."""
    state, packed = layer.weight.quant_state, layer.weight.data
    memory = torch.cat([packed, packed + 1])
    dense, strided = memory[: len(packed)], memory.view(-1, 2)[:, :1]
    assert dense.data_ptr() == strided.data_ptr() and dense.nbytes == strided.nbytes
    for _ in range(2):
        assert reference.same_bits(kernel._your_dequantize_nf4(dense, state), protocol.expected(layer))
    refused(kernel, strided, state, "weight", "contiguous")


def test_a_copied_state_is_checked_anew(kernel, layer):
    kernel.your_dequantize_nf4(layer)
    state = copy.deepcopy(layer.weight.quant_state)
    state.absmax = state.absmax[:-1]
    refused(kernel, layer.weight, state, "absmax", "expected 512")


# Cases that need a process of their own: changed variables (None unsets one), and what is run there.
CPU_LAYER = """
from helpers.nf4 import kernel
from helpers.nf4 import layers
layer = layers.quantized_layer(64, 64, torch.float16)
try: kernel.your_dequantize_nf4(layer)
except kernel.UnsupportedState as error: print("refused:", error)
"""
OF_TRITON = "import triton; triton.__version__ = {!r}; from helpers.nf4 import kernel"
OWN_WAYS = "; print(kernel.CHECKED, kernel.DIRECT, kernel.settings().asm)"
TOO_OLD = ("2.3.1", "3.1.0", "3.2.0")
SWITCHED_ON = "from helpers.nf4 import kernel as k; print(k.INTERPRETED, type(k._scale).__name__)"
ALONE = {
    "no CUDA": ({"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}, CPU_LAYER),
    **{version: ({}, OF_TRITON.format(version)) for version in TOO_OLD},
    "3.99.0": ({}, OF_TRITON.format("3.99.0") + OWN_WAYS),
    "TRITON_INTERPRET=1": ({"TRITON_INTERPRET": "1"}, SWITCHED_ON),
    "TRITON_INTERPRET=true": ({"TRITON_INTERPRET": "true"}, SWITCHED_ON),
}
# Torch is imported once; each case goes on from there, before anything has imported Triton.
FORKED = """
import contextlib, io, json, os, sys, traceback
import torch

assert "triton" not in sys.modules, "each case must import Triton itself"
said = {}
for name, (variables, code) in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        for variable, value in variables.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                exec(code, {"torch": torch})
            except BaseException:
                traceback.print_exc(file=out)
        with open(writer, "w") as pipe:
            pipe.write(out.getvalue())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said[name] = pipe.read()
    os.waitpid(child, 0)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    """What each of ALONE printed."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    return json.loads(machine.python(["-c", FORKED], stdin=json.dumps(ALONE)).out)


def test_no_cuda(said):
    """A CPU layer outside of the interpreter: the error names the device and the two ways out."""
    text = said["no CUDA"]
    assert text.startswith("refused:"), text
    assert all(word in text for word in ("on cpu", "layer.to('cuda')", "TRITON_INTERPRET=1")), text


@pytest.mark.parametrize("version", TOO_OLD)
def test_a_triton_too_old_is_refused_at_import_with_the_fix(said, version):
    last = said[version].strip().splitlines()[-1]
    assert last.startswith("ImportError"), said[version]
    assert all(word in last for word in (version, "3.3", "pip install")), last


def test_a_triton_that_nobody_checked(said):
    """The assembly and the direct launch rely on what was looked at: a newer Triton gets neither."""
    assert said["3.99.0"].split() == ["False"] * 3, said["3.99.0"]


def interpreted(value):
    """Triton 3.3 takes only "1"."""
    return value == "1" or hasattr(triton, "knobs")


@pytest.mark.parametrize("on", ["1", "true"])
def test_tritons_interpreter_is_recognised_however_it_is_switched_on(said, on):
    expected = ["True", "InterpretedFunction"] if interpreted(on) else ["False", "JITFunction"]
    text = said[f"TRITON_INTERPRET={on}"]
    assert text.split() == expected, text


def test_importing_the_kernel_twice_gives_one_module(kernel):
    assert nf4_kernel is kernel
