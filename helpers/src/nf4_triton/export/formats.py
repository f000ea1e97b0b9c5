"""How quantized weights are stored: which tensors of a file make one, and what dequantizes it."""

import functools
import json
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..backend import dequantize
from ..core.checkpoint import PART, read_checkpoint
from .private import dot_natural_key
from .problems import UnsupportedState, library


class Stored(NamedTuple):
    """A weight that is not in 16 bit."""

    shape: tuple
    dtype: torch.dtype  # that training used
    make: Callable  # returns the weight in a given dtype, or in one at least as precise


def of_4_bits(source, tensors, name) -> Stored:
    """Return a weight that bitsandbytes saved in 4 bits."""
    packed, state = read_checkpoint(tensors, name)
    return Stored(state.shape, state.dtype, lambda dtype: dequantize(packed, state, dtype=dtype))


def of_unsloth(source, tensors, name):
    """Return a tensor of Unsloth's 4-bit gpt-oss, which stores experts one by one, transposed."""
    keys = sorted({PART.sub(r"\1", key) for key in tensors}, key=dot_natural_key)
    plain = tensors.keys() == {*keys}
    parts: list = [tensors[key] if plain else of_4_bits(source, tensors, key) for key in keys]
    if len(parts) == 1:
        return parts[0]
    if plain:
        return torch.stack(parts)  # biases
    shape = len(parts), *reversed(parts[0].shape)
    return Stored(shape, parts[0].dtype, lambda dtype: torch.stack([part.make(dtype).t() for part in parts]))


def of_int8(source, tensors, name) -> torch.Tensor:
    """Return a weight of LLM.int8()."""
    from bitsandbytes.functional import int8_vectorwise_dequant

    module = name.removesuffix("weight")
    expect(not tensors.get(f"{module}weight_format"))  # in 2023, some GPUs had other formats
    return int8_vectorwise_dequant(tensors[name], tensors[f"{module}SCB"])


def of_fp8(source, tensors, name) -> torch.Tensor:
    """Return a weight of 8-bit floats. Its edges can cut blocks."""
    weight, scales = tensors[name], tensors[f"{name}_scale_inv"]
    expect(weight.is_floating_point(), weight.itemsize == 1, scales.is_floating_point())
    rows, columns = weight.shape
    height, width = source.how.get("weight_block_size", (128, 128)) or weight.shape
    scales = scales.float().expand(-(-rows // height), -(-columns // width))
    scales = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return weight.float().mul_(scales[:rows, :columns])


def of_mxfp4(source, tensors, name) -> torch.Tensor:
    """Return the weight of all experts of a layer."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    expect(*(part.dtype == torch.uint8 for part in parts))
    # In pieces: all its indices would take several times the memory of the weight.
    return convert_moe_packed_tensors(*parts, rows_per_chunk=2**18)


def of_compressed(source, tensors, name) -> torch.Tensor:
    """Return a weight that llm-compressor saved, dequantized in the dtype of its scales."""
    tool, shape = dequantizer(source.folder, json.dumps(source.how)), tensors.get(f"{name}_shape")
    if shape is not None and tensors[f"{name}_packed"].is_meta:  # the tool would estimate the shape
        needed = tool.get_dependencies(f"{name}_packed")
        expect(needed, needed <= tensors.keys())
        return torch.empty(shape.tolist(), device="meta")
    weight = tool.process({**tensors})[name]
    expect(weight.dtype == torch.float32)  # or the config does not name it
    return weight


@functools.lru_cache(1)
def dequantizer(folder, config):
    """Return compressed-tensors' dequantizer for a folder with this config."""
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    return CompressedTensorsDequantizer(folder, dtype=torch.float32)


# {kind: (
#   {pattern: replacement}, which turn a tensor's name into its weight's,
#   what a weight should be stored as, for error messages,
#   the function that reads a weight,
#   transformers' config that dequantizes such a model on loading ("": none is needed; None: cannot load it),
# )}
FORMATS: dict = {
    "bitsandbytes": ({PART: r"\1"}, "codes and their state", of_4_bits, ""),
    "unsloth": (
        {
            PART: r"\1",
            r"\.router\.linear\.": ".router.",
            r"_projs\.\d+\.weight\Z": "_proj",
            r"_projs\.\d+\.bias\Z": "_proj_bias",
        },
        "experts that are alike",
        of_unsloth,
        None,
    ),
    "int8": (
        {r"\.(SCB|weight_format)\Z": ".weight"},
        "a scale (SCB) for each row, and weight_format 0",
        of_int8,
        "",
    ),
    "fp8": (
        {r"_scale_inv\Z": "", r"\.activation_scale\Z": ".weight"},
        "a matrix of 8-bit floats with a floating-point scale (weight_scale_inv) for each block of"
        " weight_block_size; MXFP8, packed FP4, and experts in one tensor cannot be checked",
        of_fp8,
        "FineGrainedFP8Config",
    ),
    "mxfp4": (
        {r"_(blocks|scales)\Z": ""},
        "blocks of 16 bytes with a byte for each as its scale",
        of_mxfp4,
        "Mxfp4Config",
    ),
    "compressed-tensors": (
        {
            r"\.(weight|input|output)_(packed|scale|shape|zero_point|global_scale|g_idx)\Z": ".weight",
            r"\.([kqv])_(scale|zero_point|global_scale)\Z": r".\1_proj.weight",
        },
        "what config.json describes, and a package that reads it (type pip install -U compressed-tensors)",
        of_compressed,
        "CompressedTensorsConfig",
    ),
}


def expect(*conditions):
    """Raise unless all conditions hold."""
    if not all(conditions):
        raise ValueError("other dtypes or shapes")


def kind_of(how, names) -> str:
    """Return a key of FORMATS, or another word for how weights are stored. how: the quantization_config."""
    if any(".gate_up_projs." in name for name in names):
        return "unsloth"
    return "int8" if how.get("load_in_8bit") else str(how.get("quant_method") or "bitsandbytes")


def weight_of(kind, key) -> str:
    """Return the name of the weight that a tensor is a part of, or its own."""
    for pattern, name in FORMATS[kind][0].items():
        key = re.sub(pattern, name, key)
    return key


def read(source, tensors, name):
    """Return a tensor or a Stored weight, from those tensors of a Source that make it."""
    _, expected, make, _ = FORMATS[source.kind]
    held = [f"{key.rpartition('.')[2]} {part.dtype} {[*part.shape]}" for key, part in tensors.items()]
    with library(
        f"{name} is stored as {', '.join(held[:3])}, expected in {source.kind} {expected}: pass the 16-bit"
        " model that it was made from"
    ):
        if make in (of_4_bits, of_unsloth):
            return make(source, tensors, name)
        # One-dimensional integers say how the others are stored, so their values are needed.
        sizes = {
            key: part.to("meta") if part.is_floating_point() or part.dim() > 1 else part
            for key, part in tensors.items()
        }
        dtype = source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16"
        shape = make(source, sizes, name).shape
        return Stored(shape, getattr(torch, dtype), lambda _: make(source, tensors, name))


def loading(source) -> dict:
    """Return arguments of from_pretrained() that load a base as training did."""
    import transformers

    config = FORMATS[source.kind][3]
    if config is None:
        raise UnsupportedState(
            f"transformers cannot load {source.name}, expected a format that it can: compare OUT by hand"
        )
    return {"quantization_config": getattr(transformers, config)(dequantize=True)} if config else {}
