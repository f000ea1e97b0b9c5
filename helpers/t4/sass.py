"""`python -m helpers sass`: every contender's machine code for a card that need not be here, and its time.

Ours is compiled from the notebook's kernel cells, Unsloth's from the installed package, both by the installed
Triton; bitsandbytes' code is taken from its library. Nothing is written but the file asked for.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from helpers.machine import environment
from helpers.record import results
from helpers.t4 import cross_compile, forecast, machine_code, cards
from helpers.t4.cross_compile import CompileError
from helpers.t4.forecast import find
from helpers.t4.machine_code import Counted, ToolMissing

__all__ = [
    "brief",
    "compile_kernel",
    "find",
    "instructions_per_element",
    "main",
    "over_budget",
    "ptx",
    "ratios",
    "table",
    "unsloth",
]

DTYPES = ("float16", "bfloat16", "float32")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
# Instructions a fp16 or bf16 output element may cost in sm_75 code.
BUDGET = {"float16": 7.0, "bfloat16": 9.0}
COMPILE_SPEC = ("quant_type", "blocksize", "blocksize2", "tail", "small")  # the other overrides go to force()
WIDTH = 110  # columns of the report
TIERS = (1.05, 1.10, 1.15)  # speedups the puzzle gives points for
# Of ours: (dtype, nested, with the tile of small tensors).
KINDS = (
    *((dtype, nested, False) for nested in (True, False) for dtype in DTYPES),
    *((dtype, True, True) for dtype in DTYPES[:2]),
)
BNB_THREADS = 64
BNB_KERNEL = re.compile(r"kDequantizeBlockwiseI(6__half|13__nv_bfloat16|f)Li512ELi64ELi8ELi([02])E")
BNB_DTYPES = {"6__half": "float16", "13__nv_bfloat16": "bfloat16", "f": "float32"}


@dataclass(frozen=True)
class Compiled:
    """One cross-compiled kernel. `counted` holds what a thread executes; sizes in bytes per block."""

    ptx: str
    cubin: bytes
    name: str
    num_warps: int
    shared: int
    constexprs: dict
    versions: dict
    counted: Counted

    @property
    def registers(self) -> int:
        return self.counted.registers

    @property
    def spills(self) -> int:
        return self.counted.spills

    @property
    def sass(self) -> list[str]:
        """Opcodes in the order a thread issues them."""
        return [instruction.opcode for instruction in self.counted.executed]


@dataclass(frozen=True)
class Row:
    """One kernel of the table; `counted` is None where `reason` says why."""

    who: str  # "ours", "unsloth default", "unsloth T4 table", "bitsandbytes"
    label: str
    dtype: str
    nested: bool
    counted: Counted | None
    reason: str = ""
    facts: dict | None = None


def _name(dtype) -> str:
    """ "float16" of torch.float16 or of "float16"."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"out_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name


def _compiled(built: cross_compile.Built, elements: float | None = None) -> Compiled:
    if built.error:
        raise CompileError(built.error)
    if elements is None and "WORDS" in built.constexprs:
        elements = 8 * built.constexprs["WORDS"]  # ours: 32-bit words of 8 codes per thread
    itemsize = ITEMSIZE[built.request["out_dtype"]]
    counted = machine_code.count_cubin(
        built.name, built.cubin, built.shared, built.num_warps * 32, itemsize, elements
    )
    return Compiled(
        built.ptx,
        built.cubin,
        built.name,
        built.num_warps,
        built.shared,
        built.constexprs,
        built.versions,
        counted,
    )


def _request(out_dtype, nested, arch, overrides) -> dict:
    spec = {name: value for name, value in overrides.items() if name in COMPILE_SPEC}
    force = {name: value for name, value in overrides.items() if name not in COMPILE_SPEC}
    return {
        "source": "ours",
        "arch": arch,
        "out_dtype": _name(out_dtype),
        "nested": nested,
        "force": force,
    } | spec


_kernels: dict[tuple, Compiled] = {}


def _key(out_dtype, nested, arch, overrides) -> tuple:
    return _name(out_dtype), nested, arch, tuple(sorted(overrides.items()))


def compile_kernels(kinds: list[tuple]) -> None:
    """Compile many in one child process: (out_dtype, nested, arch, overrides) each, as compile_kernel."""
    missing = [kind for kind in {_key(*kind): kind for kind in kinds}.values() if _key(*kind) not in _kernels]
    for kind, built in zip(missing, cross_compile.build([_request(*kind) for kind in missing]), strict=True):
        _kernels[_key(*kind)] = _compiled(built)


def compile_kernel(out_dtype, nested: bool = True, arch: int = 75, **overrides) -> Compiled:
    """The notebook's kernel compiled for sm_`arch`, with the settings it would choose on such a card.

    out_dtype: torch dtype or its name. overrides: `tail`, `small`, `quant_type`, `blocksize`, `blocksize2` as
    compile_spec takes them; everything else as `force` takes it (hints=False, asm=False). Needs no GPU; takes
    seconds, then is remembered. Raises CompileError, ToolMissing, or ValueError for an unknown dtype.
    """
    kind = (out_dtype, nested, arch, overrides)
    if _key(*kind) not in _kernels:
        compile_kernels([kind])
    return _kernels[_key(*kind)]


def ptx(out_dtype, arch: int = 75, **overrides) -> str:
    """PTX text of the notebook's kernel for sm_`arch`; arguments and errors as compile_kernel."""
    return compile_kernel(out_dtype, overrides.pop("nested", True), arch, **overrides).ptx


def instructions_per_element(compiled: Compiled) -> dict[str, float]:
    """Thread-instructions per output element: by pipe, "total", and "l1 bytes"."""
    return compiled.counted.per_element()


def over_budget(compiled, out_dtype) -> list[str]:
    """What of the sm_75 budget a Compiled or a Row misses, in words; empty when all is met."""
    counted, missed = compiled.counted, []
    limit, total = BUDGET.get(_name(out_dtype)), counted.per_element()["total"]
    if limit is not None and total > limit:
        missed.append(f"{total:.2f} instructions per element, at most {limit:.0f} allowed")
    if counted.shared:
        missed.append(f"{counted.shared} bytes of shared memory")
    if counted.spills:
        missed.append(f"{counted.spills} spills to local memory")
    stores = counted.widths("STG")
    if set(stores) != {128}:
        missed.append(f"stores of {', '.join(f'{bits} bits' for bits in sorted(stores))} instead of 128")
    return missed


def ours(arch: int, kinds=KINDS) -> list[Row]:
    """The notebook's kernel in each of `kinds` (default: all it comes in)."""
    requests = [
        _request(dtype, nested, arch, {"small": True} if small else {}) for dtype, nested, small in kinds
    ]
    rows = []
    for (dtype, nested, small), built in zip(kinds, cross_compile.build(requests), strict=True):
        who, label = "ours", f"ours, {'nested' if nested else 'flat'}"
        if small:
            who, label = f"{who}, small", f"{label}, small tensors"
        try:
            compiled = _compiled(built)
        except CompileError as error:
            rows.append(Row(who, label, dtype, nested, None, f"did not compile: {_last(error)}"))
        else:
            rows.append(Row(who, label, dtype, nested, compiled.counted, facts=_facts(compiled)))
    return rows


def _facts(compiled: Compiled) -> dict:
    return {"constexprs": compiled.constexprs, "versions": compiled.versions}


def _last(error) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else type(error).__name__


def _unsloth_name(table: str) -> tuple[str, str]:
    own = table == cross_compile.UNSLOTH_TABLES[1]
    return (
        ("unsloth T4 table", "Unsloth, Triton >= 3.7")
        if own
        else ("unsloth default", "Unsloth, Triton < 3.7")
    )


def unsloth(arch: int) -> list[Row]:
    """Unsloth's fused kernel in each launch configuration it chooses on such a card.

    At the official sizes in all dtypes; smaller tensors, where it chooses differently, in fp16 only.
    """
    if importlib.util.find_spec("unsloth") is None:
        who, label = _unsloth_name(cross_compile.UNSLOTH_TABLES[0])
        return [Row(who, "Unsloth", "", True, None, "not installed")]
    requests = [
        {
            "source": "unsloth",
            "arch": arch,
            "out_dtype": dtype,
            "nested": True,
            "table": table,
            "elements": elements,
        }
        for table in cross_compile.UNSLOTH_TABLES
        for elements, dtypes in ((cards.OFFICIAL[0][0], DTYPES), (2**20, DTYPES[:1]), (2**16, DTYPES[:1]))
        for dtype in dtypes
    ]
    rows, seen = [], set()
    for request, built in zip(requests, cross_compile.build(requests), strict=True):
        who, label = _unsloth_name(request["table"])
        small = request["elements"] != cards.OFFICIAL[0][0]
        if small:
            who, label = f"{who}, small", f"{label}, {request['elements'] // 1024}K elements"
        dtype = request["out_dtype"]
        if built.error:
            rows.append(Row(who, label, dtype, True, None, f"did not compile: {_last(built.error)}"))
            continue
        choice = {k: v for k, v in built.constexprs.items() if k != "blocks"} | {"num_warps": built.num_warps}
        key = (request["table"], dtype, tuple(sorted(choice.items())))
        if key in seen:
            continue
        seen.add(key)
        # A program is ROWS blocks of 2 * HALF elements, whatever lanes its stores repeat.
        elements = choice["ROWS"] * choice["HALF"] * 2 / (built.num_warps * 32)
        compiled = _compiled(built, elements)
        rows.append(Row(who, label, dtype, True, compiled.counted, facts=_facts(compiled)))
    return rows


def bitsandbytes_library(arch: int) -> Path | None:
    """bitsandbytes' CUDA library with code for sm_`arch`: the CUDA 12.8 one, Colab's, or else the newest."""
    spec = importlib.util.find_spec("bitsandbytes")
    folder = Path(spec.submodule_search_locations[0]) if spec else None
    found = sorted(folder.glob("libbitsandbytes_cuda*.so"), reverse=True) if folder else []
    for path in sorted(found, key=lambda path: path.stem[-3:] != "128"):
        if f"sm_{arch}.cubin" in machine_code.cuobjdump("-lelf", path):
            return path
    return None


def bitsandbytes(arch: int) -> list[Row]:
    """bitsandbytes' NF4 kernels and the absmax decode, disassembled from its installed library."""
    who = "bitsandbytes"
    if importlib.util.find_spec("bitsandbytes") is None:
        return [Row(who, who, "", True, None, "not installed")]
    library = bitsandbytes_library(arch)
    if library is None:
        return [Row(who, who, "", True, None, f"no library with sm_{arch} code is installed")]
    usage = machine_code.resources(machine_code.cuobjdump("-res-usage", "-arch", f"sm_{arch}", library))
    wanted = {}
    for function in usage:
        found = BNB_KERNEL.search(function)
        if found and (found[2] == "2" or found[1] == "f"):
            wanted[function] = found
    if not wanted:
        return [
            Row(who, who, "", True, None, f"no dequantization kernel of the known form in {library.name}")
        ]
    listing = machine_code.cuobjdump("-sass", "-arch", f"sm_{arch}", "-fun", ",".join(wanted), library)
    code = machine_code.parse(listing)
    reserved = cards.CARDS[arch].reserved  # static shared memory is listed with what the driver keeps
    rows = []
    for function, found in wanted.items():
        dtype, used = BNB_DTYPES[found[1]], usage[function]
        counted = machine_code.count(
            function,
            code[function],
            used["registers"],
            used["shared"] - reserved,
            BNB_THREADS,
            ITEMSIZE[dtype],
        )
        label = "bitsandbytes, weight" if found[2] == "2" else "bitsandbytes, absmax decode"
        facts = {
            "library": library.name,
            "versions": {"bitsandbytes": environment.version_of("bitsandbytes")},
        }
        rows.append(Row(who, label, dtype, False, counted, facts=facts))
    return sorted(rows, key=lambda row: ("absmax" in row.label, DTYPES.index(row.dtype)))


def table(arch: int) -> list[Row]:
    """Every contender's kernels for sm_`arch`. Raises ToolMissing without cuobjdump."""
    machine_code.tool()
    return [*ours(arch), *unsloth(arch), *bitsandbytes(arch)]


def _widths(bits: dict) -> str:
    """ "8/32/128": the widths in bits that occur (texts where they were read from a file)."""
    return "/".join(map(str, sorted(map(int, bits)))) or "-"


def _line(kernel: dict) -> str:
    """One line of COLUMNS of an entry that _kernel_dict made."""
    start = f"{kernel['label']:27} {SHORT.get(kernel['dtype'], ''):4}"
    if "per_element" not in kernel:
        return f"{start} {kernel['reason']}"[:WIDTH]
    each = kernel["per_element"]
    pipes = " ".join(f"{each.get(pipe, 0.0):5.2f}" for pipe in cards.SHOWN)
    memory = f"{_widths(kernel['load_bits']):>8} {_widths(kernel['store_bits']):>5}"
    rest = (
        f"{kernel['shared_bytes']:4} {kernel['registers']:4} {kernel['occupancy']:4.0%} {kernel['spills']:5}"
    )
    return f"{start}{each['total']:6.2f} {pipes} {memory} {rest}"


_NAMES = " ".join(f"{name:>5}" for name in ("int", "fp", "ld/st", "conv", "unif", "ctrl"))
COLUMNS = f"{'kernel':27} {'type':4}{'total':>6} {_NAMES} {'loads':>8} store smem regs occ. spill"
LEGEND = (
    "total, int ... ctrl: instructions per output element, in all and by pipe; loads, store: bits per "
    "access; smem: bytes per block; regs: per thread; occ.: occupancy; spill: accesses to local memory."
)


def _span(pair, digits=2) -> str:
    return "not measured" if not pair else f"{pair[0]:.{digits}f} to {pair[1]:.{digits}f}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def count_lines(rows, arch) -> list[str]:
    card = cards.CARDS[arch]
    versions = next((row.facts["versions"] for row in rows if row.facts and row.who == "ours"), {})
    lines = [
        f"sm_{arch} ({card.name}): thread-instructions per output element; Triton {versions.get('triton')}",
        COLUMNS,
    ]
    lines += [_line(_kernel_dict(row, card)) for row in rows if not row.who.endswith("small")]
    lines += _wrap(LEGEND)
    hows = "; ".join(dict.fromkeys(row.counted.how for row in rows if row.counted))
    lines += _wrap(f"Counted along one thread's way ({hows}); predicated instructions count as issued.")
    return lines + (_wrap(budget(rows)) if arch == 75 else [])


def budget(rows: list[Row]) -> str:
    """One line on our kernel's sm_75 budget; it ends in "met" when nothing is missed."""
    missed = []
    for row in rows:
        if row.who == "ours" and row.dtype in BUDGET:
            reasons = [row.reason] if row.counted is None else over_budget(row, row.dtype)
            missed += [f"{row.label} {SHORT[row.dtype]}: {reason}" for reason in reasons]
    limits = ", ".join(f"{SHORT[dtype]} {limit:.0f}" for dtype, limit in BUDGET.items())
    rest = "no shared memory, no spills, 128-bit stores"
    return f"Budget for ours ({limits} instructions; {rest}): " + ("; ".join(missed) or "met")


def _time_lines(rows, card) -> list[str]:
    sizes = [(elements, dtype) for elements, dtype, _ in cards.OFFICIAL]
    lines = [
        f"Predicted GPU time of one call on a {card.name}, us: fast to slow end, and what bounds it",
        _size_heads(),
    ]
    for key, label in forecast.contenders(rows).items():
        cells = []
        for n, dtype in sizes:
            p = forecast.predict(rows, card, key, n, dtype)
            bounds = "/".join(dict.fromkeys((p.bound_low, p.bound_high)))
            cells.append(f"{p.low:.1f} to {p.high:.1f} {bounds}")
        lines.append(f"{label:31}" + "".join(f"{cell:>25}" for cell in cells))
    lines += _wrap(
        f"Busiest pipe's share of the DRAM time at the slow end: {'; '.join(_shares(rows, card))}."
    )
    return lines


def _shares(rows, card) -> list[str]:
    shares = []
    for key, label in forecast.contenders(rows).items():
        found = {forecast.predict(rows, card, key, 2**22, dtype).busiest for dtype in forecast.DTYPES}
        low, high = (pick(found, key=lambda pair: pair[1]) for pick in (min, max))
        span = " to ".join(dict.fromkeys(f"{share:.0%}" for _, share in (low, high)))
        shares.append(f"{label} {span} ({high[0]})")
    return shares


def _error_lines(rows90, data, where) -> list[str]:
    errors = forecast.model_errors(rows90, data)
    if not errors:
        return [f"The model's error on the H200: not measured (needs {where}, section gpu)"]
    gb_s, what = forecast.bandwidth(data)
    head = f"The same model for sm_90 on the H200, us; DRAM at {gb_s:.0f} GB/s ({what}, measured)"
    return [head, *_compared(errors, forecast.contenders(rows90))]


def _size_heads() -> str:
    heads = (f"{n / 1e6:.1f}M {SHORT[dtype]}" for n, dtype, _ in cards.OFFICIAL)
    return " " * 31 + "".join(f"{head:>25}" for head in heads)


def _compared(errors: list[dict], labels: dict[str, str]) -> list[str]:
    """Predicted and measured times of model_errors at the official sizes, and the range of the error."""
    found = {(error["contender"], error["elements"], error["dtype"]): error for error in errors}
    lines = [_size_heads(), " " * 31 + f"{'predicted':>15}{'measured':>10}" * len(cards.OFFICIAL)]
    for key in dict.fromkeys(error["contender"] for error in errors):
        line = f"{labels[key]:31}"
        for n, dtype, _ in cards.OFFICIAL:
            one = found.get((key, n, dtype))
            line += f"{one['predicted_us']:15.1f}{one['measured_us']:10.1f}" if one else f"{'-':>15}{'-':>10}"
        lines.append(line)
    large = [error["error"] for error in errors if error["elements"] >= forecast.LARGE]
    if large:
        lines += _wrap(
            f"Error, predicted / measured - 1: {min(large):+.0%} to {max(large):+.0%} in {len(large)} cases "
            f"from {forecast.LARGE / 1e6:.1f}M elements on (minus: took longer)."
        )
    return lines


def _total_lines(rows, data) -> list[str]:
    found = forecast.official(rows, data)
    lines = [
        f"Official protocol on a T4, seconds over {cards.CALLS} calls; nothing here was measured on a T4"
    ]
    for total in found["contenders"].values():
        start = f"{total['label']:31}kernels {_span(total['kernels_s'])}"
        if total["published_s"]:
            lines.append(f"{start}; total {_span(total['published_s'])} as others published")
        elif total["total_s"]:
            lines.append(f"{start} + calls {_span(total['calls_s'])} = {_span(total['total_s'])}")
        else:
            lines.append(f"{start} + calls not measured (needs a stored run of helpers bench)")
    low, high = cards.PUBLISHED_CALL_US
    shares = ", ".join(f"{value:.2f} {what}" for what, value in found["host_ratios"].items())
    lines += _wrap(
        f"Calls: {low:.0f} to {high:.0f} us each lost beside the kernel (published, T4 Colab), for ours "
        f"times our host time over Unsloth today's on the H200's host: {shares or 'not measured'}."
    )
    lines += _verdicts(found)
    low, high = cards.SIMULATED_GAIN
    return lines + _wrap(
        f"On a T4 the kernel alone beats classic by {low - 1:.0%} to {high - 1:.0%} (simulated by others) "
        "and about equals today's fused kernel, since DRAM bounds both; the rest of the margin is call cost."
    )


def ratios(official: dict) -> dict[str, tuple[float, float, float]]:
    """(low, middle, high) of each other contender's seconds over ours, from what forecast.official found.

    The rates of memory and clock, the published cost of a call and our share of it vary independently of each
    other; the two contenders of a ratio meet the same ones. Classic's call is counted as no dearer than
    today's, though it launches three kernels. {} where our share was not measured.
    """
    contenders, shares = official["contenders"], sorted(official["host_ratios"].values())
    if not shares or "kernel" not in contenders:
        return {}
    calls = [cards.CALLS * us * 1e-6 for us in cards.PUBLISHED_CALL_US]
    found = {}
    for key in (key for key in contenders if key != "kernel"):
        kernels = [contenders[who]["kernels_s"] for who in ("kernel", key)]
        ends = itertools.product(zip(*kernels, strict=True), calls, (shares[0], shares[-1]))
        every = [_ratio(*pair, call, share) for pair, call, share in ends]
        middle = _ratio(*(sum(pair) / 2 for pair in (*kernels, calls, (shares[0], shares[-1]))))
        found[key] = min(every), middle, max(every)
    return found


def _ratio(ours: float, theirs: float, calls: float, share: float) -> float:
    return (theirs + calls) / (ours + share * calls)


def _shown(official: dict) -> dict[str, str]:
    """{contender: label}: those of one name and the same kernel times once, under that name."""
    keys, labels = {}, {key: one["label"] for key, one in official["contenders"].items()}
    for key, label in labels.items():
        keys.setdefault((label.split(",")[0], tuple(official["contenders"][key]["kernels_s"])), key)
    names = Counter(name for name, _ in keys)
    return {key: name if names[name] == 1 else labels[key] for (name, _), key in keys.items()}


def _verdicts(official: dict) -> list[str]:
    """Which of the puzzle's lines the ratio to each other contender reaches."""
    found, lines = ratios(official), []
    for key, label in _shown(official).items():
        if key not in found:
            continue
        low, middle, high = found[key]
        line = f"Ratio to {label}: {low:.2f} to {high:.2f}, middle {middle:.2f}; "
        places = f"{_tier(low)} at the low end, {_tier(middle)} in the middle, {_tier(high)} at the high end"
        doubt = " and ".join(f"{tier:.2f}" for tier in TIERS if low < tier <= high)
        reached = f"{places}; {doubt} in doubt." if doubt else f"{_tier(low)} throughout."
        lines += _wrap(f"{line}the puzzle's line that it reaches: {reached}")
    return lines


def _tier(ratio: float) -> str:
    return max((f"{tier:.2f}" for tier in TIERS if ratio >= tier), default="none")


def brief(found: dict) -> list[str]:
    """What to_dict found for a T4, on a screen: verdict, code of fp16 and bf16, the model's error."""
    official = found["official_on_t4"]
    contenders, spans, shown = official["contenders"], ratios(official), _shown(official)
    lines = [
        f"Predicted for a T4, where nothing was measured: official protocol ({cards.CALLS} calls), seconds",
        f"{'':30}" + "".join(f"{head:>16}" for head in ("kernels", "calls", "together", "time / ours")),
    ]
    for key, label in shown.items():
        kernels, calls = contenders[key]["kernels_s"], contenders[key]["calls_s"]
        if spans and not calls:
            calls = cards.call_cost([1.0])  # classic's, as in its ratio
        total = calls and [sum(pair) for pair in zip(kernels, calls, strict=True)]
        ratio = "1" if key == "kernel" else _span(spans[key][::2] if spans else None)
        cells = (*(_span(pair) for pair in (kernels, calls, total)), ratio)
        lines.append(f"{label:30}" + "".join(f"{cell:>16}" for cell in cells))
    lines += _verdicts(official)
    shares = sorted(official["host_ratios"].values())
    dram = _span([rate["value"] for rate in found["card"]["dram_gb_s"]], 0)
    each, classic = found["published"]["call_cost_us"], found["published"]["totals_s"]["Unsloth classic"]
    lines += _wrap(
        f"DRAM at {dram} GB/s; calls cost {_span(each, 0)} us each beside the kernel (published), ours "
        f"{_span(shares and (shares[0], shares[-1]))} of that (H200's host), classic's as much as today's. "
        f"Published for classic: {_span(classic)} s."
    )
    lines += ["", "Code for sm_75, nested weights (all of it: python -m helpers sass)", COLUMNS]
    wanted = ("ours", "unsloth default", "unsloth T4 table", "bitsandbytes")
    lines += [
        _line(kernel)
        for kernel in found["kernels"]
        if kernel["who"] in wanted
        and (kernel["nested"] or kernel["who"] == "bitsandbytes")
        and kernel["dtype"] in ("", *forecast.DTYPES)
    ]
    lines += _wrap(LEGEND)
    errors = found["model_errors"]
    if isinstance(errors, str):
        return [*lines, "", f"The model's error on the H200: {errors}"]
    labels = {key: one["label"] for key, one in contenders.items()}
    return [
        *lines,
        "",
        "The same model asked for the H200, where times are stored; us",
        *_compared(errors, labels),
    ]


def _source_lines(card) -> list[str]:
    """Every rate with its source; pipes of the same source share a line."""
    lines = []
    for what, ends, unit in (("Clock", card.clock_ghz, "GHz"), ("DRAM", card.dram_gb_s, "GB/s")):
        values = dict.fromkeys(f"{rate.value:g} {unit} ({rate.source})" for rate in ends)
        lines += _wrap(f"{what}: {' to '.join(values)}")
    by_source: dict[str, list[str]] = {}
    for pipe, rate in (card.lanes | {"L1 bytes": card.l1_bytes}).items():
        by_source.setdefault(rate.source, []).append(f"{pipe} {rate.value:g}")
    rates = (f"{', '.join(pipes)} ({source})" for source, pipes in by_source.items())
    return lines + _wrap(f"Lanes per clock and SM: {'; '.join(rates)}")


def render(rows: list[Row], rows90: list[Row], data: dict | None, where: str, arch: int) -> str:
    """The report, at most 60 lines of WIDTH columns."""
    card = cards.CARDS[arch]
    blocks = [count_lines(rows, arch), _time_lines(rows, card), _error_lines(rows90, data, where)]
    if card is cards.T4:
        blocks.append(_total_lines(rows, data))
    blocks.append(_source_lines(card))
    return "\n\n".join("\n".join(block) for block in blocks)


def _kernel_dict(row: Row, card) -> dict:
    entry = {name: getattr(row, name) for name in ("who", "label", "dtype", "nested", "reason", "facts")}
    if row.counted is None:
        return entry
    counted = row.counted
    return entry | {
        "per_element": counted.per_element(),
        "opcodes": dict(Counter(instruction.opcode for instruction in counted.executed)),
        "elements_a_thread": counted.elements,
        "threads": counted.threads,
        "registers": counted.registers,
        "shared_bytes": counted.shared,
        "occupancy": cards.occupancy(card, counted.threads, counted.registers, counted.shared),
        "spills": counted.spills,
        "load_bits": dict(counted.widths("LDG")),
        "store_bits": dict(counted.widths("STG")),
        "counted": counted.how,
    }


def to_dict(rows: list[Row], rows90: list[Row], data: dict | None, where: str, arch: int) -> dict:
    """Everything the report is made of, for machines."""
    card = cards.CARDS[arch]
    official = forecast.official(rows, data) if card is cards.T4 else None
    return {
        "arch": arch,
        "card": dataclasses.asdict(card),
        "kernels": [_kernel_dict(row, card) for row in rows],
        "budget": BUDGET,
        "predicted": [
            {"contender": key, "elements": n, "dtype": dtype}
            | dataclasses.asdict(forecast.predict(rows, card, key, n, dtype))
            for key in forecast.contenders(rows)
            for n, dtype, _ in cards.OFFICIAL
        ],
        "model_errors": forecast.model_errors(rows90, data) or f"not measured (needs {where}, section gpu)",
        "official_on_t4": official,
        "ratios_on_t4": ratios(official) if official else None,
        "published": {"totals_s": cards.PUBLISHED_TOTALS, "call_cost_us": cards.PUBLISHED_CALL_US},
    }


def main(argv: list[str] | None = None) -> int:
    """Print the report. 1 when our kernel does not compile or misses its budget, 2 without cuobjdump."""
    parser = argparse.ArgumentParser(prog="python -m helpers sass", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, default=75, choices=sorted(cards.CARDS), help="75: T4, 90: H200")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every detail to FILE")
    options = parser.parse_args(argv)
    try:
        rows = table(options.arch)
        rows90 = rows if options.arch == 90 else table(90)
    except ToolMissing as error:
        print(error, file=sys.stderr)
        return 2
    data, where = forecast.stored_run()
    print(render(rows, rows90, data, where, options.arch))
    if options.json:
        found = to_dict(rows, rows90, data, where, options.arch)
        found["text"] = render(rows, rows90, data, where, options.arch).splitlines()
        print("written:", results.write(options.json.name, found, options.json.parent))
    failed = any(row.who == "ours" and row.counted is None for row in rows)
    return int(failed or (options.arch == 75 and not budget(rows).endswith("met")))


if __name__ == "__main__":
    sys.exit(main())
