"""Run the PTX for an older GPU, such as a T4's sm_75, on this GPU, and compare every bit.

The driver of a newer GPU accepts the same PTX, so it computes what the older GPU would.
"""

import math

import pytest
import torch

from helpers.cross import machine_code
from helpers.puzzle import layers
from nf4_triton.core import launch, reference, settings
from nf4_triton.core.state import read_state

pytest.importorskip("bitsandbytes")
SIZE = (4099, 1)  # (in, out): an odd tail, and a short last block
GUARD = 256  # elements on either side of the output, which must not change


def cases(dtype):
    """Yield (name, layer) to compare."""
    layer = layers.quantized_layer(1024, 4096, dtype)
    for tensor in (layer.weight.data, layer.weight.quant_state.absmax):
        tensor.random_(256)
    yield "every code with every scale", layer
    yield "odd tail", layers.quantized_layer(*SIZE, dtype)
    yield "odd tail, flat", layers.quantized_layer(*SIZE, dtype, nested=False)


def run_foreign(weight, state, out, arch):
    """Dequantize into `out` with the PTX and settings of sm_`arch`."""
    tensors, layout = read_state(weight, state)
    with settings.force(**vars(settings.of_capability(*divmod(arch, 10)))):
        kernel, grid, arguments, options = machine_code.prepared(
            tensors, layout, out, general=not launch.fits(tensors, layout)
        )
    found = machine_code.compile_for(arch, kernel, arguments, options)
    assert f".target sm_{arch}" in found.asm["ptx"]  # sm_90a counts as sm_90
    found.kernel = found.asm["ptx"].encode()  # instead of the cubin: the driver loads either
    found[(grid, 1, 1)](*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", (75, 80, 86, 89, 90))  # whose PTX a Hopper GPU runs
@pytest.mark.parametrize("dtype", machine_code.DTYPES.values(), ids=machine_code.DTYPES)
def test_ptx_of_other_cards_is_exact(arch, dtype):
    import bitsandbytes

    if torch.cuda.get_device_capability() < divmod(arch, 10):
        pytest.skip(f"needs a GPU of sm_{arch} or newer")
    for name, layer in cases(dtype):
        weight, state = layer.weight.data, layer.weight.quant_state
        size = math.prod(state.shape) + 2 * GUARD
        whole = torch.full((size,), math.nan, dtype=dtype, device=weight.device)
        out = whole[GUARD:-GUARD].view(state.shape)
        run_foreign(weight, state, out, arch)
        expected = bitsandbytes.functional.dequantize_4bit(weight, state)
        assert reference.same_bits(out, expected), name
        out.fill_(math.nan)
        assert whole.isnan().all(), name
