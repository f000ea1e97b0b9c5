"""What is read: a 4-bit or 16-bit checkpoint, and an adapter with the base that it was trained on."""

import dataclasses
import json
import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from ..core.state import UnsupportedState
from ..log import say

WEIGHTS = (  # in the order in which transformers, or diffusers, looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)
ADAPTER = ("adapter_model.safetensors",)
TOKENIZER = """additional_chat_templates/* added_tokens.json chat_template* merges.txt special_tokens_map.json
tokenizer* vocab* *.model *.tiktoken""".split()
SMALL = [*TOKENIZER, *"*.json *.jinja */*.jinja *.py *.txt LICENSE* NOTICE* USE_POLICY*".split()]
# Written anew, or of a training run.
LEFT = re.compile(r"(.*\.index|config|adapter_config|trainer_state|.*_results)\.json")
# A folder without the weights that are looked for: what it holds instead, and what to do.
INSTEAD = {
    "adapter_config.json": "is an adapter: pass it as SOURCE, its base as --base. For a second one, export"
    " the first one, then pass that folder as --base",
    "*.gguf": "holds GGUF, which is no longer in bitsandbytes' 4 bits: pass what it was made from",
    "*.bin": "holds .bin files, which can run code: load and save it with save_pretrained(), which writes"
    " safetensors",
}


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
        if stat(self.stats) != self.stats:
            raise UnsupportedState(f"{self.name} changed during the export: export it again")


def find(source, base=None) -> tuple:
    """Return (Source of the model, Source of the adapter or None)."""
    folder = fetch(source)
    if not (folder.parent if folder.is_file() else folder).joinpath("adapter_config.json").is_file():
        if base:
            raise UnsupportedState(f"{source} is not an adapter, expected one beside --base: omit --base")
        return open_model(source, folder), None
    adapter = read_source(source, folder, ADAPTER, "adapter_config.json")
    trained_on, revision = (adapter.config.get(key) for key in ("base_model_name_or_path", "revision"))
    if not base and not trained_on:
        raise UnsupportedState(f"{source} does not say what it was trained on: pass --base MODEL")
    name = os.path.expanduser(base or trained_on)
    if not base and revision and not os.path.exists(name):
        name += f"@{revision}"
    if not base and re.match(r"[./~\\]|\w:|([^/]*/){2}", name) and not Path(name).exists():
        raise UnsupportedState(
            f"{source} was trained on {name}, a folder that is not here: pass --base MODEL"
        )
    model = open_model(name, fetch(name))
    commit = f", commit {model.folder.name}" if model.folder.parent.name == "snapshots" else ""
    say(f"Base: {name}{commit}" + (f"; the adapter was trained on {trained_on}" if base else ""))
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
        files |= set(module_files(folder))
        snapshot_download(repository, revision=revision or None, allow_patterns=sorted(files))
        return folder
    except (OSError, ValueError) as error:
        raise UnsupportedState(f"{name} is no folder, no file, and not on the hub: {error}") from error


def open_model(name, path) -> Source:
    """Return the Source of a model that bitsandbytes quantized in 4 bits, or nobody did."""
    source = read_source(name, path, WEIGHTS, "config.json")
    how = source.config.get("quantization_config") or {}
    kind = "8-bit bitsandbytes" if how.get("load_in_8bit") else how.get("quant_method") or "bitsandbytes"
    if kind != "bitsandbytes":
        raise UnsupportedState(
            f"{name} is quantized with {kind}, expected bitsandbytes in 4 bits, or 16 bit: pass its original"
        )
    return source


def read_source(name, path, candidates, config) -> Source:
    """Open the first of the candidates in a folder, or a file itself."""
    folder, found = (path, None) if path.is_dir() else (path.parent, path.name)
    found = found or next((file for file in candidates if (folder / file).exists()), None)
    if not found:
        raise UnsupportedState(f"{name} {what_instead(folder, candidates)}")
    weight_map: dict = {}
    files = [found]
    if found.endswith(".json"):
        weight_map = read_json(inside(folder, found), "weight_map")
        files = sorted(set(weight_map.values()))
    paths = [inside(folder, file) for file in files]
    stats = stat(paths)
    tensors = open_files(paths)
    refuse(
        f"{name} lacks tensors that its index lists", sorted(weight_map.keys() - tensors), "download it again"
    )
    fields = read_json(inside(folder, config)) if (folder / config).exists() else {}
    return Source(str(name), folder, tensors, fields, stats)


def what_instead(folder, candidates) -> str:
    """Return what a folder holds in place of weights, and what to do."""
    for pattern, text in INSTEAD.items():
        if next(folder.glob(pattern), None) and candidates != ADAPTER:
            return text
    parts = [*folder.glob("*/adapter_config.json"), *folder.glob("*/config.json")]
    if names := sorted({part.parent.name for part in parts}):
        return f"holds several ({', '.join(names)}): pass one of them"
    return f"has no {candidates[0]}, expected safetensors: save it with save_pretrained()"


def inside(folder, file) -> Path:
    """Return the path of a file. A link may lead to the blobs of the same repository in the hub's cache."""
    path, folder = folder / str(file), folder.resolve()
    blobs = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    if not path.is_file():
        raise UnsupportedState(f"{path} is missing, expected a file: download it again")
    if not any(path.resolve().is_relative_to(place) for place in (folder, *blobs)):
        raise UnsupportedState(f"{path} leads out of its folder, expected a file in it: copy it there")
    return path


def read_json(path, key=None) -> dict:
    """Return the object that a JSON file holds, or the one under a key of it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content[key] if key else content)
    except (LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise UnsupportedState(
            f"{path} cannot be read ({error}), expected a JSON object: download it again"
        ) from error


def open_files(files) -> dict:
    """Return {name of a tensor: the open file that holds it}. Nothing is read yet."""
    found: dict = {}
    for file in files:
        try:
            opened = safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise UnsupportedState(f"{file} cannot be read ({error}): download it again") from error
        found.update(dict.fromkeys(opened.keys(), opened))
    return found


def stat(files) -> dict:
    """Return {file: when it was written}."""
    return {file: file.stat().st_mtime_ns for file in files}


def refuse(what, problems, do):
    """Raise if there are problems. Name the first ones, and what to do."""
    if problems:
        raise UnsupportedState(f"{what} ({len(problems)}): {', '.join(problems[:5])}; {do}")


def small_files(folder, adapter=None) -> dict:
    """Return {name in OUT: path} of tokenizer (the adapter's, if it has one), licenses, and the like."""
    found = listed(folder, [*SMALL, *module_files(folder)])
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


def module_files(folder) -> list:
    """Return patterns of the files that sentence-transformers' modules.json names."""
    if not (folder / "modules.json").exists():
        return []
    modules = json.loads(inside(folder, "modules.json").read_text(encoding="utf-8"))
    return [f"{module['path']}/*" for module in modules if module.get("path")]
