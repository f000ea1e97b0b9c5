"""What may happen to a process while the kernel is switched on: reloads, copies, threads, no source files,
a full GPU, a second copy. After any of it the switch is wholly on, wholly off, or says what is wrong."""

import copy
import functools
import gc
import importlib
import io
import pickle
import sys
import threading
import types
import warnings
import weakref

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")

from helpers.nf4 import integrate, kernel, libraries  # noqa: E402
from helpers.nf4.integrate import UnknownInternals, use_nf4_kernel  # noqa: E402
from helpers.nf4 import reference  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
DEQUANTIZE, MATMUL = libraries.DEQUANTIZE, libraries.PRODUCT


def functions():
    from bitsandbytes.autograd import _functions

    return bnb.functional.dequantize_4bit, bnb.matmul_4bit, _functions.matmul_4bit


ORIGINAL = functions()


@pytest.fixture(autouse=True)
def restored():
    yield
    integrate.restore()
    assert functions() == ORIGINAL


def quantized(shape, dtype=BF16, device="cpu", **options):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return bnb.functional.quantize_4bit(
        values, **{"quant_type": "nf4", "compress_statistics": True} | options
    )


def strided(tensor):
    """The same values, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def both(layer, x):
    """Result and input gradient."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    return y.detach(), x.grad


# States that the kernel does not cover


def odd_weight(packed, state):
    return strided(packed), state


def odd_offset(packed, state):
    state.offset = state.offset.to(BF16)
    return packed, state


def odd_absmax(packed, state):
    state.absmax = strided(state.absmax)
    return packed, state


def odd_absmax2(packed, state):
    state.state2.absmax = strided(state.state2.absmax)
    return packed, state


def odd_blocksize2(packed, state):
    state.state2.blocksize = 192  # no power of two; one block holds all there is
    return packed, state


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("odd", [odd_weight, odd_offset, odd_absmax, odd_absmax2, odd_blocksize2])
def test_a_state_that_is_not_covered_takes_the_librarys_path(device, odd, compiled):
    """In compiled code as in eager code: the library's bits or its own error, none of ours."""
    torch._dynamo.reset()
    packed, state = odd(*quantized((64, 256), BF16, device))

    def call():
        function = lambda: bnb.functional.dequantize_4bit(packed, state) + 0  # noqa: E731
        function = torch.compile(function, backend="aot_eager") if compiled else function
        try:
            return function()
        except kernel.UnsupportedState:
            raise
        except Exception as error:
            return type(error)

    expected = call()
    torch._dynamo.reset()
    with use_nf4_kernel("bitsandbytes", quiet=True):
        found = call()
    torch._dynamo.reset()
    if isinstance(expected, type):
        assert found is expected
    else:
        assert reference.same_bits(found, expected)


def test_a_strided_absmax_is_counted_as_the_librarys(device):
    packed, state = odd_absmax(*quantized((64, 256), BF16, device))
    expected = bnb.functional.dequantize_4bit(packed, state)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        assert reference.same_bits(bnb.functional.dequantize_4bit(packed, state), expected)
        counts = switch.counts()[DEQUANTIZE]
        assert (counts["kernel"], counts["library"]) == (0, 1)
        assert "absmax" in next(iter(counts["reasons"]))


def test_a_weight_without_a_state_whose_layer_has_one_is_decoded(make_layer):
    from helpers.nf4 import dequantize

    layer = make_layer(128, 64, BF16)
    x = torch.randn(5, 128, device=layer.weight.device, dtype=BF16)
    expected = dequantize(layer), *both(layer, x)
    layer.quant_state, layer.weight.quant_state = layer.weight.quant_state, None
    assert reference.same_bits(dequantize(layer), expected[0])
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        assert all(map(reference.same_bits, both(layer, x), expected[1:]))
        assert switch.counts()[MATMUL]["kernel"] + switch.counts()[MATMUL]["fused"] == 1


# What is kept


def other_dtype(make_layer):
    layer = make_layer(128, 64, BF16)
    layer.compute_dtype = FP16  # the forward decodes to fp16, the state says bf16
    return layer, torch.randn(200, 128, device=layer.weight.device, dtype=FP16)


@pytest.mark.parametrize("end", ["replaced", "off", "cpu"])
def test_nothing_replaced_is_kept_alive(make_layer, end):
    layer, x = other_dtype(make_layer)
    state = layer.weight.quant_state
    with use_nf4_kernel("bitsandbytes", quiet=True):
        both(layer, x)
        both(layer, x)
        large = [weakref.ref(layer.weight.data.untyped_storage()), weakref.ref(state.absmax)]
        if end == "off":
            integrate.restore()
        state.absmax = state.absmax.clone()
        layer.weight.data = layer.weight.data.clone()
        if end == "cpu":
            layer.to("cpu")
        gc.collect()
        assert not any(one() is not None for one in large[1:])


@pytest.mark.gpu
def test_a_model_that_leaves_the_gpu_frees_as_much_as_without_the_switch(make_layer):
    def freed(switched):
        layer = make_layer(4096, 2048, BF16, device="cuda")
        layer.compute_dtype = FP16
        x = torch.randn(600, 4096, device="cuda", dtype=FP16)
        if switched:
            with use_nf4_kernel("bitsandbytes", quiet=True):
                both(layer, x)
                both(layer, x)
        else:
            both(layer, x)
        gc.collect()
        before = torch.cuda.memory_allocated()
        layer.to("cpu")
        gc.collect()
        return before - torch.cuda.memory_allocated()

    freed(True)
    assert freed(True) >= freed(False)


def test_copies_of_a_state_share_nothing(make_layer):
    """One thread must not get the scales of another's state."""
    layer, x = other_dtype(make_layer)
    with use_nf4_kernel("bitsandbytes", quiet=True):
        both(layer, x)
        first = layer.weight.quant_state
        second = copy.copy(first)
        assert not any(value is second.__dict__[name] for name, value in vars(first).items() if
                       type(value) in (dict, list, set))  # fmt: skip
        second.absmax = first.absmax.flip(0).clone()
        weight = layer.weight.data
        with torch.no_grad():
            a, b = (bnb.matmul_4bit(x, weight, state) for state in (first, second))
    with torch.no_grad():
        assert reference.same_bits(a, bnb.matmul_4bit(x, weight, first))
        assert reference.same_bits(b, bnb.matmul_4bit(x, weight, second))


def test_a_used_state_is_saved_as_before(make_layer):
    layer, x = other_dtype(make_layer)
    fields = set(vars(layer.weight.quant_state)) - {"_nf4_plan"}  # the kernel's own, its test is elsewhere
    with use_nf4_kernel("bitsandbytes", quiet=True):
        both(layer, x)
        assert set(vars(layer.weight.quant_state)) - {"_nf4_plan"} == fields


# The process


def test_replaced_functions_pickle_as_the_originals():
    expected = [pickle.dumps(function) for function in ORIGINAL]
    with use_nf4_kernel("bitsandbytes", quiet=True):
        assert [pickle.dumps(function) for function in functions()] == expected
        assert pickle.loads(expected[0]) is bnb.functional.dequantize_4bit
        stream = io.BytesIO()
        torch.save(functools.partial(bnb.functional.dequantize_4bit, blocksize=64), stream)
    assert [pickle.loads(data) for data in expected] == list(ORIGINAL)


def test_reload_of_the_integration_leaves_it_reachable():
    switch = use_nf4_kernel("bitsandbytes", quiet=True)
    try:
        again = importlib.reload(integrate)
        packed, state = quantized((16, 64))
        bnb.functional.dequantize_4bit(packed, state)
        assert switch.counts()[DEQUANTIZE]["kernel"] == 1
        with again.use_nf4_kernel("bitsandbytes", quiet=True):
            assert not set(functions()) & set(ORIGINAL)
        assert not set(functions()) & set(ORIGINAL)  # the first one is still open
        switch.off()
        assert functions() == ORIGINAL
    finally:
        integrate.restore()


def test_a_wrapper_around_a_replacement_is_not_taken_for_one():
    """functools.wraps copies a function's attributes."""
    switch = use_nf4_kernel("bitsandbytes", quiet=True)
    ours = bnb.functional.dequantize_4bit
    bnb.functional.dequantize_4bit = wrapper = functools.wraps(ours)(lambda *a, **k: ours(*a, **k))
    try:
        packed, state = quantized((16, 64))
        expected = wrapper(packed, state)
        assert switch.counts()[DEQUANTIZE]["kernel"] == 1 and "wrapped or replaced" in str(switch)
        integrate.restore()
        assert bnb.functional.dequantize_4bit is wrapper
        assert reference.same_bits(wrapper(packed, state), expected)
        assert switch.counts()[DEQUANTIZE]["kernel"] == 1
    finally:
        bnb.functional.dequantize_4bit = ORIGINAL[0]


def test_restore_after_the_module_was_lost():
    """As in a notebook that drops modules and imports them anew."""
    use_nf4_kernel("bitsandbytes", quiet=True)
    lost = sys.modules.pop("helpers.nf4.integrate")
    try:
        new = importlib.import_module("helpers.nf4.integrate")
        assert new is not lost
        with pytest.raises(RuntimeError, match=r"restore\(\)"):
            new.use_nf4_kernel("bitsandbytes", quiet=True)
        new.restore()
        new.restore()
        assert functions() == ORIGINAL
        with new.use_nf4_kernel("bitsandbytes", quiet=True):
            assert not set(functions()) & set(ORIGINAL)
    finally:
        sys.modules["helpers.nf4.integrate"] = lost
        importlib.import_module("helpers.nf4").integrate = lost


@pytest.fixture
def functional_reloaded():
    """bitsandbytes.functional as a reload leaves it, and as it was afterwards."""
    before = dict(vars(bnb.functional))

    def reload():
        importlib.reload(bnb.functional)
        fresh = bnb.functional.dequantize_4bit
        vars(bnb.functional).update(before | {"dequantize_4bit": fresh})  # its classes stay one
        return fresh

    yield reload
    integrate.restore()
    vars(bnb.functional).update(before)


def test_reload_of_bitsandbytes_is_said_and_mended(functional_reloaded):
    switch = use_nf4_kernel("bitsandbytes", quiet=True)
    fresh = functional_reloaded()
    packed, state = quantized((16, 64))
    bnb.functional.dequantize_4bit(packed, state)
    with pytest.raises(RuntimeError, match="dequantize_4bit was reloaded.*use_nf4_kernel"):
        switch.counts()
    assert "was reloaded" in str(switch)
    with use_nf4_kernel("bitsandbytes", quiet=True) as second:
        bnb.functional.dequantize_4bit(packed, state)
        assert second.counts()[DEQUANTIZE]["kernel"] == 1 and "reloaded" not in str(second)
    assert libraries.site_of(
        bnb.functional.dequantize_4bit
    )  # the first switch is still open, and whole again
    switch.off()
    assert bnb.functional.dequantize_4bit is fresh and functions()[1:] == ORIGINAL[1:]


def test_no_source_files(monkeypatch):
    """As in a frozen application: products cannot be known, the rest is switched."""

    def gone(_):
        raise OSError("could not get source code")

    monkeypatch.setattr(libraries.inspect, "getsource", gone)
    with use_nf4_kernel(quiet=True) as switch:
        assert "cannot be read" in switch.left[MATMUL] and libraries.site_of(functions()[0])
    assert functions() == ORIGINAL


@pytest.mark.parametrize("error", [OSError("no file"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_an_error_in_the_middle_leaves_all_off(monkeypatch, error):
    utils = types.ModuleType("unsloth.kernels.utils")
    utils.fast_dequantize = original = lambda W, quant_state=None, out=None, use_global_buffer=False: W
    for module in (types.ModuleType("unsloth"), types.ModuleType("unsloth.kernels"), utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def fail():
        raise error

    monkeypatch.setitem(libraries.SITES, "bitsandbytes", fail)
    with pytest.raises(type(error)):
        use_nf4_kernel("unsloth", "bitsandbytes", quiet=True)
    assert utils.fast_dequantize is original and functions() == ORIGINAL and not integrate._switched_on()


def test_a_full_gpu_at_the_self_test_is_not_for_good(monkeypatch):
    integrate._tested.clear()
    right = kernel._your_dequantize_nf4

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel, "_your_dequantize_nf4", full)
    with pytest.raises(RuntimeError, match="OutOfMemoryError"):
        use_nf4_kernel("bitsandbytes", quiet=True)
    assert functions() == ORIGINAL
    monkeypatch.setattr(kernel, "_your_dequantize_nf4", right)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        assert switch.sites


def test_kernel_cells_run_again(make_layer):
    """The module is executed anew while switched on: the operator is another, and so are the exceptions."""
    layer = make_layer(128, 64, BF16)
    x = torch.randn(200, 128, device=layer.weight.device, dtype=BF16)
    expected = both(layer, x)
    packed, state = odd_absmax(*quantized((64, 256), BF16, x.device))
    right = bnb.functional.dequantize_4bit(packed, state)
    before = dict(vars(kernel))
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        both(layer, x)
        try:
            importlib.reload(kernel)
            assert all(map(reference.same_bits, both(layer, x), expected))
            assert reference.same_bits(bnb.functional.dequantize_4bit(packed, state), right)
            counts = switch.counts()
            assert counts[MATMUL]["kernel"] + counts[MATMUL]["fused"] == 2, counts
            assert counts[DEQUANTIZE]["kernel"] == 2 and counts[DEQUANTIZE]["library"] == 1
            torch._dynamo.reset()
            compiled = torch.compile(lambda a: layer(a), backend="aot_eager")
            assert all(map(reference.same_bits, both(compiled, x), expected))
        finally:
            torch._dynamo.reset()
            importlib.reload(kernel)  # its operator belongs to the module's newest functions
            for name in ("UnsupportedState", "Settings"):  # what other tests hold
                setattr(kernel, name, before[name])


def test_threads_restore_at_once():
    def work():
        for _ in range(5):
            use_nf4_kernel("bitsandbytes", quiet=True)
            integrate.restore()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    integrate.restore()
    assert functions() == ORIGINAL and not integrate._switched_on()


# What is known of the libraries


def run(switch_names=("bitsandbytes",)):
    packed, state = quantized((64, 128))
    x = torch.randn(200, 128, dtype=BF16, requires_grad=True)
    with use_nf4_kernel(*switch_names, quiet=True) as switch:
        bnb.matmul_4bit(x, packed, state).sum().backward()
    return switch


@pytest.mark.parametrize("target", ["matmul_4bit", "MatMul4Bit"])
def test_a_newer_product_is_left_listed_and_counted(monkeypatch, target):
    """An unknown release costs speed, never the switch: its backward still decodes by the kernel."""
    monkeypatch.setitem(libraries.KNOWN, target, "another release")
    switch = run()
    assert "not one that is known" in switch.left[MATMUL] and f"Left to the library: {MATMUL}" in str(switch)
    assert libraries.site_of(bnb.functional.dequantize_4bit) is None
    counts = switch.counts()
    assert counts[DEQUANTIZE]["kernel"] == 1 and counts[MATMUL]["library"] == 1
    if not torch.cuda.is_available():
        assert switch.summary() == "1 of 2 dequantizations went through the library"


def test_an_older_product_decodes_through_the_switched_function(monkeypatch):
    """bitsandbytes before 0.50: forward and backward call functional.dequantize_4bit, so nothing is left."""
    from bitsandbytes.autograd import _functions

    class MatMul4Bit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, A, B, state):
            ctx.saved = B, state
            return A @ bnb.functional.dequantize_4bit(B, state).t()

        @staticmethod
        def backward(ctx, grad):
            return grad @ bnb.functional.dequantize_4bit(*ctx.saved), None, None

    monkeypatch.setattr(_functions, "MatMul4Bit", MatMul4Bit)
    packed, state = quantized((64, 128))
    x = torch.randn(200, 128, dtype=BF16, requires_grad=True)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        MatMul4Bit.apply(x, packed, state).sum().backward()
        assert not switch.left and list(switch.counts())[0] == DEQUANTIZE
        assert switch.summary() == "0 of 2 dequantizations went through the library"


def test_a_newer_argument_is_the_librarys(monkeypatch):
    original = bnb.functional.dequantize_4bit
    seen = []

    def dequantize_4bit(
        A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4", fast=False
    ):
        seen.append(fast)
        return original(A, quant_state, absmax, out, blocksize, quant_type)

    monkeypatch.setattr(bnb.functional, "dequantize_4bit", dequantize_4bit)
    packed, state = quantized((16, 64))
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        seen.clear()
        bnb.functional.dequantize_4bit(packed, state)
        assert not seen and switch.counts()[DEQUANTIZE]["kernel"] == 1
        bnb.functional.dequantize_4bit(packed, state, fast=True)
        assert seen == [True] and switch.counts()[DEQUANTIZE]["kernel"] == 1


def test_what_is_not_replaced_is_named(monkeypatch):
    mine, theirs = types.ModuleType("my_script"), types.ModuleType("peft.something")
    mine.dequantize = bnb.functional.dequantize_4bit
    mine.half = functools.partial(bnb.functional.dequantize_4bit, blocksize=64)
    theirs.Layer = type("Layer", (), {"decode": staticmethod(bnb.functional.dequantize_4bit)})
    theirs.Layer.__module__ = theirs.__name__
    moe = types.ModuleType("unsloth_zoo.temporary_patches.moe_nf4_grouped")
    moe.nf4_grouped_mm = lambda: None
    for module in (mine, theirs, moe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        text = str(switch)
    assert mine.dequantize is bnb.functional.dequantize_4bit
    for line in (
        "my_script.dequantize, a name imported before the call",
        "my_script.half, a partial of it",
        "peft.something.Layer.decode, a class attribute",
        "moe_nf4_grouped.nf4_grouped_mm, which decodes in a kernel of its own",
    ):
        assert line in text


def test_an_unsloth_that_comes_too_late_is_named(monkeypatch):
    if "unsloth" in sys.modules:
        pytest.skip("the real Unsloth is imported in this process")
    with use_nf4_kernel(quiet=True) as switch:
        with pytest.warns(UserWarning, match="Unsloth was imported after use_nf4_kernel.*call it again"):
            with pytest.raises(ImportError):
                importlib.import_module("unsloth.kernels.utils") if importlib.util.find_spec(
                    "unsloth"
                ) else find_late()
        utils = types.ModuleType("unsloth.kernels.utils")
        utils.fast_dequantize = lambda W, quant_state=None, out=None: W
        for module in (types.ModuleType("unsloth"), types.ModuleType("unsloth.kernels"), utils):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        assert "Unsloth was imported after" in str(switch)
        with use_nf4_kernel(quiet=True) as second:
            assert "Unsloth was imported after" not in str(second) and "unsloth" in second.libraries
    assert not any(type(one).__name__ == "_Latecomer" for one in sys.meta_path) or integrate.restore() is None


def find_late():
    for finder in sys.meta_path:
        finder.find_spec("unsloth.kernels.utils", None)
    raise ImportError


def test_two_bitsandbytes_on_the_path_are_named(tmp_path, monkeypatch):
    info = tmp_path / "bitsandbytes-0.41.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.41.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        line = [line for line in str(switch).splitlines() if "installed twice" in line]
    assert len(line) == 1 and "0.41.0" in line[0] and bnb.__file__ in line[0]


def test_a_missing_function_is_an_error_and_nothing_is_changed(monkeypatch):
    monkeypatch.delattr(bnb.functional, "dequantize_4bit")
    with pytest.raises(UnknownInternals, match="dequantize_4bit is missing"):
        use_nf4_kernel("bitsandbytes", quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_nf4_kernel(quiet=True).sites


def test_without_bitsandbytes_it_says_so(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: real(name, *more) if name != "bitsandbytes" else None
    )
    for name in integrate.LIBRARIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match="bitsandbytes is not installed"):
        use_nf4_kernel("bitsandbytes")
    switch = use_nf4_kernel(quiet=True)
    assert not switch.sites and "The NF4 kernel is not used." in str(switch)
    assert switch.refused["bitsandbytes"] == "not installed"


# NF4_TRITON=1


def test_a_wrapper_put_around_a_function_that_waits(monkeypatch, capsys):
    """unsloth_zoo wraps dequantize_4bit while bitsandbytes still waits for its first use: no call goes in
    circles, and the kernel decodes."""
    from helpers.nf4 import autoload

    monkeypatch.setenv("NF4_TRITON", "1")
    autoload.load()
    waiting = bnb.functional.dequantize_4bit
    assert waiting is not ORIGINAL[0] and pickle.dumps(waiting) == pickle.dumps(waiting)

    @functools.wraps(waiting)
    def wrapper(A, *args, **kwargs):
        return waiting(A, *args, **kwargs)

    bnb.functional.dequantize_4bit = wrapper
    try:
        packed, state = quantized((16, 64))  # the first use
        assert "NF4_TRITON=1: The NF4 kernel decodes in" in capsys.readouterr().err
        switched = bnb.functional.dequantize_4bit
        site = libraries.site_of(switched)
        assert site.original is wrapper and functions()[1] is not ORIGINAL[1]
        expected = wrapper(packed, state)
        assert reference.same_bits(switched(packed, state), expected) and site.kernel == 1
        assert "NF4_TRITON" not in capsys.readouterr().err
        integrate.restore()
        assert bnb.functional.dequantize_4bit is wrapper
        assert reference.same_bits(wrapper(packed, state), expected)
    finally:
        integrate.restore()
        bnb.functional.dequantize_4bit = ORIGINAL[0]


def test_a_call_of_ones_own_ends_the_waiting(monkeypatch, capsys):
    from helpers.nf4 import autoload

    monkeypatch.setenv("NF4_TRITON", "1")
    autoload.load()
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        packed, state = quantized((16, 64))
        bnb.functional.dequantize_4bit(packed, state)
        assert switch.counts()[DEQUANTIZE]["kernel"] == 1
    assert functions() == ORIGINAL and not capsys.readouterr().err
    autoload.load()
    integrate.restore()
    assert functions() == ORIGINAL


@pytest.mark.parametrize("value", [None, "", "0", "off", " False "])
def test_without_the_variable_nothing_happens(monkeypatch, value):
    from helpers.nf4 import autoload

    monkeypatch.delenv("NF4_TRITON", raising=False)
    if value is not None:
        monkeypatch.setenv("NF4_TRITON", value)
    autoload.load()
    assert functions() == ORIGINAL


def test_a_library_that_is_not_as_expected_does_not_fail_its_import(monkeypatch, capsys):
    from helpers.nf4 import autoload

    monkeypatch.setenv("NF4_TRITON", "1")
    monkeypatch.delattr(bnb.functional, "quantize_4bit")
    autoload.load()
    assert "NF4_TRITON=1: has no effect: AttributeError" in capsys.readouterr().err
    assert functions() == ORIGINAL


def test_the_trainers_callback(capsys):
    pytest.importorskip("transformers")
    from helpers.nf4 import trainer_callback

    callback = trainer_callback("bitsandbytes")
    state = types.SimpleNamespace(is_world_process_zero=True)
    callback.on_train_end(None, state, None)  # before it began
    callback.on_train_begin(None, state, None)
    packed, quant_state = quantized((16, 64))
    bnb.functional.dequantize_4bit(packed, quant_state)
    callback.on_train_end(None, state, None)
    printed = capsys.readouterr().out
    assert "The NF4 kernel decodes in" in printed
    assert "0 of 1 dequantizations went through the library" in printed
    assert functions() == ORIGINAL
