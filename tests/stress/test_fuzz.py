"""Random cases against the oracle: Hypothesis in the interpreter here, `python -m helpers fuzz` on a GPU."""

import dataclasses
import json
import math
import random
import warnings

import pytest
import torch

from helpers.nf4 import reference
from helpers.stress import fuzz

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("hypothesis.strategies")
CASES = 600  # `python -m helpers fuzz` draws as many as one likes


@hypothesis.strategies.composite
def cases(draw, largest):
    """Cases that Triton's interpreter can run: the ways of its portable path."""

    def pick(options):
        if isinstance(options, range):
            return draw(hypothesis.strategies.integers(options.start, options.stop - 1))
        return draw(hypothesis.strategies.sampled_from(options))

    kind = pick(fuzz.every_kind(pick((True, False)), ways=("own",)))
    return fuzz.draw_case(pick, kind, largest)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter, about NaN
@hypothesis.settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(case=cases(largest=3000))
def test_random_cases(case):
    """Layout, size, values: bit for bit, nothing written beside the output."""
    assert fuzz.check(case) == 0


@pytest.mark.gpu
def test_random_cases_on_the_gpu(kernel):
    """A share of what `python -m helpers fuzz` runs: every way, few kinds, as each costs compilations."""
    failed = []
    for i, way in enumerate(fuzz.WAYS):
        for kind in fuzz.kinds(2, seed=i, ways=(way,)):
            failed += fuzz.run_kind(kind, 100, seed=i, device="cuda", largest=40_000)[1]
    assert not failed, failed[:3]


def test_the_cases_reach_every_option():
    """What the GPU run draws covers each option of each field, special values and all forms of output."""
    kinds = fuzz.kinds(112, seed=3407)
    assert len(set(kinds)) == 112
    for field, options in {
        "dtype": set(fuzz.DTYPES),
        "quant_type": {"nf4", "fp4"},
        "blocksize": set(fuzz.BLOCKSIZES),
        "blocksize2": {0, *fuzz.BLOCKSIZES2},
        "way": set(fuzz.WAYS),
    }.items():
        assert {getattr(kind, field) for kind in kinds} == options
    source = random.Random(0)
    cases = [fuzz.draw_case(source.choice, kind, 40_000) for kind in kinds for _ in range(20)]
    sizes = [math.prod(case.shape) for case in cases]
    assert 0 in sizes and max(sizes) > 30_000 and {n % 8 for n in sizes} == set(range(8))
    assert {case.storage for case in cases} == set(fuzz.STORAGES)
    assert {case.out_skip for case in cases} == {None, 0, 1, 4, 8}
    assert {len(case.shape) for case in cases} == {1, 2, 3}
    assert {case.transposed for case in cases} == {case.special for case in cases} == {True, False}


def test_a_wrong_element_and_a_broken_guard_are_counted(kernel, device):
    """The comparison itself: it must see one bit, and one element beside the output."""

    class Broken:
        def __init__(self, flip, spill):
            self.flip, self.spill = flip, spill

        def _your_dequantize_nf4(self, weight, state, out=None):
            result = reference.dequantize(weight, state)
            if out is not None:
                out.copy_(result)
                torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(self.spill)
                result = out
            if self.flip:
                result.view(-1).view(torch.int16)[-1] ^= 1
            return result

    kind = fuzz.Kind("float16", "nf4", 64, 256, "own")
    case = fuzz.Case(kind, (3, 40), "uint8", False, 1, False, 5)
    fresh = dataclasses.replace(case, out_skip=None)
    good, calls = Broken(False, float("nan")), 2 if device == "cuda" else 1
    assert fuzz.wrong(good, case, device) == fuzz.wrong(good, fresh, device) == 0
    assert fuzz.wrong(Broken(True, float("nan")), case, device) == 1
    assert fuzz.wrong(Broken(True, float("nan")), fresh, device) == calls
    assert fuzz.wrong(Broken(False, 0.0), case, device) == 1
    assert fuzz.wrong(kernel, case, device) == 0


def test_the_command_writes_its_summary(tmp_path, monkeypatch):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fuzz.main(["--cases", "12", "--kinds", "3", "--workers", "1"]) == 0
    (path,) = tmp_path.rglob("fuzz.json")
    data = json.loads(path.read_text())["data"]
    assert data["cases"] == 12 and data["failed"] == 0 and data["elements"] > 0
