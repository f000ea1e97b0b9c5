"""What each new tensor is made of, known before anything is written, and how it is made."""

from typing import NamedTuple

import torch

from ..backend import dequantize
from ..core.checkpoint import PART, read_checkpoint
from ..log import say
from .model import tied_names
from .private import fuse, kept_in_float32, names_in, revert_weight_conversion
from .problems import UnsupportedState, library, refuse


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
    dequantized: bool  # from 4 bits, stored or as training saw it
    transposed: bool  # Conv1D holds the transposed weight, in 16 bits alone
    names: list | tuple = ()  # the parameters of the model that it stands for


class Plan:
    """What the tensors of a new checkpoint are made of. make() makes one."""

    def __init__(
        self, tensors, model=None, adapter=None, dtype=None, training=None, device="cpu", pruned=False
    ):
        """tensors: {name: the open file that holds it}. pruned: without those that the model lacks."""
        self.tensors, self.model, self.adapter = tensors, model, adapter
        self.dtype, self.training, self.device = dtype, training, device
        self.keys: dict = {}  # {name: itself, and of a 4-bit weight the tensors of its state}
        for key in self.tensors:
            self.keys.setdefault(PART.sub(r"\1", key), []).append(key)
        # {name: (its name in the model, how transformers makes that of it and others)}
        self.targets = names_in(model, self.keys, pruned)
        if left := self.keys.keys() - self.targets:
            say(f"Left out, because {type(model).__name__} has none: {', '.join(sorted(left))}.")
        own = model.state_dict() if model else {}
        self.float32 = kept_in_float32(model) if adapter or training else {}
        self.made = {name: self.without_adapter(name, own) for name in self.targets}
        self.changes = adapter.layers.keys() | adapter.given.keys() if adapter else set()
        self.fused: dict = {}  # {name: all that become one tensor that the adapter changes}
        self.ready: dict = {}  # tensors that were made together, until each is asked for
        self.untied = False
        if adapter:
            self.unused = {*self.changes}
            self.connect_fused()
            self.connect()
            refuse("the adapter changes what is not in the checkpoint", sorted(self.unused), "pass its base")

    def read(self, name, device="cpu") -> tuple:
        """Return (tensor, None), or (packed codes, quant_state) of a 4-bit weight on a device."""
        tensors = {key: self.tensors[key].get_tensor(key) for key in self.keys[name]}
        if tensors.keys() == {name}:
            return tensors[name], None
        return read_checkpoint({key: tensors[key].to(device) for key in tensors}, name)

    def without_adapter(self, name, own) -> Made:
        """Return what a tensor is made of before the adapter. Refuse what is not in floating point."""
        tensor, state = self.read(name)
        held = state or tensor
        dtype, (target, _) = held.dtype, self.targets[name]
        known = own.get(target)
        floating = dtype.is_floating_point and dtype.itemsize > 1  # fp8 has scales
        if not floating and (known is None or known.is_floating_point()):
            raise UnsupportedState(
                f"{name} is {dtype}, expected a floating-point tensor, or a 4-bit weight with its state:"
                " dequantize it with the library that quantized it"
            )
        like = torch.empty(held.shape, device="meta")
        loaded, dequantized, transposed = None, bool(state), False
        if self.training and floating:
            loaded = self.training.dtype
            dequantized = target in self.training.layers
        kept = self.float32.get(loaded or dtype)
        if kept and kept.search(target) and not state:
            loaded = torch.float32
        if dequantized and known is not None:
            transposed = type(self.model.get_submodule(target.rpartition(".")[0])).__name__ == "Conv1D"
        if transposed and state:
            like = like.t()
        if floating:
            dtype = self.dtype or loaded or dtype
        return Made(name, like.to(dtype), loaded, dequantized, transposed)

    def connect_fused(self):
        """Note which tensors become one, such as experts, that the adapter changes."""
        groups: dict = {}
        for name, (target, converter) in self.targets.items():
            if converter:
                groups.setdefault(target, {})[name] = converter, self.made[name].like
        for target, parts in groups.items():
            made = fuse(self.model, target, parts)
            self.unused -= made.keys()
            if not self.changes.isdisjoint(made):
                self.fused |= dict.fromkeys(parts, [*parts])
                # In a row, so that each group is made once: a file alternates between groups.
                self.made |= {part: self.made.pop(part) for part in parts}

    def connect(self):
        """Note which others the adapter changes. Add a new head, and the tensors that a saved copy unties."""
        stored = {target: name for name, (target, converter) in self.targets.items() if not converter}
        given = self.adapter.given
        for names in tied_names(self.model):
            there = [name for name in names if name in stored]
            if not there and names[0] in given and names[0] in self.unused:  # a new head
                like = given[names[0]].to("meta", self.dtype or (self.training or self.model.config).dtype)
                self.made[names[0]] = Made("", like, None, False, False)
                stored[names[0]], there = names[0], names[:1]
            if not there or self.changes.isdisjoint(names):
                continue
            first, *others = there
            self.unused -= {*names}
            for name in others:
                tensor = self.base(stored[name])
                if not tensor.equal(self.base(stored[first]).to(tensor)):  # transformers would not tie them
                    raise UnsupportedState(
                        f"{first} and {name} differ, expected the same tensor, as the config ties them: set"
                        " its tie_word_embeddings to false"
                    )
            kept = [name for name in names if name not in self.adapter.saved]
            if len(kept) < len(names) > 1:
                self.untied = True
                there = names
            before = {name: self.made[stored.get(name, stored[first])] for name in there}
            for name, made in before.items():
                own = kept if name in kept else [name]
                for key in own:
                    made = made._replace(names=own, like=given.get(key, made.like).to(made.like))
                self.made[stored.get(name, name)] = made

    def likes(self) -> dict:
        """Return {name: a tensor on meta} of the new checkpoint."""
        return {name: made.like for name, made in self.made.items()}

    def changed(self, name) -> bool:
        """Return whether the adapter changes a tensor."""
        return name in self.fused or not self.changes.isdisjoint(self.made[name].names)

    def make(self, name) -> torch.Tensor:
        """Return a tensor of the new checkpoint. Refuse another shape, and what became infinite or NaN."""
        made = self.made[name]
        if name not in self.fused:
            tensor = self.adapted(self.base(name), made.names)
        else:
            with library(
                f"transformers cannot fuse {name} with others and split it again: merge it with PEFT"
            ):
                if name not in self.ready:
                    parts = {part: (self.targets[part][1], self.base(part)) for part in self.fused[name]}
                    fused = fuse(self.model, self.targets[name][0], parts)
                    merged = {key: self.adapted(fused[key], [key]) for key in fused}
                    self.ready = revert_weight_conversion(self.model, merged)
                tensor = self.ready.pop(name)
        like = made.like
        if tensor.shape != like.shape:
            raise UnsupportedState(
                f"{name} becomes {tensor.shape}, expected {like.shape}: merge it with PEFT"
            )
        if (self.changed(name) or made.loaded or self.dtype) and like.is_floating_point() and like.numel():
            if not torch.stack(tensor.aminmax()).isfinite().all():  # 30 times as fast as isfinite on a CPU
                raise UnsupportedState(
                    f"{name} is not finite in {like.dtype}, expected numbers: check adapter and dtype"
                )
        return tensor

    def adapted(self, tensor, names) -> torch.Tensor:
        """Return a tensor with the adapter's changes of the parameters that it stands for."""
        if self.changes.isdisjoint(names):
            return tensor
        for name in names:
            tensor = self.adapter.given.get(name, tensor).to(tensor.dtype)
        tensor = tensor.to(self.device, copy=True)  # PEFT would write into the file's pages
        for name in names:
            if name in self.adapter.layers:
                tensor = self.adapter.merge(name, tensor)
        return tensor

    def base(self, name) -> torch.Tensor:
        """Return a tensor without the adapter, as training saw it, in its new dtype."""
        made = self.made[name]
        if not made.source:
            return self.adapter.given[name].to(made.like.dtype)
        tensor, state = self.read(made.source, self.device)
        if made.loaded:
            tensor = tensor.to(made.loaded)
        if made.dequantized and not state:
            from bitsandbytes.functional import quantize_4bit

            tensor = tensor.t() if made.transposed else tensor
            tensor, state = quantize_4bit(tensor.to(self.device).contiguous(), **self.training.how)
        if state:
            tensor = dequantize(tensor, state, dtype=made.loaded or made.like.dtype)
        if made.transposed:
            tensor = tensor.t().contiguous()
        return tensor.to(made.like.dtype)
