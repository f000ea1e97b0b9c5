"""SASS: find the tools, disassemble, and count what one thread executes and how wide it loads and stores."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from helpers.t4.cards import Card

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.M)
_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.M)
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+)")
# What a load/store unit executes, shuffles included.
LOAD_STORE = ("LDG", "STG", "LD", "ST", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "SHFL")


class ToolMissing(RuntimeError):
    """cuobjdump is not on this machine."""


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # "" when it always executes, else "P0", "!P1", ...
    opcode: str  # with its suffixes: "LDG.E.128.SYS"
    operands: str

    @property
    def stem(self) -> str:
        return self.opcode.split(".")[0]


@functools.cache
def tool() -> str:
    """Path of cuobjdump: Triton's wheel carries it, else the PATH. Raises ToolMissing."""
    spec = importlib.util.find_spec("triton")
    roots = spec.submodule_search_locations if spec else ()
    carried = os.pathsep.join(str(Path(root) / "backends" / "nvidia" / "bin") for root in roots)
    path = shutil.which("cuobjdump", path=carried) or shutil.which("cuobjdump")
    if path is None:
        raise ToolMissing("cuobjdump not found: install triton (its Linux wheel has it) or the CUDA toolkit")
    return path


def cuobjdump(*arguments) -> str:
    """Output of cuobjdump. Raises ToolMissing, or RuntimeError with the tool's own message."""
    done = subprocess.run([tool(), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {' '.join(map(str, arguments))}: {done.stderr.strip()[-400:]}")
    return done.stdout


def parse(text: str) -> dict[str, tuple[Instruction, ...]]:
    """Instructions of each function in the output of `cuobjdump -sass`."""
    parts = _FUNCTION.split(text)
    return {
        name: tuple(
            Instruction(int(address, 16), predicate or "", opcode, operands.strip())
            for address, predicate, opcode, operands in _LINE.findall(body)
        )
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def resources(text: str) -> dict[str, tuple[int, int]]:
    """(registers, bytes of shared memory) of each function in the output of `cuobjdump -res-usage`."""
    return {name: (int(registers), int(shared)) for name, registers, shared in _USAGE.findall(text)}


def width(opcode: str) -> int:
    """Bits a lane that a load or store moves: 32 unless a suffix says otherwise."""
    if opcode.startswith(("LDSM", "STSM")):
        return 32 * int(opcode[-1])
    sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
    return next((sizes[part] for part in opcode.split(".")[1:] if part in sizes), 32)


def _filled(path: tuple[Instruction, ...]) -> tuple[int, int]:
    """How full a tile must be for this way: unpredicated bits stored, then instructions."""
    return sum(width(i.opcode) for i in path if i.stem == "STG" and not i.predicate), len(path)


def executed(instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """The instructions one thread of a full tile issues.

    From the entry on, jumps that are always taken are followed and a loop is passed once. Where a jump ahead
    depends on a predicate, the way with more unpredicated bytes stored is taken (a full tile needs no mask),
    then the longer one. A predicated instruction is issued either way. The walk ends at an unconditional EXIT
    or at the jump back that closes a loop; padding and the trap behind EXIT are not counted.
    """
    index = {instruction.address: position for position, instruction in enumerate(instructions)}

    @functools.cache
    def way(position: int) -> tuple[Instruction, ...]:
        walked: list[Instruction] = []
        while position < len(instructions):
            now = instructions[position]
            position += 1
            if now.stem in ("CALL", "BRX", "JMP"):
                raise NotImplementedError(f"{now.opcode} at {now.address:#x}: calls cannot be counted")
            if now.stem == "BRA":
                target = index[int(re.search(r"0x([0-9a-f]+)", now.operands).group(1), 16)]
                if target < position and not now.predicate:  # back: a loop is closed
                    break
                if target >= position and now.predicate:
                    return (*walked, now, *max(way(position), way(target), key=_filled))
                position = max(position, target)
            walked.append(now)
            if now.stem == "EXIT" and not now.predicate:
                break
        return tuple(walked)

    return way(0)


def count(card: Card, path, registers: int, shared: int, threads: int, elements: float) -> dict:
    """Figures on the `path` of one thread, which writes `elements`, and on what the kernel occupies.

    They are the fields of sass.Code that have their names.
    """
    loads, stores = ([i.opcode for i in path if i.stem == stem] for stem in ("LDG", "STG"))
    return {
        "instructions": len(path) / elements,
        "load_store": sum(i.stem in LOAD_STORE for i in path) / elements,
        "registers": registers,
        "shared": shared,
        "occupancy": card.occupancy(threads, registers, shared),
        "spills": sum(i.stem in ("LDL", "STL") for i in path),
        "store_bits": dict(Counter(map(width, stores))),
        "hinted": {
            what: sum("EF" in opcode.split(".") for opcode in opcodes)
            for what, opcodes in (("loads", loads), ("stores", stores))
        },
    }


def disassembled(cubin: bytes) -> tuple[tuple[Instruction, ...], int]:
    """(instructions, registers) of a cubin that holds one kernel. Raises ToolMissing."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = cuobjdump("-sass", "-res-usage", file.name)
    ((function, instructions),) = parse(text).items()
    return instructions, resources(text)[function][0]
