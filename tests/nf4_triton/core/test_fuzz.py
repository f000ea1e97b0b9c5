"""Random sequences of calls on a few layers that change between calls: each result equals the oracle's bits.

On a GPU made of numpy, which fails where a launch breaks what the kernels assume, and with the kernels.
A sequence depends only on its seed: NF4_FUZZ_SEED=7. By hand on a GPU: pytest -m long FILE -n 6
"""

import contextlib
import copy
import math
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton

from helpers.puzzle.layers import DEVICE
from nf4_triton import dequantize
from nf4_triton.core import launch, launch_general, reference, settings
from nf4_triton.core.checks import STORAGES
from nf4_triton.core.reference import same_bits
from nf4_triton.core.state import Selection, read_state
from nf4_triton.core.supported import UnsupportedState
from states import (
    CHANGES,
    DTYPES,
    SECOND,
    SPECIAL,
    WAYS,
    get,
    moved,
    oracle,
    random_state,
    replace,
)

Params4bit = pytest.importorskip("bitsandbytes").nn.Params4bit
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about NaN
SEED = int(os.environ.get("NF4_FUZZ_SEED", 3407))
STEPS = int(os.environ.get("NF4_FUZZ_STEPS", 20_000))  # of the long test


def random_kind(largest):
    """Return arguments of random_state, for the puzzle's layers or for any."""
    if random.random() < 0.3:
        shape, blocksize2 = random.choice([(64, 64), (192, 64)]), random.choice([256, 64])
        return dict(shape=shape, dtype=random.choice(DTYPES[:2]), blocksize2=blocksize2)
    edge = random.choice([1, 8, 24, 64, 256, 4096])  # the end of a word, a block, a tile
    n = min(largest, abs(edge * random.randint(0, 12) + random.choice([0, 0, -1, 1, 7])))
    inner = random.choice([1, 8, 24, 96])
    rows = n // inner, inner
    return dict(
        shape=random.choice([(1, n), (n, 1), (n,), rows, rows, rows, (2, n // inner // 2, inner)]),
        dtype=random.choice(DTYPES),
        nested=random.random() < 0.6,
        quant_type=random.choice(["nf4", "fp4"]),
        blocksize=1 << random.choice([6, 6, 6, random.randint(3, 13), 40]),
        blocksize2=random.choice([256, 256, 1, 8, 512]),
    )


def random_layer(kinds):
    """Return an object whose weight has a quant_state, with codes in any storage dtype and orientation."""
    weight, state = random_state(**random.choice(kinds), seed=random.randrange(1 << 30))
    if random.random() < 0.1:
        some = (state.state2 or state).absmax[::2]
        some.copy_(torch.tensor(random.choices(SPECIAL, k=len(some))))
    if random.random() < 0.4:
        dtype = random.choice(STORAGES)
        weight = torch.cat([weight, weight.new_zeros(-len(weight) % dtype.itemsize, 1)]).view(-1).view(dtype)
        weight = weight.view(random.choice([(-1, 1), (-1,), (1, -1)]))
    if weight.shape[0] == 1:  # the result is transposed
        state.shape = torch.Size((1, state.shape.numel()))
    if random.random() < 0.5:
        weight = Params4bit(weight, requires_grad=False)
    weight.quant_state = state
    return SimpleNamespace(weight=weight)


def fill(x):
    return x.data.uniform_(0.1, 1.1) if x.is_floating_point() else x.data.random_()


def elsewhere(x):
    return moved(x, random.choice([1, 4, 8, 16])) if x.numel() else x


TENSORS = "weight", *SECOND
CONTENTS = [(name, how) for name in TENSORS for how in (fill, lambda x: fill(x.clone()), elsewhere)]
MODES = [contextlib.nullcontext] * 4
MODES += [torch.no_grad, torch.inference_mode, lambda: torch.autocast(DEVICE, torch.bfloat16)]
HOOK = triton.knobs.runtime, "launch_enter_hook", bool
MODES += [lambda: torch.device("meta"), lambda: mock.patch.object(*HOOK)]
MODES += [lambda: mock.patch.dict(os.environ, NF4_BACKEND="torch")]
DOORS = "package", *2 * ("library", "rows", "selection"), "puzzle"


def random_rows(slices, device):
    """Return a range, or ids that may be strided and out of range: as a Selection, and for indexing."""
    count = random.choice([0, 1, 1, 2, 5])
    if random.random() < 0.5 or not slices:
        start = random.randint(0, slices)
        count = min(count, slices - start)
        return Selection(None, start, count), slice(start, start + count)
    ids = torch.tensor(random.choices(range(-1, slices + 1), k=2 * count + 1), device=device)
    ids = ids.to(random.choice([torch.int32, torch.int64])).as_strided((count,), (random.choice([1, 1, 2]),))
    return Selection(ids, 0, count), ids.long().clamp(0, slices - 1)


def random_out(shape, dtype, device):
    """Return memory full of NaN, and a tensor in it: at any address, maybe strided, maybe of another
    shape."""
    stride, skip = random.choice([1, 1, 2]), random.choice([0, 0, 0, 1, 8])
    slices, *inner = shape[0] + random.choice([0] * 9 + [1]), *shape[1:]
    size = slices * stride * math.prod(inner)
    memory = torch.full((skip + size + 64,), math.nan, dtype=dtype, device=device)
    return memory, memory[skip:][:size].view(slices, stride, *inner)[:, 0]


def through(door, layer, out, dtype, rows, selection):
    """Return the result of a call."""
    weight, state = layer.weight, layer.weight.quant_state
    doors = {
        "package": lambda: dequantize(layer, None, out, dtype),
        "rows": lambda: dequantize(layer, None, out, dtype, rows),
        "selection": lambda: launch_general.dequantize_tensors(*read_state(weight, state), out, selection),
        "library": lambda: launch_general.dequantize_weight(weight, state, out),
        "puzzle": lambda: launch.your_dequantize_nf4(layer),
    }
    return doors[door]()


def should_be(weight, state, dtype, rows):
    """Return what a call should return. Selected rows are never transposed."""
    state = copy.copy(state)
    state.dtype = dtype
    result = oracle(weight, state)
    if rows is None:
        return result
    return (result.t() if weight.shape[0] == 1 else result)[rows].clone()


class Sequence:
    """Calls on four layers."""

    def __init__(self, seed, gpu, kinds, largest):
        random.seed(seed)
        torch.manual_seed(seed)
        self.gpu, self.results = gpu, []  # earlier results, and what they should still be
        self.kinds = [random_kind(largest) for _ in range(kinds)]
        self.layers = [random_layer(self.kinds) for _ in range(4)]

    def step(self):
        """Change a layer, and call on it."""
        i, what = random.randrange(4), random.random()
        layer = self.layers[i]
        if what < 0.25:
            with torch.inference_mode(random.random() < 0.2):
                self.layers[i] = layer = random_layer(self.kinds)
        elif what < 0.3:
            self.layers[i] = layer = copy.deepcopy(layer)
        elif what < 0.32 and launch.CAN_RELAUNCH:  # the interpreter does not support threads
            self.in_threads()
        else:
            name, how = random.choice(CONTENTS + CHANGES)
            if layer.weight.quant_state.nested or not name.startswith(("state2", "offset")):
                with torch.inference_mode(layer.weight.is_inference()):
                    replace(layer, name, how)
        for door in 2 * random.choices(DOORS, k=random.randint(1, 2)):
            self.call(layer, door)

    def in_threads(self):
        """First and later calls on all layers at the same time."""
        start = threading.Barrier(4)

        def work(layer):
            given = layer.weight, layer.weight.quant_state
            expected = oracle(*given)
            self.own(layer)
            start.wait()
            with torch.inference_mode(layer is self.layers[0]):
                for _ in range(3):
                    assert same_bits(launch_general.dequantize_weight(*given), expected)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, self.layers))

    def own(self, layer, *others):
        names = TENSORS if layer.weight.quant_state.nested else TENSORS[:2]
        self.gpu.own(*(get(layer, name) for name in names), *others)

    def call(self, layer, door):
        """Compare a call with the oracle, or fail unless it is refused."""
        fits = True
        weight, state, out, selection, rows = layer.weight, layer.weight.quant_state, None, None, None
        shape, dtype, inner = tuple(state.shape), state.dtype, math.prod(state.shape[1:])
        if door in ("package", "rows"):
            dtype = random.choice([dtype, *DTYPES])
        if door in ("rows", "selection") and inner:
            selection, rows = random_rows(shape[0], weight.device)
            fits = fits and inner % 8 == 0
            shape = selection.number, *shape[1:]
            if door == "selection" and selection.ids is not None:
                fits = fits and selection.ids.is_contiguous()
        if door != "puzzle" and random.random() < 0.4:
            with torch.inference_mode(random.random() < 0.1):
                memory, out = random_out(shape, dtype, weight.device)
            fits = fits and out.is_contiguous() and out.shape == shape
            version = out.is_inference() or out._version
        self.own(layer, out, rows, selection and selection.ids)
        mode = random.choice([*MODES, lambda: self.gpu.device(0)])
        try:
            with mode():
                result = through(door, layer, out, dtype, rows, selection)
        except UnsupportedState:
            result = None
        if result is None:
            assert door == "puzzle" or not fits
            assert out is None or memory.isnan().all(), "written"
            return
        expected = should_be(weight, state, dtype, rows)
        if door == "selection" and selection and selection.ids is not None:
            expected[selection.ids != rows] = math.nan
        assert fits and same_bits(result, expected)
        assert all(same_bits(*pair) for pair in self.results), "an earlier result has changed"
        if out is None:
            self.results = [*self.results[-2:], (result, expected)]
            assert result.is_inference() == (mode is torch.inference_mode)
        else:
            assert result.data_ptr() == out.data_ptr()
            assert out.is_inference() or out._version > version, "autograd was not told"
            with torch.inference_mode():
                out.fill_(math.nan)
            assert memory.isnan().all(), "written outside"


@pytest.fixture
def run(gpu, monkeypatch):
    """run(seed, kinds, largest, steps): with layers of `kinds` kinds, of at most `largest` elements each."""
    monkeypatch.setattr(reference, "CHUNK", 256)

    def run(seed, kinds, largest, steps):
        sequence = Sequence(seed, gpu, kinds, largest)
        try:
            for step in range(steps):  # noqa: B007
                sequence.step()
        finally:
            print(f"seed {seed}, step {step}, {dict(gpu.launches)}")

    return run


@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_launches(watch, run, gpu, device, seed):
    if device == "cuda":
        pytest.skip("the next test has a better GPU")
    watch(launch_general)
    for rows in (4, 2):  # launches that were cached for other settings are not used
        with settings.force(tile_rows=rows):
            run(seed, kinds=6, largest=3000, steps=1000)
    assert sum(count for how, count in gpu.launches.items() if how.startswith("kept")) > 400


def test_kernels(run):
    run(SEED, kinds=100, largest=3000, steps=160)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", WAYS)
def test_many_launches(run, way):
    with settings.force(**WAYS[way]):
        run(SEED, kinds=20, largest=40_000, steps=STEPS // len(WAYS))
