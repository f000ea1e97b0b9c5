"""Describe the machine: GPU, driver, versions, and why the kernel cannot run here.

Torch is imported by the functions that ask it. The notebook's machine cell makes the same description.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys

PACKAGES = ("torch", "triton", "bitsandbytes", "unsloth", "peft", "transformers")
DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"


def describe():
    """Return what belongs beside a measurement, in JSON types; card and capability are None without a GPU."""
    import torch

    gpu = torch.cuda.is_available()
    status, driver = subprocess.getstatusoutput(DRIVER)
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        found = [one.version for one in importlib.metadata.distributions(name=package)]
        imported = getattr(sys.modules.get(package), "__version__", None)
        versions[package] = imported or (found[0] if found else None)
    return {
        "card": torch.cuda.get_device_name() if gpu else None,
        "capability": list(torch.cuda.get_device_capability()) if gpu else None,
        "driver": (driver.split() or [None])[0] if status == 0 else None,
        "cuda": torch.version.cuda,
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "forced": os.environ.get("NF4_FORCE") or None,
    }


def no_gpu(device=None):
    """Return why a GPU (default: the current) cannot run the kernel and what to do, None if it can."""
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
    if "google.colab" in sys.modules or any(name.startswith("COLAB_") for name in os.environ):
        return "No CUDA GPU: choose Runtime > Change runtime type > T4 GPU, then run all cells again."
    return "No CUDA GPU: use a machine with an NVIDIA GPU (a Tesla T4 or newer)."


def has_gpu() -> bool:
    """Return whether torch can use a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def gpu_name() -> str | None:
    """Return the name of the current GPU, such as "Tesla T4", None without one."""
    return describe()["card"]


def native_bf16() -> bool:
    """Return whether the GPU has bf16 arithmetic (sm_80 and newer; a T4 does not)."""
    import torch

    return has_gpu() and torch.cuda.is_bf16_supported(including_emulation=False)
