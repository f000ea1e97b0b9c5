"""Check the kernel's machine code (SASS) for each GPU: no spill, wide loads and stores, few registers.

A GPU is added in nf4_triton/core/supported.py.
"""

import argparse
import re
from collections import Counter

from helpers.cross.machine_code import DTYPES, Code, build
from nf4_triton.core import supported

CARDS = {10 * major + minor: name for (major, minor), name in supported.CARDS.items()}  # by sm_ number
WANTED = [(arch, dtype, False) for arch in CARDS for dtype in ("fp16", "bf16")]
WANTED += [(arch, dtype, True) for arch in (75, 90) for dtype in DTYPES]  # the general kernel
LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)[^;]*;", re.M)
JUMPS = ("BRA", "BRX", "CALL", "JMP")
REGISTERS = 96  # a thread's, at most: 75 to 87 on a T4 with Triton 3.4 to 3.9, 32 to 56 on other cards


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


def faults(code: Code) -> list[str]:
    """Return what is wrong, in words."""
    path, problems = executed(code.sass), []
    wide = Counter(opcode.split(".")[0] for opcode in path if ".128" in opcode)
    loads = code.elements // 32  # of 32 codes of 4 bits
    if spills := [opcode for opcode in path if opcode.startswith(("LDL", "STL"))]:
        problems.append(f"{len(spills)} spills to local memory, expected none")
    if wide["LDG"] != loads:
        problems.append(f"{wide['LDG']} loads of 128 bits, expected {loads} for {code.elements} codes")
    if narrow := sum(opcode.startswith("STG") for opcode in path) - wide["STG"]:
        problems.append(f"{narrow} narrow stores, expected 128 bits each")
    if code.registers > REGISTERS:
        problems.append(f"{code.registers} registers per thread, expected at most {REGISTERS}")
    return [f"{code}: {problem}" for problem in problems]


def main(argv: list[str] | None = None) -> int:
    """Compile for all cards, print, and check. Returns 1 if something is wrong, else 0."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args(argv)
    status = 0
    for code in build(WANTED):
        count = len(executed(code.sass))
        print(f"{code!s:20} {count:4} instructions a thread, {count / code.elements:5.2f} an element", end="")
        print(f", {code.registers} registers")
        for problem in faults(code):
            print(problem)
            status = 1
    return status
