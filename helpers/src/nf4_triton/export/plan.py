"""What each new tensor is made of, known before anything is written, and how it is made."""

from typing import NamedTuple

import torch

from ..backend import dequantize
from .formats import Stored, read, weight_of
from .model import tied_names
from .private import fuse, kept_in_float32, names_in, revert_weight_conversion
from .problems import UnsupportedState, library, refuse, say

BIAS = "final_logits_bias"  # of BART: it has as many columns as there are tokens


class Training(NamedTuple):
    """How training loaded a 16-bit base."""

    dtype: torch.dtype
    layers: set  # the weights of the model that were quantized
    how: dict  # arguments of bitsandbytes.functional.quantize_4bit


class Made(NamedTuple):
    """A tensor of the new checkpoint."""

    source: str  # its name in the old one; empty for a head that the adapter brings
    like: torch.Tensor  # on meta: its shape and dtype
    loaded: torch.dtype | None  # what transformers loads it in, if that is another one
    dequantized: bool  # from how it is stored, or from 4 bits as training saw it
    transposed: bool  # Conv1D holds the transposed weight, but only in 16 bit
    given: torch.Tensor | None = None  # the adapter's tensor that replaces the stored one
    parameter: str = ""  # the model's parameter whose adapter layers are merged


class Plan:
    """What the tensors of a new checkpoint are made of. make() makes one."""

    def __init__(
        self, source, model=None, adapter=None, dtype=None, training=None, device="cpu", pruned=False
    ):
        """source: the Source of the checkpoint. pruned: leave out tensors that the model lacks."""
        self.source, self.model, self.adapter = source, model, adapter
        self.dtype, self.training, self.device = dtype, training, device
        self.keys: dict = {}  # {name: itself, or the tensors that make it}
        for key in source.tensors:
            self.keys.setdefault(weight_of(source.kind, key), []).append(key)
        # {name: (its name in the model, the converter that fuses it with others, or None)}
        self.targets = names_in(model, self.keys, pruned)
        if left := self.keys.keys() - self.targets:
            say(f"Left out, because {type(model).__name__} has none: {', '.join(sorted(left))}.")
        own = model.state_dict() if model else {}
        self.float32 = kept_in_float32(model) if adapter or training else {}
        # If training loaded in float32, merge in float32 and round once, to the dtype of the stored base.
        self.rounds_once = bool(training) and training.dtype == torch.float32
        self.made = {name: self.without_adapter(name, own) for name in self.targets}
        self.fused: dict = {}  # {name: all names that become one tensor, if the adapter changes it}
        self.ready: dict = {}  # tensors that were made together, until each is asked for
        self.layers = adapter.layers if adapter else {}
        self.untied = False
        if adapter:
            fused = self.connect_fused()
            lost = adapter.parameters - fused - self.connect(fused)
            do = "pass its base, or merge it with PEFT"
            refuse("the adapter changes what is not in the checkpoint", sorted(lost), do)

    def read(self, name, device="cpu"):
        """Return a tensor or a Stored weight, on a device."""
        tensors = {key: self.source.tensors[key].get_tensor(key) for key in self.keys[name]}
        if tensors.keys() == {name}:
            return tensors[name]
        return read(self.source, {key: tensors[key].to(device) for key in tensors}, name)

    def without_adapter(self, name, own) -> Made:
        """Return what a tensor is made of before the adapter. own: the model's state dict."""
        held, (target, _) = self.read(name), self.targets[name]
        stored, dtype, known = isinstance(held, Stored), held.dtype, own.get(target)
        if not check_floating(name, dtype, known, self.source.kind):
            return Made(name, torch.empty(held.shape, device="meta", dtype=dtype), None, False, False)
        loaded, dequantized, transposed = self.training and self.training.dtype, stored, False
        if self.training and target in self.training.layers:
            dequantized = True
        kept = self.float32.get(loaded or dtype)
        if kept and kept.search(target) and not stored:
            loaded = torch.float32
        if dequantized and known is not None:
            transposed = type(self.model.get_submodule(target.rpartition(".")[0])).__name__ == "Conv1D"
        shape = known.shape if target == BIAS else held.shape
        like = torch.empty(shape, device="meta")
        if transposed and stored:
            like = like.t()
        dtype = self.dtype or (None if self.rounds_once else loaded) or dtype
        return Made(name, like.to(dtype), loaded, dequantized, transposed)

    def connect_fused(self) -> set:
        """Note tensors that become one, such as experts, if the adapter changes it. Return all such ones."""
        groups: dict = {}
        for name, (target, converter) in self.targets.items():
            if converter:
                groups.setdefault(target, {})[name] = converter, self.made[name].like
        found: set = set()
        for target, parts in groups.items():
            made = fuse(self.model, target, parts).keys()
            found |= made
            if not self.adapter.parameters.isdisjoint(made):
                self.fused |= dict.fromkeys(parts, [*parts])
                # In a row, so that each group is made once: a file alternates between groups.
                self.made |= {part: self.made.pop(part) for part in parts}
        return found

    def connect(self, fused) -> set:
        """Note which other parameters the adapter changes. Return those that the new checkpoint has.

        fused: parameters that connect_fused() returned.
        """
        stored = {target: name for name, (target, converter) in self.targets.items() if not converter}
        found: set = set()
        for names in tied_names(self.model):
            if names[0] in fused or self.adapter.parameters.isdisjoint(names):
                continue
            there = {name: stored[name] for name in names if name in stored}
            if not there and names[0] in self.adapter.given:
                there = {names[0]: self.add_head(names[0])}
            if there:
                self.connect_tied(names, there)
                stored |= there
                found |= {*names}
        for names in tied_names(self.model) if self.untied else ():  # transformers ties none then
            made = [self.made[stored[name]] for name in names if name in stored]
            for name in names if made else ():
                self.made.setdefault(stored.get(name, name), made[0])
        return found

    def connect_tied(self, names, there):
        """Note how a parameter and those tied to it change: each by itself, if they change differently.

        there: {parameter of the model: its name in the file}, of at least one.
        """
        self.check_tied(there)
        first, *_ = there.values()
        old = {name: self.made[there.get(name, first)] for name in names}
        alike = self.adapter.alike(names)
        self.untied |= not alike
        changed = next(name for name in names if name in self.adapter.parameters)
        for name in there if alike else names:
            made = self.with_adapter(old[name], changed if alike else name, names)
            self.made[there.get(name, name)] = made

    def with_adapter(self, made, parameter, tied) -> Made:
        """Return what a tensor is made of with the adapter's change of a parameter and of its tied base."""
        given = self.adapter.base_of(parameter, tied)
        if given is not None:
            like = given.to(made.like)
            if made.source and like.shape == made.like.shape:
                base = self.base(made).cpu()
                given = None if given.to(base.dtype).equal(base) else given  # the base, saved beside LoRA
            made = made._replace(like=like)
        return made._replace(given=given, parameter=parameter)

    def add_head(self, name) -> str:
        """Add a head that only the adapter has. Return its name."""
        loaded = self.model.config.dtype if self.rounds_once or not self.training else self.training.dtype
        dtype = self.dtype or loaded
        given = self.adapter.given[name]
        self.made[name] = Made("", given.to("meta", dtype), None, False, False, given)
        return name

    def check_tied(self, stored):
        """Raise unless tensors that the config ties are equal: transformers would not tie others.

        stored: {parameter of the model: its name in the file}.
        """
        (first, name), *others = stored.items()
        for other, key in others:
            tensor = self.base(self.made[key])
            if not tensor.equal(self.base(self.made[name]).to(tensor)):
                raise UnsupportedState(
                    f"{first} and {other} differ, expected the same tensor, as the config ties them: set"
                    " its tie_word_embeddings to false"
                )

    def likes(self) -> dict:
        """Return {name: a tensor on meta} of the new checkpoint."""
        return {name: made.like for name, made in self.made.items()}

    def is_merged(self, name) -> bool:
        """Return whether the adapter changes a tensor, or holds one that takes its place."""
        made = self.made[name]
        return name in self.fused or made.given is not None or made.parameter in self.layers

    def make(self, name) -> torch.Tensor:
        """Return a tensor of the new checkpoint. Refuse another shape, and what became infinite or NaN."""
        made = self.made[name]
        if name in self.fused:
            tensor = self.made_together(name)
        else:
            tensor = self.merged(self.base(made), made.parameter)
        like, tensor = made.like, tensor.to(made.like.dtype)
        if tensor.shape != like.shape:
            raise UnsupportedState(
                f"{name} becomes {tensor.shape}, expected {like.shape}: merge it with PEFT"
            )
        if (self.is_merged(name) or made.loaded or self.dtype) and like.is_floating_point() and like.numel():
            if not torch.stack(tensor.aminmax()).isfinite().all():  # 30 times as fast as isfinite on a CPU
                raise UnsupportedState(
                    f"{name} is not finite in {like.dtype}, expected numbers: check adapter and dtype"
                )
        return tensor

    def made_together(self, name) -> torch.Tensor:
        """Return a tensor that transformers fuses with others before the adapter changes it."""
        with library(f"transformers cannot fuse {name} with others and split it again: merge it with PEFT"):
            if name not in self.ready:
                parts = {
                    part: (self.targets[part][1], self.base(self.made[part])) for part in self.fused[name]
                }
                fused = fuse(self.model, self.targets[name][0], parts)
                given = self.adapter.given
                fused = {key: given.get(key, fused[key]).to(fused[key].dtype) for key in fused}
                merged = {key: self.merged(fused[key], key) for key in fused}
                for key, tensor in revert_weight_conversion(self.model, merged).items():
                    # The model is of a class with a head, or without; its names have a prefix, or none.
                    part = next(part for part in parts if part.endswith(key) or key.endswith(part))
                    self.ready[part] = tensor
            return self.ready.pop(name)

    def merged(self, tensor, parameter) -> torch.Tensor:
        """Return a tensor with the layers that the adapter has for a parameter."""
        if parameter not in self.layers:
            return tensor
        tensor = tensor.to(self.device, copy=True)  # PEFT would write into the file's pages
        return self.adapter.merge(parameter, tensor)

    def base(self, made) -> torch.Tensor:
        """Return a tensor without the adapter's layers, as training saw it, in the dtype of the merge."""
        if made.given is not None:
            return made.given.to(self.merged_in(made))
        tensor = self.read(made.source, self.device)
        if made.source == BIAS:
            tensor = torch.nn.functional.pad(tensor, (0, made.like.shape[-1] - tensor.shape[-1]))
        if isinstance(tensor, Stored):
            tensor = tensor.make(self.merged_in(made))
        elif made.loaded:
            tensor = tensor.to(made.loaded)
            if made.dequantized:
                from bitsandbytes.functional import quantize_4bit

                tensor = (tensor.t() if made.transposed else tensor).to(self.device).contiguous()
                codes, state = quantize_4bit(tensor, **self.training.how)
                tensor = dequantize(codes, state, dtype=made.loaded)
        if made.transposed:
            tensor = tensor.t().contiguous()
        return tensor.to(self.merged_in(made))

    def merged_in(self, made) -> torch.dtype:
        """Return the dtype in which the adapter is added to a tensor."""
        return torch.float32 if self.rounds_once and made.like.is_floating_point() else made.like.dtype


def check_floating(name, dtype, known, kind) -> bool:
    """Return whether a tensor is in floating point. Refuse another one, unless it is so in the model, too."""
    if dtype.is_floating_point and dtype.itemsize > 1:  # fp8 has scales
        return True
    if known is None or known.is_floating_point():
        raise UnsupportedState(
            f"{name} is {dtype}, expected floating point, or a weight with its scales as in {kind}: pass the"
            " 16-bit model that it was made from"
        )
    return False
