"""What is read: a quantized or 16-bit checkpoint, and an adapter with the base that it was trained on."""

import contextlib
import dataclasses
import fnmatch
import json
import os
import re
from pathlib import Path

from huggingface_hub import ModelCard, snapshot_download
from safetensors import safe_open
from transformers import AutoTokenizer

from .formats import FORMATS, kind_of
from .problems import UnsupportedState, library, refuse, say

WEIGHTS = (  # in the order in which transformers, or diffusers, looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)
ADAPTER = ("adapter_model.safetensors",)
TOKENIZER = """additional_chat_templates/* added_tokens.json chat_template* merges.txt special_tokens_map.json
tokenizer* vocab* *.model *.tiktoken""".split()
# [0-9]_*: a folder of sentence-transformers, such as 1_Pooling.
SMALL = [*TOKENIZER, *"*.json *.jinja */*.jinja *.py *.txt LICENSE* NOTICE* USE_POLICY* [0-9]_*/*".split()]
LARGE = 100e6  # bytes: tokenizers have up to 33 MB, the index of 400,000 tensors 43 MB
INSTEAD = {  # {a file that is not read: what to do}
    "*.gguf": "pass what the GGUF was made from",
    "*model*.bin": "load it with from_pretrained(), write it with save_pretrained(), and pass that",
    "adapter_model.safetensors": "pass an adapter as SOURCE, with adapter_config.json beside it",
    "adapters.safetensors": "fuse it where it was trained, with mlx_lm.fuse",
    "pytorch_lora_weights.safetensors": "merge it with diffusers: load_lora_weights(), fuse_lora(),"
    " unload_lora_weights(), save_pretrained()",
}
# The export writes these anew, or they describe a training run.
NOT_COPIED = re.compile(r"(.*\.index|config|adapter_config|trainer_state)\.json|.*_results\.\w+")


@dataclasses.dataclass
class Source:
    """A folder whose tensors are read."""

    name: str  # as it was given
    folder: Path
    tensors: dict  # {name: the open file that holds it}
    config: dict  # of the model, or of the adapter; empty if there is none
    stats: dict  # {file: when it was written}
    how: dict  # its quantization_config
    kind: str  # a key of FORMATS

    def check(self):
        """Raise if somebody wrote to a file since it was opened."""
        if any(path.stat().st_mtime_ns != self.stats[path] for path in self.stats):
            raise UnsupportedState(f"{self.name} changed during the export: export it again")


def find(source, base=None):
    """Return the Sources of the checkpoint and of the adapter, or None."""
    path = fetch(source, r"\w[\w.-]*/\w[\w.-]*")
    folder = path if path.is_dir() else path.parent
    if not (folder / "adapter_config.json").exists():
        checkpoint = read_source(source, path, WEIGHTS, "config.json")
        if base:
            raise UnsupportedState(
                f"{source} is not an adapter, expected one beside --base: omit --base, or if {base} is the"
                " adapter, swap the two"
            )
        return checkpoint, None
    lora = read_source(source, path, ADAPTER, "adapter_config.json")
    refuse(
        f"{source} holds tensors that PEFT's save_pretrained() names otherwise",
        [name for name in lora.tensors if re.search(r"\.default\.|lora_[ab]$", name)],
        "write the adapter with that; if MLX trained it, fuse it there, with mlx_lm.fuse",
    )
    if lora.kind == "unsloth":
        raise UnsupportedState(
            f"{source} changes single experts (experts.gate_up_projs), expected LoRA on other layers, or on"
            " all experts of a layer at once: merge it with Unsloth"
        )
    trained_on = lora.config.get("base_model_name_or_path")
    name = str(base or trained_on or "")
    if not name:
        raise UnsupportedState(f"{source} does not say what it was trained on: pass --base MODEL")
    revision = None if base else lora.config.get("revision")
    path = fetch(name, revision=revision, do="pass --base MODEL, as it is called here")
    checkpoint = read_source(name, path, WEIGHTS, "config.json")
    trained_on = trained_on or "an unnamed model"
    say(f"Base: {name}, in {checkpoint.folder}. The adapter was trained on {trained_on}.")
    if others := sorted(path.parent.name for path in folder.glob("*/adapter_config.json")):
        say(f"Other adapters in {folder}, not merged: {', '.join(others)}.")
    return checkpoint, lora


def fetch(name, form=r"(\w[\w.-]*/)?\w[\w.-]*", revision=None, do="check its name") -> Path:
    """Return the path of a folder or a file; download it if it is a name on the hub, such as a/b@main.

    form: of a name on the hub. Adapters may name their base without an owner, such as gpt2.
    do: what to do if there is none.
    """
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):  # Path.exists() raises for what is too long
        return path
    repository, _, named = str(name).partition("@")
    if not re.fullmatch(form, repository):
        raise UnsupportedState(f"{name!s:.300} is no folder or file here: {do}")
    try:
        shards = "model-*.safetensors", "diffusion_pytorch_model-*.safetensors"
        files = ["README.md", *SMALL, *WEIGHTS, *ADAPTER, *shards]
        return Path(snapshot_download(repository, revision=named or revision, allow_patterns=files))
    except (OSError, TypeError, ValueError) as error:
        raise UnsupportedState(
            f"{name!s:.300} is not here, and the hub did not send it ({error!s:.300}): {do}"
        ) from None


def read_source(name, path, candidates, config) -> Source:
    """Open the first of the candidates in a folder, or a file itself."""
    folder, found = path.parent, path.name
    if path.is_dir():
        folder, found = path, next((file for file in candidates if (path / file).exists()), "")
    elsewhere = found in INSTEAD and found not in candidates
    if elsewhere or not found.endswith((".safetensors", ".index.json")):
        raise UnsupportedState(f"{name} {'is' if found else 'has'} no {candidates[0]}: {instead(path)}")
    weight_map = read_json(folder, found, "weight_map") if found.endswith(".json") else {}
    tensors: dict = {}
    stats: dict = {}
    for file in sorted({*map(str, weight_map.values())}) or [found]:
        with library(
            f"{folder / file[:200]} cannot be read: download it again (a git-lfs pointer: git lfs pull)"
        ):
            path = inside(folder, file)
            stats[path] = path.stat().st_mtime_ns
            opened = safe_open(path, "pt")
        tensors |= dict.fromkeys(opened.keys(), opened)
    refuse(
        f"{name} lacks tensors that its index lists", sorted(weight_map.keys() - tensors), "download it again"
    )
    content, how = read_json(folder, config), read_json(folder, config, "quantization_config")
    with library(f"quantization_config of {name} cannot be read: download it again"):
        how = how or content.get("text_config", {}).get("quantization_config", {})
        kind = kind_of(how, tensors)
    if kind not in FORMATS:
        made_from = on_hub(read_card(folder).data.get("base_model"), content.get("_name_or_path"))
        raise UnsupportedState(
            f"{name} is quantized with {kind}, expected bitsandbytes, fp8, mxfp4, compressed-tensors, or 16"
            f" bit: pass {made_from or 'the 16-bit model that it was made from'}"
        )
    return Source(str(name), folder, tensors, content, stats, how, kind)


def on_hub(*names):
    """Return the first of names that can be one on the hub, without its revision, or None."""
    found = [re.fullmatch(r"(\w[\w.-]*/[\w.-]+)(@.*)?", str(name)) for name in names]
    return next((name[1] for name in found if name and not os.path.exists(name[0])), None)


def read_card(folder):
    """Return a folder's model card, or an empty one if it cannot be read."""
    with contextlib.suppress(Exception):  # broken YAML
        path = inside(folder, "README.md")
        if path.stat().st_size < 1e6:
            return ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    return ModelCard("---\n{}\n---\n")


def instead(path) -> str:
    """Return what to do with a file that is not read, or with a folder without weights."""
    names = os.listdir(path) if path.is_dir() else [path.name]
    for pattern, do in INSTEAD.items():
        if fnmatch.filter(names, pattern):
            return do
    if path.is_file():
        return f"pass {path.parent}"
    found = {file.parent for file in path.glob("*/*model*.safetensors*")}
    if not found:
        return "pass a folder as save_pretrained() writes it"
    *others, last = sorted(map(str, found), key=lambda name: (len(name), name))  # checkpoint-9, checkpoint-10
    return f"pass {last if '/checkpoint-' in last else ' or '.join([*others, last])}"


def inside(folder, file) -> Path:
    """Return the path of a file. A link may lead to the blobs of the same repository in the hub's cache."""
    path, folder = folder / file, folder.resolve()
    blobs = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    if not any(path.resolve().is_relative_to(place) for place in (folder, *blobs)):
        raise UnsupportedState(f"{path} leads out of its folder, expected a file in it: copy it there")
    if not path.is_file():  # reading a pipe would wait
        raise UnsupportedState(f"{path} is no regular file, expected one: download it again")
    return path


def read_json(folder, file, key=None) -> dict:
    """Return the object that a JSON file holds, or the one under a key; {} if there is none."""
    if not (folder / file).exists():
        return {}
    path = inside(folder, file)
    with library(
        f"{path} cannot be read, expected a JSON object: download it again (a git-lfs pointer: git lfs pull)"
    ):
        too_large = path.stat().st_size > LARGE
        text = "" if too_large else path.read_text(encoding="utf-8")
        if too_large or sum(text.count(mark) for mark in ",:[{") > 5e6:
            raise ValueError("it is above 100 MB or 5 million values")
        content = dict(json.loads(text))
    if key:
        content = content.get(key) or {}
    if not isinstance(content, dict):
        raise UnsupportedState(f"{key} of {path} is {content!r:.40}, expected an object: download it again")
    return content


def small_files(folder, adapter=None, model=None) -> dict:
    """Return {name in OUT: path} of tokenizer (the adapter's, if it has one), licenses, and the like."""
    found = listed(folder, SMALL)
    if adapter:
        theirs = listed(adapter, [*TOKENIZER, "*processor*.json", "value_head.*"])
        if "tokenizer_config.json" in theirs:  # of both, transformers would read the base's template
            found = {name: found[name] for name in found.keys() - listed(folder, TOKENIZER)}
        found |= theirs
        say(f"The adapter brings {', '.join(sorted(theirs)) or 'no tokenizer and no chat template'}.")
    if "tokenizer.json" in found:
        check_tokens(found["tokenizer.json"].parent, model, adapter)
    return found


def check_tokens(folder, model, adapter):
    """Warn if a tokenizer has ids for which the model has no rows. Refuse special ids of an adapter's."""
    rows, ids, special = 0, [-1], [-1]
    with contextlib.suppress(Exception):  # an unreadable tokenizer, or no embeddings
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = len(model.get_input_embeddings().weight)
        ids, special = tokenizer.get_vocab().values(), tokenizer.all_special_ids
    text = f"the tokenizer has ids up to {max(ids)}, and the model {rows} rows"
    if folder == adapter and max(special, default=-1) >= rows:
        raise UnsupportedState(f"{text}: resize before training, and save with save_embedding_layers=True")
    if max(ids) >= rows:
        say(f"Careful: {text}. Ids past them raise IndexError.")


def listed(folder, patterns) -> dict:
    """Return {name: path} of the files in a folder that fit a pattern."""
    found: dict = {}
    for path in {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}:
        name = str(path.relative_to(folder))
        if path.stat().st_size > LARGE:
            say(f"Not copied: {path} is above 100 MB.")
        elif not NOT_COPIED.fullmatch(name):
            found[name] = inside(folder, name)
    return found
