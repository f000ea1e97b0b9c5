import pytest
import torch

from helpers.bench import contenders, gpu
from helpers.puzzle.checks import move_bytes
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
def test_move_bytes_moves_every_byte(device, numel):
    layer = quantized_layer(64, numel // 64, torch.bfloat16)
    assert torch.equal(move_bytes(layer), gpu.moved(layer))
    assert move_bytes(layer).nbytes == 2 * numel
