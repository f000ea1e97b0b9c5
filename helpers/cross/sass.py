"""Check the kernel's machine code (SASS) for each GPU: instructions, registers, spills, width of the stores.

To add a GPU, add a row to CARDS.
"""

import argparse
import re
from dataclasses import dataclass

from helpers.cross import predict
from helpers.cross.compile import DTYPES, Code, build
from helpers.results.store import Row, write
from nf4_triton.environment import describe


@dataclass(frozen=True)
class Card:
    """The kernel's budget on a GPU: at most so many registers per thread and instructions per output element.

    With so many registers an SM runs as many threads as it can hold: a T4's has 65,536 for 1,024 threads.
    """

    name: str
    registers: int
    fp16: float
    bf16: float
    fp32: float


# Instructions: 10 to 20 % above what Triton 3.6 and 3.9 produce. A T4 rounds bf16 in integers.
CARDS = {  # by sm_ number
    # Above 64 registers an SM of a T4 runs fewer threads. 128 rows simulate faster all the same.
    75: Card("Tesla T4", 80, 9.0, 13.0, 9.5),
    80: Card("A100", 40, 12.0, 12.0, 14.5),  # Triton 3.6 takes 40, 78 % of the threads; 3.9 takes 32
    86: Card("RTX 30, A10", 64, 12.0, 12.0, 14.5),
    89: Card("RTX 40, L4", 48, 12.0, 12.0, 14.5),
    90: Card("H100, H200", 32, 12.0, 12.0, 15.0),
    100: Card("B200", 32, 12.0, 12.0, 15.0),
    120: Card("RTX 50", 40, 12.0, 12.0, 15.0),
}
FP32_REGISTERS = 1.5  # fp32 may take so many times the registers: its results take twice as many


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


def faults(code: Code) -> list[str]:
    """Return what exceeds the budget, in words."""
    card, path, found = CARDS[code.arch], executed(code.sass), []
    most = getattr(card, code.dtype)
    registers = card.registers * (FP32_REGISTERS if code.dtype == "fp32" else 1)
    spills = [opcode for opcode in path if opcode.startswith(("LDL", "STL"))]
    narrow = [opcode for opcode in path if opcode.startswith("STG") and ".128" not in opcode]
    if instructions(code) > most:
        found.append(f"{instructions(code):.2f} instructions per element, at most {most:g}")
    if code.registers > registers:
        found.append(f"{code.registers} registers per thread, at most {registers:g}")
    if spills:
        found.append(f"{len(spills)} spills to local memory")
    if narrow:
        found.append(f"{narrow[0]}: expected stores of 128 bits")
    return [f"{code}: {fault}" for fault in found]


def store(codes: list[Code]) -> None:
    """Write the figures to results/cross-compiled/, and the prediction for a T4."""
    rows = []
    for code in codes:
        case = f"{CARDS[code.arch].name} (sm_{code.arch})"
        for unit, value in (("instructions", instructions(code)), ("registers", code.registers)):
            rows.append(Row("machine_code", case, code.dtype, unit, (value,)))
    write("machine_code", rows, "cross-compiled", environment=describe() | {"card": "cross-compiled"})
    predict.write()


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a budget is exceeded or a bit differs, 2 if nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(CARDS), choices=CARDS, help="75: a T4")
    parser.add_argument("--store", action="store_true", help="write the rows to results/")
    parser.add_argument("--run", action="store_true", help="run the PTX on this GPU and compare every bit")
    options = parser.parse_args(argv)
    if options.run:
        from helpers.cross import foreign_ptx

        return foreign_ptx.report(options.arch)
    codes = build([(arch, dtype) for arch in options.arch for dtype in DTYPES])
    for code in codes:
        print(f"{code!s:16} {instructions(code):5.2f} instructions, {code.registers} registers")
    exceeded = [fault for code in codes for fault in faults(code)]
    for fault in exceeded:
        print(fault)
    if options.store:
        store(codes)
    return 1 if exceeded else 0
