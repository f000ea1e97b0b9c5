"""Compiled for a card that is not here: ours as its own code chooses, Unsloth's as its launcher does."""

import sys
import textwrap

import pytest

from helpers import machine
from helpers.t4 import cross_compile, other_card, sass
from helpers.t4.cross_compile import Request


def test_ptx_shows_assembly_and_hints_and_hints_can_be_switched_off():
    with_hints, without = cross_compile.build([Request(75), Request(75, force={"hints": False})])
    assert ".target sm_75" in with_hints.ptx and "shfl.sync.idx" in with_hints.ptx
    assert "evict_first" in with_hints.ptx and "st.global.cs" in with_hints.ptx
    assert "evict_first" not in without.ptx and "st.global.cs" not in without.ptx


def test_each_card_gets_what_the_kernel_chooses_there(monkeypatch):
    """Whatever is forced on the card at hand; bf16 is rounded in integers where no instruction does it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # must not reach the process that compiles
    monkeypatch.setenv("NF4_FORCE", "t4")
    t4, h200 = cross_compile.build([Request(arch, "bfloat16") for arch in (75, 90)])
    assert t4.error == h200.error == ""
    assert ".target sm_75" in t4.ptx and "cvt.rn.bf16" not in t4.ptx
    assert ".target sm_90" in h200.ptx and "cvt.rn.bf16" in h200.ptx
    rounded = [other_card.card_settings(arch).int_bf16 for arch in (75, 80, 90, 120)]
    assert rounded == [True, False, False, False]


def test_a_kernel_that_does_not_compile_says_why():
    (built,) = cross_compile.build([Request(75, force={"no_such_setting": 1})])
    assert "no_such_setting" in built.error and not built.ptx


def test_a_compile_process_that_fails_says_why(tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("raise ImportError('a broken Triton')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(machine.ChildFailed, match="a broken Triton"):
        cross_compile.build([Request(75)])


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
    codes = sass.unsloth()
    assert [(code.dtype, code.failed) for code in codes] == [("float16", ""), ("bfloat16", "")] * 2
    requests = [Request(75, unsloth=table) for table in cross_compile.UNSLOTH_TABLES]
    built = cross_compile.build(requests)
    assert [one.num_warps for one in built] == [4, 8]
    assert [one.elements for one in built] == [2.0, 1.0]  # 256 a block
    assert "unsloth" not in sys.modules


FOREIGN = """if True:
    import types
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from helpers.t4 import other_card

    loaded, launched = [], []

    class Launcher:
        def __init__(self, source, metadata):
            self.names = list(source.signature)

        def __call__(self, *arguments):
            launched.append((arguments[:5], dict(zip(self.names, arguments[-len(self.names):], strict=True))))

    def load(name, binary, shared, device):
        loaded.append((binary, shared, device))
        return 1, "function", 0, 0, 1024

    stand_in = types.SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 7, launcher_cls=Launcher,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=types.SimpleNamespace(
            load_binary=load, unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 65536},
        ),
    )
    driver.set_active(stand_in)
    triton_kernel, dtypes, named = other_card.our_launch(75, torch.float16, True, 5000, {})
    arguments = [x if isinstance(x, int) else torch.zeros(64, dtype=x) for x in dtypes]
    found = other_card.ForeignKernel(triton_kernel, 75)[(3,)](*arguments, **named)
    [(binary, shared, device)], [(where, passed)] = loaded, launched
    assert binary == found.asm["ptx"].encode() and b".target sm_75" in binary
    assert (shared, device) == (found.metadata.shared, 0)
    assert where == (3, 1, 1, 7, "function") and driver.active is stand_in
    assert all(a is b for a, b in zip(passed.values(), arguments))
    constexprs = list(passed.items())[len(arguments):]
    assert constexprs and all(named[name] is value for name, value in constexprs)
"""


def test_the_ptx_of_another_card_goes_to_the_driver_with_all_arguments():
    """Triton's own driver is stood in for: what it is given to load and to launch."""
    machine.python(["-c", FOREIGN], variables={"TRITON_INTERPRET": None})
