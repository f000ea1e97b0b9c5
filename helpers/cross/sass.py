"""Check the kernel's machine code (SASS) for each GPU: no spill, wide loads and stores, registers as stored.

A GPU is added in nf4_triton/core/supported.py.
"""

import argparse
import math
import re
from collections import Counter

from helpers.cross.machine_code import DTYPES, Code, build
from helpers.results import store
from nf4_triton.core import supported
from nf4_triton.environment import describe

CARDS = {10 * major + minor: name for (major, minor), name in supported.CARDS.items()}  # by sm_ number
WANTED = [(arch, dtype, False) for arch in CARDS for dtype in ("fp16", "bf16")]
WANTED += [(arch, dtype, True) for arch in (75, 90) for dtype in DTYPES]  # the general kernel
LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)[^;]*;", re.M)
JUMPS = ("BRA", "BRX", "CALL", "JMP")


def executed(text: str) -> list[str]:
    """Return the opcodes, such as "LDG.E.128.SYS", that a thread of a full tile executes.

    text: the output of `cuobjdump -sass`. The path ends at the first EXIT without a predicate. Raises
    NotImplementedError for a jump before it.
    """
    path = []
    for predicate, opcode in LINE.findall(text):
        if opcode.startswith(JUMPS):
            raise NotImplementedError(f"{opcode} before the end: jumps cannot be counted")
        path.append(opcode)
        if opcode == "EXIT" and not predicate:
            break
    return path


def instructions(code: Code) -> float:
    """Return the instructions per output element."""
    return len(executed(code.sass)) / code.elements


def faults(code: Code, registers: float = math.inf) -> list[str]:
    """Return what is wrong, in words. registers: how many a thread may take."""
    path, problems = executed(code.sass), []
    wide = Counter(opcode.split(".")[0] for opcode in path if ".128" in opcode)
    loads = code.elements // 32  # of 32 codes of 4 bits
    if spills := [opcode for opcode in path if opcode.startswith(("LDL", "STL"))]:
        problems.append(f"{len(spills)} spills to local memory, expected none")
    if wide["LDG"] != loads:
        problems.append(f"{wide['LDG']} loads of 128 bits, expected {loads} for {code.elements} codes")
    if narrow := sum(opcode.startswith("STG") for opcode in path) - wide["STG"]:
        problems.append(f"{narrow} narrow stores, expected 128 bits each")
    if code.registers > registers:
        problems.append(f"{code.registers} registers per thread, expected at most {registers:g} as stored")
    return [f"{code}: {problem}" for problem in problems]


def folder(code: Code) -> str:
    """Return the folder under results/ of the Triton that compiled it: "cross-compiled" is 3.6's."""
    version = ".".join(code.triton.split(".")[:2])
    return "cross-compiled" if version == "3.6" else f"cross-compiled-triton-{version}"


def case(code: Code) -> str:
    """Return the case of a card's stored rows."""
    return f"{CARDS[code.arch]} (sm_{code.arch}){', general kernel' if code.general else ''}"


def stored_registers(code: Code) -> float:
    """Return how many registers the stored row has; no limit for a card or a Triton without one."""
    found = store.select(store.rows(folder(code)), "machine_code", case(code), code.dtype, "registers")
    return found[0].median if found else math.inf


def write(codes: list[Code]) -> None:
    """Store instructions and registers under results/."""
    rows, name = [], folder(codes[0])
    for code in codes:
        for unit, value in (("instructions", instructions(code)), ("registers", code.registers)):
            rows.append(store.Row("machine_code", case(code), code.dtype, unit, (value,)))
    store.write("machine_code", rows, name, environment=describe() | {"card": "cross-compiled"})


def main(argv: list[str] | None = None) -> int:
    """Compile for all cards, print, check, and store. Returns 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", action="store_true", help="replace the stored table: see it in the diff")
    options = parser.parse_args(argv)
    codes = build(WANTED)
    status = 0
    for code in codes:
        print(f"{code!s:16} {instructions(code):5.2f} instructions, {code.registers} registers")
        for problem in faults(code, stored_registers(code)):
            print(problem)
            status = 1
    if options.store:
        write(codes)
    return status
