"""Random layouts, sizes, values, and settings against the oracle, bit for bit.

Some seconds of it are in the gate. By hand on a GPU: pytest -m long tests/long/test_fuzz.py -n 6
"""

import itertools
import math
import os
import random

import pytest
import torch

from helpers.puzzle.layers import DEVICE
from nf4_triton import launch_general, settings
from nf4_triton.reference import same_bits
from nf4_triton.state import STORAGES, Selection, UnsupportedState, read_state
from states import DTYPES, SPECIAL, between_guards, moved, oracle, random_state

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, about NaN
BLOCKSIZES = [1 << k for k in range(5, 13)]
BLOCKSIZES2 = [0, 256, 64, 512, 1, 0, 8, 0]  # 0: flat
# Arguments of settings.force.
WAYS = {
    "own": {},
    "t4": {"card": "t4"},
    "portable": {"asm": False},
    "integer bf16": {"int_bf16": True},
    "large tile": {"rows": 128, "num_warps": 4},
    "no hints, small tile": {"hints": False, "rows": 16, "num_warps": 1},
}
CASES = int(os.environ.get("NF4_FUZZ_CASES", 40_000))  # of the long test


def kinds(way, count):
    """Return `count` random layouts with a way: what the compiled kernel depends on. Cases of one kind share
    a few compilations."""
    every = itertools.product([way], DTYPES, ("nf4", "fp4"), BLOCKSIZES, BLOCKSIZES2)
    return random.Random(3407).sample(list(every), count)


def random_shape(source, largest):
    """Return a shape of at most `largest` elements, often near the end of a word, block, or tile."""
    edge = source.choice([8, *BLOCKSIZES, 8192])
    near = source.randint(1, 4) * edge + source.randint(-8, 9)
    n = min(largest, source.choice([source.randint(0, 72), source.randint(0, largest), near]))
    inner = source.choice([1, 2, 3, 8, 64, 96])
    rows = n // inner
    return source.choice([(1, n), (n, 1), (rows, inner), (2, rows // 2, inner), (n,)])


def random_layer(source, kind, shape):
    """Return (weight, state): any storage dtype, address, and orientation, plain or special scales."""
    _, dtype, quant_type, blocksize, blocksize2 = kind
    how = dict(
        nested=blocksize2 > 0, quant_type=quant_type, blocksize=blocksize, blocksize2=blocksize2 or 256
    )
    weight, state = random_state(shape, dtype, **how, seed=source.randrange(1 << 30))
    holder = state.state2 or state
    if source.choice([True, False, False]):
        some = holder.absmax[::2]
        some.copy_(torch.tensor(source.choices(SPECIAL, k=len(some))))
    holder.absmax = moved(holder.absmax, source.randrange(4))
    state.absmax = moved(state.absmax, source.randrange(16))
    storage = source.choice(STORAGES)
    size = storage.itemsize
    length = -(-weight.numel() // size)
    weight = moved(weight.view(-1).repeat(8)[: length * size], size * source.randrange(16)).view(storage)
    transposed = len(shape) == 2 and source.choice([True, False, False])
    if length == 1:  # counts as transposed, which only a matrix can be
        state.shape = torch.Size((1, math.prod(shape)))
    return weight.view((1, -1) if transposed else (-1, 1)), state


def random_selection(source, slices):
    """Return (a Selection, the same for indexing): a range, or ids that may be strided."""
    count = source.choice([0, 1, 1, 2, source.randint(0, 9)])
    if source.choice([True, False]):
        first = source.randint(0, slices - 1)
        count = min(count, slices - first)
        return Selection(None, first, count), slice(first, first + count)
    ids = torch.tensor(source.choices(range(slices), k=2 * count + 1), device=DEVICE)
    ids = ids.to(source.choice([torch.int32, torch.int64])).as_strided((count,), (source.randint(1, 2),))
    return Selection(ids, 0, count), ids.long()


def check_rows(kind, seed):
    """Compare calls with rows= with the oracle: allocating, and into an `out`. What is not contiguous is
    refused, also after a call with one slice."""
    source = random.Random(seed)
    shape = source.randint(1, 12), 8 * source.choice([1, 2, 3, 8, source.randint(1, 40)])
    weight, state = random_layer(source, kind, shape)
    (slices, inner), fields = state.shape, read_state(weight, state)
    whole = oracle(weight.reshape(-1, 1), state).reshape(slices, inner)
    memory = torch.full((20, 2 * inner), math.nan, dtype=state.dtype, device=weight.device)
    with settings.force(**WAYS[kind[0]]):
        for _ in range(6):
            selection, rows = random_selection(source, slices)
            stride = source.choice([0, inner, 2 * inner])  # 0: the kernel allocates
            out = memory.as_strided((selection.number, inner), (stride, 1)) if stride else None
            fits = all(x is None or x.is_contiguous() for x in (out, selection.ids))
            try:
                result = launch_general.run_kernel(*fields, out, selection)
                assert fits and same_bits(result, whole[rows]), (kind, seed)
                (memory[:0] if out is None else out).fill_(math.nan)
            except UnsupportedState:
                assert not fits, (kind, seed)
            assert memory.isnan().all(), (kind, seed, "written outside")


def check_case(kind, seed, largest):
    """Compare one random case with the oracle; return its number of elements."""
    source = random.Random(seed)
    shape = random_shape(source, largest)
    weight, state = random_layer(source, kind, shape)
    expected = oracle(weight, state)
    skip = source.choice([None, None, 0, 1, 4, 8])  # elements before `out`; None: the kernel allocates
    call = launch_general.dequantize_weight
    with settings.force(**WAYS[kind[0]]):
        if skip is None:
            for _ in range(2):  # on a GPU the second is a kept launch
                assert same_bits(call(weight, state), expected), (kind, seed, largest)
        else:
            before, out, after = between_guards(state.shape, state.dtype, weight.device, skip)
            assert same_bits(call(weight, state, out), expected), (kind, seed, largest)
            assert before.isnan().all() and after.isnan().all(), (kind, seed, "written outside")
    return math.prod(shape)


def test_random_cases():
    """The settings of this card: layout, size, values."""
    chosen = kinds("own", 100)
    for seed in range(400):
        check_case(chosen[seed % 100], seed, largest=3000)
    for seed in range(100):
        check_rows(chosen[seed], seed)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("way", WAYS)
def test_very_many_random_cases(way):
    chosen = kinds(way, 20)
    elements = 0
    for seed in range(CASES // len(WAYS)):
        elements += check_case(chosen[seed % 20], seed, largest=40_000)
        if seed % 4 == 0:
            check_rows(chosen[seed % 20], seed)
    print(f"{elements:,} elements, none wrong")
