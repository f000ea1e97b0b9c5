"""What a checkout adds to nf4_triton.environment: its files, child processes, setting a process up."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from helpers import SRC  # noqa: F401
from nf4_triton.environment import no_gpu  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"


def has_gpu() -> bool:
    """Return whether torch can use a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def prepare() -> None:
    """Set this process up to run kernels; the command line, the notebook, and the tests call it first.

    Chooses Triton's interpreter where there is no GPU, and gives a process without a home folder one. With
    NF4_FORCE=t4 torch reports no native bf16 from here on, as on a T4.
    """
    if not os.access(os.path.expanduser("~"), os.W_OK):
        home = ROOT / "build" / "home"  # for the caches of Triton and Inductor
        home.mkdir(parents=True, exist_ok=True)
        os.environ["HOME"] = str(home)
    if importlib.util.find_spec("torch") is None:
        return
    if not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if os.environ.get("NF4_FORCE", "").strip().lower() == "t4" and has_gpu():
        hide_native_bf16()


def hide_native_bf16() -> None:
    """Make torch report bf16 as it does on a T4: by emulation only. Inductor then refuses bf16 graphs."""
    import torch
    from torch._dynamo.device_interface import CudaInterface

    supported = torch.cuda.is_bf16_supported

    def is_bf16_supported(including_emulation: bool = True):
        return including_emulation and supported(including_emulation=True)

    torch.cuda.is_bf16_supported = is_bf16_supported
    CudaInterface.is_bf16_supported = staticmethod(is_bf16_supported)  # Inductor asks this one


def write_whole(path: Path | str, content: str | bytes) -> None:
    """Replace a file's content, or leave the file as it was if that fails. Raises OSError, which names it."""
    target = Path(path).resolve()  # a link stays a link
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


class Done(NamedTuple):
    """What a process printed."""

    out: str
    err: str


def python(
    arguments: Sequence[str],
    *,
    variables: Mapping[str, str | None] | None = None,
    folder: Path | str = ROOT,
    timeout: float = 300,
    check: bool = True,
) -> Done:
    """Run this Python with `arguments` ("-m", "helpers.x", ... or "-c", code) in `folder`.

    It can import what this process can, wherever it runs. After `timeout` seconds it is ended with all
    processes it started. variables: added to the environment; None removes one. check: raise RuntimeError
    unless its status is 0.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
        how = f"ended with {process.returncode}" if process.returncode else ""
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started: they share a session
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        out, err = process.communicate()
        how = f"did not end within {timeout:g} s"
    if check and how:
        text = f"{out.strip()[-2000:]}\n{err.strip()[-6000:]}".strip()
        raise RuntimeError(f"python {' '.join(map(str, arguments))[:300]} {how}:\n{text}")
    return Done(out, err)
