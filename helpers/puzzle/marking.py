"""Compute the puzzle's marking table, and print what was measured; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import os
import pathlib
import re
import statistics

import torch

from helpers.names import CRITERIA, shown
from helpers.puzzle.layers import ON_GPU

# %% The score id="score" folded=true call="points = print_score(passed, ratios)"
import datetime


def speeds(ratios):
    """Return the median speedup over each Unsloth: 0 if the test failed, None if it was not timed."""
    speedups = {}
    for version in ("today", "classic"):
        values = [0.0] if ratios is False else (ratios or {}).get(f"unsloth_{version}")
        speedups[version] = statistics.median(values) if values else None
    return speedups


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
    speedups = speeds(ratios)
    points = {version: points_of(passed, speedup) for version, speedup in speedups.items()}
    totals = [sum(filter(None, column.values())) for column in points.values()]
    score, rule_is_broken = f"{min(totals)} of 14 points", passed.get("memory") is False
    if rule_is_broken:
        score = "No points, for a broken rule (memory): it takes or keeps more than its result, or waits,"
    where = torch.cuda.get_device_name() if ON_GPU else "this CPU (Triton's interpreter)"
    print(f"{score} on {where}, {datetime.date.today()}\n")
    line = "{:32}{:>18}{:>20}   {}".format
    print(line("Criterion", "vs Unsloth today", "vs Unsloth classic", "shown by"))
    for criterion, _, _, cell in CRITERIA:
        both = [column[criterion] for column in points.values()]
        texts = ["not measured" if x is None else f"{x:+d}" for x in both]
        print(line(criterion, *texts, cell if isinstance(cell, str) else "puzzles_line"))
    if not rule_is_broken:
        print(line("Sum", *totals, ""))
    print(line("Speedup", *map(shown, speedups.values()), "puzzles_line"))
    return {} if rule_is_broken else points["today"]


# %% What was measured id="rows" folded=true call="print_rows(versions, points, ratios or {}, times or {})"
import json
from IPython.display import HTML, display


def machine(versions):
    """Return the GPU, the CPU, versions, and the time, as they stand beside results."""
    gpu = {"card": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    cpu = re.search("model name.*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    forced = os.environ.get("NF4_FORCE", "").strip().lower() or None
    date = f"{datetime.datetime.now(datetime.timezone.utc):%FT%T%z}"
    return gpu | {"cpu": cpu and cpu[1], "versions": versions, "date": date, "forced": forced}


def print_rows(versions, points, ratios, times):
    """Show what a GPU measured as JSON, folded, for `python -m helpers draw`; nothing with NF4_QUICK."""
    rows = [["protocol", "puzzle's line", name, "x", values] for name, values in ratios.items() if values]
    for name, turns in times.items():  # until return: of the smallest weight, 4096x1024 in bf16
        rows.append(["protocol", "until return", name, "us", [turn[1][0] for turn in turns]])
        rows.append(["protocol", "100 rounds", name, "s", [sum(s for *_, s in turn) for turn in turns]])
    rows += [["score", name, "today", "points", [won]] for name, won in points.items() if won is not None]
    if ON_GPU and not os.environ.get("NF4_QUICK"):
        text = json.dumps({"environment": machine(versions), "rows": rows})
        display(HTML(f"<details><summary>All values, for python -m helpers draw</summary>{text}</details>"))
