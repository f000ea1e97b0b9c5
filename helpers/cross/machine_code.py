"""Compile the kernel for GPUs that need not be here, with the settings it gets there. Nothing is launched."""

import multiprocessing
import os
import re
import subprocess
import tempfile
import types
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from helpers.puzzle.layers import quantized_layer
from nf4_triton.core import launch, launch_general, settings
from nf4_triton.core.checks import check_state
from nf4_triton.core.state import read_state

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
POINTERS = {dtype: f"*{name}" for name, dtype in DTYPES.items()} | {torch.uint8: "*u8"}


class Code(NamedTuple):
    """A kernel as a GPU gets it, for nested layers in bitsandbytes' default blocks of 64."""

    arch: int
    dtype: str  # of the output, a key of DTYPES
    general: bool  # the general kernel, not the puzzle's
    sass: str  # as cuobjdump prints it
    registers: int  # per thread
    elements: int  # outputs per thread
    ptx: str = ""
    triton: str = ""

    def __str__(self):
        return f"sm_{self.arch} {self.dtype}{', general' if self.general else ''}"


def settings_of(arch: int):
    """Return the Settings of a GPU of sm_`arch`, whatever is forced."""
    major, minor = divmod(arch, 10)
    card = types.SimpleNamespace(major=major, minor=minor)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_properties", lambda index: card),
        mock.patch.object(settings, "INTERPRETED", False),
        settings.force(),
    ):
        return settings.settings()


def prepared(tensors, layout, out, general: bool) -> tuple:
    """Return (kernel, grid, arguments, launch options) of a launch."""
    if general:
        kernel, sizes = launch_general._dequantize_general_kernel, check_state(tensors, layout)
        grid, pointers, after, options = launch_general.prepare(tensors, layout, sizes, out)
    else:
        kernel = launch._your_dequantize_nf4_kernel
        grid, pointers, after, options = launch.prepare(tensors, layout, out)
    return kernel, grid, pointers + after, options


def compile_for(arch: int, kernel, arguments: tuple, options: dict):
    """Return Triton's CompiledKernel of a launch for a GPU of sm_`arch`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs = {}, {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr:
            constexprs[parameter.name], signature[parameter.name] = value, "constexpr"
        elif isinstance(value, int):
            signature[parameter.name] = "i64"
        else:
            signature[parameter.name] = POINTERS[value.dtype]
    source = ASTSource(kernel, signature, constexprs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def disassemble(cubin: bytes) -> str:
    """Return what the cuobjdump in Triton's wheel says of a kernel: its SASS and its resources."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-sass", "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def compiled(arch: int, dtype: str, general: bool) -> Code:
    """Return a kernel compiled for a GPU of sm_`arch` and an output dtype; not in Triton's interpreter.

    It is that of an aligned layer; its number of elements is no constexpr.
    """
    import triton

    layer = quantized_layer(64, 64, DTYPES[dtype], device="cpu")
    tensors, layout = read_state(layer.weight.data, layer.weight.quant_state)
    out = torch.empty(64, 64, dtype=DTYPES[dtype])
    chosen = settings_of(arch)
    with settings.force(**asdict(chosen)):
        kernel, _, arguments, options = prepared(tensors, layout, out, general)
    found = compile_for(arch, kernel, arguments, options)
    sass = disassemble(found.asm["cubin"])
    registers = int(re.search(r" REG:(\d+)", sass)[1])
    elements = 64 * chosen.rows // (32 * chosen.num_warps)
    return Code(arch, dtype, general, sass, registers, elements, found.asm["ptx"], triton.__version__)


def build(wanted: list[tuple[int, str, bool]]) -> list[Code]:
    """Compile each (arch, dtype, general), in a new process: one with TRITON_INTERPRET=1 cannot compile."""
    spawn = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ.pop("TRITON_PTXAS_PATH", None)  # Inductor names torch's own, which allots other registers
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return list(pool.map(compiled, *zip(*wanted, strict=True)))
