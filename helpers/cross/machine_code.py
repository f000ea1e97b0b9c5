"""Compile the kernels for GPUs that this machine may lack, with their settings, and check the machine code:
no spills, wide loads and stores, few registers. Nothing is launched.

A GPU's tile is in nf4_triton/core/supported.py.
"""

import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from helpers.puzzle.layers import quantized_layer
from nf4_triton.core import launch, launch_general, settings
from nf4_triton.core.checks import check_state
from nf4_triton.core.state import read_state

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CARDS = (  # sm_ numbers
    75,  # Tesla T4
    80,  # A100
    86,  # RTX 30, A10
    89,  # RTX 40, L4
    90,  # H100, H200
    100,  # B200
    120,  # RTX 50
)
WANTED = [(arch, dtype, False) for arch in CARDS for dtype in ("fp16", "bf16")]
WANTED += [(arch, dtype, True) for arch in (75, 90) for dtype in DTYPES]  # the general kernel
REGISTERS = 96  # the most per thread: 75 to 87 on a T4 with Triton 3.4 to 3.9, 32 to 56 on other cards
POINTERS = {dtype: f"*{name}" for name, dtype in DTYPES.items()} | {torch.uint8: "*u8"}


class Code(NamedTuple):
    """A kernel compiled for a GPU, for nested layers in bitsandbytes' default blocks of 64."""

    arch: int
    dtype: str  # of the output, a key of DTYPES
    general: bool  # the general kernel, not the puzzle's
    registers: int  # per thread
    local: int  # bytes of local memory per thread, such as spilled registers
    elements: int  # outputs per thread
    ptx: str
    triton: str = ""

    def __str__(self):
        return f"sm_{self.arch} {self.dtype}{', general' if self.general else ''}"


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


def resources(cubin: bytes) -> dict[str, int]:
    """Return a kernel's resources, from the cuobjdump in Triton's wheel: {"REG": registers, ...}."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def compiled(arch: int, dtype: str, general: bool) -> Code:
    """Return a kernel compiled for a GPU of sm_`arch` and an output dtype, for aligned layers of any size.

    Does not work in Triton's interpreter.
    """
    import triton

    layer = quantized_layer(64, 64, DTYPES[dtype], device="cpu")
    tensors, layout = read_state(layer.weight.data, layer.weight.quant_state)
    out = torch.empty(64, 64, dtype=DTYPES[dtype])
    with settings.force(**vars(settings.of_capability(*divmod(arch, 10)))):
        kernel, _, arguments, options = prepared(tensors, layout, out, general)
        chosen = settings.settings()
    found = compile_for(arch, kernel, arguments, options)
    taken = resources(found.asm["cubin"])
    local = taken["STACK"] + taken["LOCAL"]
    elements = 64 * chosen.tile_rows // (32 * chosen.num_warps)
    return Code(arch, dtype, general, taken["REG"], local, elements, found.asm["ptx"], triton.__version__)


def build(wanted: list[tuple[int, str, bool]]) -> list[Code]:
    """Compile each (arch, dtype, general) in a new process: Triton's interpreter cannot compile."""
    spawn = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ.pop("TRITON_PTXAS_PATH", None)  # torch's own, from Inductor: it allots other registers
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return list(pool.map(compiled, *zip(*wanted, strict=True)))


def faults(code: Code) -> list[str]:
    """Return what is wrong with the code, in words."""
    problems = []
    wide = len(re.findall(r"\bld\.global\S*\.v4\.b32", code.ptx))
    loads = code.elements // 32  # of 32 codes of 4 bits
    if code.local:
        problems.append(f"{code.local} bytes of local memory per thread, expected none")
    if wide != loads:
        problems.append(f"{wide} loads of 128 bits, expected {loads} for {code.elements} codes")
    if narrow := re.findall(r"\bst\.global(?!\S*\.v4\.b32)", code.ptx):
        problems.append(f"{len(narrow)} narrow stores, expected 128 bits each")
    if code.registers > REGISTERS:
        problems.append(f"{code.registers} registers per thread, expected at most {REGISTERS}")
    return [f"{code}: {problem}" for problem in problems]


def main() -> int:
    """`python -m helpers cross`: compile for all cards, print registers and faults. Returns 1 for a fault."""
    status = 0
    for code in build(WANTED):
        print(f"{code}: {code.registers} registers per thread")
        for problem in faults(code):
            print(problem)
            status = 1
    return status
