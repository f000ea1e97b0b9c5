"""Compute the puzzle's marking table, and write the result file; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import os
import statistics

from helpers.puzzle.layers import ON_GPU
from helpers.puzzle.protocol import NEEDS_GPU, shown

# %% The score id="score" folded=true call="points = print_score(passed, ratios, facts)"
MAXIMUM = 14
TABLE = (  # criterion, points if met, points if not, verdict or least speedup, cell
    ("One fused kernel", 3, 0, "one kernel", "single_kernel"),
    ("Penalty: speedup at most 1.00", 0, -3, 1.00, "puzzles_line"),
    ("Speedup at least 1.05", 1, 0, 1.05, "puzzles_line"),
    ("Speedup at least 1.10", 2, 0, 1.10, "puzzles_line"),
    ("Speedup at least 1.15", 2, 0, 1.15, "puzzles_line"),
    ("Works under torch.compile", 1, -1, "compile", "torch_compile"),
    ("Custom assembly works", 3, 0, "assembly", "custom_asm"),
    ("Uses cache eviction", 1, 0, "eviction", "cache_eviction"),
    ("Tested in fp16 and bf16", 1, -1, "bits", "exact"),
)


def speeds(ratios):
    """Return the median speedup over each Unsloth: 0 if the test failed, None if it was not timed."""
    if ratios is False:
        return {"today": 0.0, "classic": 0.0}
    ratios = ratios or {"today": [], "classic": []}
    return {version: statistics.median(values) if values else None for version, values in ratios.items()}


def points_of(passed, speedups):
    """Return {criterion: {"today": points, "classic": points}}; None where nothing was measured."""
    points = {}
    for criterion, won, lost, decides, _ in TABLE:
        points[criterion] = {}
        for column, speedup in speedups.items():
            holds = passed.get(decides)
            if isinstance(decides, float) and speedup is not None:
                holds = speedup > decides if decides == 1.00 else speedup >= decides
            points[criterion][column] = {True: won, False: lost, None: None}[holds]
    return points


def print_score(passed, ratios, facts):
    """Print the marking table from the verdicts and ratios above; return the points."""
    speedups = speeds(ratios)
    points = points_of(passed, speedups)
    totals = [sum(line[column] or 0 for line in points.values()) for column in speedups]
    where = facts["card"] or "this CPU (Triton's interpreter)"
    print(f"{min(totals)} of {MAXIMUM} points on {where}, {facts['date'][:10]}\n")
    print(f"{'Criterion':32}{'vs Unsloth today':>18}{'vs Unsloth classic':>20}   shown by")
    for criterion, _, _, _, cell in TABLE:
        texts = ["not measured" if x is None else f"{x:+d}" for x in points[criterion].values()]
        print(f"{criterion:32}{texts[0]:>18}{texts[1]:>20}   {cell}")
    print(f"{'Sum':32}{totals[0]:>18}{totals[1]:>20}")
    texts = [shown(speedup) for speedup in speedups.values()]
    print(f"{'Speedup':32}{texts[0]:>18}{texts[1]:>20}   puzzles_line")
    if passed.get("memory") is False:
        print("\nBreaks a rule: allocates a large buffer, or waits for the GPU (memory)")
    return points


# %% Result file id="result" folded=true call="write_result(facts, points, ratios, seconds, hashes_of(In))"
import json
import pathlib
import re


def rows_of(points, ratios, seconds):
    """Return [section, case, contender, unit, values] of all that was measured."""
    lines = ratios or {}
    rows = [
        ["protocol", "puzzle's line", f"unsloth_{x}", "x", values] for x, values in lines.items() if values
    ]
    rows += [["protocol", "total", name, "s", values] for name, values in seconds.items()]
    for criterion, line in points.items():
        for column, value in line.items():
            if value is not None:
                rows.append(["score", criterion, column, "points", [value]])
    return rows


def write_result(facts, points, ratios, seconds, kernel):
    """Write what a GPU measured to nf4_<card>.json, in $NF4_BUILD if that is set. kernel: its hashes."""
    if not ON_GPU:
        print(f"not measured (needs {NEEDS_GPU})")
        return
    if os.environ.get("NF4_QUICK"):
        print("no result file (needs 1000 rounds: run without NF4_QUICK)")
        return
    name = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    path = pathlib.Path(os.environ.get("NF4_BUILD") or ".", f"nf4_{name}.json")
    content = {"environment": facts, "kernel": kernel, "rows": rows_of(points, ratios, seconds)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Results are in {path.name}.")
    if facts["capability"] == [7, 5]:
        print("No T4 result is stored yet: please send this file to the author of the notebook.")
