"""The oracle against bitsandbytes itself, bit for bit."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from helpers.nf4 import reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BLOCKSIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def functional():
    return pytest.importorskip("bitsandbytes.functional")


def library(functional, packed, state, stance="force_eager"):
    """bitsandbytes' own result; on the CPU through one long row, and from blocksize 2048 on not compiled.

    Its AVX512 path (0.50.2) takes the wrong blocks when a row is not a whole number of blocks.
    """
    if packed.is_cuda:
        return functional.dequantize_4bit(packed, state)
    shape, state.shape = state.shape, torch.Size([1, state.shape.numel()])
    try:
        with torch.compiler.set_stance(stance):
            return functional.dequantize_4bit(packed.reshape(-1, 1), state).reshape(shape)
    finally:
        state.shape = shape


def agree(result, expected, quant_type):
    """Bit equality; on the CPU the sign of bitsandbytes' fp4 code 8 varies with its position: ignored."""
    if quant_type == "fp4" and not expected.is_cuda:
        result, expected = result + 0.0, expected + 0.0
    return reference.same_bits(result, expected)


def flat_state(functional, absmax, n, dtype, quant_type="nf4", blocksize=64):
    code = functional.get_4bit_type(quant_type, device=absmax.device)
    return functional.QuantState(
        absmax, shape=torch.Size([1, n]), code=code, blocksize=blocksize, quant_type=quant_type, dtype=dtype
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_random_layers(functional, quant_type, nested, device):
    """Every blocksize and dtype; sizes of whole blocks, ending inside a block, and odd."""
    torch.manual_seed(3407)
    for blocksize, dtype in itertools.product(BLOCKSIZES, DTYPES):
        for n in (64 * 64, 257 * 192, 33 * 70, 4097, 127, 3):
            weight = torch.randn(1, n, dtype=dtype, device=device) * 0.05
            packed, state = functional.quantize_4bit(
                weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
            )
            expected = library(functional, packed, state)
            assert agree(reference.dequantize(packed, state), expected, quant_type), (blocksize, dtype, n)


def test_what_the_library_compiles_on_a_cpu(functional):
    """Two blocks and one element: compiled and eager."""
    packed, state = functional.quantize_4bit(
        torch.randn(1, 4097, dtype=torch.bfloat16), blocksize=2048, quant_type="nf4"
    )
    for stance in ("default", "force_eager"):
        expected = library(functional, packed, state, stance)
        assert reference.same_bits(reference.dequantize(packed, state), expected), stance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_every_byte_with_every_scale_code(functional, quant_type, dtype, device):
    """256 bytes x 256 absmax codes: 2048 blocks of 32 bytes, block k with absmax code k // 8."""
    packed, state = functional.quantize_4bit(
        torch.randn(2048, 64, device=device), quant_type=quant_type, compress_statistics=True
    )
    packed.copy_(torch.arange(256, device=device, dtype=torch.uint8).repeat(256).view(-1, 1))
    state.absmax.copy_(torch.arange(2048, device=device) // 8)
    state.state2.absmax.copy_(torch.rand_like(state.state2.absmax) + 0.01)
    state.dtype = dtype
    assert agree(reference.dequantize(packed, state), library(functional, packed, state), quant_type)


@pytest.mark.parametrize("device", DEVICES)
def test_transposed_weight(functional, device):
    packed, state = functional.quantize_4bit(torch.randn(128, 64, device=device), quant_type="nf4")
    result = reference.dequantize(packed.t(), state)
    assert result.shape == (64, 128) and result.stride() == (1, 64)
    assert reference.same_bits(result, functional.dequantize_4bit(packed.t(), state))


@pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_quant_storage(functional, storage):
    packed, state = functional.quantize_4bit(torch.randn(64, 128), quant_type="nf4", quant_storage=storage)
    assert packed.dtype == storage
    assert reference.same_bits(reference.dequantize(packed, state), library(functional, packed, state))


def test_code_of_the_state_is_ignored_as_in_bitsandbytes(functional):
    packed, state = functional.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
    expected = functional.dequantize_4bit(packed, state)
    state.code = torch.full((16,), float("nan"))
    assert reference.same_bits(functional.dequantize_4bit(packed, state), expected)
    assert reference.same_bits(reference.dequantize(packed, state), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_scales(functional, dtype, device):
    """Subnormal, infinite, NaN, negative and zero scales, flushed as the device's build flushes."""
    values = [float("inf"), -float("inf"), float("nan"), -1.0, 3e38, 1e30, 0.0, -0.0]
    if device == "cuda" or dtype != torch.bfloat16:  # AVX512's own bf16 conversion flushes too
        values += [1e-38, 3e-39, 1.2e-38, 2e-38, 1e-40, 5e-45, -3e-39]
    packed = torch.arange(256, dtype=torch.uint8, device=device).repeat(len(values)).view(-1, 1)
    state = flat_state(
        functional, torch.tensor(values, device=device), 512 * len(values), dtype, blocksize=512
    )
    assert reference.same_bits(reference.dequantize(packed, state), functional.dequantize_4bit(packed, state))


@pytest.mark.gpu
def test_products_next_to_the_smallest_normal_number_on_the_gpu(functional):
    """Products within half a subnormal step of 2**-126, where rounding and flushing could be swapped."""
    code = torch.tensor(reference.NF4, dtype=torch.float64)
    near = (2.0**-126 / code[code != 0]).abs().to(torch.float32)
    scales = torch.cat([near, torch.nextafter(near, near * 0), torch.nextafter(near, near * 2)]).cuda()
    packed = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(len(scales)).view(-1, 1)
    state = flat_state(functional, scales, 512 * len(scales), torch.float32, blocksize=512)
    assert reference.same_bits(reference.dequantize(packed, state), functional.dequantize_4bit(packed, state))


@pytest.mark.gpu
def test_subnormal_nested_scales_on_the_gpu(functional):
    packed, state = functional.quantize_4bit(
        torch.randn(512, 64, device="cuda"), compress_statistics=True, quant_type="nf4"
    )
    state.absmax.copy_(torch.arange(512, device="cuda") // 2)
    state.state2.absmax.copy_(torch.tensor([2e-38, 5e-39], device="cuda"))
    state.dtype = torch.float32
    for offset in (0.0, 1e-38, -1e-39):
        state.offset = torch.tensor(offset, device="cuda")
        assert reference.same_bits(
            reference.dequantize(packed, state), functional.dequantize_4bit(packed, state)
        )


def test_flush_keeps_the_sign_and_spares_normal_numbers():
    tiny = torch.finfo(torch.float32).tiny
    x = torch.tensor([tiny, -tiny, tiny / 2, -tiny / 2, 0.0, -0.0, float("nan"), -float("inf")])
    expected = torch.tensor([tiny, -tiny, 0.0, -0.0, 0.0, -0.0, float("nan"), -float("inf")])
    assert reference.same_bits(reference._flush(x), expected)


@pytest.mark.gpu
def test_fp4_has_a_negative_zero(functional):
    packed = torch.full((32, 1), 0x88, dtype=torch.uint8, device="cuda")
    state = flat_state(functional, torch.ones(1, device="cuda"), 64, torch.float32, "fp4")
    result = reference.dequantize(packed, state)
    assert torch.signbit(result).all()
    assert reference.same_bits(result, functional.dequantize_4bit(packed, state))


def test_zero_elements():
    state = SimpleNamespace(
        shape=torch.Size([0, 64]),
        dtype=torch.float16,
        blocksize=64,
        quant_type="nf4",
        absmax=torch.empty(0),
        state2=None,
    )
    result = reference.dequantize(torch.empty(0, 1, dtype=torch.uint8), state)
    assert result.shape == (0, 64) and result.dtype == torch.float16


@pytest.mark.parametrize("change, message", [
    (dict(quant_type="int8"), "quant_type"),
    (dict(dtype=torch.float64), "float64"),
    (dict(absmax=torch.zeros(3, dtype=torch.uint8)), "absmax holds 3 blocks"),
    (dict(absmax=torch.zeros(64)), "uint8 absmax"),
    (dict(state2=None), "floating-point absmax"),
    (dict(offset=None), "offset"),
    (dict(packing_format_for_cpu=True), "repacked this layer"),
    (dict(shape=torch.Size([65, 64])), "weight holds 2048 bytes"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")  # fmt: skip
def test_malformed_states(functional, change, message):
    packed, state = functional.quantize_4bit(torch.randn(64, 64), compress_statistics=True, quant_type="nf4")
    for name, value in change.items():
        setattr(state, name, value)
    with pytest.raises(ValueError, match=message):
        reference.dequantize(packed, state)


def test_short_second_level(functional):
    packed, state = functional.quantize_4bit(torch.randn(512, 64), compress_statistics=True, quant_type="nf4")
    code, state.state2.code = state.state2.code, state.state2.code[:200]
    with pytest.raises(ValueError, match="256 values"):
        reference.dequantize(packed, state)
    state.state2.code, state.state2.absmax = code, state.state2.absmax[:1]
    with pytest.raises(ValueError, match="state2.absmax holds 1"):
        reference.dequantize(packed, state)


def test_different_counts_bits():
    zeros = torch.tensor([0.0, 1.0, float("nan")])
    assert reference.different(zeros, torch.tensor([-0.0, 1.0, -float("nan")])) == 1
    assert not reference.same_bits(zeros, zeros.to(torch.float16))
    assert not reference.same_bits(zeros, zeros[:2])
    with pytest.raises(ValueError, match="cannot compare"):
        reference.different(zeros, zeros[:2])
