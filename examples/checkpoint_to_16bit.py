"""Write a 4-bit checkpoint of bitsandbytes in 16 bit, shard by shard, without building the model.

pip install ".[train]"    in a checkout of this repository; bitsandbytes itself is not used
python checkpoint_to_16bit.py qwen-16bit unsloth/Qwen2.5-0.5B-bnb-4bit
    model.safetensors: 100%|##########| 290/290 [00:12<00:00, 23.27it/s]
    qwen-16bit: 168 of 290 tensors dequantized, 0 merged
MODEL and ADAPTER are folders or names on the hub. Memory holds one shard and one weight. --adapter adds
LoRA, plain or rank-stabilized: W + s * B @ A, summed in float32, rounded once. MODEL must hold the 4-bit
weights that it was trained on: if training quantizes a 16-bit model, call model.save_pretrained there.
"""

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from tqdm import tqdm

INDEX = "model.safetensors.index.json"
SMALL = ["*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt"]  # tokenizer and the like
FILES = ["*.safetensors", *SMALL]
PART = re.compile(r"(.+)\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.bitsandbytes__\w+)")
# Fields of adapter_config.json that a merge needs or that do not change it. Others must not be set.
PLAIN = """auto_mapping base_model_name_or_path exclude_modules inference_mode init_lora_weights
layers_pattern layers_to_transform lora_alpha lora_dropout megatron_core peft_type peft_version
qalora_group_size r revision target_modules task_type use_rslora""".split()
VALUES = {"peft_type": ("LORA",), "init_lora_weights": (True, False, "gaussian")}  # others change the base


def load(name, file):
    """Return a folder and the tensors of its `file` or that file's shards, which are read when used."""
    from safetensors.torch import load_file

    folder = Path(name if Path(name).is_dir() else snapshot_download(name, allow_patterns=FILES))
    index, files = folder / f"{file}.index.json", [file]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return folder, {key: tensor for file in files for key, tensor in load_file(folder / file).items()}


def load_adapter(name, states):
    """Return ({module: its A and B}, scale) of a LoRA adapter, or exit and name what cannot be merged.

    states: of the weights that it may belong to, by name.
    """
    folder, tensors = load(name, "adapter_model.safetensors")
    config, pairs = json.loads((folder / "adapter_config.json").read_text()), {}
    refused = [key for key, value in config.items() if value and value != "none" and key not in PLAIN]
    refused += [f"{key}={config[key]}" for key in VALUES.keys() & config if config[key] not in VALUES[key]]
    for key, tensor in tensors.items():
        module, _, matrix = key.removeprefix("base_model.model.").partition(".lora_")
        pairs.setdefault(module, {})[matrix] = tensor
    rank = config["r"]
    for module, pair in pairs.items():
        state = states.get(f"{module}.weight")
        if state is None or pair.keys() != {"A.weight", "B.weight"}:
            refused.append(module)
            continue
        rows, *columns = state.shape
        shapes = [tuple(pair[f"{matrix}.weight"].shape) for matrix in "BA"]
        if shapes != [(rows, rank), (rank, *columns)]:
            refused.append(f"{module} of another shape or rank")
    if refused or not pairs:
        refused = ", ".join(refused) or "no tensors"
        raise SystemExit(f"{name} has {refused}, expected LoRA on 4-bit weights alone: use PEFT")
    return pairs, config["lora_alpha"] / rank ** (0.5 if config.get("use_rslora") else 1)


def write(out, folder, results, convert, shard_size):
    """Write convert(name) for each of `results`, meta tensors by name, and the small files of `folder`."""
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(results, max_shard_size=shard_size)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    with tempfile.TemporaryDirectory(dir=out.parent) as work:  # deleted after an error or Ctrl-C
        done = Path(work, "done")
        done.mkdir()
        for file, names in plan.filename_to_tensors.items():
            save_file({name: convert(name) for name in tqdm(names, file)}, done / file, {"format": "pt"})
        for path in folder.iterdir():
            if any(map(path.match, SMALL)) and path.name not in (INDEX, "adapter_config.json"):
                shutil.copy(path, done)
        (done / "config.json").write_text(json.dumps(config, indent=2))
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (done / INDEX).write_text(json.dumps(index, indent=2))
        done.rename(out)


def main(out, model, adapter=None, shard_size="5GB"):
    import torch

    from nf4_triton import dequantize, read_checkpoint

    if out.exists():
        raise SystemExit(f"{out} exists, expected the name of a new folder")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, tensors = load(model, "model.safetensors")
    parts = {key: match[1] for key in tensors if (match := PART.fullmatch(key))}
    states = {name: read_checkpoint(tensors, name)[1] for name in set(parts.values())}
    if not states:
        raise SystemExit(f"{model} has no weights that bitsandbytes saved in 4 bits")
    pairs, scale = load_adapter(adapter, states) if adapter else ({}, 1)

    def convert(name):
        if name not in states:
            return tensors[name]
        own = {key: tensors[key].to(device) for key in (name, *parts) if parts.get(key, name) == name}
        weight = dequantize(*read_checkpoint(own, name))
        if pair := pairs.get(name.removesuffix(".weight")):
            a, b = (pair[f"{matrix}.weight"].to(device).float() for matrix in "AB")
            weight = (b @ a).mul_(scale).add_(weight).to(weight.dtype)
        return weight.cpu()

    results = {name: states.get(name, tensor) for name, tensor in tensors.items() if name not in parts}
    results = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in results.items()}
    write(out, folder, results, convert, shard_size)
    print(f"{out}: {len(states)} of {len(results)} tensors dequantized, {len(pairs)} merged")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="unsloth/Qwen2.5-0.5B-bnb-4bit")
    parser.add_argument("--adapter", metavar="ADAPTER")
    parser.add_argument("--shard-size", default="5GB", help="of OUT (default: 5GB)")
    main(**vars(parser.parse_args()))
