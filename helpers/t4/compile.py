"""Compile the kernel for GPUs that need not be here, with the settings it gets there. Nothing is launched.

A process with TRITON_INTERPRET=1 cannot compile, so `build` starts another: `python -m helpers.t4.compile`
reads and writes JSON.
"""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

from helpers import machine

CACHE = machine.ROOT / "build" / "triton-cache"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
LARGE, SMALL = 2048 * 8192, 2**20  # elements: an official size, and one that gets the tile of small tensors


@dataclass(frozen=True)
class Variant:
    """One compilation of the kernel, for layers in bitsandbytes' default blocks of 64."""

    arch: int = 75
    dtype: str = "fp16"  # of the output, a key of DTYPES
    nested: bool = True
    small: bool = False  # the tile of small tensors
    settings: dict = field(default_factory=dict)  # fields of Settings to change

    def __str__(self):
        changed = "".join(f" {name}={value}" for name, value in self.settings.items())
        return f"sm_{self.arch} {self.dtype}{'' if self.nested else ' flat'}{' small' * self.small}{changed}"


@dataclass(frozen=True)
class Built:
    """A compiled variant."""

    variant: Variant
    ptx: str = ""
    sass: str = ""  # one line per instruction and encoding, as cuobjdump prints them
    registers: int = 0  # per thread
    shared: int = 0  # bytes per program
    threads: int = 32  # per program
    elements: int = 1  # outputs per thread
    triton: str = ""


def settings(arch: int):
    """Return the kernel's Settings on a GPU of sm_`arch`, whatever is forced here."""
    from helpers.nf4 import kernel

    major, minor = divmod(arch, 10)
    card = types.SimpleNamespace(name=f"sm_{arch}", major=major, minor=minor, multi_processor_count=1)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_properties", lambda _: card),
        mock.patch.object(kernel, "INTERPRETED", False),
    ):
        return kernel._card.__wrapped__(0)


def launch(variant: Variant, numel: int | None = None):
    """Return (kernel, arguments, constexprs, options) of a launch of `variant`; dtypes stand for tensors.

    numel: elements of the output. Only this function and `settings` know the kernel's inner names.
    """
    import torch

    from helpers.nf4 import kernel

    chosen = dataclasses.replace(settings(variant.arch), **variant.settings)
    n, dtype = numel or (SMALL if variant.small else LARGE), getattr(torch, DTYPES[variant.dtype])
    tile = (n % 8 != 0, variant.small or n <= chosen.small_up_to, n <= chosen.hint_loads_up_to)
    constexprs = kernel._constexprs(dtype, variant.nested, 6, 8 * variant.nested, *tile, chosen)
    absmax = torch.uint8 if variant.nested else torch.float32
    arguments = (torch.uint8, dtype, absmax, *[torch.float32] * 4, n // 8, n % 8)
    return kernel._your_dequantize_nf4_kernel, arguments, constexprs, kernel._options(chosen)


def compiled(arch: int, kernel, arguments, named):
    """Return Triton's CompiledKernel of kernel[grid](*arguments, **named) for a GPU of sm_`arch`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    card = types.SimpleNamespace(
        get_current_device=lambda: f"sm_{arch}",  # Triton keeps a cache of kernels per device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    with mock.patch.object(driver, "_active" if "_active" in vars(driver) else "active", card):
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


def build(variants: list[Variant], source: str = "") -> list[Built]:
    """Compile each variant.

    source: kernel.py of another commit, whose device code is then compiled with this tree's settings.
    Raises machine.ChildFailed, which names the variant, if one does not compile.
    """
    request = json.dumps({"variants": list(map(asdict, variants)), "source": source})
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(CACHE)}
    done = machine.python(["-m", "helpers.t4.compile"], variables=variables, stdin=request)
    answers = json.loads(done.out.splitlines()[-1])
    return [Built(variant, *answer) for variant, answer in zip(variants, answers, strict=True)]


def main() -> None:
    import triton

    request, other, answers = json.load(sys.stdin), None, []
    with tempfile.TemporaryDirectory() as folder:
        if request["source"]:
            path = Path(folder, "other_kernel.py")
            path.write_text(request["source"])
            spec = importlib.util.spec_from_file_location("other_kernel", path)
            other = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(other)
        for variant in (Variant(**fields) for fields in request["variants"]):
            print(f"compiling {variant}", file=sys.stderr)
            kernel, arguments, constexprs, options = launch(variant)
            kernel = other._your_dequantize_nf4_kernel if other else kernel
            found = compiled(variant.arch, kernel, arguments, constexprs | options)
            sass, registers = disassemble(found.asm["cubin"])
            threads, elements = 32 * found.metadata.num_warps, 8 * constexprs["WORDS"]
            shared, version = found.metadata.shared, triton.__version__
            answers.append((found.asm["ptx"], sass, registers, shared, threads, elements, version))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
