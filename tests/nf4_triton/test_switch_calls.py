"""What switched libraries compute: the same bits as alone, eager and compiled, and counted."""

import copy
import importlib.machinery
import sys
import threading
import types
import warnings
from unittest.mock import Mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes.backends.default import ops as default_ops  # noqa: E402

from nf4_triton import reference, sites, switch  # noqa: E402
from nf4_triton.sites import (  # noqa: E402
    AXOLOTL,
    DEQUANTIZE,
    EXPERT_STACK,
    FALLBACK,
    FAST_DEQUANTIZE,
    PRODUCT,
)
from nf4_triton.switch import restore  # noqa: E402
from states import fast_dequantize, oracle, strided  # noqa: E402

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def restored():
    torch._dynamo.reset()
    yield
    if any(library.on for library in switch.LIBRARIES.values()):
        restore()
    torch._dynamo.reset()


def on(*names):
    return switch.use_nf4_kernel(*(names or ["bitsandbytes"]), quiet=True, strict=True)


def quantized(shape, dtype=BF16, device="cpu", **options):
    """(packed, state) of a random weight; nf4 and nested unless `options` say otherwise."""
    values = inputs(device, *shape, dtype=dtype)
    options = {"quant_type": "nf4", "compress_statistics": True} | options
    return bnb.functional.quantize_4bit(values, **options)


def inputs(device, *shape, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def outcome(call):
    """Return what a call returns, or its error as a text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error)} {error}"


def same(a, b):
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return a.stride() == b.stride() and reference.same_bits(a, b)


def compare(call, *names):
    """Check that a call returns the same with and without the kernel. Return the counts of both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcome(call)
        with on(*names) as switched:
            found = outcome(call)
    assert same(found, expected), (found, expected)
    return switched.counts()


def through(layer, x):
    """Return result and input gradient of a layer."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(y.detach() + 1)
    return y.detach(), x.grad


# bitsandbytes.functional.dequantize_4bit


def test_a_launch_that_could_not_begin_is_the_librarys(monkeypatch, device, caplog):
    """A full disk on a compute node ends no training. After three failures the library keeps the function."""
    packed, state = quantized((48, 64), BF16, device)
    expected = bnb.functional.dequantize_4bit(packed, state)

    launched = Mock()
    with on() as switched:
        monkeypatch.setattr(sites.launch, "_your_dequantize_nf4", launched)
        launched.side_effect = RuntimeError("CUDA error")
        with pytest.raises(RuntimeError, match="CUDA error"):
            bnb.functional.dequantize_4bit(packed, state)
        launched.side_effect = OSError("no space left")
        for _ in range(5):
            assert same(bnb.functional.dequantize_4bit(packed, state), expected)
        counts = switched.counts()[DEQUANTIZE]
        why = "the kernel could not be launched (OSError: no space left)"
        assert counts["library"] == 3 and counts["reasons"] == {why: 3} and switched.left[DEQUANTIZE] == why
    assert caplog.text.count("falls back to the library") == 1


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({}, FP16),
        ({"compress_statistics": False}, FP32),
        ({"blocksize": 128}, BF16),
        ({"quant_type": "fp4"}, BF16),
        ({"quant_storage": FP32, "quant_type": "fp4", "compress_statistics": False}, FP16),
    ],
    ids=str,
)
def test_dequantize_4bit(options, dtype, device):
    packed, state = quantized((6, 1024), dtype, device, **options)
    parameter = bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True)

    def calls():
        function = bnb.functional.dequantize_4bit
        return (
            function(packed, state),
            function(A=packed, quant_state=state, quant_type="fp4", blocksize=32),
            function(packed.t(), state),
            function(parameter, state),
        )

    expected = calls()
    empty = torch.full(state.shape, torch.nan, dtype=dtype, device=device)
    # fp4 has two zeros; which one bitsandbytes' CPU build takes depends on the position
    agree = torch.equal if state.quant_type == "fp4" and device == "cpu" else same
    with on() as switched:
        assert all(map(agree, calls(), expected))
        assert bnb.functional.dequantize_4bit(packed, state, out=empty) is empty
        assert agree(empty, expected[0])
        counts = switched.counts()[DEQUANTIZE]
        assert counts == {"kernel": 5, "library": 0, "fused": 0, "reasons": {}}
        with pytest.raises(ValueError, match="requires both absmax and out"):
            bnb.functional.dequantize_4bit(packed)


@pytest.mark.parametrize(
    "field, change",
    [
        ("absmax", strided),
        ("code", strided),
        ("offset", lambda offset: offset.double().view(1)),
        ("blocksize", lambda _: 192),  # no power of two; one block holds all there is
        ("dtype", lambda _: torch.float64),  # which the library refuses, too
    ],
)
def test_a_state_that_the_kernel_refuses_goes_to_the_library(device, field, change):
    """The library's bits or its own error, and one graph where the library has one."""
    packed, state = quantized((64, 256), BF16, device)
    holder = state.state2 if field in ("code", "blocksize") else state
    setattr(holder, field, change(getattr(holder, field)))

    def eager():
        return bnb.functional.dequantize_4bit(packed, state) + 0

    def compiled():
        torch._dynamo.reset()
        return torch.compile(eager, backend="eager", fullgraph=field != "dtype")()

    counts = compare(eager)[DEQUANTIZE]
    assert (counts["kernel"], counts["library"]) == (0, 1)
    assert sum(counts["reasons"].values()) == 1
    compare(compiled)


# Products and their gradients


@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 128), (1, 128)])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradient(make_layer, device, shape, dtype, bias):
    layer = make_layer(128, 80, dtype, nested=bias)
    if bias:
        values = inputs(device, 80, dtype=dtype)
        layer.bias = torch.nn.Parameter(values, requires_grad=False)
    x = inputs(device, *shape, dtype=dtype)
    compare(torch.no_grad()(lambda: layer(x)))
    counts = compare(lambda: through(layer, x))
    assert counts[PRODUCT]["kernel"] + counts[PRODUCT]["fused"] == 1
    assert counts[DEQUANTIZE]["kernel"] == 1


@pytest.mark.parametrize("compute, stored", [(FP16, BF16), (FP32, BF16), (BF16, FP32)])
def test_a_state_of_another_dtype(make_layer, device, compute, stored):
    """Forward dequantizes to the input's dtype, backward to the state's and casts, as bitsandbytes does."""
    layer = make_layer(128, 64, stored)
    layer.compute_dtype = compute
    x = inputs(device, 9, 128, dtype=compute)
    fields = set(vars(layer.weight.quant_state))
    compare(lambda: through(layer, x))
    assert set(vars(layer.weight.quant_state)) == fields  # a used state is saved as before


def test_other_calls_of_the_product_are_the_librarys(device):
    packed, state = quantized((64, 128), BF16, device)
    x = inputs(device, 3, 128)
    short_rows = quantized((64, 80), BF16, device)
    other = copy.deepcopy(state)
    other.state2.blocksize = 128
    calls = {
        "out": (x, packed, state, inputs(device, 3, 64)),
        "a bias to train": (x, packed, state, None, inputs(device, 64).requires_grad_()),
        "no rows": (x[:0], packed, state),
        "quantized as (in, out)": (inputs(device, 3, 64), packed, state),
        "another length": (inputs(device, 3, 50), packed, state),
        "no whole blocks": (inputs(device, 3, 80), *short_rows),
        "no state": (x, packed, None),
        "state2.blocksize": (x, packed, other),
    }
    for name, arguments in calls.items():
        counts = compare(lambda arguments=arguments: bnb.matmul_4bit(*arguments))
        assert counts[PRODUCT]["kernel"] == 0, name

    def each_row():
        return torch.func.vmap(lambda row: bnb.matmul_4bit(row, packed, state))(x[:, None])

    assert compare(each_row)[PRODUCT]["kernel"] == 0
    with on() as switched:
        late = bnb.matmul_4bit
    late(x, packed, state)  # a copy of the replacement only passes calls on
    assert switched.counts()[PRODUCT]["kernel"] == 0


def test_ways_to_train(make_layer, device):
    """Checkpointing, autocast, inference mode, and a switch between forward and backward."""
    layer = make_layer(64, 64, BF16)
    x = inputs(device, 7, 64)

    def autocast(a):
        with torch.autocast(device, FP16):
            return layer(a)

    compare(lambda: through(lambda a: checkpoint(layer, a, use_reentrant=False), x))
    compare(lambda: through(autocast, x))
    compare(torch.inference_mode()(lambda: layer(x).clone()))
    expected = through(layer, x)
    for when in ("forward", "backward"):  # switched on for one of them
        switched = on() if when == "forward" else None
        a = x.clone().requires_grad_()
        y = layer(a)
        switched.off() if switched else on()
        y.backward(y.detach() + 1)
        restore()
        assert same((y.detach(), a.grad), expected), when


def test_threads_see_right_results_while_it_switches(make_layer, device):
    layer = make_layer(64, 32, BF16)
    x = inputs(device, 3, 64)
    expected, stop, failures = through(layer, x), threading.Event(), []

    def work():
        while not stop.is_set():
            found = outcome(lambda: through(layer, x))
            if not same(found, expected):
                failures.append(found)

    # Triton's interpreter runs one kernel at a time; the kernel itself has no such limit.
    threads = [threading.Thread(target=work) for _ in range(3 if x.is_cuda else 1)]
    [thread.start() for thread in threads]
    for _ in range(6):
        with on() as switched:
            stop.wait(0.1)
            counts = switched.counts()
    stop.set()
    [thread.join() for thread in threads]
    assert not failures and counts[DEQUANTIZE]["kernel"]


ROWS = (1, 3, 4, 5, 8, 16, 17, 33, 64, 65, 128, 320, 512, 513, 1536, 1537, 2048)
WEIGHTS = [(1024, 1024), (320, 128), (80, 96), (4096, 1024), (1000, 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("shape", WEIGHTS)
def test_every_token_count(shape, dtype):
    """Whichever product bitsandbytes takes for a number of rows, the result has its bits, and it dequantizes
    nothing itself."""
    packed, state = quantized(shape, dtype, "cuda")
    fused = 0
    for rows in ROWS:
        x = inputs("cuda", rows, shape[1], dtype=dtype)
        counts = compare(lambda x=x: through(lambda a: bnb.matmul_4bit(a, packed, state), x))
        for site in counts.values():
            assert site["library"] == 0, (rows, counts)
        fused += counts[PRODUCT]["fused"]
    assert fused >= 3 or shape[1] % 64  # few rows take the library's fused product, if rows are whole blocks


# Compiled


@pytest.mark.parametrize("part", ["dequantize", "layer"])
def test_compiled(make_layer, device, part):
    """fullgraph, with the kernel as one operator; back to the library's code after; no recompile when it is
    switched on again."""
    layer = make_layer(64, 32, BF16)
    weight, state = layer.weight.data, layer.weight.quant_state
    x = inputs(device, 200, 64)
    backend = torch._dynamo.lookup_backend("inductor" if x.is_cuda else "aot_eager")
    graphs = []

    def spy(graph, arguments):
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return backend(graph, arguments)

    def dequantized(a):
        return a @ bnb.functional.dequantize_4bit(weight, state).t()

    function = dequantized if part == "dequantize" else layer.__call__
    compiled = torch.compile(function, fullgraph=True, backend=spy)
    expected = through(function, x)
    for _ in range(2):
        with on():
            assert same(through(compiled, x), expected)
    assert len(graphs) == 1
    if part == "dequantize":
        assert "nf4_triton" in graphs[0] and "bitsandbytes" not in graphs[0]
    assert same(through(compiled, x), expected)
    assert len(graphs) == 2 and "nf4_triton" not in graphs[1]


# Other libraries, and stand-ins for functions that need them or a GPU


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(name, function): import a function under a library's name. Return its module."""

    def make(name, function):
        module = types.ModuleType(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], function)
        monkeypatch.setitem(sys.modules, name.partition(".")[0], bnb)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    return make


def from_parts(W, absmax, code2, absmax2, offset, blocksize, blocksize2, shape, dtype):
    """Dequantize as Axolotl does, whose own function needs a GPU: tests/long/test_axolotl.py."""
    state = types.SimpleNamespace(shape=shape, dtype=dtype, quant_type="nf4", blocksize=blocksize)
    state.nested, state.absmax, state.offset = True, absmax, offset
    state.state2 = types.SimpleNamespace(absmax=absmax2, code=code2, blocksize=blocksize2, dtype=FP32)
    return oracle(W, state)


def test_axolotl(stand_in, device):
    axolotl = stand_in(AXOLOTL, from_parts)
    packed, state = quantized((64, 256), BF16, device)
    second = state.state2

    def call(weight, code2):
        rest = second.absmax, state.offset, 64, 256, [64, 256], BF16
        return axolotl._ctypes_nf4_dequant(weight, state.absmax, code2, *rest)

    def calls():
        return call(packed, second.code), call(packed.t(), second.code), call(packed, strided(second.code))

    counts = compare(calls, "axolotl")[AXOLOTL]
    assert (counts["kernel"], counts["library"]) == (2, 1)


@pytest.mark.parametrize("dtype, by_kernel", [(BF16, 3), (FP16, 0)])
def test_stacks_of_experts(stand_in, device, dtype, by_kernel):
    """bf16 alone: Unsloth rounds some fp16 experts differently, so those stay its own."""

    def nf4_dequant_triton(packed, quant_state, out_shape=None, out=None):
        result = oracle(packed, quant_state).view(out_shape or quant_state.shape)
        return result if out is None else out.copy_(result)

    stand_in(FAST_DEQUANTIZE, fast_dequantize)
    module = stand_in(EXPERT_STACK, nf4_dequant_triton)
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    packed, state = quantized((4 * 48, 64), dtype, device)
    shape = 4, 48, 64

    def calls():
        function = module.nf4_dequant_triton
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        function(packed, state, shape, out=out)
        return function(packed, state, shape), function(packed.view(4, -1), state), out

    counts = compare(calls, "unsloth")[EXPERT_STACK]
    assert (counts["kernel"], counts["library"]) == (by_kernel, 3 - by_kernel)


def test_experts_of_bitsandbytes(device):
    """A stack of experts as a parameter that is dequantized at each use."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    module = torch.nn.Module()
    module.stack = torch.nn.Parameter(inputs(device, 4, 48, 64))
    parametrize.replace_parameter_4bit(module, "stack", compress_statistics=True, quant_type="nf4")
    counts = compare(lambda: module.stack)[DEQUANTIZE]
    assert (counts["kernel"], counts["library"]) == (1, 0) and module.stack.shape == (4, 48, 64)


def test_unsloth(stand_in, device):
    unsloth = stand_in(FAST_DEQUANTIZE, fast_dequantize)
    packed, state = quantized((48, 64), BF16, device)

    def calls():
        function = unsloth.fast_dequantize
        out = torch.full((48, 64), torch.nan, dtype=BF16, device=device)
        assert function(packed, [1, 2]) == "another format"
        function(packed, state, out=out)
        return function(packed.t(), state, dtype=BF16), function(packed, state, None, True), out

    counts = compare(calls, "unsloth")[FAST_DEQUANTIZE]
    assert (counts["kernel"], counts["library"]) == (3, 0)


@pytest.mark.parametrize("nested", [False, True])
def test_the_branch_inside_the_gpu_operator(stand_in, device, nested):
    """Also if its packed weight is a row. bitsandbytes' code for other devices takes the same arguments."""
    if device == "cpu":
        stand_in(FALLBACK, default_ops._gemm_4bit_default_impl)
    operators = sys.modules[sites.CUDA_OPS]
    packed, state = quantized((48, 128), FP16, device, compress_statistics=nested)
    x = inputs(device, 7, 128)
    scales = [state.absmax, 64, "nf4", None]
    if nested:
        scales = [state.state2.absmax, 64, "nf4", None, state.absmax, state.state2.code, state.offset]

    def calls():
        function = operators._dequant_linear_fallback
        return function(x, packed, [48, 128], *scales), function(x, packed.t(), [48, 128], *scales)

    assert compare(calls)[FALLBACK]["kernel"] == 2


def test_peft_and_transformers_helpers(make_layer):
    integrations = pytest.importorskip("peft.utils.integrations")
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    layer = make_layer(64, 96, BF16)

    def calls():
        return (
            integrations.dequantize_module_weight(layer).data,
            integrations.dequantize_bnb_weight(layer.weight).data,
            dequantize_bnb_weight(layer.weight).data,
        )

    assert compare(calls, "peft", "transformers")[DEQUANTIZE]["kernel"] == 3
