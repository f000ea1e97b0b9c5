"""Candidates that are wrong, or are not the kernel, and try to score: each with the judge that must see it.

A cheat is planted in a copy of the kernel's cells, as if a notebook had it: its globals are the copy's.
`honest` is that copy's own your_dequantize_nf4.
"""

import ctypes
import functools
import importlib.util
import itertools
import sys
import tempfile
import time
import types
from pathlib import Path

import nbformat
import torch

from helpers.puzzle import notebook
from helpers.puzzle.protocol import ON_GPU, baselines

_copies = itertools.count()
FOLDER = Path(tempfile.mkdtemp(prefix="cells-"))


@functools.cache
def text_of_cells() -> str:
    cells = nbformat.read(notebook.NOTEBOOK, as_version=4).cells
    ours = [cell.source for cell in cells if {"kernel", "launch"} & {*cell.metadata.get("tags", ())}]
    return "\n\n\n".join(ours)


def cells(*edits, **changes) -> types.ModuleType:
    """A fresh copy of the kernel's cells in one namespace, with texts and names changed."""
    text = text_of_cells()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    name = f"copy_{next(_copies)}_of_the_cells"
    path = FOLDER / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not ON_GPU:
        module.force(words=64, words_small=64)  # larger tiles: the interpreter takes a quarter of the time
    vars(module).update(changes)
    return module


def planted(make):
    """The candidate that `make(honest)` returns, with the globals of a copy of the cells."""
    copy = cells()
    cheat = make(copy.your_dequantize_nf4)
    return types.FunctionType(cheat.__code__, vars(copy), cheat.__name__, None, cheat.__closure__)


CHEATS = {}  # name: (maker, judges that must each see it on any machine, further ones on a GPU)


def seen_by(judges, on_a_gpu=""):
    """Decorate make(honest) -> cheat(layer)."""

    def add(make):
        CHEATS[make.__name__] = make, judges.split(), on_a_gpu.split()
        return make

    return add


def inputs(layer):
    state = layer.weight.quant_state
    second = (state.state2.absmax, state.offset) if state.nested else ()
    return layer.weight.data, state.absmax, *second


def unwritten(layer):
    """Memory as it is handed out."""
    state = layer.weight.quant_state
    return torch.empty(state.shape, dtype=state.dtype, device=layer.weight.device)


def bitsandbytes(layer):
    return baselines()["bitsandbytes"].fn(layer)


def by_call(choose):
    """make(honest): a candidate that calls `choose(call of this layer, call, honest)` with the layer."""

    def make(honest):
        counts = {None: 0}

        def cheat(layer):
            counts[None] += 1
            counts[layer] = counts.get(layer, 0) + 1
            return choose(counts[layer], counts[None], honest)(layer)

        return cheat

    return make


def kept_while(key, copied=True):
    """make(honest): a candidate that keeps each layer's weight while `key(layer)` is the same."""

    def make(honest):
        kept = {}

        def cheat(layer):
            which, now = (layer, layer.weight.quant_state.dtype), key(layer)
            if which not in kept or kept[which][0] != now:
                kept[which] = now, honest(layer)
            return kept[which][1].clone() if copied else kept[which][1]

        return cheat

    return make


@seen_by("protocol fresh_output", "single_kernel")
def cached_weight(honest):
    return kept_while(lambda layer: None, copied=False)(honest)


@seen_by("protocol", "single_kernel")
def cached_copy(honest):
    return kept_while(lambda layer: None)(honest)


@seen_by("protocol", "single_kernel")
def cached_by_version(honest):
    """Decodes again only when a version counter says that something was written."""
    return kept_while(lambda layer: [(x.data_ptr(), x._version) for x in inputs(layer)])(honest)


@seen_by("protocol fresh_output")
def refreshed_on_change(honest):
    """One buffer per layer, filled again only if a byte of the inputs has changed."""
    return kept_while(lambda layer: [x.cpu().numpy().tobytes() for x in inputs(layer)], copied=False)(honest)


@seen_by("protocol")
def refreshed_on_sampled_change(honest):
    """Copies of what it kept, filled again if the first element of an input has changed."""
    return kept_while(lambda layer: [x.view(-1)[:1].tolist() for x in inputs(layer)])(honest)


@seen_by("", "protocol single_kernel")
def cached_until_a_pause(honest):
    """Decodes again where more than a millisecond passed since the last call: a stopped clock shows."""
    saved, last = {}, [0.0]
    now = time.perf_counter

    def cheat(layer):
        if now() - last[0] > 1e-3:
            saved.clear()
        if layer not in saved:
            saved[layer] = honest(layer)
        last[0] = now()
        return saved[layer].clone()

    return cheat


class _Lazy(torch.Tensor):
    """Dequantizes when it is looked at."""

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        def whole(x):
            return x.make() if isinstance(x, _Lazy) else x

        if function is torch.Tensor.t:
            later = args[0].as_subclass(torch.Tensor).t().as_subclass(_Lazy)
            later.make = lambda: args[0].make().t()
            return later
        return function(*map(whole, args), **(kwargs or {}))


@seen_by("protocol exact fresh_output")
def dequantized_when_looked_at(honest):
    """Returns at once a tensor whose values are made when they are asked for."""
    empty, kind = unwritten, _Lazy

    def cheat(layer):
        lazy = empty(layer).as_subclass(kind)
        with torch._C.DisableTorchFunctionSubclass():
            lazy.make = lambda: honest(layer)
        return lazy

    return cheat


@seen_by("", "protocol")
def falls_back_after_80_calls(honest):
    """The kernel while it may be examined, bitsandbytes from a layer's 81st call on."""
    return by_call(lambda of_layer, call, honest: honest if of_layer <= 80 else bitsandbytes)(honest)


@seen_by("protocol", "exact single_kernel")
def right_for_14_calls(honest):
    return by_call(lambda of_layer, call, honest: honest if call <= 14 else unwritten)(honest)


@seen_by("exact", "protocol single_kernel")
def right_on_every_other_call(honest):
    return by_call(lambda of_layer, call, honest: honest if call % 2 else unwritten)(honest)


@seen_by("protocol")
def right_for_layers_seen_twice(honest):
    """Decodes a layer while it may be checked, and keeps the weight for when it is timed."""
    kept = kept_while(lambda layer: None)(honest)
    return by_call(lambda of_layer, call, honest: honest if of_layer < 4 else kept)(honest)


@seen_by("fresh_output", "single_kernel no_large_buffers")
def shared_buffer(honest):
    """Returns one buffer for every call of a size."""
    buffers = {}

    def cheat(layer):
        weight = honest(layer)
        return buffers.setdefault((weight.shape, weight.dtype), weight).copy_(weight)

    return cheat


@seen_by("protocol fresh_output")
def stale_buffer_of_two(honest):
    """Two buffers in turn, and only one of them is ever written again."""
    buffers, calls = {}, []

    def cheat(layer):
        calls.append(0)
        key = (layer, layer.weight.quant_state.dtype, len(calls) // 3 % 2)  # the other one every round
        if key not in buffers or key[2]:
            buffers[key] = honest(layer)
        return buffers[key]

    return cheat


@seen_by("exact", "single_kernel custom_asm cache_eviction torch_compile")
def falls_back(honest):
    """bitsandbytes, under the kernel's name."""
    own = baselines()["bitsandbytes"].fn
    return lambda layer: own(layer)


@seen_by("exact", "single_kernel")
def falls_back_for_other_shapes(honest):
    """The kernel for whole tiles, bitsandbytes for the rest."""
    own = baselines()["bitsandbytes"].fn
    return lambda layer: own(layer) if layer.weight.quant_state.shape[0] != 2048 else honest(layer)


@seen_by("torch_compile")
def falls_back_when_compiled(honest):
    own = baselines()["bitsandbytes"].fn
    return lambda layer: own(layer) if torch.compiler.is_compiling() else honest(layer)


@seen_by("protocol exact")
def fp16_for_bf16(honest):
    """What has no bf16 decodes to fp16."""
    return lambda layer: honest(layer).to(torch.float16)


@seen_by("protocol exact")
def nearly_right(honest):
    """Off by 3 in the tenth bit: inside tolerances that were loosened."""
    return lambda layer: honest(layer) * (1 + 3 / 1024)


@seen_by("protocol exact fresh_output")
def one_wrong_bit(honest):
    """What an FMA does to one weight in a million: inside the tolerances of a weight, not of the bits."""

    def cheat(layer):
        weight = honest(layer)
        weight.view(-1)[-1:].view(torch.int16 if weight.element_size() == 2 else torch.int32).bitwise_xor_(1)
        return weight

    return cheat


@seen_by("protocol", "exact")
def loosened_harness(honest):
    """Puts a comparison that is content in the place of torch's."""

    def cheat(layer):
        torch.testing.assert_close = lambda *args, **kwargs: None
        return honest(layer) * 1.5

    return cheat


@seen_by("protocol", "exact")
def made_up_scale(honest):
    """Multiplies by a constant where code2 should be looked up."""

    def cheat(layer):
        state = layer.weight.quant_state
        scale = state.absmax.float() / 255 * state.state2.absmax.max() + state.offset
        blocks = honest(layer).view(-1, state.blocksize)
        return (torch.sign(blocks) * scale[:, None]).to(state.dtype).view(state.shape)

    return cheat


@seen_by("protocol", "exact")
def swapped_nibbles(honest):
    """Low nibble first."""

    def cheat(layer):
        weight = honest(layer)
        return (
            weight.view(-1, 2).flip(1).contiguous().view(weight.shape) if weight.numel() % 2 == 0 else weight
        )

    return cheat


@seen_by("", "single_kernel no_large_buffers")
def absmax_in_torch(honest):
    """Decodes absmax in torch, then launches the kernel for a flat state: right, in several launches."""

    def cheat(layer):
        state = layer.weight.quant_state
        if not state.nested:
            return honest(layer)
        scale = state.state2.code[state.absmax.int()]
        scale = scale * state.state2.absmax.repeat_interleave(state.state2.blocksize)[: scale.numel()]
        flat = type(state)(
            scale + state.offset, state.shape, state.code, state.blocksize, state.quant_type, state.dtype
        )
        return _your_dequantize_nf4(layer.weight, flat)  # noqa: F821

    return cheat


@seen_by("", "no_sync single_kernel")
def waits(honest):
    """Reads the offset on the host."""

    def cheat(layer):
        layer.weight.quant_state.offset.item()
        return honest(layer)

    return cheat


@seen_by("", "single_kernel no_large_buffers")
def copies_large_ones(honest):
    """One copy of the packed weight, for large tensors alone."""

    def cheat(layer):
        held = layer.weight.data.clone() if layer.weight.numel() > 2**20 else None
        result = honest(layer)
        del held
        return result

    return cheat


@seen_by("", "no_large_buffers")
def growing_buffer(honest):
    """Keeps a buffer that grows with the layers."""
    kept = {}

    def cheat(layer):
        n = layer.weight.quant_state.shape.numel()
        if "buffer" not in kept or kept["buffer"].numel() < n:
            kept["buffer"] = torch.empty(n, dtype=torch.uint8, device=layer.weight.device)
        return honest(layer)

    return cheat


class _Memory:
    """Memory of the driver's, which torch's allocator does not count, as torch can read it."""

    def __init__(self, like):
        address, driver = ctypes.c_uint64(), ctypes.CDLL("libcuda.so.1")
        assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(like.nbytes)) == 0
        self.__cuda_array_interface__ = {
            "shape": (like.numel(),), "typestr": "<i2", "data": (address.value, False), "version": 3,
        }  # fmt: skip


@seen_by("", "protocol single_kernel no_large_buffers")
def decoded_past_torch(honest):
    """Decodes large layers once into memory that torch does not count, and launches the named kernel on
    a few elements for show: it scored 14 of 14 before the protocol was watched."""
    saved, show, memory_past_torch = {}, [], _Memory

    def cheat(layer):
        state = layer.weight.quant_state
        if state.dtype == torch.float32 or state.shape.numel() < 1 << 20:
            return honest(layer)
        if (layer, state.dtype) not in saved:
            weight = honest(layer)
            memory = torch.as_tensor(memory_past_torch(weight), device="cuda")
            memory = memory.view(weight.dtype).view(weight.shape)
            saved[layer, state.dtype] = memory.copy_(weight)
            if not show:
                few = type(layer)(64, 64, False, compute_dtype=state.dtype, quant_type="nf4").cuda()
                show.append(few)
        honest(show[0])
        return saved[layer, state.dtype]

    return cheat
