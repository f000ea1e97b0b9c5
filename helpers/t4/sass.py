"""`python -m helpers sass`: machine code for cards that need not be here, counted, and its order of loads.

Ours for every generation, compiled by the installed Triton; for a T4 also Unsloth's kernel from the installed
package and bitsandbytes' from its library. Exits with 1 where ours misses a budget.
"""

import argparse
import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import msgspec

from helpers.machine import ROOT
from helpers.results import store as results, tables
from helpers.results.store import Record
from helpers.t4 import load_order, machine_code
from helpers.t4.cards import CARDS
from helpers.t4.cross_compile import DTYPES, LARGE, UNSLOTH_TABLES, Built, Request, build

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
HALF = DTYPES[:2]
FOLDER = ROOT / "results" / "cross-compiled"
WIDTH = 110  # columns of the report
SMALL = 2**20  # elements: of the small tile
# (out_dtype, nested, elements): all that ours comes in
KINDS = tuple((d, nested, numel) for numel in (LARGE, SMALL) for nested in (True, False) for d in DTYPES)
OTHERS = (*((dtype, True, LARGE) for dtype in DTYPES), ("float16", True, SMALL))  # on cards that are no T4

# Instructions that an output element may cost; 10 to 20 % above what Triton 3.3 to 3.9 make of it.
BUDGET = {arch: {"float16": 5.25, "bfloat16": 5.25, "float32": 7.0} for arch in CARDS}
BUDGET[75] = {"float16": 5.5, "bfloat16": 6.5, "float32": 7.0}  # bf16 is rounded in integers
SMALL_TILE_MORE = 4.0  # instructions an element: what a program computes once is spread over fewer
OCCUPANCY = {"float16": 1.0, "bfloat16": 1.0, "float32": 0.8}  # at least

# bitsandbytes' for weights in NF4: of each dtype, 64 threads a block, 16 elements a thread.
BNB_KERNEL = re.compile(r"kDequantizeBlockwiseI(6__half|13__nv_bfloat16)Li512ELi64ELi8ELi2E")
BNB_DTYPES = {"6__half": "float16", "13__nv_bfloat16": "bfloat16"}


class Code(Record, forbid_unknown_fields=False):
    """One kernel's machine code for one card; without figures where `failed` says why."""

    arch: int
    contender: str  # kernel, unsloth or bitsandbytes
    label: str
    dtype: str = ""
    nested: bool = True
    small: bool = False  # with the tile of small tensors
    failed: str = ""
    instructions: float | None = None  # an output element
    load_store: float | None = None  # ... of them loads, stores and shuffles
    registers: int | None = None
    shared: int | None = None  # bytes per block
    occupancy: float | None = None
    spills: int | None = None
    store_bits: dict[int, int] = {}  # bits a lane: how many
    hinted: dict[str, int] = {}  # loads and stores that ask to be evicted first
    order: str = ""  # of loads, in ours
    latencies: int | None = None  # dependent ones before the first store
    late_words: int | None = None  # words loaded behind a wait
    missed: list[str] = []  # of the budget

    @property
    def name(self) -> str:
        return f"sm_{self.arch} {self.label} {SHORT.get(self.dtype, '')}".strip()


class MachineCode(Record):
    code: list[Code]


def code_of(built: Built) -> Code:
    """What the table says of a kernel of ours or Unsloth's."""
    request = built.request
    arch, small = request.arch, request.numel < LARGE
    if request.unsloth:
        label = f"Unsloth (Triton {'<' if request.unsloth == UNSLOTH_TABLES[0] else '>='} 3.7)"
    else:
        label = f"ours, {'nested' if request.nested else 'flat'}{', small tile' * small}"
    contender = "unsloth" if request.unsloth else "kernel"
    kind = dict(dtype=request.dtype, nested=request.nested, small=small)
    code = Code(arch=arch, contender=contender, label=label, **kind)
    if built.error:
        lines = [line.strip() for line in built.error.splitlines() if line.strip()]
        code.failed = f"did not compile: {lines[-1][:300]}"
        code.missed = [] if request.unsloth else [code.failed]
        return code
    instructions, registers = machine_code.disassembled(built.cubin)
    path, threads = machine_code.executed(instructions), 32 * built.num_warps
    figures = machine_code.count(CARDS[arch], path, registers, built.shared, threads, built.elements)
    code = msgspec.structs.replace(code, **figures)
    if not request.unsloth:
        order = load_order.read(path, arch)
        code.order, code.latencies, code.late_words = str(order), order.latencies, order.late_words
        code.missed = over_budget(code, order)
    return code


def over_budget(code: Code, order: load_order.Order) -> list[str]:
    """What of the budget a kernel of ours misses, in words; empty when all is met.

    The order of loads is gated in nested states; in flat ones it is reported.
    """
    limit, least = BUDGET[code.arch][code.dtype] + SMALL_TILE_MORE * code.small, OCCUPANCY[code.dtype]
    missed = {
        f"{code.instructions:.2f} instructions per element, at most {limit:g}": code.instructions > limit,
        f"{code.spills} spills to local memory": code.spills,
        f"stores of {_bits(code.store_bits)} bits instead of 128": set(code.store_bits) != {128},
        f"occupancy {code.occupancy:.0%}, at least {least:.0%}": code.occupancy < least,
    }
    faults = order.faults(direct=code.dtype in HALF) if code.nested else []
    return [text for text, true in missed.items() if true] + faults


def unsloth() -> list[Code]:
    """Unsloth's fused kernel at an official size, by each table from which it chooses its launch on a T4."""
    if importlib.util.find_spec("unsloth") is None:
        return [Code(arch=75, contender="unsloth", label="Unsloth", failed="not installed")]
    requests = [Request(75, dtype, unsloth=table) for table in UNSLOTH_TABLES for dtype in HALF]
    return list(map(code_of, build(requests)))


def bitsandbytes() -> list[Code]:
    """bitsandbytes' NF4 kernels for a T4, from its library for CUDA 12.8, Colab's, or else the newest."""
    spec, usage = importlib.util.find_spec("bitsandbytes"), {}
    libraries = Path(spec.submodule_search_locations[0]).glob("libbitsandbytes_cuda*.so") if spec else ()
    library = max(libraries, key=lambda path: (path.stem.endswith("128"), path.stem), default=None)
    if library:
        usage = machine_code.resources(machine_code.cuobjdump("-res-usage", "-arch", "sm_75", library))
    names = {BNB_DTYPES[match[1]]: name for name in usage if (match := BNB_KERNEL.search(name))}
    if not names:
        failed = "not installed, or without a CUDA library that has the kernel known for sm_75"
        return [Code(arch=75, contender="bitsandbytes", label="bitsandbytes", failed=failed)]
    listing = machine_code.cuobjdump("-sass", "-arch", "sm_75", "-fun", ",".join(names.values()), library)
    instructions, codes = machine_code.parse(listing), []
    for dtype in HALF:
        path = machine_code.executed(instructions[names[dtype]])
        figures = machine_code.count(CARDS[75], path, *usage[names[dtype]], threads=64, elements=16)
        kind = dict(label="bitsandbytes, weight", dtype=dtype, nested=False)
        codes.append(Code(arch=75, contender="bitsandbytes", **kind, **figures))
    return codes


def _bits(widths) -> str:
    """ "8/32/128": the widths in bits that occur."""
    return "/".join(map(str, sorted(widths))) or "-"


HEAD = "code card dtype instr ld/st regs occup shared stores hints late wait".split()
LEGEND = (
    "Per output element: thread-instructions, of them loads, stores and shuffles. Registers per thread, "
    "share of an SM's threads, bytes of shared memory per block, bits a store. hints: loads and stores to be "
    "evicted first; late: words loaded behind a wait for another load; wait: memory latencies in a row "
    "before the first store (of ours). A predicated instruction counts as issued. "
) + "; ".join(f"sm_{arch}: {card.name}" for arch, card in CARDS.items())


def table(codes: list[Code], every: bool = False) -> list[list[str]]:
    """Rows of texts, header first: what decodes large nested weights to 16 bits, or `every` code."""
    rows = [HEAD]
    for code in codes:
        official = (code.nested or code.contender != "kernel") and not code.small and code.dtype in HALF
        if not code.failed and (official or every):
            figures = f"{code.instructions:.2f} {code.load_store:.2f} {code.registers} {code.occupancy:.0%}"
            stores = f"{_bits(code.store_bits)} {'+'.join(map(str, code.hinted.values()))}"
            order = ("-" if value is None else str(value) for value in (code.late_words, code.latencies))
            start = [code.label, f"sm_{code.arch}", SHORT[code.dtype]]
            rows.append([*start, *figures.split(), str(code.shared), *stores.split(), *order])
    return rows


def verdict(codes: list[Code]) -> str:
    """What ours misses of the budgets, in one sentence; it ends in "met" when nothing is missed."""
    missed = "; ".join(f"{code.name}: {reason}" for code in codes for reason in code.missed) or "met"
    return f"Budgets of ours (instructions, spills, 128-bit stores, occupancy, order of loads): {missed}"


def stored(root: Path = ROOT / "results") -> results.Result[MachineCode] | None:
    """What `python -m helpers sass --store` wrote last."""
    return results.find("machine_code", root / FOLDER.name, MachineCode)


def report(codes: list[Code]) -> str:
    """Every row of the table, what failed, the legend and the verdict."""
    failures = [f"{code.name}: {code.failed}" for code in codes if code.failed]
    texts = [textwrap.fill(text, WIDTH) for text in (*failures, LEGEND, verdict(codes))]
    return "\n".join([tables.text(table(codes, every=True)), "", *texts])


def collect(archs=tuple(CARDS)) -> list[Code]:
    """Ours for each card, and everyone's for a T4. Raises machine_code.ToolMissing without cuobjdump."""
    machine_code.tool()
    requests = [Request(arch, *kind) for arch in archs for kind in (KINDS if arch == 75 else OTHERS)]
    codes = list(map(code_of, build(requests)))
    codes += unsloth() + bitsandbytes() if 75 in archs else []
    return sorted(codes, key=lambda code: code.arch)


def main(argv: list[str] | None = None) -> int:
    """Print the report. 1 when ours misses a budget or does not compile, 2 without cuobjdump."""
    parser = argparse.ArgumentParser(description=__doc__.split(": ")[1].split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(CARDS), choices=CARDS, help="75: a T4")
    parser.add_argument("--store", action="store_true", help="write machine_code.json under results/")
    parser.add_argument("--order", action="store_true", help="print the order of loads of ours")
    options = parser.parse_args(argv)
    try:
        codes = collect(options.arch)
    except machine_code.ToolMissing as error:
        print(error, file=sys.stderr)
        return 2
    ours = (code for code in codes if code.contender == "kernel")
    orders = "\n".join(f"{code.name}: {code.order or code.failed}" for code in ours)
    print(orders if options.order else report(codes))
    if options.store:
        print("written:", results.write("machine_code", MachineCode(code=codes), FOLDER, MachineCode))
    return int(any(code.missed for code in codes))
