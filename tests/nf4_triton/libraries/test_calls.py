"""What switched libraries compute: the same bits as alone, eager and compiled, and counted."""

import copy
import itertools
import sys
import threading
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes.autograd import _functions  # noqa: E402
from bitsandbytes.autograd._functions import MatMul4Bit  # noqa: E402
from bitsandbytes.backends.default import ops as default_ops  # noqa: E402

from nf4_triton import launch  # noqa: E402
from nf4_triton.libraries import axolotl, unsloth  # noqa: E402
from nf4_triton.libraries.bitsandbytes import CUDA_OPS, DEQUANTIZE, FALLBACK, PRODUCT  # noqa: E402
from nf4_triton.libraries.switch import restore  # noqa: E402
from states import fast_dequantize, oracle, strided  # noqa: E402
from switching import (  # noqa: E402
    BF16,
    FP16,
    FP32,
    compare,
    compared,
    inputs,
    on,
    outcome,
    quantized,
    same,
    through,
)

# bitsandbytes.functional.dequantize_4bit


def fails(error):
    def launched(*arguments, **named):
        raise error

    return launched


def test_a_launch_that_could_not_begin_is_the_librarys(monkeypatch, device, logged):
    """A full disk on a compute node ends no training. After three failures the library keeps the function."""
    packed, state = quantized((48, 64), BF16, device)
    x = inputs(device, 600, 64)

    def calls():
        dequantized = bnb.functional.dequantize_4bit(packed, state)
        return dequantized, through(lambda a: bnb.matmul_4bit(a, packed, state), x)

    expected = calls()
    why = "the kernel could not be launched (OSError: no space left)"
    with on() as switched:
        monkeypatch.setattr(launch, "_your_dequantize_nf4", fails(RuntimeError("CUDA error")))
        with pytest.raises(RuntimeError, match="CUDA error"):
            bnb.functional.dequantize_4bit(packed, state)
        for name in ("_your_dequantize_nf4", "dequantize_packed"):
            monkeypatch.setattr(launch, name, fails(OSError("no space left")))
        for _ in range(5):
            assert same(calls(), expected)
        assert switched.counts()[DEQUANTIZE]["reasons"] == {why: 3}
        assert switched.report[DEQUANTIZE] == switched.report[PRODUCT] == why
        assert DEQUANTIZE in switched.summary() and f"Left to the library: {PRODUCT}: {why}" in str(switched)
    assert logged().count("falls back to the library") == 2


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


def test_beside_a_gpu_the_cpus_product_is_the_librarys(fake_module):
    packed, state = quantized((64, 128))
    fake_module(CUDA_OPS, _gemm_4bit_custom_max_m=0)
    x = inputs("cpu", 600, 128)
    assert compared(lambda: bnb.matmul_4bit(x, packed, state), PRODUCT) == (0, 0)


class SavesItsWeight(torch.autograd.Function):
    """bitsandbytes' product as its pull request 2035 makes it: the packed weight is a saved tensor."""

    @staticmethod
    def forward(ctx, *arguments):
        result = MatMul4Bit.forward(ctx, *arguments)
        ctx.save_for_backward(ctx.tensors[1])
        return result

    @staticmethod
    def backward(ctx, grad):
        ctx.tensors = None, *ctx.saved_tensors
        return MatMul4Bit.backward(ctx, grad)


def streamed(layers, x):
    """Return the result and gradient of checkpointed layers whose weights take turns in two buffers."""
    buffers = itertools.cycle([torch.empty_like(layers[0][0]) for _ in range(2)])

    def layer(x, packed, state):
        weight = torch.nn.Parameter(next(buffers).copy_(packed), requires_grad=False)
        return bnb.matmul_4bit(x, weight, state)

    def model(x):
        for packed, state in layers:
            x = checkpoint(layer, x, packed, state, use_reentrant=False)
        return x

    return through(model, x)


@pytest.mark.parametrize("function", [MatMul4Bit, SavesItsWeight])
def test_gradients_of_layers_that_share_buffers(monkeypatch, device, function):
    """Today bitsandbytes' own gradients are wrong here: its backward pass reads another layer's weight."""
    layers = [quantized((64, 64), BF16, device) for _ in range(4)]
    for index, (packed, _) in enumerate(layers):
        packed.copy_(packed.roll(64 * index))
    x = inputs(device, 600, 64)

    def resident(x):
        for packed, state in layers:
            x = bnb.matmul_4bit(x, packed, state)
        return x

    expected = through(resident, x)
    monkeypatch.setattr(_functions, "MatMul4Bit", function)
    with on() as switched:
        assert switched.report[PRODUCT] == "kernel"
        assert same(streamed(layers, x), expected)
    assert same(streamed(layers, x), expected) == (function is SavesItsWeight)


def test_hooks_on_saved_tensors(make_layer, device):
    """FSDP frees and refills the weight, save_on_cpu moves it; other hooks skip what is a Parameter."""
    layer = make_layer(64, 64, BF16)
    x = inputs(device, 600, 64)
    offloaded = []

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            offloaded.append(tensor.nbytes)
        return tensor

    def hooked(a):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return bnb.matmul_4bit(layer(a), layer.weight.t(), layer.weight.quant_state)

    def on_cpu(a):
        with torch.autograd.graph.save_on_cpu():
            return layer(a)

    def freed(a):
        y, values = layer(a), layer.weight.data.clone()
        storage = layer.weight.untyped_storage()
        size = storage.size()
        storage.resize_(0)
        storage.resize_(size)
        layer.weight.data.copy_(values)
        return y

    for way in (hooked, on_cpu, freed):
        compare(lambda way=way: through(way, x))
    assert not offloaded


def test_a_weight_changed_in_place_is_an_error(device):
    packed, state = quantized((64, 64), BF16, device)
    with on():
        y = bnb.matmul_4bit(inputs(device, 600, 64).requires_grad_(), packed, state)
        packed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


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


def from_parts(W, absmax, code2, absmax2, offset, blocksize, blocksize2, shape, dtype):
    """Dequantize as Axolotl does, whose own function needs a GPU: tests/long/test_axolotl.py."""
    state = types.SimpleNamespace(shape=shape, dtype=dtype, quant_type="nf4", blocksize=blocksize)
    state.nested, state.absmax, state.offset = True, absmax, offset
    state.state2 = types.SimpleNamespace(absmax=absmax2, code=code2, blocksize=blocksize2, dtype=FP32)
    return oracle(W, state)


def test_axolotl(stand_in, device):
    module = stand_in(axolotl.DEQUANT, from_parts)
    packed, state = quantized((64, 256), BF16, device)
    second = state.state2

    def call(weight, code2):
        rest = second.absmax, state.offset, 64, 256, [64, 256], BF16
        return module._ctypes_nf4_dequant(weight, state.absmax, code2, *rest)

    def calls():
        return call(packed, second.code), call(packed.t(), second.code), call(packed, strided(second.code))

    assert compared(calls, axolotl.DEQUANT, "axolotl") == (2, 1)


def whole_then_select(packed, state, shape, rows, target_dtype=None):
    result = oracle(packed, state).view(shape)[rows]
    return result if target_dtype is None else result.to(target_dtype)


def step(experts, scale):
    """Return the loss of a layer with these experts, and the gradient of what is trained."""
    scale = scale.clone().requires_grad_()
    loss = (experts.float() * scale).sin().mean()
    loss.backward()
    return loss.detach(), scale.grad


def test_experts_that_axolotl_selects(stand_in, device):
    def _selective_dequant_bnb4(raw_param, quant_state, active_experts, expert_shape):
        return whole_then_select(raw_param, quant_state, (-1, *expert_shape), active_experts.to(device))

    stand_in(axolotl.DEQUANT, from_parts)
    module = stand_in(axolotl.EXPERTS, _selective_dequant_bnb4)
    packed, state = quantized((6, 20, 64), BF16, device)
    flat = copy.deepcopy(state)
    flat.shape = torch.Size([6 * 20 * 64])
    ids = torch.tensor([0, 2, 5], device=device)

    def select(*arguments):
        return lambda: step(module._selective_dequant_bnb4(*arguments), ids.new_ones(64).float())

    calls = {
        "the state's shape": (packed, state, ids, (20, 64)),
        "int32": (packed, flat, ids.int(), (20, 64)),
        "none": (packed, state, ids[:0], (20, 64)),
    }
    for name, arguments in calls.items():
        assert compared(select(*arguments), axolotl.EXPERTS, "axolotl") == (1, 0), name
    others = {
        "a mask": (packed, state, torch.arange(6, device=device) % 2 == 0, (20, 64)),
        "other storage": (packed.view(1, -1).view(FP16), state, ids, (20, 64)),
        "no whole number of experts": (packed, state, ids, (70, 64)),
        "no multiple of 8": (packed, state, ids, (10, 2)),
    }
    for name, arguments in others.items():
        assert compared(select(*arguments), axolotl.EXPERTS, "axolotl") == (0, 1), name


@pytest.mark.parametrize("module", [unsloth.EXPERTS.rpartition(".")[0], *unsloth.COPIES])
def test_experts_that_unsloth_selects(stand_in, device, module):
    def _dequantize_bnb4bit_experts(param, experts, target_dtype=None):
        param = getattr(param, "base_layer", param)
        shape = getattr(param, "_original_shape", None) or param.quant_state.shape
        return whole_then_select(param.data, param.quant_state, shape, experts, target_dtype)

    stand_in(unsloth.FAST_DEQUANTIZE, fast_dequantize)
    name = f"{module}._dequantize_bnb4bit_experts"
    module = stand_in(name, _dequantize_bnb4bit_experts)
    ids = torch.tensor([5, 0, 5], device=device)

    def call(param, *arguments):
        call = lambda: step(module._dequantize_bnb4bit_experts(param, *arguments), ids.new_ones(64).float())  # noqa: E731
        return compared(call, name, "unsloth")

    def stack(dtype):
        packed, state = quantized((6, 20, 64), dtype, device)
        return bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True)

    param = stack(BF16)
    for experts in (ids, slice(1, 3), slice(None), slice(4, 4)):
        assert call(param, experts) == (1, 0), experts
    assert call(types.SimpleNamespace(base_layer=param), ids, FP32) == (1, 0)
    assert call(param, slice(0, 6, 2)) == call(stack(FP16), ids) == (0, 1)
    param.quant_state.shape = torch.Size([6 * 20, 64])
    param._original_shape = torch.Size([6, 20, 64])
    assert call(param, ids) == (1, 0)


@pytest.mark.parametrize("dtype, by_kernel", [(BF16, 3), (FP16, 0)])
def test_stacks_of_experts(stand_in, device, dtype, by_kernel):
    """bf16 alone: Unsloth rounds some fp16 experts differently, so those stay its own."""

    def nf4_dequant_triton(packed, quant_state, out_shape=None, out=None):
        result = oracle(packed, quant_state).view(out_shape or quant_state.shape)
        return result if out is None else out.copy_(result)

    stand_in(unsloth.FAST_DEQUANTIZE, fast_dequantize)
    module = stand_in(unsloth.EXPERT_STACK, nf4_dequant_triton)
    packed, state = quantized((4 * 48, 64), dtype, device)
    shape = 4, 48, 64

    def calls():
        function = module.nf4_dequant_triton
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        function(packed, state, shape, out=out)
        return function(packed, state, shape), function(packed.view(4, -1), state), out

    assert compared(calls, unsloth.EXPERT_STACK, "unsloth") == (by_kernel, 3 - by_kernel)


def test_experts_of_bitsandbytes(device):
    """A stack of experts as a parameter that is dequantized at each use."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    module = torch.nn.Module()
    module.stack = torch.nn.Parameter(inputs(device, 4, 48, 64))
    parametrize.replace_parameter_4bit(module, "stack", compress_statistics=True, quant_type="nf4")
    assert compared(lambda: module.stack, DEQUANTIZE) == (1, 0) and module.stack.shape == (4, 48, 64)


def test_unsloth(stand_in, device):
    module = stand_in(unsloth.FAST_DEQUANTIZE, fast_dequantize)
    packed, state = quantized((48, 64), BF16, device)

    def calls():
        function = module.fast_dequantize
        out = torch.full((48, 64), torch.nan, dtype=BF16, device=device)
        assert function(packed, [1, 2]) == "another format"
        function(packed, state, out=out)
        return function(packed.t(), state, dtype=BF16), function(packed, state, None, True), out

    assert compared(calls, unsloth.FAST_DEQUANTIZE, "unsloth") == (3, 0)


@pytest.mark.parametrize("nested", [False, True])
def test_the_branch_inside_the_gpu_operator(stand_in, device, nested):
    """Also if its packed weight is a row. bitsandbytes' code for other devices takes the same arguments."""
    if device == "cpu":
        stand_in(FALLBACK, default_ops._gemm_4bit_default_impl)
    operators = sys.modules[CUDA_OPS]
    packed, state = quantized((48, 128), FP16, device, compress_statistics=nested)
    x = inputs(device, 7, 128, dtype=FP16)
    scales = [state.absmax, 64, "nf4", None]
    if nested:
        scales = [state.state2.absmax, 64, "nf4", None, state.absmax, state.state2.code, state.offset]

    def calls():
        function = operators._dequant_linear_fallback
        return function(x, packed, [48, 128], *scales), function(x, packed.t(), [48, 128], *scales)

    assert compared(calls, FALLBACK) == (2, 0)


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

    assert compared(calls, DEQUANTIZE, "peft", "transformers") == (3, 0)
