"""Read a 4-bit weight from the tensors of a saved checkpoint. Needs neither bitsandbytes nor Triton."""

import json
import types
from collections.abc import Mapping

import torch

from .state import UnsupportedState


def read_checkpoint(tensors: Mapping[str, torch.Tensor], name: str) -> tuple:
    """Return (packed codes, quant_state) of a saved 4-bit weight, for dequantize(*read_checkpoint(...)).

    tensors: the tensors of all shards by their full names, such as from safetensors.torch.load_file. A weight
    and its scales can be in two shards. Only the tensors of this weight are read; they stay on their device.
    name: such as "model.layers.0.mlp.up_proj.weight".
    Raises UnsupportedState if bitsandbytes did not save it in 4 bits, or if a part is missing.
    """
    saved = f"{name}.quant_state.bitsandbytes__"
    try:
        saved += "fp4" if f"{saved}fp4" in tensors else "nf4"
        facts = json.loads(bytes(tensors[saved].tolist()))
        state = types.SimpleNamespace(
            absmax=tensors[f"{name}.absmax"],
            shape=torch.Size(facts["shape"]),
            dtype=getattr(torch, facts["dtype"]),
            quant_type=facts["quant_type"],
            blocksize=facts["blocksize"],
            nested="nested_offset" in facts,
        )
        if state.nested:
            state.offset = state.absmax.new_tensor(facts["nested_offset"], dtype=torch.float32)
            state.state2 = types.SimpleNamespace(
                absmax=tensors[f"{name}.nested_absmax"],
                code=tensors[f"{name}.nested_quant_map"],
                dtype=getattr(torch, facts["nested_dtype"]),
                blocksize=facts["nested_blocksize"],
            )
        return tensors[name], state
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedState(
            f"{name} cannot be read ({type(error).__name__}: {error}), expected a weight that bitsandbytes"
            " saved in 4 bits: pass the tensors of all shards, and use a 16-bit weight as it is"
        ) from error
