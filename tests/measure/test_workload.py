import math

import pytest
import torch

from helpers.measure import workload
from helpers.oracle import reference
from helpers.record import names
from helpers.record.names import bytes_moved
from helpers.submission import protocol

pytest.importorskip("bitsandbytes")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_are_states_that_bitsandbytes_and_the_oracle_agree_on(dtype, nested, device):
    buffers = workload.make_buffers((192, 128), dtype, 3, nested, device=device)
    for index in range(3):
        weight = buffers.layers[index].weight
        expected = reference.dequantize(weight, weight.quant_state)
        assert protocol.same_bits(buffers.expected(index), expected)
        assert expected.shape == (192, 128) and expected.dtype == dtype and expected.isfinite().all()


def test_every_set_has_its_own_contents_and_aligned_memory(device):
    buffers = workload.make_buffers((64, 65), torch.bfloat16, 4, outputs=True, device=device)
    weights = [layer.weight for layer in buffers.layers]
    states = [weight.quant_state for weight in weights]
    tensors = [*weights, *buffers.outs]
    tensors += [t for state in states for t in (state.absmax, state.state2.absmax)]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(states[0].absmax, states[1].absmax)


def test_outputs_only_where_asked_for():
    assert workload.make_buffers((64, 64), torch.float16, 2, device="cpu").outs == []
    (out,) = workload.make_buffers((64, 64), torch.float16, 1, outputs=True, device="cpu").outs
    assert out.shape == (64, 64) and out.dtype == torch.float16 and out.is_contiguous()


def test_bytes_are_those_of_one_call_and_of_all_sets():
    buffers = workload.make_buffers((64, 64), torch.float32, 3, nested=False, device="cpu")
    assert buffers.bytes_moved == bytes_moved(4096, 4, nested=False)
    assert buffers.bytes_rotated == 3 * buffers.bytes_moved


@pytest.mark.parametrize("numel", workload.SIZES)
def test_rotation_is_past_any_cache(numel):
    count = workload.rotation(numel)
    rotated = count * bytes_moved(numel)
    assert count >= 2 and (rotated >= 1e9 or count == workload.MOST_BUFFERS)
    assert rotated >= 5 * 60e6  # several times the L2 of the cards with the largest ones
    assert count == 2 or rotated < 1.4e9


def test_sizes_span_the_targets():
    assert (workload.SIZES[0], workload.SIZES[-1]) == (names.SMALLEST, names.LARGEST) == (2**16, 2**30)
    assert set(names.TARGET_SIZES) <= set(workload.SIZES)
    for numel in workload.SIZES:
        assert math.prod(workload.as_shape(numel)) == numel


@pytest.mark.parametrize("numel", [0, 63, 4097])
def test_sizes_that_are_no_whole_blocks_are_refused(numel):
    with pytest.raises(ValueError, match="multiple of 64"):
        workload.as_shape(numel)
    if numel:
        with pytest.raises(ValueError, match="multiple of 64"):
            workload.make_buffers((1, numel), torch.float16, 1, device="cpu")


def test_layer_shapes_are_whole_blocks():
    assert all(math.prod(shape) % 64 == 0 for shape in workload.LLAMA_3)
    assert (14336, 4096) in workload.LLAMA_3 and (8192, 28672) in workload.LLAMA_3
