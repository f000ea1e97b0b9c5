"""The model and its names: built on meta, without memory. Code that comes with a checkpoint is not run."""

import contextlib
import copy
import difflib
import json
import re

import torch

from ..log import say
from .problems import library, refuse

PREFIX = "base_model.model."  # of an adapter's names
TASKS = {  # PEFT's task_type: the class that loads the base for it
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}


def build(config, adapter=None) -> tuple:
    """Return the model of a config.json on meta, of transformers or diffusers, and its config.

    adapter: a Source. If its training used another class, or other numbers of tokens or labels, so do both.
    """
    problem = "no library builds the model of config.json, and code that comes with it is not run: update"
    problem += " transformers, or pass --unchecked" if "auto_map" in config else " transformers"
    with library(problem), torch.device("meta"):
        if "_class_name" in config:
            import diffusers

            return getattr(diffusers, config["_class_name"]).from_config(config), config
        model = of_transformers(config)
        for fit in (with_class, with_sizes) if adapter else ():
            fitted = fit(config, model, adapter)
            if fitted is not config:
                model, config = of_transformers(fitted), fitted
        return model, config


def of_transformers(config):
    """Return the model of a config.json."""
    import transformers

    from . import private  # noqa: F401 (all that is needed later)

    kind = getattr(transformers, config["architectures"][0])
    fields = config.get(kind.config_class.base_config_key) or config
    settings = kind.config_class.from_dict(changed(fields, {}))
    settings._attn_implementation = "eager"  # others can be code from the hub
    return kind(settings)


def with_class(config, model, adapter) -> dict:
    """Return a config with the class that training used: the base's, if it has the adapter's modules."""
    import transformers

    from .private import class_for

    if {plain(key).partition(".")[0] for key in adapter.tensors} <= {*dict(model.named_children())}:
        return config
    if task := TASKS.get(adapter.config.get("task_type")):
        kind = class_for(getattr(transformers, task), model.config)
    else:
        mapping = adapter.config.get("auto_mapping") or {}
        kind = getattr(transformers, mapping.get("base_model_class", ""), None)
    if getattr(kind, "config_class", None) is not type(model.config):
        return config
    return config | {"architectures": [kind.__name__]}


def with_sizes(config, model, adapter) -> dict:
    """Return a config with the numbers of tokens and labels of an adapter that holds embeddings or a head."""
    own, labels = model.state_dict(), model.config.num_labels
    for key, file in adapter.tensors.items():
        old, new = own.get(plain(key)), file.get_tensor(key)
        if old is None or old.shape[:1] == new.shape[:1]:
            continue
        if len(old) == labels:
            model.config.num_labels = len(new)
            config = config | {"id2label": model.config.id2label, "label2id": model.config.label2id}
        else:
            config = changed(config, {"vocab_size": len(new)}, len(old))
    return config


def plain(key) -> str:
    """Return the name that a module or tensor has in the model without PEFT."""
    wraps = r"\.(base_layer|original_module|token_adapter|modules_to_save(\.default)?)\b"
    return re.sub(wraps, "", key.removeprefix(PREFIX))


def names_in(model, names) -> dict:
    """Return {name in a file: (its name in a model, None or the (converter, pattern) that fuses it)}."""
    if not hasattr(model, "base_model_prefix"):  # of diffusers
        return {name: (name, None) for name in names}
    from . import private

    steps, own, found = private.get_model_conversion_mapping(model), model.state_dict(), {}
    renamings = [step for step in steps if isinstance(step, private.WeightRenaming)]
    converters = [step for step in steps if isinstance(step, private.WeightConverter)]
    by_pattern = {pattern: (step, pattern) for step in converters for pattern in step.source_patterns}
    for name in names:
        target, pattern = private.rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in own and name in own:  # so does transformers
            target, pattern = name, None
        found[name] = target, by_pattern.get(pattern)
    return found


def fuse(model, target, parts) -> dict:
    """Return {name in the model: tensor} of the tensors of a file that become one.

    parts: {name in the file: (what names_in() returns, tensor)}
    """
    from .private import dot_natural_key

    names = sorted(parts, key=dot_natural_key)
    step = copy.deepcopy(parts[names[0]][0][0])
    for name in names:
        (_, pattern), tensor = parts[name]
        step.add_tensor(target, name, pattern, tensor)
    made = step.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def compare(model, likes, adapter=None, training=None):
    """Check that a model can load tensors: none is missing, surplus, or of another shape."""
    with library("the model cannot load the tensors: download them again"):
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
    do = "download them again"
    if adapter:
        do += (
            "; if training added tokens, save the adapter with save_embedding_layers=True; if it made a head, save"
            " the base with it, and pass that as --base"
        )
    elif not training and not any(found[kind] for kind in found if kind != "unexpected_keys"):
        do += ", or pass --unchecked"
    problems = [f"{kind.partition('_')[0]} {name}" for kind in found for name in found[kind]]
    refuse(f"{type(model).__name__} expects other tensors", problems, do)


def tied_names(model) -> list:
    """Return the names of each parameter: several, if it is tied."""
    groups: dict = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [*groups.values()]


def rows_of(model):
    """Return how many tokens a model knows, None if it has no such number."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings().weight.shape[0]


def quantized_layers(model, how) -> set:
    """Return the names of the weights that transformers would quantize with this BitsAndBytesConfig.

    Say which modules to skip are not there: others that should be skipped may be quantized.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers.quantizers import AutoHfQuantizer

    from .private import should_convert_module

    paths = [path for path, _ in model.named_modules()]
    for name in how.llm_int8_skip_modules or ():
        if all(should_convert_module(path, [name]) for path in paths):
            close = difflib.get_close_matches(name, {*".".join(paths).split(".")}, 1, 0)
            say(f"skip_modules has {name}, which no module is called; the closest: {', '.join(close)}.")
    copied = copy.deepcopy(model)
    copied.load_state_dict(copied.state_dict(), assign=True)  # unties: transformers asks before it ties
    AutoHfQuantizer.from_config(how, pre_quantized=False).preprocess_model(copied, device_map=None)
    return {f"{path}.weight" for path, module in copied.named_modules() if isinstance(module, Linear4bit)}


def kept_in_float32(model) -> dict:
    """Return {dtype: pattern of the parameters that transformers loads in float32 where others get it}."""
    from .private import build_glob_alternation, dtype_plan

    plans = {dtype: dtype_plan(model, dtype) for dtype in (torch.float16, torch.bfloat16)}
    return {dtype: build_glob_alternation([*plan])[0] for dtype, plan in plans.items() if plan}


def changed(config, values, old=None) -> dict:
    """Return a copy with other values where it has their keys, at any depth, and not quantized.

    old: change only what has this value.
    """

    def change(part):
        part.pop("quantization_config", None)
        return part | {key: values[key] for key in values if key in part and old in (None, part[key])}

    return json.loads(json.dumps(config), object_hook=change)


def untied(config, model) -> dict:
    """Return the config of a model whose embeddings are no longer tied."""
    key, scales = "tie_word_embeddings", "scale_decoder_outputs"
    config = changed(config | {key: False}, {key: False})
    if hasattr(model.config, scales):  # T5 would read it from the key
        config[scales] = model.config.scale_decoder_outputs
    return config
