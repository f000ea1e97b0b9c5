"""GPU time, and the criteria: the kernel passes, and wrong implementations fail where they should."""

import pytest
import torch

from helpers.puzzle import checks, protocol
from nf4_triton import settings
from nf4_triton.launch import your_dequantize_nf4 as candidate

pytest.importorskip("bitsandbytes")
FP16 = torch.float16
CHECKS = {
    "one kernel": checks.single_kernel,
    "bits": checks.exact,
    "compile": checks.torch_compile,
    "assembly": checks.custom_asm,
    "eviction": checks.cache_eviction,
    "memory": checks.memory,
}
WITHOUT_GPU = {"bits"}  # of those, what has a verdict on a CPU
LAUNCH = {"one kernel", "assembly", "eviction"}  # what looks at the candidate's launch


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
    return protocol.bitsandbytes_baseline().fn(layer)


def large_buffer(layer):
    weight = candidate(layer)
    torch.empty_like(weight)
    return weight


def kept_result(layer, kept={}):  # noqa: B006
    key = layer, layer.weight.quant_state.dtype
    if key not in kept:
        kept[key] = candidate(layer)
    return kept[key]


@pytest.mark.parametrize(
    "wrong, fails",
    [
        (wrong_bits, {"bits", *LAUNCH}),
        (two_kernels, LAUNCH),
        (beside_the_kernel, {"memory", *LAUNCH}),
        (by_bitsandbytes, {"memory", *LAUNCH}),
        (checks.dequantize_in_pytorch, {"bits", "memory", *LAUNCH}),
        (large_buffer, {"memory"}),
        (kept_result, {"bits", "memory", *LAUNCH}),
    ],
)
def test_a_wrong_implementation_fails_where_it_should(wrong, fails):
    names = CHECKS.keys() - {"compile"} if protocol.ON_GPU else WITHOUT_GPU & fails
    if not names:
        pytest.skip("on a CPU it fails in nothing that has a verdict there")
    for name in names:
        verdict = protocol.attempt(CHECKS[name], wrong, needs_gpu=name not in WITHOUT_GPU)
        assert verdict is (name not in fails), name


@pytest.mark.gpu
@pytest.mark.parametrize("card", [None, "t4"])
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel_passes(name, card):
    """Also with a T4's settings. What is printed without a GPU: test_notebook.py."""
    with settings.force(card=card):
        assert protocol.attempt(CHECKS[name], candidate) is True


@pytest.mark.parametrize("name", ["code2", "offset"])
def test_what_was_read_once_is_no_longer_right(name):
    """A function that copies a small tensor on the first call passes every other comparison."""
    first = {}

    def copies(layer):
        state = layer.weight.quant_state
        tensor = state.state2.code if name == "code2" else state.offset
        now = tensor.clone()
        tensor.copy_(first.setdefault(layer, now))
        try:
            return candidate(layer)
        finally:
            tensor.copy_(now)

    assert checks.changes_show(candidate) is True
    assert checks.changes_show(copies) is False


@pytest.mark.gpu  # only torch's GPU allocator gives the same memory again
def test_a_result_is_compared_in_memory_that_held_nan(make_layer):
    """An element that a call does not write must not keep the reference's value."""
    layer = make_layer(64, 64, FP16)
    assert checks.wrong_elements(lambda layer: torch.empty(64, 64, dtype=FP16, device="cuda"), layer) > 0


# --- what is read from PTX: lines that Triton 3.6 made for sm_90 ---

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
    "on, off, passes",
    [(ON, PLAIN, True), (ON, ON, False), (PLAIN, PLAIN, False), ("", PLAIN, False), (ON, "", False)],
)
def test_on_and_off(check, on, off, passes, monkeypatch):
    """The PTX of a launch that is not the kernel's, or has wrong bits, is empty."""
    monkeypatch.setattr(checks, "on_and_off", lambda candidate, name: (on, off))
    assert check(candidate) is passes


# --- torch.compile, memory ---


def test_a_graph_break_fails():
    def breaks(layer):
        torch._dynamo.graph_break()
        return candidate(layer)

    assert protocol.attempt(checks.torch_compile, breaks, needs_gpu=False) is False


@pytest.mark.gpu
def test_waiting_for_the_gpu_is_an_error():
    def waits(layer):
        return candidate(layer) * float(layer.weight.quant_state.offset.item() > -1e9)

    assert protocol.attempt(checks.memory, waits) is False
    assert torch.cuda.get_sync_debug_mode() == 0
