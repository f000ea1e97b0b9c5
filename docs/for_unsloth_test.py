"""Tests of three patches: -k tuning, -k leak, -k fresh. Each fails without its patch."""

import gc
import weakref
from unittest import mock

import pytest
import torch
import unsloth  # noqa: F401
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from unsloth.kernels import nf4
from unsloth.kernels.utils import fast_dequantize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def quantized(nested=True, rows=320):
    data = torch.randn(rows, 64, dtype=torch.bfloat16, device="cuda")
    weight = Params4bit(data, quant_type="nf4", compress_statistics=nested).cuda()
    return weight, weight.quant_state


def check_freed(call):
    """Check that a weight is freed after call(weight, its state) and `del`."""
    weight, state = quantized()
    call(weight, state)
    freed = weakref.ref(state)
    del weight, state
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("rows", [320, 65_536])
def test_tuning_takes_the_b200s_settings(rows):
    weight, state = quantized(rows=rows)
    target = 256 if weight.nbytes <= 1 << 16 else 1024
    assert nf4._config_for(weight.nbytes, 32, weight.device) == (target // 32, 2, True, True, 2)
    assert torch.equal(fast_dequantize(weight, state), dequantize_4bit(weight, state))


def test_leak_a_deleted_weight_is_freed():
    check_freed(lambda weight, state: fast_dequantize(weight.t(), state, use_global_buffer=True))


def check(weight, state, replayed):
    """Compare a new result with one in a given `out`, which replays no launch."""
    with mock.patch.object(nf4, "relaunch", wraps=nf4.relaunch) as relaunch:
        result = fast_dequantize(weight, state)
    assert relaunch.called == replayed
    out = torch.empty(state.shape, dtype=state.dtype, device="cuda")
    assert torch.equal(result, fast_dequantize(weight, state, out=out))


@pytest.mark.parametrize("nested", [True, False])
def test_fresh_results_replay_a_launch(nested):
    weight, state = quantized(nested)
    check(weight, state, replayed=False)
    for form in (weight, weight.t(), weight.data):
        check(form, state, replayed=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast_dequantize(weight, state)
    weight.data.copy_(weight.data.flip(0))
    graph.replay()
    assert torch.equal(captured, fast_dequantize(weight, state))


def test_fresh_notices_a_change():
    weight, state = quantized()
    changes = [(state, "shape", state.shape[::-1]), (state, "dtype", torch.float16)]
    changes += [(state, name, getattr(state, name) + 1) for name in ("absmax", "code", "offset")]
    changes += [(state.state2, name, getattr(state.state2, name) + 1) for name in ("absmax", "code")]
    for owner, name, value in [*changes, (weight, "data", weight.data + 1)]:
        check(weight, state, replayed=False)
        setattr(owner, name, value)
    check(weight, state, replayed=False)


def test_fresh_frees_a_deleted_weight():
    check_freed(lambda weight, state: check(weight.t(), state, replayed=False))
