"""The criteria, one cell each: the kernel passes, and wrong implementations fail where they should."""

import types

import pytest
import torch

from helpers.puzzle import checks, layers, protocol
from nf4_triton.core import settings
from nf4_triton.core.launch import your_dequantize_nf4 as candidate

pytest.importorskip("bitsandbytes")
FP16 = torch.float16
KERNEL = checks.KERNEL
CRITERIA = ("single_kernel", "exact", "torch_compile", "custom_asm", "cache_eviction", "memory")
LAUNCH = {"single_kernel", "custom_asm", "cache_eviction"}  # they look at the candidate's launch


def wrong_bits(layer):
    """One bit of the last element is wrong."""
    weight = candidate(layer)
    weight.view(torch.int16).view(-1)[-1] ^= 1
    return weight


def two_kernels(layer):
    return candidate(layer).mul_(1)


def beside_the_kernel(layer):
    """Launch the kernel, and return what another one wrote."""
    candidate(layer)
    return by_bitsandbytes(layer)


def by_bitsandbytes(layer):
    return protocol.baselines()["bitsandbytes"].fn(layer)


def large_buffer(layer):
    weight = candidate(layer)
    torch.empty_like(weight)
    return weight


def kept_result(layer, kept={}):  # noqa: B006
    key = layer, layer.weight.quant_state.dtype
    if key not in kept:
        kept[key] = candidate(layer)
    return kept[key]


def unwritten(layer):
    """Launch the kernel, and return memory that nobody wrote."""
    return torch.empty_like(candidate(layer))


def twice(layer):
    candidate(layer)
    return candidate(layer)


@pytest.mark.parametrize(
    "wrong, fails",
    [
        (wrong_bits, {"exact", *LAUNCH}),
        (two_kernels, LAUNCH),
        (twice, {"single_kernel"}),
        (beside_the_kernel, {"memory", *LAUNCH}),
        (by_bitsandbytes, {"memory", *LAUNCH}),
        (checks.dequantize_in_pytorch, {"memory", *LAUNCH}),
        (large_buffer, {"memory"}),
        (kept_result, {"exact", "memory", *LAUNCH}),
        (unwritten, {"exact", "custom_asm", "cache_eviction", "memory"}),
    ],
)
def test_a_wrong_implementation_fails_where_it_should(wrong, fails):
    names = {*CRITERIA} - {"torch_compile"} if protocol.ON_GPU else {"exact"} & fails
    if not names:
        pytest.skip("on a CPU it fails in nothing that has a verdict there")
    for name in names:
        verdict = protocol.attempt(getattr(checks, name), wrong, gpu=name != "exact")
        assert verdict is (name not in fails), name


@pytest.mark.gpu
@pytest.mark.parametrize("card", [None, "t4"])
@pytest.mark.parametrize("name", CRITERIA)
def test_the_kernel_passes(name, card):
    """Also with a T4's settings. What is printed without a GPU: test_notebook.py."""
    with settings.force(card=card):
        assert protocol.attempt(getattr(checks, name), candidate) is True


def test_what_was_read_once_is_no_longer_right():
    """A function that copies a small tensor on the first call passes every other comparison."""
    first = {}

    def copies(layer):
        offset = layer.weight.quant_state.offset
        now = offset.clone()
        offset.copy_(first.setdefault(layer, now))
        try:
            return candidate(layer)
        finally:
            offset.copy_(now)

    assert protocol.attempt(checks.exact, copies, gpu=False) is False


@pytest.mark.gpu  # only torch's GPU allocator gives the same memory again
def test_a_result_is_compared_in_memory_that_held_nan():
    """An element that a call does not write must not keep the right value of an earlier result."""
    layer = layers.bnb_Linear4bit(1024, 4096)
    torch.cuda.empty_cache()
    earlier = [candidate(layer) for _ in range(4)]
    del earlier
    unwritten = torch.empty(4096, 1024, dtype=FP16, device="cuda")
    assert torch.equal(unwritten, candidate(layer)), "the allocator gave an earlier result's memory"
    del unwritten
    assert checks.wrong_elements(lambda layer: torch.empty(4096, 1024, dtype=FP16, device="cuda"), layer) > 0


# --- what is read from a launch ---

# Lines that Triton 3.6 made for sm_90.
LOAD = """	// begin inline asm
	mov.u16 %rs1, 0x0;
	@%p9 ld.global.L1::evict_first.L2::cache_hint.b8 { %rs1 }, [ %rd1 + 0 ], %rd7;
	// end inline asm
"""
SCALE = """	// begin inline asm
	{ .reg .f32 m; mul.rn.ftz.f32 m, %r13, %r14; add.rn.f32 %r12, m, %r15; }
	// end inline asm
"""
STORE = "	st.global.cs.v4.b32 [ %rd19 + 0 ], { %r114, %r115, %r116, %r117 };\n"
PLAIN = LOAD.replace(".L1::evict_first.L2::cache_hint", "") + "	mul.rn.ftz.f32 %r84, %r2, %r13;\n"
ON = LOAD + SCALE + STORE


@pytest.mark.parametrize("check", [checks.custom_asm, checks.cache_eviction])
@pytest.mark.parametrize(
    "on, off, ran, wrong, passes",
    [
        (ON, PLAIN, KERNEL, 0, True),
        (ON, ON, KERNEL, 0, False),
        (PLAIN, PLAIN, KERNEL, 0, False),
        (ON, PLAIN, "another", 0, False),
        (ON, PLAIN, KERNEL, 1, False),
    ],
)
def test_on_and_off(check, on, off, ran, wrong, passes, monkeypatch):
    """What is on must be in the PTX of the kernel, and with right bits. The launches are made up."""

    def own_launches(function, layer):
        now = settings.settings()
        kernel = types.SimpleNamespace(name=KERNEL, asm={"ptx": on if now.asm and now.hints else off})
        return [KERNEL, ran], [kernel]

    monkeypatch.setattr(checks, "own_launches", own_launches)
    monkeypatch.setattr(checks, "wrong_elements", lambda function, layer: wrong)
    with settings.force(asm=True):
        assert check(candidate) is passes


# --- torch.compile, memory ---


def test_a_graph_break_fails():
    def breaks(layer):
        torch._dynamo.graph_break()
        return candidate(layer)

    assert protocol.attempt(checks.torch_compile, breaks, gpu=False) is False


@pytest.mark.gpu
@pytest.mark.parametrize("first", [(64, 64), layers.LARGE[::-1]])
def test_a_buffer_that_the_first_call_of_a_size_keeps_is_seen(first):
    kept = []

    def keeps(layer):
        weight = candidate(layer)
        if weight.shape == first and not kept:
            kept.append(torch.empty_like(weight))
        return weight

    assert protocol.attempt(checks.memory, keeps) is False


@pytest.mark.gpu
def test_waiting_for_the_gpu_is_an_error():
    def waits(layer):
        return candidate(layer) * float(layer.weight.quant_state.offset.item() > -1e9)

    assert protocol.attempt(checks.memory, waits) is False
    assert torch.cuda.get_sync_debug_mode() == 0
