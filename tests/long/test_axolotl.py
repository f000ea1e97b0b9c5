"""Axolotl's dequantization with the kernel: the same bits, counted.

By hand on a GPU, where its wheel is installed (pip install --no-deps axolotl) or unpacked on PYTHONPATH:
pytest -m long tests/long/test_axolotl.py
"""

import pytest
import torch

from nf4_triton.libraries.axolotl import DEQUANT, EXPERTS
from states import DTYPES
from switching import compared, quantized

pytestmark = [pytest.mark.gpu, pytest.mark.long]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (320, 1000), (4096, 4096)], ids=str)
def test_the_same_bits(shape, dtype):
    """Eager, transposed, and compiled, where Axolotl calls its operator."""
    axolotl = pytest.importorskip("axolotl.kernels.quantize", reason="pip install --no-deps axolotl")
    weight, state = quantized(shape, dtype, "cuda")
    torch._dynamo.reset()

    def calls():
        compiled = torch.compile(lambda: axolotl.dequantize(weight, state) + 0, fullgraph=True)
        return axolotl.dequantize(weight, state), axolotl.dequantize(weight.t(), state), compiled()

    assert compared(calls, DEQUANT, "axolotl") == (2, 0)  # not the compiled one


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 64), (8, 320, 96), (64, 768, 512)], ids=str)
def test_selected_experts(shape, dtype):
    """Needs Axolotl's own requirements, which its plug-ins import."""
    selective = pytest.importorskip(EXPERTS.rpartition(".")[0])
    packed, state = quantized(shape, dtype, "cuda")
    ids = torch.arange(0, shape[0], 3, device="cuda")

    def call():
        return selective._selective_dequant_bnb4(packed, state, ids, shape[1:])

    assert compared(call, EXPERTS, "axolotl") == (1, 0)
