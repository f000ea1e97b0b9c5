"""Random layouts, sizes, values, and settings against the oracle, bit for bit.

Some seconds of it are in the gate. By hand on a GPU: pytest -m long tests/long/test_fuzz.py -n 6
"""

import functools
import itertools
import math
import os
import random
from typing import NamedTuple

import pytest
import torch

from helpers.puzzle.layers import DEVICE
from nf4_triton import launch_general, reference, settings
from nf4_triton.reference import same_bits
from nf4_triton.state import STORAGES, Selection, UnsupportedState, make_packed, read_fields
from states import DTYPES, SPECIAL, oracle, random_state

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, about NaN
BLOCKSIZES = [1 << k for k in range(5, 13)]
BLOCKSIZES2 = [256, 64, 128, 512, 4096, 1, 8]
# Arguments of settings.force.
WAYS = {
    "own": {},
    "t4": {"card": "t4"},
    "portable": {"asm": False},
    "integer bf16": {"int_bf16": True},
    "large tile": {"rows": 128, "num_warps": 4},
    "no hints, small tile": {"hints": False, "rows": 16, "num_warps": 1},
}
GUARD = 64  # elements on both sides of `out` that must stay NaN
POOL = 1 << 20
CASES = int(os.environ.get("NF4_FUZZ_CASES", 40_000))  # of the long test


class Kind(NamedTuple):
    """What the compiled kernel depends on; cases of one kind share a few compilations."""

    way: str
    dtype: torch.dtype
    quant_type: str
    blocksize: int
    blocksize2: int  # 0: flat


def kinds(way, flat, nested):
    """Return some random kinds of a way, `flat` and `nested` many."""
    source = random.Random(3407)
    chosen = []
    for count, blocksizes2 in ((flat, [0]), (nested, BLOCKSIZES2)):
        every = itertools.product([way], DTYPES, ("nf4", "fp4"), BLOCKSIZES, blocksizes2)
        chosen += source.sample(list(every), count)
    return [Kind(*fields) for fields in chosen]


def random_shape(source, blocksize, largest):
    """Return a shape of at most `largest` elements, often near the end of a word, block, or tile."""
    edge = source.choice([8, blocksize, 2048, 4096, 8192])
    near = source.randint(1, 4) * edge + source.randint(-8, 9)
    n = min(largest, source.choice([source.randint(0, 72), source.randint(0, largest), near]))
    inner = source.choice([1, 2, 3, 8, 64, 96])
    rows = n // inner
    return source.choice([(1, n), (n, 1), (rows, inner), (2, rows // 2, inner), (n,)])


@functools.cache
def pool():
    """Return random bytes, floats, and special floats. Cases take views of them, so that the start of each
    tensor and its neighbors in memory are arbitrary."""
    generator = torch.Generator().manual_seed(3407)
    packed = torch.randint(256, (POOL,), generator=generator, dtype=torch.uint8)
    plain = torch.randn(POOL // 4, generator=generator)
    special = plain.clone()
    values = torch.tensor(SPECIAL)
    special[::2] = values[torch.randint(len(values), (len(special) // 2,), generator=generator)]
    return packed.to(DEVICE), plain.to(DEVICE), special.to(DEVICE)


def random_layer(source, kind, shape):
    """Return (weight, state): any storage dtype, either orientation, plain or special scales."""
    packed, plain, special = pool()

    def view(memory, count, step=1):
        start = source.randrange(len(memory) - count + 1) // step * step
        return memory[start : start + count]

    floats = source.choice([plain, plain, special])
    _, state = random_state(
        shape,
        kind.dtype,
        nested=kind.blocksize2 > 0,
        quant_type=kind.quant_type,
        blocksize=kind.blocksize,
        blocksize2=kind.blocksize2 or 256,
        draw=(functools.partial(view, packed), functools.partial(view, floats)),
    )
    if state.nested:
        state.offset = view(plain, 1)[0]
    storage = source.choice(STORAGES)
    size = storage.itemsize
    length = -(-math.prod(shape) // (2 * size))
    transposed = len(shape) == 2 and source.choice([True, False, False])
    if length == 1:  # counts as transposed, which only a matrix can be
        state.shape = torch.Size((1, math.prod(shape)))
    weight = view(packed, length * size, size).view(storage)
    return weight.view((1, -1) if transposed else (-1, 1)), state


def random_selection(source, slices):
    """Return (a Selection, the same for indexing): a range, or ids that may be strided."""
    count = source.choice([0, 1, 1, 2, source.randint(0, 9)])
    if source.choice([True, False]):
        first = source.randint(0, slices - 1)
        count = min(count, slices - first)
        return Selection(None, first, count), slice(first, first + count)
    pairs = [[source.randrange(slices), source.randrange(slices)] for _ in range(count + 1)]
    pairs = torch.tensor(pairs, device=DEVICE, dtype=source.choice([torch.int32, torch.int64]))
    column = pairs[:count, 0]
    ids = source.choice([column.contiguous(), column, pairs.view(-1)[: 2 * count : 2]])
    return Selection(ids, 0, count), ids.long()


def check_rows(kind, seed):
    """Compare calls with rows= with the oracle: allocating, and into an `out`. What is not contiguous is
    refused, also after a call with one slice."""
    source = random.Random(seed)
    shape = source.randint(1, 12), 8 * source.choice([1, 2, 3, 8, source.randint(1, 40)])
    weight, state = random_layer(source, kind, shape)
    shape, fields = tuple(state.shape), read_fields(weight, state)
    whole = reference.dequantize(make_packed(*fields)._replace(weight=weight.reshape(-1, 1))).view(shape)
    memory = torch.full((20, 2 * shape[1]), math.nan, dtype=kind.dtype, device=weight.device)
    with settings.force(**WAYS[kind.way]):
        for _ in range(6):
            selection, rows = random_selection(source, shape[0])
            count = selection.number
            narrow = memory[:count, : shape[1]]
            wide = memory.view(-1)[: count * shape[1]].view(count, shape[1])
            out = source.choice([None, narrow, wide])
            fits = all(x is None or x.is_contiguous() for x in (out, selection.ids))
            try:
                result = launch_general.dequantize(*fields, out, selection)
                assert fits and same_bits(result, whole[rows]), (kind, seed)
                (memory[:0] if out is None else out).fill_(math.nan)
            except UnsupportedState:
                assert not fits, (kind, seed)
            assert memory.isnan().all(), (kind, seed, "written outside")
    return memory.numel()


def check_case(kind, seed, largest):
    """Compare one random case with the oracle; return its number of elements."""
    source = random.Random(seed)
    shape = random_shape(source, kind.blocksize, largest)
    weight, state = random_layer(source, kind, shape)
    expected = oracle(weight, state)
    skip = source.choice([None, None, 0, 1, 4, 8])  # elements before `out`; None: the kernel allocates
    n = math.prod(shape)
    call = launch_general.dequantize_weight
    with settings.force(**WAYS[kind.way]):
        if skip is None:
            for _ in range(2):  # on a GPU the second is a kept launch
                assert same_bits(call(weight, state), expected), (kind, seed, largest)
        else:
            first = GUARD + skip
            memory = torch.full((first + n + GUARD,), math.nan, dtype=state.dtype, device=weight.device)
            out = memory[first : first + n].view(state.shape)
            assert same_bits(call(weight, state, out), expected), (kind, seed, largest)
            out.fill_(math.nan)
            assert memory.isnan().all(), (kind, seed, largest)
    return n


def check_cases(chosen, count, largest):
    return [check_case(chosen[seed % len(chosen)], seed, largest) for seed in range(count)]


def test_random_cases():
    """The settings of this card: layout, size, values."""
    chosen = kinds("own", flat=48, nested=64)
    check_cases(chosen, 400, largest=3000)
    for seed in range(100):
        check_rows(chosen[seed % len(chosen)], seed)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", WAYS)
def test_very_many_random_cases(way):
    chosen = kinds(way, flat=8, nested=11)
    sizes = check_cases(chosen, CASES // len(WAYS), largest=40_000)
    sizes += [check_rows(chosen[seed % len(chosen)], seed) for seed in range(CASES // len(WAYS) // 4)]
    print(f"{len(sizes):,} layers of {sum(sizes):,} elements, none wrong")
