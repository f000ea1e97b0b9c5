import pytest
import torch

from helpers.bench import contenders


def test_unwritten_elements_and_another_dtype_are_wrong(device):
    expected = torch.ones(64, dtype=torch.float16, device=device)
    unwritten, problems = expected.clone(), []
    with pytest.raises(AssertionError, match="not bit-identical"):
        contenders.check(lambda: unwritten, expected, unwritten)
    results = iter([expected.clone(), expected + 1])
    calls = {"exact": expected.clone, "dtype": expected.float, "second": results.__next__}
    assert list(contenders.exact(calls, expected, problems, "here")) == ["exact"]
    for name, text in zip(("dtype", "second"), problems, strict=True):
        assert f"{name} at here: AssertionError: not bit-identical" in text
