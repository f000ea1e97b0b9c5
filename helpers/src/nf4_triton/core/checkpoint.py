"""Read a 4-bit weight from the tensors of a saved checkpoint. Needs neither bitsandbytes nor Triton."""

import json
import re
import types
from collections.abc import Mapping
from typing import Any

import torch

from .checks import check_state
from .reference import VALUES
from .state import read_state
from .supported import UnsupportedState

STATE = ".quant_state.bitsandbytes__"  # before nf4 or fp4: JSON in bytes
# What follows a 4-bit weight's name in the names of the tensors of its state.
PART = re.compile(rf"(.+)(\.(nested_)?(absmax|quant_map)|{re.escape(STATE)}\w+)\Z", re.DOTALL)


def read_checkpoint(tensors: Mapping[str, torch.Tensor] | Any, name: str) -> tuple[torch.Tensor, Any]:
    """Return (packed codes, quant_state) of a saved 4-bit weight, for dequantize(*read_checkpoint(...)).

    tensors: the tensors of all shards by their full names, such as from safetensors.torch.load_file, or an
    open safetensors.safe_open(file, "pt"). A weight and its scales can be in two shards. Only the tensors of
    this weight are read; they stay on their device.
    name: such as "model.layers.0.mlp.up_proj.weight".
    Returns the codes, two a byte, as they were saved, and a state with a QuantState's fields.
    Raises UnsupportedState if bitsandbytes did not save it in 4 bits, if a part is missing or has another
    size, or if it was quantized with other values than those of its type.
    """
    if not isinstance(name, str):
        raise UnsupportedState(f"name is a {type(name).__name__}, expected a text: pass tensors, then name")
    try:
        if read := getattr(tensors, "get_tensor", None):
            tensors = {key: read(key) for key in tensors.keys() if f"{key}.".startswith(f"{name}.")}
        return read_state_of(tensors, name)
    except UnsupportedState as error:
        raise UnsupportedState(f"{ascii(name)[1:-1]}: {error}") from error
    except Exception as error:  # of damaged JSON, sizes, and whatever is passed
        raise UnsupportedState(  # in ASCII, because what a file says can control a terminal
            f"{ascii(name)[1:-1]} cannot be read ({type(error).__name__}: {ascii(str(error))[1:-1]:.300}),"
            " expected a weight that bitsandbytes saved in 4 bits: pass the tensors of all shards, as"
            " safetensors.torch.load_file returns them (or an open safetensors.safe_open), and use a 16-bit"
            " weight as it is"
        ) from None


def read_state_of(tensors, name) -> tuple:
    """Return what read_checkpoint returns, or raise what Python raises."""
    facts = read_facts(tensors, name)
    state = types.SimpleNamespace(
        absmax=tensors[f"{name}.absmax"],
        shape=torch.Size(facts["shape"]),
        dtype=getattr(torch, facts["dtype"]),
        quant_type=facts["quant_type"],
        blocksize=facts["blocksize"],
        nested="nested_offset" in facts,
    )
    if state.nested:
        state.offset = state.absmax.new_tensor(float(facts["nested_offset"]), dtype=torch.float32)
        state.state2 = types.SimpleNamespace(
            absmax=tensors[f"{name}.nested_absmax"],
            code=tensors[f"{name}.nested_quant_map"],
            dtype=getattr(torch, facts["nested_dtype"]),
            blocksize=facts["nested_blocksize"],
        )
    packed = tensors[name]
    count, *_ = check_state(*read_state(packed, state))
    for level in (state, state.state2) if state.nested else (state,):
        count = -(-count // level.blocksize)
        if level.absmax.numel() != count:  # a file has no others
            raise ValueError(f"it has {level.absmax.numel()} scales, expected {count}")
    check_tables(tensors, name, state)
    return packed, state


def check_tables(tensors, name, state):
    """Check the 256 values of scales, and that the 16 of codes are those of the type."""
    if state.nested and not state.state2.code.isfinite().all():
        raise ValueError("its nested_quant_map has values that are not finite")
    if f"{name}.quant_map" in tensors:
        values = tensors[f"{name}.quant_map"].float()  # saved in 16 bits under such a default dtype
        if not torch.allclose(values, values.new_tensor(VALUES[state.quant_type]), atol=0.01):
            raise ValueError(f"its quant_map does not hold the values of {state.quant_type}")


def read_facts(tensors, name) -> dict:
    """Return what the JSON of a weight's state says."""
    states = [key for key in (f"{name}{STATE}{quant_type}" for quant_type in VALUES) if key in tensors]
    if len(states) != 1:
        raise ValueError(
            f"it has {len(states)} states, expected one, such as '{name}{STATE}nf4': pass the full name"
        )
    state = tensors[states[0]]
    if state.numel() > 100_000:
        raise ValueError(f"its state has {state.numel():,} bytes, expected about 200")
    return json.loads(bytes(state.flatten().tolist()))
