"""The kernel bit for bit against bitsandbytes (and on a GPU both Unsloths), outputs poisoned with NaN first.

Without a GPU the kernel runs in Triton's interpreter. With one, its ways are forced in turn: assembly, bf16
rounding in integers and cache hints on and off, and all of a T4's decisions.
"""

import copy
import functools
import itertools

import pytest
import torch

from helpers.nf4 import layers, reference
from helpers.puzzle import checks as evidence, protocol

pytest.importorskip("bitsandbytes")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Whole, partial and single bytes, words, blocks and tiles (2048 elements up to 2**21, 8192 above); odd tails.
SIZES = [1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 127, 129, 2047, 2048, 2049, 2055, 4097, 16383, 33 * 70]
GPU_SIZES = [2**21, 2**21 + 1, 2**21 + 8191, 2**21 + 4096 + 72]


def on_gpu(**forced):
    """A test parameter: what is forced for one run on the GPU."""
    return pytest.param(forced, id=",".join(f"{k}={v}" for k, v in forced.items()), marks=pytest.mark.gpu)


OWN = pytest.param({}, id="own")
WAYS = [OWN, on_gpu(asm=True), on_gpu(asm=False), on_gpu(card="t4")]
SWITCHES = [
    on_gpu(asm=asm, int_bf16=int_bf16, hints=hints)
    for asm, int_bf16, hints in itertools.product((True, False), repeat=3)
]


@pytest.fixture(params=WAYS)
def way(request, kernel):
    """One way through the kernel; a forced one is released after the test."""
    if not request.param:
        yield request.param
        return
    if request.param.get("int_bf16") is False and kernel.settings().int_bf16:
        pytest.skip("this card has no bf16 conversion of its own")
    with kernel.force(**request.param):
        yield request.param


def agree(result, expected, quant_type="nf4"):
    """Bit equality; the sign of fp4's code 8 varies in bitsandbytes' CPU code and is not compared there."""
    if quant_type == "fp4" and not expected.is_cuda:
        result, expected = result + 0.0, expected + 0.0
    return reference.same_bits(result, expected)


def poisoned(kernel, layer, before=0):
    """The kernel's result, written into NaN between two guards; fails where a guard was overwritten.

    before: extra elements before `out`, to give it another alignment.
    """
    state = layer.weight.quant_state
    n, guard = state.shape.numel(), 64
    memory = torch.full(
        (2 * guard + before + n,), float("nan"), dtype=state.dtype, device=layer.weight.device
    )
    first = guard + before
    out = memory[first : first + n].view(state.shape)
    result = kernel._your_dequantize_nf4(layer.weight, state, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert memory[:first].isnan().all() and memory[first + n :].isnan().all(), "written out of bounds"
    return result


@functools.cache
def layer_and_weight(n, dtype, nested, quant_type, device):
    """A layer of one row, and what bitsandbytes makes of it; both must be left as they are."""
    layer = layers.quantized_layer(n, 1, dtype, nested=nested, quant_type=quant_type, device=device, seed=n)
    return layer, protocol.expected(layer)


@pytest.mark.parametrize("way", [OWN, *SWITCHES, WAYS[-1]], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_with_every_scale_code(kernel, device, way, dtype):
    layer = evidence.every_code(dtype, device)
    expected = protocol.expected(layer)
    assert reference.same_bits(poisoned(kernel, layer), expected)
    assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_layers_of_all_sizes(kernel, device, way, dtype, nested, quant_type):
    for n in SIZES + (GPU_SIZES if device == "cuda" else []):
        layer, expected = layer_and_weight(n, dtype, nested, quant_type, device)
        result = poisoned(kernel, layer)
        if layer.weight.shape[0] == 1:
            result = result.t().reshape(expected.shape)
        assert agree(result, expected, quant_type), (n, reference.different(result, expected))


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_blocksizes(kernel, make_layer, way, blocksize):
    """Eager, as on a CPU bitsandbytes compiles its code from blocksize 2048 on, for seconds."""
    for nested, size in itertools.product((True, False), ((128, 96), (8291, 1))):
        layer = make_layer(*size, torch.bfloat16, nested=nested, blocksize=blocksize)
        with torch.compiler.set_stance("force_eager"):
            expected = protocol.expected(layer)
        assert reference.same_bits(poisoned(kernel, layer), expected), (nested, size)


@pytest.mark.parametrize("blocksize2", [1, 2, 64, 128, 1024])
def test_second_level_blocksizes(kernel, make_layer, way, blocksize2):
    """bitsandbytes always makes 256; the oracle knows the others."""
    layer = make_layer(256, 64, torch.bfloat16)
    state2 = layer.weight.quant_state.state2
    state2.blocksize = blocksize2
    state2.absmax = torch.rand(256, device=layer.weight.device) + 0.1
    assert reference.same_bits(
        poisoned(kernel, layer), reference.dequantize(layer.weight, layer.weight.quant_state)
    )


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # the interpreter's NumPy
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_scales(kernel, make_layer, way, dtype):
    """Zero, subnormal, huge, infinite, NaN and negative scales, flushed as bitsandbytes does there."""
    values = [1e-38, 3e-39, 1.2e-38, 2e-38, 1e-40, 5e-45, -3e-39, 3e38, 1e30, 6e4, 0.0, -0.0, -1.0]
    values += [float("inf"), -float("inf"), float("nan")]
    layer = make_layer(512, len(values), dtype, nested=False, blocksize=512)
    layer.weight.data.copy_(torch.arange(256).repeat(len(values)).view(-1, 1))
    state = layer.weight.quant_state
    state.absmax.copy_(torch.tensor(values))
    assert reference.same_bits(poisoned(kernel, layer), reference.dequantize(layer.weight, state))
    if layer.weight.is_cuda:
        assert reference.same_bits(poisoned(kernel, layer), protocol.expected(layer))


def test_subnormal_nested_scales(kernel, make_layer, way):
    for offset, dtype in itertools.product((0.0, 1e-38, -1e-39), DTYPES):
        layer = make_layer(64, 512, dtype)
        state = layer.weight.quant_state
        state.absmax.copy_(torch.arange(512) // 2)
        state.state2.absmax.copy_(torch.tensor([2e-38, 5e-39]))
        state.offset.fill_(offset)
        assert reference.same_bits(poisoned(kernel, layer), reference.dequantize(layer.weight, state)), offset


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32])
def test_quant_storage(kernel, make_layer, way, storage):
    """FSDP-QLoRA keeps the packed bytes in a floating-point tensor."""
    layer = make_layer(128, 96, torch.bfloat16)
    expected = protocol.expected(layer)
    weight = layer.weight.data.view(-1).view(storage).view(-1, 1)
    result = kernel._your_dequantize_nf4(weight, layer.weight.quant_state)
    assert reference.same_bits(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_weight(kernel, make_layer, way, dtype):
    layer = make_layer(128, 96, dtype)
    result = kernel._your_dequantize_nf4(layer.weight.t(), layer.weight.quant_state)
    assert result.shape == (128, 96) and result.stride() == (1, 128)
    assert reference.same_bits(result.t(), protocol.expected(layer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_weight_and_output(kernel, make_layer, way, dtype):
    """A weight that starts at any byte, an output that starts at any element."""
    layer = make_layer(8191, 1, dtype)
    expected, state = protocol.expected(layer), layer.weight.quant_state
    packed = layer.weight.data.view(-1)
    for skip in (0, 1, 2, 3, 4):
        memory = torch.cat([packed.new_full((skip,), 0xEE), packed])
        weight = memory[skip:].view(-1, 1)
        assert reference.same_bits(kernel._your_dequantize_nf4(weight, state), expected), (
            f"weight + {skip} bytes"
        )
        assert reference.same_bits(poisoned(kernel, layer, before=skip), expected), f"out + {skip} elements"


@pytest.mark.parametrize("shape", [(3, 40, 64), (7680,), (5, 1, 2, 768)])
def test_other_ranks(kernel, make_layer, way, shape):
    layer = make_layer(7680, 1, torch.float16)
    state = copy.copy(layer.weight.quant_state)
    state.shape = torch.Size(shape)
    result = kernel._your_dequantize_nf4(layer.weight, state)
    assert result.shape == shape
    assert reference.same_bits(result.reshape(1, -1), protocol.expected(layer))


def test_drop_in_for_fast_dequantize(kernel, make_layer):
    layer = make_layer(128, 96, torch.bfloat16)
    weight, state, expected = layer.weight, layer.weight.quant_state, protocol.expected(layer)
    assert kernel.your_fast_dequantize(weight) is weight, "without a state the weight comes back"
    out = torch.full(state.shape, float("nan"), dtype=state.dtype, device=weight.device)
    assert kernel.your_fast_dequantize(weight, state, out=out).data_ptr() == out.data_ptr()
    results = [
        out,
        kernel.your_fast_dequantize(weight, state),
        kernel.your_fast_dequantize(weight, state, use_global_buffer=True, dtype=torch.float16),
        kernel.your_fast_dequantize(weight.t(), state).t(),
    ]
    assert all(reference.same_bits(result, expected) for result in results)


def test_repeated_calls_stay_exact(kernel, make_layer, way):
    """The second call takes another way (a stored plan), and other layers come in between."""
    made = [make_layer(128, 64 + 64 * i, dtype, seed=i) for i, dtype in enumerate(DTYPES)]
    for _ in range(3):
        for layer in made:
            assert reference.same_bits(kernel.your_dequantize_nf4(layer), protocol.expected(layer))


@pytest.mark.parametrize("way", [OWN, *SWITCHES, WAYS[-1]], indirect=True)
def test_the_ways_are_really_forced(kernel, way):
    """What was forced is what `settings` decides by, inside and not outside of the block."""
    found = kernel.settings()
    for name, value in way.items():
        if name != "card":
            assert getattr(found, name) == value
    if way.get("card") == "t4":
        assert found.capability == (7, 5) and found.int_bf16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_against_every_baseline_on_the_gpu(kernel, make_layer, dtype):
    """At the protocol's sizes, by the card's own way and by a T4's."""
    real = [evidence.every_code(dtype, "cuda")]
    real += [make_layer(*size, dtype) for size in ((1024, 4096), (2048, 8192), (14336, 4096), (4096, 14336))]
    for baseline in protocol.baselines().values():
        assert baseline.fn, f"{baseline.label}: {baseline.reason}"
        for layer in real:
            expected = baseline.fn(layer).detach()
            assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected), baseline.label
            with kernel.force(card="t4"):
                assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected), baseline.label
