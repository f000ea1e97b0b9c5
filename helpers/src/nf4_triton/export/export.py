"""Write a checkpoint with 4-bit weights in 16 bit, tensor by tensor, and merge a LoRA adapter into it.

transformers or diffusers says what the tensors of a model are; PEFT merges, one layer at a time.
"""

import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from ..backend import dequantize
from ..core.state import UnsupportedState
from .checkpoint import PART, read_checkpoint

WEIGHTS = (  # in the order in which transformers, or diffusers, looks for them
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)
SMALL = "*.json *.jinja */*.jinja *.model *.py *.tiktoken *.txt".split()  # tokenizer and the like
FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
TYPES = FLOATS | {torch.bool: "BOOL", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}
PREFIX = "base_model.model."  # of an adapter's names
# Fields of adapter_config.json: what PEFT needs to merge a layer, and what may be set beside it.
MERGED = "alpha_pattern fan_in_fan_out lora_alpha r rank_pattern use_dora use_rslora".split()
OTHERS = """auto_mapping base_model_name_or_path bias eva_config exclude_modules inference_mode
init_lora_weights layers_pattern layers_to_transform lora_dropout megatron_core modules_to_save peft_type
peft_version qalora_group_size revision target_modules task_type""".split()
STARTS = [True, False, "gaussian", "eva", "orthogonal"]  # others change the base
VALUES = {"peft_type": ["LORA"], "init_lora_weights": STARTS}


@dataclasses.dataclass
class Result:
    """A tensor of the new checkpoint."""

    source: str  # its name in the old one
    like: torch.Tensor  # on meta: its shape and dtype
    target: str = ""  # its name in the model; empty if unknown, or if it becomes a part of another tensor
    transposed: bool = False  # Conv1D holds the transposed weight, in 16 bits alone
    given: tuple = ()  # the adapter's tensor that takes its place, if there is one
    layers: tuple = ()  # of which the adapter is merged into it: the names of their weights in the model


def export_checkpoint(out, model, adapter=None, dtype=None, shard_size="5GB", unchecked=False) -> tuple:
    """Write a checkpoint with 4-bit weights in 16 bit into a new folder, bit-identical to bitsandbytes.

    out: the folder. It appears when it is complete.
    model: a folder or a .safetensors file of transformers or diffusers, or a name on the hub. Code that
    comes with it is not run.
    adapter: LoRA, in the same forms. The result is that of PEFT's merge_and_unload() on the dequantized
    model, on the same device.
    dtype: "float16" or "bfloat16" for all. Default: quant_state.dtype, and that of what is copied.
    shard_size: the most bytes in a file, such as "5GB".
    unchecked: do not compare names and shapes with the model that transformers or diffusers builds.
    Every tensor is dequantized, copied because it is in floating point (or an integer in the model, too), or
    refused by name.
    Returns how many tensors were written, dequantized, and changed by the adapter.
    Raises UnsupportedState (a ValueError) for what is refused, OSError if OUT cannot be written.
    """
    out = Path(out)
    if os.path.lexists(out) or not out.parent.is_dir():
        raise UnsupportedState(f"{out} exists, or its parent does not: pass the name of a new folder")
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[KMGT]B", str(shard_size)):
        raise UnsupportedState(f"shard_size is {shard_size}, expected a size such as 5GB or 500MB")
    dtype = dtype and str(dtype).removeprefix("torch.")
    if dtype and getattr(torch, dtype, None) not in FLOATS:
        raise UnsupportedState(f"dtype is {dtype}, expected float16 or bfloat16")
    folder, files = locate(model, WEIGHTS)
    checkpoint = Checkpoint(files, dtype and getattr(torch, dtype))
    quantized = [keys for keys in checkpoint.keys.values() if len(keys) > 1]
    if not quantized:
        raise UnsupportedState(f"{model} has no weights that bitsandbytes saved in 4 bits: use it as it is")
    config, built = {}, None
    if adapter or not unchecked or (folder / "config.json").exists():
        config = read_json(inside(folder, "config.json"))
        config = changed(config, ["dtype", "torch_dtype"] if dtype else [], dtype)
    if adapter or not unchecked:
        built = build(folder, config)
    checkpoint.connect(built)
    if built:
        compare(built, checkpoint.results)
    if adapter:
        checkpoint.adapter = Adapter(adapter, built, checkpoint)
        if checkpoint.adapter.unties:
            config = untied(config, built)
    write(out, folder, config, checkpoint, shard_size)
    merged = [name for name, result in checkpoint.results.items() if result.given or result.layers]
    return len(checkpoint.results), len(quantized), len(merged)


def locate(name, candidates) -> tuple:
    """Return (folder, its safetensors files) of a folder, a file, or a name on the hub."""
    folder = Path(name)
    if folder.is_file():
        return folder.parent, [inside(folder.parent, folder.name)]
    if not folder.is_dir():
        try:
            wanted, unwanted = ["*.safetensors", *SMALL], "*/*.safetensors"
            folder = Path(snapshot_download(str(name), allow_patterns=wanted, ignore_patterns=unwanted))
        except (OSError, ValueError) as error:
            raise UnsupportedState(f"{name} is no folder, no file, and not on the hub: {error}") from error
    for file in candidates:
        if (folder / file).exists():
            files = [file]
            if file.endswith(".json"):
                files = sorted(set(read_json(inside(folder, file), "weight_map").values()))
            return folder, [inside(folder, file) for file in files]
    raise UnsupportedState(f"{name} has no {candidates[0]}, expected safetensors: pass their folder")


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


def changed(config, keys, value) -> dict:
    """Return a config with another value where it has one of the keys, at any depth, and not quantized."""

    def change(part):
        part.pop("quantization_config", None)
        return {key: value if key in keys else old for key, old in part.items()}

    return json.loads(json.dumps(config), object_hook=change)


def untied(config, model) -> dict:
    """Return the config of a model whose embeddings are no longer tied."""
    key, scales = "tie_word_embeddings", "scale_decoder_outputs"
    config = changed(config | {key: False}, [key], False)
    if hasattr(model.config, scales):  # T5 would read it from the key
        config[scales] = model.config.scale_decoder_outputs
    return config


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


def refuse(what, problems, do):
    """Raise if there are problems. Name the first ones, and what to do."""
    if problems:
        raise UnsupportedState(f"{what} ({len(problems)}): {', '.join(problems[:5])}; {do}")


@contextlib.contextmanager
def quiet(problem):
    """Hold back what transformers and PEFT print, and raise what they raise as an UnsupportedState."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        raise UnsupportedState(f"{problem} ({type(error).__name__}: {error})") from error
    finally:
        logging.disable(before)


def build(folder, config):
    """Return a model of transformers or diffusers on meta. Code that comes with a checkpoint is not run."""
    problem = "no library builds the model of config.json: update transformers, or pass --unchecked"
    with quiet(problem), torch.device("meta"):
        if "_class_name" in config:
            import diffusers

            return getattr(diffusers, config["_class_name"]).from_config(config)
        import transformers
        from transformers.utils.versions import require_version

        require_version("transformers>=5.15")
        kind = getattr(transformers, config["architectures"][0])
        settings = kind.config_class.from_pretrained(folder)
        if hasattr(settings, "quantization_config"):
            del settings.quantization_config
        return kind(settings)


def names_in(model, names) -> dict:
    """Return {name in a file: its name in a model, "" if it becomes a part of another tensor}."""
    if not hasattr(model, "base_model_prefix"):  # of diffusers
        return {name: name for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    steps, own, found = get_model_conversion_mapping(model), model.state_dict(), {}
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    for name in sorted(names):
        target, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in own and name in own:
            target, converted = name, None
        found[name] = "" if converted else target
    return found


def compare(model, results):
    """Check that a model can load the results: none is missing, surplus, or of another shape."""
    likes = {name: result.like for name, result in results.items()}
    with quiet("the model cannot load the tensors: download them again, or pass --unchecked"):
        if not hasattr(model, "base_model_prefix"):  # of diffusers
            model.load_state_dict(likes, assign=True)
            return
        _, found = model.from_pretrained(
            None,
            config=model.config,
            state_dict=likes,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    problems = [f"{kind.partition('_')[0]} {name}" for kind in found for name in found[kind]]
    refuse("the model expects other tensors", problems, "download them again, or pass --unchecked")


class Checkpoint:
    """The tensors of a checkpoint, which are read, dequantized, and merged when they are asked for."""

    def __init__(self, files, dtype):
        self.files, self.dtype, self.adapter = open_files(files), dtype, None
        self.keys: dict = {}  # {name: itself, and of a 4-bit weight the tensors of its state}
        self.results = {}  # {name: Result}
        for key in self.files:
            part = PART.fullmatch(key)
            self.keys.setdefault(part[1] if part else key, []).append(key)
        for name in self.keys:
            tensor, state = self.read(name)
            old = state or tensor
            new = dtype if dtype and old.dtype.is_floating_point else old.dtype
            self.results[name] = Result(name, torch.empty(old.shape, dtype=new, device="meta"))

    def read(self, name, device="cpu") -> tuple:
        """Return (tensor, None), or (packed codes, quant_state) of a 4-bit weight on a device."""
        if self.keys[name] == [name]:
            return self.files[name].get_tensor(name), None
        tensors = {key: self.files[key].get_tensor(key).to(device) for key in self.keys[name]}
        return read_checkpoint(tensors, name)

    def connect(self, model):
        """Find the results in a model, if there is one. Refuse what is not in floating point."""
        own = model.state_dict() if model else {}
        targets = names_in(model, self.results) if model else {}
        for name, result in self.results.items():
            types = FLOATS
            if targets.get(name) in own:
                result.target = targets[name]
                owner = model.get_submodule(result.target.rpartition(".")[0])
                if len(self.keys[name]) > 1 and type(owner).__name__ == "Conv1D":
                    result.transposed, result.like = True, result.like.t()
                if not own[result.target].is_floating_point():
                    types = TYPES
            if result.like.dtype not in types:
                raise UnsupportedState(
                    f"{name} is {result.like.dtype}, expected a floating-point tensor, or a 4-bit weight with"
                    " its state: dequantize it with the library that quantized it"
                )

    def convert(self, name):
        """Return a tensor of the new checkpoint."""
        result = self.results[name]
        like = result.like
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tensor, state = self.read(result.source, device)
        if state:
            try:
                tensor = dequantize(tensor, state, dtype=like.dtype)
            except UnsupportedState as error:
                raise UnsupportedState(f"{name}: {error}") from error
        if result.transposed:
            tensor = tensor.t().contiguous()
        for key in result.given:
            tensor = self.adapter.files[key].get_tensor(key)
        tensor = tensor.to(like.dtype)
        for layer in result.layers:
            with quiet(f"PEFT cannot merge {name}"):
                mapped = bool(result.given) or not state  # PEFT would write into the file's pages
                tensor = tensor.to(device, copy=mapped)
                tensor = self.adapter.merge(layer.removesuffix(".weight"), tensor)
        if tensor.shape != like.shape:
            raise UnsupportedState(
                f"{name} becomes {tuple(tensor.shape)}, expected {tuple(like.shape)}: if the adapter has new"
                " tokens, export the model alone, then resize_token_embeddings() and merge with PEFT"
            )
        if like.numel() and (result.layers or like.dtype == self.dtype):
            if not torch.stack(tensor.aminmax()).isfinite().all():  # 30 times as fast as isfinite on a CPU
                raise UnsupportedState(
                    f"{name} is not finite in {like.dtype}, expected numbers: check adapter and dtype"
                )
        return tensor


class Adapter:
    """A LoRA adapter, of which PEFT merges one layer at a time."""

    def __init__(self, name, model, checkpoint):
        """Note in the results what changes them. Add those that a saved copy unties."""
        results = checkpoint.results
        folder, files = locate(name, ["adapter_model.safetensors"])
        self.model, self.files = model, open_files(files)
        self.fields = read_json(inside(folder, "adapter_config.json"))
        problems = [
            f"{key}={value}"
            for key, value in self.fields.items()
            if (value and key not in MERGED + OTHERS)
            or value not in VALUES.get(key, [value])
            or (key in ("r", "lora_alpha") and (value is None or value != value))
        ]
        stored = {result.target: name for name, result in results.items()}
        tied = tied_names(model, stored, checkpoint.convert)
        self.layers, given = {}, {}  # {weight in the model: its LoRA tensors}, {parameter: what replaces it}
        # Without the originals of saved copies, which PEFT may have saved, too.
        plain = {key: plain_name(key) for key in self.files if ".original_module." not in key}
        targets = names_in(model, plain.values())
        for key, parameter in plain.items():
            target = targets[parameter]
            if target not in tied or not key.startswith(PREFIX):
                problems.append(key)
            elif ".lora_" in key:
                self.layers.setdefault(target, []).append(key)
            else:
                given[target] = key
        refuse(f"{name} cannot be merged here", problems, "check it, or merge it with PEFT")
        modules = [f"{module}." for module in self.fields.get("modules_to_save") or ()]  # or ends of names
        saved = {target for target in given if any(module in target for module in modules)}
        self.unties = False
        for name, result in list(results.items()):
            names = tied.get(result.target, [])
            rest = [target for target in names if target not in saved]
            others = []
            if len(rest) < len(names) > 1:
                self.unties = True
                others = [target for target in names if target not in stored]
            for target in [result.target, *others]:
                own = rest if target in rest else [target]
                results[name if target == result.target else target] = dataclasses.replace(
                    result,
                    target=target,
                    given=[given[other] for other in own if other in given],
                    layers=[other for other in own if other in self.layers],
                )

    def merge(self, path, weight):
        """Return a layer's weight with its adapter, which PEFT adds in float32, rounding once."""
        import peft
        from transformers.utils.versions import require_version

        require_version("peft>=0.20")
        module = root = self.model.get_submodule(path)
        own, module.weight = module.weight, torch.nn.Parameter(weight, requires_grad=False)
        for part in reversed(path.split(".")):  # PEFT's patterns look at full names
            parent = torch.nn.Module()
            parent.add_module(part, root)
            root = parent
        fields = {key: self.fields[key] for key in MERGED if key in self.fields}
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[path], **fields), root)
        for name, parameter in root.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        tensors = {}
        for key in self.layers[f"{path}.weight"]:
            tensors[f"{path}.lora_{key.partition('.lora_')[2]}"] = self.files[key].get_tensor(key)
        expected = peft.get_peft_model_state_dict(root, save_embedding_layers=False)
        refuse("its tensors do not fit its config", sorted(tensors.keys() ^ expected), "merge it with PEFT")
        peft.set_peft_model_state_dict(root, tensors)
        root.get_submodule(path).merge()
        merged, module.weight = module.weight.data, own
        return merged


def plain_name(key) -> str:
    """Return the name of the parameter that a tensor of an adapter changes."""
    name = re.sub(r"\.(base_layer|modules_to_save)\b", "", key.removeprefix(PREFIX))
    return re.sub(r"\.lora_.*", ".weight", name)


def tied_names(model, stored, convert) -> dict:
    """Return {parameter that is stored, or tied to such a one: the names of all that are tied to it}."""
    groups: dict = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    found = {}
    for names in groups.values():
        there = [name for name in names if name in stored]
        if len(there) > 1:  # transformers ties them if they are equal
            first = convert(stored[there[0]])
            apart = [name for name in there[1:] if not first.equal(convert(stored[name]).to(first))]
            found.update({name: [name] for name in apart})
            names = [name for name in names if name not in apart]
        if there:
            found.update({name: names for name in names})
    return found


def write(out, folder, config, checkpoint, shard_size):
    """Write all results and the small files of a folder. OUT appears when all is there."""
    stem = "diffusion_pytorch_model" if "_class_name" in config else "model"
    pattern = stem + "{suffix}.safetensors"
    likes = {name: result.like for name, result in checkpoint.results.items()}
    plan = split_torch_state_dict_into_shards(likes, filename_pattern=pattern, max_shard_size=shard_size)
    size = plan.metadata["total_size"]
    with (
        tempfile.TemporaryDirectory(dir=out.parent) as work,
        tqdm(total=size, unit="B", unit_scale=True, desc=out.name) as bar,
    ):
        done = Path(work, "done")
        done.mkdir()
        for file in [path.relative_to(folder) for pattern in SMALL for path in folder.glob(pattern)]:
            if not re.search("index.json|adapter_config", file.name):
                (done / file).parent.mkdir(exist_ok=True)
                shutil.copyfile(inside(folder, file), done / file)
        if config:
            (done / "config.json").write_text(json.dumps(config, indent=2))
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (done / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for file, names in plan.filename_to_tensors.items():
            write_file(done / file, {name: likes[name] for name in names}, checkpoint.convert, bar)
        done.rename(out)


def write_file(path, likes, convert, bar):
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
            content = convert(name).contiguous().view(-1).view(torch.uint8)
            if content.is_cuda:  # torch reuses pinned memory; fresh memory costs more than the copy
                content = torch.empty_like(content, device="cpu", pin_memory=True).copy_(content)
            bar.update(written.result())
            written = pool.submit(file.write, content.numpy())
        bar.update(written.result())
