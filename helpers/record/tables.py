"""Text and markdown tables of one benchmark result. Nothing is measured here.

A table is a list of rows of texts, the header first; [] where the section was not measured.
"""

from helpers.record.goals import size_text

SHORT = {"float16": "fp16", "bfloat16": "bf16"}
CONTENDERS = {
    "kernel": "ours",
    "unsloth_today": "Unsloth today",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
    "peft": "PEFT",
}
REFERENCE = "(the reference)"  # whose weights everyone's are compared with
CEILINGS = {"floor_cuda": "ceiling, CUDA C", "floor_triton": "ceiling, Triton"}


def text(table: list[list[str]]) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in table]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown(table: list[list[str]]) -> str:
    """A markdown table."""
    header, *rows = table
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


def _data(result: dict) -> dict:
    return result.get("data", result)


def _time(row: dict | None, ratio: float | None = None) -> str:
    """Median microseconds, and a ratio behind it."""
    if row is None:
        return "-"
    return f"{row['p50']:.2f}" + (f" ({ratio:.2f}x)" if ratio is not None else "")


def _present(cases: list[dict], names: dict[str, str], key) -> dict[str, str]:
    return {name: label for name, label in names.items() if any(name in key(case) for case in cases)}


def host(result: dict) -> list[list[str]]:
    """Microseconds until a call returns / is done, and multiples of bare allocate + fill."""
    cases = _data(result).get("host", {}).get("cases", [])
    names = CONTENDERS | {"empty_strided + fill_": "allocate + fill"}
    names = _present(cases, names, lambda case: case["returned"])
    rows = []
    for case in cases:
        what = f"{case['shape'][0]}x{case['shape'][1]} {SHORT[case['dtype']]}"
        for moment in ("returned", "synchronized"):
            found = case[moment]
            cells = [_time(found.get(name), found.get(name, {}).get("ratio")) for name in names]
            rows.append([f"{what}, {moment}", *cells])
    return [["host time, us (over allocate + fill)", *names.values()], *rows] if rows else []


def _gpu(cases: list[dict], title: str, label) -> list[list[str]]:
    cases = [case for case in cases if "rows" in case]
    names = _present(cases, CONTENDERS | CEILINGS, lambda case: case["rows"])
    rows = [
        [
            f"{label(case)} {SHORT[case['dtype']]}",
            *(_time(case["rows"].get(name), case.get("vs", {}).get(name)) for name in names),
            f"{case['rows']['kernel']['gb_s']:.0f}" if "kernel" in case["rows"] else "-",
        ]
        for case in cases
    ]
    return [[title, *names.values(), "ours, GB/s"], *rows] if rows else []


def sizes(result: dict) -> list[list[str]]:
    """GPU microseconds by size; in brackets the multiple of ours."""
    cases = _data(result).get("gpu", {}).get("sizes", [])
    return _gpu(cases, "GPU time, us (over ours)", lambda case: size_text(case["numel"]))


def layers(result: dict) -> list[list[str]]:
    """GPU microseconds of the layers of real models."""
    cases = _data(result).get("gpu", {}).get("layers", [])
    return _gpu(cases, "GPU time of layers, us (over ours)", lambda case: ", ".join(case["layers"]))


def gemm(result: dict) -> list[list[str]]:
    """Dequantize + multiply, microseconds, and the multiple of the multiplication alone."""
    cases = _data(result).get("gemm", {}).get("cases", [])
    names = list(dict.fromkeys(name for case in cases for name in case["rows"]))
    rows = [
        [
            f"{case['tokens']} x {case['shape'][0]}x{case['shape'][1]} {SHORT[case['dtype']]}",
            *(
                _time(case["rows"].get(name), case["rows"].get(name, {}).get("vs_multiplication_alone"))
                for name in names
            ),
        ]
        for case in cases
    ]
    header = ["dequantize + multiply, us (over multiply)", *(CONTENDERS.get(name, name) for name in names)]
    return [header, *rows] if rows else []


def protocol(result: dict) -> list[list[str]]:
    """Median seconds of the official protocol, their ratio to ours, and the checks' verdict."""
    found = _data(result).get("protocol", {})
    entries = found.get("entries", {})
    ours = entries.get("kernel", {}).get("spread")
    rows = [["official protocol", "seconds", "time / ours", "official checks, default tolerances"]]
    for name, entry in entries.items() if ours else ():
        if entry.get("spread"):
            median = entry["spread"]["p50"]
            verdict = "every bit equal" if entry["identical"] else "within tolerance"
            if entry["label"] == found.get("checked_against"):
                verdict = REFERENCE
            label, ratio = ("this kernel", "1") if name == "kernel" else (entry["label"], None)
            rows.append([label, f"{median:.3f}", ratio or f"{median / ours['p50']:.2f}", verdict])
    return rows if len(rows) > 1 else []


def cold(result: dict) -> list[list[str]]:
    """Seconds of each step of a fresh process, medians."""
    rows = []
    for job, label in (("kernel", "this kernel"), ("trivial", "a kernel that does nothing")):
        for state, found in _data(result).get("cold", {}).get(job, {}).items():
            steps = found["median"]
            imports = sum(seconds for step, seconds in steps.items() if step.startswith(("import", "load")))
            cache = {"empty": "empty cache", "warm": "warm disk cache"}[state]
            cells = [imports, steps["first_call"], steps["second_call"]]
            rows.append([f"{label}, {cache}", *(f"{seconds:.4f}" for seconds in cells)])
    return [["fresh process, seconds", "imports", "first call", "second call"], *rows] if rows else []


def step(name: str) -> str:
    """How a row of the stored ablation is shown."""
    name = {"no inline assembly": "portable path (general, no assembly)"}.get(name, name)
    return name.replace(" an SM", " per SM").replace(" a thread", " per thread")


def ablation(result: dict) -> list[list[str]]:
    """GPU microseconds with one decision changed, and the multiple of the time as chosen."""
    cases = _data(result).get("ablation", {}).get("cases", [])
    names = list(dict.fromkeys(name for case in cases for name in case["rows"]))
    header = [
        "one decision changed, us (over as chosen)",
        *(f"{size_text(case['numel'])} {SHORT[case['dtype']]}" for case in cases),
    ]
    rows = [
        [
            step(name),
            *(_time(case["rows"].get(name), case["rows"].get(name, {}).get("vs_chosen")) for case in cases),
        ]
        for name in names
    ]
    return [header, *rows] if rows else []


TABLES = {"host": host, "sizes": sizes, "layers": layers, "gemm": gemm, "cold": cold, "ablation": ablation}


def summary(result: dict) -> str:
    """All tables that have rows, as text."""
    found = [make(result) for make in TABLES.values()]
    return "\n\n".join(text(table) for table in found if table)
