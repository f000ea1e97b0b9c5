"""What only private names of transformers say: what the tensors of a file are called in the model, which
become one, and which stay in float32. Without one of these names the export cannot be imported, and the error
names it.
"""

import copy
import re

import torch
import transformers
from transformers.conversion_mapping import (
    get_model_conversion_mapping,  # a family's steps from file to model
)
from transformers.core_model_loading import (
    WeightConverter,  # a step that makes one tensor of several, such as experts
    WeightRenaming,  # a step that renames
    build_glob_alternation,  # one pattern of several
    dot_natural_key,  # the order in which experts become one tensor
    rename_source_key,  # the name that these steps give
    revert_weight_conversion,  # noqa: F401 (for plan.py: the steps back, from a merged tensor to those of the file)
)
from transformers.quantizers.quantizers_utils import should_convert_module  # noqa: F401 (for model.py: how names in llm_int8_skip_modules fit)


def is_transformers(model) -> bool:
    """Return whether a model is of transformers: not of diffusers, and not None."""
    return hasattr(model, "base_model_prefix")


def names_in(model, names, pruned=False) -> dict:
    """Return {name in a file: (its name in a model, None or the (converter, pattern) that fuses it)}.

    pruned: without those that the model lacks. Those that transformers ignores are left out in any case.
    """
    if not is_transformers(model):
        return {name: (name, None) for name in names}
    steps, own, found = get_model_conversion_mapping(model), model.state_dict(), {}
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: (step, pattern) for step in converters for pattern in step.source_patterns}
    # As transformers writes in from_pretrained(): buffers that older versions saved.
    ignored = "|".join(
        [r"(^|\.)position_ids$", r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())]
    )
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in own and name in own:  # so does transformers
            target, pattern = name, None
        if target in own or not (pruned or re.search(ignored, name)):
            found[name] = target, by_pattern.get(pattern)
    return found


def fuse(model, target, parts) -> dict:
    """Return {name in the model: tensor} of the tensors of a file that become one.

    parts: {name in the file: (what names_in() returns, tensor)}
    """
    names = sorted(parts, key=dot_natural_key)
    step = copy.deepcopy(parts[names[0]][0][0])
    for name in names:
        (_, pattern), tensor = parts[name]
        step.add_tensor(target, name, pattern, tensor)
    made = step.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def kept_in_float32(model) -> dict:
    """Return {dtype: pattern of the parameters that transformers loads in float32 where others get it}."""
    if not is_transformers(model):
        return {}
    plans = {dtype: model._get_dtype_plan(dtype) for dtype in (torch.float16, torch.bfloat16)}
    return {dtype: build_glob_alternation([*plan])[0] for dtype, plan in plans.items() if plan}


def class_for(auto, config):
    """Return the class that an Auto class loads for a config; from_config() would make the whole model."""
    return getattr(transformers, auto)._model_mapping.get(type(config), None)
