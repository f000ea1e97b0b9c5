"""Read a 4-bit weight from the tensors of a saved checkpoint. Needs neither bitsandbytes nor Triton."""

import json
import re
import types
from collections.abc import Mapping

import torch

from ..core.reference import FP4_VALUES, NF4_VALUES
from ..core.state import UnsupportedState

STATE = ".quant_state.bitsandbytes__"  # before nf4 or fp4: JSON in bytes
# What follows a 4-bit weight's name in the names of the tensors of its state.
PART = re.compile(rf"(.+)(\.(nested_)?(absmax|quant_map)|{re.escape(STATE)}\w+)", re.DOTALL)


def read_checkpoint(tensors: Mapping[str, torch.Tensor], name: str) -> tuple:
    """Return (packed codes, quant_state) of a saved 4-bit weight, for dequantize(*read_checkpoint(...)).

    tensors: the tensors of all shards by their full names, such as from safetensors.torch.load_file, or an
    open safetensors.safe_open(file, "pt"). A weight and its scales can be in two shards. Only the tensors of
    this weight are read; they stay on their device.
    name: such as "model.layers.0.mlp.up_proj.weight".
    Raises UnsupportedState if bitsandbytes did not save it in 4 bits, if a part is missing, or, on a CPU, if
    it was quantized with other values than those of its type.
    """
    try:
        return read(tensors, name)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedState(
            f"{name} cannot be read ({type(error).__name__}: {error}), expected a weight that bitsandbytes"
            " saved in 4 bits: pass the tensors of all shards, as safetensors.torch.load_file returns them,"
            " and use a 16-bit weight as it is"
        ) from error


def read(tensors, name) -> tuple:
    """Return what read_checkpoint returns, or raise what Python raises."""
    if not hasattr(tensors, "keys"):
        raise TypeError(f"tensors is a {type(tensors).__name__}")
    names = tensors.keys()

    def get(key):
        if key not in names:
            raise KeyError(key)
        return tensors.get_tensor(key) if hasattr(tensors, "get_tensor") else tensors[key]

    if f"{name}.weight" in names:
        raise ValueError(f"the weight's name is {name}.weight")
    fp4 = f"{name}{STATE}fp4" in names
    if fp4 and f"{name}{STATE}nf4" in names:
        raise ValueError("it has two states, nf4 and fp4")
    facts = json.loads(bytes(get(f"{name}{STATE}{'fp4' if fp4 else 'nf4'}").flatten().tolist()))
    state = types.SimpleNamespace(
        absmax=get(f"{name}.absmax"),
        shape=torch.Size(facts["shape"]),
        dtype=getattr(torch, facts["dtype"]),
        quant_type=facts["quant_type"],
        blocksize=facts["blocksize"],
        nested="nested_offset" in facts,
    )
    if state.nested:
        state.offset = state.absmax.new_tensor(float(facts["nested_offset"]), dtype=torch.float32)
        state.state2 = types.SimpleNamespace(
            absmax=get(f"{name}.nested_absmax"),
            code=get(f"{name}.nested_quant_map"),
            dtype=getattr(torch, facts["nested_dtype"]),
            blocksize=facts["nested_blocksize"],
        )
    if f"{name}.quant_map" in names and state.absmax.device.type == "cpu":
        expected = torch.tensor(FP4_VALUES if state.quant_type == "fp4" else NF4_VALUES)
        # bitsandbytes may save the values in 16 bits; it dequantizes with those of the type all the same.
        if not torch.allclose(get(f"{name}.quant_map").float(), expected, atol=0.01):
            raise ValueError(f"its quant_map does not hold the values of {state.quant_type}")
    return get(name), state
