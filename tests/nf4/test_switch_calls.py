"""What switched libraries compute: the same bits as alone, eager and compiled, and counted."""

import copy
import gc
import pickle
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

bnb = pytest.importorskip("bitsandbytes")

from helpers.nf4 import launch, reference, switch  # noqa: E402
from helpers.nf4.switch import DEQUANTIZE, PRODUCT, restore, use_nf4_kernel  # noqa: E402

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def restored():
    torch._dynamo.reset()
    yield
    if any(library.on for library in switch._libraries.values()):
        restore()
    torch._dynamo.reset()


def on():
    return use_nf4_kernel("bitsandbytes", quiet=True, strict=True)


def quantized(shape, dtype=BF16, device="cpu", **options):
    """(packed, state) of a random weight; nf4 and nested unless `options` say otherwise."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    options = {"quant_type": "nf4", "compress_statistics": True} | options
    return bnb.functional.quantize_4bit(values, **options)


def same(a, b):
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, str):  # an error
        return a == b
    return type(a) is type(b) and a.stride() == b.stride() and reference.same_bits(a, b)


def through(layer, x):
    """Result and input gradient of a layer."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    return y.detach(), x.grad


def inputs(layer, *shape, dtype=BF16):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return values.to(layer.weight.device, dtype)


# bitsandbytes.functional.dequantize_4bit

STATES = [
    ({}, FP16),
    ({"quant_type": "fp4"}, BF16),
    ({"compress_statistics": False}, FP32),
    ({"blocksize": 128}, BF16),
    ({"blocksize": 1024, "compress_statistics": False}, FP16),
    ({"quant_storage": BF16}, FP32),
    ({"quant_storage": FP32, "quant_type": "fp4", "compress_statistics": False}, FP16),
]


@pytest.mark.parametrize("options, dtype", STATES, ids=str)
def test_dequantize_4bit(options, dtype, device):
    packed, state = quantized((6, 1024), dtype, device, **options)
    parameter = bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True)
    empty = torch.full(state.shape, torch.nan, dtype=dtype, device=device)
    calls = {
        "positional": lambda f: f(packed, state),
        "keywords": lambda f: f(A=packed, quant_state=state, quant_type="fp4", blocksize=32),
        "transposed": lambda f: f(packed.t(), state),
        "parameter": lambda f: f(parameter, state),
        "out": lambda f: f(packed, state, out=empty),
    }
    expected = {name: call(bnb.functional.dequantize_4bit) for name, call in list(calls.items())[:4]}
    expected["out"] = expected["positional"]  # bitsandbytes' CPU build has no `out`
    with on() as switched:
        for name, call in calls.items():
            found = call(bnb.functional.dequantize_4bit)
            # fp4 has two zeros; which one bitsandbytes' CPU build takes depends on the position
            agree = torch.equal if state.quant_type == "fp4" and device == "cpu" else same
            assert agree(found, expected[name]), name
        assert found is empty
        assert switched.counts()[DEQUANTIZE] == {"kernel": 5, "library": 0, "fused": 0, "reasons": {}}
        with pytest.raises(ValueError, match="requires both absmax and out"):
            bnb.functional.dequantize_4bit(packed)


def strided(tensor):
    """The same values, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def change(field, new):
    def odd(packed, state):
        holder = state.state2 if field.endswith("2") else state
        name = field.removesuffix("2")
        setattr(holder, name, new(getattr(holder, name)))
        return packed, state

    return odd


ODD = {
    "weight": lambda packed, state: (strided(packed), state),
    "offset in bf16": change("offset", lambda x: x.to(BF16)),  # which the kernel takes
    "offset in fp64": change("offset", lambda x: x.double().view(1)),
    "absmax": change("absmax", strided),
    "code2": change("code2", strided),
    "blocksize2": change("blocksize2", lambda _: 192),  # no power of two; one block holds all there is
    "dtype": change("dtype", lambda _: torch.float64),
    "quant_type": change("quant_type", lambda _: "int4"),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("odd", ODD)
def test_a_state_that_the_kernel_refuses_goes_to_the_library(device, odd, compiled):
    """The library's bits or its own error, none of ours."""
    packed, state = ODD[odd](*quantized((64, 256), BF16, device))

    def call():
        torch._dynamo.reset()
        function = lambda: bnb.functional.dequantize_4bit(packed, state) + 0  # noqa: E731
        try:
            whole = odd not in ("dtype", "quant_type")  # which the library refuses, too
            return torch.compile(function, backend="eager", fullgraph=whole)() if compiled else function()
        except launch.UnsupportedState:
            raise
        except Exception as error:
            return type(error)

    expected = call()
    with on() as switched:
        found = call()
        counts = switched.counts()[DEQUANTIZE]
    assert found is expected if isinstance(expected, type) else reference.same_bits(found, expected)
    if not compiled:
        assert (counts["kernel"], counts["library"]) == ((1, 0) if odd == "offset in bf16" else (0, 1))
        assert sum(counts["reasons"].values()) == counts["library"]


# Products and their gradients


@pytest.mark.parametrize(
    "shape, dtype, nested, bias",
    [((5, 128), FP16, True, True), ((2, 3, 128), BF16, False, False), ((1, 128), FP32, True, False)],
    ids=str,
)
def test_product_and_gradient(make_layer, shape, dtype, nested, bias):
    layer = make_layer(128, 80, dtype, nested=nested)
    if bias:
        layer.bias = torch.nn.Parameter(torch.randn(80, device=layer.weight.device, dtype=dtype), False)
    x = inputs(layer, *shape, dtype=dtype)

    def calls():
        with torch.no_grad():
            plain = layer(x)
        return *through(layer, x), plain

    expected = calls()
    with on() as switched:
        assert same(calls(), expected)
        counts = switched.counts()
    assert counts[DEQUANTIZE]["kernel"] == 1 and counts[PRODUCT]["kernel"] + counts[PRODUCT]["fused"] == 2
    assert not counts[DEQUANTIZE]["library"] + counts[PRODUCT]["library"]


@pytest.mark.parametrize("compute, stored", [(FP16, BF16), (FP32, BF16), (BF16, FP32)])
def test_a_state_of_another_dtype(make_layer, compute, stored):
    """Forward dequantizes to the input's dtype, backward to the state's and casts, as bitsandbytes does."""
    layer = make_layer(128, 64, stored)
    layer.compute_dtype = compute
    x = inputs(layer, 9, 128, dtype=compute)
    expected = through(layer, x)
    fields = set(vars(layer.weight.quant_state))
    with on() as switched:
        for one in (layer, layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert same(through(one, x), expected)
        assert switched.counts()[DEQUANTIZE]["kernel"] == 4
        state = layer.weight.quant_state
        assert set(vars(state)) == fields  # a used state is saved as before
        state.absmax = state.absmax.flip(0).clone()
        moved, absmax = layer(x), weakref.ref(state.absmax)
        second = copy.copy(state)
        second.absmax = state.absmax.flip(0).clone()
        other = bnb.matmul_4bit(x, layer.weight.data, second)
    assert same(moved, layer(x)) and same(other, bnb.matmul_4bit(x, layer.weight.data, second))
    with on():
        layer(x).detach()
        state.absmax = state.absmax.clone()
        del moved
        gc.collect()
        assert absmax() is None  # what is replaced is freed


def test_other_calls_of_the_product_are_the_librarys(device):
    packed, state = quantized((64, 128), BF16, device)
    x = torch.randn(3, 128, device=device, dtype=BF16)
    sideways = torch.randn(3, 64, device=device, dtype=BF16)  # a weight quantized as (in, out)
    bias = torch.randn(64, device=device, dtype=BF16, requires_grad=True)
    other = copy.deepcopy(state)
    other.state2.blocksize = 128
    # On a GPU, three rows take bitsandbytes' fused kernel.
    by_ours = {"transposed"} if device == "cpu" else set()
    calls = {
        "out": lambda: bnb.matmul_4bit(x, packed, state, out=torch.empty(3, 64, device=device, dtype=BF16)),
        "transposed": lambda: bnb.matmul_4bit(x, packed.t(), state),
        "empty": lambda: bnb.matmul_4bit(x[:0], packed, state),
        "sideways": lambda: bnb.matmul_4bit(sideways, packed, state),
        "bias": lambda: torch.autograd.grad(bnb.matmul_4bit(x, packed, state, bias=bias).sum(), bias)[0],
        "no state": lambda: bnb.matmul_4bit(x, packed, None),
        "other sizes": lambda: bnb.matmul_4bit(x[:, :50], packed, state),
        "blocksize2": lambda: bnb.matmul_4bit(x, packed, other),
        # torch.func looks for itself in Function.apply, which the replacement goes past
        "torch.func": lambda: torch.func.grad(lambda a: bnb.matmul_4bit(a, packed, state).float().sum())(x),
        "vmap": lambda: torch.func.vmap(lambda a: bnb.matmul_4bit(a, packed, state))(x[:, None]),
    }

    def results(switched=None):
        found, by_kernel = {}, set()
        for name, call in calls.items():
            before = switched and switched.counts()[PRODUCT]["kernel"]
            try:
                found[name] = call()
            except Exception as error:
                found[name] = f"{type(error)} {error}"
            if switched and switched.counts()[PRODUCT]["kernel"] > before:
                by_kernel.add(name)
        return found, by_kernel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _ = results()
        with on() as switched:
            found, by_kernel = results(switched)
            late = bnb.matmul_4bit
    assert [type(expected[name]) for name in calls].count(str) == 4 and by_kernel == by_ours
    for name in calls:
        assert same(found[name], expected[name]), name
    before = switched.counts()
    late(x, packed, state)  # a copy of the replacement only passes calls on
    assert switched.counts() == before


def test_ways_to_train(make_layer):
    """Checkpointing, autocast, inference mode, and a switch between forward and backward."""
    layer = make_layer(64, 64, BF16)
    x = inputs(layer, 7, 64)

    def autocast(a):
        with torch.autocast(x.device.type, FP16):
            return layer(a)

    def inference():
        with torch.inference_mode():
            return layer(x).clone()

    ways = {
        "checkpoint": lambda: through(lambda a: checkpoint(layer, a, use_reentrant=False), x),
        "reentrant": lambda: through(lambda a: checkpoint(layer, a, use_reentrant=True), x),
        "autocast": lambda: through(autocast, x),
        "inference": inference,
    }
    expected = {name: way() for name, way in ways.items()}
    with on():
        for name, way in ways.items():
            assert same(way(), expected[name]), name
    expected = through(layer, x)
    for when in ("forward", "backward"):  # switched on for one of them
        switched = on() if when == "forward" else None
        a = x.clone().requires_grad_()
        y = layer(a)
        switched.off() if switched else on()
        y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
        restore()
        assert same((y.detach(), a.grad), expected), when


def test_threads_see_right_results_while_it_switches(make_layer):
    layer = make_layer(64, 32, BF16)
    x = inputs(layer, 3, 64)
    expected, stop, failures = through(layer, x), threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                if not same(through(layer, x), expected):
                    failures.append("other bits")
        except Exception as error:
            failures.append(error)

    # Triton's interpreter runs one kernel at a time; the kernel itself has no such limit.
    threads = [threading.Thread(target=work) for _ in range(3 if x.is_cuda else 1)]
    [thread.start() for thread in threads]
    for _ in range(6):
        with on() as switched:
            time.sleep(0.1)
    assert switched.sites[0].kernel and switched.sites[1].kernel
    stop.set()
    [thread.join() for thread in threads]
    assert not failures


# Compiled and exported


@pytest.mark.parametrize("part", ["dequantize", "layer"])
def test_compiled(make_layer, part):
    """fullgraph, with the kernel as one operator; back to the library's code after; no recompile when it is
    switched on again."""
    layer = make_layer(64, 32, BF16)
    weight, state = layer.weight.data, layer.weight.quant_state
    x = inputs(layer, 200, 64)
    backend = "inductor" if x.is_cuda else "aot_eager"
    if part == "dequantize":
        eager = lambda: bnb.functional.dequantize_4bit(weight, state) + 0  # noqa: E731
    else:
        eager = layer.__call__
    targets = []

    def spy(graph, arguments):
        targets.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, arguments)

    compiled = torch.compile(eager, fullgraph=True, backend=spy)
    run = (lambda f: (f(),)) if part == "dequantize" else (lambda f: through(f, x))
    expected = run(eager)
    for _ in range(2):
        with on():
            assert all(map(reference.same_bits, run(compiled), expected))
    assert len(targets) == 1
    if part == "dequantize":
        assert "nf4_triton" in targets[0] and "bitsandbytes" not in targets[0]
    assert all(map(reference.same_bits, run(compiled), expected))
    assert len(targets) == 2 and "nf4_triton" not in targets[1]


@pytest.mark.parametrize("strict", [True, False])
def test_exported(make_layer, strict):
    layer = make_layer(64, 32, BF16)
    weight, state = layer.weight.data, layer.weight.quant_state

    class Dequantized(torch.nn.Module):
        def forward(self, x):
            return linear(x, bnb.functional.dequantize_4bit(weight, state))

    x = inputs(layer, 3, 64)
    with on(), torch.no_grad():
        exported = torch.export.export(Dequantized(), (x,), strict=strict)
    assert sum("nf4_triton" in str(node.target) for node in exported.graph.nodes) == 1
    with torch.no_grad():
        assert torch.equal(exported.module()(x), Dequantized()(x))


@pytest.mark.parametrize("as_row", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_the_branch_inside_the_gpu_operator(monkeypatch, device, nested, as_row):
    """What bitsandbytes' CUDA operator calls it with, also if its packed weight is a row."""
    packed, state = quantized((48, 128), FP16, device, compress_statistics=nested)
    x = torch.randn(7, 128, device=device, dtype=BF16)
    library = switch.Library()
    monkeypatch.setattr(switch, "current", lambda name: lambda *arguments: arguments)
    site = switch._gemm_fallback(switch.Site(switch.FALLBACK, library))
    call, library.on = site.replacement, True
    scales = (state.state2.absmax, state.absmax, state.state2.code, state.offset) if nested else ()
    first, *more = scales or (state.absmax,)
    packed = packed.t() if as_row else packed
    result = call(x, packed, [48, 128], first, 64, "nf4", None, *more)
    state.dtype = BF16  # the input's dtype
    assert same(result, linear(x, reference.dequantize(packed.view(-1, 1), state))) and site.kernel == 1
    assert call(x, packed, [48, 128], first, 48, "nf4", None, *more)[1] is packed and site.library == 1
    library.on = False
    assert call(x, packed, [48, 128], first, 64, "nf4", None, *more)[1] is packed


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
    with use_nf4_kernel("peft", "transformers", quiet=True, strict=True) as switched:
        assert same([call() for call in calls], expected)
        assert switched.counts()[DEQUANTIZE]["kernel"] == 3


# On a GPU


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = through(lambda a: bnb.matmul_4bit(a, packed, state), x)
            with on() as switched:
                assert same(through(lambda a: bnb.matmul_4bit(a, packed, state), x), expected), rows
                counts = switched.counts()
        assert sum(site["library"] for site in counts.values()) == 0, (rows, counts)
        assert counts[DEQUANTIZE]["kernel"] == 1
        fused += counts[PRODUCT]["fused"]
    assert fused >= 3 or shape[1] % 64  # few rows take the library's fused product, if rows are whole blocks
