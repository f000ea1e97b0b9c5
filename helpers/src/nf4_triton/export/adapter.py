"""The adapter: which tensors of a model it changes, as PEFT says, and their values, as PEFT merges them."""

import contextlib
import copy

import torch

from .model import plain
from .problems import UnsupportedState, library, refuse

# PEFT's fields that may differ from their defaults: what merging reads, and what it need not. Others could
# change the base when PEFT injects the adapter, as most of init_lora_weights do.
KNOWN = """alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config
exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform lora_alpha
lora_dropout modules_to_save peft_type peft_version r rank_pattern revision target_modules target_parameters
task_type trainable_token_indices use_dora use_rslora""".split()


class Adapter:
    """A LoRA adapter in a model on meta. PEFT merges it one layer at a time."""

    def __init__(self, source, model):
        """source: the Source of the adapter."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        tuned, values = inject(source, model)
        self.layers: dict = {}  # {parameter of the model: (PEFT's layer, its values)}
        for path, module in tuned.named_modules():
            if isinstance(module, BaseTunerLayer):
                parameter = f"{plain(path)}.{getattr(module, 'parameter_name', 'weight')}"
                starts = f"{path}.lora_", f"{path}.trainable_tokens_"
                names = [key for key in values if key.startswith(starts)]
                own = {key.removeprefix(f"{path}."): values.pop(key) for key in names}
                if own:  # a tied one shares another's
                    self.layers[parameter] = module, own
        self.saved = {plain(key) for key in values if ".modules_to_save." in key}
        # {parameter of the model: the tensor that takes its place}
        self.given = {plain(key): value for key, value in values.items() if ".original_module." not in key}

    def merge(self, parameter, weight):
        """Return a parameter with its adapter, which PEFT adds in float32, rounding once."""
        with library(f"PEFT cannot merge {parameter}"), torch.no_grad():
            module, values = self.layers[parameter]
            layer, name = copy.deepcopy(module), parameter.rpartition(".")[2]
            values = {key: value.to(weight.device, torch.float32) for key, value in values.items()}
            layer.load_state_dict(values, strict=False, assign=True)
            base = layer.get_base_layer()
            setattr(base, name, torch.nn.Parameter(weight, requires_grad=False))
            layer.merge()
            return getattr(base, name).data


def inject(source, model):
    """Return (PEFT's model on meta, {name of a tensor in it: tensor}). Refuse an adapter of another model."""
    name, kind = source.name, type(model).__name__
    tensors = {key: file.get_tensor(key) for key, file in source.tensors.items()}
    with library(f"PEFT cannot put {name} into {kind}"):
        import peft

        config = lora_config(peft, source.config)
        with torch.device("meta"):
            tuned = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
        of_transformers = hasattr(model, "base_model_prefix")
        if of_transformers:
            from peft.utils.transformers_weight_conversion import (
                convert_peft_adapter_state_dict_for_transformers as renamed,
            )

            tensors = renamed(tuned.get_base_model(), config, tensors)
        likes = tuned.state_dict()
        own = {key: key for key in likes}
        allowed = expected = peft.get_peft_model_state_dict(tuned, own, save_embedding_layers=False)
        with contextlib.suppress(NotImplementedError):  # of a model without embeddings, such as CLIP
            allowed = peft.get_peft_model_state_dict(tuned, own, save_embedding_layers=of_transformers)
    do = (
        f"check base and file; its auto_mapping is {source.config.get('auto_mapping')}. If training used"
        " another class, save the base with it, and pass that as --base"
    )
    refuse(f"{name} lacks what its config targets in {kind}", sorted(expected.keys() - tensors), do)
    refuse(f"{name} holds what its config does not target in {kind}", sorted(tensors.keys() - allowed), do)
    values: dict = {}
    for names in (allowed, expected):  # a file can hold a saved module under two names
        values |= {names[key]: tensors[key] for key in names if key in tensors}
    for own, tensor in values.items():
        if tensor.shape != likes[own].shape or not tensor.is_floating_point():
            raise UnsupportedState(
                f"{own} of {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected floating point"
                f" of shape {tuple(likes[own].shape)}: check its config, and pass the base of its training"
            )
    return tuned, values


def lora_config(peft, fields):
    """Return PEFT's config. Refuse what changes the base itself, and fields that this PEFT does not know."""
    if fields.get("peft_type") != "LORA":
        raise UnsupportedState(f"peft_type={fields.get('peft_type')}, expected LORA: merge it with PEFT")
    default = peft.LoraConfig()
    problems = [
        f"{key}={value}"
        for key, value in fields.items()
        if value
        and key not in KNOWN
        and value not in [getattr(default, key, None), "gaussian", "eva", "orthogonal"]
    ]
    refuse("the adapter's config cannot be merged here", problems, "update PEFT, or merge it there")
    config = peft.LoraConfig(**{key: fields[key] for key in KNOWN if key in fields})
    config.base_model_name_or_path = None
    return config
