"""The description of the machine, preparing a process, and child processes."""

import json
import os
import time

import pytest
import torch

from helpers import machine
from nf4_triton import environment


@pytest.fixture
def driver(monkeypatch):
    """driver(version): what nvidia-smi says; None: it is not there."""

    def pretend(version):
        monkeypatch.setattr(environment, "DRIVER", f"echo {version}" if version else "false")

    monkeypatch.delenv("NF4_FORCE", raising=False)
    pretend(None)
    return pretend


@pytest.fixture
def card(monkeypatch, driver):
    """card(name, capability): pretend to have this GPU."""

    def pretend(name, capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)

    return pretend


def test_the_description_is_json(card, driver):
    card("Tesla T4", (7, 5))
    driver("'580.65.06\n580.65.06'")  # of two GPUs
    facts = json.loads(json.dumps(environment.describe()))
    assert (facts["card"], facts["capability"], facts["driver"]) == ("Tesla T4", [7, 5], "580.65.06")
    assert torch.__version__.startswith(facts["versions"]["torch"])  # PyPI names no CUDA version
    assert facts["date"].endswith("+00:00")
    assert facts["forced"] is None
    driver("''")
    assert environment.describe()["driver"] is None


def test_without_a_usable_gpu_it_says_what_to_do(monkeypatch, card, driver):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.no_gpu() == "No CUDA GPU: use a machine with an NVIDIA GPU (a Tesla T4 or newer)."
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    assert "Runtime > Change runtime type > T4 GPU" in environment.no_gpu()
    driver("580.65.06")
    assert "driver 580.65.06" in environment.no_gpu()
    card("Tesla P100", (6, 0))
    assert "Tesla P100 is sm_60, expected sm_75" in environment.no_gpu()
    for capability in ((7, 5), (12, 0)):
        card("newer", capability)
        assert environment.no_gpu() is None


@pytest.mark.parametrize("forced", [False, True])
def test_a_forced_t4_reports_no_native_bf16_to_torch_and_inductor(card, monkeypatch, forced):
    from torch._dynamo.device_interface import CudaInterface

    card("NVIDIA H200", (9, 0))
    monkeypatch.setattr(CudaInterface, "is_bf16_supported", staticmethod(torch.cuda.is_bf16_supported))
    if forced:
        monkeypatch.setenv("NF4_FORCE", "t4")
    for _ in range(2):  # the notebook and its helpers both prepare
        machine.prepare()
        assert environment.native_bf16() != forced and torch.cuda.is_bf16_supported()
        assert CudaInterface.is_bf16_supported(False) != forced
    assert environment.describe()["forced"] == ("t4" if forced else None)


def test_a_process_without_a_home_gets_one(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("HOME", "/no/such/home")
    machine.prepare()
    assert os.environ["HOME"] == str(tmp_path / "build" / "home")


def test_after_its_time_a_process_ends_with_those_it_started():
    """The one it started would keep the pipe open for a minute."""
    start = time.monotonic()
    done = machine.python(["-c", "import os; os.system('sleep 60')"], timeout=1, check=False)
    assert done.status is None and time.monotonic() - start < 30
    with pytest.raises(machine.ChildFailed, match="did not end within 1 s"):
        machine.python(["-c", "import time; time.sleep(60)"], timeout=1)
