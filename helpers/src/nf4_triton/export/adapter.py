"""The adapter: which tensors of a model it changes, as PEFT says, and their values, as PEFT merges them."""

import contextlib
import copy
import re

import torch

from .model import plain
from .private import is_transformers, names_in
from .problems import UnsupportedState, library, refuse

# PEFT's fields that may differ from their defaults, whether merging reads them or not. Others could change
# the base when PEFT injects the adapter, as most values of init_lora_weights do.
KNOWN = """alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config
exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform lora_alpha
lora_dropout modules_to_save peft_type peft_version r rank_pattern revision target_modules target_parameters
task_type trainable_token_indices use_dora use_rslora""".split()
# What follows a module's name in the name of a tensor.
END = re.compile(r"\.((lora_|trainable_tokens_|token_adapter\.|base_layer\.).*|\w+)\Z")


class Adapter:
    """A LoRA adapter in a model on meta. PEFT merges it one parameter at a time."""

    def __init__(self, lora, model):
        """lora: the Source of the adapter."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        tuned, values = inject(lora, model)
        layers = {path: layer for path, layer in tuned.named_modules() if isinstance(layer, BaseTunerLayer)}
        held: dict = {}  # {PEFT's layer: (the layer, its values)}
        for path, layer in layers.items():
            names = [key for key in values if key.startswith((f"{path}.lora_", f"{path}.trainable_tokens_"))]
            held[layer] = layer, {key.removeprefix(f"{path}."): values.pop(key) for key in names}
        # {parameter of the model: [(PEFT's layer, its values), then what that one wraps, ...]}
        self.layers: dict = {}
        for path, layer in layers.items():
            parameter = f"{plain(path)}.{getattr(layer, 'parameter_name', 'weight')}"
            one = held[getattr(layer, "tied_adapter", None) or layer]  # a tied layer has another's tokens
            if one[1]:
                self.layers.setdefault(parameter, []).append(one)
        self.saved = {plain(key) for key in values if ".modules_to_save." in key}
        # {parameter of the model: the tensor that takes its place}
        self.given = {plain(key): value for key, value in values.items() if ".original_module." not in key}
        self.parameters = self.layers.keys() | self.given.keys()

    def base_of(self, name, tied):
        """Return the tensor that takes the place of a parameter that is tied to others, or None."""
        shared = [name] if name in self.saved else [other for other in tied if other not in self.saved]
        return next((self.given[other] for other in shared if other in self.given), None)

    def alike(self, tied) -> bool:
        """Return whether tied parameters change alike. On a 16-bit base, PEFT's own tie can be lost."""
        first, *others = [self.change(name) for name in tied]
        return all(len(other) == len(first) and all(map(torch.equal, other, first)) for other in others)

    def change(self, name) -> list:
        """Return the tensors that say how a parameter changes."""
        found = [self.given[name]] if name in self.saved else []
        for layer, values in self.layers.get(name, []):
            tensors = [*values.values()]
            if getattr(layer, "lora_embedding_A", None):  # transposed: as of a linear layer
                tensors = [tensor.t() for tensor in reversed(tensors)]
            facts = getattr(layer, "scaling", None) or layer.token_indices
            found += [*tensors, torch.tensor([*facts.values()])]
        return found

    def merge(self, parameter, weight):
        """Return a parameter with its adapter, which PEFT adds in float32, rounding once for each layer."""
        name, layers = parameter.rpartition(".")[2], self.layers[parameter]
        with library(f"PEFT cannot merge {parameter}: pass the base of its training"), torch.no_grad():
            for module, values in reversed(layers):  # tokens, then LoRA on them, as training computes it
                layer = copy.deepcopy(module)
                layer.base_layer = base = copy.deepcopy(layers[-1][0].get_base_layer())
                values = {key: value.to(weight.device, torch.float32) for key, value in values.items()}
                layer.load_state_dict(values, strict=False, assign=True)
                setattr(base, name, torch.nn.Parameter(weight, requires_grad=False))
                layer.merge()
                weight = getattr(base, name).data
            return weight


def inject(lora, model):
    """Return (PEFT's model on meta, {name of a tensor in it: tensor}). Refuse an adapter of another model."""
    name, kind = lora.name, type(model).__name__
    tensors = {key: file.get_tensor(key) for key, file in lora.tensors.items()}
    with library(f"PEFT cannot put {name} into {kind}"):
        import peft

        config = lora_config(peft, lora.config)
        with torch.device("meta"):
            tuned = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
        if is_transformers(model):
            from peft.utils.transformers_weight_conversion import (
                convert_peft_adapter_state_dict_for_transformers as renamed,
            )

            tensors = renamed(tuned.get_base_model(), config, with_names_of_today(tensors, model))
        likes = tuned.state_dict()
        own = {key: key for key in likes}
        allowed = expected = peft.get_peft_model_state_dict(tuned, own, save_embedding_layers=False)
        with contextlib.suppress(NotImplementedError):  # of a model without embeddings, such as CLIP
            allowed = peft.get_peft_model_state_dict(tuned, own, save_embedding_layers=is_transformers(model))
    do = (
        f"check base and file; its auto_mapping is {lora.config.get('auto_mapping')}. If training used"
        " another class, save the base with it, and pass that as --base"
    )
    refuse(f"{name} lacks what its config targets in {kind}", sorted(expected.keys() - tensors), do)
    surplus = sorted(tensors.keys() - allowed)
    if any("quant_state" in key for key in surplus):
        do = "it holds a head of the base in 4 bits: save it with save_embedding_layers=False"
    refuse(f"{name} holds what its config does not target in {kind}", surplus, do)
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


def with_names_of_today(tensors, model) -> dict:
    """Return tensors under the modules' names of today: transformers 4.52 renamed those of vision models."""
    start = "base_model.model."
    paths = {key: END.sub("", key.removeprefix(start)) for key in tensors}
    today, found = names_in(model, {f"{path}.weight" for path in paths.values()}), {}
    for key, path in paths.items():
        name, converter = today.get(f"{path}.weight", ("", None))
        now = path if converter or not name else name.removesuffix(".weight")
        found[key.replace(f"{start}{path}.", f"{start}{now}.", 1)] = tensors[key]
    return found


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
