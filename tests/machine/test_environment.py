import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers.__main__ import COMMANDS
from helpers import machine


@pytest.fixture
def plain(monkeypatch):
    """No trace of Colab, Kaggle or forced decisions in the environment."""
    for name in list(os.environ):
        if name.startswith(("COLAB_", "KAGGLE_", "NF4_")):
            monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    return monkeypatch


@pytest.fixture
def card(plain):
    """card(name, capability): pretend to have this GPU."""

    def pretend(name, capability):
        plain.setattr(torch.cuda, "is_available", lambda: True)
        plain.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        plain.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        plain.setattr(machine, "driver", lambda: "580.0")

    return pretend


def test_description_is_json_with_the_keys_of_the_contract():
    facts = json.loads(json.dumps(machine.describe()))
    machine = "gpu capability driver cuda date colab kaggle interpreter forced".split()
    packages = "python torch triton bitsandbytes unsloth peft transformers".split()
    assert {*machine, *packages} == set(facts)
    assert facts["date"].endswith("+00:00")


@pytest.mark.parametrize(
    "name, expected", [("COLAB_GPU", True), ("COLAB_RELEASE_TAG", True), ("OTHER", False)]
)
def test_colab_is_known_by_its_variables(plain, name, expected):
    plain.setenv(name, "1")
    assert machine.colab() is expected


def test_colab_is_known_by_its_module(plain):
    plain.setitem(sys.modules, "google.colab", sys)
    assert machine.colab()


def test_kaggle_api_keys_do_not_make_a_kaggle_notebook(plain):
    plain.setenv("KAGGLE_USERNAME", "someone")
    plain.setenv("KAGGLE_KEY", "secret")
    assert not machine.kaggle()
    plain.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert machine.kaggle()


@pytest.mark.parametrize(
    "version, numbers", [("2.11.0+cu128", (2, 11, 0)), ("3.6.0", (3, 6, 0)), ("2.12.0a0+git1", (2, 12, 0))]
)
def test_release(version, numbers):
    assert machine.release(version) == numbers


@pytest.mark.parametrize(
    "name, folder",
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("Tesla T4", "tesla-t4"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
    ],
)
def test_each_card_has_its_result_folder(card, name, folder):
    card(name, (9, 0))
    assert machine.result_folder() == machine.ROOT / "results" / folder


def test_forced_decisions_never_land_in_the_folder_of_a_card(card, plain, tmp_path):
    card("NVIDIA H200", (9, 0))
    assert machine.forced() is None
    plain.setenv("NF4_FORCE", "t4")
    plain.setenv("NF4_RESULTS", str(tmp_path))
    assert machine.result_folder() == tmp_path / "nvidia-h200-forced-t4"
    assert machine.describe()["forced"] == "t4"


@pytest.fixture
def with_bf16(card, plain):
    """An H200 whose torch reports native bf16, wherever Inductor asks."""
    from torch._dynamo.device_interface import CudaInterface

    def is_bf16_supported(including_emulation=True):
        return True

    card("NVIDIA H200", (9, 0))
    plain.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    plain.setattr(CudaInterface, "is_bf16_supported", staticmethod(is_bf16_supported))
    plain.setattr(
        CudaInterface, "get_device_properties", staticmethod(lambda device: SimpleNamespace(name="H"))
    )
    return plain


def test_a_forced_t4_reports_no_native_bf16_but_emulation(with_bf16):
    machine.prepare()
    assert machine.native_bf16()
    with_bf16.setenv("NF4_FORCE", "t4")
    for _ in range(2):  # importing some of the helpers prepares again
        machine.prepare()
        assert not machine.native_bf16() and torch.cuda.is_bf16_supported()


def test_a_forced_t4_survives_what_unsloth_does_to_the_question(with_bf16):
    with_bf16.setenv("NF4_FORCE", "t4")
    machine.prepare()
    ours = torch.cuda.is_bf16_supported
    torch.cuda.is_bf16_supported = lambda including_emulation=False: ours(including_emulation)
    machine.prepare()
    assert not machine.native_bf16() and not torch.cuda.is_bf16_supported()


@pytest.mark.parametrize("forced", [False, True])
def test_inductor_refuses_bf16_graphs_on_a_forced_t4(with_bf16, forced):
    """Inductor's own decision, taken before it generates code."""
    from torch._dynamo.exc import SkipFrame
    from torch._inductor import compile_fx, ir

    if forced:
        with_bf16.setenv("NF4_FORCE", "t4")
    machine.prepare()
    layouts = {
        dtype: ir.FixedLayout(torch.device("cuda"), dtype, [4], [1])
        for dtype in (torch.float16, torch.bfloat16)
    }
    graphs = {
        dtype: SimpleNamespace(graph_inputs={}, graph_outputs=[ir.InputBuffer(name="x", layout=layout)])
        for dtype, layout in layouts.items()
    }
    compile_fx._check_triton_bf16_support(graphs[torch.float16])
    if not forced:
        compile_fx._check_triton_bf16_support(graphs[torch.bfloat16])
        return
    with pytest.warns(UserWarning, match="bfloat16 compilation"), pytest.raises(SkipFrame):
        compile_fx._check_triton_bf16_support(graphs[torch.bfloat16])


def test_a_t4_is_new_enough_and_a_p100_is_not(card):
    card("Tesla T4", (7, 5))
    assert machine.old_gpu() is None and machine.no_gpu() is None
    card("Tesla P100-PCIE-16GB", (6, 0))
    text = machine.old_gpu()
    assert "Tesla P100" in text and "sm_60" in text and "sm_75" in text


@pytest.mark.parametrize(
    "variable, advice",
    [
        ("COLAB_GPU", "Runtime > Change runtime type > T4 GPU"),
        ("KAGGLE_URL_BASE", "Accelerator > GPU T4 x2"),
        ("NOTHING", "nvidia-smi"),
    ],
)
def test_no_gpu_says_what_to_do(plain, variable, advice):
    plain.setattr(torch.cuda, "is_available", lambda: False)
    plain.setattr(machine, "driver", lambda: None)
    plain.setenv(variable, "1")
    assert advice in machine.no_gpu()


def test_a_cpu_build_of_torch_beside_a_gpu_is_named(plain):
    plain.setattr(torch.cuda, "is_available", lambda: False)
    plain.setattr(machine, "driver", lambda: "580.0")
    plain.setattr(torch.version, "cuda", None)
    assert "build without CUDA" in machine.no_gpu() and "colab_setup.sh" in machine.no_gpu()
    plain.setattr(torch.version, "cuda", "13.0")
    assert "driver 580.0" in machine.no_gpu()


def test_prepare_refuses_when_triton_was_imported_too_early():
    code = (
        "import torch; torch.cuda.is_available = lambda: False\n"
        "import triton\n"
        "from helpers import machine\n"
        "machine.prepare()"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=machine.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "triton was imported before" in done.stderr


def test_helpers_need_no_torch_to_be_imported():
    """The set-up runs before anything is installed."""
    names = ["helpers.__main__", *(f"helpers.{COMMANDS[name][0]}" for name in ("doctor", "run"))]
    code = "import sys; sys.modules['torch'] = None; import helpers.install, " + ", ".join(names)
    done = subprocess.run([sys.executable, "-c", code], cwd=machine.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
