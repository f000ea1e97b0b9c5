"""The package's entry: cached launches of other layouts, and with `out`. Selected rows: test_rows.py."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from nf4_triton.core import launch
from nf4_triton.core.supported import UnsupportedState
from states import exact, freed, odd_states, random_state, strided

pytest.importorskip("bitsandbytes")


@pytest.fixture
def watched(general):
    """For the fixture `case`: the package's entry."""
    return general


PUZZLES_KERNEL = "_your_dequantize_nf4_kernel"


def kernels():
    """Return the names of the kernels whose launches are cached."""
    return {compiled.name for known in launch.launches.values() for *_, compiled in known}


# Of odd_states: those that take the puzzle's kernel. The rest take the general one.
PUZZLES = {"torch.float16", "torch.bfloat16", "usual", "no code", "shape of a list"}
PUZZLES |= {f"blocksize 2**{k}" for k in range(7, 13)} | {f"blocksize2 2**{k}" for k in (6, 7, 9)}
PUZZLES |= {"shape (20480,)", "shape (5, 64, 64)", "offset of shape (1,)"}
ODD = odd_states()


@pytest.mark.parametrize("name", ODD)
def test_which_kernel_takes_a_layout(general, name):
    """Launches of every layout are cached and replayed."""
    weight, state = ODD[name]
    empty = state.shape == (0, 64)  # nothing is launched or cached
    assert not general.check(weight, state) and general.check(weight, state) is not empty
    assert (PUZZLES_KERNEL in kernels()) == (name in PUZZLES) and (kernels() == set()) == empty


# `out`
MODES = [contextlib.nullcontext, lambda: FlopCounterMode(display=False)]


@pytest.mark.parametrize("mode", MODES, ids=["eager", "dispatch mode"])
def test_an_out_that_does_not_fit(case, mode):
    """Or that has no memory of its own. Under a dispatch mode, the operator copies its result into `out`."""
    general, weight, state = case
    out = torch.full(state.shape, torch.nan, dtype=state.dtype, device=weight.device)
    general(weight, state, torch.empty_like(out))  # caches a launch
    memory = torch.zeros(2 * out.numel(), dtype=torch.uint8, device=weight.device)
    over = memory.view(out.dtype).view(out.shape)
    inside = memory[out.numel() :][: weight.numel()].view(weight.shape).copy_(weight)
    bad = [
        (torch.empty_like(out), freed(weight), "weight has no memory"),
        (freed(out), weight, "out has no memory"),
        (over, inside, "out shares memory with"),
        (torch._neg_view(out), weight, "out is a negated view"),
        (out.tolist(), weight, "out is list, expected a tensor"),
    ]
    for other in (out.half(), out.to("meta"), strided(out), out.clone().requires_grad_()):
        bad.append((other, weight, r"out has \(shape.*expected.*None"))
    with mode():
        for given_out, given, text in bad:
            with pytest.raises(UnsupportedState, match=text):
                general(given, state, given_out)
            assert out.isnan().all()
        with forward_ad.dual_level(), pytest.raises(UnsupportedState, match="tangent"):
            general(weight, state, forward_ad.make_dual(out, torch.ones_like(out)))
        assert out.isnan().all()
        general.check(weight, state, out)
    assert torch.equal(inside, weight) and exact(out, weight, state)


@pytest.mark.parametrize("weight_first", [True, False])
def test_an_out_beside_a_transposed_weight(general, device, weight_first):
    """As Axolotl loads a model for FSDP2: one launch is cached, and found again, but not by a compiler.

    Memory beside the weight is `out`'s own, and autograd sees each write.
    """
    weight, state = random_state((64, 64), torch.float16, quant_type="fp4")
    memory = torch.zeros(10240, dtype=torch.uint8, device=device)
    inside, out = memory.split([2048, 8192]) if weight_first else memory.split([8192, 2048])[::-1]
    inside, out = inside.view_as(weight).copy_(weight).t(), out.view(state.dtype).view(state.shape)
    for relaunched in (False, True, True):
        before = out._version
        assert general.check(inside, state, out) is relaunched and out._version > before
    assert [len(known) for known in launch.launches.values()] == [1]
    compiled = torch.compile(general.call, backend="aot_eager", fullgraph=True)
    assert exact(compiled(weight.t(), state, torch.zeros_like(out)), weight.t(), state)
