"""Order of loads in SASS: what a thread asks for, what it waits for, and how often before its first store.

A warp issues in order. So a load that stands behind the first use of another load's register starts a whole
memory latency later.
"""

import re
from dataclasses import dataclass

from helpers.t4.machine_code import Instruction, width

_REGISTER = re.compile(r"(?<![A-Z0-9])(U?R)(\d+)(\.64)?")
_PARAMETER = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
PARAMETER_BASE = ((100, 0x380), (90, 0x210), (70, 0x160))  # bytes into constant bank 0, from this sm_ on
POINTERS = ("words", "out", "absmax", "table", "code2", "absmax2", "offset")  # our kernel's, 8 bytes each
NO_RESULT = ("STL", "ST", "ISETP", "FSETP", "UISETP", "BAR", "BRA", "EXIT", "NOP", "WARPSYNC")
EVENTS = {"STG": "store", "BAR": "barrier", "STS": "to-shared", "LDS": "from-shared"}
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
    shared: tuple[str, ...]  # what passes through shared memory, of POINTERS: whose loads it derives from

    @property
    def words(self) -> tuple[Load, ...]:
        return tuple(load for load in self.loads if load.what == "words")

    @property
    def late_words(self) -> int:
        """Words that are loaded only after a wait for another load."""
        return sum(load.behind > 0 for load in self.words)

    def faults(self, direct: bool = True) -> list[str]:
        """What the gate on the order of loads refuses, in words; empty when all is well.

        direct: neither words nor results may pass through shared memory (fp32 results do).
        """
        late = self.late_words
        unknown = ", ".join(str(load) for load in self.loads if load.what == "?")
        seen = {
            "no load of a word was seen": not self.words,
            f"loads of an unknown argument: {unknown}": unknown,
            f"{late} of {len(self.words)} words are loaded behind a wait": late,
            f"{self.latencies} dependent latencies before the first store, at most {MOST_LATENCIES}": (
                self.latencies > MOST_LATENCIES
            ),
            f"shared memory holds what derives from {', '.join(self.shared)}, expected code2 alone": (
                direct and set(self.shared) - {"code2"}
            ),
        }
        return [text for text, refused in seen.items() if refused]

    def __str__(self):
        return " ".join(self.events)


def _registers(text: str, wide: int = 1) -> list[str]:
    """Registers that an operand names: two of "R2.64", `wide` of a register that starts a vector."""
    return [
        f"{kind}{int(number) + step}"
        for kind, number, double in _REGISTER.findall(text)
        for step in range(max(wide, 2 if double else 1))
    ]


def _operands(instruction: Instruction) -> tuple[list[str], list[str], list[str]]:
    """Registers that it writes, that it reads, and the vector of them that a store writes to memory."""
    operands, parts = instruction.operands.split(", "), instruction.opcode.split(".")
    wide, written, stored = max(1, width(instruction.opcode) // 32), [], []
    if instruction.stem in ("STG", "STS"):
        stored = _registers(operands[-1], wide)
    elif instruction.stem not in NO_RESULT:
        wide = max(wide, 2) if "WIDE" in parts or parts == ["CS2R"] else wide
        first = next((i for i, operand in enumerate(operands) if not _PREDICATE.fullmatch(operand)), 0)
        written = _registers(operands.pop(first), wide)
    return written, _registers(", ".join(operands)) + stored, stored


def _address(instruction: Instruction) -> list[str]:
    """Registers between the brackets of a memory access, without its descriptor (sm_80 and newer)."""
    inside = re.search(r"(?<!c)\[([^\[\]]*)\](?!\[)", instruction.operands)
    return _registers(inside[1].replace(".64", "")) if inside else []


def read(path: tuple[Instruction, ...], arch: int) -> Order:
    """Order of our kernel's loads along `path`, the way of one thread (machine_code.executed)."""
    base = next(start for least, start in PARAMETER_BASE if arch >= least)
    waiting: dict[str, Load] = {}  # register -> the load whose value it will hold
    holds: dict[str, set[str | Load]] = {}  # register -> what its value derives from: arguments, loads
    loads, events, shared, level, latencies = [], [], set(), 0, None

    def origins(registers: list[str]) -> set[str | Load]:
        return set().union(*(holds.get(name, ()) for name in registers))

    for position, now in enumerate(path):
        written, needed, stored = _operands(now)
        offsets = [int(text, 16) - base for text in _PARAMETER.findall(now.operands)]
        derived = {POINTERS[offset // 8] for offset in offsets if 0 <= offset < 8 * len(POINTERS)}
        derived |= origins(needed)
        used = {waiting[name] for name in (*needed, *written) if name in waiting}
        if used:
            level = max(level, 1 + max(load.behind for load in used))
            events.append(f"<wait {', '.join(map(str, sorted(used, key=lambda load: load.position)))}>")
            waiting = {name: load for name, load in waiting.items() if load not in used}
        if now.stem == "LDG":  # an address may be another load's value, which is not followed
            arguments = [source for source in origins(_address(now)) if isinstance(source, str)]
            loads.append(Load(position, arguments[0] if len(arguments) == 1 else "?", level))
            waiting |= dict.fromkeys(written, loads[-1])
            events.append(str(loads[-1]))
            derived = {loads[-1]}
        elif now.stem in EVENTS:
            events.append(f"{EVENTS[now.stem]}@{position}")
            if now.stem == "STG" and latencies is None:
                latencies = level
            if now.stem == "STS":
                shared |= {load.what for load in origins(stored) if isinstance(load, Load)} or {"?"}
            derived = set()
        for name in written:  # a predicated write may leave what was there
            holds[name] = derived | (holds.get(name, set()) if now.predicate else set())
    latencies = level if latencies is None else latencies
    return Order(tuple(loads), tuple(events), latencies, tuple(sorted(shared)))
