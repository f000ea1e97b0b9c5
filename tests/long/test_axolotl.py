"""Axolotl's dequantization with the kernel: the same bits, counted, and its time.

By hand on a GPU, where its wheel is installed (pip install --no-deps axolotl) or unpacked on PYTHONPATH:
pytest -m long tests/long/test_axolotl.py
"""

import functools
import statistics

import pytest
import torch

from helpers.bench import clocks
from helpers.nf4.reference import quantized_layer, same_bits
from helpers.nf4.switch import AXOLOTL, use_nf4_kernel
from helpers.results.store import Row, write

pytestmark = [pytest.mark.gpu, pytest.mark.long]
SHAPES = [(4096, 4096), (4096, 14336)]  # (in, out) of q_proj and gate_proj in Llama 3 8B
rows = {}  # {(case, "with" or "without"): microseconds} of all shapes, stored together


@pytest.fixture
def axolotl():
    return pytest.importorskip(
        "axolotl.kernels.quantize", reason="needs axolotl: pip install --no-deps axolotl"
    )


def compiled(axolotl):
    return torch.compile(lambda weight, state: axolotl.dequantize(weight, state) + 0, fullgraph=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (320, 1000), (4096, 4096)], ids=str)
def test_the_same_bits(axolotl, shape, dtype):
    """Eager, transposed, and compiled, where Axolotl calls its operator."""
    layer = quantized_layer(*shape, dtype)
    weight, state = layer.weight.data, layer.weight.quant_state

    def calls():
        transposed = axolotl.dequantize(weight.t(), state)
        return axolotl.dequantize(weight, state), transposed, compiled(axolotl)(weight, state)

    expected = calls()
    with use_nf4_kernel("axolotl", quiet=True, strict=True) as switch:
        assert all(map(same_bits, calls(), expected))
        counts = switch.counts()[AXOLOTL]
    assert counts["kernel"] == 3 and counts["library"] == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_time(axolotl, shape):
    """The host's time of a dequantization and a synchronize. Both functions take turns."""
    layer = quantized_layer(*shape, torch.bfloat16)
    state = layer.weight.quant_state
    second = state.state2
    scales = state.absmax, second.code, second.absmax, state.offset, 64, 256
    arguments = layer.weight.data, *scales, state.shape, state.dtype
    calls = {"without": functools.partial(axolotl._ctypes_nf4_dequant, *arguments)}
    with use_nf4_kernel("axolotl", quiet=True, strict=True):
        calls["with"] = functools.partial(axolotl._ctypes_nf4_dequant, *arguments)
        times = clocks.host_seconds(calls, rounds=20, inner=100, wait=True)
    for name, seconds in times.items():
        microseconds = [1e6 * one for one in seconds]
        rows[f"{shape[1]} x {shape[0]} bf16", name] = microseconds
        print(f"{shape} {name}: {statistics.median(microseconds):.1f} us")
    new = [Row("axolotl", *names, "us", microseconds) for names, microseconds in rows.items()]
    print(write("axolotl", new, note="host time of one dequantization and a synchronize"))
