"""The model and its names: built on meta, without memory. Code that comes with a checkpoint is not run."""

import copy
import difflib
import json
import pathlib
import re
import tempfile

import torch
import transformers

from .private import class_for, is_transformers, should_convert_module
from .problems import UnsupportedState, library, refuse, say

TASKS = {  # PEFT's task_type: the class that loads the base for it
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}


def build(config, lora=None):
    """Return the model of a config.json on meta, of transformers or diffusers, and its config.

    lora: the Source of an adapter. If its training used another class, or other numbers of tokens or labels,
    the model and the config do, too.
    """
    unchecked = "" if lora else ", or pass --unchecked"
    if not config:
        raise UnsupportedState(
            f"config.json is missing, expected beside the weights: copy it there{unchecked}"
        )
    with (
        library(
            "no library builds the model of config.json, and code that comes with it is not run:"
            f" update transformers{unchecked if 'auto_map' in config else ''}"
        ),
        torch.device("meta"),
    ):
        if "_class_name" in config:
            import diffusers

            return getattr(diffusers, config["_class_name"]).from_config(config), config
        model = build_with_transformers(config)
        for fit in (with_class, with_sizes) if lora else ():
            fitted = fit(config, model, lora)
            if fitted is not config:
                model, config = build_with_transformers(fitted), fitted
        return model, config


def build_with_transformers(config):
    """Return the model of a config.json."""
    kind = getattr(transformers, config["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(edited(config, {})))
        settings = kind.config_class.from_pretrained(folder)
    settings._attn_implementation = "eager"  # others can be code from the hub
    return kind(settings)


def with_class(config, model, lora) -> dict:
    """Return a config with the class that training used, if that has the modules which the adapter names."""
    task = lora.config.get("task_type")
    if task == "CAUSAL_LM" and model.can_generate():
        return config
    if task in TASKS:
        kind = class_for(TASKS[task], model.config)
    else:
        mapping = lora.config.get("auto_mapping") or {}
        kind = getattr(transformers, mapping.get("base_model_class") or "", None)
    if kind is type(model) or getattr(kind, "config_class", None) is not type(model.config):
        return config
    fitted = config | {"architectures": [kind.__name__]}
    parts = {plain(key).partition(".")[0] for key in lora.tensors}
    return fitted if parts <= {*dict(build_with_transformers(fitted).named_children())} else config


def with_sizes(config, model, lora) -> dict:
    """Return a config with the numbers of tokens and labels of an adapter that holds embeddings or a head."""
    own, labels = model.state_dict(), model.config.num_labels
    for key, file in lora.tensors.items():
        new = file.get_tensor(key)
        old = own.get(plain(key), new)
        if old.dim() < 2 or not new.numel() or len(old) == len(new) or old.shape[1:] != new.shape[1:]:
            continue
        if len(old) == labels:
            model.config.num_labels = len(new)
            say(f"The adapter has {len(new)} labels without names: LABEL_0 and so on in OUT's config.")
            config = config | {"id2label": model.config.id2label, "label2id": model.config.label2id}
        else:
            config.get("text_config", config).setdefault("vocab_size", len(old))  # its class's default
            config = edited(config, {"vocab_size": len(new)}, len(old))
    return config


def plain(key) -> str:
    """Return the name that a module or tensor has in the model without PEFT."""
    wraps = r"\.(base_layer|original_module|token_adapter|modules_to_save(\.default)?)\b"
    return re.sub(wraps, "", key.removeprefix("base_model.model."))


def compare(model, likes, merged=False, training=None):
    """Check that a model can load tensors: none is missing, surplus, or of another shape."""
    with library("the model cannot load the tensors: download them again"):
        if not is_transformers(model):
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
    do = "download them again"
    if merged:
        do += (
            ". If training added tokens, save the adapter with save_embedding_layers=True, or the resized"
            " base, and pass that as --base; if it used another class, with a new head or fewer tensors than"
            " the base, save the base with that class, and pass that"
        )
    elif not training and all(problem.startswith("unexpected") for problem in problems):
        do += ", or pass --unchecked"
    refuse(f"{type(model).__name__} expects other tensors", problems, do)


def tied_names(model):
    """Return the names of each parameter: several, if it is tied."""
    groups: dict = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return groups.values()


def quantized_layers(model, how) -> set:
    """Return the names of the weights that transformers would quantize with this BitsAndBytesConfig.

    Log names to skip that fit no module: the module that was meant is quantized, too.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers.quantizers import AutoHfQuantizer

    paths = [*dict(model.named_modules())]
    for name in how.llm_int8_skip_modules or ():
        if all(should_convert_module(path, [name]) for path in paths):
            close = difflib.get_close_matches(name, {path.rpartition(".")[2] for path in paths}, 1, 0)
            say(f"--skip-modules has {name}, which is no module's name; the closest: {close[0]}.")
    copied = copy.deepcopy(model)
    copied.load_state_dict(copied.state_dict(), assign=True)  # unties: transformers asks before it ties
    AutoHfQuantizer.from_config(how, pre_quantized=False).preprocess_model(copied, device_map=None)
    return {f"{path}.weight" for path, module in copied.named_modules() if isinstance(module, Linear4bit)}


def edited(config, values, old=None) -> dict:
    """Return a copy with new values for the keys that it has, at any depth, and no quantization_config.

    old: replace only this value.
    """

    def change(part):
        part.pop("quantization_config", None)
        return part | {key: values[key] for key in values if key in part and old in (None, part[key])}

    return json.loads(json.dumps(config), object_hook=change)


def untied(config, model) -> dict:
    """Return the config of a model whose embeddings are no longer tied."""
    key, scales = "tie_word_embeddings", "scale_decoder_outputs"
    config = edited(config | {key: False}, {key: False})
    if hasattr(model.config, scales):  # T5 would derive it from tie_word_embeddings
        config[scales] = model.config.scale_decoder_outputs
    return config
