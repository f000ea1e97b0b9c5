"""Bad input is refused with a clear text, whether or not a launch is cached; odd but valid input is exact."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
import triton

from helpers import machine
from helpers.nf4 import launch, reference
from helpers.nf4.reference import same_bits
from states import DTYPES

bitsandbytes = pytest.importorskip("bitsandbytes")


def owner(layer, name):
    """Return what holds the tensor or field of this name, and its name there."""
    *parents, field = name.split(".")
    where = layer if name == "weight" else layer.weight.quant_state
    for parent in parents:
        where = getattr(where, parent)
    return where, field


def is_now(name, change):
    def apply(layer):
        where, field = owner(layer, name)
        if name == "weight":  # a plain tensor would be no parameter
            layer.weight.data = change(layer.weight.data)
        else:
            setattr(where, field, change(getattr(where, field)))

    return apply


def value(name, new):
    return is_now(name, lambda _: new)


def without(name):
    return lambda layer: delattr(*owner(layer, name))


def all_zero(layer):
    """As DeepSpeed ZeRO-3 leaves a partitioned parameter."""
    layer.weight.data, layer.weight.ds_id = layer.weight.data[:0].view(-1), 3


def last_group_missing(layer):
    """512 blocks are one group of 1024, and a part of a group needs its scale, too."""
    value("state2.blocksize", 1024)(layer)
    is_now("state2.absmax", lambda t: t[:0])(layer)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def freed_view(x):
    memory = torch.cat([x.view(-1), x.view(-1)])
    view = memory[x.numel() :].view(x.shape)
    memory.untyped_storage().resize_(0)
    return view


SECOND = ("absmax", "state2.absmax", "state2.code", "offset")
NEEDED = dict(zip(SECOND, (512, 2, 256, 1), strict=True))
FIELDS = (*SECOND, "nested", "state2", "shape", "dtype", "blocksize", "quant_type")
FIELDS += ("state2.blocksize", "state2.dtype")
# name: (how it is broken, texts that the error must contain)
BROKEN = {
    **{f"{x} missing": (without(x), [x.replace("nested", "quant_state.nested")]) for x in FIELDS},
    **{f"{x} a float": (value(x, 0.5), [f"{x} is float", "expected a tensor"]) for x in SECOND},
    **{f"{x} None": (value(x, None), [f"{x} is NoneType", "incomplete"]) for x in SECOND},
    **{
        f"{x} too short": (
            is_now(x, lambda t: t.reshape(-1)[:-1]),
            [f"{x} has {NEEDED[x] - 1} elements", f"expected {NEEDED[x]} or more"],
        )
        for x in SECOND
    },
    **{
        f"{x} in {dtype}": (is_now(x, lambda t, d=dtype: t.to(d)), [f"{x} has", str(dtype), "expected"])
        for x, dtype in [("absmax", torch.float32), *((x, torch.int32) for x in SECOND)]
    },
    **{
        f"{x} on meta": (is_now(x, lambda t: t.to("meta")), [f"{x} is on meta", "layer.to(device)"])
        for x in SECOND
    },
    **{
        f"{x} strided": (
            is_now(x, strided),
            [f"{x} is not contiguous", f"use {x}.resolve_neg().contiguous()"],
        )
        for x in ("weight", *SECOND[:3])
    },
    **{f"{x} negated": (is_now(x, torch._neg_view), [f"{x} is", "negated view"]) for x in SECOND[1:]},
    **{
        f"{x} {how.__name__}": (is_now(x, how), [f"{x} has no memory", "gather it first if FSDP freed it"])
        for x in ("weight", *SECOND)
        for how in (freed, freed_view)
    },
    "offset of two": (
        is_now("offset", lambda t: torch.stack([t, t])),
        ["offset has shape (2,)", "one value"],
    ),
    "offset (1,) fp64": (
        is_now("offset", lambda t: t.double().view(1)),
        ["offset has shape (1,)", "float64"],
    ),
    "weight too short": (is_now("weight", lambda t: t[:-1]), ["16383 bytes", "expected 16384"]),
    "weight of no dimension": (is_now("weight", lambda t: t[0, 0]), ["shape ()", "packed 4-bit codes"]),
    "group too short": (last_group_missing, ["state2.absmax has 0 elements", "expected 1 or more"]),
    "weight of ZeRO-3": (all_zero, ["partitioned", "gather it first", "GatheredParameters"]),
    **{
        f"weight in {dtype}": (
            is_now("weight", lambda t, d=dtype: t.to(d)),
            ["weight is", str(dtype), "packed"],
        )
        for dtype in (torch.int64, torch.bool, torch.complex64)
    },
    **{
        f"weight not quantized, {dtype}": (
            is_now("weight", lambda t, d=dtype: torch.ones(512, 64, dtype=d, device=t.device)),
            ["weight is", "(512, 64)", "packed 4-bit codes"],
        )
        for dtype in DTYPES
    },
    **{f"quant_type {x}": (value("quant_type", x), [repr(x), "'nf4' or 'fp4'"]) for x in ("int8", "af4")},
    **{
        f"{name} {x!r}": (value(name, x), [name, repr(x), "power of two"])
        for name in ("blocksize", "state2.blocksize")
        for x in (96, 0, -64, 64.5, "64")
    },
    **{
        f"output {x}": (value("dtype", x), [f"quant_state.dtype is {x}", "torch.bfloat16"])
        for x in (torch.float64, torch.uint8, torch.float8_e4m3fn)
    },
    "state2.dtype fp16": (value("state2.dtype", torch.float16), ["state2.dtype is torch.float16"]),
    "no second level": (value("state2", None), ["nested is True and state2 NoneType"]),
    "codes for flat scales": (value("nested", False), ["absmax has", "torch.uint8", "torch.float32"]),
    "shape too large": (value("shape", torch.Size([513, 64])), ["16384 bytes", "expected 16416"]),
    "2**34 elements": (value("shape", torch.Size([2**17, 2**17])), ["fewer than 2**34"]),
    "2**31 blocks": (
        lambda x: x.weight.quant_state.__dict__.update(blocksize=4, shape=torch.Size([2**16, 2**17])),
        ["8589934592 elements in blocks of 4", "2**31 blocks"],
    ),
    "repacked": (lambda x: setattr(x.weight.quant_state, "packing_format_for_cpu", True), ["repacked"]),
}
ADVICE = re.compile(r"quantize|reload|move|layer\.to|set it|pass |use |dequantize it in parts|gather it")


@pytest.mark.parametrize("name", BROKEN)
def test_broken(watched, make_layer, name):
    """64 x 512 in fp16: 512 blocks of scales, 2 of the second level."""
    layer = make_layer(64, 512, torch.float16)
    how, texts = BROKEN[name]
    cached = name not in ("repacked", "2**31 blocks") and not (  # the address of one that is not a parameter
        name.endswith(("freed", "freed_view")) and "weight" not in name
    )
    if cached:
        watched.warm(make_layer(64, 512, torch.float16, seed=1))
    how(layer)
    for call in (launch._your_dequantize_nf4, launch.plain_dequantize_nf4):
        with pytest.raises(launch.UnsupportedState) as caught:
            call(layer.weight, layer.weight.quant_state)
        text = str(caught.value)
        assert all(part in text for part in (*texts, "expected")) and ADVICE.search(text), text
        assert "\n" not in text and isinstance(caught.value, ValueError)


def not_quantized(device):
    return bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")


def int8(device):
    return bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to(device)


NOT_LAYERS = {
    "None": (lambda device: None, "weight is NoneType, expected packed 4-bit codes: pass a Linear4bit"),
    "a text": (lambda device: "layer", "weight is NoneType, expected packed"),
    "an empty layer": (lambda device: torch.nn.ReLU(), "weight is NoneType, expected packed"),
    "a weight of None": (lambda device: SimpleNamespace(weight=None), "weight is NoneType"),
    "a Linear": (lambda device: torch.nn.Linear(64, 64, device=device), "no quant_state.*plain and 8-bit"),
    "on no device yet": (not_quantized, "no quant_state.*move the Linear4bit to the GPU"),
    "8-bit": (int8, "no quant_state.*plain and 8-bit layers have none"),
}


@pytest.mark.parametrize("name", NOT_LAYERS)
def test_not_a_quantized_layer(device, name):
    make, text = NOT_LAYERS[name]
    with pytest.raises(launch.UnsupportedState, match=text):
        launch.your_dequantize_nf4(make(device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", *SECOND])
def test_a_tensor_on_the_cpu(watched, make_layer, name):
    layer = make_layer(64, 512, torch.float16)
    watched.warm(layer)
    is_now(name, lambda x: x.cpu())(layer)
    with pytest.raises(launch.UnsupportedState, match=rf"{name} is on cpu.*move"):
        launch.your_dequantize_nf4(layer)


def longer(x):
    return torch.cat([x, torch.full_like(x, 200)])


@pytest.mark.parametrize("name", ["weight", *SECOND[:3]])
def test_longer_tensors(watched, make_layer, name):
    """FSDP pads: what is beyond the shape is not read."""
    layer = make_layer(64, 512, torch.float16)
    expected = reference.dequantize(layer.weight, layer.weight.quant_state)
    is_now(name, longer)(layer)
    for _ in range(2):
        assert same_bits(launch.your_dequantize_nf4(layer), expected)


def test_the_text_on_blocksizes_is_true_of_bitsandbytes(make_layer):
    layer = make_layer(64, 512, torch.float16)
    layer.weight.quant_state.blocksize = 96
    with pytest.raises(launch.UnsupportedState) as caught:
        launch.your_dequantize_nf4(layer)
    least, most = map(int, re.search(r"makes (\d+) to (\d+)", str(caught.value)).groups())
    values, made = torch.ones(8192, device=layer.weight.device), []
    for blocksize in (2**k for k in range(3, 14)):
        try:
            bitsandbytes.functional.quantize_4bit(values, blocksize=blocksize, quant_type="nf4")
            made.append(blocksize)
        except (ValueError, RuntimeError, AssertionError):
            pass
    assert (made[0], made[-1]) == (least, most)


# In a process of its own: changed variables (None unsets one), and what runs there. Torch is imported once.
CPU = """
from helpers.nf4 import launch
import sys; sys.path.append("tests/nf4")
import states
try: launch._your_dequantize_nf4(*states.random_state((64, 64), torch.float16, device="cpu"))
except launch.UnsupportedState as error: print("refused:", error)
"""
VERSION = "import triton; triton.__version__ = {!r}; from helpers.nf4 import kernel, launch"
VERSION += "; print(kernel.CHECKED, launch.DIRECT, kernel.settings().asm)"
INTERPRETER = "from helpers.nf4 import kernel as k; print(k.INTERPRETED, type(k._scale).__name__)"
ON = "True InterpretedFunction"
OTHERWISE = ON if hasattr(triton, "knobs") else "False JITFunction"  # Triton 3.3 takes only "1"
ALONE = {
    "no CUDA": (
        {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""},
        CPU,
        "refused: .*on cpu.*TRITON_INTERPRET=1",
    ),
    **{
        v: ({}, VERSION.format(v), rf"ImportError.*{v}.*3\.3.*pip install")
        for v in ("2.3.1", "3.1.0", "3.2.0")
    },
    "3.99.0": ({}, VERSION.format("3.99.0"), "False False False"),
    "TRITON_INTERPRET=1": ({"TRITON_INTERPRET": "1"}, INTERPRETER, ON),
    "TRITON_INTERPRET=true": ({"TRITON_INTERPRET": "true"}, INTERPRETER, OTHERWISE),
}
FORKED = """
import contextlib, io, json, os, sys, traceback
import torch

assert "triton" not in sys.modules, "each case must import Triton itself"
said = {}
for name, (variables, code, _) in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    if not os.fork():
        for variable, value in variables.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
        with open(writer, "w") as pipe, contextlib.redirect_stdout(pipe):
            try:
                exec(code, {"torch": torch})
            except BaseException:
                traceback.print_exc(file=pipe)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said[name] = pipe.read()
    os.wait()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    return json.loads(machine.python(["-c", FORKED], stdin=json.dumps(ALONE)).out)


@pytest.mark.parametrize("name", ALONE)
def test_what_the_import_decides(said, name):
    """Without CUDA, with a Triton too old or never checked, with the interpreter switched on either way."""
    assert re.search(ALONE[name][2], said[name].strip().splitlines()[-1]), said[name]
