import json

import pytest
import torch

from helpers.machine import environment, install
from helpers.measure import ceilings, doctor
from helpers.measure.doctor import KERNEL, Check, Report, Speed
from helpers.oracle import reference

GOOD = Check("bit-equal, float16", True, "fine")


def speeds(*ratios, name="Unsloth today"):
    return [Speed(1024, "float16", {KERNEL: 10.0, name: 10.0 * ratio}) for ratio in ratios]


@pytest.fixture
def report(capsys):
    """report() -> (exit status, the JSON that `doctor --json` printed)."""

    def run():
        status = doctor.main(["--json", "--quick"])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def complete(monkeypatch):
    """Nothing missing, whatever environment the tests run in."""
    monkeypatch.setattr(install, "missing", lambda required, found: {})


def states(found):
    return {check["name"]: check["ok"] for check in found["checks"]}


def test_a_healthy_machine(report, complete):
    status, found = report()
    state = states(found)
    assert status == 0 and False not in state.values()
    assert state["Triton"] and state["bit-equal, float16"] and state["bit-equal, bfloat16"]
    assert found["environment"].keys() == environment.describe().keys()
    if environment.has_gpu():
        assert {(row["size"], row["dtype"]) for row in found["speed"]} == {
            (size, dtype) for size in doctor.SIZES for dtype in doctor.DTYPES
        }
    else:
        assert state["speed"] is None and not found["speed"] and "To measure" in found["recommendation"]


def test_a_kernel_with_one_wrong_element_is_caught_and_not_timed(report, complete, kernel, monkeypatch):
    def nearly(layer):
        weight = reference.dequantize(layer.weight, layer.weight.quant_state)
        weight.view(torch.int16).flatten()[-1] ^= 1
        return weight

    monkeypatch.setattr(kernel, "your_dequantize_nf4", nearly)
    monkeypatch.setattr(doctor, "speed", lambda quick: pytest.fail("timed a wrong kernel"))
    status, found = report()
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert status == 1 and states(found)["bit-equal, float16"] is False
    assert "1 of 6600 elements differ from bitsandbytes" in details["bit-equal, float16"]
    assert found["backend"] is None


def test_a_missing_package_gives_the_command_that_fixes_it(report, monkeypatch):
    installed = install.installed()
    monkeypatch.setattr(install, "installed", lambda: installed | {"peft": "0.1"})
    status, found = report()
    (check,) = (check for check in found["checks"] if check["name"] == "package peft")
    assert status == 1 and check["fix"] == "bash colab_setup.sh" and "0.1 is installed" in check["detail"]
    assert "bash colab_setup.sh" in found["recommendation"]


def test_a_broken_triton_is_reported(monkeypatch):
    monkeypatch.setattr(ceilings, "works", lambda device: 1 / 0)
    check = doctor.triton_check("cpu")
    assert check.ok is False and "ZeroDivisionError" in check.detail


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
    assert "NF4_BACKEND=triton: 1.20 to 1.50" in doctor.recommend([GOOD], speeds(1.2, 1.5))
    assert "Unsloth today is faster here" in doctor.recommend([GOOD], speeds(0.7, 0.8))
    assert "as you like" in doctor.recommend([GOOD], speeds(0.9, 1.2))
    assert "NF4_BACKEND=torch" in doctor.recommend([GOOD], [])


def test_the_recommendation_compares_with_the_fastest_other():
    rows = speeds(3.0)
    rows[0].us["bitsandbytes"] = 12.0
    assert "1.20 to 1.20 times as fast as bitsandbytes" in doctor.recommend([GOOD], rows)


def test_a_failed_check_comes_before_speed():
    bad = Check("Triton", False, "broken", "bash colab_setup.sh")
    assert doctor.recommend([GOOD, bad], speeds(9.0)).startswith(
        "1 check(s) failed: run `bash colab_setup.sh`"
    )


def test_people_get_tables(capsys):
    report = Report({"gpu": "Tesla T4", "driver": None}, [GOOD], speeds(1.5), {"empty": 1.5, "warm": 0.25})
    report.backend = {"name": "triton", "reason": "the faster one here"}
    report.recommendation = doctor.recommend(report.checks, report.speed)
    doctor.show(report)
    shown = capsys.readouterr().out
    assert "Unsloth today 15.0 (1.50x)" in shown and "1.50 s to compile, 0.25 s from" in shown
    assert "driver          -" in shown and "NF4_BACKEND=triton" in shown
