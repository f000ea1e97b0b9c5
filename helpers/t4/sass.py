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
from helpers.record import results
from helpers.record.results import Record
from helpers.t4 import machine_code
from helpers.t4.cards import CARDS
from helpers.t4.compile_spec import LARGE
from helpers.t4.cross_compile import DTYPES, UNSLOTH_TABLES, Built, build, request_of

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
BNB_KERNEL = re.compile(r"kDequantizeBlockwiseI(6__half|13__nv_bfloat16|f)Li512ELi64ELi8ELi([02])E")
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


def _code(arch: int, contender: str, label: str, dtype: str, counted, **more) -> Code:
    same = ("load_store", "elements", "threads", "registers", "shared", "spills")
    first = {"loads": "LDG", "stores": "STG"}
    return Code(
        arch=arch,
        contender=contender,
        label=label,
        dtype=dtype,
        instructions=counted.per_element,
        occupancy=CARDS[arch].occupancy(counted.threads, counted.registers, counted.shared),
        load_bits=dict(counted.widths("LDG")),
        store_bits=dict(counted.widths("STG")),
        hinted={what: counted.evicted_first(stem) for what, stem in first.items()},
        counted=counted.how,
        **{name: getattr(counted, name) for name in same},
        **more,
    )


def over_budget(built: Built, nested: bool = True, small: bool = False) -> list[str]:
    """What of the budget a kernel of ours misses, in words; empty when all is met.

    The order of loads is gated in nested states; in flat ones it is reported.
    """
    arch, dtype, counted = built.request["arch"], built.request["out_dtype"], built.counted
    limit = BUDGET[arch][dtype] + SMALL_TILE_MORE * small
    occupancy = CARDS[arch].occupancy(counted.threads, counted.registers, counted.shared)
    stores = counted.widths("STG")
    missed = {
        f"{counted.per_element:.2f} instructions per element, at most {limit:g}": counted.per_element > limit,
        f"{counted.spills} spills to local memory": counted.spills,
        f"stores of {_bits(stores)} bits instead of 128": set(stores) != {128},
        f"occupancy {occupancy:.0%}, at least {OCCUPANCY[dtype]:.0%}": occupancy < OCCUPANCY[dtype],
    }
    order = built.order.faults(direct=dtype in HALF) if nested else []
    return [text for text, true in missed.items() if true] + order


def code_of(built: Built, nested: bool, small: bool = False) -> Code:
    """What the table says of a kernel of ours."""
    arch, dtype = built.request["arch"], built.request["out_dtype"]
    label = f"ours, {'nested' if nested else 'flat'}{', small tile' * small}"
    which = {"nested": nested, "small": small}
    if built.error:
        failed = f"did not compile: {_last(built.error)}"
        return Code(
            arch=arch, contender="kernel", label=label, dtype=dtype, failed=failed, missed=[failed], **which
        )
    order = {
        "order": str(built.order),
        "latencies": built.order.latencies,
        "late_words": built.order.late_words,
        "missed": over_budget(built, nested, small),
    }
    facts = {"constexprs": built.constexprs, "versions": built.versions}
    return _code(arch, "kernel", label, dtype, built.counted, **which, **order, **facts)


def ours(archs=(75,), kinds=KINDS, module=None, **force) -> list[Code]:
    """Our kernel for each card, in each of `kinds`; `module` as cross_compile.build takes it.

    force: fields of Settings. Raises machine_code.ToolMissing without cuobjdump.
    """
    machine_code.tool()
    wanted = [(arch, dtype, nested, small) for arch in archs for dtype, nested, small in kinds]
    requests = [
        request_of(dtype, nested, arch, force | ({"numel": SMALL} if small else {}))
        for arch, dtype, nested, small in wanted
    ]
    pairs = zip(wanted, build(requests, module=module), strict=True)
    return [code_of(built, nested, small) for (_, _, nested, small), built in pairs]


def _last(error: str) -> str:
    lines = [line for line in error.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no reason given"


def unsloth(arch: int = 75) -> list[Code]:
    """Unsloth's fused kernel in each launch configuration that it chooses on such a card.

    At an official size in fp16 and bf16; of smaller tensors, where it chooses differently, in fp16.
    """
    names = {UNSLOTH_TABLES[0]: "unsloth_before_3_7", UNSLOTH_TABLES[1]: "unsloth_from_3_7"}
    if importlib.util.find_spec("unsloth") is None:
        return [Code(arch=arch, contender=names[UNSLOTH_TABLES[0]], label="Unsloth", failed="not installed")]
    requests = [
        {"source": "unsloth", "arch": arch, "out_dtype": dtype, "nested": True, "table": table, "size": size}
        for table in UNSLOTH_TABLES
        for size, dtypes in ((LARGE, HALF), (SMALL, HALF[:1]), (2**16, HALF[:1]))
        for dtype in dtypes
    ]
    codes, seen = [], set()
    for request, built in zip(requests, build(requests), strict=True):
        table, dtype, small = request["table"], request["out_dtype"], request["size"] != LARGE
        label = f"Unsloth (Triton {'<' if table == UNSLOTH_TABLES[0] else '>='} 3.7)"
        label += f", {request['size'] // 1024}K" if small else ""
        if built.error:
            failed = f"did not compile: {_last(built.error)}"
            codes.append(Code(arch=arch, contender=names[table], label=label, dtype=dtype, failed=failed))
            continue
        choice = (table, dtype, built.num_warps, *sorted(built.constexprs.items()))
        if choice not in seen:
            seen.add(choice)
            facts = {"small": small, "constexprs": built.constexprs, "versions": built.versions}
            codes.append(_code(arch, names[table], label, dtype, built.counted, **facts))
    return codes


def bitsandbytes_library(arch: int) -> Path | None:
    """bitsandbytes' CUDA library with code for sm_`arch`: the CUDA 12.8 one, Colab's, or else the newest."""
    spec = importlib.util.find_spec("bitsandbytes")
    folder = Path(spec.submodule_search_locations[0]) if spec else None
    libraries = sorted(folder.glob("libbitsandbytes_cuda*.so"), reverse=True) if folder else []
    for path in sorted(libraries, key=lambda path: path.stem[-3:] != "128"):
        if f"sm_{arch}.cubin" in machine_code.cuobjdump("-lelf", path):
            return path
    return None


def bitsandbytes(arch: int = 75) -> list[Code]:
    """bitsandbytes' NF4 kernels and the absmax decode, disassembled from its installed library."""

    def absent(reason):
        return [Code(arch=arch, contender="bitsandbytes", label="bitsandbytes", failed=reason)]

    if importlib.util.find_spec("bitsandbytes") is None:
        return absent("not installed")
    library = bitsandbytes_library(arch)
    if library is None:
        return absent(f"no library with sm_{arch} code is installed")
    usage = machine_code.resources(machine_code.cuobjdump("-res-usage", "-arch", f"sm_{arch}", library))
    kernels = {name: match for name in usage if (match := BNB_KERNEL.search(name))}
    kernels = {name: match for name, match in kernels.items() if match[2] == "2" or match[1] == "f"}
    if not kernels:
        return absent(f"no dequantization kernel of the known form in {library.name}")
    listing = machine_code.cuobjdump("-sass", "-arch", f"sm_{arch}", "-fun", ",".join(kernels), library)
    instructions, codes = machine_code.parse(listing), []
    for name, match in kernels.items():
        dtype, used = BNB_DTYPES[match[1]], usage[name]
        shared = used["shared"] - CARDS[arch].reserved  # listed with what the driver keeps
        counted = machine_code.count(
            name, instructions[name], used["registers"], shared, BNB_THREADS, itemsize=ITEMSIZE[dtype]
        )
        label = f"bitsandbytes, {'weight' if match[2] == '2' else 'absmax decode'}"
        facts = {"nested": False, "versions": {"bitsandbytes": version_of("bitsandbytes")}}
        codes.append(_code(arch, "bitsandbytes", label, dtype, counted, **facts))
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
        if code.failed and every:
            rows.append([*start, code.failed, *[""] * (len(HEAD) - 4)])
        elif not code.failed and (official or every):
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
    rows = table(codes, every=True)
    figures = [row for row in rows if row[-1]]
    widths = [max(map(len, column)) for column in zip(*figures, strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    versions = {name: version for code in codes for name, version in code.versions.items()}
    stamp = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    rest = [
        textwrap.fill(text, WIDTH) for text in (LEGEND, f"Compiled by or read from {stamp}.", verdict(codes))
    ]
    return "\n".join([*(line.rstrip()[:WIDTH] for line in shown), "", *rest])


def collect(archs=tuple(CARDS), module=None) -> list[Code]:
    """Everyone's code for a T4, and ours for the other cards in the kinds of OTHERS."""
    codes = [*ours(module=module), *unsloth(), *bitsandbytes()] if 75 in archs else []
    return codes + ours([arch for arch in archs if arch != 75], OTHERS, module)


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
    parser.add_argument(
        "--arch", type=int, nargs="*", default=list(CARDS), choices=list(CARDS), help="75: a T4"
    )
    parser.add_argument(
        "--store", action="store_true", help=f"write {FOLDER.relative_to(ROOT)}/machine_code.json"
    )
    parser.add_argument("--order", action="store_true", help="print the order of loads of ours")
    parser.add_argument("--force", nargs="*", metavar="NAME=N", help="fields of Settings; only ours is shown")
    options = parser.parse_args(argv)
    force = dict(text.split("=", 1) for text in options.force or ())
    force = {name: int(value) for name, value in force.items()}
    try:
        codes = ours(options.arch, OTHERS, **force) if force else collect(options.arch)
    except machine_code.ToolMissing as error:
        print(error, file=sys.stderr)
        return 2
    print(order(codes) if options.order else report(codes))
    if options.store:
        print("written:", results.write("machine_code", MachineCode(code=codes), FOLDER, MachineCode))
    return int(any(code.missed for code in codes))
