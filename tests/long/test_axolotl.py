"""Axolotl's dequantization with the kernel: bit-identical, and counted.

By hand, where its wheel is installed or unpacked on PYTHONPATH (pip download --no-deps --python-version 3.12
axolotl==0.21.0), on a GPU: pytest -m long tests/long/test_axolotl.py.
"""

import types

import pytest
import torch

from nf4_triton.libraries.axolotl import DEQUANT, EXPERTS, FSDP2
from states import DTYPES
from switching import BF16, compared, outcome, quantized

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

    assert compared(calls, DEQUANT, "axolotl") == (3, 0)  # compiled code calls it through the operator


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


FORMS = [{}, {"compress_statistics": False}, {"blocksize": 128}, {"quant_storage": BF16}]


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(320, 1000), (5, 24, 64), (83, 100)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_fsdp2(dtype, shape, options):
    """Weights that are new, filled, or from the loader's parametrization. Then calls that the library
    keeps: (1, n), another chunk size, another output; its result or its error."""
    nf4 = pytest.importorskip("axolotl.utils.nf4", reason="pip install --no-deps axolotl==0.21")
    packed, state = quantized(shape, dtype, "cuda", **options)
    given = types.SimpleNamespace(quant_state=state, detach=lambda: packed)

    def filled(shape):
        out = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
        assert nf4.dequantize_bnb_4bit(packed, state, out=out) is out
        return out

    def by_parametrization():
        data, parametrization = nf4.prequantized_bnb_4bit(given)
        return parametrization(torch.nn.Parameter(data, requires_grad=False))

    def calls():
        return (
            nf4.dequantize_bnb_4bit(packed, state),
            filled(shape),
            by_parametrization(),
            nf4.dequantize_bnb_4bit(packed.t(), state),
            nf4.dequantize_bnb_4bit(packed, state, chunk_size=128),
            outcome(lambda: filled((*shape, 1))),
        )

    assert compared(calls, FSDP2, "axolotl") == (3, 1)
