"""use_nf4_kernel: what it replaces and says, how it ends, and what may happen to the process meanwhile."""

import copy
import functools
import gc
import importlib
import importlib.util
import itertools
import logging
import pickle
import sys
import types

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes.autograd import _functions  # noqa: E402

from helpers.puzzle import layers  # noqa: E402
from nf4_triton import autoload, backend, environment, launch, private, sites, switch  # noqa: E402
from nf4_triton.sites import DEQUANTIZE, PRODUCT  # noqa: E402
from nf4_triton.switch import UnknownInternals, restore, use_nf4_kernel  # noqa: E402
from states import fast_dequantize, oracle  # noqa: E402

BF16, DEVICE = torch.bfloat16, layers.DEVICE
quietly = functools.partial(use_nf4_kernel, quiet=True)


def functions():
    return bnb.functional.dequantize_4bit, bnb.matmul_4bit, _functions.matmul_4bit


ORIGINAL = functions()


def forget_self_tests():
    for library in switch.LIBRARIES.values():
        for site in library.sites:
            site.replacement = None


@pytest.fixture(autouse=True)
def restored(own_bitsandbytes, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    example()  # now: a switch that is on would count it
    yield
    monkeypatch.undo()
    if functions() != ORIGINAL or any(library.on for library in switch.LIBRARIES.values()):
        restore()  # which searches all modules: 50 ms
    assert functions() == ORIGINAL


@pytest.fixture
def fake_module(monkeypatch):
    """fake_module(name, **contents): an imported module of that name, until the test ends."""

    def make(name, kind=types.ModuleType, **contents):
        module = kind(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def logged(caplog):
    """logged(): what the package logged since the last call."""

    def read():
        text = "".join(f"{message}\n" for message in caplog.messages)
        caplog.clear()
        return text

    return read


@functools.cache
def example():
    """(packed, state, the library's result) of a nested NF4 weight in bf16."""
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(DEVICE, BF16)
    packed, state = bnb.functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    return packed, state, ORIGINAL[0](packed, state)


@pytest.fixture
def fake_unsloth(fake_module):
    """A module with Unsloth's name and function."""
    fake_module("unsloth")
    return fake_module("unsloth.kernels.utils", fast_dequantize=fast_dequantize)


def dequantizes(function=None):
    packed, state, expected = example()
    function = function or bnb.functional.dequantize_4bit
    return torch.equal(function(packed, state), expected)


def by_kernel(on):
    return on.counts()[DEQUANTIZE]["kernel"]


# On and off


def test_on_for_the_time_of_a_with_block(logged):
    with pytest.raises(KeyError), use_nf4_kernel("bitsandbytes") as on:
        assert not set(functions()) & set(ORIGINAL)
        assert on.libraries == ("bitsandbytes",)
        assert repr(on) == "<nf4_triton.Switch of bitsandbytes: on>"
        assert logged() == f"{on}\n"
        assert f"\n  {DEQUANTIZE}\n" in str(on) and f"\n  {PRODUCT}\n" in str(on)
        raise KeyError
    assert functions() == ORIGINAL
    assert repr(on) == "<nf4_triton.Switch of bitsandbytes: off>"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_overlapping_switches_end_in_any_order(order):
    switches = [quietly("bitsandbytes"), quietly("peft"), quietly()]
    replacements = functions()
    for ended, index in enumerate(order):
        assert functions() == replacements
        assert [one.on for one in switches].count(True) == 3 - ended
        switches[index].off()
        switches[index].off()
        assert not switches[index].on
    assert functions() == ORIGINAL
    with quietly("bitsandbytes") as last, quietly("peft"):
        assert functions() == replacements  # so that compiled graphs stay valid
        restore()
        assert functions() == ORIGINAL and not last.on


def test_a_switch_that_is_off_says_so_and_stays_off():
    first, second = quietly("bitsandbytes"), quietly("bitsandbytes")
    with first:
        dequantizes()
    assert str(first).startswith("Switched off, but still on for another switch: ")
    second.off()
    assert str(first).startswith("Switched off. It had replaced: ")
    with pytest.raises(RuntimeError, match="is off, and stays off"), first:
        pass
    assert first.summary() == "0 of 1 dequantizations went through the library"


def test_references_in_other_modules(fake_module):
    original = bnb.functional.dequantize_4bit
    theirs = fake_module("unsloth_compiled_module_llama", dequantize=original)
    mine = fake_module("my_script", dequantize=original, half=functools.partial(original, blocksize=64))
    fake_module("unsloth_zoo.temporary_patches.moe_nf4_grouped", nf4_grouped_mm=len)
    late = types.ModuleType("peft.late")
    with quietly("bitsandbytes") as on:
        late.dequantize = theirs.dequantize
        assert late.dequantize is bnb.functional.dequantize_4bit is not original
        assert mine.dequantize is original  # a script may compare with it
        before = "it was imported before use_nf4_kernel() was called"
        assert f"Not replaced: my_script.dequantize: {before}" in str(on)
        assert f"Not replaced: my_script.half: {before}" in str(on)
        assert "moe_nf4_grouped.nf4_grouped_mm: it has a kernel of its own" in str(on)
        other = fake_module("peft.other", dequantize=original)  # imported since: the next call finds it
        with quietly("bitsandbytes"):
            assert other.dequantize is late.dequantize
    assert theirs.dequantize is other.dequantize is original
    counted = by_kernel(on)
    assert dequantizes(late.dequantize)  # cannot be found, and only passes calls on
    assert by_kernel(on) == counted


class Lazy(types.ModuleType):
    """A module that has not been imported yet: a look at it imports it."""

    def __getattribute__(self, name):
        raise OSError("needs a display")


def test_what_lies_in_sys_modules_is_not_touched(fake_module):
    """Also what is no module. `transformers.lazy` would be searched."""
    for name in ("transformers.lazy", "my.lazy"):
        fake_module(name)
        sys.modules[name] = Lazy(name)
    sys.modules["my.lazy"] = type("Raises", (), {"__getattr__": lambda self, name: 1 / 0})()
    with quietly("bitsandbytes", strict=True) as on:
        assert "The NF4 kernel works here" in str(on)
    assert functions() == ORIGINAL


class Stubborn(types.ModuleType):
    def __setattr__(self, name, value):
        raise OSError("read only")


def test_half_a_switch_is_undone(monkeypatch, fake_unsloth, fake_module):
    """Also if a library of several fails, and whatever the error is."""
    fake_module("transformers.stubborn", Stubborn, dequantize=ORIGINAL[0])
    for error in (OSError, KeyboardInterrupt):
        original = fake_unsloth.fast_dequantize
        with pytest.raises(error):
            quietly("unsloth", "bitsandbytes", strict=True)
        assert fake_unsloth.fast_dequantize is original and functions() == ORIGINAL

        def interrupted(device):
            raise KeyboardInterrupt

        monkeypatch.setattr(switch, "cannot_run", interrupted)


# What is refused, what is left


def wrong_bits(weight, state, out=None):
    return oracle(weight, state) + 1


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def refuses(*_):
    raise launch.UnsupportedState("it is new")


NO_GPU = [
    (torch.cuda, "is_available", lambda: False),
    (environment, "DRIVER", "false"),  # the command that asks for it fails
    (backend, "INTERPRETED", False),
]


def library_has(function):
    return [(bnb.functional, "dequantize_4bit", function)]


def kernel_is(function):
    return [(launch, "_your_dequantize_nf4", function)]


REFUSED = {
    "other parameters": (library_has(lambda A, state: A), UnknownInternals, "takes .'A', 'state'., expected"),
    "one more that is needed": (
        library_has(lambda A, quant_state, absmax, out, blocksize, quant_type, more: A),
        UnknownInternals,
        "bitsandbytes 0.* is unknown and was left unchanged: .*dequantize_4bit takes",
    ),
    "missing": (library_has(None), UnknownInternals, "dequantize_4bit is missing"),
    "no GPU": (NO_GPU, RuntimeError, "No CUDA GPU"),
    "AMD": ([(torch.version, "hip", "6.4")], RuntimeError, "AMD GPU .ROCm 6.4.*NVIDIA"),
    "wrong bits": (kernel_is(wrong_bits), RuntimeError, "torch.float16 bits differ from those of .*4bit$"),
    "full GPU": (kernel_is(full), RuntimeError, "the self-test of .*4bit failed: OutOfMemoryError: CUDA out"),
    "not its state": (kernel_is(refuses), RuntimeError, "the kernel refused the self-test of .*4bit$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(monkeypatch, logged, case):
    """strict raises. Otherwise nothing is replaced, and the reason is logged if the library was named."""
    changes, error, text = REFUSED[case]
    forget_self_tests()
    for change in changes:
        monkeypatch.setattr(*change)
    before = functions()
    with pytest.raises(error, match=text) as problem:
        quietly(strict=True)
    assert "\n" not in str(problem.value) and not logged()
    for names in ((), ("peft",)):
        with quietly(*names) as on:
            assert functions() == before and not on.libraries and not on.sites and not on.partial
        assert str(on).startswith("The NF4 kernel is not used.\n") and f"{problem.value}" in str(on)
        assert on.summary() == "The kernel was not used: the libraries dequantized everything."
        warned = f"peft runs without the NF4 kernel: {problem.value}\n"
        assert logged() == (warned if names else "")
    monkeypatch.undo()
    with quietly("bitsandbytes", strict=True) as on:  # what failed was the moment's
        assert on.on


def test_which_libraries(monkeypatch):
    """Without names, bitsandbytes and those that are imported: strict is over these."""
    with pytest.raises(
        ValueError, match="'bnb' is an unknown library, expected one of unsloth, bitsandbytes, axolotl, peft"
    ):
        use_nf4_kernel("bnb")
    for name in ("unsloth", "axolotl", "peft"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "unsloth" else None)
    with quietly(strict=True) as on:
        assert on.libraries == ("bitsandbytes",) and not on.partial
        assert not on.refused, "what is not used is not worth a word"
    with pytest.raises(ImportError, match="peft is not installed: pip install peft"):
        quietly("peft", strict=True)


def test_without_bitsandbytes(monkeypatch, fake_module):
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fake_module("peft")
    problem = "bitsandbytes is not installed: pip install bitsandbytes"
    for names in ((), ("peft",)):
        assert list(quietly(*names).refused.values()) == [problem]
        with pytest.raises(ImportError, match=problem):
            quietly(*names, strict=True)


def another_gradient(A, B, quant_state, out=None, bias=None):
    result = ORIGINAL[1](A, B, quant_state, out, bias)
    if A.requires_grad:
        result.register_hook(lambda gradient: 2 * gradient)
    return result


def one_row_less(A, B, quant_state, out=None, bias=None):
    rows = 2047 if len(A) == 2048 else len(A)
    return torch.cat([ORIGINAL[1](A[:rows], B, quant_state, out, bias), A.new_zeros(len(A) - rows, 128)])


LEFT = {
    "another gradient": (another_gradient, f"the kernel's torch.float16 bits differ from those of {PRODUCT}"),
    "wrong from 2,048 rows on": (one_row_less, "bits differ"),
    "fails": (
        lambda A, B, quant_state, out=None, bias=None: full(),
        f"self-test of {PRODUCT} failed: OutOfMemoryError",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_product_that_fails_its_self_test_is_left_and_named(monkeypatch, case):
    """A new release may cost speed, but no bit: its backward still dequantizes with the kernel."""
    function, why = LEFT[case]
    monkeypatch.setattr(_functions, "matmul_4bit", function)
    with quietly() as on:
        assert _functions.matmul_4bit is function
        assert why in on.left[PRODUCT] and f"Left to the library: {PRODUCT}: " in str(on)
        assert on.partial and str(on).startswith("The NF4 kernel works here in part. It dequantizes in:\n")
        assert f"\n  {PRODUCT}" not in str(on) and PRODUCT not in on.counts()
        assert dequantizes() and by_kernel(on) == 1
        assert on.summary() == f"0 of 1 dequantizations went through the library; not counted: {PRODUCT}"
        with quietly() as second:
            assert second.left == on.left


def test_without_replays_unsloth_keeps_its_function(monkeypatch, fake_unsloth):
    """Which launches faster than Triton's ordinary path; bitsandbytes' does not."""
    forget_self_tests()
    monkeypatch.setattr(private, "CAN_REPLAY", False)
    monkeypatch.setattr(sites, "INTERPRETED", False)
    with quietly() as on:
        assert on.libraries == ("bitsandbytes",) and dequantizes()
        assert on.refused["unsloth"].startswith("launches cannot be replayed with torch 2.")
        assert "Calls take longer: launches cannot be replayed" in str(on)


def test_a_newer_argument_goes_to_the_library(monkeypatch):
    seen = []

    def dequantize_4bit(
        A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4", fast=False
    ):
        seen.append(fast)
        return ORIGINAL[0](A, quant_state, absmax, out, blocksize, quant_type)

    monkeypatch.setattr(bnb.functional, "dequantize_4bit", dequantize_4bit)
    packed, state, _ = example()
    with quietly("bitsandbytes", strict=True) as on:
        seen.clear()
        assert dequantizes() and not seen and by_kernel(on) == 1
        bnb.functional.dequantize_4bit(packed, state, fast=True)
        bnb.functional.dequantize_4bit(packed, state, None, None, 64, "nf4", True)
        assert seen == [True, True] and by_kernel(on) == 1


# The process


def test_replaced_functions_pickle_as_the_originals():
    expected = [pickle.dumps(function) for function in ORIGINAL]
    with quietly("bitsandbytes"):
        assert [pickle.dumps(function) for function in functions()] == expected
        assert pickle.loads(expected[0]) is bnb.functional.dequantize_4bit


def test_a_wrapper_around_a_replacement():
    """As Unsloth makes one on import. What is left of it after off() only passes calls on."""
    on, ours = quietly("bitsandbytes"), bnb.functional.dequantize_4bit
    wrapper = functools.wraps(ours)(lambda *a, **k: ours(*a, **k))
    try:
        bnb.functional.dequantize_4bit = wrapper
        assert dequantizes() and by_kernel(on) == 1
        assert f"Since then {DEQUANTIZE} was wrapped or replaced by another library." in str(on)
        restore()
        assert bnb.functional.dequantize_4bit is wrapper and dequantizes() and by_kernel(on) == 1
        bnb.functional.dequantize_4bit = ours
        with quietly("bitsandbytes") as again:
            assert dequantizes() and by_kernel(again) == 1
        assert bnb.functional.dequantize_4bit is ORIGINAL[0]
    finally:
        bnb.functional.dequantize_4bit = ORIGINAL[0]


def test_the_self_test_asks_the_library_behind_a_wrapper(monkeypatch):
    """A wrapper that another library made while the kernel was on still calls the kernel's replacement."""
    on, ours = quietly("bitsandbytes"), bnb.functional.dequantize_4bit

    def wrapper(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        return ours(A, quant_state)

    try:
        bnb.functional.dequantize_4bit = wrapper
        on.off()
        right = launch._your_dequantize_nf4
        monkeypatch.setattr(launch, "_your_dequantize_nf4", lambda *arguments: right(*arguments) + 1)
        assert f"bits differ from those of {DEQUANTIZE}" in quietly("bitsandbytes").refused["bitsandbytes"]
    finally:
        bnb.functional.dequantize_4bit = ORIGINAL[0]
        forget_self_tests()


# What is logged


def test_one_process_of_a_host_logs_as_the_user_wants(monkeypatch, logged):
    for rank, speaks in (("0", True), ("", True), ("-1", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        use_nf4_kernel("bitsandbytes").off()
        assert ("The NF4 kernel works here" in logged()) == speaks
    monkeypatch.delenv("LOCAL_RANK")
    log = logging.getLogger("nf4_triton")
    log.setLevel(logging.WARNING)
    use_nf4_kernel("bitsandbytes").off()
    log.setLevel(logging.INFO)
    assert not logged()


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
    assert functions() == ORIGINAL and dequantizes()
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
    assert not set(functions()) & set(ORIGINAL) and dequantizes()
    assert bnb.nn.Linear4bit.__init__ is not_waiting
    restore()
    a_layer()
    assert functions() == ORIGINAL and not logged()


def test_the_self_test_names_its_device(monkeypatch):
    """After transformers' from_pretrained torch.linspace ignores `with torch.device(...)`."""
    forget_self_tests()
    linspace = torch.linspace
    monkeypatch.setattr(
        torch, "linspace", lambda *a, device="meta", **how: linspace(*a, device=device, **how)
    )
    with torch.device("meta"), quietly(strict=True) as on:
        assert on.on and not on.left


def test_each_rank_tests_on_its_own_gpu(monkeypatch):
    """Before torch.cuda.set_device the current one is GPU 0 for every rank."""
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for rank, index in (("1", 1), ("0", 0), ("5", 0), ("", 0), ("-1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert sites.self_test_device() == torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert sites.self_test_device() == torch.device("cuda", 3)


@pytest.mark.parametrize("value", [None, "", "0", "off", " False "])
def test_without_the_variable_nothing_happens(variable, value):
    variable.delenv("NF4_TRITON") if value is None else variable.setenv("NF4_TRITON", value)
    before = bnb.nn.Linear4bit.__init__
    autoload.load()
    assert bnb.nn.Linear4bit.__init__ is before and not autoload.waiting


@pytest.mark.parametrize("ends", [restore, lambda: quietly("bitsandbytes").off()], ids=["restore", "a call"])
def test_a_call_of_ones_own_ends_the_waiting(variable, logged, ends):
    autoload.load()
    ends()
    a_layer()
    assert functions() == ORIGINAL and not logged()


def test_a_call_that_imports_bitsandbytes_ends_the_waiting(variable, monkeypatch):
    """Its entry point loads during that import."""
    monkeypatch.setattr(switch, "require_version", lambda name: autoload.load())
    with quietly("bitsandbytes"):
        assert not autoload.waiting


def test_the_variable_fails_no_import_and_no_layer(variable, logged):
    autoload.load()
    variable.setattr(switch, "use_nf4_kernel", lambda **_: full())
    assert a_layer().in_features == a_layer().in_features == 64 and functions() == ORIGINAL
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


def test_the_callback_checks_names_when_it_is_made(callback):
    with pytest.raises(ValueError, match="'bnb' is an unknown library, expected one of unsloth"):
        callback("bnb")


def test_the_callback(callback, logged):
    one = pickle.loads(pickle.dumps(callback("bitsandbytes", strict=True)))
    one.on_train_end(None, None, None)  # before it began
    for _ in range(2):
        one.on_train_begin(None, None, None)
        assert dequantizes() and one.switch.on and copy.deepcopy(one).switch is None
        assert pickle.loads(pickle.dumps(one)).names == ("bitsandbytes",)
        one.on_train_end(None, None, None)
        printed = logged()
        assert printed.startswith("The NF4 kernel works here")
        assert printed.endswith("\n0 of 1 dequantizations went through the library\n")
        assert functions() == ORIGINAL


def test_the_callback_where_the_kernel_cannot_run(callback, monkeypatch):
    for change in NO_GPU:
        monkeypatch.setattr(*change)
    with pytest.raises(RuntimeError, match="No CUDA GPU"):
        callback(strict=True).on_train_begin(None, None, None)


@pytest.mark.parametrize("then", ["the next training ends", "it is deleted"])
def test_the_callback_of_an_interrupted_training(callback, logged, then):
    one = callback(quiet=True)
    one.on_train_begin(None, None, None)  # Ctrl-C: no on_train_end
    if then == "it is deleted":
        del one
        gc.collect()
    else:
        one.on_train_begin(None, None, None)
        one.on_train_end(None, None, None)
    assert functions() == ORIGINAL and not logged()
