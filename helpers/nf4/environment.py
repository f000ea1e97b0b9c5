"""Describe the machine: GPU, driver, versions, Colab or Kaggle, and why the kernel cannot run here.

Needs only the standard library; torch is imported by the functions that ask it. The `# %%` sections are
cells of the notebook.
"""

# ruff: noqa: E402
# %% The machine: GPU, driver, versions id="environment-facts" folded=true
import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys

MIN_CAPABILITY = (7, 5)  # Tesla T4: the oldest GPU that the kernel is compiled and checked for
PACKAGES = ("torch", "triton", "bitsandbytes", "unsloth", "peft", "transformers")
# KAGGLE_USERNAME and KAGGLE_KEY also exist on machines that only use Kaggle's API.
KAGGLE = ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", "KAGGLE_DATA_PROXY_TOKEN")


def colab() -> bool:
    """Return True inside Google Colab."""
    return "google.colab" in sys.modules or any(name.startswith("COLAB_") for name in os.environ)


def kaggle() -> bool:
    """Return True inside a Kaggle notebook."""
    return any(name in os.environ for name in KAGGLE)


def interpreter() -> bool:
    """Return True if Triton's interpreter runs the kernels (TRITON_INTERPRET=1) instead of a GPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def forced() -> str | None:
    """Return the card whose settings NF4_FORCE forces on this one, such as "t4"; None if it is not set."""
    return os.environ.get("NF4_FORCE") or None


def version_of(package: str) -> str | None:
    """Return the installed version of a package without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of PACKAGES; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def nvidia_smi(fields: str) -> list[str]:
    """Return what nvidia-smi says about each GPU, one line per GPU; [] if it does not run."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


@functools.cache
def driver() -> str | None:
    """Return the version of the NVIDIA driver; None if there is none."""
    return next(iter(nvidia_smi("driver_version")), None)


def has_gpu() -> bool:
    """Return True if torch can use a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def gpu_name() -> str | None:
    """Return the name of the current GPU, such as "Tesla T4"; None without a GPU."""
    import torch

    return torch.cuda.get_device_name() if has_gpu() else None


def capability(device=None) -> tuple[int, int] | None:
    """Return the compute capability of a GPU (default: the current one), such as (7, 5); None without one."""
    import torch

    return torch.cuda.get_device_capability(device) if has_gpu() else None


def native_bf16() -> bool:
    """Return True if the GPU has bf16 arithmetic (sm_80 and newer; a T4 does not)."""
    import torch

    return has_gpu() and torch.cuda.is_bf16_supported(including_emulation=False)


def describe() -> dict:
    """Return the facts that belong beside a measurement; all values are JSON types.

    card and capability are None without a GPU; date is UTC in ISO 8601; forced is NF4_FORCE or None.
    """
    import torch

    return {
        "card": gpu_name(),
        "capability": list(capability() or ()) or None,
        "driver": driver() if has_gpu() else None,
        "cuda": torch.version.cuda,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "colab": colab(),
        "kaggle": kaggle(),
        "interpreter": interpreter(),
        "forced": forced(),
    }


# %% Why there is no usable GPU id="environment-gpu" folded=true
def switch_on_gpu() -> str:
    """Return one sentence on how to get a suitable GPU on this platform."""
    if colab():
        return "Choose Runtime > Change runtime type > T4 GPU, then run all cells again."
    if kaggle():
        return "Choose Settings > Accelerator > GPU T4 x2, then run all cells again."
    return "Run on a machine with an NVIDIA GPU (Tesla T4 or newer) and a working driver (nvidia-smi)."


def no_gpu() -> str | None:
    """Return why torch has no CUDA GPU and what to do about it; None if it has one."""
    if has_gpu():
        return None
    import torch

    found = f"nvidia-smi finds a GPU, but torch {torch.__version__}"
    if driver() and torch.version.cuda is None:
        return f"{found} is a build without CUDA. Install a CUDA build from pytorch.org."
    if driver():
        return (
            f"{found} cannot use it with driver {driver()}. "
            "Update the driver, or install a torch build for an older CUDA from pytorch.org."
        )
    note = " Triton's interpreter runs the kernel: correct, but nothing is timed." if interpreter() else ""
    return f"No CUDA GPU.{note} {switch_on_gpu()}"


def old_gpu() -> str | None:
    """Return why the current GPU is too old and what to do about it; None if it is not, or without a GPU."""
    have = capability()
    if have is None or have >= MIN_CAPABILITY:
        return None
    return f"{gpu_name()} is sm_{have[0]}{have[1]}; the kernel needs sm_75 or newer. {switch_on_gpu()}"
