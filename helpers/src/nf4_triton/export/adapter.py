"""The adapter: which tensors of a model it changes, as PEFT says, and their values, as PEFT merges them."""

import copy
import dataclasses
import re

import torch

from ..core.state import UnsupportedState
from .problems import library, refuse

PREFIX = "base_model.model."  # of an adapter's names
# PEFT's fields that may differ from their defaults: what merging reads, and what it need not. Others could
# change the base when PEFT injects the adapter.
KNOWN = """alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config
exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform lora_alpha
lora_dropout modules_to_save peft_type peft_version r rank_pattern revision target_modules target_parameters
task_type use_dora use_rslora""".split()
STARTS = [True, False, "gaussian", "eva", "orthogonal"]  # others change the base


class Adapter:
    """A LoRA adapter in a model on meta. PEFT merges it one layer at a time."""

    def __init__(self, source, model):
        """source: the Source of the adapter."""
        name, fields = source.name, source.config
        tensors = {key: file.get_tensor(key) for key, file in source.tensors.items()}
        with library(f"PEFT cannot put {name} into {type(model).__name__}, the class of the base's config"):
            import peft
            from peft.tuners.tuners_utils import BaseTunerLayer

            config = lora_config(peft, fields)
            with torch.device("meta"):
                tuned = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
            of_transformers = hasattr(model, "base_model_prefix")
            if of_transformers:
                from peft.utils.transformers_weight_conversion import (
                    convert_peft_adapter_state_dict_for_transformers as renamed,
                )

                tensors = renamed(tuned.get_base_model(), config, tensors)
            own = {key: key for key in tuned.state_dict()}
            expected = peft.get_peft_model_state_dict(tuned, own, save_embedding_layers=False)
            allowed = peft.get_peft_model_state_dict(tuned, own, save_embedding_layers=of_transformers)
            allowed |= expected
        problems = [f"missing {key}" for key in sorted(expected.keys() - tensors)]
        problems += [f"surplus {key}" for key in sorted(tensors.keys() - allowed)]
        refuse(
            f"{name} does not hold what its config targets in {type(model).__name__}, the class of the base's"
            " config",
            problems,
            f"check base and file; its auto_mapping is {fields.get('auto_mapping')}",
        )
        values = {allowed[key]: tensors[key] for key in tensors if key not in expected}
        values |= {expected[key]: tensors[key] for key in expected}
        self.layers: dict = {}  # {parameter of the model: (PEFT's layer, its values)}
        for path, module in tuned.named_modules():
            if isinstance(module, BaseTunerLayer):
                parameter = f"{plain(path)}.{getattr(module, 'parameter_name', 'weight')}"
                names = [key for key in values if key.startswith(f"{path}.lora_")]
                own = {key.removeprefix(f"{path}."): values.pop(key) for key in names}
                self.layers[parameter] = module, own
        self.saved = {plain(key) for key in values if ".modules_to_save." in key}
        # {parameter of the model: the tensor that takes its place}
        self.given = {plain(key): value for key, value in values.items() if ".original_module." not in key}

    def merge(self, parameter, weight):
        """Return a parameter with its adapter, which PEFT adds in float32, rounding once."""
        with library(f"PEFT cannot merge {parameter}"), torch.no_grad():
            from peft.tuners.tuners_utils import cast_adapter_dtype

            module, values = self.layers[parameter]
            layer, name = copy.deepcopy(module), parameter.rpartition(".")[2]
            values = {key: value.to(weight.device) for key, value in values.items()}
            layer.load_state_dict(values, strict=False, assign=True)
            cast_adapter_dtype(layer, "default")
            base = layer.get_base_layer()
            setattr(base, name, torch.nn.Parameter(weight, requires_grad=False))
            layer.merge()
            return getattr(base, name).data


def lora_config(peft, fields):
    """Return PEFT's config. Refuse what changes the base itself."""
    if fields.get("peft_type") != "LORA":
        raise UnsupportedState(f"peft_type={fields.get('peft_type')}, expected LORA: merge it with PEFT")
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)} - {"runtime_config"}
    config = peft.LoraConfig(**{key: value for key, value in fields.items() if key in known})
    default = peft.LoraConfig()
    problems = [
        f"{key}={value}"
        for key, value in fields.items()
        if key in known and value and key not in KNOWN and value != getattr(default, key)
    ]
    if config.init_lora_weights not in STARTS:
        problems.append(f"init_lora_weights={config.init_lora_weights}")
    refuse("the adapter's config cannot be merged here", problems, "check it, or merge it with PEFT")
    config.base_model_name_or_path = None
    return config


def plain(key) -> str:
    """Return the name that a module or tensor has in the model without PEFT."""
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.default)\b", "", key.removeprefix(PREFIX))
