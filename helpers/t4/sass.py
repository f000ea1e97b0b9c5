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

from helpers.machine.environment import ROOT, version_of
from helpers.record import results, tables
from helpers.record.results import Record
from helpers.t4 import machine_code
from helpers.t4.cards import CARDS
from helpers.t4.compile_spec import LARGE
from helpers.t4.cross_compile import DTYPES, UNSLOTH_TABLES, Built, build, request_of
from helpers.t4.load_order import Order

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
HALF = DTYPES[:2]
FOLDER = ROOT / "results" / "cross-compiled"
WIDTH = 110  # columns of the report
# (out_dtype, nested, with the tile of small tensors): all that ours comes in
KINDS = tuple(
    (dtype, nested, small) for small in (False, True) for nested in (True, False) for dtype in DTYPES
)
BRIEF = tuple((dtype, True, False) for dtype in HALF)  # what the official protocol runs
OTHERS = (*BRIEF, ("float32", True, False), ("float16", True, True))  # on cards that are no T4

# Instructions that an output element may cost; 10 to 20 % above what Triton 3.3 to 3.9 make of it.
BUDGET = {arch: {"float16": 5.25, "bfloat16": 5.25, "float32": 7.0} for arch in CARDS}
BUDGET[75] = {"float16": 5.5, "bfloat16": 6.5, "float32": 7.0}  # bf16 is rounded in integers
SMALL_TILE_MORE = 4.0  # instructions an element: what a program computes once is spread over fewer
OCCUPANCY = {"float16": 1.0, "bfloat16": 1.0, "float32": 0.8}  # at least

BNB_THREADS = 64
# Weights in NF4, of each dtype, and 8-bit absmax in fp32.
BNB_KERNEL = re.compile(
    r"kDequantizeBlockwiseI(?:(6__half|13__nv_bfloat16|f)Li512ELi64ELi8ELi2|fLi512ELi64ELi8ELi0)E"
)
BNB_DTYPES = {"6__half": "float16", "13__nv_bfloat16": "bfloat16", "f": "float32"}
SMALL = 2**20  # elements: of the small tile


class Code(Record):
    """One kernel's machine code for one card; without figures where `failed` says why."""

    arch: int
    contender: str  # kernel, unsloth_before_3_7, unsloth_from_3_7, bitsandbytes
    label: str
    dtype: str = ""
    nested: bool = True
    small: bool = False  # with the tile of small tensors
    failed: str = ""
    instructions: float | None = None  # an output element
    load_store: float | None = None  # ... of them loads, stores and shuffles
    elements: float | None = None  # of one thread
    threads: int | None = None  # per block
    registers: int | None = None
    shared: int | None = None  # bytes per block
    occupancy: float | None = None
    spills: int | None = None
    load_bits: dict[int, int] = {}  # bits a lane: how many
    store_bits: dict[int, int] = {}
    hinted: dict[str, int] = {}  # loads and stores that ask to be evicted first
    counted: str = ""  # how the instructions of a thread were chosen
    order: str = ""  # of loads, in ours
    latencies: int | None = None  # dependent ones before the first store
    late_words: int | None = None  # words loaded behind a wait
    missed: list[str] = []  # of the budget
    constexprs: dict[str, bool | int | str] = {}
    versions: dict[str, str] = {}


class MachineCode(Record):
    code: list[Code]


def code_of(built: Built) -> Code:
    """What the table says of a kernel of ours or Unsloth's."""
    request = built.request
    ours, nested, numel = request["source"] == "ours", request["nested"], request.get("numel", LARGE)
    if ours:
        contender = "kernel"
        label = f"ours, {'nested' if nested else 'flat'}{', small tile' * (numel < LARGE)}"
    else:
        old = request["table"] == UNSLOTH_TABLES[0]
        contender = f"unsloth_{'before' if old else 'from'}_3_7"
        label = f"Unsloth (Triton {'<' if old else '>='} 3.7)" + f", {numel // 1024}K" * (numel < LARGE)
    facts, failed = {}, ""
    if built.error:
        lines = [line.strip() for line in built.error.splitlines() if line.strip()]
        failed = f"did not compile: {lines[-1][:300]}"
    else:
        facts = built.counted[1]
    code = Code(
        arch=request["arch"],
        contender=contender,
        label=label,
        dtype=request["out_dtype"],
        nested=nested,
        small=numel < LARGE,
        failed=failed,
        constexprs=built.constexprs,
        versions=built.versions,
        **facts,
    )
    if ours and failed:
        code.missed = [failed]
    elif ours:
        code.order, code.latencies = str(built.order), built.order.latencies
        code.late_words, code.missed = built.order.late_words, over_budget(code, built.order)
    return code


def over_budget(code: Code, order: Order) -> list[str]:
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


def ours(archs=(75,), kinds=KINDS) -> list[Code]:
    """Our kernel for each card, in each of `kinds`. Raises machine_code.ToolMissing without cuobjdump."""
    machine_code.tool()
    requests = [
        request_of(dtype, nested, arch, SMALL if small else LARGE)
        for arch in archs
        for dtype, nested, small in kinds
    ]
    return [code_of(built) for built in build(requests)]


def unsloth(arch: int = 75) -> list[Code]:
    """Unsloth's fused kernel in each launch configuration that it chooses on such a card.

    At an official size in fp16 and bf16; of smaller tensors, where it chooses differently, in fp16.
    """
    if importlib.util.find_spec("unsloth") is None:
        return [Code(arch=arch, contender="unsloth_before_3_7", label="Unsloth", failed="not installed")]
    requests = [
        {"source": "unsloth", "arch": arch, "out_dtype": dtype, "nested": True, "table": table, "numel": size}
        for table in UNSLOTH_TABLES
        for size, dtypes in ((LARGE, HALF), (SMALL, HALF[:1]), (2**16, HALF[:1]))
        for dtype in dtypes
    ]
    different = {}
    for code in map(code_of, build(requests)):
        choice = (code.contender, code.dtype, code.failed, code.threads, *sorted(code.constexprs.items()))
        different.setdefault(choice, code)
    return list(different.values())


def bitsandbytes_library(arch: int) -> Path:
    """bitsandbytes' CUDA library with code for sm_`arch`: the CUDA 12.8 one, Colab's, or else the newest.

    Raises LookupError without one.
    """
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None:
        raise LookupError("not installed")
    folder = Path(spec.submodule_search_locations[0])
    libraries = sorted(folder.glob("libbitsandbytes_cuda*.so"), reverse=True)
    for path in sorted(libraries, key=lambda path: path.stem[-3:] != "128"):
        if f"sm_{arch}.cubin" in machine_code.cuobjdump("-lelf", path):
            return path
    raise LookupError(f"no library with sm_{arch} code is installed")


def bitsandbytes(arch: int = 75) -> list[Code]:
    """bitsandbytes' NF4 kernels and the absmax decode, disassembled from its installed library."""
    who, card = {"arch": arch, "contender": "bitsandbytes"}, CARDS[arch]
    try:
        library = bitsandbytes_library(arch)
        usage = machine_code.resources(machine_code.cuobjdump("-res-usage", "-arch", f"sm_{arch}", library))
        kernels = {name: match for name in usage if (match := BNB_KERNEL.search(name))}
        if not kernels:
            raise LookupError(f"no dequantization kernel of the known form in {library.name}")
    except LookupError as error:
        return [Code(**who, label="bitsandbytes", failed=str(error))]
    listing = machine_code.cuobjdump("-sass", "-arch", f"sm_{arch}", "-fun", ",".join(kernels), library)
    instructions, codes = machine_code.parse(listing), []
    for name, match in kernels.items():
        dtype, (registers, shared) = BNB_DTYPES[match[1] or "f"], usage[name]
        _, facts = machine_code.count(
            card,
            instructions[name],
            registers,
            shared - card.reserved,  # listed with what the driver keeps
            BNB_THREADS,
            itemsize=ITEMSIZE[dtype],
        )
        label, versions = (
            f"bitsandbytes, {'weight' if match[1] else 'absmax decode'}",
            version_of("bitsandbytes"),
        )
        versions = {"bitsandbytes": versions}
        codes.append(Code(**who, label=label, dtype=dtype, nested=False, versions=versions, **facts))
    return sorted(codes, key=lambda code: ("absmax" in code.label, DTYPES.index(code.dtype)))


def _bits(widths) -> str:
    """ "8/32/128": the widths in bits that occur."""
    return "/".join(map(str, sorted(widths))) or "-"


HEAD = "code card dtype instr ld/st regs occup shared stores hints late wait".split()
LEGEND = (
    "Per output element: thread-instructions, of them loads, stores and shuffles. Registers per thread, "
    "share of an SM's threads, bytes of shared memory per block, bits a store. hints: loads and stores to be "
    "evicted first; late: words loaded behind a wait for another load; wait: memory latencies in a row "
    "before the first store (of ours). A predicated instruction counts as issued. "
) + "; ".join(f"sm_{card.arch}: {card.name}" for card in CARDS.values())


def table(codes: list[Code], every: bool = False) -> list[list[str]]:
    """Rows of texts, header first: what decodes large nested weights to 16 bits, or `every` code."""
    rows = [HEAD]
    for code in codes:
        start = [code.label, f"sm_{code.arch}", SHORT.get(code.dtype, "")]
        official = (code.nested or code.contender != "kernel") and not code.small and code.dtype in HALF
        if not code.failed and (official or every):
            figures = f"{code.instructions:.2f} {code.load_store:.2f} {code.registers} {code.occupancy:.0%}"
            stores = f"{_bits(code.store_bits)} {'+'.join(map(str, code.hinted.values()))}"
            order = ("-" if value is None else str(value) for value in (code.late_words, code.latencies))
            rows.append([*start, *figures.split(), str(code.shared), *stores.split(), *order])
    return rows


def verdict(codes: list[Code]) -> str:
    """What ours misses of the budgets, in one sentence; it ends in "met" when nothing is missed."""
    missed = [
        f"sm_{code.arch} {code.label} {SHORT.get(code.dtype, '')}: {reason}"
        for code in codes
        for reason in code.missed
    ]
    return "Budgets of ours (instructions, spills, 128-bit stores, occupancy, order of loads): " + (
        "; ".join(missed) or "met"
    )


def stored(root: Path = ROOT / "results") -> results.Result[MachineCode] | None:
    """What `python -m helpers sass --store` wrote last."""
    return results.find("machine_code", root / FOLDER.name, MachineCode)


def report(codes: list[Code]) -> str:
    """Every row of the table, its legend and the verdict."""
    versions = sorted({f"{name} {version}" for code in codes for name, version in code.versions.items()})
    texts = (LEGEND, f"Compiled by or read from {', '.join(versions)}.", verdict(codes))
    failures = [f"sm_{code.arch} {code.label}: {code.failed}" for code in codes if code.failed]
    return "\n".join(
        [
            tables.text(table(codes, every=True)),
            "",
            *(textwrap.fill(text, WIDTH) for text in (*failures, *texts)),
        ]
    )


def collect(archs=tuple(CARDS)) -> list[Code]:
    """Everyone's code for a T4, and ours for the other cards in the kinds of OTHERS."""
    codes = [*ours(), *unsloth(), *bitsandbytes()] if 75 in archs else []
    return codes + ours([arch for arch in archs if arch != 75], OTHERS)


def order(codes: list[Code]) -> str:
    """What a thread of ours loads, waits for and stores, in that order, each with its position."""
    return "\n".join(
        f"sm_{code.arch} {code.label} {SHORT[code.dtype]}: {code.order or code.failed}"
        for code in codes
        if code.contender == "kernel"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the report. 1 when ours misses a budget or does not compile, 2 without cuobjdump."""
    parser = argparse.ArgumentParser(prog="python -m helpers sass", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(CARDS), choices=CARDS, help="75: a T4")
    parser.add_argument("--store", action="store_true", help="write machine_code.json under results/")
    parser.add_argument("--order", action="store_true", help="print the order of loads of ours")
    options = parser.parse_args(argv)
    try:
        codes = collect(options.arch)
    except machine_code.ToolMissing as error:
        print(error, file=sys.stderr)
        return 2
    print(order(codes) if options.order else report(codes))
    if options.store:
        print("written:", results.write("machine_code", MachineCode(code=codes), FOLDER, MachineCode))
    return int(any(code.missed for code in codes))
