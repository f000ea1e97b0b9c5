"""Check the kernel's machine code (SASS) for each GPU: instruction budget, occupancy, order of loads.

A warp issues in order: a load placed after the first use of another load's result starts one memory latency
later. To add a GPU, add a row to CARDS.
"""

import argparse
import functools
import hashlib
import re
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

from helpers import machine
from helpers.nf4.environment import describe
from helpers.results.store import Row, write
from helpers.t4 import predict
from helpers.t4.compile import DTYPES, Built, Variant, build

REGISTERS = 65536  # per SM, on all of them


@dataclass(frozen=True)
class Card:
    """What an SM holds (CUDA C++ Programming Guide, compute capabilities) and the kernel's budget."""

    name: str
    threads: int
    blocks: int
    instructions: tuple[float, float, float]  # per output element at most: fp16, bf16, fp32

    def occupancy(self, threads: int, registers: int) -> float:
        """Return the share of resident threads (0 to 1) that blocks of so many threads reach.

        registers: per thread. Shared memory within the budget limits no card.
        """
        warps = -(-threads // 32)
        per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
        limits = (self.blocks, self.threads // (warps * 32), REGISTERS // per_warp // warps)
        return min(limits) * warps * 32 / self.threads


# Budgets are 10 to 20 % above what Triton 3.3 to 3.9 produce. A T4 rounds bf16 in integers.
CARDS = {  # by sm_ number
    75: Card("Tesla T4", 1024, 16, (5.5, 6.5, 7.0)),
    80: Card("A100", 2048, 32, (5.25, 5.25, 7.0)),
    86: Card("RTX 30, A10", 1536, 16, (5.25, 5.25, 7.0)),
    89: Card("RTX 40, L4", 1536, 24, (5.25, 5.25, 7.0)),
    90: Card("H100, H200", 2048, 32, (5.25, 5.25, 7.0)),
    100: Card("B200", 2048, 32, (5.25, 5.25, 7.0)),
    120: Card("RTX 50", 1536, 24, (5.25, 5.25, 7.0)),
}
SMALL_TILE_MORE = 4.0  # instructions per element: a small program spreads its setup over fewer elements
OCCUPANCY = {"fp16": 1.0, "bf16": 1.0, "fp32": 0.8}  # at least
SHARED = {"fp16": 1024, "bf16": 1024, "fp32": 6144}  # bytes at most; code2 has 1024


class Instruction(NamedTuple):
    address: int
    predicate: str  # "P0", "!P1"; "" if it always executes
    opcode: str  # with suffixes: "LDG.E.128.SYS"
    operands: str

    @property
    def stem(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def bits(self) -> int:
        """Bits per lane that a load or store moves."""
        sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
        return next((sizes[part] for part in self.opcode.split(".")[1:] if part in sizes), 32)


_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.M)


def parse(text: str) -> list[Instruction]:
    """Return the instructions of one kernel in the output of `cuobjdump -sass`."""
    return [Instruction(int(at, 16), p, opcode, rest.strip()) for at, p, opcode, rest in _LINE.findall(text)]


def executed(code: list[Instruction]) -> list[Instruction]:
    """Return the instructions that one thread of a full tile issues, in order.

    Of two ways ahead, the one that stores more bits without a predicate is a full tile's, then the longer.
    A loop is passed once; nothing after an unconditional EXIT counts. Raises NotImplementedError at a call.
    """
    index = {instruction.address: position for position, instruction in enumerate(code)}

    def full(path):
        return sum(i.bits for i in path if i.stem == "STG" and not i.predicate), len(path)

    @functools.cache
    def walk(position):
        path = []
        while position < len(code):
            now = code[position]
            position += 1
            if now.stem in ("CALL", "BRX", "JMP"):
                raise NotImplementedError(f"{now.opcode} at {now.address:#x}: calls cannot be counted")
            if now.stem == "BRA":
                target = index[int(re.search(r"0x([0-9a-f]+)", now.operands)[1], 16)]
                if target < position and not now.predicate:  # back: the end of a loop
                    break
                if target >= position and now.predicate:
                    return [*path, now, *max(walk(position), walk(target), key=full)]
                position = max(position, target)
            path.append(now)
            if now.stem == "EXIT" and not now.predicate:
                break
        return path

    return walk(0)


class Load(NamedTuple):
    position: int
    what: str  # the argument it reads; "?" if unknown
    late: bool  # issued after a wait for another load


# The kernel's first arguments, 8 bytes each.
ARGUMENTS = "words out absmax table code2 absmax2 offset".split()
PARAMETERS = ((100, 0x380), (90, 0x210), (70, 0x160))  # from this sm_ on: their offset in constant bank 0
_REGISTER = re.compile(r"(?<![A-Z0-9])(U?R)(\d+)(\.64)?")
_NO_RESULT = ("STL", "ST", "ISETP", "FSETP", "UISETP", "BAR", "BRA", "EXIT", "NOP", "WARPSYNC")


def _registers(text: str, wide: int = 1) -> list[str]:
    """Registers that an operand names: two of "R2.64", `wide` of one that starts a vector."""
    found = _REGISTER.findall(text)
    return [f"{kind}{int(n) + i}" for kind, n, two in found for i in range(max(wide, 2 if two else 1))]


def _operands(now: Instruction) -> tuple[list[str], list[str]]:
    """Registers that it writes, and that it reads."""
    operands, parts, wide = now.operands.split(", "), now.opcode.split("."), max(1, now.bits // 32)
    written, stored = [], []
    if now.stem in ("STG", "STS"):
        stored = _registers(operands[-1], wide)
    elif now.stem not in _NO_RESULT:
        wide = max(wide, 2) if "WIDE" in parts or parts == ["CS2R"] else wide
        predicates = re.compile(r"!?U?P(\d|T)")
        first = next((i for i, text in enumerate(operands) if not predicates.fullmatch(text)), 0)
        written = _registers(operands.pop(first), wide)
    return written, _registers(", ".join(operands)) + stored


def read_order(path: list[Instruction], arch: int) -> tuple[list[Load], list[str]]:
    """Return the loads along the `path` of one thread (`executed`) and what happens to memory, in order.

    Events are "absmax@19", "<wait absmax@19>", "BAR@60", "STG@115".
    """
    base = next(start for least, start in PARAMETERS if arch >= least)
    waiting: dict[str, Load] = {}  # register -> the load whose value it will hold
    holds: dict[str, set[str]] = {}  # register -> arguments that the address in it derives from
    loads, events, waited = [], [], False

    def origins(registers):
        return set().union(*(holds.get(name, ()) for name in registers))

    for position, now in enumerate(path):
        written, needed = _operands(now)
        offsets = [int(at, 16) - base for at in re.findall(r"c\[0x0\]\[0x([0-9a-f]+)\]", now.operands)]
        derived = {ARGUMENTS[at // 8] for at in offsets if 0 <= at < 8 * len(ARGUMENTS)} | origins(needed)
        used = {waiting[name] for name in (*needed, *written) if name in waiting}
        if used:
            waited = True
            events.append(f"<wait {', '.join(f'{load.what}@{load.position}' for load in sorted(used))}>")
            waiting = {name: load for name, load in waiting.items() if load not in used}
        if now.stem == "LDG":
            address = re.search(r"(?<!c)\[([^\[\]]*)\](?!\[)", now.operands)  # not desc[...] (sm_80 on)
            found = origins(_registers(address[1].replace(".64", ""))) if address else ()
            loads.append(Load(position, found.pop() if len(found) == 1 else "?", waited))
            waiting |= dict.fromkeys(written, loads[-1])
            events.append(f"{loads[-1].what}@{position}")
        elif now.stem in ("STG", "BAR", "STS", "LDS"):
            events.append(f"{now.stem}@{position}")
        if now.stem in ("LDG", "LDS"):  # an address that was loaded is not followed
            derived = set()
        for name in written:  # a predicated write may leave what was there
            holds[name] = derived | (holds.get(name, set()) if now.predicate else set())
    return loads, events


class Code:
    """The machine code of one compiled variant: figures, order of loads, faults."""

    def __init__(self, built: Built):
        self.built, self.variant, self.name = built, built.variant, str(built.variant)
        self.path = executed(parse(built.sass))
        self.loads, self.events = read_order(self.path, self.variant.arch)
        self.occupancy = CARDS[self.variant.arch].occupancy(built.threads, built.registers)
        self.instructions = len(self.path) / built.elements  # per output element
        self.hash = hashlib.sha256(built.sass.encode()).hexdigest()[:12]  # instructions and encodings

    def faults(self) -> list[str]:
        """Return what exceeds the budget, in words. The order of loads counts for nested states."""
        dtype, each, shared = self.variant.dtype, self.instructions, self.built.shared
        limit = CARDS[self.variant.arch].instructions[list(DTYPES).index(dtype)]
        limit += SMALL_TILE_MORE * self.variant.small
        spills = sum(i.stem in ("LDL", "STL") for i in self.path)
        least, bits = OCCUPANCY[dtype], {i.bits for i in self.path if i.stem == "STG"}
        found = [
            (each > limit, f"{each:.2f} instructions per element, at most {limit:g}"),
            (spills, f"{spills} spills to local memory"),
            (bits != {128}, f"stores of {sorted(bits)} bits, expected 128"),
            (self.occupancy < least, f"occupancy {self.occupancy:.0%}, at least {least:.0%}"),
            (shared > SHARED[dtype], f"{shared} bytes of shared memory, at most {SHARED[dtype]}"),
        ]
        if self.variant.nested:
            late, what = sum(load.late for load in self.loads), {load.what for load in self.loads}
            found += [
                ("words" not in what, "no load of a word found"),
                ("?" in what, "loads of an unknown argument"),
                (late, f"{late} of {len(self.loads)} loads are issued after a wait"),
            ]
        return [text for fault, text in found if fault]


LARGE_NESTED = [Variant(arch, dtype) for arch in CARDS for dtype in DTYPES]
T4 = [Variant(75, dtype, nested=small, small=small) for small in (False, True) for dtype in DTYPES]


def table(codes: list[Code]) -> str:
    """Return the figures of each variant as lines of text."""
    line = "{:18} {:>12} {:>9} {:>9}  {}".format
    lines = [line("variant", "instructions", "registers", "occupancy", "SASS")]
    lines += [
        line(c.name, f"{c.instructions:.2f}", c.built.registers, f"{c.occupancy:.0%}", c.hash) for c in codes
    ]
    return "\n".join(lines)


def store(codes: list[Code]) -> None:
    """Write the figures of large nested states to results/cross-compiled/, and the prediction for a T4."""
    rows = []
    for code in (code for code in codes if code.variant in LARGE_NESTED):
        arch, dtype = code.variant.arch, code.variant.dtype
        for unit, x in (("instructions", code.instructions), ("registers", code.built.registers)):
            rows.append(Row("machine_code", f"{CARDS[arch].name} (sm_{arch})", dtype, unit, (x,)))
    write("machine_code", rows, "cross-compiled", environment=describe() | {"card": "cross-compiled"})
    predict.write()


def against(commit: str, archs: list[int]) -> int:
    """Compare the SASS for these cards with that of another commit. Returns 1 if it differs."""
    command = ["git", "show", f"{commit}:helpers/nf4/kernel.py"]
    source = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=True).stdout
    variants = [
        Variant(arch, dtype, nested) for arch in archs for dtype in DTYPES for nested in (True, False)
    ]
    pairs = list(zip(build(variants), build(variants, source), strict=True))
    for here, there in pairs:
        print(f"{here.variant!s:18} {'equal' if here.sass == there.sass else 'DIFFERS'}")
    return int(any(here.sass != there.sass for here, there in pairs))


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a budget is exceeded or a bit differs, 2 if nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(CARDS), choices=CARDS, help="75: a T4")
    parser.add_argument("--order", action="store_true", help="print the order of loads")
    parser.add_argument("--store", action="store_true", help="write the rows to results/")
    parser.add_argument("--against", metavar="COMMIT", help="compare the SASS with that of a commit")
    parser.add_argument("--run", action="store_true", help="run the PTX on this GPU and compare every bit")
    options = parser.parse_args(argv)
    if options.against:
        return against(options.against, options.arch)
    if options.run:
        from helpers.t4 import foreign_ptx

        passed, texts = zip(*map(foreign_ptx.report, options.arch), strict=True)
        print("\n".join(texts))
        return 1 if False in passed else 0 if True in passed else 2
    variants = [v for v in LARGE_NESTED[:3] + T4 + LARGE_NESTED[3:] if v.arch in options.arch]
    codes = list(map(Code, build(variants)))
    print("\n".join(f"{c.name}: {' '.join(c.events)}" for c in codes) if options.order else table(codes))
    faults = [f"{code.name}: {fault}" for code in codes for fault in code.faults()]
    print("\n".join(faults) or "All within budget; nested states issue every load before they wait for any.")
    if options.store:
        store(codes)
    return int(bool(faults))
