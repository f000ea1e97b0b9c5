import pytest
import torch

from helpers.bench import contenders, copy_kernel
from helpers.puzzle.layers import quantized_layer

pytest.importorskip("bitsandbytes")


def test_wrong_and_unwritten_elements_are_named(device):
    layer = quantized_layer(64, 64, torch.float16)
    expected = contenders.exact_weight(layer)
    off, unwritten, problems = expected.clone(), expected.clone(), []
    off.view(torch.int16).view(-1)[-1] ^= 1
    with pytest.raises(AssertionError, match="not bit-identical"):
        contenders.check(lambda: unwritten, expected, unwritten)
    functions = {
        "exact": lambda layer: expected,
        "one bit": lambda layer: off,
        "dtype": lambda layer: expected.float(),
        "none": lambda layer: None,
        "error": lambda layer: 1 / 0,
    }
    assert list(contenders.exact_calls(functions, layer, problems)) == ["exact"]
    assert [text.split(":")[0] for text in problems] == ["one bit", "dtype", "none", "error"]
    assert "ZeroDivisionError" in problems[-1] and "not bit-identical" in problems[0]


@pytest.mark.parametrize("numel", [64, 64 * 40, 2**14 + 64])  # a row, part of a program, several
def test_the_copy_kernel_moves_every_byte_and_no_other(device, numel):
    """What is expected depends on every byte: see the next test."""
    layer = quantized_layer(64, numel // 64, torch.bfloat16)
    for copy in copy_kernel.VARIANTS:
        guarded = torch.full((numel // 2 + 16,), -7, dtype=torch.int32, device=device)
        copy(layer, out=guarded[8:-8])
        assert torch.equal(guarded[8:-8], copy.expected(layer)), copy
        assert (guarded[:8] == -7).all() and (guarded[-8:] == -7).all()
