"""The description of the machine, preparing a process, and child processes."""

import json
import os
import sys
import time

import pytest
import torch

from helpers import machine
from helpers.nf4 import environment


@pytest.fixture
def plain(monkeypatch):
    """No trace of Colab, Kaggle or forced settings, and no driver."""
    for name in list(os.environ):
        if name.startswith(("COLAB_", "KAGGLE_", "NF4_")):
            monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.setattr(environment, "driver", lambda: None)
    return monkeypatch


@pytest.fixture
def card(plain):
    """card(name, capability): pretend to have this GPU."""

    def pretend(name, capability):
        plain.setattr(torch.cuda, "is_available", lambda: True)
        plain.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        plain.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        plain.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)

    return pretend


def test_description_is_json(card):
    card("Tesla T4", (7, 5))
    facts = json.loads(json.dumps(environment.describe()))
    keys = "card capability driver cuda versions date colab kaggle interpreter forced"
    assert list(facts) == keys.split() and facts["card"] == "Tesla T4" and facts["capability"] == [7, 5]
    assert {"python", *environment.PACKAGES} == set(facts["versions"]) and facts["date"].endswith("+00:00")


@pytest.mark.parametrize(
    "variable, driver, cuda, advice",
    [
        ("COLAB_GPU", None, None, "Runtime > Change runtime type > T4 GPU"),
        ("KAGGLE_URL_BASE", None, None, "Accelerator > GPU T4 x2"),
        ("KAGGLE_KEY", None, None, "nvidia-smi"),  # of Kaggle's API, used anywhere
        ("OTHER", "580.0", None, "build without CUDA"),
        ("OTHER", "580.0", "13.0", "driver 580.0"),
    ],
)
def test_no_gpu_says_what_to_do(plain, variable, driver, cuda, advice):
    plain.setattr(torch.cuda, "is_available", lambda: False)
    plain.setattr(environment, "driver", lambda: driver)
    plain.setattr(torch.version, "cuda", cuda)
    plain.setenv(variable, "1")
    assert advice in environment.no_gpu()
    assert environment.colab() == variable.startswith("COLAB") and environment.kaggle() == ("URL" in variable)


def test_an_old_gpu_is_named(card):
    for capability, old in (((6, 0), True), ((7, 5), False), ((12, 0), False)):
        card("Tesla P100", capability)
        assert environment.no_gpu() is None
        text = environment.old_gpu()
        assert bool(text) == old and (not old or "sm_60; the kernel needs sm_75" in text)


@pytest.mark.parametrize("forced", [False, True])
def test_a_forced_t4_reports_no_native_bf16_and_inductor_sees_it(card, plain, forced):
    from torch._dynamo.device_interface import CudaInterface

    card("NVIDIA H200", (9, 0))
    plain.setattr(CudaInterface, "is_bf16_supported", staticmethod(torch.cuda.is_bf16_supported))
    if forced:
        plain.setenv("NF4_FORCE", "t4")
    for _ in range(2):  # the notebook and its helpers both prepare
        machine.prepare()
        assert environment.native_bf16() != forced and torch.cuda.is_bf16_supported()
        assert CudaInterface.is_bf16_supported(False) != forced
    assert environment.describe()["forced"] == ("t4" if forced else None)


def test_a_process_without_a_home_or_a_name_gets_both(plain, tmp_path):
    plain.setattr(machine, "ROOT", tmp_path)
    plain.setenv("HOME", "/no/such/home")
    plain.setattr(machine.getpass, "getuser", lambda: {}["uid"])
    plain.setenv("USER", "")
    machine.give_home()
    assert os.environ["HOME"] == str(tmp_path / "build" / "home") and os.environ["USER"].startswith("uid")


def test_what_a_process_prints_and_how_it_ended(tmp_path):
    code = "import os, sys, helpers; print(os.getcwd(), sys.stdin.read(), os.environ.get('X')); sys.exit(3)"
    for x in ("x", None):
        done = machine.python(["-c", code], variables={"X": x}, folder=tmp_path, stdin="in", check=False)
        assert (done.status, done.out.split()) == (3, [str(tmp_path), "in", str(x)])
    with pytest.raises(machine.ChildFailed, match="ended with 1(.|\n)*ZeroDivisionError"):
        machine.python(["-c", "1 / 0"])


def test_after_its_time_a_process_ends_with_those_it_started(tmp_path):
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    done = machine.python(["-c", code], timeout=2, check=False)
    assert done.status is None
    state = f"/proc/{int(done.out)}/stat"
    for _ in range(100):  # until it has been reaped, or is a zombie
        if not os.path.exists(state) or open(state).read().split(")")[-1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the process it started is still there")
    with pytest.raises(machine.ChildFailed, match="did not end within 1 s"):
        machine.python(["-c", "import time; time.sleep(60)"], timeout=1)
