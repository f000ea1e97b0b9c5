"""What is written: the new tensors, one after another, and the small files. OUT appears when all is there."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from tqdm import tqdm

from ..core.state import UnsupportedState
from .plan import TYPES


def write(out, config, plan, shard_size, small, unchanged):
    """Write what a plan makes and the small files into OUT.

    small: {name in OUT: path}. unchanged: called when all is read, raises if the sources are no longer the same.
    """
    stem = "diffusion_pytorch_model" if "_class_name" in config else "model"
    likes = {name: made.like for name, made in plan.made.items()}
    shards = split_torch_state_dict_into_shards(
        likes, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=shard_size
    )
    size = shards.metadata["total_size"]
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise UnsupportedState(f"{out} needs {size:,} bytes, and {free:,} are free: choose another disk")
    part = out.with_name(f"{out.name}.partial")
    try:
        part.mkdir()
    except FileExistsError:
        raise UnsupportedState(f"{part} is left from an export that was killed: delete it") from None
    try:
        for name, path in small.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part / name)
        if config:
            (part / "config.json").write_text(json.dumps(config, indent=2))
        if shards.is_sharded:
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            (part / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
        with tqdm(total=size, unit="B", unit_scale=True, desc=out.name) as bar:
            for file, names in shards.filename_to_tensors.items():
                write_file(part / file, {name: likes[name] for name in names}, plan.make, bar)
        unchanged()
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_file(path, likes, make, bar):
    """Write tensors into a safetensors file, one while the next is made."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, like in likes.items():
        start, end = end, end + like.nbytes
        header[name] = {"dtype": TYPES[like.dtype], "shape": [*like.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        written = pool.submit(int)  # nothing yet
        for name in likes:
            content = make(name).contiguous().view(-1).view(torch.uint8)
            if content.is_cuda:  # torch reuses pinned memory; fresh memory costs more than the copy
                content = torch.empty_like(content, device="cpu", pin_memory=True).copy_(content)
            bar.update(written.result())
            written = pool.submit(file.write, content.numpy())
        bar.update(written.result())
