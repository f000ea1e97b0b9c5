"""Tables of one benchmark result, as text and markdown. Nothing is measured here.

A table is a list of rows of texts, the header first; [] where its section was not measured.
"""

from helpers.record.names import DTYPES, label, size_text
from helpers.record.results import Benchmark, Rows, ratio

REFERENCE = "(the reference)"  # whose weights everyone's are compared with
Table = list[list[str]]


def text(table: Table) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown(table: Table) -> str:
    """A markdown table."""
    header, *rows = table
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


def _times(rows: Rows, names: list[str], reference: str) -> list[str]:
    """Median microseconds of each, and the multiple of the reference behind it."""
    cells = []
    for name in names:
        multiple = ratio(rows, name, reference)
        multiple = "" if multiple is None else f" ({multiple:.2f}x)"
        cells.append(f"{rows[name].p50:.2f}{multiple}" if name in rows else "-")
    return cells


def _names(all_rows: list[Rows]) -> list[str]:
    return list(dict.fromkeys(name for rows in all_rows for name in rows))


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
    cases = data.gemm.cases if data.gemm else []
    names = _names([case.rows for case in cases])
    table = [["dequantize + multiply, us (over multiply)", *map(label, names)]]
    for case in cases:
        product = f"{case.tokens} x {case.shape[0]}x{case.shape[1]} {DTYPES[case.dtype]}"
        table.append([product, *_times(case.rows, names, "multiplication alone")])
    return table if cases else []


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
    names = _names([eager for eager, _ in cases.values()])
    table = [[f"{found.weights} weights and products, us, eager -> compiled", *map(label, names)]]
    for what, ways in cases.items():
        cells = [[f"{rows[name].p50:.0f}" if name in rows else "-" for rows in ways] for name in names]
        table.append([what, *(" -> ".join(cell) for cell in cells)])
    return table


def call_cost(data: Benchmark) -> Table:
    """What one call executes: counts, so free of noise."""
    rows = [
        [label(name), *map(str, (cost.bytecodes, cost.python_calls, cost.c_calls))]
        for name, cost in (data.call_cost or {}).items()
    ]
    return [["one call", "bytecodes", "Python calls", "calls into C"], *rows] if rows else []


def ablation(data: Benchmark) -> Table:
    """GPU microseconds with one decision changed, and the multiple of the time as chosen."""
    cases = data.ablation.cases if data.ablation else []
    names = _names([case.rows for case in cases])
    head = [f"{size_text(case.numel)} {DTYPES[case.dtype]}" for case in cases]
    columns = [_times(case.rows, names, "as chosen") for case in cases]
    rows = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
    return [["one decision changed, us (over as chosen)", *head], *rows] if rows else []


TABLES = (protocol, call_cost, gemm, compiled, ablation)


def summary(data: Benchmark) -> str:
    """All tables that have rows, as text."""
    return "\n\n".join(text(rows) for rows in (make(data) for make in TABLES) if rows)
