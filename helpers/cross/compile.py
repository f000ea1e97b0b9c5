"""Compile the kernel for GPUs that need not be here, with the settings it gets there. Nothing is launched.

A process with TRITON_INTERPRET=1 cannot compile, so `build` starts another: `python -m helpers.cross.compile`
reads and writes JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

from helpers import machine
from nf4_triton import kernel, settings

CACHE = machine.ROOT / "build" / "triton-cache"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
NUMEL = 2048 * 8192  # elements that it is compiled for: one of the official sizes


@dataclass(frozen=True)
class Code:
    """The kernel as a GPU gets it, for nested layers in bitsandbytes' default blocks of 64."""

    arch: int
    dtype: str  # of the output, a key of DTYPES
    sass: str  # one line per instruction and encoding, as cuobjdump prints them
    registers: int  # per thread
    elements: int  # outputs per thread
    ptx: str = ""
    triton: str = ""

    def __str__(self):
        return f"sm_{self.arch} {self.dtype}"


def settings_of(arch: int):
    """Return the Settings of a GPU of sm_`arch`, whatever is forced."""
    major, minor = divmod(arch, 10)
    card = types.SimpleNamespace(name=f"sm_{arch}", major=major, minor=minor)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_properties", lambda index: card),
        mock.patch.object(settings, "INTERPRETED", False),
    ):
        return settings.default_settings.__wrapped__(0)


def compile_for(arch: int, kernel, arguments, named):
    """Return Triton's CompiledKernel of kernel[grid](*arguments, **named) for a GPU of sm_`arch`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    card = types.SimpleNamespace(
        get_current_device=lambda: f"sm_{arch}",  # Triton keeps a cache of kernels per device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    active = "_active" if hasattr(driver, "_active") else "active"  # the latter in Triton 3.4
    with mock.patch.object(driver, active, card):
        return kernel.warmup(*arguments, grid=(1,), **named)


def disassemble(cubin: bytes) -> tuple[str, int]:
    """Return (SASS, registers per thread) of a kernel's cubin, from the cuobjdump in Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([tool, "-sass", "-res-usage", file.name], text=True)
    sass = "\n".join(line.rstrip() for line in text.splitlines() if "/*" in line)
    return sass, int(re.search(r" REG:(\d+)", text)[1])


def compiled(arch: int, dtype: str) -> Code:
    """Return the kernel compiled for a GPU of sm_`arch` and an output dtype."""
    import triton

    chosen = settings_of(arch)
    packed = types.SimpleNamespace(nested=True, quant_type="nf4")
    constexprs = settings.kernel_constexprs(packed, (NUMEL, 6, 8), True, True, chosen)
    options = settings.launch_options(chosen)
    # Dtypes stand for the tensors: weight, out, absmax, code2, absmax2, offset.
    arguments = (torch.uint8, DTYPES[dtype], torch.uint8, *[torch.float32] * 3, NUMEL)
    found = compile_for(arch, kernel._your_dequantize_nf4_kernel, arguments, constexprs | options)
    sass, registers = disassemble(found.asm["cubin"])
    elements = 2 * constexprs["ROWS"] // options["num_warps"]
    return Code(arch, dtype, sass, registers, elements, found.asm["ptx"], triton.__version__)


def build(wanted: list[tuple[int, str]]) -> list[Code]:
    """Compile for each (arch, dtype). Raises machine.ChildFailed, which names it, if one does not compile."""
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(CACHE)}
    done = machine.python(["-m", "helpers.cross.compile"], variables=variables, stdin=json.dumps(wanted))
    return [Code(**fields) for fields in json.loads(done.out.splitlines()[-1])]


def main() -> None:
    """Print what `build` reads."""
    codes = []
    for arch, dtype in json.load(sys.stdin):
        print(f"compiling sm_{arch} {dtype}", file=sys.stderr)
        codes.append(asdict(compiled(arch, dtype)))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
