"""What each new tensor is made of, known before anything is written, and how it is made."""

import dataclasses

import torch

from ..backend import dequantize
from ..core.state import UnsupportedState
from .checkpoint import PART, read_checkpoint
from .model import fuse, names_in, split, tied_names
from .sources import refuse

FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
TYPES = FLOATS | {torch.bool: "BOOL", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}


@dataclasses.dataclass
class Training:
    """How training loaded a 16-bit base."""

    dtype: torch.dtype
    float32: object  # a pattern of the parameters that stayed in float32
    layers: set  # the weights of the model that were quantized
    how: dict  # arguments of bitsandbytes.functional.quantize_4bit


@dataclasses.dataclass
class Made:
    """A tensor of the new checkpoint."""

    source: str  # its name in the old one
    like: torch.Tensor  # on meta: its shape and dtype
    target: str = ""  # its name in the model; empty without a model
    packed: bool = False  # in 4 bits in the old one
    loaded: torch.dtype | None = None  # what training loaded it in, if that is to be repeated
    quantized: bool = False  # training quantized it
    transposed: bool = False  # Conv1D holds the transposed weight, in 16 bits alone
    given: list = dataclasses.field(default_factory=list)  # the adapter's tensors that take its place
    layers: list = dataclasses.field(default_factory=list)  # parameters whose adapter is merged into it
    fused: tuple = ()  # (target, {name: converter}) of all that become one tensor which the adapter changes


class Plan:
    """What the tensors of a new checkpoint are made of. make() makes one."""

    def __init__(self, tensors, model=None, adapter=None, dtype=None, training=None, device="cpu"):
        """tensors: {name: the tensor, or the open file that holds it}."""
        self.tensors, self.model, self.adapter = tensors, model, adapter
        self.dtype, self.training, self.device = dtype, training, device
        self.keys: dict = {}  # {name: itself, and of a 4-bit weight the tensors of its state}
        for key in tensors:
            part = PART.fullmatch(key)
            self.keys.setdefault(part[1] if part else key, []).append(key)
        self.targets = names_in(model, self.keys) if model else {}
        own = model.state_dict() if model else {}
        self.made = {name: self.without_adapter(name, own) for name in self.keys}
        self.ready: dict = {}  # tensors that were made together, until each is asked for
        self.untied = False
        if adapter:
            self.connect()

    def read(self, name, device="cpu") -> tuple:
        """Return (tensor, None), or (packed codes, quant_state) of a 4-bit weight on a device."""

        def get(key):
            file = self.tensors[key]
            return file.get_tensor(key) if hasattr(file, "get_tensor") else file

        if self.keys[name] == [name]:
            return get(name), None
        return read_checkpoint({key: get(key).to(device) for key in self.keys[name]}, name)

    def without_adapter(self, name, own) -> Made:
        """Return what a tensor is made of before the adapter. Refuse what is not in floating point."""
        tensor, state = self.read(name)
        old = state or tensor
        target, converter = self.targets.get(name, ("", None))
        known = own.get(target) if not converter else None
        if old.dtype not in (FLOATS if known is None or known.is_floating_point() else TYPES):
            raise UnsupportedState(
                f"{name} is {old.dtype}, expected a floating-point tensor, or a 4-bit weight with its state:"
                " dequantize it with the library that quantized it"
            )
        made = Made(name, torch.empty(old.shape, dtype=old.dtype, device="meta"), target, bool(state))
        if known is not None:
            conv1d = type(self.model.get_submodule(target.rpartition(".")[0])).__name__ == "Conv1D"
            made.quantized = self.training is not None and target in self.training.layers
            made.transposed = conv1d and (bool(state) or made.quantized)
        if made.transposed and state:
            made.like = made.like.t()
        if old.dtype in FLOATS:
            if self.training:
                kept = self.training.float32.search(target)
                made.loaded = torch.float32 if kept else self.training.dtype
            made.like = made.like.to(self.dtype or made.loaded or old.dtype)
        return made

    def connect(self):
        """Note what the adapter changes. Add the tensors that a saved copy unties."""
        changes = self.adapter.layers.keys() | self.adapter.given.keys()
        used = self.connect_fused(changes)
        stored = {target: name for name, (target, converter) in self.targets.items() if not converter}
        for names in tied_names(self.model):
            there = [name for name in names if name in stored]
            if not there or changes.isdisjoint(names):
                continue
            first = self.base(stored[there[0]]) if len(there) > 1 else None
            # transformers ties what is stored if it is equal.
            apart = [name for name in there[1:] if not first.equal(self.base(stored[name]).to(first))]
            names = [name for name in names if name not in apart]
            copied = [name for name in names if name in self.adapter.saved]
            kept = [name for name in names if name not in copied]
            if copied and len(names) > 1:
                self.untied = True
                there += [name for name in names if name not in there]
            for name in there:
                own = kept if name in kept else [name]
                model = self.made[stored.get(name, stored[there[0]])]
                given = [self.adapter.given[other] for other in own if other in self.adapter.given]
                layers = [other for other in own if other in self.adapter.layers]
                self.made[stored.get(name, name)] = dataclasses.replace(
                    model, target=name, given=given, layers=layers
                )
                used |= {*own}
        refuse("the adapter changes what is not in the checkpoint", sorted(changes - used), "pass its base")

    def connect_fused(self, changes) -> set:
        """Note which tensors are fused before the adapter changes them, such as experts. Return its changes."""
        groups: dict = {}
        for name, (target, converter) in self.targets.items():
            if converter:
                groups.setdefault(target, {})[name] = converter
        used: set = set()
        for target, names in groups.items():
            likes = {name: (converter, self.made[name].like) for name, converter in names.items()}
            found = changes & fuse(self.model, target, likes).keys()
            if found:
                used |= found
                for name in names:
                    self.made[name].fused = target, names
        return used

    def make(self, name) -> torch.Tensor:
        """Return a tensor of the new checkpoint."""
        made = self.made[name]
        if made.fused:
            return self.make_fused(name, *made.fused)
        tensor = made.given[-1].to(made.like.dtype) if made.given else self.base(name)
        if made.layers:
            tensor = tensor.to(self.device, copy=True)  # PEFT would write into the file's pages
        for layer in made.layers:
            tensor = self.adapter.merge(layer, tensor)
        return self.checked(name, tensor)

    def make_fused(self, name, target, names) -> torch.Tensor:
        """Return one of the tensors that are fused, merged, and split again. Keep the others."""
        if name not in self.ready:
            tensors = fuse(self.model, target, {part: (names[part], self.base(part)) for part in names})
            for key, tensor in tensors.items():
                tensor = self.adapter.given.get(key, tensor).to(tensor.dtype)
                if key in self.adapter.layers:
                    tensor = self.adapter.merge(key, tensor.to(self.device))
                tensors[key] = tensor
            self.ready = split(self.model, tensors)
            refuse(
                f"{target} cannot be split again",
                sorted(names.keys() ^ self.ready.keys()),
                "merge it with PEFT",
            )
        return self.checked(name, self.ready.pop(name))

    def base(self, name) -> torch.Tensor:
        """Return a tensor without the adapter, as training saw it, in its new dtype."""
        made = self.made[name]
        tensor, state = self.read(made.source, self.device)
        if made.loaded:
            tensor = tensor.to(made.loaded)
        if made.quantized:
            from bitsandbytes.functional import quantize_4bit

            tensor = tensor.t() if made.transposed else tensor
            tensor, state = quantize_4bit(tensor.to(self.device).contiguous(), **self.training.how)
        if state:
            try:
                tensor = dequantize(tensor, state, dtype=made.like.dtype)
            except UnsupportedState as error:
                raise UnsupportedState(f"{name}: {error}") from error
        if made.transposed:
            tensor = tensor.t().contiguous()
        return tensor.to(made.like.dtype)

    def checked(self, name, tensor) -> torch.Tensor:
        """Return a tensor. Refuse another shape, and what became infinite or NaN here."""
        made = self.made[name]
        like = made.like
        if tensor.shape != like.shape:
            raise UnsupportedState(
                f"{name} becomes {tuple(tensor.shape)}, expected {tuple(like.shape)}: if the adapter has new"
                " tokens, export the model alone, then resize_token_embeddings() and merge with PEFT"
            )
        new = made.given or made.layers or made.fused or made.loaded or self.dtype
        if new and like.is_floating_point() and like.numel():
            if not torch.stack(tensor.aminmax()).isfinite().all():  # 30 times as fast as isfinite on a CPU
                raise UnsupportedState(
                    f"{name} is not finite in {like.dtype}, expected numbers: check adapter and dtype"
                )
        return tensor
