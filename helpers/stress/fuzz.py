"""Random layouts, sizes, values and settings against the exact oracle, bit for bit.

What can be drawn is said once: Hypothesis draws from it on the CPU, with shrinking
(tests/stress/test_fuzz.py), `random.Random` on the GPU, where `python -m helpers fuzz --cases 100000` spreads
the cases over processes and compares on the GPU, with one synchronization per batch. A failure is printed as
a Case that can be pasted into `fuzz.check(...)`.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from helpers.nf4 import kernel as nf4_kernel
from helpers.nf4 import reference
from helpers.results import store as results
from helpers.stress.states import mismatches, state_of
from helpers.puzzle.protocol import DEVICE

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
STORAGES = {"uint8": torch.uint8, **DTYPES}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKSIZES2 = (256, 64, 128, 512, 4096, 1, 8)
# What kernel.force gets; "own" leaves the card's decisions. small_up_to=0: small tensors take the large tile.
WAYS = {
    "own": {},
    "t4": {"card": "t4"},
    "portable": {"asm": False},
    "integer bf16": {"int_bf16": True},
    "large tile": {"small_up_to": 0},
    "no hints, 4 words": {"hints": False, "small_up_to": 0, "words": 4},
    "code2 not staged": {"stage": False},
}
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-38, 3e-39, 1.2e-38, 1e-40)
SPECIAL += (5e-45, -3e-39, 3e38, -3e38, 1e30, 6e4, 65504.0, 1e-8, 6e-8, -1.0, 1.0)
GUARD = 64  # elements on both sides of `out` that must stay NaN
POOL = 1 << 22
BATCH = 200


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the compiled kernel depends on; cases of one kind share its few compilations."""

    dtype: str
    quant_type: str
    blocksize: int
    blocksize2: int  # 0 in a flat state
    way: str


@dataclasses.dataclass(frozen=True)
class Case:
    kind: Kind
    shape: tuple[int, ...]
    storage: str  # dtype that the packed bytes are stored in
    transposed: bool  # the weight comes as W.t()
    out_skip: int | None  # out= given, so many elements into its memory; None: the kernel allocates
    special: bool  # scales with NaN, infinities, zeros, subnormal and huge numbers
    seed: int  # where in the random memory each tensor starts


def every_kind(nested: bool, ways=tuple(WAYS)) -> list[Kind]:
    """All kinds of nested or of flat states."""
    second = BLOCKSIZES2 if nested else (0,)
    return [Kind(*each) for each in itertools.product(DTYPES, ("nf4", "fp4"), BLOCKSIZES, second, ways)]


def kinds(count: int, seed: int, ways=tuple(WAYS)) -> list[Kind]:
    """`count` different kinds at random, half of them of nested states."""
    source, flat = random.Random(seed), every_kind(False, ways)
    chosen = source.sample(flat, min(count // 2, len(flat)))
    return chosen + source.sample(every_kind(True, ways), count - len(chosen))


def draw_case(pick: Callable, kind: Kind, largest: int) -> Case:
    """A case of at most about `largest` elements: often at the edges of words, blocks and tiles.

    pick(options) returns one element of a sequence or range; by Hypothesis or by random.Random.
    """
    edge = pick((8, kind.blocksize, 2048, 8192, 4096))
    n = pick((pick(range(0, 72)), pick(range(0, largest)), pick(range(1, 5)) * edge + pick(range(-9, 10))))
    n = min(max(n, 0), largest)
    inner = pick((1, 2, 3, 8, 64, 96))
    shape = pick(((1, n), (n, 1), (n // inner, inner), (2, n // (2 * inner), inner), (n,)))
    return Case(
        kind,
        shape,
        pick(tuple(STORAGES)),
        len(shape) == 2 and pick((False, False, True)),
        pick((None, None, 0, 1, 4, 8)),
        pick((False, False, True)),
        pick(range(1 << 16)),
    )


@functools.cache
def _pool(device: str):
    """Random memory that every case cuts its tensors from: bytes, floats, floats with special values."""
    generator = torch.Generator().manual_seed(3407)
    size = POOL if device != "cpu" else POOL // 16
    packed = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
    plain = torch.randn(size // 4, generator=generator)
    special = plain.clone()
    places = torch.randint(len(special), (len(special) // 2,), generator=generator)
    special[places] = torch.tensor(SPECIAL).repeat(math.ceil(len(places) / len(SPECIAL)))[: len(places)]
    return packed.to(device), plain.to(device), special.to(device)


def build(case: Case, device: str):
    """(weight, quant_state) of a case, as views of random memory: starts and neighbours are arbitrary."""
    kind, n = case.kind, math.prod(case.shape)
    place = random.Random(case.seed)
    packed, plain, special = _pool(device)
    floats = special if case.special else plain

    def cut(memory, count, step=1):
        start = place.randrange(0, len(memory) - count + 1) // step * step
        return memory[start : start + count]

    size = STORAGES[case.storage].itemsize
    length = -(-((n + 1) // 2) // size)
    if length == 1 and not case.transposed:
        length = 2  # a weight of shape (1, 1) would be its own transpose
    weight = cut(packed, length * size, size).view(STORAGES[case.storage])
    weight = weight.view(1, -1) if case.transposed else weight.view(-1, 1)
    codes, scales = functools.partial(cut, packed), functools.partial(cut, floats)
    layout = (kind.blocksize2 > 0, kind.quant_type, kind.blocksize, kind.blocksize2)
    _, state = state_of(case.shape, codes, scales, DTYPES[kind.dtype], *layout)
    if kind.blocksize2:
        state.offset = cut(plain, 1)[0]
    return weight, state


def wrong(kernel, case: Case, device: str) -> torch.Tensor:
    """Number of wrong elements and overwritten guards of one case, as a tensor on the device (nothing waits).

    Without `out` the kernel is called twice: the second call repeats the first one's launch plan.
    """
    weight, state = build(case, device)
    expected = reference.dequantize(weight, state)  # as the build of bitsandbytes for this device multiplies
    if case.out_skip is None:
        calls = 2 if device != "cpu" else 1
        return sum(mismatches(kernel._your_dequantize_nf4(weight, state), expected) for _ in range(calls))
    n, first = state.shape.numel(), GUARD + case.out_skip
    memory = torch.full((first + n + GUARD,), float("nan"), dtype=state.dtype, device=device)
    out = memory[first : first + n].view(state.shape)
    result = kernel._your_dequantize_nf4(weight, state, out=out)
    guards = torch.cat([memory[:first], memory[first + n :]])
    return mismatches(result, expected) + (~guards.isnan()).sum()


def check(case: Case) -> int:
    """Run one case (a printed failure, pasted); returns the number of wrong elements."""
    with nf4_kernel.force(**WAYS[case.kind.way]):
        return int(wrong(nf4_kernel, case, DEVICE))


def run_kind(kind: Kind, count: int, seed: int, device: str, largest: int) -> tuple[int, list[str]]:
    """(elements, failed cases) of `count` cases of one kind, in batches; one synchronization a batch."""
    source = random.Random(seed)
    failed, elements = [], 0
    with nf4_kernel.force(**WAYS[kind.way]):
        for start in range(0, count, BATCH):
            batch = [draw_case(source.choice, kind, largest) for _ in range(min(BATCH, count - start))]
            verdicts = []
            for case in batch:
                try:
                    verdicts.append(wrong(nf4_kernel, case, device))
                except Exception as error:
                    raise RuntimeError(f"at or shortly before {case}: {error}") from error
            counts = torch.stack(verdicts).tolist()
            failed += [repr(case) for case, bad in zip(batch, counts, strict=True) if bad]
            elements += sum(math.prod(case.shape) for case in batch)
    return elements, failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--kinds", type=int, default=112, help="what needs a compilation of its own")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--seed", type=int, default=3407)
    arguments = parser.parse_args(argv)
    cases, seed = arguments.cases, arguments.seed
    ways, largest = (tuple(WAYS), 40_000) if DEVICE == "cuda" else (("own",), 5_000)
    chosen = kinds(min(arguments.kinds, cases), seed, ways)
    shares = {kind: len(range(i, cases, len(chosen))) for i, kind in enumerate(chosen)}  # equal ones
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        run_here = functools.partial(run_kind, device=DEVICE, largest=largest)
        done = pool.map(run_here, shares, shares.values(), itertools.count(seed))
        done = list(tqdm(done, total=len(shares), unit=" kinds", file=sys.stdout, mininterval=2))
    elements, failures = zip(*done, strict=True)
    failed = list(itertools.chain(*failures))
    by_way = {way: sum(count for kind, count in shares.items() if kind.way == way) for way in ways}
    data = {"cases": cases, "elements": sum(elements), "kinds": len(chosen), "failed": len(failed)}
    data |= {"seed": seed, "device": DEVICE, "ways": by_way, "seconds": round(time.perf_counter() - start, 1)}
    path = results.write("fuzz", data | {"first_failures": failed[:20]})
    print("\n".join([json.dumps(data), *failed[:5], f"written: {path}"]))
    return int(bool(failed))
