"""The checkout: its files, and setting up a process for it."""

import contextlib
import importlib.util
import os
from pathlib import Path

from helpers import SRC  # noqa: F401
from nf4_triton.core.supported import forced_card
from nf4_triton.environment import no_gpu  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"


def has_gpu() -> bool:
    """Return whether torch can use a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def prepare() -> None:
    """Set this process up to run kernels. The command line, the notebook, and the tests call it first.

    Without a GPU, it chooses Triton's interpreter. A process without a home folder gets one. NF4_TRITON is
    removed: it would switch the kernel on in the libraries that the kernel is compared with. With
    NF4_FORCE=t4, torch reports no native bf16 from now on, as on a T4.
    """
    os.environ.pop("NF4_TRITON", None)
    if not os.access(os.path.expanduser("~"), os.W_OK):
        home = ROOT / "build" / "home"  # for the caches of Triton and Inductor
        home.mkdir(parents=True, exist_ok=True)
        os.environ["HOME"] = str(home)
    if importlib.util.find_spec("torch") is None:
        return
    if not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    if forced_card() == "t4" and has_gpu():
        hide_native_bf16()


def hide_native_bf16() -> None:
    """Make torch report bf16 as on a T4: only by emulation. Inductor then refuses bf16 graphs."""
    import torch
    from torch._dynamo.device_interface import CudaInterface

    supported = torch.cuda.is_bf16_supported

    def is_bf16_supported(including_emulation: bool = True):
        return including_emulation and supported(including_emulation=True)

    torch.cuda.is_bf16_supported = is_bf16_supported
    CudaInterface.is_bf16_supported = staticmethod(is_bf16_supported)  # Inductor asks this one


def write_whole(path: Path | str, content: str | bytes) -> None:
    """Replace a file's content, or leave the file as it was. Raises OSError, which names the file."""
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
