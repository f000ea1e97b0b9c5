"""Compute the puzzle's marking table, and print what was measured; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import os
import statistics

import torch

from helpers.names import CRITERIA, shown
from helpers.puzzle.layers import ON_GPU
from nf4_triton.core.supported import forced_card

# %% The score id="score" folded=true call="points = print_score(passed, ratios)"
import datetime


def points_of(passed, speedup):
    """Return {criterion: points} over one version of Unsloth; None where nothing was measured."""
    points = {}
    for criterion, won, lost, decides in CRITERIA:
        holds = passed.get(decides)
        if isinstance(decides, float) and speedup is not None:
            holds = speedup > decides if decides == 1.00 else speedup >= decides
        points[criterion] = {True: won, False: lost, None: None}[holds]
    return points


def print_score(passed, ratios):
    """Print the marking table; return {criterion: points} over Unsloth today, {} if a rule is broken."""
    where = torch.cuda.get_device_name() if ON_GPU else "this CPU (Triton's interpreter)"
    if passed.get("memory") is False or ratios is False:
        print(f"No points on {where}, {datetime.date.today()}: the puzzle's test or its memory rule failed")
        return {}
    ratios = ratios or {"unsloth_today": [], "unsloth_classic": []}
    speedups = [statistics.median(values) if values else None for values in ratios.values()]
    points = [points_of(passed, speedup) for speedup in speedups]
    totals = [sum(filter(None, column.values())) for column in points]
    measured = [total for total, speedup in zip(totals, speedups, strict=True) if speedup is not None]
    print(f"{min(measured or totals)} of 14 points on {where}, {datetime.date.today()}\n")
    line = "{:32}{:>18}{:>20}   {}".format
    print(line("Criterion", "vs Unsloth today", "vs Unsloth classic", "shown by"))
    for criterion, _, _, cell in CRITERIA:
        texts = ["not measured" if one[criterion] is None else f"{one[criterion]:+d}" for one in points]
        print(line(criterion, *texts, cell if isinstance(cell, str) else "puzzles_line"))
    print(line("Sum", *totals, ""))
    print(line("Speedup", *map(shown, speedups), "puzzles_line"))
    return points[0]


# %% What was measured id="rows" folded=true call="print_rows(versions, points, ratios, times)"
import json
from IPython.display import HTML, display


def print_rows(versions, points, ratios, times):
    """Show what a GPU measured as JSON, folded, for `python -m helpers draw`; nothing with NF4_QUICK."""
    if not ON_GPU or os.environ.get("NF4_QUICK"):
        return
    machine = {"card": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    machine |= {"versions": versions, "forced": forced_card() or None}
    machine["date"] = f"{datetime.datetime.now(datetime.timezone.utc):%FT%T%z}"
    text = json.dumps({"environment": machine, "points": points, "ratios": ratios, "times": times})
    display(HTML(f"<details><summary>All values, for python -m helpers draw</summary>{text}</details>"))
