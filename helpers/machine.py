"""What am I running on, and what does that allow: GPU, versions, Colab or Kaggle, Triton's interpreter."""

import contextlib
import datetime
import functools
import getpass
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MIN_CAPABILITY = (7, 5)  # Tesla T4; the oldest card the kernel is compiled and checked for
PACKAGES = ("torch", "triton", "bitsandbytes", "unsloth", "peft", "transformers")
# Other KAGGLE_ variables (KAGGLE_USERNAME, KAGGLE_KEY) also exist on machines that only use Kaggle's API.
KAGGLE_VARIABLES = ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", "KAGGLE_DATA_PROXY_TOKEN")


def colab() -> bool:
    """True inside Google Colab: a COLAB_ variable is set, or google.colab is loaded."""
    return "google.colab" in sys.modules or any(name.startswith("COLAB_") for name in os.environ)


def kaggle() -> bool:
    """True inside a Kaggle notebook."""
    return any(name in os.environ for name in KAGGLE_VARIABLES)


def hosted() -> bool:
    """True where packages go into the running Python: Colab or Kaggle."""
    return colab() or kaggle()


def has_gpu() -> bool:
    """True where torch sees a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def interpreter() -> bool:
    """True when Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1) instead of on a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def prepare() -> None:
    """Set this process up to run kernels; the command line, the notebook and the tests call it first.

    Chooses Triton's interpreter where there is no GPU, and gives a process without a home folder or a user
    name both. With NF4_FORCE=t4 torch reports no native bf16 from here on, as on a T4. Raises RuntimeError
    where triton was imported too early for the interpreter.
    """
    give_home()
    if version_of("torch") is None:
        return
    if not has_gpu() and not interpreter():
        if "triton" in sys.modules:
            raise RuntimeError(
                "triton was imported before TRITON_INTERPRET=1 was set, and there is no CUDA GPU: kernels "
                "cannot run here. Call helpers.machine.prepare() before the first "
                "`import triton`; in a notebook restart the runtime and run from the top."
            )
        os.environ["TRITON_INTERPRET"] = "1"
    if forced() == "t4" and native_bf16():
        _hide_native_bf16()


def give_home():
    """Let caches go to build/home, and name the user, where a container's bare user has no home or name."""
    if not os.access(os.path.expanduser("~"), os.W_OK):
        home = ROOT / "build" / "home"
        home.mkdir(parents=True, exist_ok=True)
        os.environ["HOME"] = str(home)
    try:
        getpass.getuser()
    except (ImportError, KeyError, OSError):  # which of them depends on the version of Python
        os.environ["USER"] = f"uid{os.getuid()}"


def forced() -> str | None:
    """The card whose decisions are forced on the one at hand (NF4_FORCE), such as "t4"; None without."""
    return os.environ.get("NF4_FORCE") or None


def _hide_native_bf16():
    """Make torch report bf16 as it does on a T4: by emulation only. Inductor then refuses bf16 graphs."""
    import torch

    supported = torch.cuda.is_bf16_supported

    def is_bf16_supported(including_emulation: bool = True):
        return including_emulation and supported(including_emulation=True)

    torch.cuda.is_bf16_supported = is_bf16_supported
    dynamo = sys.modules.get("torch._dynamo.device_interface")
    if dynamo:  # what Inductor asks: a reference taken when the module was imported
        dynamo.CudaInterface.is_bf16_supported = staticmethod(is_bf16_supported)


def capability(device=None) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, such as (7, 5); None without a GPU."""
    import torch

    return torch.cuda.get_device_capability(device) if has_gpu() else None


def native_bf16() -> bool:
    """True when torch says the GPU has bf16 arithmetic of its own (sm_80 on; a T4 has not)."""
    import torch

    return has_gpu() and torch.cuda.is_bf16_supported(including_emulation=False)


def version_of(package: str) -> str | None:
    """Installed version of a distribution, without importing it; None when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.11.0+cu128' -> (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version).group().split("."))


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide a result; None where a package is absent."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def nvidia_smi(fields: str) -> list[str]:
    """What nvidia-smi says of each GPU, a line each; [] when it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


@functools.cache
def driver() -> str | None:
    """Version of the NVIDIA driver; None where nvidia-smi does not know it."""
    return next(iter(nvidia_smi("driver_version")), None)


def gpu_name() -> str | None:
    """Name of the current CUDA device, such as 'Tesla T4'; None without a GPU."""
    import torch

    return torch.cuda.get_device_name() if has_gpu() else None


def describe() -> dict:
    """Facts for the head of every result file; all values are JSON types."""
    import torch

    card = capability()
    return {
        "gpu": gpu_name(),
        "capability": list(card) if card else None,
        "driver": driver() if card else None,
        "cuda": torch.version.cuda,
        **versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "colab": colab(),
        "kaggle": kaggle(),
        "interpreter": interpreter(),
        "forced": forced(),
    }


def result_folder() -> Path:
    """Where this machine's measurements belong: results/<gpu>/, such as results/nvidia-h200.

    NF4_RESULTS replaces the `results` folder. A run with a card's decisions forced (NF4_FORCE) gets a folder
    of its own, such as results/nvidia-h200-forced-t4, so that it is never taken for the card itself.
    """
    root = Path(os.environ.get("NF4_RESULTS") or ROOT / "results")
    slug = re.sub(r"[^a-z0-9]+", "-", (gpu_name() or "cpu-interpreter").lower()).strip("-")
    return root / (f"{slug}-forced-{forced()}" if forced() else slug)


def switch_on_gpu() -> str:
    """How to get a suitable GPU on the platform at hand, as one sentence."""
    if colab():
        return "Choose Runtime > Change runtime type > T4 GPU, then run all cells again."
    if kaggle():
        return "Choose Settings > Accelerator > GPU T4 x2, then run all cells again."
    return "Run on a machine with an NVIDIA GPU (Tesla T4 or newer) and a working driver (nvidia-smi)."


def no_gpu() -> str | None:
    """Why there is no usable CUDA GPU and what to do; None when there is one."""
    if has_gpu():
        return None
    import torch

    if driver() and torch.version.cuda is None:
        cause = f"nvidia-smi finds a GPU, but torch {torch.__version__} is a build without CUDA."
        return f"{cause} Run `bash colab_setup.sh`, which installs the CUDA build."
    if driver():
        cause = f"nvidia-smi finds a GPU, but torch {torch.__version__} cannot use it with driver {driver()}."
        return f"{cause} Update the driver, or install a torch build for an older CUDA from pytorch.org."
    cause = "No CUDA GPU: the kernel runs in Triton's interpreter (correct, far too slow to time)."
    return f"{cause} {switch_on_gpu()}"


def old_gpu() -> str | None:
    """Why the GPU at hand is too old and what to do; None when it is new enough or absent."""
    card = capability()
    if card is None or card >= MIN_CAPABILITY:
        return None
    have, need = ("sm_{}{}".format(*pair) for pair in (card, MIN_CAPABILITY))
    return f"{gpu_name()} is {have}; the kernel needs {need} or newer. {switch_on_gpu()}"


class ChildFailed(RuntimeError):
    """The process failed or did not end in time; the text holds the end of what it printed."""


class Done(NamedTuple):
    """How a process ended: `status` is None where it was ended after its time, negative after a signal."""

    status: int | None
    out: str
    err: str


def python(
    arguments: Sequence[str],
    *,
    variables: Mapping[str, str | None] | None = None,
    folder: Path | str = ROOT,
    stdin: str = "",
    timeout: float = 300,
    check: bool = True,
) -> Done:
    """Run this Python with `arguments` ("-m", "helpers.x", ... or "-c", code) in `folder`.

    The repository is on its path wherever it runs. variables: added to the environment; None removes one.
    After `timeout` seconds it is ended with all processes it started. check: raise ChildFailed unless its
    status is 0.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, timeout)
        done = Done(process.returncode, out, err)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started: they share a session
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        done = Done(None, *process.communicate())
    if check and done.status != 0:
        how = f"did not end within {timeout:g} s" if done.status is None else f"ended with {done.status}"
        text = f"{done.out.strip()[-2000:]}\n{done.err.strip()[-6000:]}".strip()
        raise ChildFailed(f"python {' '.join(map(str, arguments))[:300]} {how}:\n{text}")
    return done
