"""use_nf4_kernel: what it replaces and says, how it ends, and what may happen to the process meanwhile."""

import copy
import functools
import gc
import importlib
import importlib.util
import io
import itertools
import logging
import pickle
import sys
import threading
import types

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes.autograd import _functions  # noqa: E402

from helpers.nf4 import autoload, environment, launch, reference, switch  # noqa: E402
from helpers.nf4.switch import UnknownInternals, restore, use_nf4_kernel  # noqa: E402

AUTOGRAD, DEQUANTIZE, PRODUCT, UNSLOTH = switch.AUTOGRAD, switch.DEQUANTIZE, switch.PRODUCT, switch.UNSLOTH
BF16, DEVICE = torch.bfloat16, reference.default_device()
quietly = functools.partial(use_nf4_kernel, quiet=True)


def functions():
    return bnb.functional.dequantize_4bit, bnb.matmul_4bit, _functions.matmul_4bit


ORIGINAL = functions()


@pytest.fixture(autouse=True)
def restored(own_bitsandbytes, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    example()  # now: a switch that is on would count it
    yield
    monkeypatch.undo()
    if functions() != ORIGINAL or any(library.on for library in switch._libraries.values()):
        restore()  # which searches all modules: 50 ms
    assert functions() == ORIGINAL and not any(map(switch.site_of, functions()))


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
def fake_unsloth(fake_module):
    """Modules with Unsloth's names and function, and the list of calls that reach it."""
    if "unsloth" in sys.modules:
        pytest.skip("the real Unsloth is imported in this process")
    calls = []

    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
        calls.append((W, quant_state, out, use_global_buffer, dtype))
        return "the library's"

    fake_module("unsloth", __spec__=None)
    names = [f"unsloth.kernels{part}" for part in ("", ".utils", ".fast_lora")]
    return [fake_module(name, fast_dequantize=fast_dequantize) for name in names], calls


@functools.cache
def example(shape=(16, 64)):
    """(packed, state, the library's result) of a nested NF4 weight in bf16."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, BF16)
    packed, state = bnb.functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    return packed, state, ORIGINAL[0](packed, state)


def dequantizes(function=None):
    packed, state, expected = example()
    return torch.equal((function or bnb.functional.dequantize_4bit)(packed, state), expected)


def by_kernel(on, name=DEQUANTIZE):
    return on.counts()[name]["kernel"]


# On and off


def test_on_for_the_time_of_a_with_block(capsys):
    with pytest.raises(KeyError), use_nf4_kernel("bitsandbytes") as on:
        assert not set(functions()) & set(ORIGINAL) and all(map(switch.site_of, functions()))
        assert on.libraries == ("bitsandbytes",) and repr(on) == "<nf4_triton.Switch of bitsandbytes: on>"
        assert capsys.readouterr().err == f"{on}\n" and DEQUANTIZE in str(on) and PRODUCT in str(on)
        raise KeyError
    assert functions() == ORIGINAL and repr(on) == "<nf4_triton.Switch of bitsandbytes: off>"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_overlapping_switches_end_in_any_order(order):
    switches = [quietly("bitsandbytes"), quietly("peft"), quietly()]
    replacements = functions()
    for ended, index in enumerate(order):
        assert functions() == replacements and [one.on for one in switches].count(True) == 3 - ended
        switches[index].off()
        switches[index].off()
        assert not switches[index].on
    assert functions() == ORIGINAL
    with quietly("bitsandbytes") as last, quietly("peft"):
        assert functions() == replacements  # so that compiled graphs stay valid
        restore()
        assert functions() == ORIGINAL and not last.on


def test_what_a_switch_says_once_it_is_off():
    first, second = quietly("bitsandbytes"), quietly("bitsandbytes")
    with first:
        dequantizes()
    names = f"{DEQUANTIZE}, {switch.FALLBACK}, {PRODUCT}" if DEVICE == "cuda" else f"{DEQUANTIZE}, {PRODUCT}"
    assert str(first) == f"Switched off, but still on for another switch: {names}."
    second.off()
    assert str(first) == str(second) == f"Switched off. It had replaced: {names}."
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
        for line in (
            "Not replaced: my_script.dequantize: it was imported before use_nf4_kernel() was called",
            "Not replaced: my_script.half: it was imported before use_nf4_kernel() was called",
            "moe_nf4_grouped.nf4_grouped_mm: it has a kernel of its own",
        ):
            assert line in str(on)
        other = fake_module("peft.other", dequantize=original)  # imported since: the next call finds it
        with quietly("bitsandbytes"):
            assert other.dequantize is late.dequantize
    assert theirs.dequantize is other.dequantize is original
    counted = by_kernel(on)
    assert (
        dequantizes(late.dequantize) and by_kernel(on) == counted
    )  # cannot be found, and only passes calls on


def interrupted():
    raise KeyboardInterrupt


class Stubborn(types.ModuleType):
    def __setattr__(self, name, value):
        raise OSError("read only")


@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_half_a_switch_is_undone(monkeypatch, fake_unsloth, fake_module, before):
    """Also if a library of several fails, and whatever the error is."""
    original = fake_unsloth[0][1].fast_dequantize
    if before:
        quietly("bitsandbytes")
    fake_module("transformers.stubborn", Stubborn, dequantize=ORIGINAL[0])
    with pytest.raises(OSError):
        quietly("unsloth", "bitsandbytes", strict=True)
    assert fake_unsloth[0][1].fast_dequantize is original and functions() == ORIGINAL
    install = switch._install
    monkeypatch.setattr(
        switch, "_install", lambda name: install(name) if name == "unsloth" else interrupted()
    )
    with pytest.raises(KeyboardInterrupt):
        quietly("unsloth", "bitsandbytes")
    assert fake_unsloth[0][1].fast_dequantize is original and functions() == ORIGINAL


def test_one_thread_switches_at_a_time():
    thread = threading.Thread(target=quietly, args=("bitsandbytes",))
    with switch._lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and functions() == ORIGINAL
    thread.join()
    assert not set(functions()) & set(ORIGINAL)


def test_threads_switch_and_restore_at_once():
    seen = []

    def switched():
        for _ in range(4):
            with quietly("bitsandbytes"):
                seen.append(switch.site_of(bnb.functional.dequantize_4bit))

    def restored():
        for _ in range(4):
            quietly("bitsandbytes")
            restore()

    for work in (switched, restored):
        threads = [threading.Thread(target=work) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert functions() == ORIGINAL
    assert all(seen) and len(seen) == 12


# What is refused, what is left


def wrong_bits(weight, state, out=None):
    return reference.dequantize(weight, state) + 1


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


NO_GPU = [(torch.cuda, "is_available", lambda: False), (launch, "INTERPRETED", False)]
NO_GPU += [(environment, "driver", lambda: None)]
OLD_GPU = [
    (torch.cuda, "is_available", lambda: True),
    (torch.cuda, "get_device_name", lambda *_: "Tesla P100"),
]
OLD_GPU += [(torch.cuda, "get_device_capability", lambda *_: (6, 0)), (launch, "INTERPRETED", False)]
LAMBDAS = (lambda A, state: A, lambda A, quant_state, absmax, out, blocksize, quant_type, more: A, None)
NEW, NEW_MUST, MISSING = [[(bnb.functional, "dequantize_4bit", function)] for function in LAMBDAS]
WRONG, FULL = [[(launch, "_your_dequantize_nf4", function)] for function in (wrong_bits, full)]
BITS = r"torch.float16 bits differ from bitsandbytes 0\.\d+\.\d+'s"
BITS += " .0.47 and 0.48 round" if launch.INTERPRETED else "$"
REFUSED = {
    "arguments": (NEW, UnknownInternals, "bitsandbytes 0.* unknown.*unchanged.*dequantize_4bit takes"),
    "needed argument": (NEW_MUST, UnknownInternals, "dequantize_4bit takes"),
    "missing": (MISSING, UnknownInternals, "dequantize_4bit is missing"),
    "no GPU": (NO_GPU, RuntimeError, "No CUDA GPU"),
    "AMD": ([(torch.version, "hip", "6.4")], RuntimeError, "AMD GPU .ROCm 6.4.*NVIDIA"),
    "old GPU": (OLD_GPU, RuntimeError, "Tesla P100 is sm_60.*sm_75"),
    "wrong bits": (WRONG, RuntimeError, BITS),
    "full GPU": (FULL, RuntimeError, "kernel does not run.*OutOfMemoryError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(monkeypatch, capsys, case):
    """strict raises. Otherwise nothing is replaced, and the reason is logged if the library was named."""
    changes, error, text = REFUSED[case]
    switch._tested.clear()
    for change in changes:
        monkeypatch.setattr(*change)
    before = functions()
    with pytest.raises(error, match=text) as problem:
        quietly("bitsandbytes", strict=True)
    assert "\n" not in str(problem.value) and not capsys.readouterr().err
    for names in ((), ("peft",)):
        with quietly(*names) as on:
            assert functions() == before and not on.libraries and not on.sites and not on.partial
        assert str(on).startswith("The NF4 kernel is not used.\n") and f"{problem.value}" in str(on)
        assert on.summary() == "The kernel was not used: the libraries dequantized everything."
        warned = f"peft runs without the NF4 kernel: {problem.value}\n"
        assert capsys.readouterr().err == (warned if names else "")
    monkeypatch.undo()
    with quietly("bitsandbytes", strict=True) as on:  # what failed was the moment's
        assert on.on


def test_which_libraries(monkeypatch):
    with pytest.raises(ValueError, match="'bnb' is unknown, expected one of unsloth, bitsandbytes"):
        use_nf4_kernel("bnb")
    for name in ("unsloth", "peft", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # installed, not imported
    with quietly() as on:
        assert on.routes == dict.fromkeys(("peft", "transformers"), "once it is imported") and not on.partial
        assert "Not in unsloth: not imported; import it first, then call use_nf4_kernel()" in str(on)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    with pytest.raises(ImportError, match="peft is not installed"):
        quietly("peft", strict=True)
    refused = quietly().refused
    assert refused == {name: f"{name} is not installed" for name in switch.LIBRARIES}


@pytest.mark.parametrize("known", [True, False])
def test_how_peft_dequantizes(monkeypatch, known):
    integrations = pytest.importorskip("peft.utils.integrations")
    if not known:
        monkeypatch.setattr(integrations, "dequantize_bnb_weight", lambda weight, state=None: weight)
    theirs = "peft.utils.integrations.dequantize_bnb_weight"
    with quietly("peft") as on:
        how = f"whose {theirs} calls" if known else f"only in its layers: {theirs} does not call"
        assert f"peft, {how} {DEQUANTIZE}" in str(on)
        assert on.libraries == ("bitsandbytes",)


def train_a_layer(*names):
    packed, state, _ = example((64, 128))
    x = torch.randn(200, 128, dtype=BF16, device=DEVICE, requires_grad=True)
    with quietly(*names) as on:
        _functions.matmul_4bit(x, packed, state).sum().backward()
        on.text = str(on)
    return on


@pytest.mark.parametrize("unknown", [PRODUCT, AUTOGRAD, "no source files"])
def test_a_product_whose_code_is_unknown_is_left_named_and_counted(monkeypatch, unknown):
    """A new release may cost speed, but no bit: its backward still dequantizes with the kernel."""

    def gone(_):
        raise OSError("could not get source code")

    monkeypatch.setattr(switch._libraries["bitsandbytes"], "sites", [])
    if unknown in switch.KNOWN:
        monkeypatch.setitem(switch.KNOWN, unknown, "another release")
    else:
        monkeypatch.setattr(switch.inspect, "getsource", gone)
    on = train_a_layer()
    why = f"the code of {unknown} is not known" if unknown in switch.KNOWN else "cannot be read"
    assert why in on.left[PRODUCT] and f"Left to the library: {PRODUCT}: " in on.text
    assert on.partial and on.text.startswith("The NF4 kernel works here in part. It dequantizes in:\n")
    assert f"  {PRODUCT}" not in on.text
    assert by_kernel(on) == 1 and on.counts()[PRODUCT]["library"] == 1
    if not torch.cuda.is_available():
        assert on.summary() == "1 of 2 dequantizations went through the library"


def test_an_older_product_dequantizes_through_the_switched_function(monkeypatch):
    """bitsandbytes before 0.50: forward and backward call functional.dequantize_4bit, so nothing is left."""

    class MatMul4Bit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, A, B, state):
            ctx.saved = B, state
            return A @ bnb.functional.dequantize_4bit(B, state).t()

        @staticmethod
        def backward(ctx, grad):
            return grad @ bnb.functional.dequantize_4bit(*ctx.saved), None, None

    monkeypatch.setattr(_functions, "MatMul4Bit", MatMul4Bit)
    monkeypatch.setattr(_functions, "matmul_4bit", MatMul4Bit.apply)
    on = train_a_layer("bitsandbytes")
    assert not on.left and not on.partial and on.text.startswith("The NF4 kernel works here. It")
    assert by_kernel(on) == 2 and on.summary() == "0 of 2 dequantizations went through the library"


def test_a_newer_argument_goes_to_the_library(monkeypatch):
    seen = []

    def dequantize_4bit(
        A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4", fast=False
    ):
        seen.append(fast)
        return ORIGINAL[0](A, quant_state, absmax, out, blocksize, quant_type)

    monkeypatch.setattr(bnb.functional, "dequantize_4bit", dequantize_4bit)
    with quietly("bitsandbytes", strict=True) as on:
        seen.clear()
        assert dequantizes() and not seen and by_kernel(on) == 1
        assert dequantizes(functools.partial(bnb.functional.dequantize_4bit, fast=True))
        assert seen == [True] and by_kernel(on) == 1


def test_unsloth(fake_unsloth):
    (kernels, utils, fast_lora), calls = fake_unsloth
    original, (packed, state, expected) = utils.fast_dequantize, example((48, 64))
    state = copy.deepcopy(state)
    with quietly("unsloth", strict=True) as on:
        function = fast_lora.fast_dequantize
        assert (
            function is kernels.fast_dequantize is utils.fast_dequantize is not original
            and UNSLOTH in str(on)
        )
        assert torch.equal(function(packed.t(), state, dtype=BF16), expected.t())
        shared = [function(packed, state, use_global_buffer=True), function(packed, state, None, True)]
        assert all(torch.equal(one, expected) for one in shared)
        assert shared[0].data_ptr() != shared[1].data_ptr()
        out = torch.full_like(expected, torch.nan)
        assert function(packed, state, out=out) is out and torch.equal(out, expected) and not calls
        assert function(expected) == function(packed, [1, 2]) == "the library's"  # other formats
        assert on.counts()[UNSLOTH] == {"kernel": 4, "library": 0, "fused": 0, "reasons": {}}
        state.absmax = None
        assert function(packed, state, None, True, BF16) == "the library's"
        assert calls[-1] == (packed, state, None, True, BF16) and on.counts()[UNSLOTH]["library"] == 1
    assert utils.fast_dequantize is fast_lora.fast_dequantize is original
    assert torch.equal(
        switch.your_fast_dequantize(packed, example((48, 64))[1], use_global_buffer=True), expected
    )
    assert switch.your_fast_dequantize(expected) is expected
    for arguments in (lambda W, quant_state=None: W, lambda W, quant_state=None, out=None, scale=1: W):
        utils.fast_dequantize = arguments
        with pytest.raises(UnknownInternals, match="fast_dequantize takes"):
            quietly("unsloth", strict=True)


# The process


def test_replaced_functions_pickle_as_the_originals():
    expected = [pickle.dumps(function) for function in ORIGINAL]
    with quietly("bitsandbytes"):
        assert [pickle.dumps(function) for function in functions()] == expected
        assert pickle.loads(expected[0]) is bnb.functional.dequantize_4bit
        torch.save(functools.partial(bnb.functional.dequantize_4bit, blocksize=64), io.BytesIO())


def test_a_wrapper_around_a_replacement(monkeypatch):
    """As Unsloth makes one on import. functools.wraps copies a function's attributes, the mark too."""
    on, ours = quietly("bitsandbytes"), bnb.functional.dequantize_4bit
    wrapper = functools.wraps(ours)(lambda *a, **k: ours(*a, **k))
    with monkeypatch.context() as patch:
        patch.setattr(bnb.functional, "dequantize_4bit", wrapper)
        assert dequantizes() and by_kernel(on) == 1
        assert f"Since then {DEQUANTIZE} was wrapped or replaced by another library." in str(on)
        restore()
        assert bnb.functional.dequantize_4bit is wrapper and dequantizes() and by_kernel(on) == 1
        patch.setattr(bnb.functional, "dequantize_4bit", ORIGINAL[0])


def test_off_ends_replacements_that_cannot_be_found(monkeypatch):
    """Wrapped wherever they stood: then they only pass calls on."""
    on = quietly("bitsandbytes")
    with monkeypatch.context() as patch:
        for module, attribute, value in list(switch._references(("bitsandbytes",))):
            if switch.site_of(value):
                patch.setattr(module, attribute, lambda *a, ours=value, **k: ours(*a, **k))
        on.off()
        assert dequantizes() and by_kernel(on) == 0


def test_the_switch_module_is_reloaded():
    on, before = quietly("bitsandbytes"), switch.UnknownInternals
    again = importlib.reload(switch)
    switch.UnknownInternals = before  # which other tests hold
    assert dequantizes() and by_kernel(on) == 1
    with again.use_nf4_kernel("bitsandbytes", quiet=True):
        assert not set(functions()) & set(ORIGINAL)
    assert not set(functions()) & set(ORIGINAL)  # the first one is still open
    on.off()
    assert functions() == ORIGINAL


def test_the_switch_module_is_lost_and_imported_again(monkeypatch):
    """As in a notebook that drops modules."""
    quietly("bitsandbytes")
    monkeypatch.delitem(sys.modules, "helpers.nf4.switch")
    monkeypatch.setattr(importlib.import_module("helpers.nf4"), "switch", switch)  # put back at the end
    new = importlib.import_module("helpers.nf4.switch")
    with pytest.raises(RuntimeError, match=r"another copy of nf4_triton: call restore\(\) first"):
        new.use_nf4_kernel("bitsandbytes", quiet=True, strict=True)
    new.restore()
    assert functions() == ORIGINAL
    with new.use_nf4_kernel("bitsandbytes", quiet=True, strict=True):
        assert not set(functions()) & set(ORIGINAL)
    quietly("bitsandbytes").off()  # what the new copy restored does not hold it
    assert functions() == ORIGINAL


def test_bitsandbytes_is_reloaded():
    before, on = dict(vars(bnb.functional)), quietly("bitsandbytes")
    try:
        importlib.reload(bnb.functional)
        fresh = bnb.functional.dequantize_4bit
        vars(bnb.functional).update(before | {"dequantize_4bit": fresh})  # its classes stay the same
        with pytest.raises(RuntimeError, match="dequantize_4bit was reloaded: call use_nf4_kernel"):
            on.counts()
        assert f"Since then {DEQUANTIZE} was reloaded" in str(on)
        with quietly("bitsandbytes") as second:
            assert dequantizes() and by_kernel(on) == by_kernel(second) == 1
            assert "reloaded" not in str(on) + str(second)
        assert switch.site_of(bnb.functional.dequantize_4bit)  # the first one is still open, and whole again
        on.off()
        assert bnb.functional.dequantize_4bit is fresh and functions()[1:] == ORIGINAL[1:]
    finally:
        restore()
        vars(bnb.functional).update(before | {"dequantize_4bit": ORIGINAL[0]})


# What is logged


def test_one_process_of_a_host_logs_as_the_user_wants(monkeypatch, capsys):
    for rank, speaks in (("0", True), ("1", False), ("7", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        use_nf4_kernel("bitsandbytes").off()
        assert ("The NF4 kernel works here" in capsys.readouterr().err) == speaks
    monkeypatch.delenv("LOCAL_RANK")
    log, records = logging.getLogger("nf4_triton"), []
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(log, "handlers", [handler])
    for level, count in ((logging.NOTSET, 1), (logging.INFO, 2), (logging.WARNING, 2)):
        log.setLevel(level)
        use_nf4_kernel("bitsandbytes").off()
        assert len(records) == count and not capsys.readouterr().err
    log.setLevel(logging.NOTSET)


# NF4_TRITON=1


@pytest.fixture
def variable(monkeypatch):
    """NF4_TRITON=1, and bitsandbytes' layer as it was afterwards."""
    monkeypatch.setattr(bnb.nn.Linear4bit, "__init__", bnb.nn.Linear4bit.__init__)
    monkeypatch.setenv("NF4_TRITON", "1")
    yield monkeypatch
    autoload.waiting.clear()


def test_the_self_test_names_its_device(monkeypatch):
    """After transformers' from_pretrained torch.linspace ignores `with torch.device(...)`."""
    linspace = torch.linspace
    monkeypatch.setattr(
        torch, "linspace", lambda *a, device="meta", **how: linspace(*a, device=device, **how)
    )
    switch._tested.clear()
    with torch.device("meta"), quietly("bitsandbytes", strict=True) as on:
        assert on.on


def test_the_self_test_where_models_are_created_on_meta(monkeypatch):
    monkeypatch.setattr(bnb.functional, "name2qmap", {})  # its tables are made at the first use
    switch._tested.clear()
    with torch.device("meta"), quietly("bitsandbytes", strict=True) as on:
        assert on.on


def a_layer():
    return bnb.nn.Linear4bit(64, 32, bias=False, device="meta")


def test_the_variable_switches_at_the_first_layer(variable, capsys):
    """Also where a model is loaded: on the meta device, in another default dtype."""
    switch._tested.clear()
    variable.setattr(torch, "get_default_dtype", torch.get_default_dtype)
    autoload.load()
    assert functions() == ORIGINAL and dequantizes()
    torch.set_default_dtype(BF16)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert a_layer().in_features == 64
    finally:
        torch.set_default_dtype(torch.float32)
    assert capsys.readouterr().err.startswith("NF4_TRITON=1: The NF4 kernel works here. It dequantizes in:\n")
    assert all(map(switch.site_of, functions())) and dequantizes()
    restore()
    a_layer()
    assert functions() == ORIGINAL and not capsys.readouterr().err


@pytest.mark.parametrize("value", [None, "", "0", "off", " False "])
def test_without_the_variable_nothing_happens(variable, value):
    variable.delenv("NF4_TRITON") if value is None else variable.setenv("NF4_TRITON", value)
    before = bnb.nn.Linear4bit.__init__
    autoload.load()
    assert bnb.nn.Linear4bit.__init__ is before and not autoload.waiting


@pytest.mark.parametrize("ends", [restore, lambda: quietly("bitsandbytes").off()], ids=["restore", "a call"])
def test_a_call_of_ones_own_ends_the_waiting(variable, capsys, ends):
    autoload.load()
    ends()
    a_layer()
    assert functions() == ORIGINAL and not capsys.readouterr().err


def test_the_variable_fails_no_import_and_no_layer(variable, capsys):
    variable.setattr(logging.getLogger("nf4_triton"), "handlers", [switch._Stderr()])
    autoload.load()
    variable.setattr(switch, "use_nf4_kernel", lambda **_: full())
    assert a_layer().in_features == a_layer().in_features == 64 and functions() == ORIGINAL
    variable.setitem(sys.modules, "bitsandbytes.nn.modules", types.ModuleType("without a layer"))
    autoload.load()
    assert capsys.readouterr().err.splitlines() == [
        "NF4_TRITON=1 has no effect: CUDA out of memory",
        "NF4_TRITON=1 has no effect: AttributeError: module 'without a layer' has no attribute 'Linear4bit'",
    ]


# The trainers' callback


@pytest.fixture
def callback():
    pytest.importorskip("transformers")
    from helpers.integrate import NF4KernelCallback

    return NF4KernelCallback


def test_the_callback(callback, monkeypatch, capsys):
    one = pickle.loads(pickle.dumps(callback("bitsandbytes")))
    one.on_train_end(None, None, None)  # before it began
    for _ in range(2):
        one.on_train_begin(None, None, None)
        assert dequantizes() and one.switch.on and copy.deepcopy(one).switch is None
        assert pickle.loads(pickle.dumps(one)).names == ("bitsandbytes",)
        one.on_train_end(None, None, None)
        printed = capsys.readouterr().err
        assert printed.startswith("The NF4 kernel works here")
        assert (
            printed.endswith("\n0 of 1 dequantizations went through the library\n")
            and functions() == ORIGINAL
        )
    for change in NO_GPU:
        monkeypatch.setattr(*change)
    for quiet, text in (
        (False, "The kernel was not used: the libraries dequantized everything.\n"),
        (True, ""),
    ):
        one = callback(quiet=quiet)
        one.on_train_begin(None, None, None)
        one.on_train_end(None, None, None)
        printed = capsys.readouterr().err
        assert printed.endswith(text) and bool(printed) != quiet
    with pytest.raises(RuntimeError, match="No CUDA GPU"):
        callback("peft", strict=True).on_train_begin(None, None, None)


@pytest.mark.parametrize("then", ["the next training ends", "it is deleted"])
def test_the_callback_of_an_interrupted_training(callback, then):
    one = callback(quiet=True)
    one.on_train_begin(None, None, None)  # Ctrl-C: no on_train_end
    if then == "it is deleted":
        del one
        gc.collect()
    else:
        one.on_train_begin(None, None, None)
        one.on_train_end(None, None, None)
    assert functions() == ORIGINAL
