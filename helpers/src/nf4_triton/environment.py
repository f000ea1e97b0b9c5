"""Describe the machine: GPU, driver, versions, variables, and why the kernel cannot run here.

Importing it imports neither torch nor Triton. The notebook's cell `rows` prints most of it, too.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from .core.supported import forced_card, interpreted

PACKAGES = "torch triton bitsandbytes unsloth unsloth_zoo axolotl peft transformers accelerate trl".split()
DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"
CPU = Path("/proc/cpuinfo")
ON = ("1", "true", "on", "yes")
WORDS = {  # that a variable takes; the first is the default
    "NF4_TRITON": ("0", "false", "off", "no", *ON),
    "NF4_BACKEND": ("auto", "triton", "torch"),
}


def describe():
    """Return facts to store with a measurement, in JSON types; without a GPU, card and capability are
    None."""
    import torch

    gpu = torch.cuda.is_available()
    status, driver = subprocess.getstatusoutput(DRIVER)
    return {
        "card": torch.cuda.get_device_name() if gpu else None,
        "capability": list(torch.cuda.get_device_capability()) if gpu else None,
        "cpu": cpu_name(),
        "driver": next(iter(driver.split()), None) if status == 0 else None,
        "cuda": torch.version.cuda,
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "forced": forced_card() or None,
    }


def versions(packages):
    """Return {package: its version, None if it is not installed}. An imported copy's version counts first."""
    found = {}
    for package in packages:
        installed = [one.version for one in importlib.metadata.distributions(name=package)]
        imported = getattr(sys.modules.get(package), "__version__", None)
        found[package] = imported or (installed[0] if installed else None)
    return found


def cpu_name() -> str:
    """Return the model name of the host's CPU, or its architecture if Linux gives no name."""
    text = CPU.read_text(errors="replace") if CPU.exists() else ""
    found = re.search(r"^model name\s*: (.*)", text, re.M)
    return found[1] if found else platform.machine()


def word(variable: str) -> str:
    """Return the word that an environment variable holds. Raises ValueError for one that it does not take."""
    words = WORDS[variable]
    found = os.environ.get(variable, "").strip().lower() or words[0]
    if found not in words:
        raise ValueError(f"{variable}={found!r} is unknown, expected one of {', '.join(words)}")
    return found


def missing(*packages: str) -> str | None:
    """Return which of these packages are not installed and what to do, or None if all are."""
    names = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"Missing packages: pip install {' '.join(names)}." if names else None


def no_gpu(device=None):
    """Return why a GPU (default: the current one) cannot run the kernel and what to do, or None if it can."""
    import torch

    if torch.cuda.is_available():
        if device is not None and torch.device(device).type != "cuda":
            return f"the weight is on {device}, expected CUDA"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= (7, 5):
            return None
        name = torch.cuda.get_device_name(device)
        return f"{name} is sm_{major}{minor}, expected sm_75 (a Tesla T4) or newer."
    if driver := describe()["driver"]:
        return f"torch {torch.__version__} finds no GPU with driver {driver}: install a CUDA build for it."
    if "COLAB_RELEASE_TAG" in os.environ:
        return "No CUDA GPU: choose Runtime > Change runtime type > T4 GPU, then run all cells again."
    return "No CUDA GPU: use a machine with an NVIDIA GPU (a Tesla T4 or newer)."


def cannot_run(device=None) -> str | None:
    """Return why the kernel cannot run on a device (default: the current one) and what to do, or None if
    it can."""
    import torch

    if torch.version.hip is not None:
        return f"AMD GPU (ROCm {torch.version.hip}): the kernel was never run there; use an NVIDIA GPU."
    return (None if interpreted() else no_gpu(device)) or missing("triton")
