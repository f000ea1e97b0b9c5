"""A fresh result of fast_dequantize repeats the weight's launch, if that would read the same objects."""

import gc
import weakref
from unittest import mock

import pytest
import torch
import unsloth  # noqa: F401
from bitsandbytes.nn import Params4bit
from unsloth.kernels import nf4
from unsloth.kernels.utils import fast_dequantize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def quantized(nested=True):
    data = torch.randn(320, 64, dtype=torch.bfloat16, device="cuda")
    weight = Params4bit(data, quant_type="nf4", compress_statistics=nested).cuda()
    return weight, weight.quant_state


def check(weight, state, repeated):
    """Compare a fresh result with one in a given `out`, which repeats no launch."""
    with mock.patch.object(nf4, "relaunch", wraps=nf4.relaunch) as relaunch:
        result = fast_dequantize(weight, state)
    assert relaunch.called == repeated
    out = torch.empty(state.shape, dtype=state.dtype, device="cuda")
    assert torch.equal(result, fast_dequantize(weight, state, out=out))


@pytest.mark.parametrize("nested", [True, False])
def test_launch_is_repeated(nested):
    weight, state = quantized(nested)
    check(weight, state, repeated=False)
    for form in (weight, weight.t(), weight.data):
        check(form, state, repeated=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast_dequantize(weight, state)
    weight.data.copy_(weight.data.flip(0))
    graph.replay()
    assert torch.equal(captured, fast_dequantize(weight, state))


def test_change_is_noticed():
    weight, state = quantized()
    changes = [(state, "shape", state.shape[::-1]), (state, "dtype", torch.float16)]
    changes += [(state, name, getattr(state, name) + 1) for name in ("absmax", "code", "offset")]
    changes += [(state.state2, name, getattr(state.state2, name) + 1) for name in ("absmax", "code")]
    for owner, name, value in [*changes, (weight, "data", weight.data + 1)]:
        check(weight, state, repeated=False)
        setattr(owner, name, value)
    check(weight, state, repeated=False)


def test_deleted_weight_is_freed():
    weight, state = quantized()
    check(weight.t(), state, repeated=False)
    freed = weakref.ref(state)
    del weight, state
    gc.collect()
    assert freed() is None
