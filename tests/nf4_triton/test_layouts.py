"""Layers as bitsandbytes, checkpoints and transformers make, save and move them."""

import copy
import pickle

import pytest
import torch

from nf4_triton import launch
from nf4_triton.reference import same_bits
from states import DTYPES, oracle

bitsandbytes = pytest.importorskip("bitsandbytes")
ON_GPU = pytest.mark.gpu


def right(layer):
    """Return whether the kernel is exact, in a first call and the next."""
    expected = oracle(layer.weight, layer.weight.quant_state)
    return all(same_bits(launch.your_dequantize_nf4(layer), expected) for _ in range(2))


@pytest.mark.parametrize("storage", [torch.uint8, torch.int8, *DTYPES, torch.float64])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_quant_storage_as_bitsandbytes_makes_it(device, storage, nested):
    """FSDP-QLoRA keeps the packed bytes in a floating-point tensor."""
    how = dict(compress_statistics=nested, quant_type="nf4", quant_storage=storage)
    for dtype in DTYPES:
        layer = bitsandbytes.nn.Linear4bit(64, 96, False, dtype, **how).to(device)
        layer.weight.quant_state.dtype = dtype
        assert layer.weight.dtype == storage and right(layer)


def loaded(checkpoint, device):
    """As transformers loads a quantized checkpoint."""
    layer = bitsandbytes.nn.Linear4bit(64, 96, False, torch.float16, quant_type="nf4")
    data = checkpoint.pop("weight")
    stats = {name.removeprefix("weight."): value for name, value in checkpoint.items()}
    load = bitsandbytes.nn.Params4bit.from_prequantized
    layer.weight = load(data=data, quantized_stats=stats, requires_grad=False, device=device)
    return layer


def through_safetensors(layer, device):
    safetensors = pytest.importorskip("safetensors.torch")
    data = safetensors.save({name: value.contiguous() for name, value in layer.state_dict().items()})
    return loaded(safetensors.load(data), device)


JOURNEYS = {
    "state_dict": lambda layer, device: loaded({k: v.clone() for k, v in layer.state_dict().items()}, device),
    "safetensors": through_safetensors,
    "pickle": lambda layer, device: pickle.loads(pickle.dumps(layer)),
    "deepcopy": lambda layer, device: copy.deepcopy(layer),
    "to the CPU and back": lambda layer, device: layer.to("cpu").to(device),
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_after_a_journey(device, make_layer, name):
    """Saved, loaded, copied or moved after a first use."""
    layer = make_layer(64, 96, torch.float16)
    expected = launch.your_dequantize_nf4(layer).clone()
    arrived = JOURNEYS[name](layer, device)
    assert arrived.weight.quant_state.nested and right(arrived)
    assert same_bits(launch.your_dequantize_nf4(arrived), expected)


@pytest.mark.parametrize("then", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_repacked_by_bitsandbytes_for_the_cpu(make_layer, then):
    """By bitsandbytes' own function, as evaluation mode does on a CPU with AVX512-BF16: refused. Moved to a
    GPU it is unpacked, with statistics in half precision: exact or refused, never wrong."""
    functional = bitsandbytes.functional
    if not hasattr(functional, "_convert_weight_packed_for_cpu"):
        pytest.skip("this bitsandbytes does not repack")
    layer = make_layer(64, 96, torch.bfloat16, device="cpu")
    packed = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    layer.weight.data, layer.weight.quant_state = packed
    layer = layer.to(then)
    try:
        result = launch.your_dequantize_nf4(layer)
    except launch.UnsupportedState as error:
        assert ("repacked this layer for its CPU matmul" if then == "cpu" else "expected") in str(error)
    else:
        expected = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert then == "cuda" and same_bits(result, expected)
