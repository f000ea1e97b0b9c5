"""Compile the kernel for GPUs that need not be here, with the settings it gets there. Nothing is launched.

A process with TRITON_INTERPRET=1 cannot compile, so `build` starts another: `python -m helpers.cross.compile`
reads and writes JSON.
"""

import importlib.util
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

CACHE = machine.ROOT / "build" / "triton-cache"
KERNEL = machine.SRC / "nf4_triton" / "kernel.py"
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
    ttgir: str = ""  # Triton's last form that has tensors, with their layouts
    registers: int = 0  # per thread
    elements: int = 1  # outputs per thread
    triton: str = ""


def load(path: str):
    """Return a version of kernel.py as a module."""
    spec = importlib.util.spec_from_file_location("kernel_to_compile", path)
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    if hasattr(kernel, "_card"):  # names of commits up to 0235d95

        def kernel_constexprs(*variant, n, s):
            tile = n % 8 != 0, n <= s.small_up_to, n <= s.hint_loads_up_to
            return kernel._constexprs(*variant, *tile, s)

        kernel.default_settings, kernel.launch_options = kernel._card, kernel._options
        kernel.kernel_constexprs = kernel_constexprs
    return kernel


def settings_of(kernel, arch: int):
    """Return the Settings that a version of kernel.py chooses on a GPU of sm_`arch`, whatever is forced."""
    major, minor = divmod(arch, 10)
    card = types.SimpleNamespace(name=f"sm_{arch}", major=major, minor=minor, multi_processor_count=1)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_properties", lambda index: card),
        mock.patch.object(kernel, "INTERPRETED", False),
    ):
        return kernel.default_settings.__wrapped__(0)


def launch_of(kernel, variant: Variant):
    """Return (arguments, constexprs, options) of a launch of `variant`; dtypes stand for tensors."""
    chosen, dtype = settings_of(kernel, variant.arch), DTYPES[variant.dtype]
    constexprs = kernel.kernel_constexprs(dtype, variant.nested, 6, 8, n=NUMEL, s=chosen)
    absmax = torch.uint8 if variant.nested else torch.float32
    arguments = (torch.uint8, dtype, absmax, *[torch.float32] * 4, NUMEL // 8, 0)
    return arguments, constexprs, kernel.launch_options(chosen)


def compile_for(arch: int, kernel, arguments, named):
    """Return Triton's CompiledKernel of kernel[grid](*arguments, **named) for a GPU of sm_`arch`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    card = types.SimpleNamespace(
        get_current_device=lambda: f"sm_{arch}",  # Triton keeps a cache of kernels per device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    name = "_active" if "_active" in vars(driver) else "active"  # the latter up to Triton 3.3
    with mock.patch.object(driver, name, card):
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


def build(variants: list[Variant], path: Path = KERNEL) -> list[Built]:
    """Compile each variant of the kernel.py at `path`.

    Raises machine.ChildFailed, which names the variant, if one does not compile.
    """
    request = json.dumps({"path": str(path), "variants": [asdict(variant) for variant in variants]})
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(CACHE)}
    done = machine.python(["-m", "helpers.cross.compile"], variables=variables, stdin=request)
    answers = json.loads(done.out.splitlines()[-1])
    return [Built(variant, **answer) for variant, answer in zip(variants, answers, strict=True)]


def main() -> None:
    import triton

    request, answers = json.load(sys.stdin), []
    kernel = load(request["path"])
    for fields in request["variants"]:
        variant = Variant(**fields)
        print(f"compiling {variant}", file=sys.stderr)
        arguments, constexprs, options = launch_of(kernel, variant)
        found = compile_for(variant.arch, kernel._your_dequantize_nf4_kernel, arguments, constexprs | options)
        sass, registers = disassemble(found.asm["cubin"])
        answers.append(
            {
                "sass": sass,
                "ptx": found.asm["ptx"],
                "ttgir": found.asm["ttgir"],
                "registers": registers,
                "elements": 8 * constexprs["WORDS"],
                "triton": triton.__version__,
            }
        )
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
