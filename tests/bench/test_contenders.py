import torch

from helpers.bench import contenders


def test_unwritten_elements_another_dtype_and_a_wrong_second_result_are_wrong(monkeypatch, device):
    """An unwritten result gets the memory that was freed before the call."""
    expected, problems = torch.ones(64, dtype=torch.float16, device=device), []
    memory, results = expected.clone(), iter([expected.clone(), expected + 1])
    monkeypatch.setattr(torch, "full_like", lambda like, value: memory.fill_(value))
    calls = {"exact": expected.clone, "unwritten": lambda: memory}
    calls |= {"dtype": expected.float, "second": results.__next__}
    assert list(contenders.exact(calls, expected, problems, "here")) == ["exact"]
    for name, text in zip(("unwritten", "dtype", "second"), problems, strict=True):
        assert f"{name} at here: AssertionError: not bit-identical" in text
