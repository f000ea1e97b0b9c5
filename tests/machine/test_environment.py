"""The description of the machine, preparing a process, and writing files."""

import json
import os

import pytest
import torch

from helpers import machine
from nf4_triton import backend, environment


def test_the_description_is_json(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "CPU", tmp_path / "cpuinfo")
    environment.CPU.write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nprocessor\t: 1\n")
    monkeypatch.setenv("NF4_FORCE", " T4 ")
    monkeypatch.setattr(environment, "DRIVER", "echo '580.65.06\n580.65.06'")  # of two GPUs
    facts = json.loads(json.dumps(environment.describe()))
    assert (facts["card"] is None) == (not torch.cuda.is_available()) == (facts["capability"] is None)
    assert facts["driver"] == "580.65.06" and facts["forced"] == "t4" and facts["cpu"] == "A CPU @ 2 GHz"
    assert torch.__version__.startswith(facts["versions"]["torch"])  # PyPI names no CUDA version


@pytest.mark.skipif(machine.has_gpu(), reason="this machine has a GPU")
def test_without_a_usable_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(environment, "DRIVER", "false")
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    assert "Runtime > Change runtime type > T4 GPU" in environment.no_gpu()
    monkeypatch.setattr(environment, "DRIVER", "echo 580.65.06")
    assert "driver 580.65.06" in environment.no_gpu()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert environment.cannot_run() == environment.no_gpu()
    monkeypatch.setenv("TRITON_INTERPRET", "On")  # as Triton reads it
    assert environment.cannot_run() is None


@pytest.mark.parametrize("capability, problem", [((7, 5), "None"), ((7, 0), "A is sm_70, expected sm_75")])
def test_the_oldest_gpu_is_a_t4(monkeypatch, capability, problem):
    facts = dict(is_available=True, get_device_capability=capability, get_device_name="A")
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, fact=fact: fact)
    assert str(environment.no_gpu()).startswith(problem)


def test_a_triton_that_is_newer_than_the_tested_ones_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(backend, "NEWEST_TRITON", (3, 0))
    assert backend.why_torch.__wrapped__(None) is None
    assert "Triton is newer than 3.0, the newest tested" in caplog.text
    monkeypatch.setattr(environment, "cannot_run", lambda device: "too old")
    assert backend.why_torch.__wrapped__(torch.device("cuda")) == "too old"
    assert "dequantize() uses PyTorch: too old" in caplog.text


@pytest.mark.gpu
def test_a_forced_t4_reports_no_native_bf16_to_torch_and_inductor(monkeypatch):
    from torch._dynamo.device_interface import CudaInterface

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", torch.cuda.is_bf16_supported)
    monkeypatch.setattr(CudaInterface, "is_bf16_supported", staticmethod(torch.cuda.is_bf16_supported))
    monkeypatch.setenv("NF4_FORCE", " T4 ")
    for _ in range(2):  # the notebook and its helpers both prepare
        machine.prepare()
        assert not torch.cuda.is_bf16_supported(False) and torch.cuda.is_bf16_supported()
        assert not CudaInterface.is_bf16_supported(False)
    assert environment.describe()["forced"] == "t4"


def test_a_process_without_a_home_gets_one(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("HOME", "/no/such/home")
    monkeypatch.setenv("NF4_TRITON", "1")
    machine.prepare()
    assert "NF4_TRITON" not in os.environ
    assert os.environ["HOME"] == str(tmp_path / "build" / "home")


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, full_disk):
    file, link = tmp_path / "rows.csv", tmp_path / "link"
    link.symlink_to(file)
    machine.write_whole(link, "\u00b5s\n")
    with pytest.raises(OSError) as error:
        machine.write_whole(file, bytes(8193))
    assert error.value.filename == str(file)
    assert file.read_text(encoding="utf-8") == "\u00b5s\n"
    assert sorted(os.listdir(tmp_path)) == ["link", "rows.csv"]
