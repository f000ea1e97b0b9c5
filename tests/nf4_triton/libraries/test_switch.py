"""use_nf4_kernel: what it replaces and says, how it ends, and what may happen to the process meanwhile."""

import copy
import functools
import logging
import pickle
import sys
import threading
import types

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")

from helpers.puzzle.layers import DEVICE  # noqa: E402
from nf4_triton import autoload, launch_general, log  # noqa: E402
from nf4_triton.libraries import site, switch  # noqa: E402
from nf4_triton.libraries.bitsandbytes import DEQUANTIZE  # noqa: E402
from nf4_triton.libraries.site import UnknownInternals  # noqa: E402
from nf4_triton.libraries.switch import restore, use_nf4_kernel  # noqa: E402
from nf4_triton.settings import UnsupportedState  # noqa: E402
from states import fast_dequantize, oracle  # noqa: E402
from switching import (  # noqa: E402
    BF16,
    ORIGINAL,
    forget_self_tests,
    library_function,
    quantized,
    quietly,
)


@functools.cache
def example():
    """(packed, state, the library's result) of a nested NF4 weight in bf16."""
    packed, state = quantized((64, 128), BF16, DEVICE)
    return packed, state, ORIGINAL(packed, state)


@pytest.fixture
def fake_unsloth(fake_module):
    """A module with Unsloth's name and function."""
    return fake_module("unsloth.kernels.utils", fast_dequantize=fast_dequantize)


def dequantizes(function=None):
    packed, state, expected = example()
    function = function or bnb.functional.dequantize_4bit
    return torch.equal(function(packed, state), expected)


def by_kernel(on):
    return on.counts()[DEQUANTIZE]["kernel"]


# One state: on or off


def test_on_for_the_time_of_a_with_block(logged):
    with pytest.raises(KeyError), use_nf4_kernel("bitsandbytes") as on:
        assert library_function() is not ORIGINAL
        assert on.summary().startswith("No call came: is the model loaded in 4 bits?")
        assert on.on and on.report[DEQUANTIZE] == "kernel"
        assert logged() == f"{on}\n"
        assert f"\n  {DEQUANTIZE}\n" in str(on) and str(on).endswith("\nrestore() ends it.")
        raise KeyError
    assert library_function() is ORIGINAL
    assert not on.on and str(on) == "The NF4 kernel is not used."


def test_who_finds_it_on_leaves_it_on(fake_unsloth):
    with quietly("bitsandbytes") as first:
        replacement = library_function()
        dequantizes()
        with quietly("unsloth", "peft") as second:
            pass
        assert library_function() is replacement  # so that compiled graphs stay valid
        assert first.on and second.on and fake_unsloth.fast_dequantize is not fast_dequantize
        assert by_kernel(first) == by_kernel(second) == 1
        for end in (second.off, restore):
            end()
            assert library_function() is ORIGINAL and fake_unsloth.fast_dequantize is fast_dequantize
            assert not first.on and by_kernel(first) == 1
            quietly("bitsandbytes")
            assert library_function() is replacement and by_kernel(first) == 0
            dequantizes()


def test_references_in_other_modules(fake_module):
    theirs = fake_module("unsloth_compiled_module_llama", dequantize=ORIGINAL)
    mine = fake_module("my_script", dequantize=ORIGINAL)
    fake_module("nf4_route", dequant_groups=len)
    late = types.ModuleType("peft.late")
    with quietly("bitsandbytes") as on:
        late.dequantize = theirs.dequantize
        assert late.dequantize is library_function() is not ORIGINAL
        assert mine.dequantize is ORIGINAL  # a script may compare with it
        early = "imported before use_nf4_kernel() was called"
        assert f"Left to the library: my_script.dequantize: {early}" in str(on)
        assert "nf4_route.dequant_groups: it has a kernel of its own" in str(on)
        other = fake_module("peft.other", dequantize=ORIGINAL)
        quietly("bitsandbytes")  # adds what was imported since
        assert other.dequantize is late.dequantize
    assert theirs.dequantize is other.dequantize is ORIGINAL
    counted = by_kernel(on)
    assert dequantizes(late.dequantize)  # cannot be found, and only passes calls on
    assert by_kernel(on) == counted


class Stubborn(types.ModuleType):
    def __setattr__(self, name, value):
        raise OSError("read only")


class Lazy(types.ModuleType):
    """A module that has not been imported yet: a look at it imports it."""

    def __getattribute__(self, name):
        raise OSError("needs a display")


def test_strange_modules_stand_alone(fake_module, monkeypatch):
    """Read-only, lazy, no module, without __name__, under a key that is no text, where a kernel could be."""
    fake_module("transformers.stubborn", Stubborn, dequantize=ORIGINAL)
    raises = type("Raises", (), {"__getattr__": lambda self, name: 1 / 0})()
    nameless = types.ModuleType("nameless")
    del nameless.__name__
    nameless.dequantize = ORIGINAL
    strange = {
        "transformers.lazy": Lazy("lazy"), "my.lazy": raises, "axolotl": None, 3: nameless,
        "peft.nameless": nameless, "my.nameless": nameless, "nf4_route": raises,
    }  # fmt: skip
    for name, module in strange.items():
        monkeypatch.setitem(sys.modules, name, module)
    with quietly(strict=True) as on:
        assert "The NF4 kernel works here" in str(on) and "transformers.stubborn.dequantize" in str(on)
        assert nameless.dequantize is library_function()
    assert nameless.dequantize is ORIGINAL


class Slow(types.ModuleType):
    """A module that something happens to while it is written."""

    happens = None

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if happens := vars(Slow)["happens"]:
            happens(value)


def test_another_thread_restores_before_or_after_a_switch(fake_module, monkeypatch):
    slow = fake_module("transformers.slow", Slow, dequantize=ORIGINAL)
    thread = threading.Thread(target=restore)

    def restored_meanwhile(value):
        monkeypatch.setattr(Slow, "happens", None)
        thread.start()
        thread.join(0.3)
        types.ModuleType.__setattr__(slow, "dequantize", value)  # a write that the other thread overtook

    monkeypatch.setattr(Slow, "happens", staticmethod(restored_meanwhile))
    quietly("bitsandbytes")
    thread.join()
    assert slow.dequantize is ORIGINAL


def test_calls_count_from_the_first_replaced_function_on(fake_module, monkeypatch):
    forget_self_tests()  # which count nothing
    fake_module("transformers.slow", Slow, dequantize=ORIGINAL)
    monkeypatch.setattr(Slow, "happens", staticmethod(dequantizes))
    with quietly("bitsandbytes") as on:
        assert by_kernel(on) == 1


def test_an_interrupted_switch_is_undone(fake_module, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    fake_module("transformers.slow", Slow, dequantize=ORIGINAL)
    monkeypatch.setattr(Slow, "happens", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        quietly("bitsandbytes")
    monkeypatch.setattr(Slow, "happens", None)
    assert library_function() is ORIGINAL and not switch.Switch().on


def test_strict_changes_nothing_if_one_of_its_libraries_fails(fake_module):
    fake_module("unsloth.kernels.utils", fast_dequantize=lambda W: W)
    for already_on in (False, True):
        if already_on:
            quietly("bitsandbytes")
        before, report = library_function(), switch.Switch().report
        with pytest.raises(UnknownInternals):
            quietly("bitsandbytes", "unsloth", strict=True)
        assert library_function() is before and switch.Switch().report == report
        assert switch.Switch().on == already_on


# What is refused, what is left


def wrong_bits(weight, state, out=None):
    return oracle(weight, state) + 1


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def refuses(*_):
    raise UnsupportedState("it is new")


KERNEL = launch_general, "dequantize_weight"
REFUSED = {  # {case: (module, name, what is there instead, error, its text)}
    "missing": (
        bnb.functional,
        "dequantize_4bit",
        None,
        UnknownInternals,
        r"has the parameters \[\], expected",
    ),
    "no GPU": (switch, "cannot_run", lambda device: "No CUDA GPU: use one", RuntimeError, "No CUDA GPU"),
    "wrong bits": (*KERNEL, wrong_bits, RuntimeError, "torch.float16 bits differ from those of .*4bit$"),
    "full GPU": (*KERNEL, full, RuntimeError, "the self-test of .*4bit failed: OutOfMemoryError: CUDA out"),
    "not its state": (*KERNEL, refuses, RuntimeError, "the kernel refused the self-test of .*4bit$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(monkeypatch, logged, case):
    """strict raises. Otherwise nothing is replaced, and the reason is logged if the library was named."""
    *change, error, text = REFUSED[case]
    forget_self_tests()
    monkeypatch.setattr(*change)
    before = library_function()
    with pytest.raises(error, match=text) as problem:
        quietly(strict=True)
    assert "\n" not in str(problem.value) and not logged()
    with quietly("peft") as on:
        assert library_function() is before and not on.on and on.report == {DEQUANTIZE: str(problem.value)}
        assert str(on) == f"The NF4 kernel is not used.\nLeft to the library: {DEQUANTIZE}: {problem.value}"
        assert on.summary() == "The kernel was not used: the libraries dequantized everything."
    assert logged() == f"peft runs without the NF4 kernel: {problem.value}\n"
    quietly()
    assert not logged()
    monkeypatch.undo()
    with quietly("bitsandbytes", strict=True) as on:  # what failed was the moment's
        assert on.on


def test_which_libraries(monkeypatch):
    """Without names, bitsandbytes and those that are imported: strict is over these."""
    with pytest.raises(ValueError, match="'bnb' is an unknown library, expected one of unsloth, bitsandb"):
        use_nf4_kernel("bnb")
    for name in ("unsloth", "axolotl", "peft"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with quietly(strict=True) as on:
        assert on.on and set(on.report.values()) == {"kernel"}
    with pytest.raises(ImportError, match="peft"):
        quietly("peft", strict=True)


def test_without_replays_unsloth_keeps_its_function(monkeypatch, fake_unsloth):
    """Which launches faster than Triton's ordinary path; bitsandbytes' does not."""
    monkeypatch.setattr(launch_general, "CAN_RELAUNCH", False)
    monkeypatch.setattr(site, "INTERPRETED", False)
    with quietly() as on:
        assert fake_unsloth.fast_dequantize is fast_dequantize and dequantizes()
        assert on.report["unsloth.kernels.utils.fast_dequantize"].startswith("launches cannot be replayed")


def wrapper(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4", fast=False):
    """Another library's, or a newer one: it has an argument more."""
    return "fast" if fast else wrapper.behind(A, quant_state)


def test_a_newer_argument_goes_to_the_library(monkeypatch):
    wrapper.behind = ORIGINAL
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", wrapper)
    packed, state, _ = example()
    with quietly("bitsandbytes", strict=True) as on:
        assert bnb.functional.dequantize_4bit(packed, state, fast=True) == "fast"
        assert bnb.functional.dequantize_4bit(packed, state, None, None, 64, "nf4", True) == "fast"
        assert dequantizes() and by_kernel(on) == 1


# The process


def test_replaced_functions_pickle_as_the_originals():
    expected = pickle.dumps(ORIGINAL)
    with quietly("bitsandbytes"):
        assert pickle.dumps(library_function()) == expected
        assert pickle.loads(expected) is library_function()


def test_a_wrapper_around_a_replacement(monkeypatch):
    """As Unsloth makes one on import. What is left of it after off() only passes calls on, and the self-test
    asks the library behind it."""
    on = quietly("bitsandbytes")
    wrapper.behind = library_function()
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", wrapper)
    assert dequantizes() and by_kernel(on) == 1
    assert f"{DEQUANTIZE}: it was wrapped or replaced by another library since" in str(on)
    right = launch_general.dequantize_weight
    monkeypatch.setattr(launch_general, "dequantize_weight", lambda *arguments: right(*arguments) + 1)
    with pytest.raises(RuntimeError, match="bits differ"):
        quietly("bitsandbytes", strict=True)
    quietly("axolotl")  # replaces again what is on
    assert library_function() is wrapper
    assert f"bits differ from those of {DEQUANTIZE}" in quietly("bitsandbytes").report[DEQUANTIZE]
    assert dequantizes()
    restore()
    assert library_function() is wrapper and dequantizes() and by_kernel(on) == 1


def test_the_self_test_names_its_device(monkeypatch):
    """After transformers' from_pretrained torch.linspace ignores `with torch.device(...)`."""
    forget_self_tests()
    linspace = torch.linspace
    monkeypatch.setattr(
        torch, "linspace", lambda *a, device="meta", **how: linspace(*a, device=device, **how)
    )
    with torch.no_grad(), quietly(strict=True) as on:
        assert set(on.report.values()) == {"kernel"}


def test_each_rank_tests_on_its_own_gpu(monkeypatch):
    """Before torch.cuda.set_device the current one is GPU 0 for every rank."""
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for rank, index in (("1", 1), ("5", 0), ("x", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert site.self_test_device() == torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert site.self_test_device() == torch.device("cuda", 3)


# What is logged


@pytest.mark.parametrize("rank, level, speaks", [("0", "INFO", 1), ("1", "INFO", 0), ("0", "WARNING", 0)])
def test_one_process_of_a_host_logs_at_the_programs_level(monkeypatch, caplog, rank, level, speaks):
    monkeypatch.setenv("LOCAL_RANK", rank)
    caplog.set_level(level)
    use_nf4_kernel("bitsandbytes")
    assert len(caplog.messages) == speaks


class Closed:
    """A stderr whose reader is gone."""

    def write(self, text):
        raise ValueError("I/O operation on closed file")

    flush = write


@pytest.fixture
def unconfigured(monkeypatch):
    """unconfigured(): take pytest's handlers off, which it adds after the fixtures, as in a plain script."""
    yield lambda: monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger("nf4_triton").setLevel(logging.NOTSET)


def test_without_configured_logging_lines_have_a_name(unconfigured, monkeypatch, capsys):
    unconfigured()
    use_nf4_kernel("bitsandbytes")
    assert capsys.readouterr().err.startswith("nf4_triton: The NF4 kernel works here")
    logging.getLogger("nf4_triton").setLevel(logging.WARNING)
    use_nf4_kernel("bitsandbytes")
    log.say("it falls back", logging.WARNING)
    assert capsys.readouterr().err == "nf4_triton: it falls back\n"
    monkeypatch.setattr(sys, "stderr", Closed())
    log.say("it falls back", logging.WARNING)
    logging.basicConfig()
    log.say("it falls back", logging.WARNING)


# NF4_TRITON=1


@pytest.fixture
def variable(monkeypatch):
    """NF4_TRITON=1, and bitsandbytes' layer as it was afterwards."""
    monkeypatch.setattr(bnb.nn.Linear4bit, "__init__", bnb.nn.Linear4bit.__init__)
    monkeypatch.setenv("NF4_TRITON", "1")
    yield monkeypatch
    autoload.waiting.clear()


def a_layer():
    return bnb.nn.Linear4bit(64, 32, bias=False, device="meta")


def test_the_variable_switches_at_the_first_layer(variable, logged):
    """Also where a model is loaded: on the meta device, in another default dtype, in inference mode."""
    forget_self_tests()
    packed = example()[0]
    tables = [(bnb.functional, "name2qmap"), (bnb.backends.utils, "_code_4bit_cache")]
    for table in tables:
        variable.setattr(*table, {})  # made at their first use, in the default dtype of that moment
    not_waiting = bnb.nn.Linear4bit.__init__
    autoload.load()
    assert library_function() is ORIGINAL and dequantizes()
    torch.set_default_dtype(BF16)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert a_layer().in_features == 64
    finally:
        torch.set_default_dtype(torch.float32)
    assert not any(getattr(*table) for table in tables)
    example.cache_clear()
    assert torch.equal(example()[0], packed)  # quantized to the same bytes
    assert logged().startswith("NF4_TRITON=1: The NF4 kernel works here. It dequantizes in:\n")
    assert library_function() is not ORIGINAL and dequantizes()
    assert bnb.nn.Linear4bit.__init__ is not_waiting


def test_without_the_variable_nothing_happens(variable):
    variable.setenv("NF4_TRITON", " False ")
    before = bnb.nn.Linear4bit.__init__
    autoload.load()
    assert bnb.nn.Linear4bit.__init__ is before and not autoload.waiting


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
    variable.setattr(switch, "use_nf4_kernel", lambda **_: full())
    assert a_layer().in_features == a_layer().in_features == 64 and library_function() is ORIGINAL
    variable.setitem(sys.modules, "bitsandbytes.nn.modules", types.ModuleType("without a layer"))
    autoload.load()
    assert logged().splitlines() == [
        "NF4_TRITON=1 has no effect: CUDA out of memory",
        "NF4_TRITON=1 has no effect: AttributeError: module 'without a layer' has no attribute 'Linear4bit'",
    ]


# The trainers' callback


@pytest.fixture
def callback():
    pytest.importorskip("transformers")
    from nf4_triton import NF4KernelCallback

    return NF4KernelCallback


def begin(one):
    one.on_train_begin(None, None, None)


def end(one):
    one.on_train_end(None, None, None)


def test_the_callback(callback, logged):
    with pytest.raises(ValueError, match="'bnb' is an unknown library, expected one of unsloth"):
        callback("bnb")
    one = pickle.loads(pickle.dumps(callback("bitsandbytes", strict=True)))
    end(one)  # before it began
    for _ in range(2):
        begin(one)  # interrupted: no on_train_end
        begin(one)
        assert dequantizes() and one.switch.on and copy.deepcopy(one).switch is None
        end(one)
        printed = logged()
        assert printed.startswith("The NF4 kernel works here")
        assert printed.endswith("\n0 of 1 dequantizations went through the library\n")
        assert library_function() is ORIGINAL
    quietly("bitsandbytes")
    quiet = callback(quiet=True)
    begin(quiet)
    end(quiet)
    assert library_function() is not ORIGINAL and not logged()  # it found the kernel on


def test_the_callbacks_last_line_stands_alone(callback, unconfigured, monkeypatch, capsys):
    from tqdm.auto import tqdm

    unconfigured()
    one = callback("bitsandbytes")
    begin(one)
    with tqdm(total=2):
        end(one)
        lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert any(line.startswith("nf4_triton: No call came") for line in lines)
    begin(one)
    monkeypatch.setattr(sys, "stderr", Closed())
    end(one)
    assert library_function() is ORIGINAL
