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
NUMEL = 2048 * 8192  # elements of a variant: one of the official sizes


@dataclass(frozen=True)
class Variant:
    """One compilation of the kernel, for layers in bitsandbytes' default blocks of 64."""

    arch: int = 75
    dtype: str = "fp16"  # of the output, a key of DTYPES
    nested: bool = True

    def __str__(self):
        state = "" if self.nested else " flat"
        return f"sm_{self.arch} {self.dtype}{state}"


@dataclass(frozen=True)
class Built:
    """A compiled variant."""

    variant: Variant
    sass: str  # one line per instruction and encoding, as cuobjdump prints them
    ptx: str = ""
    registers: int = 0  # per thread
    elements: int = 1  # outputs per thread
    triton: str = ""


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


def launch_of(variant: Variant):
    """Return (arguments, constexprs, options) of a launch of `variant`; dtypes stand for tensors."""
    chosen = settings_of(variant.arch)
    packed = types.SimpleNamespace(nested=variant.nested, quant_type="nf4")
    constexprs = settings.kernel_constexprs(packed, (NUMEL, 6, 8), True, True, chosen)
    absmax = torch.uint8 if variant.nested else torch.float32
    arguments = (torch.uint8, DTYPES[variant.dtype], absmax, *[torch.float32] * 3, NUMEL)
    return arguments, constexprs, settings.launch_options(chosen)


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


def build(variants: list[Variant]) -> list[Built]:
    """Compile each variant. Raises machine.ChildFailed, which names the variant, if one does not compile."""
    request = json.dumps([asdict(variant) for variant in variants])
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(CACHE)}
    done = machine.python(["-m", "helpers.cross.compile"], variables=variables, stdin=request)
    answers = json.loads(done.out.splitlines()[-1])
    return [Built(variant, **answer) for variant, answer in zip(variants, answers, strict=True)]


def main() -> None:
    import triton

    answers = []
    for fields in json.load(sys.stdin):
        variant = Variant(**fields)
        print(f"compiling {variant}", file=sys.stderr)
        arguments, constexprs, options = launch_of(variant)
        found = compile_for(variant.arch, kernel._your_dequantize_nf4_kernel, arguments, constexprs | options)
        sass, registers = disassemble(found.asm["cubin"])
        answers.append(
            {
                "sass": sass,
                "ptx": found.asm["ptx"],
                "registers": registers,
                "elements": 2 * constexprs["ROWS"] // options["num_warps"],
                "triton": triton.__version__,
            }
        )
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
