"""Tables of one benchmark result, as text and markdown. Nothing is measured here.

A table is a list of rows of texts, the header first; [] where its section was not measured.
"""

from helpers.results.names import DTYPES, label, size_text
from helpers.results.old_store import Benchmark, Rows, ratio

REFERENCE = "(the reference)"  # whose weights everyone's are compared with
Table = list[list[str]]


def text(table: Table) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown(table: Table) -> str:
    """A markdown table, without links: kernel[grid](...) is none."""
    header, *rows = table
    lines = ("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))
    return "\n".join(lines).replace("](", "]\\(")


def _compared(head: str, cases: dict[str, Rows], reference: str) -> Table:
    """A line a case: median microseconds of everyone, and the multiple of the reference behind it."""
    names = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    table = [[head, *map(label, names)]]
    for case, rows in cases.items():
        cells = dict.fromkeys(names, "-")
        for name, times in rows.items():
            multiple = ratio(rows, name, reference)
            cells[name] = f"{times.p50:.2f}" + (f" ({multiple:.2f}x)" if multiple else "")
        table.append([case, *cells.values()])
    return table if cases else []


def protocol(data: Benchmark) -> Table:
    """Median seconds of the official protocol, their ratio to ours, all repeats, and the checks' verdict."""
    found = data.protocol
    entries = {name: entry for name, entry in found.entries.items() if entry.seconds} if found else {}
    if "kernel" not in entries:
        return []
    table = [["official protocol", "seconds", "time / ours", "repeats", "official checks"]]
    for name, entry in entries.items():
        verdict = "every bit equal" if entry.identical else "within tolerance"
        if entry.label == found.checked_against:
            verdict = REFERENCE
        multiple = "1" if name == "kernel" else f"{found.speedup('kernel', name):.2f}"
        repeats = ", ".join(f"{seconds:.3f}" for seconds in entry.seconds)
        table.append([label(name), f"{entry.p50:.3f}", multiple, repeats, verdict])
    return table


def gemm(data: Benchmark) -> Table:
    """Dequantize + multiply, microseconds, and the multiple of the multiplication alone."""
    cases = {
        f"{case.tokens} x {case.shape[0]}x{case.shape[1]} {DTYPES[case.dtype]}": case.rows
        for case in (data.gemm.cases if data.gemm else [])
    }
    return _compared("dequantize + multiply, us (over multiply)", cases, "multiplication alone")


def compiled(data: Benchmark) -> Table:
    """24 weights and their products, and one call alone, microseconds, eager -> under torch.compile."""
    found = data.compile
    if not found or not found.cases:
        return []
    cases = {}
    for case in found.cases:
        passes = "forward and backward" if case.backward else "forward"
        cases[f"{case.tokens} tokens, {passes}"] = case.eager, case.compiled
    cases["one weight alone, until the call returns"] = found.call_eager, found.call_compiled
    names = list(dict.fromkeys(name for eager, _ in cases.values() for name in eager))
    table = [[f"{found.weights} weights and products, us, eager -> compiled", *map(label, names)]]
    for what, ways in cases.items():
        cells = [[f"{rows[name].p50:.0f}" if name in rows else "-" for rows in ways] for name in names]
        table.append([what, *(" -> ".join(cell) for cell in cells)])
    return table


def call_cost(data: Benchmark) -> Table:
    """What one call executes: counts, so free of noise."""
    rows = [[label(name), *map(str, cost.values())] for name, cost in (data.call_cost or {}).items()]
    return [["one call", "bytecodes", "Python calls", "calls into C"], *rows] if rows else []


def ablation(data: Benchmark) -> Table:
    """GPU microseconds with one decision changed, and the multiple of the time as chosen."""
    cases = {
        f"{size_text(case.numel)} {DTYPES[case.dtype]}": case.rows
        for case in (data.ablation.cases if data.ablation else [])
    }
    table = _compared("one decision changed, us (over as chosen)", cases, "as chosen")
    return [list(line) for line in zip(*table, strict=True)]  # a line a decision


TABLES = (protocol, call_cost, gemm, compiled, ablation)


def summary(data: Benchmark) -> str:
    """All tables that have rows, as text."""
    return "\n\n".join(text(rows) for rows in (make(data) for make in TABLES) if rows)
