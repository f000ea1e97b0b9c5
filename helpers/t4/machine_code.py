"""SASS: find the tools, disassemble, and count what one thread executes and how wide it loads and stores."""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.M)
_FUNCTION = re.compile(r"^\s*Function : (\S+)$", re.M)
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
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


@dataclass(frozen=True)
class Counted:
    """What one thread executes, and what the kernel occupies."""

    name: str
    executed: tuple[Instruction, ...]
    elements: float  # outputs of one thread
    threads: int  # per block
    registers: int
    shared: int  # bytes per block
    how: str  # how the executed instructions were chosen

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(i.stem in ("LDL", "STL") for i in self.executed)

    def widths(self, stem: str) -> Counter:
        """Bits a lane of each global or shared access: Counter({128: 4})."""
        return Counter(width(i.opcode) for i in self.executed if i.stem == stem)

    def evicted_first(self, stem: str) -> int:
        """Global loads or stores that ask for it."""
        return sum(i.stem == stem and "EF" in i.opcode.split(".") for i in self.executed)

    @property
    def per_element(self) -> float:
        """Thread-instructions per output element."""
        return len(self.executed) / self.elements

    @property
    def load_store(self) -> float:
        """... of them loads, stores and shuffles."""
        return sum(i.stem in LOAD_STORE for i in self.executed) / self.elements


@functools.cache
def tool(name: str = "cuobjdump") -> str:
    """Path of a CUDA binary tool: Triton's wheel carries it, else the PATH. Raises ToolMissing."""
    spec = importlib.util.find_spec("triton")
    for root in spec.submodule_search_locations if spec else ():
        path = Path(root) / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return str(path)
    path = shutil.which(name)
    if path is None:
        raise ToolMissing(f"{name} not found: install triton (its Linux wheel has it) or the CUDA toolkit")
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


def resources(text: str) -> dict[str, dict[str, int]]:
    """Registers, shared and local bytes of each function in the output of `cuobjdump -res-usage`."""
    return {
        name: {"registers": int(reg), "stack": int(stack), "shared": int(shared), "local": int(local)}
        for name, reg, stack, shared, local in _USAGE.findall(text)
    }


def width(opcode: str) -> int:
    """Bits a lane that a load or store moves: 32 unless a suffix says otherwise."""
    if opcode.startswith(("LDSM", "STSM")):
        return 32 * int(opcode[-1])
    sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
    return next((sizes[part] for part in opcode.split(".")[1:] if part in sizes), 32)


def executed(instructions: tuple[Instruction, ...]) -> tuple[tuple[Instruction, ...], str]:
    """The instructions one thread of a full tile issues, and in words how they were chosen.

    From the entry on, jumps that are always taken are followed and a loop is passed once. Where a jump ahead
    depends on a predicate, the way with more unpredicated bytes stored is taken (a full tile needs no mask),
    then the longer one. A predicated instruction is issued either way. The walk ends at an unconditional EXIT
    or at the jump back that closes a loop; padding and the trap behind EXIT are not counted.
    """
    index = {instruction.address: position for position, instruction in enumerate(instructions)}
    seen = {"loops": 0, "forks": 0}

    @functools.cache
    def way(position: int) -> tuple[tuple[float, int], tuple[Instruction, ...]]:
        walked: list[Instruction] = []
        rest: tuple[Instruction, ...] = ()
        while position < len(instructions):
            now = instructions[position]
            position += 1
            if now.stem in ("CALL", "BRX", "JMP"):
                raise NotImplementedError(f"{now.opcode} at {now.address:#x}: calls cannot be counted")
            if now.stem == "BRA":
                target = int(re.search(r"0x([0-9a-f]+)", now.operands).group(1), 16)
                back = target <= now.address
                seen["loops"] += back
                if back and not now.predicate:
                    break
                if not back and now.predicate:
                    seen["forks"] += 1
                    walked.append(now)
                    rest = max(way(position), way(index[target]), key=lambda pair: pair[0])[1]
                    break
                if not back:
                    position = index[target]
            walked.append(now)
            if now.stem == "EXIT" and not now.predicate:
                break
        whole = (*walked, *rest)
        stored = sum(width(i.opcode) for i in whole if i.stem == "STG" and not i.predicate)
        return (stored, len(whole)), whole

    _, path = way(0)
    how = "one pass of its loop" if seen["loops"] else "straight line"
    return path, how + (f", full tile's way at {seen['forks']} forks" if seen["forks"] else "")


def count(name, instructions, registers, shared, threads, elements=None, itemsize=2) -> Counted:
    """Counted of one kernel. `elements` per thread; None: all bytes it stores to global memory / itemsize."""
    path, how = executed(instructions)
    elements = elements or sum(width(i.opcode) / 8 for i in path if i.stem == "STG") / itemsize
    if not elements:
        raise ValueError(f"{name}: no global store found, so the outputs of a thread are unknown")
    return Counted(name, path, elements, threads, registers, shared, how)


def count_cubin(name: str, cubin: bytes, shared: int, threads: int, elements: float) -> Counted:
    """Counted of a cubin that holds one kernel, launched with `shared` bytes. Raises ToolMissing."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = cuobjdump("-sass", "-res-usage", file.name)
    ((function, instructions),) = parse(text).items()
    return count(name, instructions, resources(text)[function]["registers"], shared, threads, elements)
