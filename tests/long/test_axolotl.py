"""Axolotl's dequantization with the kernel: the same bits, counted.

By hand on a GPU, where its wheel is installed (pip install --no-deps axolotl) or unpacked on PYTHONPATH:
pytest -m long tests/long/test_axolotl.py
"""

import pytest
import torch

from helpers.puzzle.layers import quantized_layer
from nf4_triton.libraries.axolotl import DEQUANT, EXPERTS
from nf4_triton.libraries.switch import use_nf4_kernel
from nf4_triton.reference import same_bits
from switching import compared, quantized

pytestmark = [pytest.mark.gpu, pytest.mark.long]


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
        counts = switch.counts()[DEQUANT]
    assert counts["kernel"] == 3 and counts["library"] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 64, 64), (8, 320, 96), (64, 768, 512)], ids=str)
def test_selected_experts(axolotl, shape, dtype):
    """Needs Axolotl's own requirements, which its plug-ins import."""
    selective = pytest.importorskip(EXPERTS.rpartition(".")[0])
    packed, state = quantized(shape, dtype, "cuda")
    ids = torch.arange(0, shape[0], 3, device="cuda")

    def call():
        return selective._selective_dequant_bnb4(packed, state, ids, shape[1:])

    assert compared(call, EXPERTS, "axolotl") == (1, 0)
