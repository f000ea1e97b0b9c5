import pytest
import torch

from helpers import machine, install
from helpers.bench import doctor
from helpers.bench.doctor import Check
from helpers.nf4 import reference

GOOD = Check("bit-equal, float16", True, "fine")


@pytest.fixture
def complete(monkeypatch):
    """Nothing missing, whatever environment the tests run in."""
    monkeypatch.setattr(install, "missing", lambda required, found: {})


def states(checks):
    return {check.name: check.ok for check in checks}


def test_a_healthy_machine(complete, capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert "FAIL" not in shown
    assert all(name in shown for name in machine.describe())
    for name in ("bit-equal, float16", "bit-equal, bfloat16"):
        assert f"ok    {name}: " in shown
    last = shown.splitlines()[-1]
    assert "bench --quick" in last if machine.has_gpu() else "To measure: " in last


def test_a_kernel_with_one_wrong_element_is_caught(complete, kernel, monkeypatch):
    def nearly(layer):
        weight = reference.dequantize(layer.weight, layer.weight.quant_state)
        weight.view(torch.int16).flatten()[-1] ^= 1
        return weight

    monkeypatch.setattr(kernel, "your_dequantize_nf4", nearly)
    checks = doctor.examine()
    details = {check.name: check.detail for check in checks}
    assert states(checks)["bit-equal, float16"] is False
    assert "1 of 6600 elements differ from bitsandbytes" in details["bit-equal, float16"]


def test_a_missing_package_gives_the_command_that_fixes_it(monkeypatch, capsys):
    installed = install.installed()
    monkeypatch.setattr(install, "installed", lambda: installed | {"peft": "0.1"})
    check = doctor.packages()
    assert check.ok is False and "run `bash colab_setup.sh`" in check.detail
    shown = capsys.readouterr().out
    assert "missing: peft" in shown and "(installed: 0.1)" in shown
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("see to 'packages' first.")


def test_without_torch_the_fix_is_said(complete, monkeypatch, capsys):
    def no_torch():
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(machine, "prepare", no_torch)
    monkeypatch.setattr(machine, "describe", no_torch)
    assert doctor.main([]) == 1
    assert "FAIL  torch: does not import: No module named 'torch'" in capsys.readouterr().out


def test_a_broken_triton_is_reported(complete, kernel, monkeypatch):
    monkeypatch.setattr(kernel, "your_dequantize_nf4", lambda layer: 1 / 0)
    (check,) = (check for check in doctor.examine() if check.name == "bit-equal, float16")
    assert check.ok is False and "ZeroDivisionError" in check.detail


def test_an_old_triton_is_reported():
    code = "import triton; triton.__version__ = '3.2.0'; from helpers.bench import doctor; doctor.main([])"
    done = machine.python(["-c", code], variables={"TRITON_INTERPRET": "1"})
    line = next(line for line in done.out.splitlines() if line.startswith("FAIL  bit-equal, float16"))
    assert "Triton 3.2.0 cannot compile" in line and "expected 3.3 or newer" in line


def test_an_old_gpu_is_a_failure_and_a_missing_one_is_not(monkeypatch):
    monkeypatch.setattr(machine, "old_gpu", lambda: "sm_60: too old")
    assert doctor.gpu() == Check("GPU", False, "sm_60: too old")
    monkeypatch.setattr(machine, "old_gpu", lambda: None)
    monkeypatch.setattr(machine, "no_gpu", lambda: "no GPU")
    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: [])
    assert doctor.gpu().ok is None
    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: ["Tesla T4"])
    assert doctor.gpu().ok is False


def test_the_recommendation_follows_the_findings():
    assert "1 check(s) failed: see to 'GPU' first" in doctor.recommend([GOOD, Check("GPU", False, "too old")])
    assert doctor.recommend([GOOD]).startswith("The kernel is right here")
