"""Compiled for a card that is not here: ours as its own code chooses, Unsloth's as its launcher does."""

import sys
import textwrap

import pytest
import torch

from helpers.machine import child
from helpers.t4 import compile_spec, cross_compile, sass


def test_ptx_shows_assembly_and_hints_and_hints_can_be_switched_off():
    requests = [cross_compile.request_of("float16", True, 75, **force) for force in ({}, {"hints": False})]
    with_hints, without = (built.or_raise().ptx for built in cross_compile.build(requests))
    assert ".target sm_75" in with_hints and "shfl.sync.idx" in with_hints
    assert "evict_first" in with_hints and "st.global.cs" in with_hints
    assert "evict_first" not in without and "st.global.cs" not in without


def test_each_card_gets_what_the_kernel_chooses_there(monkeypatch):
    """Whatever is forced on the card at hand; bf16 is rounded in integers where no instruction does it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # must not reach the process that compiles
    monkeypatch.setenv("NF4_FORCE", "t4")
    request = {"source": "ours", "out_dtype": "bfloat16", "nested": True}
    t4, h200 = cross_compile.build([request | {"arch": arch} for arch in (75, 90)])
    assert t4.error == h200.error == ""
    assert ".target sm_75" in t4.ptx and "cvt.rn.bf16" not in t4.ptx
    assert ".target sm_90" in h200.ptx and "cvt.rn.bf16" in h200.ptx
    assert [compile_spec.card_settings(arch).int_bf16 for arch in (75, 80, 90, 120)] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("interpreted", [True, False])
def test_a_process_that_can_compile_does_so_itself(monkeypatch, interpreted):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    answer = cross_compile.Built
    monkeypatch.setattr(cross_compile, "_in_child", lambda requests, path: [answer({}, name="child")])
    monkeypatch.setattr(cross_compile, "_answers", lambda requests, module: [answer({}, name="here")])

    def where(source="ours", path=None):
        (built,) = cross_compile.build([{"source": source}], path)
        return built.name

    assert where() == ("child" if interpreted else "here")
    assert where("unsloth") == where(path="elsewhere") == "child"


def test_here_or_in_a_child_it_is_the_same_code_and_of_the_module_passed_in():
    code = """if True:
        import types
        from helpers.nf4 import kernel
        from helpers.t4 import cross_compile
        request = {"source": "ours", "arch": 75, "out_dtype": "float16", "nested": True}
        (here,) = cross_compile.build([request])
        (child,) = cross_compile._in_child([request], None)
        (wrong,) = cross_compile.build([request | {"force": {"no_such_setting": 1}}])
        assert not here.error and here.ptx == child.ptx
        assert "no_such_setting" in wrong.error
        other = types.SimpleNamespace(**vars(kernel))
        other._constexprs = lambda *a: kernel._constexprs(*a) | {"STORE_HINT": ""}
        (changed,) = cross_compile.build([request], module=other)
        assert "st.global.cs" in here.ptx and "st.global.cs" not in changed.ptx
    """
    child.python(["-c", code], variables={"TRITON_INTERPRET": None})


def test_where_triton_is_interpreted_only_the_kernel_module_compiles(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(cross_compile.CompileError, match="interpreter is in use"):
        cross_compile.build([cross_compile.request_of("float16", True, 75)], module=object())


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float64"):
        cross_compile.request_of("float64", True, 75)


def test_a_kernel_that_does_not_compile_says_why():
    (built,) = cross_compile.build([cross_compile.request_of("float16", True, 75, no_such_setting=1)])
    with pytest.raises(cross_compile.CompileError, match="no_such_setting"):
        built.or_raise()


def test_a_compile_process_that_fails_says_why(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('a broken Triton')")
    with pytest.raises(cross_compile.CompileError, match="a broken Triton"):
        cross_compile.build([cross_compile.request_of("float16", True, 75)], str(tmp_path))


FAKE_UNSLOTH = """
import functools
import torch
import triton
import triton.language as tl
from unsloth_zoo.utils import Version

WARPS = 8 if Version(triton.__version__) >= Version("3.7.0") else 4

@triton.jit
def _nf4_dequant_kernel(w_ptr, out_ptr, n, HALF: tl.constexpr, ROWS: tl.constexpr):
    i = tl.program_id(0) * ROWS * HALF * 2 + tl.arange(0, ROWS * HALF * 2)
    tl.store(out_ptr + i, tl.load(w_ptr + i // 2, mask=i < n).to(out_ptr.dtype.element_ty), mask=i < n)

def _capability(index):
    raise AssertionError("asked the GPU")

def _launch(kernel, W, absmax, code2, absmax2, offset, code, blocksize, blocksize2, out, fp_fusion):
    assert _capability(torch.cuda.current_device()) == (7, 5) and code2 is not None
    kernel[(out.numel() // 256,)](W, out, out.numel(), HALF=32, ROWS=4, num_warps=WARPS)
"""


def test_unsloths_kernel_is_specialized_as_its_own_launcher_would(tmp_path, monkeypatch):
    folder = tmp_path / "unsloth" / "kernels"
    folder.mkdir(parents=True)
    (folder / "nf4.py").write_text(textwrap.dedent(FAKE_UNSLOTH))
    (folder.parent / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    codes = sass.unsloth(75)
    assert all(code.failed == "" for code in codes), codes
    threads = {(code.contender, code.dtype): code.threads for code in codes if not code.small}
    assert threads["unsloth_before_3_7", "float16"] == 128 and threads["unsloth_from_3_7", "float16"] == 256
    assert {code.elements for code in codes} == {2.0, 1.0}  # 256 a block
    assert "unsloth" not in sys.modules


def test_what_would_be_launched_on_another_card_is_what_the_launcher_would_launch(make_layer, kernel):
    layer = make_layer(512, 1024, torch.float16)
    weight, state = layer.weight, layer.weight.quant_state
    out = torch.full(state.shape, float("nan"), dtype=state.dtype, device=weight.device)
    grid, arguments = compile_spec.launch_arguments(weight, state, out, 75)
    words = compile_spec.card_settings(75).words_small
    assert grid == (-(-out.numel() // (8 * 128 * words)),) and out.isnan().all()
    pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    second = state.state2
    assert pointers[:3] == [weight.data_ptr(), out.data_ptr(), state.absmax.data_ptr()]
    assert pointers[4:] == [
        second.code.data_ptr(),
        second.absmax.data_ptr(),
        state.offset.data_ptr(),
        65536,
        0,
    ]
    assert kernel._your_dequantize_nf4(weight, state, out).isfinite().all()  # the kernel is back
    with pytest.raises(ValueError, match="nothing is launched"):
        compile_spec.launch_arguments(*empty(make_layer), 75)


def empty(make_layer):
    layer = make_layer(64, 64, torch.float16)
    state = layer.weight.quant_state
    state.shape = torch.Size((0, 64))
    return layer.weight, state, torch.empty(state.shape, dtype=state.dtype, device=layer.weight.device)
