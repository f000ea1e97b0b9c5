"""The public function: sources, a plan of what each new tensor is made of, one loop that makes and writes."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from .adapter import Adapter
from .bounds import bounded, check_counts
from .card import new_card
from .formats import weight_of
from .model import build, compare, edited, quantized_layers, untied
from .plan import Plan, Training
from .problems import UnsupportedState, library, say
from .sources import find, small_files
from .write import write

Location = str | os.PathLike
SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
KINDS = ("nf4", "nf4+double", "fp4", "fp4+double")


class Counts(NamedTuple):
    """How many tensors the new checkpoint has."""

    written: int
    dequantized: int  # of these: as they are stored, or from 4 bits as training saw them
    merged: int  # of these: changed by the adapter; a tied one that becomes a tensor of its own counts, too
    dtypes: str  # of all
    size: int  # bytes


def export_checkpoint(
    source: Location,
    out: Location,
    *,
    base: Location | None = None,
    trained_in: str | None = None,
    load_dtype: str | torch.dtype | None = None,
    skip_modules: str | list[str] | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: str | int = "5GB",
    device: str | torch.device | None = None,
    unchecked: bool = False,
) -> Counts:
    """Write a model in 16 bit into a new folder: bit-identical to its library's weights, and to PEFT's merge.

    source: a quantized checkpoint of transformers or diffusers (bitsandbytes in 4 or 8 bits, FP8, MXFP4, or
    compressed-tensors, with that package), or a LoRA adapter: a folder, a .safetensors file, or a name on the
    hub (a/b or a/b@revision). Code that comes with it is not run.
    out: the folder, new or empty. What is written appears in it when it is complete.
    base: what the adapter is merged into, quantized or in 16 bit. Default: what adapter_config.json names.
    trained_in: "nf4", "nf4+double", "fp4", or "fp4+double" (bnb_4bit_use_double_quant), if training quantized
    a 16-bit base on loading. The result then has the weights that training saw.
    load_dtype: the dtype in which training loaded that base. Default: its config's. After float32, weights
    are merged in float32, and rounded once to the dtype in which the base stores them.
    skip_modules: that training's llm_int8_skip_modules: a list, or with commas. Default: transformers' own.
    dtype: "float16", "bfloat16", or "float32" for all. Default: as it is stored; what is dequantized, in its
    quant_state.dtype or the dtype of config.json.
    shard_size: the most bytes in a file: a number, at least 1,000,000, or a size such as "5GB" or "500 MiB".
    device: where to quantize, dequantize, and merge. Default: the GPU, if there is one.
    unchecked: do not compare names and shapes with the model that transformers or diffusers builds.
    Every tensor is made, copied because it is in floating point (or an integer in the model, too), or refused
    by name. A merge is that of merge_and_unload() on the dequantized model, on the same device.
    Returns the counts of tensors written, dequantized, and merged, their dtypes, and their bytes.
    Raises UnsupportedState (a ValueError) for what is refused, OSError if OUT cannot be written.
    """
    with library(
        "source, out, or base is no path: write a model with save_pretrained(), and pass its folder"
    ):
        _, _, out = Path(source), Path(base or ""), Path(os.path.expanduser(out))
    check_out(out)
    most, device = to_bytes(shard_size), to_device(device)
    dtype, load_dtype = to_dtype(dtype), to_dtype(load_dtype)
    checkpoint, lora = find(source, base)
    if lora:  # before the clock of bounded() starts
        with library("an adapter needs PEFT, which cannot be imported: pip install peft"):
            import peft  # noqa: F401
    check_counts(checkpoint.config, checkpoint.tensors | (lora.tensors if lora else {}))
    with bounded(len(checkpoint.tensors)):
        model, config = None, checkpoint.config
        if lora or trained_in or not unchecked:
            model, config = build(config, lora)
        training = how_trained(trained_in, load_dtype, skip_modules, checkpoint, model, device)
        adapter = Adapter(lora, model) if lora else None
    plan = Plan(checkpoint, model, adapter, dtype, training, device, config is not checkpoint.config)
    if model:
        compare(model, plan.likes(), bool(lora), training)
    dequantized = sum(made.dequantized for made in plan.made.values())
    if not (dequantized or lora):
        raise UnsupportedState(f"{source} is in 16 bit and has no adapter: there is nothing to do")
    if not (dequantized or training):
        say(
            "The base is merged as it is stored. If training quantized it on loading, pass --trained-in with"
            " your bnb_4bit_quant_type, and +double if bnb_4bit_use_double_quant."
        )
    small = small_files(checkpoint.folder, lora and lora.folder, model)
    card = new_card(checkpoint, lora, "diffusers" if "_class_name" in config else "transformers")
    size = write(out, new_config(config, plan), card, plan, most, small, [checkpoint, lora or checkpoint])
    merged = sum(plan.is_merged(name) for name in plan.made)
    dtypes = sorted({str(like.dtype) for like in plan.likes().values()})
    return Counts(len(plan.made), dequantized, merged, ", ".join(dtypes), size)


def check_out(out):
    """Raise unless a folder can appear as OUT."""
    if not out.parent.is_dir():
        raise UnsupportedState(
            f"{out.parent} does not exist, expected the folder in which OUT appears: make it"
        )
    if os.path.lexists(out) and (
        not out.is_dir()
        or out.is_symlink()
        or os.path.ismount(out)
        or out.samefile(".")
        or any(out.iterdir())
    ):
        raise UnsupportedState(f"{out} exists, expected a new or an empty folder: pass another name")


def how_trained(kind, load_dtype, skip_modules, checkpoint, model, device):
    """Return the Training of a 16-bit base; None for a base that is used as it is."""
    if not (kind or load_dtype or skip_modules):
        return None
    if kind not in KINDS:
        raise UnsupportedState(
            f"{f'--trained-in is {kind}' if kind else '--load-dtype and --skip-modules need --trained-in'},"
            f" expected one of {', '.join(KINDS)}: pass how training quantized the base"
        )
    stored = checkpoint.kind
    if any(weight_of(stored, key) != key for key in checkpoint.tensors):
        if stored in ("bitsandbytes", "unsloth"):
            double = "+double" if checkpoint.how.get("bnb_4bit_use_double_quant") else ""
            stored = f"{checkpoint.how.get('bnb_4bit_quant_type', 'fp4')}{double}"
        if kind != stored or load_dtype or skip_modules:
            raise UnsupportedState(
                f"{checkpoint.name} is stored in {stored} and used as it is: omit --trained-in"
            )
        return None
    with library(f"transformers cannot quantize {type(model).__name__}"):
        how = in_4_bits(kind, skip_modules)
        layers = quantized_layers(model, how)
    dtype = load_dtype or model.config.dtype
    if not dtype:
        raise UnsupportedState("the base's config names no dtype: pass what training loaded as --load-dtype")
    say(
        f"bitsandbytes quantizes {len(layers)} layers to {kind} on {device}, from a base"
        f" that training loaded in {dtype}; if not, pass --load-dtype."
    )
    how = {"quant_type": how.bnb_4bit_quant_type, "compress_statistics": how.bnb_4bit_use_double_quant}
    return Training(dtype, layers, how)


def in_4_bits(kind, skip_modules):
    """Return how transformers quantizes to a kind, such as nf4+double: a BitsAndBytesConfig."""
    from transformers import BitsAndBytesConfig

    if isinstance(skip_modules, str):
        skip_modules = skip_modules.replace(",", " ").split()
    quant_type, _, double = kind.partition("+")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=bool(double),
        llm_int8_skip_modules=skip_modules or None,
    )


def new_config(config, plan) -> dict:
    """Return the config of the new checkpoint."""
    dtype = plan.dtype or (plan.training and not plan.rounds_once and plan.training.dtype)
    name = str(dtype).removeprefix("torch.")
    config = edited(config, {"dtype": name, "torch_dtype": name} if dtype else {})
    return untied(config, plan.model) if plan.untied else config


def to_dtype(dtype):
    """Return the torch dtype of a name such as bf16."""
    text = str(dtype).removeprefix("torch.")
    text = SHORT.get(text, text)
    if dtype and text not in SHORT.values():
        raise UnsupportedState(
            f"{dtype!s:.40} is no dtype for a model, expected float16, bfloat16, or float32"
        )
    return getattr(torch, text) if dtype else None


def to_bytes(size):
    """Return the bytes of a size such as 5GB. GiB counts as GB, which is less."""
    found = re.fullmatch(r"(\d+\.?\d*) *([KMGT]?)I?B?", str(size).upper())
    number = float(found[1]) * 1000 ** " KMGT".index(found[2] or " ") if found else 0
    if number < 1e6:
        raise UnsupportedState(f"--shard-size is {size!s:.40}, expected a size such as 5GB, at least 1MB")
    return number


def to_device(device) -> torch.device:
    """Return a torch device. Raises unless this machine has it."""
    with library(f"--device is {device!s:.40}, expected one that is here, such as cpu"):
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(default if device is None else device)
        torch.empty(1, device=device)
        return device
