"""Random layouts, sizes, values and settings against the oracle, bit for bit.

A few seconds of it are in the gate. By hand on a GPU: pytest -m long tests/long/test_fuzz.py
"""

import functools
import itertools
import math
import os
import random
from typing import NamedTuple

import pytest
import torch

from helpers.nf4 import kernel, launch, reference
from helpers.nf4.reference import default_device, different
from states import DTYPES, SPECIAL, random_state

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, about NaN
BLOCKSIZES = tuple(1 << k for k in range(5, 13))
BLOCKSIZES2 = (256, 64, 128, 512, 4096, 1, 8)
# What kernel.force gets; "own" leaves the card's settings. small_up_to=0: small tensors take the large tile.
WAYS = {
    "own": {},
    "t4": {"card": "t4"},
    "portable": {"asm": False},
    "integer bf16": {"int_bf16": True},
    "large tile": {"small_up_to": 0},
    "no hints, 4 words": {"hints": False, "small_up_to": 0, "words": 4},
    "code2 not staged": {"stage": False},
}
GUARD = 64  # elements on both sides of `out` that must stay NaN
POOL = 1 << 20
CASES = int(os.environ.get("NF4_FUZZ_CASES", 100_000))  # of a long run
HOW = dict(deadline=None, database=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))


class Kind(NamedTuple):
    """What the compiled kernel depends on; cases of one kind share its few compilations."""

    dtype: torch.dtype
    quant_type: str
    blocksize: int
    blocksize2: int  # 0 in a flat state
    way: str


class Case(NamedTuple):
    kind: Kind
    shape: tuple[int, ...]
    storage: torch.dtype
    transposed: bool  # the weight comes as W.t()
    out_skip: int | None  # out= given, so many elements into its memory; None: the kernel allocates
    special: bool  # scales with NaN, infinities, zeros, subnormal and huge numbers
    seed: int  # where in the random memory each tensor starts


def kinds(nested, ways=tuple(WAYS)):
    """All kinds of nested or of flat states."""
    second = BLOCKSIZES2 if nested else (0,)
    return [Kind(*each) for each in itertools.product(DTYPES, ("nf4", "fp4"), BLOCKSIZES, second, ways)]


@strategies.composite
def cases(draw, among, largest):
    """Cases of at most about `largest` elements: often at the edges of words, blocks and tiles."""

    def pick(*options):
        return draw(strategies.sampled_from(options))

    def between(least, most):
        return draw(strategies.integers(least, most))

    kind = pick(*pick(*among))
    edge = pick(8, kind.blocksize, 2048, 8192, 4096)
    n = pick(between(0, 72), between(0, largest), between(1, 4) * edge + between(-9, 9))
    n, inner = min(max(n, 0), largest), pick(1, 2, 3, 8, 64, 96)
    shape = pick((1, n), (n, 1), (n // inner, inner), (2, n // (2 * inner), inner), (n,))
    transposed = len(shape) == 2 and pick(False, False, True)
    out_skip, special = pick(None, None, 0, 1, 4, 8), pick(False, False, True)
    return Case(kind, shape, pick(*launch.STORAGES), transposed, out_skip, special, between(0, 1 << 16))


@functools.cache
def pool():
    """Random memory that every case cuts its tensors from: bytes, floats, floats with special values."""
    generator = torch.Generator().manual_seed(3407)
    packed = torch.randint(256, (POOL,), generator=generator, dtype=torch.uint8)
    plain = torch.randn(POOL // 4, generator=generator)
    special = plain.clone()
    values = torch.tensor(SPECIAL)
    special[::2] = values[torch.randint(len(values), (len(special) // 2,), generator=generator)]
    return [x.to(default_device()) for x in (packed, plain, special)]


def build(case):
    """(weight, state) of a case, as views of random memory: starts and neighbors are arbitrary."""
    kind, place, (packed, plain, special) = case.kind, random.Random(case.seed), pool()

    def cut(memory, count, step=1):
        start = place.randrange(0, len(memory) - count + 1) // step * step
        return memory[start : start + count]

    draw = functools.partial(cut, packed), functools.partial(cut, special if case.special else plain)
    how = dict(nested=kind.blocksize2 > 0, quant_type=kind.quant_type, blocksize=kind.blocksize)
    how["blocksize2"] = kind.blocksize2 or 256
    _, state = random_state(case.shape, kind.dtype, **how, draw=draw)
    if state.nested:
        state.offset = cut(plain, 1)[0]
    length = -(-((math.prod(case.shape) + 1) // 2) // case.storage.itemsize)
    if length == 1 and not case.transposed:
        length = 2  # a weight of shape (1, 1) would be its own transpose
    weight = cut(packed, length * case.storage.itemsize, case.storage.itemsize).view(case.storage)
    return weight.view(1, -1) if case.transposed else weight.view(-1, 1), state


def wrong(case):
    """The number of wrong elements and overwritten guards of one case.

    Without `out` the kernel is called twice: on a GPU the second call replays the first one's launch.
    """
    call, (weight, state) = launch._your_dequantize_nf4, build(case)
    expected = reference.dequantize(weight, state)
    with kernel.force(**WAYS[case.kind.way]):
        if case.out_skip is None:
            results = [call(weight, state) for _ in range(2 if weight.is_cuda else 1)]
            return sum(different(result, expected) for result in results)
        n, first = state.shape.numel(), GUARD + case.out_skip
        memory = torch.full((first + n + GUARD,), math.nan, dtype=state.dtype, device=weight.device)
        result = call(weight, state, out=memory[first : first + n].view(state.shape))
        guards = torch.cat([memory[:first], memory[first + n :]])
        return different(result, expected) + int((~guards.isnan()).sum())


@hypothesis.settings(max_examples=400, **HOW)
@hypothesis.given(case=cases([kinds(True, ("own",)), kinds(False, ("own",))], largest=3000))
def test_random_cases(case):
    """The card's own settings: layout, size, values."""
    assert wrong(case) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_random_cases_of_every_way(way):
    """Few kinds, as each costs compilations."""
    chosen = [random.Random(way).sample(kinds(nested, (way,)), 1) for nested in (True, False)]

    @hypothesis.settings(max_examples=200, **HOW)
    @hypothesis.given(case=cases(chosen, largest=40_000))
    def run(case):
        assert wrong(case) == 0

    run()


@pytest.mark.long
@pytest.mark.timeout(0)
def test_very_many_random_cases(store):
    """112 kinds on a GPU, half of them nested; in the interpreter those of its own settings."""
    gpu = default_device() == "cuda"
    ways, source = tuple(WAYS) if gpu else ("own",), random.Random(3407)
    chosen = source.sample(kinds(False, ways), 48) + source.sample(kinds(True, ways), 64)
    done = []
    for kind in chosen:

        @hypothesis.seed(len(done))
        @hypothesis.settings(max_examples=CASES // len(chosen), **HOW)
        @hypothesis.given(case=cases([[kind]], largest=40_000 if gpu else 5_000))
        def run(case):
            done.append(math.prod(case.shape))
            assert wrong(case) == 0

        run()
    store("fuzz", {("layers", "ours"): len(done), ("elements", "ours"): sum(done), ("wrong", "ours"): 0})
