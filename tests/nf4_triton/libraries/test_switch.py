"""use_nf4_kernel: what it replaces and reports, how it ends, and what can happen to the process meanwhile."""

import atexit
import functools
import importlib.util
import itertools
import logging
import multiprocessing
import sys
import threading
import time
import types

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")

from bitsandbytes.nn.parametrize import replace_parameter_4bit  # noqa: E402

import processes  # noqa: E402
from helpers.puzzle.layers import DEVICE  # noqa: E402
from nf4_triton import autoload, log  # noqa: E402
from nf4_triton.core import launch, launch_general  # noqa: E402
from nf4_triton.core.supported import UnsupportedState  # noqa: E402
from nf4_triton.libraries import self_test, site, switch, unsloth  # noqa: E402
from nf4_triton.libraries.bitsandbytes import DEQUANTIZE, FALLBACK  # noqa: E402
from nf4_triton.libraries.site import KERNEL, UnknownInternals  # noqa: E402
from nf4_triton.libraries.switch import restore, use_nf4_kernel  # noqa: E402
from states import fast_dequantize, oracle  # noqa: E402
from switching import (  # noqa: E402
    BF16,
    FP32,
    ORIGINAL,
    forget_self_tests,
    library_function,
    quantized,
    quietly,
    untouched,
)

LINE = f"  {DEQUANTIZE}: "
EARLY = "imported before use_nf4_kernel() was called, or read-only"


def without_fallback(text):
    """A report without the line of bitsandbytes' CUDA operator, which a CPU does not have."""
    return "\n".join(line for line in str(text).splitlines() if FALLBACK not in line)


@functools.cache
def example():
    """(packed, state, the library's result) of a nested NF4 weight in bf16."""
    packed, state = quantized((64, 128), BF16, DEVICE)
    return packed, state, ORIGINAL[0](packed, state)


@pytest.fixture
def fake_unsloth(fake_module):
    """A module with Unsloth's name and function, of a version that has none for stacks of experts."""
    fake_module("unsloth_zoo.temporary_patches", __path__=[])
    return fake_module("unsloth.kernels.utils", fast_dequantize=fast_dequantize)


def dequantizes():
    packed, state, expected = example()
    return torch.equal(bnb.functional.dequantize_4bit(packed, state), expected)


def by_kernel(on):
    return on.calls[DEQUANTIZE][KERNEL]


# One report: during the time that the kernel is on, and after


def test_on_for_the_time_of_a_with_block(logged):
    with pytest.raises(KeyError), use_nf4_kernel("bitsandbytes") as on:
        assert not untouched() and on.on
        said = logged()
        assert said == f"{on}\n"
        assert without_fallback(said) == f"The NF4 kernel works here.\n{LINE}no calls\nrestore() ends it."
        assert repr(on) == str(on)  # what a notebook shows
        dequantizes()
        during, held = str(on), library_function()
        raise KeyError
    assert untouched() and not on.on
    held(*example()[:2])  # now handled by the library
    report = f"The kernel dequantized 1 of 1.\n{LINE}1 by the kernel"
    assert without_fallback(on) == report and without_fallback(during) == f"{report}\nrestore() ends it."
    with quietly("bitsandbytes") as later:
        assert dequantizes() and dequantizes()
    assert without_fallback(on) == report and by_kernel(on) == 1 and by_kernel(later) == 2


def test_who_finds_it_on_leaves_it_on(fake_unsloth):
    with quietly("bitsandbytes") as first:
        replacement = library_function()
        dequantizes()
        with quietly("unsloth", "peft") as second:
            pass
        assert library_function() is replacement  # so that compiled graphs stay valid
        assert first.on and fake_unsloth.fast_dequantize is not fast_dequantize
        assert str(first) == str(second) and unsloth.EXPERT_STACK not in second.left
        restore()
        assert untouched() and fake_unsloth.fast_dequantize is fast_dequantize
        quietly("bitsandbytes")
        assert library_function() is replacement and not first.on and by_kernel(first) == 1


def test_references_in_other_modules(fake_module):
    theirs = fake_module("UnslothSFTTrainer", dequantize=ORIGINAL[0])
    mine = fake_module("my_script", dequantize=ORIGINAL[0])
    fake_module("nf4_route", dequant_groups=len)
    with quietly("bitsandbytes") as on:
        assert theirs.dequantize is library_function() and not untouched()
        assert mine.dequantize is ORIGINAL[0]  # a script may compare with it
        own = {"nf4_route.dequant_groups": "it has a kernel of its own"}
        assert on.left == own | {"my_script.dequantize": EARLY}
        other = fake_module("peft.other", dequantize=ORIGINAL[0])
        quietly("bitsandbytes")  # adds what was imported since
        assert other.dequantize is theirs.dequantize
    assert theirs.dequantize is other.dequantize is ORIGINAL[0]


class Strange(types.ModuleType):
    """A read-only module, and a lazy one: attribute access would import it."""

    def __setattr__(self, name, value):
        raise OSError("read only")

    def __getattr__(self, name):
        raise OSError("needs a display")


def test_strange_modules_stand_alone(fake_module, monkeypatch):
    fake_module("transformers.stubborn", Strange, dequantize=ORIGINAL[0])
    for name, module in (("axolotl", None), ("my.lazy", Strange("lazy")), ("nf4_route", Strange("lazy"))):
        monkeypatch.setitem(sys.modules, name, module)
    with quietly(strict=True) as on:
        assert on.left == {"transformers.stubborn.dequantize": EARLY}


def test_a_child_of_a_process_that_is_about_to_switch():
    """Another thread runs the self-test during the fork."""
    began = threading.Event()

    def tests_itself():
        with switch._lock:
            began.set()
            time.sleep(1)

    thread = threading.Thread(target=tests_itself)
    thread.start()
    began.wait()
    child = multiprocessing.get_context("fork").Process(target=restore, daemon=True)
    child.start()
    child.join(20)
    thread.join()
    assert child.exitcode == 0


def test_strict_changes_nothing_if_one_of_its_libraries_fails(fake_module):
    fake_module("unsloth.kernels.utils", fast_dequantize=lambda W: W)
    for already_on in (False, True):
        if already_on:
            quietly("bitsandbytes")
        before, report = library_function(), str(switch.Switch())
        with pytest.raises(UnknownInternals):
            quietly("bitsandbytes", "unsloth", strict=True)
        assert library_function() is before and str(switch.Switch()) == report
        assert switch.Switch().on == already_on


# What is refused, what is left


def wrong_bits(weight, state, out=None):
    return oracle(weight, state) + 1


def wrong_library(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
    return wrong_bits(A, quant_state)


def raises(error):
    def function(*_, **named):
        raise error

    return function


FAILED = "^the kernel failed the self-test of .*4bit: "
# Or bitsandbytes' own error: on a CPU it has no `out`.
NEW = FAILED + "(it handled no call$|NotImplementedError)"
LAUNCH = FAILED + r"the kernel could not be launched \(OSError: no space\)$"
BITS = FAILED + "other bits in nf4, nested, torch.float16, blocksize 64$"
REFUSED = [  # (module, name, what is there instead, error, its text)
    (bnb.functional, "dequantize_4bit", None, UnknownInternals, r"has the parameters \[\], expected"),
    (bnb.functional, "dequantize_4bit", wrong_library, RuntimeError, "4bit failed its self-test: other bits"),
    (switch, "cannot_run", lambda device: "No CUDA GPU: use one", RuntimeError, "No CUDA GPU"),
    (launch_general, "dequantize_weight", wrong_bits, RuntimeError, BITS),
    (launch_general, "dequantize_weight", raises(OSError("no space")), RuntimeError, LAUNCH),
    (launch_general, "dequantize_weight", raises(UnsupportedState("it is new")), RuntimeError, NEW),
]


@pytest.mark.parametrize("module, name, instead, error, text", REFUSED)
def test_refused(monkeypatch, logged, caplog, module, name, instead, error, text):
    """With strict it raises. Otherwise nothing is replaced, and the report says why, even after the block."""
    forget_self_tests()
    monkeypatch.setattr(module, name, instead)
    before = library_function()
    with pytest.raises(error, match=text) as problem:
        quietly(strict=True)
    assert "\n" not in str(problem.value) and not logged()
    caplog.set_level("WARNING")
    report = f"The NF4 kernel is not used.\nLeft to the library: {DEQUANTIZE}: {problem.value}"
    with use_nf4_kernel("peft") as on:
        assert library_function() is before and not on.on and str(on) == report
        assert logged() == f"{report}\n"
    assert str(on) == report
    monkeypatch.undo()
    with quietly("bitsandbytes", strict=True) as on:  # the failure is not remembered
        assert on.on


def test_which_libraries(monkeypatch):
    """Without names, it switches bitsandbytes and the imported libraries; strict applies to these."""
    for name in ("bnb", torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=r" is an unknown library, expected unsloth, .* or no name$"):
            use_nf4_kernel(name)
    for name in ("unsloth", "axolotl", "peft"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with quietly(strict=True) as on:
        assert on.on and not on.left
    nothing = f"The NF4 kernel was on, but no dequantization was counted.\n{LINE}no calls"
    assert without_fallback(on) == f"{nothing}\nWas a model loaded in 4 bits?"
    with pytest.raises(ImportError, match="peft"):
        quietly("peft", strict=True)
    assert quietly("unsloth").left[unsloth.FAST_DEQUANTIZE].startswith("import of unsloth")


def test_where_no_launch_is_kept_unsloth_keeps_its_function(monkeypatch, fake_unsloth):
    """Unsloth's launches faster than Triton's kernel[grid]; bitsandbytes' does not."""
    monkeypatch.setattr(launch, "CAN_RELAUNCH", False)
    monkeypatch.setattr(site, "INTERPRETED", False)
    with quietly() as on:
        assert fake_unsloth.fast_dequantize is fast_dequantize and dequantizes()
        assert on.left[unsloth.FAST_DEQUANTIZE].startswith("launches cannot be cached")


def wrapper(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4", fast=False):
    """Another library's function, or a newer version: it has one more argument."""
    return "fast" if fast else wrapper.behind(A, quant_state, out=out)


def test_a_newer_argument_goes_to_the_library(monkeypatch):
    wrapper.behind = ORIGINAL[0]
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", wrapper)
    with quietly("bitsandbytes", strict=True) as on:
        assert library_function()(None, fast=True) == "fast"
        assert library_function()(None, None, None, None, 64, "nf4", True) == "fast"
        assert dequantizes() and by_kernel(on) == 1


def test_a_wrapper_around_a_replacement(monkeypatch):
    """As Axolotl makes one when it loads a model, and Unsloth on import. After restore() it only passes
    calls on, and the self-test asks the library behind it."""
    on = quietly("bitsandbytes")
    wrapper.behind = library_function()
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", wrapper)
    lost = {DEQUANTIZE: "another library wrapped or replaced it since, and no call came through"}
    assert on.left == lost and LINE not in str(on)
    assert dequantizes() and not on.left and f"{LINE}1 by the kernel" in str(on)
    monkeypatch.setattr(launch_general, "dequantize_weight", wrong_bits)
    quietly("axolotl")  # replaces again what is on
    assert library_function() is wrapper
    assert f"failed the self-test of {DEQUANTIZE}" in quietly("bitsandbytes").left[DEQUANTIZE]
    assert dequantizes()
    restore()
    assert library_function() is wrapper and dequantizes() and by_kernel(on) == 1


@pytest.mark.parametrize("wrong", range(6))
def test_a_function_with_other_bits_in_one_call_stays_the_librarys(monkeypatch, wrong):
    """In each of two layouts the calls are: into a new tensor, into `out`, transposed."""
    calls = itertools.count()

    def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        result = oracle(A, quant_state)
        if next(calls) == wrong:
            result[3, 2] += 1
        return result if out is None else out.copy_(result)

    forget_self_tests()
    monkeypatch.setattr(self_test, "LAYOUTS", [*self_test.LAYOUTS[:1], ("fp4", "flat", FP32, 4096)])
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", dequantize_4bit)
    with pytest.raises(RuntimeError, match=f"{DEQUANTIZE} failed its self-test: other bits in"):
        quietly("bitsandbytes", strict=True)


@pytest.mark.gpu
def test_a_gpus_bitsandbytes_keeps_no_layout():
    forget_self_tests()
    assert not quietly("bitsandbytes", strict=True).left


@pytest.mark.gpu
def test_unsloths_functions_for_experts_are_replaced():
    if importlib.util.find_spec("unsloth") is None:  # not imported here: it would change this process
        pytest.skip("unsloth is not installed")
    names = [one.name for one in unsloth.SITES[:3]]
    modules = ", ".join(name.rpartition(".")[0] for name in names)
    code = f"import unsloth, {modules}\nimport nf4_triton\nprint(nf4_triton.use_nf4_kernel('unsloth'))"
    out = processes.python(["-c", code]).out
    assert all(f"  {name}: no calls" in out for name in names) and "self-test" not in out, out


@pytest.mark.parametrize("rank, current, index", [("1", 0, 1), ("5", 0, 0), ("1", 3, 3), ("x", 0, 0)])
def test_each_rank_tests_on_its_own_gpu(monkeypatch, rank, current, index):
    """Before torch.cuda.set_device, the current device is GPU 0 for every rank."""
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", current)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert self_test.self_test_device() == torch.device("cuda", index)


# What is logged


def test_without_configured_logging_lines_have_a_name(monkeypatch, capsys):
    """As in a plain script."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log.say("it is on")
    monkeypatch.setattr(log.log, "level", logging.WARNING)
    log.say("it is on")
    assert capsys.readouterr().err == "nf4_triton: it is on\n"


# NF4_TRITON=1


@pytest.fixture
def variable(monkeypatch):
    """NF4_TRITON=1, and bitsandbytes' classes as they were afterwards."""
    for waits_for in (bnb.nn.Linear4bit, bnb.functional.QuantState):
        monkeypatch.setattr(waits_for, "__init__", waits_for.__init__)
    monkeypatch.setenv("NF4_TRITON", "1")
    monkeypatch.setattr(switch, "was_called", False)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    yield monkeypatch
    autoload.waiting.clear()


def a_layer():
    return bnb.nn.Linear4bit(64, 32, bias=False, device="meta")


def test_the_variable_switches_at_the_first_layer(variable, logged):
    """Also where a model is loaded: on the meta device, in another default dtype, in inference mode. What
    bitsandbytes makes in the default dtype of its first use is still to be made after."""
    forget_self_tests()
    example()  # while bitsandbytes has its tables
    variable.setattr(bnb.functional, "name2qmap", {})
    autoload.load()
    assert untouched() and dequantizes()
    torch.set_default_dtype(BF16)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert a_layer().in_features == 64
    finally:
        torch.set_default_dtype(torch.float32)
    assert not bnb.functional.name2qmap
    assert logged().startswith("The NF4 kernel works here.\n") and not untouched() and dequantizes()
    a_layer()
    assert not logged()


def test_the_variable_switches_where_no_layer_is_made(variable):
    """At the first QuantState: functional calls, embeddings, vLLM, and Axolotl's sharded loader make one too.
    The self-test is not compiled with what makes it."""
    forget_self_tests()
    autoload.load()
    assert untouched()
    torch.compile(replace_parameter_4bit, backend="eager")(torch.nn.Linear(64, 64), "weight")
    assert not untouched()


ENDS = """
import collections, multiprocessing, os, sys, types
cuda = types.SimpleNamespace(is_initialized=lambda: "USES_GPU" in os.environ)
compiler = types.SimpleNamespace(disable=lambda function: function)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, compiler=compiler)
sys.modules["bitsandbytes.nn.modules"] = types.SimpleNamespace(Linear4bit=type("Linear4bit", (), {}))
sys.modules["bitsandbytes.functional"] = types.SimpleNamespace(QuantState=type("QuantState", (), {}))
class Report:
    calls = {"function": collections.Counter()}
    def __str__(self):
        return f"the report: {self.calls['function']['by the kernel']} calls"
sys.modules["nf4_triton.libraries.switch"] = types.SimpleNamespace(use_nf4_kernel=Report, was_called=False)
from nf4_triton import autoload
autoload.load()
if "MAKES_LAYER" in os.environ:
    sys.modules["bitsandbytes.nn.modules"].Linear4bit()
if __name__ == "__main__":
    for start in ("spawn", "fork"):
        worker = multiprocessing.get_context(start).Process(target=int)
        worker.start()
        worker.join()
    if os.fork() == 0:
        sys.exit()
    os.wait()
    Report.calls["function"]["by the kernel"] += 1
"""


def test_what_a_process_says_at_its_end(tmp_path):
    """What was dequantized, or that no 4-bit weight was made. Of two ranks the first says it; no process that
    they start, and no launcher, which uses no GPU."""
    script = tmp_path / "train.py"
    script.write_text(ENDS)

    def said(**variables):
        return processes.python([script], variables={"NF4_TRITON": "1", "LOCAL_RANK": None} | variables).err

    line = "nf4_triton: NF4_TRITON=1 had no effect: this process made no Linear4bit and no QuantState."
    assert said(LOCAL_RANK="0", USES_GPU="1").startswith(line)
    assert not said(LOCAL_RANK="1", USES_GPU="1") and not said()
    assert said(MAKES_LAYER="1") == "nf4_triton: the report: 1 calls\n"
    unknown = "NF4_TRITON='ture' is unknown, expected one of 0, false, off, no, 1, true, on, yes"
    assert said(NF4_TRITON="ture", MAKES_LAYER="1") == f"nf4_triton: NF4_TRITON has no effect: {unknown}\n"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from nf4_triton import autoload, dequantize, use_nf4_kernel
autoload.load()
weight = quantize_4bit(torch.randn(64, 64), quant_type="nf4")
with use_nf4_kernel():
    pass
assert torch.equal(dequantize(*weight), dequantize_4bit(*weight))
"""


def test_without_triton_it_says_why_it_is_off():
    done = processes.python(["-c", WITHOUT_TRITON], variables={"NF4_TRITON": "1"})
    why = f"Left to the library: {DEQUANTIZE}: Missing packages: pip install triton."
    assert done.err.count(f"nf4_triton: The NF4 kernel is not used.\n{why}") == 2


def test_the_variable_can_say_no(variable, logged):
    variable.setenv("NF4_TRITON", " False ")
    autoload.load()
    assert not autoload.waiting and not logged()


@pytest.mark.parametrize("ends", [restore, lambda: quietly("bitsandbytes")], ids=["restore", "a call"])
def test_a_call_of_ones_own_ends_the_waiting(variable, logged, ends):
    """Also one that imports bitsandbytes, whose entry point loads meanwhile."""
    variable.setattr(switch, "cannot_run", lambda device: autoload.load())
    autoload.load()
    ends()
    before = library_function()
    a_layer()
    assert library_function() is before and not logged()


def test_the_variable_fails_no_import_and_no_layer(variable, logged):
    autoload.load()
    variable.setattr(switch, "use_nf4_kernel", raises(torch.OutOfMemoryError("out")))
    assert a_layer().in_features == a_layer().in_features == 64 and untouched()
    variable.setitem(sys.modules, "bitsandbytes.nn.modules", types.ModuleType("without a layer"))
    autoload.load()
    assert logged().splitlines() == [
        "NF4_TRITON has no effect: out",
        "NF4_TRITON has no effect: module 'without a layer' has no attribute 'Linear4bit'",
    ]
