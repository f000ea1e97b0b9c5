"""`python -m helpers bitsandbytes-tests` over a few tests: what is substituted, counted and refused."""

import importlib.util
import json

import pytest

from helpers.stress import bitsandbytes_tests

pytest.importorskip("bitsandbytes")
TESTS = """
import bitsandbytes.functional as F
import pytest
import torch


def both(device):
    weight = torch.randn(64, 128, device=device)
    packed, state = F.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    return F.dequantize_4bit(packed, state), F.dequantize_4bit.__module__


@pytest.mark.parametrize("i", range(3))
def test_4bit(i):
    result, _ = both({device!r})
    assert result.shape == (64, 128)


def test_4bit_of_theirs_only():
    assert both({device!r})[1] == F.__name__


def test_4bit_that_never_passes():
    assert False


def test_of_something_else():
    assert False
"""


run_tests = bitsandbytes_tests.run_tests


def one_without_xdist(folder, arguments, run, report):
    """The run without the kernel needs no second process: it counts no launches."""
    if run == bitsandbytes_tests.RUNS[0] and importlib.util.find_spec("xdist"):
        arguments = [*arguments, "-n0"]
    return run_tests(folder, arguments, run, report)


def test_what_fails_only_with_the_kernel_is_named(tmp_path, monkeypatch, device):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_functional.py").write_text(TESTS.format(device=device))
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(bitsandbytes_tests.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(bitsandbytes_tests, "run_tests", one_without_xdist)
    assert bitsandbytes_tests.main([str(tmp_path)]) == 1
    (path,) = tmp_path.rglob("bitsandbytes_own.json")
    data = json.loads(path.read_text())["data"]
    assert data["failed_only_with_this_kernel"] == ["tests/test_functional.py::test_4bit_of_theirs_only"]
    assert data["original"]["passed"] == 4 and data["substituted"]["passed"] == 3
    assert data["substituted"]["launches"]["functional"] == 4
    assert sum(data["original"]["launches"].values()) == 0


def test_a_folder_without_tests_is_refused(tmp_path, capsys):
    assert bitsandbytes_tests.main([str(tmp_path)]) == 2
    assert "clone its repository" in capsys.readouterr().out
