"""The kernels bit for bit against the oracle. Libraries: test_reference.py, and on a GPU tests/bench.

Outputs are filled with NaN first, between guards. Without a GPU the kernel runs in Triton's interpreter. On
a GPU, its settings are forced in turn: assembly, bf16 rounded in integers, cache hints, tiles, all of a T4's.
"""

import itertools
import math
import runpy
from unittest import mock

import pytest
import torch

from nf4_triton import dequantize
from nf4_triton.core import launch, launch_general, settings
from nf4_triton.core.reference import same_bits
from nf4_triton.core.state import read_state
from states import (
    DTYPES,
    SPECIAL,
    WAYS,
    every_byte,
    odd_states,
    oracle,
    part,
    random_state,
    subnormal_scales,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, about NaN
GUARD = 64  # elements on either side of a result
# Whole, partial and single bytes, words, blocks and tiles (2048 elements); odd tails. Multiples of 64 are the
# puzzle's: a row, a tile, and a row or a whole tile more.
SIZES = [1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 2047, 2048, 2049, 2055, 2112, 4096, 4097, 16383, 33 * 70]
GPU_SIZES = [2**21, 2**21 + 1, 2**21 + 8191, 2**21 + 4096 + 64]
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in WAYS if name != "own"]


@pytest.fixture(params=["own", *ON_GPU])
def way(request):
    """One way through the kernels: settings that are forced during the test."""
    with settings.force(**WAYS[request.param]):
        yield


def between_guards(weight, state, with_out):
    """Return the result of a call, written into memory that held NaN. The guards on both sides must stay NaN.

    With `out` it is the general kernel's, without it the puzzle's where that fits.
    """
    guards = []

    def empty(shape, stride=None, dtype=None, device="cuda"):  # a cached launch passes no device
        n = math.prod(shape)
        memory = torch.full((n + 2 * GUARD,), math.nan, dtype=dtype, device=device)
        before, result, after = memory.split([GUARD, n, GUARD])
        guards.extend((before, after))
        return result.view(tuple(shape)) if stride is None else result.as_strided(shape, stride)

    out = empty(state.shape, None, state.dtype, weight.device) if with_out else None
    with mock.patch.object(torch, "empty", empty), mock.patch.object(launch, "empty_cuda", empty):
        result = launch_general.dequantize_weight(weight, state, out)
    before, after = guards  # of one result
    assert before.isnan().all() and after.isnan().all(), "written out of bounds"
    return result


def wrong(weight, state):
    """Return whether any bit of the general kernel's result, or of the puzzle's kernel's if that fits,
    differs from the oracle's."""
    expected = oracle(weight, state)
    results = [between_guards(weight, state, with_out=False)]
    if launch.fits(*read_state(weight, state)):
        results.append(between_guards(weight, state, with_out=True))
    assert all(result.stride() == expected.stride() or result.numel() < 2 for result in results)
    return not all(same_bits(result, expected) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_with_every_scale_code(device, way, dtype):
    for _ in range(2 if device == "cuda" else 1):  # the second call replays a cached launch
        assert not wrong(*every_byte(dtype))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_sizes(device, way, dtype, nested, quant_type):
    for n in SIZES + (GPU_SIZES if device == "cuda" else []):
        assert not wrong(*random_state((n, 1), dtype, nested, quant_type, seed=n)), n


def test_odd_states(device, way):
    """Blocksizes, storages, shapes, and views, to 16 bit. Layouts that fit also take the puzzle's kernel."""
    for i, (name, (weight, state)) in enumerate(odd_states(device).items()):
        state.dtype = state.dtype if name.startswith("torch.") else DTYPES[i % 2]
        assert not wrong(weight, state), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(way, dtype):
    """NaN, infinities, zeros, huge and subnormal numbers in every tensor of scales. Rounding in integers must
    not carry a NaN's payload over into a number."""
    payloads = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    special = torch.cat([torch.tensor(SPECIAL), payloads])
    for nested in (True, False):
        weight, state = random_state((64, len(special)), dtype, nested)  # a block for each number
        if nested:
            state.absmax.copy_(torch.arange(len(special)))
        tensors = (state.offset, state.state2.absmax, state.state2.code) if nested else (state.absmax,)
        for tensor, start in itertools.product(tensors, range(0, len(special), 3)):
            kept, values = tensor.clone(), special.roll(-start)
            tensor.view(-1)[: len(values)] = values[: tensor.numel()]
            assert not wrong(weight, state), (nested, start)
            tensor.copy_(kept)
    for case in subnormal_scales(dtype):
        assert not wrong(*case)


def test_what_is_forced_is_checked(monkeypatch):
    monkeypatch.setenv("NF4_FORCE", "t5")
    with pytest.raises(ValueError, match="NF4_FORCE is 't5', expected t4, or nothing"):
        runpy.run_module(settings.__name__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [64, 24], ids=["puzzle", "general"])
def test_more_than_2_to_the_31_elements(tail, way, dtype):
    """Around 2^30 and 2^31 elements, at the start, and at the end, with selected rows, too. The puzzle's
    kernel takes whole blocks."""
    n = 2**31 + 8 * 2**14 + tail
    need = n * (dtype.itemsize + 1)
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free GPU memory")
    weight, state = random_state((n // 8, 8), dtype)
    assert launch.fits(*read_state(weight, state)) == (tail == 64 and dtype != torch.float32)
    for _ in range(2):
        result = between_guards(weight, state, with_out=False)
        for start in (0, 2**30, 2**31 - 2**14, 2**31, n - tail):
            first, last = start // 8, min(start + 2**14, n) // 8
            expected = oracle(*part(weight, state, start, (last - first, 8)))
            assert same_bits(result[first:last], expected), start
            for rows in (slice(first, last), torch.arange(first, last, device="cuda")):
                assert same_bits(dequantize(weight, state, rows=rows), expected), start
        del result
    torch.cuda.empty_cache()
