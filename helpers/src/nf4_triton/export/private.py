"""Private names of transformers: what each is for. If a release lacks one, the model of a checkpoint cannot be
built, and the error names it. The exports of diffusers' models, and those with unchecked=True, need none."""

from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: F401
from transformers.core_model_loading import (  # noqa: F401
    WeightConverter,  # of several tensors of a file, such as experts, into one of the model
    WeightRenaming,
    build_glob_alternation,  # one pattern of several: of the parameters that stay in float32
    dot_natural_key,  # the order in which experts become one tensor
    rename_source_key,  # a tensor's name in the model, by the two kinds of steps above
    revert_weight_conversion,  # splits a merged tensor of the model into those of the file
)
from transformers.quantizers.quantizers_utils import should_convert_module  # noqa: F401


def dtype_plan(model, dtype) -> dict:
    """Return which parameters transformers loads in another dtype, T5's wo for example."""
    return model._get_dtype_plan(dtype)


def class_for(auto, config):
    """Return the class that an Auto class loads for a config. from_config() would make a whole model."""
    return auto._model_mapping.get(type(config), None)
