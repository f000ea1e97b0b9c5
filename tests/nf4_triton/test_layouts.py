"""Layers as bitsandbytes' evaluation mode makes them."""

import pytest
import torch

from nf4_triton import launch_general
from nf4_triton.settings import UnsupportedState

bitsandbytes = pytest.importorskip("bitsandbytes")


def test_repacked_by_bitsandbytes_for_the_cpu(make_layer):
    """By bitsandbytes' own function, as evaluation mode does on a CPU with AVX512-BF16."""
    functional = bitsandbytes.functional
    if not hasattr(functional, "_convert_weight_packed_for_cpu"):
        pytest.skip("this bitsandbytes does not repack")
    layer = make_layer(64, 96, torch.bfloat16, device="cpu")
    packed = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    layer.weight.data, layer.weight.quant_state = packed
    with pytest.raises(UnsupportedState, match="repacked this layer for its CPU matmul"):
        launch_general.dequantize_weight(layer.weight, layer.weight.quant_state)
