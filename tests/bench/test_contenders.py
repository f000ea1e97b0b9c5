import pytest
import torch

from helpers.bench import contenders
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
    assert list(contenders.exact(functions, layer, expected, problems, "here")) == ["exact"]
    assert [text.split(" at here:")[0] for text in problems] == ["one bit", "dtype", "none", "error"]
    assert "ZeroDivisionError" in problems[-1] and "not bit-identical" in problems[0]
