import math

import pytest
import torch

from helpers.bench import contenders
from helpers.bench.contenders import FULL, Bench
from helpers.nf4 import reference
from helpers.results import names
from helpers.results.names import bytes_moved
from helpers.puzzle import protocol

pytest.importorskip("bitsandbytes")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_what_bitsandbytes_and_the_oracle_agree_on(dtype, nested, device):
    for layer in contenders.random_layers((192, 128), dtype, 3, nested, device=device):
        expected = reference.dequantize(layer.weight, layer.weight.quant_state)
        assert protocol.same_bits(protocol.expected(layer), expected)
        assert expected.shape == (192, 128) and expected.dtype == dtype and expected.isfinite().all()


def test_every_layer_has_its_own_contents_and_aligned_memory(device):
    layers = contenders.random_layers((64, 65), torch.bfloat16, 4, device=device)
    weights = [layer.weight for layer in layers]
    states = [weight.quant_state for weight in weights]
    tensors = [*weights, *(t for state in states for t in (state.absmax, state.state2.absmax))]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(states[0].absmax, states[1].absmax)


@pytest.mark.parametrize("numel", contenders.SIZES)
def test_rotation_is_past_any_cache(numel):
    count = Bench(None, {}, False, FULL).rotation(numel)
    rotated = count * bytes_moved(numel)
    assert count >= 2 and (rotated >= 1e9 or count == contenders.MOST_LAYERS)
    assert rotated >= 5 * 60e6  # several times the L2 of the cards with the largest ones
    assert count == 2 or rotated < 1.4e9


def test_sizes_span_the_targets():
    assert (contenders.SIZES[0], contenders.SIZES[-1]) == (names.SMALLEST, names.LARGEST) == (2**16, 2**30)
    assert set(names.TARGET_SIZES) <= set(contenders.SIZES)


def test_layer_shapes_are_whole_blocks():
    assert all(math.prod(shape) % 64 == 0 for shape in contenders.LLAMA_3)
    assert (14336, 4096) in contenders.LLAMA_3 and (8192, 28672) in contenders.LLAMA_3
