"""Order of loads in SASS: what a thread asks for, what it waits for first, and how often before its first store.

A warp issues in order. So a load that stands behind the first use of another load's register starts a whole
memory latency later. `python -m helpers.t4.load_order --arch 75 --force stage=1` prints one line a dtype.
"""

import argparse
import re
import sys
from dataclasses import dataclass

from helpers.t4 import machine_code
from helpers.t4.machine_code import Instruction, width

_REGISTER = re.compile(r"(?<![A-Z0-9])(U?R)(\d+)(\.64)?")
_PARAMETER = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
PARAMETER_BASE = ((100, 0x380), (90, 0x210), (70, 0x160))  # bytes into constant bank 0, from this sm_ on
POINTERS = ("words", "out", "absmax", "table", "code2", "absmax2", "offset")  # our kernel's, 8 bytes each
NO_RESULT = ("STG", "STS", "STL", "ST", "ISETP", "FSETP", "UISETP", "BAR", "BRA", "EXIT", "NOP", "WARPSYNC")
MOST_LATENCIES = 2  # code2 after absmax


@dataclass(frozen=True)
class Load:
    """One global load: where it stands, what it reads, and the latencies that pass before it is issued."""

    position: int
    what: str  # of POINTERS, or "?"
    behind: int

    def __str__(self):
        return f"{self.what}@{self.position}"


@dataclass(frozen=True)
class Order:
    """The loads of one thread's way, and its events in order: loads, first waits, barriers, stores."""

    loads: tuple[Load, ...]
    events: tuple[str, ...]
    latencies: int  # dependent memory latencies before the first store

    @property
    def late_words(self) -> tuple[Load, ...]:
        """Loads of packed words that are issued only after a wait for another load."""
        return tuple(load for load in self.loads if load.what == "words" and load.behind)

    def faults(self) -> list[str]:
        """What the gate on the order of loads refuses, in words; empty when all is well."""
        late, words = self.late_words, sum(load.what == "words" for load in self.loads)
        unknown = [str(load) for load in self.loads if load.what == "?"]
        return [
            *([f"{len(late)} of {words} words are loaded behind a wait"] if late else []),
            *([] if words else ["no load of a word was seen"]),
            *([f"loads of an unknown argument: {', '.join(unknown)}"] if unknown else []),
            *(
                [f"{self.latencies} dependent latencies before the first store, at most {MOST_LATENCIES}"]
                if self.latencies > MOST_LATENCIES
                else []
            ),
        ]

    def __str__(self):
        return " ".join(self.events)


def _registers(text: str, wide: int = 1) -> list[str]:
    """Registers that an operand names: two of "R2.64", `wide` of a register that starts a vector."""
    return [
        f"{kind}{int(number) + step}"
        for kind, number, double in _REGISTER.findall(text)
        for step in range(max(wide, 2 if double else 1))
    ]


def _results(instruction: Instruction) -> tuple[list[str], str]:
    """(registers that it writes, the operands that it reads)."""
    operands = instruction.operands.split(", ")
    if instruction.stem in NO_RESULT:
        return [], instruction.operands
    first = next((i for i, operand in enumerate(operands) if not _PREDICATE.fullmatch(operand)), 0)
    parts = instruction.opcode.split(".")
    wide = max(1, width(instruction.opcode) // 32)
    wide = max(wide, 2) if "WIDE" in parts or parts == ["CS2R"] else wide
    return _registers(operands[first], wide), ", ".join(operands[:first] + operands[first + 1 :])


def _reads(instruction: Instruction, read: str) -> list[str]:
    """Registers that it reads; of a store also the whole vector that it writes to memory."""
    wide = width(instruction.opcode) // 32 if instruction.stem in ("STG", "STS") else 1
    return [*_registers(read), *(_registers(read.split(", ")[-1], wide) if wide > 1 else [])]


def _address(instruction: Instruction) -> str:
    """What stands between the brackets of a memory access, without its descriptor (sm_80 and newer)."""
    inside = re.search(r"(?<!c)\[([^\[\]]*)\](?!\[)", instruction.operands)
    return inside[1] if inside else ""


def _argument(path, position: int, base: int) -> str:
    """The kernel argument that the address of the access at `position` grows from, looked up backwards."""
    wanted = {name for name in _registers(_address(path[position]).replace(".64", ""))}
    pointers = set()
    for now in reversed(path[:position]):
        results, read = _results(now)
        if not wanted & set(results):
            continue
        if not now.predicate:
            wanted -= set(results)
        if now.stem in ("LDG", "LDS"):
            continue  # a looked-up index: its own address is another access's matter
        wanted |= set(_registers(read))
        for offset in (int(text, 16) - base for text in _PARAMETER.findall(read)):
            if 0 <= offset < 8 * len(POINTERS):
                pointers.add(POINTERS[offset // 8])
    return pointers.pop() if len(pointers) == 1 else "?"


def read(path: tuple[Instruction, ...], arch: int) -> Order:
    """Order of our kernel's loads along `path`, the way of one thread (machine_code.executed)."""
    base = next(start for least, start in PARAMETER_BASE if arch >= least)
    waiting: dict[str, Load] = {}  # register -> the load whose value it will hold
    loads, events, level, latencies = [], [], 0, None
    for position, now in enumerate(path):
        results, read_text = _results(now)
        used = {waiting[name] for name in (*_reads(now, read_text), *results) if name in waiting}
        if used:
            level = max(level, 1 + max(load.behind for load in used))
            events.append(f"<wait {', '.join(str(load) for load in sorted(used, key=lambda x: x.position))}>")
            waiting = {name: load for name, load in waiting.items() if load not in used}
        if now.stem == "LDG":
            load = Load(position, _argument(path, position, base), level)
            waiting |= dict.fromkeys(results, load)
            loads.append(load)
            events.append(str(load))
        elif now.stem in ("STG", "BAR", "STS", "LDS"):
            name = {"STG": "store", "BAR": "barrier", "STS": "to-shared", "LDS": "from-shared"}[now.stem]
            events.append(f"{name}@{position}")
            if now.stem == "STG" and latencies is None:
                latencies = level
    return Order(tuple(loads), tuple(events), level if latencies is None else latencies)


def of_kernel(
    arch: int = 75, pythonpath: str | None = None, nested: bool = True, **force
) -> dict[str, Order | str]:
    """{"float16" | "bfloat16" | "float32": Order, or the compiler's error} of the kernel for sm_`arch`.

    force: settings that replace those the kernel would choose, and `small`/`tail`; pythonpath: a folder with
    another Triton.
    """
    from helpers.t4 import cross_compile

    spec = {name: force.pop(name) for name in ("small", "tail") if name in force}
    requests = [
        {"source": "ours", "arch": arch, "out_dtype": dtype, "nested": nested, "force": force} | spec
        for dtype in ("float16", "bfloat16", "float32")
    ]
    orders = {}
    for request, built in zip(requests, cross_compile.build(requests, pythonpath), strict=True):
        if built.error:
            orders[request["out_dtype"]] = built.error
            continue
        itemsize = 4 if request["out_dtype"] == "float32" else 2
        counted = machine_code.count_cubin(
            built.name,
            built.cubin,
            built.shared,
            32 * built.num_warps,
            itemsize,
            8 * built.constexprs["WORDS"],
        )
        orders[request["out_dtype"]] = read(counted.executed, arch)
    return orders


def main(argv: list[str] | None = None) -> int:
    """Print the order of loads of each dtype. 1 when the gate refuses one, or it does not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers.t4.load_order", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--arch", type=int, default=75)
    parser.add_argument(
        "--force", nargs="*", default=[], metavar="NAME=NUMBER", help="settings, small=1, tail=1"
    )
    parser.add_argument("--flat", action="store_true", help="fp32 absmax instead of a nested state")
    parser.add_argument("--triton", metavar="FOLDER", help="a folder with another Triton")
    options = parser.parse_args(argv)
    force = {name: int(value) for name, _, value in (text.partition("=") for text in options.force)}
    failed = False
    for dtype, order in of_kernel(options.arch, options.triton, not options.flat, **force).items():
        if isinstance(order, str):
            print(f"{dtype}: {order.strip().splitlines()[-1]}")
            failed = True
            continue
        faults = order.faults()
        failed |= bool(faults)
        print(f"{dtype}: {order}")
        print(
            f"  latencies before the first store: {order.latencies}; {'; '.join(faults) or 'as it should be'}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
