"""The kernel at the libraries' call sites: same bits, reversible, all or nothing; what is left is counted."""

import copy
import pickle
import sys
import threading
import time
import types
import warnings

import pytest
import torch

from helpers.nf4 import call_sites, kernel, libraries
from helpers.nf4 import reference

bnb = pytest.importorskip("bitsandbytes")

from helpers.nf4 import integrate  # noqa: E402
from helpers.nf4.integrate import UnknownInternals, use_nf4_kernel  # noqa: E402

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DEQUANTIZE, MATMUL = "bitsandbytes.functional.dequantize_4bit", "bitsandbytes.autograd._functions.matmul_4bit"
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def restored():
    yield
    integrate.restore()
    assert not any(map(libraries.site_of, functions()))


def functions():
    from bitsandbytes.autograd import _functions

    return bnb.functional.dequantize_4bit, bnb.matmul_4bit, _functions.matmul_4bit


def quantized(shape, dtype=BF16, device="cpu", seed=0, **options):
    """(packed, state) of a random weight; nf4 and nested unless `options` say otherwise."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(device, dtype)
    options = {"quant_type": "nf4", "compress_statistics": True} | options
    return bnb.functional.quantize_4bit(values, **options)


def same(a, b):
    return (
        type(a) is type(b) and a.dtype == b.dtype and a.stride() == b.stride() and reference.same_bits(a, b)
    )


def through(layer, x):
    """Result and input gradient of a layer."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(slope(y))
    return y.detach(), x.grad


def slope(y):
    return torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)


# The switch


def test_switching_on_and_off(capsys):
    before = functions()
    with use_nf4_kernel("bitsandbytes") as switch:
        assert all(map(libraries.site_of, functions()))
        assert not set(functions()) & set(before)
    assert functions() == before
    printed = capsys.readouterr().out
    assert printed.strip() == str(switch) and DEQUANTIZE in printed and MATMUL in printed
    assert "bitsandbytes.functional" in printed


def test_an_exception_restores():
    before = functions()
    with pytest.raises(KeyError), use_nf4_kernel("bitsandbytes", quiet=True):
        raise KeyError
    assert functions() == before


def test_twice_is_once():
    before = functions()
    first = use_nf4_kernel("bitsandbytes", quiet=True)
    once = functions()
    with use_nf4_kernel("bitsandbytes", quiet=True):
        assert functions() == once
    assert functions() == once  # the outer one is still open
    first.off()
    first.off()
    assert functions() == before


def test_overlapping_switches_end_in_any_order():
    before = functions()
    first = use_nf4_kernel("bitsandbytes", quiet=True)
    second = use_nf4_kernel("peft", quiet=True)
    first.off()
    assert functions() != before
    second.off()
    assert functions() == before


def test_restore_ends_them_all():
    before = functions()
    use_nf4_kernel("bitsandbytes", quiet=True)
    use_nf4_kernel("bitsandbytes", quiet=True)
    integrate.restore()
    assert functions() == before


def test_again_takes_the_same_replacements():
    with use_nf4_kernel("bitsandbytes", quiet=True):
        once = functions()
    with use_nf4_kernel("bitsandbytes", quiet=True):
        assert functions() == once  # so compiled graphs stay valid


def test_references_in_other_modules(monkeypatch):
    ours, theirs = types.ModuleType("unsloth_compiled_module_llama"), types.ModuleType("my_script")
    ours.dequantize = theirs.dequantize = original = bnb.functional.dequantize_4bit
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        assert ours.dequantize is bnb.functional.dequantize_4bit is not original
        assert theirs.dequantize is original  # what a script keeps to compare with stays the library's
        assert ours.__name__ in str(switch)
    assert ours.dequantize is original


def test_a_module_imported_later(monkeypatch):
    late = types.ModuleType("peft.late")
    original = bnb.functional.dequantize_4bit
    with use_nf4_kernel("bitsandbytes", quiet=True):
        late.dequantize = replacement = bnb.functional.dequantize_4bit
        other = types.ModuleType("peft.other")
        other.dequantize = original  # taken before, found by the next call
        monkeypatch.setitem(sys.modules, other.__name__, other)
        with use_nf4_kernel("bitsandbytes", quiet=True):
            assert other.dequantize is replacement
    packed, state = quantized((16, 64))
    assert late.dequantize is replacement  # nobody can take it back, but it only passes calls on
    assert same(late.dequantize(packed, state), original(packed, state))
    assert other.dequantize is original


def test_what_another_library_put_there_meanwhile_stays():
    with use_nf4_kernel("bitsandbytes", quiet=True):
        ours = bnb.functional.dequantize_4bit
        bnb.functional.dequantize_4bit = wrapper = lambda *a, **k: ours(*a, **k)  # as Unsloth does on import
    try:
        assert bnb.functional.dequantize_4bit is wrapper
    finally:
        bnb.functional.dequantize_4bit = libraries.site_of(ours).original


def test_half_a_swap_is_undone(monkeypatch):
    class Stubborn(types.ModuleType):
        def __setattr__(self, name, value):
            if name == "dequantize" and getattr(self, "ready", False):
                raise OSError("read only")
            super().__setattr__(name, value)

    last = Stubborn("transformers.stubborn")
    last.dequantize, last.ready = bnb.functional.dequantize_4bit, True
    monkeypatch.setitem(sys.modules, last.__name__, last)
    before = functions()
    with pytest.raises(OSError):
        use_nf4_kernel("bitsandbytes", quiet=True)
    assert functions() == before


def test_changed_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", lambda A, state: A)
    with pytest.raises(UnknownInternals, match="dequantize_4bit takes"):
        use_nf4_kernel("bitsandbytes", quiet=True)
    monkeypatch.delattr(bnb.functional, "dequantize_4bit")
    with pytest.raises(UnknownInternals, match="dequantize_4bit is missing"):
        use_nf4_kernel("bitsandbytes", quiet=True)


def test_a_peft_that_goes_another_way_is_said(monkeypatch):
    integrations = pytest.importorskip("peft.utils.integrations")
    monkeypatch.setattr(integrations, "dequantize_bnb_weight", lambda weight, state=None: weight)
    with use_nf4_kernel("peft", quiet=True) as switch:
        assert "peft.utils.integrations.dequantize_bnb_weight does not call" in str(switch)
        assert "bitsandbytes" in switch.libraries


def test_names():
    with pytest.raises(ValueError, match="'bnb' is not one of unsloth, bitsandbytes"):
        use_nf4_kernel("bnb")
    if "unsloth" not in sys.modules:
        switch = use_nf4_kernel(quiet=True)
        assert "unsloth" in switch.refused and "unsloth" in str(switch)


def test_no_gpu_and_no_interpreter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    before = functions()
    with pytest.raises(RuntimeError, match="No CUDA GPU.*TRITON_INTERPRET=1"):
        use_nf4_kernel("bitsandbytes")
    switch = use_nf4_kernel(quiet=True)
    assert not switch.sites and "not used" in str(switch) and functions() == before


@pytest.mark.parametrize(
    "card, text", [("hip", "AMD GPU .ROCm 6.4.*NVIDIA"), ("old", "Tesla P100 is sm_60.*sm_75")]
)
def test_a_card_it_does_not_run_on(monkeypatch, card, text):
    monkeypatch.setattr(torch.version, "hip", "6.4" if card == "hip" else None)
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (6, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla P100")
    before = functions()
    with pytest.raises(RuntimeError, match=text) as problem:
        use_nf4_kernel("bitsandbytes")
    assert "\n" not in str(problem.value) and functions() == before


def test_wrong_bits_are_refused(monkeypatch):
    right, before = kernel._your_dequantize_nf4, functions()
    monkeypatch.setattr(kernel, "_your_dequantize_nf4", lambda w, s, out=None: right(w, s, out) + 1)
    with pytest.raises(RuntimeError, match="bits differ"):
        use_nf4_kernel("bitsandbytes", quiet=True)
    assert functions() == before


def test_threads_see_right_results_while_it_switches(make_layer):
    layer = make_layer(64, 32, BF16)
    x = torch.randn(3, 64, device=layer.weight.device, dtype=BF16)
    expected, stop, failures = through(layer, x), threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                for found, right in zip(through(layer, x), expected, strict=True):
                    if not same(found, right):
                        failures.append(found)
        except Exception as error:
            failures.append(error)

    # Triton's interpreter runs one kernel at a time; the kernel itself has no such limit.
    threads = [threading.Thread(target=work) for _ in range(3 if x.is_cuda else 1)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
            time.sleep(0.1)
    assert switch.sites[0].kernel and switch.sites[1].kernel
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_switch_at_once():
    before, seen = functions(), []

    def work():
        for _ in range(4):
            with use_nf4_kernel("bitsandbytes", quiet=True):
                seen.append(libraries.site_of(bnb.functional.dequantize_4bit) is not None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen) and len(seen) == 16 and functions() == before


def test_a_replacement_costs_well_under_a_microsecond():
    """What the replacement adds to the call it makes, by a kernel that does nothing."""
    stand_in = types.SimpleNamespace(
        _your_dequantize_nf4=lambda weight, state, out=None: weight,
        UnsupportedState=ValueError,
        INTERPRETED=True,
    )
    library = call_sites.Library()
    library.on = True
    site = call_sites.Site("x.y", lambda *a: 1 / 0, library)
    call_sites.dequantize_4bit(site, stand_in)
    weight, state, decode = torch.zeros(1), object(), stand_in._your_dequantize_nf4

    def best(function):
        times = []
        for _ in range(30):
            start = time.perf_counter()
            for _ in range(500):
                function(weight, state)
            times.append((time.perf_counter() - start) / 500)
        return min(times)

    assert best(site.replacement) - best(decode) < 1e-6
    assert site.kernel == 15000


# bitsandbytes.functional.dequantize_4bit

STATES = [
    {},
    {"quant_type": "fp4"},
    {"compress_statistics": False},
    {"blocksize": 128},
    {"blocksize": 1024, "compress_statistics": False},  # from 2048 on bitsandbytes compiles code for a CPU
    {"quant_storage": BF16},
    {"quant_storage": FP32, "quant_type": "fp4", "compress_statistics": False},
]


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("options", STATES, ids=str)
def test_dequantize_4bit(options, dtype, device):
    packed, state = quantized((6, 1024), dtype, device, **options)
    calls = {
        "positional": lambda f: f(packed, state),
        "keywords": lambda f: f(A=packed, quant_state=state, quant_type="fp4", blocksize=32),
        "transposed": lambda f: f(packed.t(), state),
        "parameter": lambda f: f(bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True), state),
    }
    expected = {name: call(bnb.functional.dequantize_4bit) for name, call in calls.items()}
    # bitsandbytes' CPU build has no `out`
    calls["out"] = lambda f: f(
        packed, state, out=torch.full(state.shape, torch.nan, dtype=dtype, device=device)
    )
    expected["out"] = expected["positional"]
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        for name, call in calls.items():
            found = call(bnb.functional.dequantize_4bit)
            # fp4 has two zeros; which one bitsandbytes' CPU build takes depends on the position
            agree = torch.equal if state.quant_type == "fp4" and device == "cpu" else same
            assert agree(found, expected[name]), name
        assert switch.counts()[DEQUANTIZE] == {"kernel": 5, "library": 0, "fused": 0, "reasons": {}}


def test_dequantize_4bit_without_a_state(device):
    packed, state = quantized((32, 64), FP16, device, compress_statistics=False)

    def call(function):
        out = torch.full((32, 64), torch.nan, dtype=FP16, device=device)
        return function(packed, absmax=state.absmax, out=out, quant_type="nf4"), out

    expected = bnb.functional.dequantize_4bit(packed, state)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        result, out = call(bnb.functional.dequantize_4bit)
        assert result is out and same(result, expected)
        assert switch.counts()[DEQUANTIZE]["kernel"] == 1
        with pytest.raises(ValueError, match="requires both absmax and out"):
            bnb.functional.dequantize_4bit(packed)


def test_what_the_kernel_does_not_cover_goes_to_the_library(device):
    packed, state = quantized((32, 64), BF16, device)
    wide = torch.stack([packed, packed], 1)[:, 0]  # the same bytes, not contiguous
    assert not wide.is_contiguous()
    expected = bnb.functional.dequantize_4bit(packed, state)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        if device == "cuda":  # the CPU build reads such a weight as if it were contiguous
            assert same(bnb.functional.dequantize_4bit(wide, state), expected)
        else:
            bnb.functional.dequantize_4bit(wide, state)
        counts = switch.counts()[DEQUANTIZE]
        assert counts["library"] == 1 and counts["kernel"] == 0
        assert sum(counts["reasons"].values()) == 1 and "contiguous" in next(iter(counts["reasons"]))
        with pytest.raises((ValueError, RuntimeError)):
            bnb.functional.dequantize_4bit(packed, state, out=torch.empty(3, 5, dtype=BF16, device=device))


# The product


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 128)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradient(make_layer, dtype, shape, bias):
    layer = make_layer(128, 80, dtype)
    if bias:
        layer.bias = torch.nn.Parameter(torch.randn(80, device=layer.weight.device, dtype=dtype), False)
    x = torch.randn(shape, device=layer.weight.device, dtype=dtype)
    expected = through(layer, x)
    with torch.no_grad():
        expected_plain = layer(x)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        assert all(map(same, through(layer, x), expected))
        with torch.no_grad():
            assert same(layer(x), expected_plain)
        counts = switch.counts()
    assert counts[DEQUANTIZE]["kernel"] == 1
    assert counts[MATMUL]["kernel"] + counts[MATMUL]["fused"] == 2
    assert all(not site["library"] for name, site in counts.items() if name in (DEQUANTIZE, MATMUL))


@pytest.mark.parametrize("compute, stored", [(FP16, BF16), (BF16, FP16), (FP32, BF16), (BF16, FP32)])
def test_a_state_of_another_dtype(make_layer, compute, stored):
    """Forward decodes to the input's dtype, backward to the state's and casts, as bitsandbytes does."""
    layer = make_layer(128, 64, stored)
    layer.compute_dtype = compute
    x = torch.randn(9, 128, device=layer.weight.device, dtype=compute)
    expected = through(layer, x)
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        assert all(map(same, through(layer, x), expected))
        assert all(map(same, through(layer, x), expected))
        assert switch.counts()[DEQUANTIZE]["kernel"] == 2
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with use_nf4_kernel("bitsandbytes", quiet=True):
            assert all(map(same, through(clone, x), expected))


def test_a_state_that_moves(make_layer):
    """The view with another dtype follows the state's tensors."""
    layer = make_layer(64, 64, BF16)
    layer.compute_dtype = FP16
    x = torch.randn(9, 64, device=layer.weight.device, dtype=FP16)
    with use_nf4_kernel("bitsandbytes", quiet=True):
        layer(x)
        state = layer.weight.quant_state
        state.absmax = state.absmax.flip(0).clone()
        result = layer(x)
    assert same(result, layer(x))


def test_other_calls_of_the_product_are_the_librarys(device):
    packed, state = quantized((64, 128), BF16, device)
    x, empty = torch.randn(3, 128, device=device, dtype=BF16), torch.empty(0, 128, device=device, dtype=BF16)
    sideways = torch.randn(3, 64, device=device, dtype=BF16)  # a weight quantized as (in, out)
    bias = torch.randn(64, device=device, dtype=BF16, requires_grad=True)
    calls = {
        "out": lambda: bnb.matmul_4bit(x, packed, state, out=torch.empty(3, 64, device=device, dtype=BF16)),
        "transposed": lambda: bnb.matmul_4bit(x, packed.t(), state),
        "empty": lambda: bnb.matmul_4bit(empty, packed, state),
        "sideways": lambda: bnb.matmul_4bit(sideways, packed, state),
        "bias": lambda: torch.autograd.grad(bnb.matmul_4bit(x, packed, state, bias=bias).sum(), bias)[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = {name: call() for name, call in calls.items()}
        with use_nf4_kernel("bitsandbytes", quiet=True):
            for name, call in calls.items():
                assert same(call(), expected[name]), name
            with pytest.raises(ValueError, match="quant_state is required"):
                bnb.matmul_4bit(x, packed, None)
            with pytest.raises((RuntimeError, ValueError)):
                bnb.matmul_4bit(x[:, :50], packed, state)


def test_nested_with_another_block_size_raises_as_before(device):
    packed, state = quantized((64, 64), BF16, device)
    state.state2.blocksize = 128
    x = torch.randn(3, 64, device=device, dtype=BF16)
    with use_nf4_kernel("bitsandbytes", quiet=True), pytest.raises(NotImplementedError, match="blocksize"):
        bnb.matmul_4bit(x, packed, state)


def test_switched_between_forward_and_backward(make_layer):
    layer = make_layer(64, 32, BF16)
    x = torch.randn(7, 64, device=layer.weight.device, dtype=BF16)
    expected = through(layer, x)
    for first in (True, False):
        inputs = x.clone().requires_grad_()
        switch = use_nf4_kernel("bitsandbytes", quiet=True)
        if not first:
            switch.off()
        y = layer(inputs)
        if first:
            switch.off()
        else:
            switch = use_nf4_kernel("bitsandbytes", quiet=True)
        y.backward(slope(y))
        switch.off()
        assert same(y.detach(), expected[0]) and same(inputs.grad, expected[1])


def test_checkpointing_autocast_and_inference_mode(make_layer):
    from torch.utils.checkpoint import checkpoint

    layer = make_layer(64, 64, BF16)
    kind = layer.weight.device.type
    x = torch.randn(7, 64, device=layer.weight.device, dtype=BF16)

    def autocast(a):
        with torch.autocast(kind, FP16):
            return layer(a)

    def inference():
        with torch.inference_mode():
            return layer(x).clone()

    ways = {
        "checkpoint": lambda: through(lambda a: checkpoint(layer, a, use_reentrant=False), x),
        "reentrant": lambda: through(lambda a: checkpoint(layer, a, use_reentrant=True), x),
        "autocast": lambda: through(autocast, x),
        "inference": lambda: (inference(),),
    }
    expected = {name: way() for name, way in ways.items()}
    with use_nf4_kernel("bitsandbytes", quiet=True):
        for name, way in ways.items():
            assert all(map(same, way(), expected[name])), name


@pytest.mark.parametrize("part", ["dequantize", "layer"])
def test_compiled(make_layer, part):
    """fullgraph, with the kernel as one operator; back to the library's code after."""
    torch._dynamo.reset()
    layer = make_layer(64, 32, BF16)
    weight, state = layer.weight.data, layer.weight.quant_state
    x = torch.randn(200, 64, device=weight.device, dtype=BF16)
    if part == "dequantize":
        eager, ways = lambda: bnb.functional.dequantize_4bit(weight, state) + 0, 1
        compiled = torch.compile(eager, fullgraph=True)
        run = (lambda: (eager(),)), (lambda: (compiled(),))
    else:
        compiled, ways = torch.compile(lambda a: layer(a), fullgraph=True), 2
        run = (lambda: through(layer, x)), (lambda: through(compiled, x))
    expected = run[0]()
    with use_nf4_kernel("bitsandbytes", quiet=True):
        found = run[1]()
        assert len(found) == ways and all(map(reference.same_bits, found, expected))
    assert all(map(reference.same_bits, run[1](), expected))
    torch._dynamo.reset()


@pytest.mark.parametrize("as_row", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_the_branch_inside_the_gpu_operator(device, nested, as_row):
    """What bitsandbytes' CUDA operator calls it with, also where its packed weight is a row."""
    packed, state = quantized((48, 128), FP16, device, compress_statistics=nested)
    x = torch.randn(7, 128, device=device, dtype=BF16)
    library = call_sites.Library()
    library.on = True
    site = call_sites.Site("x._dequant_linear_fallback", lambda *a: a, library)
    call_sites.gemm_fallback(site, kernel)
    scales = (state.state2.absmax, state.absmax, state.state2.code, state.offset) if nested else ()
    first, *more = scales or (state.absmax,)
    packed = packed.t() if as_row else packed
    result = site.replacement(x, packed, [48, 128], first, 64, "nf4", None, *more)
    state.dtype = BF16  # it decodes to the input's dtype
    weight = reference.dequantize(packed.view(-1, 1), state)
    assert same(result, torch.nn.functional.linear(x, weight)) and site.kernel == 1
    assert site.replacement(x, packed, [48, 128], first, 48, "nf4", None, *more)[1] is packed
    assert site.library == 1


# PEFT and transformers


def test_peft_and_transformers_helpers(make_layer):
    integrations = pytest.importorskip("peft.utils.integrations")
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    layer = make_layer(64, 96, BF16)
    calls = (
        lambda: integrations.dequantize_module_weight(layer),
        lambda: integrations.dequantize_bnb_weight(layer.weight),
        lambda: dequantize_bnb_weight(layer.weight),
    )
    expected = [call() for call in calls]
    with use_nf4_kernel("peft", "transformers", quiet=True) as switch:
        assert all(same(call(), e) for call, e in zip(calls, expected, strict=True))
        assert switch.counts()[DEQUANTIZE]["kernel"] == 3
        assert "dequantize_bnb_weight" in str(switch)


@pytest.mark.parametrize("dora", [False, True])
def test_merge_and_unmerge(make_layer, dora):
    peft = pytest.importorskip("peft")

    def run():
        torch.manual_seed(0)
        model = torch.nn.Sequential(make_layer(64, 32, BF16))
        model.is_loaded_in_4bit = True
        model.config = types.SimpleNamespace(model_type="x", to_dict=dict)
        config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, use_dora=dora)
        model = peft.get_peft_model(model, config)
        layer = model.base_model.model[0]
        packed = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer.merge()
            packed.append(layer.base_layer.weight.data.clone())
            layer.unmerge()
            packed.append(layer.base_layer.weight.data.clone())
        return packed

    expected = run()
    with use_nf4_kernel("peft", quiet=True) as switch:
        assert all(map(torch.equal, run(), expected))
        assert switch.counts()[DEQUANTIZE]["kernel"] >= 2


# Unsloth's contract, on a stand-in with its names and arguments


@pytest.fixture
def unsloth_stand_in(monkeypatch):
    if "unsloth" in sys.modules:
        pytest.skip("the real Unsloth is imported in this process")
    names = ("unsloth", "unsloth.kernels", "unsloth.kernels.utils", "unsloth.kernels.fast_lora")
    modules = {name: types.ModuleType(name) for name in names}
    calls = []

    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
        calls.append((W, quant_state, out, use_global_buffer, dtype))
        return "the library's"

    for name in names[1:]:
        modules[name].fast_dequantize = fast_dequantize
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules, calls


def test_unsloth(unsloth_stand_in, device):
    modules, calls = unsloth_stand_in
    packed, state = quantized((48, 64), BF16, device)
    expected = bnb.functional.dequantize_4bit(packed, state)
    original = modules["unsloth.kernels.utils"].fast_dequantize
    with use_nf4_kernel("unsloth", quiet=True) as switch:
        function = modules["unsloth.kernels.fast_lora"].fast_dequantize
        assert function is modules["unsloth.kernels"].fast_dequantize is not original
        assert "unsloth.kernels.fast_lora" in str(switch)
        assert same(function(packed, state), expected)
        assert same(function(packed.t(), state, dtype=BF16), expected.t())
        first = function(packed, state, use_global_buffer=True)
        second = function(packed, state, None, True)
        assert same(first, expected) and first.data_ptr() != second.data_ptr()
        out = torch.full_like(expected, torch.nan)
        assert function(packed, state, out=out) is out and same(out, expected)
        assert not calls
        assert function(expected) == function(packed, [1, 2]) == "the library's"  # other formats pass through
        assert switch.counts()["unsloth.kernels.utils.fast_dequantize"]["library"] == 0
        state.absmax = None
        assert function(packed, state, None, True, BF16) == "the library's"
        assert calls[-1] == (packed, state, None, True, BF16)
        assert switch.counts()["unsloth.kernels.utils.fast_dequantize"]["library"] == 1
    assert all(modules[name].fast_dequantize is original for name in list(modules)[1:])


def test_unsloth_with_other_arguments_is_refused(unsloth_stand_in):
    modules, _ = unsloth_stand_in
    modules["unsloth.kernels.utils"].fast_dequantize = lambda W, quant_state=None: W
    with pytest.raises(UnknownInternals, match="fast_dequantize takes"):
        use_nf4_kernel("unsloth", quiet=True)


# On the GPU


@gpu
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("shape", [(1024, 1024), (320, 128), (80, 96), (4096, 1024), (1000, 4096)], ids=str)
def test_every_token_count(shape, dtype):
    """Whichever product bitsandbytes takes for a number of rows, the result has its bits, and it dequantizes
    nothing itself."""
    packed, state = quantized(shape, dtype, "cuda")
    g = torch.Generator("cuda").manual_seed(0)
    fused = 0
    for rows in (1, 3, 4, 5, 8, 16, 17, 33, 64, 65, 128, 320, 512, 513, 1536, 1537, 2048):
        x = torch.randn(rows, shape[1], device="cuda", generator=g).to(dtype)

        def both(x=x):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return through(lambda a: bnb.matmul_4bit(a, packed, state), x)

        expected = both()
        with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
            assert all(map(same, both(), expected)), rows
            counts = switch.counts()
        assert sum(site["library"] for site in counts.values()) == 0, (rows, counts)
        assert counts[DEQUANTIZE]["kernel"] == 1
        fused += counts[MATMUL]["fused"]
    assert (
        fused >= 3 or shape[1] % 64
    )  # at most 4 rows take the library's fused product, if rows are whole blocks


@gpu
def test_no_synchronization_and_no_extra_memory(make_layer):
    layer = make_layer(1024, 1024, BF16)
    x = torch.randn(128, 1024, device="cuda", dtype=BF16)

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        through(layer, x)
        return torch.cuda.max_memory_allocated()

    peak()
    without = peak()
    with use_nf4_kernel("bitsandbytes", quiet=True):
        peak()
        assert peak() <= without
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            a = x.clone().requires_grad_()
            layer(a).backward(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
def test_other_streams_and_graphs(make_layer):
    layer = make_layer(1024, 512, BF16)
    x = torch.randn(128, 1024, device="cuda", dtype=BF16)
    with torch.no_grad():
        expected = layer(x)
        with use_nf4_kernel("bitsandbytes", quiet=True):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                assert torch.equal(layer(x), expected)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, expected)


@gpu
def test_storage_that_moves(make_layer):
    """FSDP frees a gathered weight's storage and allocates it anew, elsewhere, for the next step."""
    layer = make_layer(1024, 512, BF16)
    x = torch.randn(128, 1024, device="cuda", dtype=BF16)
    packed, nbytes = layer.weight.data.clone(), layer.weight.untyped_storage().nbytes()
    expected, keep, addresses = through(layer, x), [], set()
    with use_nf4_kernel("bitsandbytes", quiet=True):
        for _ in range(4):
            assert all(map(same, through(layer, x), expected))
            addresses.add(layer.weight.data_ptr())
            layer.weight.untyped_storage().resize_(0)
            keep.append(torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda"))  # takes the old place
            layer.weight.untyped_storage().resize_(nbytes)
            layer.weight.data.copy_(packed)
        assert all(map(same, through(layer, x), expected))
    assert len(addresses) > 1


@gpu
def test_the_profiler_sees_one_kernel_a_decode(make_layer):
    from sameness import launches

    layer = make_layer(1024, 1024, BF16)
    x = torch.randn(256, 1024, device="cuda", dtype=BF16)
    assert launches(lambda: through(layer, x)) == {"ours": 0, "bitsandbytes": 4, "unsloth": 0}
    with use_nf4_kernel("bitsandbytes", quiet=True):
        through(layer, x)
        assert launches(lambda: through(layer, x)) == {"ours": 2, "bitsandbytes": 0, "unsloth": 0}


@gpu
def test_compiled_on_the_gpu_runs_the_kernel(make_layer):
    from sameness import launches

    torch._dynamo.reset()
    layer = make_layer(1024, 1024, BF16)
    x = torch.randn(256, 1024, device="cuda", dtype=BF16)
    expected = through(layer, x)
    with use_nf4_kernel("bitsandbytes", quiet=True):
        compiled = torch.compile(lambda a: layer(a), fullgraph=True)
        assert all(map(reference.same_bits, through(compiled, x), expected))
        assert launches(lambda: through(compiled, x)) == {"ours": 2, "bitsandbytes": 0, "unsloth": 0}
    torch._dynamo.reset()


@gpu
def test_weights_on_a_second_gpu_are_decoded_there(make_layer):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layer = make_layer(1024, 512, BF16, device="cuda:1")
    x = torch.randn(128, 1024, device="cuda:1", dtype=BF16)
    expected = through(layer, x)
    assert torch.cuda.current_device() == 0
    with use_nf4_kernel("bitsandbytes", quiet=True) as switch:
        for _ in range(3):
            used = torch.cuda.memory_allocated(0)
            result = through(layer, x)
            assert result[0].device == result[1].device == torch.device("cuda:1")
            assert all(map(same, result, expected)) and torch.cuda.memory_allocated(0) == used
        assert sum(site["library"] for site in switch.counts().values()) == 0
