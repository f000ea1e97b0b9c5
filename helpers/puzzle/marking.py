"""Compute the puzzle's marking table, and print what was measured; the sections are notebook cells."""

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


def points_of(passed, speedup):
    """Return {criterion: points} over one version of Unsloth; None where nothing was measured."""
    points = {}
    for criterion, won, lost, decides, _ in TABLE:
        holds = passed.get(decides)
        if isinstance(decides, float) and speedup is not None:
            holds = speedup > decides if decides == 1.00 else speedup >= decides
        points[criterion] = {True: won, False: lost, None: None}[holds]
    return points


def print_score(passed, ratios, facts):
    """Print the marking table from the verdicts and ratios above; return {version: points_of()}."""
    speedups = speeds(ratios)
    points = {version: points_of(passed, speedup) for version, speedup in speedups.items()}
    totals = [sum(filter(None, column.values())) for column in points.values()]
    where = facts["card"] or "this CPU (Triton's interpreter)"
    if not ON_GPU:
        print(f"Nothing but correctness was measured: speed and the other criteria need {NEEDS_GPU}.")
    print(f"{min(totals)} of {MAXIMUM} points on {where}, {facts['date'][:10]}\n")
    print(f"{'Criterion':32}{'vs Unsloth today':>18}{'vs Unsloth classic':>20}   shown by")
    for criterion, _, _, _, cell in TABLE:
        both = [column[criterion] for column in points.values()]
        texts = ["not measured" if x is None else f"{x:+d}" for x in both]
        print(f"{criterion:32}{texts[0]:>18}{texts[1]:>20}   {cell}")
    print(f"{'Sum':32}{totals[0]:>18}{totals[1]:>20}")
    texts = [shown(speedup) for speedup in speedups.values()]
    print(f"{'Speedup':32}{texts[0]:>18}{texts[1]:>20}   puzzles_line")
    if passed.get("memory") is False:
        print("\nBreaks a rule: allocates a large buffer, or waits for the GPU (memory)")
    return points


# %% What was measured, as one line id="rows" folded=true call="print_rows(facts, points, ratios, seconds)"
import json


def rows_of(points, ratios, seconds):
    """Return [section, case, contender, unit, values] of all that was measured."""
    rows = []
    for version, values in (ratios or {}).items():
        rows.append(["protocol", "puzzle's line", f"unsloth_{version}", "x", values])
    for name, values in seconds.items():
        rows.append(["protocol", "total", name, "s", values])
    for version, column in points.items():
        for criterion, value in column.items():
            rows.append(["score", criterion, version, "points", [] if value is None else [value]])
    return [row for row in rows if row[-1]]


def print_rows(facts, points, ratios, seconds):
    """Print what a GPU measured, one line of JSON for `python -m helpers draw`; nothing with NF4_QUICK."""
    if ON_GPU and not os.environ.get("NF4_QUICK"):
        content = {"environment": facts, "rows": rows_of(points, ratios, seconds)}
        print(json.dumps(content, separators=(",", ":")))
