"""Random sequences of calls on a few shared layers: what changes between two calls is honored, bit for bit.

Without a GPU on numpy's, which also fails where a launch breaks what the kernels assume. A sequence depends
on its seed alone: NF4_FUZZ_SEED=7 runs that one. More: pytest -m long tests/nf4_triton/test_sequences.py
"""

import contextlib
import copy
import math
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from nf4_triton import dequantize, launch, launch_general, settings
from nf4_triton.libraries import axolotl, bitsandbytes
from nf4_triton.libraries.site import Site
from nf4_triton.reference import same_bits
from nf4_triton.settings import UnsupportedState
from nf4_triton.state import STORAGES, Selection, read_state
from states import DTYPES, SECOND, freed, get, moved, oracle, random_state, replace, strided

bitsandbytes_nn = pytest.importorskip("bitsandbytes").nn
SEEDS = range(3407, 3411)
if "NF4_FUZZ_SEED" in os.environ:
    SEEDS = [int(os.environ["NF4_FUZZ_SEED"])]
STEPS = int(os.environ.get("NF4_FUZZ_STEPS", 1000))
SHAPES = [(64, 64), (320, 64), (40, 24), (9, 8), (12, 40), (5, 16, 32), (83, 9), (6, 96), (0, 64), (3, 1)]


def random_kind(source):
    """Return the arguments of random_state; every second kind is the puzzle's."""
    if source.random() < 0.5:
        return dict(shape=source.choice([(64, 64), (320, 64)]), dtype=source.choice(DTYPES[:2]))
    return dict(
        shape=source.choice(SHAPES),
        dtype=source.choice(DTYPES),
        nested=source.random() < 0.6,
        quant_type=source.choice(["nf4", "nf4", "fp4"]),
        blocksize=source.choice([64, 64, 8, 32, 128, 4096]),
        blocksize2=source.choice([256, 256, 4]),
    )


def random_layer(source, kinds):
    weight, state = random_state(**source.choice(kinds), seed=source.randrange(1000))
    kind = source.choice(
        [torch.Tensor, torch.nn.Parameter, pytest.importorskip("bitsandbytes").nn.Params4bit]
    )
    if kind is not torch.Tensor:
        weight = kind(weight, requires_grad=False)
    weight.quant_state = state
    return SimpleNamespace(weight=weight)


def names_of(layer):
    return ["weight", *(SECOND if layer.weight.quant_state.nested else SECOND[:1])]


def state_of(layer):
    return layer.weight.quant_state


# What may change between two calls and leaves a layer that can be dequantized.
def fill(source, layer, name):
    """Other contents, in place."""
    x = get(layer, name)
    if x.dtype == torch.float32 and name != "weight":
        x.uniform_(0.1, 1.1)
    elif x.dim():
        x.data.view(-1).view(torch.uint8).random_(256)


def new(source, layer, name):
    """At the old address, if the allocator takes its memory again."""
    replace(layer, name, torch.empty_like)
    fill(source, layer, name)


def elsewhere(source, layer, name):
    skip = source.choice([0, 1, 3, 16])
    replace(layer, name, lambda x: moved(x, skip) if x.numel() else x)


def deep_copied(source, layer, name):
    layer.weight, state = copy.deepcopy((layer.weight, state_of(layer)))
    layer.weight.quant_state = state  # which a Parameter loses


def longer(source, layer, name):
    if name not in ("weight", "offset"):
        replace(layer, name, lambda x: torch.cat([x, torch.ones_like(x)]))


def another_offset(source, layer, name):
    dtype = source.choice([torch.float16, torch.bfloat16, torch.float64, None])
    if state_of(layer).nested:
        replace(layer, "offset", lambda x: x.view(()).to(dtype) if dtype else x.float().view(1))


def another_dtype(source, layer, name):
    state_of(layer).dtype = source.choice(DTYPES)


def another_type(source, layer, name):
    state_of(layer).quant_type = source.choice(["nf4", "fp4"])


def larger_blocks(source, layer, name):
    state = state_of(layer)
    holder = state.state2 if state.nested and source.random() < 0.5 else state
    holder.blocksize *= 2


def another_shape(source, layer, name):
    shape = state_of(layer).shape
    if layer.weight.shape[0] != 1:
        shape = source.choice([shape[::-1], (math.prod(shape),), (1, math.prod(shape))])
    state_of(layer).shape = source.choice([torch.Size, torch.Size, list])(shape)


def another_form(source, layer, name):
    """Of the packed codes: their storage dtype and orientation."""
    data = layer.weight.data.reshape(-1).view(torch.uint8)
    dtype = source.choice([torch.uint8, *STORAGES])
    if data.numel() % dtype.itemsize or data.storage_offset() % dtype.itemsize or data.numel() < 16:
        return
    shape = source.choice([(-1, 1), (-1, 1), (-1,), (1, -1)])
    if len(state_of(layer).shape) == 2 or shape != (1, -1):
        layer.weight.data = data.view(dtype).view(shape)


LIKE_BEFORE = [fill, new, elsewhere, deep_copied]
OTHERWISE = [longer, another_offset, another_dtype, another_type, larger_blocks, another_shape, another_form]
# What no door takes.
BROKEN = [
    ("weight", freed),
    ("weight", strided),
    ("absmax", strided),
    ("absmax", lambda x: x.to("meta")),
    ("offset", lambda x: x.to("meta")),
    ("state2.code", torch._neg_view),
    ("blocksize", lambda x: 48),
]


# The doors. They raise UnsupportedState for what they do not take.
def by_package(layer, out, dtype, selection):
    return dequantize(layer.weight, state_of(layer), out, dtype)


def by_layer(layer, out, dtype, selection):
    return dequantize(layer, out=out, dtype=dtype)


def by_entry(layer, out, dtype, selection):
    return launch_general.dequantize_weight(layer.weight, state_of(layer), out)


def by_rows(layer, out, dtype, selection):
    return launch_general.run_kernel(*read_state(layer.weight, state_of(layer)), out, selection)


def by_puzzle(layer, out, dtype, selection):
    return launch.your_dequantize_nf4(layer)


def answered(result):
    if result is None:
        raise UnsupportedState("left to the library")
    return result


SITE = Site("of no library", None)


def by_bitsandbytes(layer, out, dtype, selection):
    return answered(bitsandbytes.dequantize_4bit(SITE, layer.weight, state_of(layer), out=out))


def by_axolotl(layer, out, dtype, selection):
    q = state_of(layer)
    parts = q.absmax, q.state2.code, q.state2.absmax, q.offset, q.blocksize, q.state2.blocksize
    return answered(axolotl.ctypes_nf4_dequant(SITE, layer.weight, *parts, q.shape, q.dtype))


def by_product(layer, out, dtype, selection):
    """The test takes the product away."""
    q = state_of(layer)
    x = torch.empty(0, dtype=dtype, device=layer.weight.device)
    absmax, *nested = q.absmax, None, None, None
    if q.nested:
        absmax, *nested = q.state2.absmax, q.absmax, q.state2.code, q.offset
    sizes = q.blocksize, q.quant_type, None
    return answered(
        bitsandbytes.dequant_linear_fallback(SITE, x, layer.weight, q.shape, absmax, *sizes, *nested)
    )


TAKE_DTYPE = by_package, by_layer, by_product
TAKE_OUT = by_package, by_layer, by_entry, by_rows, by_bitsandbytes


def random_door(source, layer):
    """Return (a door, whether it takes the layer; None: it may, by a launch that another door kept)."""
    weight, q = layer.weight, state_of(layer)
    door = source.choice([*TAKE_OUT, *TAKE_DTYPE, by_axolotl, by_rows, by_puzzle, by_puzzle])
    n, inner = math.prod(q.shape), math.prod(q.shape[1:])
    if door is by_axolotl and not (q.nested and q.quant_type == "nf4"):
        door = by_puzzle
    if door is by_product and (len(q.shape) != 2 or q.nested and q.state2.blocksize != 256):
        door = by_puzzle
    if door is by_rows:
        return door, inner > 0 and inner % 8 == 0
    if door is not by_puzzle:
        return door, True
    fits = q.nested and q.quant_type == "nf4" and q.dtype != torch.float32 and n and n % 64 == 0
    fits = fits and 64 <= q.blocksize <= 4096 and 64 <= q.state2.blocksize <= 4096
    fits = (
        fits and weight.dtype == torch.uint8 and weight.shape == (n // 2, 1) and weight.data_ptr() % 16 == 0
    )
    return door, (fits and q.offset.dtype == torch.float32 and isinstance(q.shape, tuple)) or None


def random_selection(source, slices, device):
    """Return (a Selection, the same for indexing, which of these do not exist)."""
    count = source.choice([0, 1, 1, 2, 5, 9])
    if source.random() < 0.5 or not slices:
        first = source.randint(0, slices)
        count = min(count, slices - first)
        return Selection(None, first, count), slice(first, first + count), []
    ids = torch.tensor(source.choices(range(-1, slices + 1), k=2 * count + 1), device=device)
    ids = ids.to(source.choice([torch.int32, torch.int64])).as_strided((count,), (source.choice([1, 1, 2]),))
    known = ids.long().clamp(0, slices - 1)
    return Selection(ids, 0, count), known, known != ids


class Sequence:
    """Calls on shared layers."""

    def __init__(self, seed, gpu):
        self.source, self.gpu = random.Random(seed), gpu
        torch.manual_seed(seed)
        self.kinds = [random_kind(self.source) for _ in range(6)]
        self.layers = [random_layer(self.source, self.kinds) for _ in range(4)]
        self.modes = [contextlib.nullcontext] * 6 + [torch.no_grad, torch.inference_mode]
        self.modes += [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta")]
        self.modes += [lambda: gpu.device(0)]
        self.results = []  # of earlier calls, and what they should be

    def step(self):
        source, i = self.source, self.source.randrange(4)
        what = source.random()
        if what < 0.1:
            self.layers[i] = random_layer(source, self.kinds)
        elif what < 0.9:
            change = source.choice(LIKE_BEFORE if what < 0.75 else OTHERWISE)
            change(source, self.layers[i], source.choice(names_of(self.layers[i])))
        elif what < 0.91:
            self.in_threads()
        elif what < 0.95:
            self.broken(self.layers[i])
        for _ in range(source.randint(1, 4)):
            self.call(self.layers[i], *random_door(source, self.layers[i]))

    def broken(self, layer):
        """Calls on a layer that no door takes, and one of which the launch fails."""
        name, change = self.source.choice(BROKEN)
        if not state_of(layer).nested or get(layer, "absmax").numel() < 2:
            return
        before = get(layer, name)
        before = before.data if name == "weight" else before
        replace(layer, name, change)
        for _ in range(3):
            self.call(layer, random_door(self.source, layer)[0], False)
        replace(layer, name, lambda x: before)
        self.own(layer)
        self.gpu.fails = True
        with contextlib.suppress(OSError):
            by_entry(layer, None, None, None)
        self.gpu.fails = False

    def in_threads(self):
        """First and later calls on all layers at the same time."""
        start = threading.Barrier(4)

        def work(layer):
            expected = oracle(layer.weight, state_of(layer))
            start.wait()
            with torch.inference_mode(layer is self.layers[0]):
                self.own(layer)
                for _ in range(3):
                    assert same_bits(by_entry(layer, None, None, None), expected)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, self.layers))

    def own(self, layer, *others):
        self.gpu.own(*(get(layer, name) for name in names_of(layer)), *others)

    def call(self, layer, door, fits):
        """Compare a call with the oracle, or fail unless it is refused."""
        source, q = self.source, state_of(layer)
        state, selection = copy.copy(q), None
        if door in TAKE_DTYPE:
            state.dtype = source.choice([q.dtype, q.dtype, q.dtype, *DTYPES])
        rows, missing, shape = slice(None), [], tuple(q.shape)
        if door is by_rows:
            selection, rows, missing = random_selection(source, q.shape[0], layer.weight.device)
            fits = fits and (selection.ids is None or selection.ids.is_contiguous())
            shape = selection.number, *shape[1:]
        memory = out = None
        if door in TAKE_OUT and source.random() < 0.4:
            memory, out = self.random_out(shape, state.dtype, layer.weight.device)
            fits = fits and out.is_contiguous()
        self.own(layer, out, selection and selection.ids)
        mode, version = source.choice(self.modes), out is not None and out._version
        try:
            with mode():
                result = door(layer, out, state.dtype, selection)
        except UnsupportedState:
            assert fits is not True
            assert memory is None or memory.isnan().all(), "written"
            return
        assert fits is not False
        if door is by_rows:
            expected = oracle(layer.weight.reshape(-1, 1), state)[rows].clone()
            expected[missing] = math.nan
        else:
            expected = oracle(layer.weight, state)
        if door is by_product and layer.weight.shape[0] == 1:
            expected = expected.t()
        assert same_bits(result, expected)
        for kept, same in self.results:
            assert same_bits(kept, same), "an earlier result has changed"
        if out is None:
            self.results = [*self.results[-2:], (result, expected)]
            assert result.is_inference() == (mode is torch.inference_mode)
        else:
            assert result.data_ptr() == out.data_ptr() and out._version > version, "autograd was not told"
            out.fill_(math.nan)
            assert memory.isnan().all(), "written outside"

    def random_out(self, shape, dtype, device):
        """Return memory full of NaN, and a tensor inside, at any address, that may be strided."""
        stride, skip = self.source.choice([1, 1, 1, 2]), self.source.choice([0, 0, 1, 8])
        memory = torch.full((skip + stride * math.prod(shape) + 64,), math.nan, dtype=dtype, device=device)
        return memory, memory[skip:][: stride * math.prod(shape) : stride].view(shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sequences(gpu, monkeypatch, device, seed):
    for room in (launch, launch_general):
        if device == "cpu":
            gpu.install(room, monkeypatch)
    for table in (launch.launches, launch_general.launches_with):
        table.clear()
    monkeypatch.setattr(bitsandbytes, "linear", lambda x, weight, bias: weight)
    monkeypatch.setenv("NF4_BACKEND", "triton")
    torch.set_num_threads(1)
    sequence, steps = Sequence(seed, gpu), 0
    with settings.force(rows=4):
        try:
            while steps < STEPS:
                sequence.step()
                steps += 1
        finally:
            print(f"seed {seed}, {steps} steps, {dict(gpu.counts)}")
