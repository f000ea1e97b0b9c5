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
LARGE = 100e6  # bytes
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
    path = fetch(source, r"\w[\w.-]*/\w[\w.-]*")
    folder = path if path.is_dir() else path.parent
    if not (folder / "adapter_config.json").exists():
        if (folder / ADAPTER[0]).exists():
            raise UnsupportedState(
                f"{folder} has {ADAPTER[0]} and no adapter_config.json: copy it there, too"
            )
        if base:
            raise UnsupportedState(
                f"{source} is not an adapter, expected one beside --base. If {base} is, type: nf4_triton export"
                f" {base} OUT --base {source}. Without an adapter, omit --base"
            )
        return read_source(source, path, WEIGHTS, "config.json"), None
    adapter = read_source(source, path, ADAPTER, "adapter_config.json")
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
    if others := subfolders(folder, "adapter_config.json"):
        say(f"Other adapters, not merged: {others}")
    return model, adapter


def fetch(name, form=r"(\w[\w.-]*/)?\w[\w.-]*") -> Path:
    """Return the path of a folder, of a file, or of what a name on the hub, such as a/b@main, stands for.

    form: of such a name. Adapters name a base such as gpt2, too.
    """
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    repository, _, revision = str(name).partition("@")
    do = "if an adapter was trained on it elsewhere, pass --base MODEL"
    if not re.fullmatch(form, repository):
        raise UnsupportedState(f"there is no folder or file {name}: check the name; {do}")
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=SMALL))
        files = {*WEIGHTS, *ADAPTER}
        for index in folder.glob("*.safetensors.index.json"):
            files |= read_index(folder, index.name).values()
        snapshot_download(repository, revision=revision or None, allow_patterns=sorted(files))
        return folder
    except (OSError, ValueError) as error:
        raise UnsupportedState(
            f"{name} is no folder or file here, and not on the hub ({error}): {do}"
        ) from error


def read_source(name, path, candidates, config) -> Source:
    """Open the first of the candidates in a folder, or a file itself."""
    folder, found = (path, None) if path.is_dir() else (path.parent, path.name)
    found = found or next((file for file in candidates if (folder / file).exists()), None)
    if not found:
        others = subfolders(folder, "*config.json")
        held = ", ".join(sorted(file.name for file in folder.iterdir())[:9])
        raise UnsupportedState(
            f"{name} has no {candidates[0]}, expected a folder as save_pretrained() writes it: "
            + (f"pass one of {others}" if others else f"it holds {held}")
        )
    if not found.endswith((".safetensors", ".index.json")):
        raise UnsupportedState(f"{name} is no .safetensors file: pass {folder}, or what a GGUF was made from")
    weight_map = read_index(folder, found) if found.endswith(".json") else {}
    tensors: dict = {}
    stats: dict = {}
    for file in sorted({*weight_map.values()}) or [found]:
        path = inside(folder, file)
        with library(f"{path} cannot be read: download it again"):
            stats[path] = path.stat().st_mtime_ns
            opened = safe_open(path, "pt")
        tensors |= dict.fromkeys(opened.keys(), opened)
    refuse(
        f"{name} lacks tensors that its index lists", sorted(weight_map.keys() - tensors), "download it again"
    )
    fields = read_json(inside(folder, config)) if (folder / config).exists() else {}
    how = an_object(fields.get("quantization_config") or {}, f"quantization_config of {folder / config}")
    kind = how.get("quant_method", "bitsandbytes")
    if kind != "bitsandbytes":
        do = "pass its original"
        if kind == "mxfp4":
            do = "load it with quantization_config=Mxfp4Config(dequantize=True), and pass what save_pretrained() writes"
        raise UnsupportedState(
            f"{name} is quantized with {kind}, expected bitsandbytes in 4 bits, or 16 bit: {do}"
        )
    return Source(str(name), folder, tensors, fields, stats)


def subfolders(folder, file) -> str:
    """Return the names of the subfolders that hold a file."""
    return ", ".join(sorted({path.parent.name for path in folder.glob(f"*/{file}")}))


def inside(folder, file) -> Path:
    """Return the path of a file. A link may lead to the blobs of the same repository in the hub's cache."""
    path, folder = folder / str(file), folder.resolve()
    blobs = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    if not any(path.resolve().is_relative_to(place) for place in (folder, *blobs)):
        raise UnsupportedState(f"{path} leads out of its folder, expected a file in it: copy it there")
    if not path.is_file():
        raise UnsupportedState(f"{path} is no regular file, expected one: download it again")
    with path.open("rb") as opened:
        if opened.read(20) == b"version https://git-":
            raise UnsupportedState(
                f"{path} is a pointer of git-lfs, expected the file: run git lfs pull there"
            )
    return path


def read_index(folder, file) -> dict:
    """Return {tensor: file} of an index."""
    weight_map = read_json(inside(folder, file)).get("weight_map")
    an_object(weight_map, f"weight_map of {folder / file}")
    return {key: str(value) for key, value in weight_map.items()}


def read_json(path) -> dict:
    """Return the object that a JSON file holds."""
    with library(f"{path} cannot be read, expected a JSON object: download it again"):
        return an_object(json.loads(path.read_text(encoding="utf-8")), path)


def an_object(value, name) -> dict:
    """Return a part of a JSON file. Refuse what is no object."""
    if not isinstance(value, dict):
        raise UnsupportedState(f"{name} is {value!r:.40}, expected a JSON object: download it again")
    return value


def small_files(folder, adapter=None, rows=None) -> dict:
    """Return {name in OUT: path} of tokenizer (the adapter's, if it has one), licenses, and the like.

    rows: how many tokens the model has.
    """
    found, theirs = listed(folder, SMALL), {}
    if adapter:
        theirs = listed(adapter, [*TOKENIZER, "*processor*.json"])
        if "tokenizer_config.json" in theirs:  # of a mix, transformers would read the base's template
            found = {name: found[name] for name in found.keys() - listed(folder, TOKENIZER)}
        found |= theirs
        whose = f"the adapter's ({', '.join(sorted(theirs))})" if theirs else "the base's"
        say(f"Tokenizer and chat template: {whose}")
    if rows:
        check_tokens(found, rows, "tokenizer_config.json" in theirs)
    return found


def check_tokens(found, rows, refused):
    """Say that a tokenizer has ids for which the model has no rows, or refuse special ones."""
    names = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
    fast, settings, added = (read_json(found[name]) if name in found else {} for name in names)
    with library("the tokenizer cannot be read: save it again"):
        vocabulary = fast.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # [token, score]
            vocabulary = {token: number for number, (token, *_) in enumerate(vocabulary)}
        ids = vocabulary | {token["content"]: token["id"] for token in fast.get("added_tokens", [])}
        ids |= {token["content"]: int(key) for key, token in settings.get("added_tokens_decoder", {}).items()}
        past = {token: number for token, number in (ids | added).items() if number >= rows}
    if not past:
        return
    text = f"the tokenizer has ids up to {max(past.values())}, and the model has {rows} rows"
    special = json.dumps(
        [value for key, value in settings.items() if key.endswith(("_token", "special_tokens"))]
    )
    if refused and any(json.dumps(token) in special for token in past):
        raise UnsupportedState(f"{text}, special tokens among them: ")
    say(f"Careful: {text}.")


def listed(folder, patterns) -> dict:
    """Return {name: path} of the files in a folder that fit a pattern."""
    found: dict = {}
    for path in {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}:
        name = str(path.relative_to(folder))
        if LEFT.fullmatch(name):
            continue
        if path.stat().st_size > LARGE:
            say(f"Not copied: {path}, which is above 100 MB")
        else:
            found[name] = inside(folder, name)
    return found
