"""read_checkpoint: a weight from the tensors of a saved checkpoint, as bitsandbytes wrote them."""

import json

import pytest
import torch

import processes
from nf4_triton import UnsupportedState, dequantize, read_checkpoint
from nf4_triton.core.reference import same_bits
from states import oracle

functional = pytest.importorskip("bitsandbytes.functional")
NAME = "model.layers.0.mlp.up_proj.weight"
CASES = {
    "nf4": {},
    "fp4": {"quant_type": "fp4"},
    "flat": {"compress_statistics": False},
    "float32": {"dtype": torch.float32},
    "inside a block": {"shape": (33, 70), "blocksize": 128},
    "quant_storage": {"quant_storage": torch.bfloat16},
}


def saved(shape=(64, 64), dtype=torch.bfloat16, **how):
    """Return a weight's tensors as a checkpoint has them, and what they must give."""
    torch.manual_seed(0)
    how = {"quant_type": "nf4", "compress_statistics": True} | how
    weight, state = functional.quantize_4bit(torch.randn(shape, dtype=dtype), **how)
    parts = state.as_dict(packed=True)
    tensors = {f"{NAME}.{key}": tensor for key, tensor in parts.items()}
    return {NAME: weight, **tensors}, oracle(weight, state)


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_what_bitsandbytes_saves(how):
    tensors, expected = saved(**how)
    packed, state = read_checkpoint(tensors, NAME)
    assert state.shape == expected.shape and state.dtype == expected.dtype
    assert same_bits(dequantize(packed, state), expected)


def test_the_state_dict_of_experts():
    """As replace_parameter_4bit quantizes them. Of layers: test_export.py."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model = torch.nn.Module()
    model.down_proj = torch.nn.Parameter(torch.randn(3, 64, 32))
    parametrize.replace_parameter_4bit(model, "down_proj", quant_type="fp4")
    read = read_checkpoint(model.state_dict(), "down_proj")
    assert same_bits(dequantize(*read), dequantize((model, "down_proj")))


def test_what_is_missing_is_named():
    tensors, _ = saved()
    for key in tensors.keys() - {f"{NAME}.quant_map"}:  # bitsandbytes does not read it either
        rest = {other: tensor for other, tensor in tensors.items() if other != key}
        with pytest.raises(UnsupportedState, match=f"^{NAME} cannot be read .*'{key}'.*all shards"):
            read_checkpoint(rest, NAME)
    with pytest.raises(UnsupportedState, match="pass the full name"):
        read_checkpoint(tensors, NAME.removesuffix(".weight"))


STATE = f"{NAME}.quant_state.bitsandbytes__"


def with_facts(tensors, **changed):
    """Return the tensors with other values in the state of a weight."""
    facts = json.loads(bytes(tensors[f"{STATE}nf4"].tolist())) | changed
    return tensors | {f"{STATE}nf4": torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)}


def changed(tensors, part, change):
    """Return the tensors with another part of a weight's state."""
    return tensors | {f"{NAME}.{part}": change(tensors[f"{NAME}.{part}"])}


def twice(x):
    return torch.cat([x, x])


DAMAGED = {
    "JSONDecodeError": lambda x: x | {f"{STATE}nf4": x[f"{STATE}nf4"][:-9]},
    "200,000 bytes, expected about 200": lambda x: x | {f"{STATE}nf4": torch.full((200_000,), 32)},
    r"AttributeError.*\\x1b\[2J": lambda x: with_facts(x, dtype="\x1b[2J"),
    "range\\(0, 256\\)": lambda x: x | {f"{STATE}nf4": torch.tensor(10**18)},  # not so many bytes
    "2 states": lambda x: x | {f"{STATE}fp4": x[f"{STATE}nf4"]},
    "quant_map.*nf4": lambda x: changed(x, "quant_map", lambda x: x + 0.02),
    "not finite": lambda x: x | {f"{NAME}.nested_quant_map": torch.full((256,), torch.nan)},
    "128 scales, expected 64": lambda x: changed(x, "absmax", twice),
    "2 scales, expected 1": lambda x: changed(x, "nested_absmax", twice),
    "fewer than 2": lambda x: with_facts(x, shape=[2**62, 2**62]),
    "dtype is <module": lambda x: with_facts(x, dtype="nn"),
    "0 states.*load_file": lambda x: "model.safetensors",
    "state2.blocksize is 1237": lambda x: with_facts(x, nested_blocksize=2**90),
}


def test_swapped_arguments():
    with pytest.raises(UnsupportedState, match="^name is a dict, expected a text: pass tensors, then name$"):
        read_checkpoint(NAME, saved()[0])


@pytest.mark.parametrize("text", DAMAGED)
def test_what_is_damaged_is_named(text):
    with pytest.raises(UnsupportedState, match=f"^{NAME}( cannot be read|:) .*{text}"):
        read_checkpoint(DAMAGED[text](saved()[0]), NAME)


def test_an_offset_that_is_a_text_is_read_as_bitsandbytes_does(tmp_path):
    """From an open file, too, and with a table in 16 bits."""
    tensors, _ = saved()
    tensors = changed(with_facts(tensors, nested_offset="0.5"), "quant_map", torch.Tensor.bfloat16)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        _, state = read_checkpoint(file, NAME)
    assert state.offset == 0.5


def test_without_bitsandbytes_and_triton(tmp_path):
    torch.save(saved(), tmp_path / "saved.pt")
    code = f"""
import sys
sys.modules["bitsandbytes"] = sys.modules["triton"] = None
import torch
from nf4_triton import dequantize, read_checkpoint
tensors, expected = torch.load("saved.pt")
weight = read_checkpoint(tensors, {NAME!r})
print(torch.equal(dequantize(*weight), expected), torch.equal(dequantize(*weight, rows=[1]), expected[[1]]))
"""
    said = processes.python(["-c", code], variables={"TRITON_INTERPRET": None}, folder=tmp_path)
    assert said.out == "True True\n"
