"""The criteria, one cell each: the kernel passes, and wrong implementations fail where they should."""

import itertools
import runpy

import pytest
import torch

from helpers.puzzle import checks, layers, protocol
from nf4_triton.core import settings
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


def waits(layer):
    layer.weight.quant_state.offset.item()
    return candidate(layer)


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


def of_another(layer, others={}):  # noqa: B006
    """Return the weight of another layer, in one launch."""
    if layer not in others:
        others[layer] = layers.bnb_Linear4bit(layer.in_features, layer.out_features, layer.compute_dtype)
    return candidate(others[layer])


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
        (two_kernels, LAUNCH),
        (by_bitsandbytes, {"memory", *LAUNCH}),
        (large_buffer, {"memory"}),
        (kept_result, {"exact", "memory", *LAUNCH}),
        (of_another, {"exact", "memory", *LAUNCH}),
        (copied_once, {"exact", *LAUNCH}),
        (keeps(4096 * 1024 // 64), {"memory"}),  # a decoded absmax of the puzzle's smallest layer
        (keeps(16), set()),  # a table
        (waits, set()),
        (autotunes, set()),
        (protocol.kernel_grid, set()),
    ],
)
def test_a_function_fails_where_it_should_and_nowhere_else(wrong, fails, capsys):
    names = {*CRITERIA} - {"torch_compile"} if protocol.ON_GPU else {"exact"} & fails
    if not names:
        pytest.skip("on a CPU it fails in nothing that has a verdict there")
    for name in names:
        verdict = protocol.attempt(getattr(checks, name), wrong)
        assert verdict is (name not in fails), name
        assert ("waited 40 times" in capsys.readouterr().out) is (name == "memory" and wrong is waits)


def graph_break(layer):
    torch._dynamo.graph_break()
    return candidate(layer)


@pytest.mark.parametrize("wrong", [graph_break, wrong_bits])
def test_compiled_code_with_a_graph_break_or_wrong_bits_fails(wrong):
    assert protocol.attempt(checks.torch_compile, wrong) is False


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
    assert "the PTX of _nf4" in capsys.readouterr().out


@pytest.mark.gpu  # only torch's GPU allocator gives the same memory again
def test_a_result_is_compared_in_memory_that_held_nan():
    """An element that a call does not write must not keep the right value of an earlier result."""
    layer, size = layers.bnb_Linear4bit(1024, 4096), (4096, 1024)
    candidate(layer)
    assert checks.wrong_elements(lambda layer: torch.empty(size, dtype=torch.half, device="cuda"), layer) > 0


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


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """launched(ran, on, off, setting): a call runs these names; Triton loaded a kernel with each PTX."""

    def known(ran, on, off=(), setting="asm"):
        found = []
        for switched, text in [*((True, text) for text in on), *((False, text) for text in off)]:
            files = {kind: tmp_path / f"{len(found)}{kind}" for kind in (".ttir", ".ttgir", ".ptx")}
            files[".ttir"].write_text(TTIR if SCALE in text else "")
            files[".ttgir"].write_text("%out_ptr: !tt.ptr<bf16> loc(")
            files[".ptx"].write_text(text)
            found.append((KERNEL, vars(settings.settings()) | {setting: switched}, files))
        monkeypatch.setattr(checks, "loaded_kernels", found)
        monkeypatch.setattr(checks, "profiled", lambda function, layer: (ran, 0))

    with settings.force(asm=True):
        yield known


@pytest.mark.parametrize("check, setting", [(checks.custom_asm, "asm"), (checks.cache_eviction, "hints")])
@pytest.mark.parametrize(
    "ran, on, off, passes",
    [
        ([KERNEL], [ON], [PLAIN], True),
        ([KERNEL], [ON], [], True),  # another author's
        ([KERNEL], [ON, PLAIN], [PLAIN], False),  # beside ours
        ([KERNEL], [ON], [ON], False),
        ([KERNEL], [], [], False),
        ([KERNEL, "another"], [ON], [PLAIN], False),
    ],
)
def test_on_and_off(check, setting, ran, on, off, passes, launched, capsys):
    """What is on must be in the PTX of the kernel. The launches are made up."""
    launched(ran, on, off, setting)
    assert check(lambda layer: None) is passes
    assert not passes or capsys.readouterr().out.count("    bf16 ") == len(on + off)


@pytest.mark.parametrize("ran, passes", [([KERNEL], True), ([KERNEL] * 2, False), (["copy"], False)])
def test_a_call_runs_one_kernel_of_tritons(ran, passes, launched, monkeypatch):
    """The first call may autotune."""
    launched(ran, [ON])
    calls = itertools.cycle([["fill", KERNEL] * 99, ran, ran])
    monkeypatch.setattr(checks, "profiled", lambda function, layer: (next(calls), 0))
    assert checks.single_kernel(candidate) is passes


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # runpy: it is imported already
def test_a_kernel_that_was_loaded_before_the_settings_cell_ran_again(monkeypatch):
    """Then `Settings` is another class."""
    again = runpy.run_module(settings.__name__)
    monkeypatch.setattr(protocol, "loaded_kernels", [])
    monkeypatch.setattr(checks, "loaded_kernels", protocol.loaded_kernels)
    protocol.note(None, None, KERNEL, {"ptx": "some.ptx"})
    monkeypatch.setattr(checks, "settings", again["settings"])
    assert len(checks.loaded([KERNEL])) == 1


# --- torch.compile, memory ---


@pytest.mark.parametrize("ran, passes", [([KERNEL], True), ([KERNEL] * 2, False), (["triton_poi"], False)])
def test_a_compiled_call_runs_one_kernel_and_none_of_inductors(ran, passes, monkeypatch):
    monkeypatch.setattr(checks, "profiled", lambda function, layer: (ran, 0))
    monkeypatch.setattr(checks, "ON_GPU", True)
    assert protocol.attempt(checks.torch_compile, candidate) is passes
