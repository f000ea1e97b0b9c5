"""Switched libraries return the same bits as on their own, eager and compiled, and calls are counted."""

import types

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes.backends.default import ops as default_ops  # noqa: E402

from nf4_triton.core import launch_general  # noqa: E402
from nf4_triton.libraries import axolotl, site, unsloth  # noqa: E402
from nf4_triton.libraries.bitsandbytes import DEQUANTIZE, FALLBACK  # noqa: E402
from nf4_triton.libraries.site import COMPILED  # noqa: E402
from states import fast_dequantize, oracle, strided  # noqa: E402
from switching import (  # noqa: E402
    BF16,
    FP16,
    FP32,
    compare,
    compared,
    from_parts,
    inputs,
    on,
    outcome,
    quantized,
    same,
    through,
)

# bitsandbytes.functional.dequantize_4bit


def test_a_launch_that_could_not_begin_is_the_librarys(monkeypatch, device, logged):
    """A full disk on a compute node does not end training: from then on, the library dequantizes."""
    packed, state = quantized((48, 64), BF16, device)
    expected = bnb.functional.dequantize_4bit(packed, state)
    failures = iter([RuntimeError("CUDA error"), OSError("no space left\nat line 1")])

    def fails(*_):
        raise next(failures)

    with on():
        monkeypatch.setattr(launch_general, "dequantize_weight", fails)
        with pytest.raises(RuntimeError, match="CUDA error"):
            bnb.functional.dequantize_4bit(packed, state)
        for _ in range(2):
            assert same(bnb.functional.dequantize_4bit(packed, state), expected)
    why = f"{DEQUANTIZE}: the kernel could not be launched (OSError: no space left)"
    assert logged() == f"Left to the library: {why}\n"


@pytest.mark.parametrize("options", [{}, {"quant_type": "fp4"}], ids=str)
def test_dequantize_4bit(options, device):
    packed, state = quantized((6, 1024), BF16, device, **options)

    def calls():
        whole = bnb.functional.dequantize_4bit(packed, state)
        row = bnb.functional.dequantize_4bit(A=packed.t(), quant_state=state, quant_type="fp4", blocksize=32)
        # fp4 has two zeros; which one bitsandbytes' CPU build takes depends on the position
        return whole + 0, row + 0, outcome(lambda: bnb.functional.dequantize_4bit(packed))

    assert compared(calls, DEQUANTIZE) == (2, 0)


@pytest.mark.parametrize(
    "field, change",
    [
        ("absmax", strided),
        ("dtype", lambda _: torch.float64),  # the library refuses this, too
    ],
)
def test_a_state_that_the_kernel_refuses_goes_to_the_library(device, field, change):
    """The caller gets the library's bits or its error, in a graph, too."""
    packed, state = quantized((64, 256), BF16, device)
    setattr(state, field, change(getattr(state, field)))

    def eager():
        return bnb.functional.dequantize_4bit(packed, state) + 0

    compiled = torch.compile(eager, backend="eager", fullgraph=field != "dtype")
    assert compared(eager, DEQUANTIZE) == (0, 1)
    compare(compiled)


# Compiled


@pytest.mark.parametrize("part", ["dequantize", "layer"])
def test_compiled(make_layer, device, part):
    """Compiled with fullgraph, the kernel is one operator; afterwards the library's code is back.
    Switching on again recompiles nothing."""
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
        with on() as switched:
            assert same(through(compiled, x), expected)
        assert COMPILED in str(switched) and "Was a model" not in str(switched)
    assert len(graphs) == 1
    if part == "dequantize":
        assert "nf4_triton" in graphs[0] and "bitsandbytes" not in graphs[0]
    assert same(through(compiled, x), expected)
    assert len(graphs) == 2 and "nf4_triton" not in graphs[1]


# Other libraries, and stand-ins for functions that need them or a GPU


def axolotl_calls(function, packed, state):
    second = state.state2
    rest = second.absmax, state.offset, 64, 256, [192, 64], BF16
    yield function(packed.t(), state.absmax, second.code, *rest)
    yield function(packed, state.absmax, strided(second.code), *rest)  # the library's


def fsdp2(data, state, *, out=None, chunk_size=2**26):
    """Stand in for Axolotl's function for FSDP2. The real one: tests/long/test_axolotl.py."""
    result = oracle(data.reshape(-1, 1), state)
    return result if out is None else out.copy_(result)


def fsdp2_calls(function, packed, state):
    """Transposed weights, whose result is not transposed, and other chunk sizes are not counted."""
    yield function(packed.t(), state)
    yield function(packed, state, chunk_size=2**20)
    out = torch.full((192, 64), torch.nan, dtype=BF16, device=packed.device)
    yield function(data=packed, state=state, out=out, chunk_size=2**26)
    yield function(*quantized((3, 64, 8), FP16, packed.device, compress_statistics=False))
    yield function(packed, state, out=out.float())  # the library's


def unsloth_calls(function, packed, state):
    out = torch.full((192, 64), torch.nan, dtype=BF16, device=packed.device)
    yield function(packed, [1, 2])  # another format
    yield function(packed, state, out=out)
    yield function(packed.t(), state, None, True, dtype=BF16)


def expert_stack(packed, quant_state, out_shape=None, out=None):
    result = oracle(packed, quant_state).view(out_shape or quant_state.shape)
    return result if out is None else out.copy_(result)


def expert_stack_calls(function, packed, state):
    """Only bf16: Unsloth rounds some fp16 experts differently, so it keeps those."""
    out = torch.full((6, 32, 64), torch.nan, dtype=BF16, device=packed.device)
    yield function(packed, state, (6, 32, 64), out=out)
    yield function(packed.view(4, -1), state)
    state.dtype = FP16
    yield function(packed, state)


def axolotl_experts(raw_param, quant_state, active_experts, expert_shape):
    return oracle(raw_param, quant_state).view(-1, *expert_shape)[active_experts]


def axolotl_experts_calls(function, packed, state):
    ids = torch.tensor([5, 0, 5], device=packed.device)
    mask = torch.arange(6, device=packed.device) > 2
    yield function(packed, state, ids.int(), (32, 64))
    yield function(packed, state, mask, (32, 64))  # the library handles this one and the next ones
    yield function(packed.flatten().view(FP16), state, ids, (32, 64))


def unsloth_experts(param, experts, target_dtype=None):
    param = getattr(param, "base_layer", param)
    shape = getattr(param, "_original_shape", param.quant_state.shape)
    result = oracle(param.data, param.quant_state).view(shape)[experts]
    return result if target_dtype is None else result.to(target_dtype)


def unsloth_experts_calls(function, packed, state):
    ids = torch.tensor([5, 0, 5], device=packed.device)
    param = bnb.nn.Params4bit(packed, quant_state=state, bnb_quantized=True)
    param._original_shape = torch.Size([6, 32, 64])
    yield function(param, ids)
    yield function(types.SimpleNamespace(base_layer=param), slice(1, 3), FP32)
    yield function(param, slice(0, 6, 2))  # the library handles this one and the next ones
    state.dtype = FP16
    yield function(param, ids)


def fallback_calls(function, packed, state):
    """Also if the packed weight is a row."""
    x = inputs(packed.device, 7, 64)
    scales = state.state2.absmax, 64, "nf4", None, state.absmax, state.state2.code, state.offset
    yield function(x, packed, [192, 64], *scales)
    yield function(x, packed.t(), [192, 64], *scales)
    packed, state = quantized((192, 64), BF16, packed.device, compress_statistics=False)
    for absmax in (state.absmax, strided(state.absmax)):  # the latter is the library's
        yield function(x, packed, [192, 64], absmax, 64, "nf4")


STAND_INS = {  # {function: (its library, stand-in, calls, by the kernel and by the library)}
    unsloth.FAST_DEQUANTIZE: ("unsloth", fast_dequantize, unsloth_calls, (2, 0)),
    unsloth.EXPERT_STACK: ("unsloth", expert_stack, expert_stack_calls, (2, 1)),
    unsloth.EXPERTS: ("unsloth", unsloth_experts, unsloth_experts_calls, (2, 2)),
    axolotl.FSDP2: ("axolotl", fsdp2, fsdp2_calls, (2, 1)),
    axolotl.DEQUANT: ("axolotl", from_parts, axolotl_calls, (1, 1)),
    axolotl.EXPERTS: ("axolotl", axolotl_experts, axolotl_experts_calls, (1, 2)),
    FALLBACK: ("bitsandbytes", default_ops._gemm_4bit_default_impl, fallback_calls, (3, 1)),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins(fake_module, device, name):
    library, function, calls, answered = STAND_INS[name]
    functions = {unsloth.FAST_DEQUANTIZE: fast_dequantize, axolotl.DEQUANT: from_parts, name: function}
    for path, stand_in in functions.items():
        module, _, attribute = path.rpartition(".")
        fake_module(module, **{attribute: stand_in})

    def all_calls():
        return tuple(calls(site.current(name), *quantized((192, 64), BF16, device)))

    assert compared(all_calls, name, library) == answered
