"""Compile Triton kernels for a card that is not here, exactly as their own launchers would launch them there.

A process with TRITON_INTERPRET=1 cannot compile, and Unsloth's kernel file needs stand-ins for the package
around it: all compiles happen in `python -m helpers.t4.cross_compile`, which reads and writes JSON.
"""

import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

import msgspec
import torch
import triton

from helpers import machine
from helpers.machine import ROOT
from helpers.t4 import other_card

LARGE = 2048 * 8192  # elements: an official size; the kernel's tile and hints depend on it
CACHE = ROOT / "build" / "triton-cache"
DTYPES = ("float16", "bfloat16", "float32")
# Unsloth chooses its T4 launch by Triton's version: 3.7 brought a table of its own for (7, 5).
UNSLOTH_TABLES = ("3.6.0", "3.7.0")


class Request(msgspec.Struct, frozen=True):
    """A kernel to compile: ours, with the settings that it would choose there, or Unsloth's."""

    arch: int
    dtype: str = "float16"
    nested: bool = True
    numel: int = LARGE
    unsloth: str = ""  # the Triton whose table its launcher uses; "": ours
    force: dict = {}  # other values for fields of Settings (hints=False, asm=False)


class Built(msgspec.Struct):
    """One compiled kernel, or the reason why there is none (`error`)."""

    request: Request
    ptx: str = ""
    cubin: bytes = b""
    num_warps: int = 0
    shared: int = 0  # bytes per block
    elements: float = 0.0  # outputs of one thread
    triton: str = ""  # the version that compiled it
    error: str = ""


def build(requests: list[Request]) -> list[Built]:
    """Compile each request; failures come back as Built.error.

    Raises machine.ChildFailed when the process that compiles fails.
    """
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(CACHE)}
    stdin = msgspec.json.encode(requests).decode()
    done = machine.python(["-m", "helpers.t4.cross_compile"], variables=variables, stdin=stdin)
    return msgspec.json.decode(done.out.splitlines()[-1], type=list[Built])


def _unsloth_module(table: str, arch: int):
    """Unsloth's kernels/nf4.py alone, as it behaves on a card of `arch` with Triton `table`.

    `import unsloth` takes long and wants a GPU: stand-ins take the place of the packages around the file, and
    its torch operators are not registered. For a process that imports nothing else of Unsloth's.
    """
    from packaging.version import Version

    folder = Path(importlib.util.find_spec("unsloth").submodule_search_locations[0]) / "kernels"
    package, zoo, utils = map(types.ModuleType, ("unsloth_kernels", "unsloth_zoo", "unsloth_zoo.utils"))
    package.__path__, zoo.__path__, utils.Version = [str(folder)], [], Version
    sys.modules.update({module.__name__: module for module in (package, zoo, utils)})
    sys.modules.pop("unsloth_kernels.nf4", None)
    unregistered = {name: lambda *a, **k: lambda fn: fn for name in ("triton_op", "custom_op")}
    with (
        mock.patch.object(triton, "__version__", table),
        mock.patch.multiple(torch.library, **unregistered),
    ):
        module = importlib.import_module("unsloth_kernels.nf4")
    module._capability = lambda index: divmod(arch, 10)
    return module


def _unsloth_launch(request: Request):
    """(kernel, arguments, named) of the launch of Unsloth's fused kernel for nested states."""
    module = _unsloth_module(request.unsloth, request.arch)
    size, meta = request.numel, functools.partial(torch.empty, device="meta")
    codes = (meta(length, dtype=torch.uint8) for length in (size // 2, size // 64))  # weight, absmax
    floats, out = meta(256), meta(size, dtype=getattr(torch, request.dtype))
    launcher = mock.MagicMock()  # in the place of the kernel
    with mock.patch.object(torch.cuda, "current_device", lambda: 0):
        module._launch(launcher, *codes, floats, floats, floats, floats, 64, 256, out, fp_fusion=False)
    return module._nf4_dequant_kernel, *launcher.__getitem__.return_value.call_args


def _answer(request: Request) -> Built:
    """The kernel asked for, or the error it raised."""
    try:
        if request.unsloth:
            launch = _unsloth_launch(request)
            # A program is ROWS blocks of 2 * HALF elements, whatever lanes its stores repeat.
            elements = launch[2]["ROWS"] * launch[2]["HALF"] * 2 / (32 * launch[2]["num_warps"])
        else:
            kind = getattr(torch, request.dtype), request.nested, request.numel
            launch = other_card.our_launch(request.arch, *kind, request.force)
            elements = 8 * launch[2]["WORDS"]
        found = other_card.compiled(request.arch, *launch)
    except Exception as error:
        return Built(request, error=f"{type(error).__name__}: {error}"[-3000:])
    asm, warps, shared = found.asm, found.metadata.num_warps, found.metadata.shared
    return Built(request, asm["ptx"], asm["cubin"], warps, shared, elements, triton.__version__)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Request])
    print(msgspec.json.encode([_answer(request) for request in asked]).decode())
