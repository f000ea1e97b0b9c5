import pytest
import torch

from helpers.machine import environment, install
from helpers.measure import ceilings, contenders, doctor
from helpers.measure.doctor import KERNEL, Check
from helpers.oracle import reference

GOOD = Check("bit-equal, float16", True, "fine")


def speeds(*ratios, name="Unsloth today"):
    sizes = range(1024, 1024 * (len(ratios) + 1), 1024)
    return {
        (size, "float16"): {KERNEL: 10.0, name: 10.0 * ratio}
        for size, ratio in zip(sizes, ratios, strict=True)
    }


@pytest.fixture
def complete(monkeypatch):
    """Nothing missing, whatever environment the tests run in."""
    monkeypatch.setattr(install, "missing", lambda required, found: {})


def states(checks):
    return {check.name: check.ok for check in checks}


def test_a_healthy_machine(complete, capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert "FAIL" not in shown and "ok    backend: " in shown
    assert all(name in shown for name in environment.describe())
    for name in ("Triton", "bit-equal, float16", "bit-equal, bfloat16"):
        assert f"ok    {name}: " in shown
    if environment.has_gpu():
        assert all(f"{size}x{size} {dtype}" in shown for size in doctor.SIZES for dtype in doctor.DTYPES)
    else:
        assert "-     speed: not measured (needs an NVIDIA GPU)" in shown and "To measure" in shown


def test_a_kernel_with_one_wrong_element_is_caught_and_not_timed(complete, kernel, monkeypatch):
    def nearly(layer):
        weight = reference.dequantize(layer.weight, layer.weight.quant_state)
        weight.view(torch.int16).flatten()[-1] ^= 1
        return weight

    monkeypatch.setattr(kernel, "your_dequantize_nf4", nearly)
    monkeypatch.setattr(doctor, "_speed", lambda rows: pytest.fail("timed a wrong kernel"))
    checks, rows = doctor.examine()
    details = {check.name: check.detail for check in checks}
    assert states(checks)["bit-equal, float16"] is False and rows == {} and "backend" not in details
    assert "1 of 6600 elements differ from bitsandbytes" in details["bit-equal, float16"]


def test_speed_is_of_right_weights_alone(bench, monkeypatch):
    monkeypatch.setattr(contenders, "Bench", lambda *arguments, **more: bench)
    monkeypatch.setattr(doctor, "SIZES", (64, 128))
    rows = {}
    assert doctor._speed(rows) == (True, "the table below")
    assert set(rows) == {(size, dtype) for size in (64, 128) for dtype in doctor.DTYPES}
    assert all({KERNEL, "bitsandbytes"} <= us.keys() for us in rows.values())
    right = bench.module.your_dequantize_nf4
    monkeypatch.setattr(bench.module, "your_dequantize_nf4", lambda layer: right(layer).neg())
    ok, detail = doctor._speed({})
    assert ok is False and detail.startswith("64x64 float16: not bit-identical")


def test_a_missing_package_gives_the_command_that_fixes_it(monkeypatch, capsys):
    installed = install.installed()
    monkeypatch.setattr(install, "installed", lambda: installed | {"peft": "0.1"})
    (check,) = (check for check in doctor.packages() if check.name == "package peft")
    assert check.ok is False and check.fix == "bash colab_setup.sh" and "0.1 is installed" in check.detail
    assert doctor.main([]) == 1
    assert "bash colab_setup.sh" in capsys.readouterr().out.splitlines()[-1]


def test_without_torch_the_fix_is_said(complete, monkeypatch, capsys):
    def no_torch():
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(environment, "prepare", no_torch)
    monkeypatch.setattr(environment, "describe", no_torch)
    assert doctor.main([]) == 1
    assert "FAIL  torch: does not import: No module named 'torch'" in capsys.readouterr().out


def test_a_broken_triton_is_reported(complete, monkeypatch):
    monkeypatch.setattr(ceilings, "trivial_kernel", {(1,): lambda out: 1 / 0})
    assert states(doctor.examine()[0])["Triton"] is False
    monkeypatch.setattr(ceilings, "trivial_kernel", {(1,): lambda out: out.fill_(1)})
    (check,) = (check for check in doctor.examine()[0] if check.name == "Triton")
    assert check.ok is False and "expected [1, 0]" in check.detail


def test_an_old_gpu_is_a_failure_and_a_missing_one_is_not(monkeypatch):
    monkeypatch.setattr(environment, "old_gpu", lambda: "sm_60: too old")
    assert doctor.gpu() == Check("GPU", False, "sm_60: too old")
    monkeypatch.setattr(environment, "old_gpu", lambda: None)
    monkeypatch.setattr(environment, "no_gpu", lambda: "no GPU")
    monkeypatch.setattr(install, "nvidia_gpus", lambda: [])
    assert doctor.gpu().ok is None
    monkeypatch.setattr(install, "nvidia_gpus", lambda: [("Tesla T4", (7, 5))])
    assert doctor.gpu().ok is False


def test_the_recommendation_follows_the_measurements():
    assert doctor.recommend([GOOD], speeds(1.2, 1.5)).startswith("1.20 to 1.50 times as fast as Unsloth")
    assert "please report it" in doctor.recommend([GOOD], speeds(0.7, 0.8))
    assert "To measure" in doctor.recommend([GOOD], {})
    assert "no baseline" in doctor.recommend([GOOD], {(1024, "float16"): {KERNEL: 10.0}})


def test_the_recommendation_compares_with_the_fastest_other():
    rows = speeds(3.0)
    rows[1024, "float16"]["bitsandbytes"] = 12.0
    assert "1.20 to 1.20 times as fast as bitsandbytes" in doctor.recommend([GOOD], rows)


def test_a_failed_check_comes_before_speed():
    bad = Check("Triton", False, "broken", "bash colab_setup.sh")
    assert doctor.recommend([GOOD, bad], speeds(9.0)).startswith(
        "1 check(s) failed: run `bash colab_setup.sh`"
    )


def test_people_get_tables(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: ([GOOD], speeds(1.5)))
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert "1024x1024 float16   this kernel 10.0 (1.00x)  Unsloth today 15.0 (1.50x)" in shown
    assert "driver          -" in shown and "1.50 to 1.50 times" in shown.splitlines()[-1]
