"""GPU time, and the criteria: the kernel passes, and wrong implementations fail where they should."""

import contextlib

import pytest
import torch

from helpers.puzzle import checks, layers, protocol
from nf4_triton import launch, settings

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16
CHECKS = {
    "one kernel": checks.single_kernel,
    "bits": checks.exact,
    "compile": checks.torch_compile,
    "assembly": checks.custom_asm,
    "eviction": checks.cache_eviction,
    "memory": checks.memory,
}
WITHOUT_GPU = {"bits"}  # of those, what has a verdict on a CPU


def wrong_bits(layer):
    """One bit of the last element is wrong."""
    weight = launch.your_dequantize_nf4(layer)
    weight.view(torch.int16).view(-1)[-1] ^= 1
    return weight


def two_kernels(layer):
    return launch.your_dequantize_nf4(layer).mul_(1)


def large_buffer(layer):
    weight = launch.your_dequantize_nf4(layer)
    torch.empty_like(weight)
    return weight


def kept_result(layer, kept={}):  # noqa: B006
    key = layer, layer.weight.quant_state.dtype
    if key not in kept:
        kept[key] = launch.your_dequantize_nf4(layer)
    return kept[key]


@pytest.mark.parametrize(
    "wrong, fails",
    [
        (wrong_bits, {"bits", "assembly", "eviction"}),
        (two_kernels, {"one kernel"}),
        (large_buffer, {"memory"}),
        (kept_result, {"bits", "one kernel", "memory"}),
    ],
)
def test_a_wrong_implementation_fails_where_it_should(wrong, fails):
    for name, check in CHECKS.items():
        verdict = protocol.attempt(check, wrong, needs_gpu=name not in WITHOUT_GPU)
        if protocol.ON_GPU or name in WITHOUT_GPU:
            assert verdict is not True if name in fails else verdict or name == "compile", name


@pytest.mark.gpu
@pytest.mark.parametrize("card", [None, "t4"])
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernel_passes(name, card, candidate):
    """Also with a T4's settings. What is printed without a GPU: test_notebook.py."""
    with settings.force(card=card):
        assert protocol.attempt(CHECKS[name], candidate) is True


# --- bits ---


def test_a_result_is_compared_in_memory_that_held_nan(make_layer):
    """An element that a call does not write must not keep the reference's value."""
    if not protocol.ON_GPU:
        pytest.skip("only torch's GPU allocator gives the same memory again")
    layer = make_layer(64, 64, FP16)
    assert checks.wrong_elements(lambda layer: torch.empty(64, 64, dtype=FP16, device="cuda"), layer) > 0


# --- what is read from a profile and from PTX ---

PTX = """
	// begin inline asm
	{ .reg .f32 a, b; mul.rn.ftz.f32 a, %f1, %f3; mul.rn.ftz.f32 b, %f2, %f3; cvt.rn.f16x2.f32 %r1, b, a; }
	// end inline asm
	// begin inline asm
	@%p2 ld.global.L1::evict_first.L2::cache_hint.b32 { %r7 }, [ %rd7 + 0 ], %rd2;
	// end inline asm
	createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;
	cvt.rn.f16x2.f32 %r9, %f8, %f9;
	st.global.cs.v4.b32 [ %rd8 ], { %r2 };
"""
PLAIN = """
	// begin inline asm
	ld.global.b32 { %r7 }, [ %rd7 + 0 ];
	// end inline asm
	mul.f32 %f1, %f2, %f3;
	cvt.rn.f16x2.f32 %r9, %f8, %f9;
	st.global.v4.b32 [ %rd8 ], { %r2 };
"""
EXACT, INEXACT = {True: 0, False: 0}, {True: 0, False: 1}


@pytest.mark.parametrize("check", [checks.custom_asm, checks.cache_eviction])
@pytest.mark.parametrize(
    "on, off, wrong, passes",
    [
        (PTX, PLAIN, EXACT, True),
        (PTX, PTX, EXACT, False),
        (PLAIN, PLAIN, EXACT, False),
        (PTX, PLAIN, INEXACT, False),
    ],
)
def test_on_and_off(check, on, off, wrong, passes, monkeypatch, candidate):
    monkeypatch.setattr(checks, "on_and_off", lambda candidate, name: ({True: on, False: off}, wrong))
    assert check(candidate) is passes


@pytest.fixture
def pretend_gpu(monkeypatch):
    """pretend_gpu(names): the logic of a GPU's checks on small layers, with these names in every profile."""
    made = layers.quantized_layer

    def pretend(*names):
        monkeypatch.setattr(checks, "ON_GPU", True)
        monkeypatch.setattr(checks, "quantized_layer", lambda i, o, dtype: made(64, 64, dtype))
        monkeypatch.setattr(
            checks, "gpu_events", lambda function, layer, count: [(name, 1.0) for name in names] * count
        )
        monkeypatch.setattr(torch, "compile", lambda function, fullgraph, backend: function)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)

    return pretend


@pytest.mark.parametrize(
    "names, passes",
    [((checks.KERNEL,), True), (("absmax", checks.KERNEL), False), ((), False), (("other",), False)],
)
def test_one_kernel_and_nothing_else_may_run(pretend_gpu, candidate, names, passes):
    pretend_gpu(*names)
    assert checks.single_kernel(candidate) is passes
    assert checks.torch_compile(candidate) is passes


# --- GPU time ---


def test_gpu_time_is_printed_and_drawn(monkeypatch, candidate, capsys):
    """A contender that is not installed has no line and no bar."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(checks, "gpu_us", lambda function, layers: 2.0)
    monkeypatch.setattr(checks, "quantized_layer", lambda *sizes: None)
    monkeypatch.setattr(pyplot, "show", lambda: None)
    checks.device(candidate)
    names = [line[:24].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    labels = [bars.get_label() for bars in pyplot.gca().containers if len(bars)]
    assert names[0] == checks.MOVES and labels == [name for name in checks.COLORS if name in names]
    pyplot.close("all")


# --- torch.compile ---


def test_a_graph_break_fails(candidate):
    def breaks(layer):
        torch._dynamo.graph_break()
        return candidate(layer)

    assert protocol.attempt(checks.torch_compile, breaks, needs_gpu=False) is False


def test_bf16_without_native_bf16_runs_eagerly_and_must_be_exact(pretend_gpu, monkeypatch, candidate, capsys):
    pretend_gpu(checks.KERNEL)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert checks.torch_compile(candidate) is True
    shown = capsys.readouterr().out
    assert "fp16: fullgraph=True" in shown and "bf16: fullgraph=False" in shown
    assert "Inductor does not compile bf16 on this card" in shown
    assert checks.torch_compile(lambda layer: candidate(layer) * 2) is False


# --- memory ---


@pytest.mark.parametrize("extra, kept, passes", [(0, 0, True), (8192, 0, False), (0, 512, False)])
def test_only_the_output_may_be_allocated(pretend_gpu, monkeypatch, candidate, extra, kept, passes):
    pretend_gpu(checks.KERNEL)
    allocated = []
    monkeypatch.setattr(
        torch.cuda, "memory_allocated", lambda: kept * (allocated.append(1) or len(allocated))
    )
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda: 64 * 64 * 2 + extra + kept * len(allocated)
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(checks, "no_waiting", contextlib.nullcontext)
    assert checks.memory(candidate) is passes


@pytest.mark.gpu
def test_waiting_for_the_gpu_is_an_error(candidate):
    def waits(layer):
        return candidate(layer) * float(layer.weight.quant_state.offset.item() > -1e9)

    assert protocol.attempt(checks.memory, waits) is False
    assert torch.cuda.get_sync_debug_mode() == 0
