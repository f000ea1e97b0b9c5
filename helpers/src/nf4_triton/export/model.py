"""The model and its names: built on meta, without memory. Code that comes with a checkpoint is not run."""

import copy
import json
import re

import torch

from .problems import library, refuse


def build(folder, config):
    """Return the model of a folder's config.json on meta, of transformers or diffusers."""
    problem = "no library builds the model of config.json, and code that comes with it is not run: update"
    with library(f"{problem} transformers, or pass --unchecked"), torch.device("meta"):
        if "_class_name" in config:
            import diffusers

            return getattr(diffusers, config["_class_name"]).from_config(config)
        import transformers

        kind = getattr(transformers, config["architectures"][0])
        settings = kind.config_class.from_pretrained(folder)
        settings._attn_implementation = "eager"  # others can be code from the hub
        if hasattr(settings, "quantization_config"):
            del settings.quantization_config
        return kind(settings)


def names_in(model, names) -> dict:
    """Return {name in a file: (its name in a model, None or the (converter, pattern) that fuses it)}."""
    if not hasattr(model, "base_model_prefix"):  # of diffusers
        return {name: (name, None) for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    steps, own, found = get_model_conversion_mapping(model), model.state_dict(), {}
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: (step, pattern) for step in converters for pattern in step.source_patterns}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in own and name in own:  # so does transformers
            target, pattern = name, None
        found[name] = target, by_pattern.get(pattern)
    return found


def fuse(model, target, parts) -> dict:
    """Return {name in the model: tensor} of the tensors of a file that become one.

    parts: {name in the file: (what names_in() returns, tensor)}
    """
    from transformers.core_model_loading import dot_natural_key

    names = sorted(parts, key=dot_natural_key)
    step = copy.deepcopy(parts[names[0]][0][0])
    for name in names:
        (_, pattern), tensor = parts[name]
        step.add_tensor(target, name, pattern, tensor)
    made = step.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def compare(model, likes):
    """Check that a model can load tensors: none is missing, surplus, or of another shape."""
    with library("the model cannot load the tensors: download them again, or pass --unchecked"):
        if not hasattr(model, "base_model_prefix"):  # of diffusers
            model.load_state_dict(likes, assign=True)
            return
        _, found = model.from_pretrained(
            None,
            config=model.config,
            state_dict=likes,
            device_map={"": "meta"},
            dtype=torch.get_default_dtype(),  # with another one, transformers would set it for all threads
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    problems = [f"{kind.partition('_')[0]} {name}" for kind in found for name in found[kind]]
    refuse("the model expects other tensors", problems, "download them again, or pass --unchecked")


def tied_names(model) -> list:
    """Return the names of each parameter: several, if it is tied."""
    groups: dict = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [*groups.values()]


def quantized_layers(model, how) -> set:
    """Return the names of the weights that transformers would quantize with this BitsAndBytesConfig."""
    from bitsandbytes.nn import Linear4bit
    from transformers.quantizers import AutoHfQuantizer

    copied = copy.deepcopy(model)
    AutoHfQuantizer.from_config(how, pre_quantized=False).preprocess_model(copied, device_map=None)
    return {f"{path}.weight" for path, module in copied.named_modules() if isinstance(module, Linear4bit)}


def kept_in_float32(model, dtype):
    """Return a pattern of the parameters that transformers loads in float32 where others get a dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    return build_glob_alternation(list(plan))[0] if plan else re.compile("(?!)")


def changed(config, values) -> dict:
    """Return a config with other values where it has their keys, at any depth, and not quantized."""

    def change(part):
        part.pop("quantization_config", None)
        return {key: values.get(key, old) for key, old in part.items()}

    return json.loads(json.dumps(config), object_hook=change)


def untied(config, model) -> dict:
    """Return the config of a model whose embeddings are no longer tied."""
    key, scales = "tie_word_embeddings", "scale_decoder_outputs"
    config = changed(config | {key: False}, {key: False})
    if hasattr(model.config, scales):  # T5 would read it from the key
        config[scales] = model.config.scale_decoder_outputs
    return config
