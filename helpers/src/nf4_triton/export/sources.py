"""What is read: a 4-bit or 16-bit checkpoint, and an adapter with the base that it was trained on."""

import dataclasses
import json
import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open

from ..core.state import UnsupportedState
from ..log import say
from .problems import library, refuse

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
# Written anew, or of a training run.
LEFT = re.compile(r"(.*\.index|config|adapter_config|trainer_state)\.json|.*_results\.\w+")


@dataclasses.dataclass
class Source:
    """A folder whose tensors are read."""

    name: str  # as it was given
    folder: Path
    tensors: dict  # {name: the open file that holds it}
    config: dict  # of the model, or of the adapter; empty if there is none
    stats: dict  # {file: when it was written}

    def check(self):
        """Raise if somebody wrote to a file since it was opened."""
        if any(path.stat().st_mtime_ns != self.stats[path] for path in self.stats):
            raise UnsupportedState(f"{self.name} changed during the export: export it again")


def find(source, base=None) -> tuple:
    """Return (Source of the model, Source of the adapter or None)."""
    folder = fetch(source)
    if not (folder.parent if folder.is_file() else folder).joinpath("adapter_config.json").is_file():
        if base:
            raise UnsupportedState(f"{source} is not an adapter, expected one beside --base: omit --base")
        return read_source(source, folder, WEIGHTS, "config.json"), None
    adapter = read_source(source, folder, ADAPTER, "adapter_config.json")
    trained_on, revision = (adapter.config.get(key) for key in ("base_model_name_or_path", "revision"))
    if not base and not trained_on:
        raise UnsupportedState(f"{source} does not say what it was trained on: pass --base MODEL")
    name = os.path.expanduser(str(base or trained_on))
    if not base and revision and not os.path.exists(name):
        name += f"@{revision}"
    model = read_source(name, fetch(name), WEIGHTS, "config.json")
    commit = f", commit {model.folder.name}" if model.folder.parent.name == "snapshots" else ""
    say(
        f"Base: {name}{commit}"
        + (f"; the adapter was trained on {trained_on}" if base and trained_on else "")
    )
    return model, adapter


def fetch(name) -> Path:
    """Return the path of a folder, of a file, or of what a name on the hub, such as a/b@main, stands for."""
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    repository, _, revision = str(name).partition("@")
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=SMALL))
        files = {*WEIGHTS, *ADAPTER}
        for index in folder.glob("*.safetensors.index.json"):
            files |= set(read_json(index, "weight_map").values())
        snapshot_download(repository, revision=revision or None, allow_patterns=sorted(files))
        return folder
    except (OSError, ValueError) as error:
        raise UnsupportedState(
            f"{name} is no folder or file here, and not on the hub ({error}): if an adapter was trained on it"
            " elsewhere, pass --base MODEL"
        ) from error


def read_source(name, path, candidates, config) -> Source:
    """Open the first of the candidates in a folder, or a file itself."""
    folder, found = (path, None) if path.is_dir() else (path.parent, path.name)
    found = found or next((file for file in candidates if (folder / file).exists()), None)
    if not found:
        held = sorted(file.name for file in folder.iterdir())
        raise UnsupportedState(
            f"{name} has no {candidates[0]}, expected a folder as save_pretrained() writes it: it holds"
            f" {', '.join(held[:9])}"
        )
    weight_map: dict = {}
    files = [found]
    if found.endswith(".json"):
        weight_map = read_json(inside(folder, found), "weight_map")
        files = sorted(set(weight_map.values()))
    tensors: dict = {}
    stats: dict = {}
    for file in files:
        with library(f"{file} cannot be read: download it again"):
            path = inside(folder, file)
            stats[path] = path.stat().st_mtime_ns
            opened = safe_open(path, "pt")
        tensors |= dict.fromkeys(opened.keys(), opened)
    refuse(
        f"{name} lacks tensors that its index lists", sorted(weight_map.keys() - tensors), "download it again"
    )
    fields = read_json(inside(folder, config)) if (folder / config).exists() else {}
    kind = (fields.get("quantization_config") or {}).get("quant_method", "bitsandbytes")
    if kind != "bitsandbytes":
        raise UnsupportedState(
            f"{name} is quantized with {kind}, expected bitsandbytes in 4 bits, or 16 bit: pass its original"
        )
    return Source(str(name), folder, tensors, fields, stats)


def inside(folder, file) -> Path:
    """Return the path of a file. A link may lead to the blobs of the same repository in the hub's cache."""
    path, folder = folder / str(file), folder.resolve()
    blobs = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    if not any(path.resolve().is_relative_to(place) for place in (folder, *blobs)):
        raise UnsupportedState(f"{path} leads out of its folder, expected a file in it: copy it there")
    return path


def read_json(path, key=None) -> dict:
    """Return the object that a JSON file holds, or the one under a key of it."""
    with library(f"{path} cannot be read, expected a JSON object: download it again"):
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content[key] if key else content)


def small_files(folder, adapter=None) -> dict:
    """Return {name in OUT: path} of tokenizer (the adapter's, if it has one), licenses, and the like."""
    found = listed(folder, SMALL)
    if adapter:
        theirs = listed(adapter, [*TOKENIZER, "*processor*.json"])
        if "tokenizer_config.json" in theirs:  # of a mix, transformers would read the base's template
            found = {name: found[name] for name in found.keys() - listed(folder, TOKENIZER)}
        found |= theirs
        whose = f"the adapter's ({', '.join(sorted(theirs))})" if theirs else "the base's"
        say(f"Tokenizer and chat template: {whose}")
    return found


def listed(folder, patterns) -> dict:
    """Return {name: path} of the files in a folder that fit a pattern."""
    found = {str(path.relative_to(folder)): path for pattern in patterns for path in folder.glob(pattern)}
    return {
        name: inside(folder, name)
        for name, path in found.items()
        if path.is_file() and not LEFT.fullmatch(name)
    }
