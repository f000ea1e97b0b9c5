"""The public function: sources, a plan of what each new tensor is made of, one loop that makes and writes."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from ..core.state import UnsupportedState
from ..environment import missing
from ..log import say
from .adapter import Adapter
from .checkpoint import PART
from .model import build, changed, compare, kept_in_float32, library, quantized_layers, untied
from .plan import Plan, Training
from .sources import find, small_files, stat
from .write import write

DTYPES = {
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
}
TYPES = ("nf4", "nf4+double", "fp4", "fp4+double")


class Counts(NamedTuple):
    """How many tensors of the new checkpoint were written, and how many of them came to be how."""

    written: int
    dequantized: int  # from 4 bits, stored or as training saw them
    merged: int  # changed by the adapter


def export_checkpoint(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    base: str | os.PathLike | None = None,
    trained_in: str | None = None,
    load_dtype: str | torch.dtype | None = None,
    skip_modules: list[str] | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: str | int = "5GB",
    device: str | torch.device | None = None,
    unchecked: bool = False,
) -> Counts:
    """Write a model in 16 bit into a new folder: bit-identical to bitsandbytes, and to PEFT's merge.

    source: a 4-bit checkpoint of transformers or diffusers, or a LoRA adapter: a folder, a .safetensors file,
    or a name on the hub (a/b or a/b@revision). Code that comes with it is not run.
    out: the folder. It appears when it is complete.
    base: what the adapter is merged into, in 4 or in 16 bit. Default: what adapter_config.json names.
    trained_in: "nf4", "nf4+double", "fp4", or "fp4+double" (bnb_4bit_use_double_quant), if training quantized
    a 16-bit base on loading. The result then has the weights that training saw.
    load_dtype: the dtype in which training loaded that base. Default: its config's.
    skip_modules: the llm_int8_skip_modules of that training. Default: transformers' own.
    dtype: "float16", "bfloat16", or "float32" for all. Default: quant_state.dtype, and that of what is copied.
    shard_size: the most bytes in a file: a number, or a size such as "5GB" or "500 MiB".
    device: on which to quantize, dequantize, and merge. Default: the GPU, if there is one.
    unchecked: do not compare names and shapes with the model that transformers or diffusers builds.
    Every tensor is made, copied because it is in floating point (or an integer in the model, too), or refused
    by name. A merge is that of merge_and_unload() on the dequantized model, on the same device.
    Raises UnsupportedState (a ValueError) for what is refused, OSError if OUT cannot be written.
    """
    out = Path(out).expanduser()
    if os.path.lexists(out) or not out.parent.is_dir():
        raise UnsupportedState(f"{out} exists, or its parent does not: pass the name of a new folder")
    size, dtype, load_dtype = (
        to_bytes(shard_size),
        to_dtype("dtype", dtype),
        to_dtype("load_dtype", load_dtype),
    )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, adapter = find(source, base)
    if out.resolve().is_relative_to(model.folder.resolve()):
        raise UnsupportedState(f"{out} is inside {model.folder}, expected a folder beside it")
    built, training = None, None
    if adapter or trained_in or not unchecked:
        built = build(model.folder, model.config)
    if trained_in:
        training = how_trained(trained_in, load_dtype, skip_modules, model, built, device)
    elif load_dtype or skip_modules:
        raise UnsupportedState("load_dtype and skip_modules belong to trained_in: pass it, too")
    merging = None
    if adapter:
        tensors = {name: file.get_tensor(name) for name, file in adapter.tensors.items()}
        merging = Adapter(adapter.name, adapter.config, tensors, built)
    plan = Plan(model.tensors, built, merging, dtype, training, device)
    made = plan.made.values()
    quantized = sum(one.packed or one.quantized for one in made)
    if not quantized and not adapter:
        raise UnsupportedState(f"{source} is in 16 bit and has no adapter: there is nothing to do")
    if not quantized:
        say(
            "The base is merged in 16 bit, as it is. If training loaded it in 4 bit, pass --trained-in nf4+double."
        )
    if built:
        compare(built, {name: one.like for name, one in plan.made.items()})
    new = dtype or (training and training.dtype)
    config = changed(model.config, ["dtype", "torch_dtype"] if new else [], str(new).removeprefix("torch."))
    if plan.untied:
        config = untied(config, built)

    def unchanged():
        for one in filter(None, (model, adapter)):
            if stat(one.stats) != one.stats:
                raise UnsupportedState(f"{one.name} changed during the export: export it again")

    small = small_files(model.folder, adapter and adapter.folder)
    write(out, config, plan, size, small, unchanged)
    return Counts(len(made), quantized, sum(bool(one.given or one.layers or one.fused) for one in made))


def how_trained(kind, load_dtype, skip_modules, model, built, device):
    """Return the Training of a 16-bit base; None for a 4-bit base, which holds what training saw."""
    if kind not in TYPES:
        raise UnsupportedState(f"trained_in is {kind}, expected one of {', '.join(TYPES)}")
    if any(PART.fullmatch(key) for key in model.tensors):
        how = model.config.get("quantization_config") or {}
        stored = how.get("bnb_4bit_quant_type", "fp4") + "+double" * bool(
            how.get("bnb_4bit_use_double_quant")
        )
        if kind != stored or load_dtype or skip_modules:
            raise UnsupportedState(
                f"{model.name} is in 4 bit ({stored}) and is used as it is: omit trained_in"
            )
        return None
    if problem := missing("bitsandbytes", "accelerate"):
        raise UnsupportedState(f"trained_in needs bitsandbytes. {problem}")
    with library(f"transformers cannot quantize {type(built).__name__}"):
        import bitsandbytes
        from transformers import BitsAndBytesConfig

        quant_type, _, double = kind.partition("+")
        how = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skip_modules or None)
        layers = quantized_layers(built, how)
        if not load_dtype:
            load_dtype = built.config.dtype or torch.float32
            say(
                f"Loaded as {load_dtype}, as the base's config says. If training loaded another dtype, pass it."
            )
        float32 = kept_in_float32(built, load_dtype)
    say(
        f"{len(layers)} layers are quantized to {kind} on {device} by bitsandbytes {bitsandbytes.__version__}."
    )
    return Training(
        load_dtype, float32, layers, {"quant_type": quant_type, "compress_statistics": bool(double)}
    )


def to_bytes(size) -> int:
    """Return a size in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(size), re.IGNORECASE)
    number = found and float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(
        found[2].upper() or " "
    )
    if not number:
        raise UnsupportedState(f"shard_size is {size}, expected a size such as 5GB or 500MiB")
    return int(number)


def to_dtype(name, dtype):
    """Return a torch dtype of a name as people write it."""
    text = str(dtype).removeprefix("torch.")
    if dtype and text not in DTYPES:
        raise UnsupportedState(f"{name} is {dtype}, expected float16, bfloat16, or float32")
    return DTYPES.get(text)
