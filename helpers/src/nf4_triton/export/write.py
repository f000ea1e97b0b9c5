"""What is written: the new tensors, a file at a time, and the small files. OUT appears when all is there."""

import contextlib
import json
import shutil

import torch
from huggingface_hub import split_torch_state_dict_into_shards as split
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from .problems import UnsupportedState, say, spoken


def write(out, config, card, plan, shard_size, small, sources):
    """Write what a plan makes and the small files into OUT, new or empty. Return the bytes of the tensors.

    small: {name in OUT: path}. sources: what is read, which must not change until all is.
    """
    stem = "diffusion_pytorch_model" if "_class_name" in config else "model"
    likes = plan.likes()
    shards = split(likes, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=shard_size)
    size = shards.metadata["total_size"]
    needed = size + sum(path.stat().st_size for path in small.values())
    if needed > (free := shutil.disk_usage(out.parent).free):
        raise UnsupportedState(f"{out} needs {needed:,} bytes, and {free:,} are free: choose another disk")
    say(f"{out} needs {needed / 1e6:,.1f} MB; {free / 1e6:,.0f} MB are free.")
    with appears(out) as part:
        for name, path in small.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part / name)
        (part / "README.md").write_text(card, encoding="utf-8")
        if config:
            (part / "config.json").write_text(json.dumps(config, indent=2))
        if shards.is_sharded:
            facts = shards.metadata | {"total_parameters": sum(like.numel() for like in likes.values())}
            index = {"metadata": facts, "weight_map": shards.tensor_to_filename}
            (part / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
        with tqdm(total=size, unit="B", unit_scale=True, desc=spoken(out.name)) as bar:
            for file, names in shards.filename_to_tensors.items():
                tensors = {}
                for name in names:
                    tensors[name] = plan.make(name).contiguous().to("cpu", copy=True)
                    bar.update(likes[name].nbytes)
                save_file(tensors, part / file, {"format": "pt"})
        for source in sources:
            source.check()
    return size


@contextlib.contextmanager
def appears(out):
    """Yield a folder that becomes OUT, new or empty, when all is written; else it is deleted."""
    part, empty = out.with_name(f"{out.name}.partial"), out.exists()
    try:
        part.mkdir()
    except FileExistsError:
        raise UnsupportedState(
            f"{part} belongs to an export that is running or was killed: wait, or delete it"
        ) from None
    try:
        if empty:
            shutil.copymode(out, part)
        yield part
        if empty:
            out.rmdir()
        part.rename(out)
    except torch.OutOfMemoryError as error:
        raise UnsupportedState(f"the GPU has too little memory ({error!s:.300}): pass --device cpu") from None
    except SafetensorError as error:
        raise OSError(f"{part} cannot be written ({error}): check the disk") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if empty:
            out.mkdir(exist_ok=True)
