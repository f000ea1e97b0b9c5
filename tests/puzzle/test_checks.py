"""The criteria, one cell each: the kernel passes, and wrong implementations fail where they should."""

import types
from unittest import mock

import pytest
import torch

from helpers.puzzle import checks, layers, protocol
from nf4_triton.core import kernel, launch, settings
from nf4_triton.core.launch import your_dequantize_nf4 as candidate

pytest.importorskip("bitsandbytes")
KERNEL = "_your_dequantize_nf4_kernel"
CRITERIA = ("single_kernel", "exact", "torch_compile", "custom_asm", "cache_eviction", "memory")
LAUNCH = {"single_kernel", "custom_asm", "cache_eviction"}  # they look at the candidate's launch


def wrong_bits(layer):
    """One bit of the last element is wrong."""
    weight = candidate(layer)
    weight.view(torch.int16).view(-1)[-1] ^= 1
    return weight


def without_the_last_row(layer):
    """One launch, which leaves the last row as its memory has it."""
    tensors, layout = launch.read_nested(layer.weight, layer.weight.quant_state)
    result = torch.empty(layout[0], dtype=layout[1], device=layers.DEVICE)
    grid, pointers, (n, *after), options = launch.prepare(tensors, layout, result)
    kernel._your_dequantize_nf4_kernel[(grid,)](*pointers, n - layer.in_features, *after, **options)
    return result


def two_kernels(layer):
    return candidate(layer).mul_(1)


def by_bitsandbytes(layer):
    return protocol.baselines()["bitsandbytes"](layer)


def large_buffer(layer):
    weight = candidate(layer)
    torch.empty_like(weight)
    return weight


def keeps(number):
    """Return a function that keeps so many fp32 values of each layer."""

    def call(layer, kept={}):  # noqa: B006
        if layer not in kept:
            kept[layer] = torch.empty(number, device="cuda")
        return candidate(layer)

    return call


def autotunes(layer, known=set()):  # noqa: B006
    """Launch twice in a layer's first call, and flush the cache in between."""
    if layer not in known:
        candidate(layer)
        torch.zeros(2**28, device="cuda")
    known.add(layer)
    return candidate(layer)


def kept_result(layer, kept={}):  # noqa: B006
    key = layer, layer.weight.quant_state.dtype
    if key not in kept:
        kept[key] = candidate(layer)
    return kept[key]


def copied_once(layer, first={}):  # noqa: B006
    """Copy a small tensor on the first call: passes every other comparison."""
    offset = layer.weight.quant_state.offset
    now = offset.clone()
    offset.copy_(first.setdefault(layer, now))
    weight = candidate(layer)
    offset.copy_(now)
    return weight


@pytest.mark.parametrize(
    "wrong, fails",
    [
        (wrong_bits, {"exact", *LAUNCH}),
        (without_the_last_row, {"exact", *LAUNCH}),
        (two_kernels, {"single_kernel"}),
        (by_bitsandbytes, {"memory", *LAUNCH}),
        (large_buffer, {"memory"}),
        (kept_result, {"exact", "memory", *LAUNCH}),
        (copied_once, {"exact", *LAUNCH}),
        (keeps(4096 * 1024 // 64), {"memory"}),  # a decoded absmax of the puzzle's smallest layer
        (keeps(16), set()),  # a table
        (autotunes, set()),
        (protocol.kernel_grid, set()),
    ],
)
def test_a_function_fails_where_it_should_and_nowhere_else(wrong, fails):
    names = {*CRITERIA} - {"torch_compile"} if protocol.ON_GPU else {"exact"} & fails
    if not names:
        pytest.skip("on a CPU it fails in nothing that has a verdict there")
    for name in names:
        verdict = protocol.attempt(getattr(checks, name), wrong)
        assert verdict is (name not in fails), name


@pytest.mark.gpu
@pytest.mark.parametrize("forced", [{}, settings.T4], ids=["own", "t4"])
@pytest.mark.parametrize("name", CRITERIA)
def test_the_kernel_passes(name, forced):
    """Also with a T4's settings. What is printed without a GPU: test_notebook.py."""
    with settings.force(**forced):
        assert protocol.attempt(getattr(checks, name), candidate) is True


@pytest.mark.gpu
def test_another_authors_kernel_is_read_from_its_own_ptx(capsys):
    unsloth = protocol.baselines().get("unsloth_today") or pytest.skip("needs Unsloth")
    assert protocol.attempt(checks.single_kernel, unsloth) is True
    assert protocol.attempt(checks.custom_asm, unsloth) is False, "Unsloth's has no inline assembly"
    assert "    _nf4" in capsys.readouterr().out


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
TTIR = (
    """%25 = tt.elementwise_inline_asm "{ .reg .f32 m; mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3; }" {"""
)


@pytest.mark.parametrize("check", [checks.custom_asm, checks.cache_eviction])
@pytest.mark.parametrize(
    "ptx, fp16, bf16, passes",
    [
        ([ON], [0], [0], True),
        ([PLAIN, ON], [0], [1], True),  # only in bf16
        ([PLAIN, ON], [1], [1], True),  # edited and run again, or autotuned
        ([ON, PLAIN], [1], [1], False),  # an option that autotuning did not choose
        ([ON], [], [], False),
    ],
)
def test_the_kernels_that_a_call_launched_decide(check, ptx, fp16, bf16, passes, monkeypatch):
    """Once is enough, but all bits must be right. The launches are stand-ins."""
    kernels = []
    for handle, text in enumerate(ptx):
        asm = {"ptx": text, "ttir": TTIR if SCALE in text else ""}
        kernels.append(types.SimpleNamespace(name=KERNEL, function=handle, asm=asm))
    monkeypatch.setattr(checks, "triton_kernels", lambda: kernels)

    def call(layer):
        hook = checks.triton.knobs.runtime.launch_enter_hook
        for handle in {torch.float16: fp16, torch.bfloat16: bf16}[layer.compute_dtype]:
            if isinstance(hook, mock.Mock):  # the check's own
                hook(types.SimpleNamespace(get=lambda handle=handle: {"function": handle}))
        return candidate(layer)

    assert check(call) is passes
    assert check(lambda layer: call(layer).neg()) is False


@pytest.mark.parametrize("ran, passes", [([KERNEL], True), ([KERNEL] * 2, False), (["copy"], False)])
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_call_runs_one_kernel_of_tritons(ran, passes, wrong, monkeypatch):
    monkeypatch.setattr(checks, "triton_kernels", lambda: [types.SimpleNamespace(name=KERNEL)])
    monkeypatch.setattr(checks, "profiled", lambda function, layer: (ran, wrong))
    assert checks.single_kernel(candidate) is (passes and wrong == 0)


# --- torch.compile ---


def graph_break(layer):
    torch._dynamo.graph_break()
    return candidate(layer)


@pytest.mark.parametrize(
    "function, ran, wrong, passes",
    [
        (candidate, [KERNEL], 0, True),
        (candidate, [KERNEL], 1, False),
        (candidate, [KERNEL] * 2, 0, False),
        (candidate, ["triton_poi"], 0, False),
        (graph_break, [KERNEL], 0, False),
    ],
)
def test_a_compiled_call_runs_one_kernel_and_none_of_inductors(function, ran, wrong, passes, monkeypatch):
    monkeypatch.setattr(checks, "profiled", lambda function, layer: (ran, wrong))
    assert protocol.attempt(checks.torch_compile, function) is passes
