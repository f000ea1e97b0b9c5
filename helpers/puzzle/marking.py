"""Compute the puzzle's marking table, and print what was measured; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import os
import re
import statistics
import subprocess

import torch

from helpers.names import shown
from helpers.puzzle.layers import ON_GPU
from helpers.puzzle.protocol import NEEDS_GPU

# %% The score id="score" folded=true call="points = print_score(passed, ratios)"
import datetime

CRITERIA = (  # criterion, points if met, points if not, its cell or the least speedup
    ("One fused kernel", 3, 0, "single_kernel"),
    ("Penalty: speedup at most 1.00", 0, -3, 1.00),
    ("Speedup at least 1.05", 1, 0, 1.05),
    ("Speedup at least 1.10", 2, 0, 1.10),
    ("Speedup at least 1.15", 2, 0, 1.15),
    ("Works under torch.compile", 1, -1, "torch_compile"),
    ("Custom assembly works", 3, 0, "custom_asm"),
    ("Uses cache eviction", 1, 0, "cache_eviction"),
    ("Tested in fp16 and bf16", 1, -1, "exact"),
)


def speeds(ratios):
    """Return the median speedup over each Unsloth: 0 if the test failed, None if it was not timed."""
    if ratios is False:
        return {"today": 0.0, "classic": 0.0}
    speedups = {}
    for version in ("today", "classic"):
        values = (ratios or {}).get(f"unsloth_{version}")
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
    """Print the marking table from the verdicts and ratios above; return {version: points_of()}."""
    speedups = speeds(ratios)
    points = {version: points_of(passed, speedup) for version, speedup in speedups.items()}
    totals = [sum(filter(None, column.values())) for column in points.values()]
    where = torch.cuda.get_device_name() if ON_GPU else "this CPU (Triton's interpreter)"
    if not ON_GPU:
        print(f"Nothing but correctness was measured: speed and the other criteria need {NEEDS_GPU}.")
    print(f"{min(totals)} of 14 points on {where}, {datetime.date.today()}\n")
    line = "{:32}{:>18}{:>20}   {}".format
    print(line("Criterion", "vs Unsloth today", "vs Unsloth classic", "shown by"))
    for criterion, _, _, cell in CRITERIA:
        both = [column[criterion] for column in points.values()]
        texts = ["not measured" if x is None else f"{x:+d}" for x in both]
        print(line(criterion, *texts, cell if isinstance(cell, str) else "puzzles_line"))
    print(line("Sum", *totals, ""))
    print(line("Speedup", *map(shown, speedups.values()), "puzzles_line"))
    if passed.get("memory") is False:
        print("\nBreaks a rule: allocates a large buffer, or waits for the GPU (memory)")
    return points


# %% What was measured, as one line id="rows" folded=true call="print_rows(versions, points, ratios, seconds)"
import json
import pathlib


def environment_of(versions):
    """Return the GPU, its driver, the CPU, versions, and the time, as they stand beside results."""
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"
    drivers = subprocess.getoutput(query).split()
    cpu = re.search(r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "card": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "cpu": cpu and cpu[1],
        "driver": drivers[0] if drivers else None,
        "cuda": torch.version.cuda,
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "forced": os.environ.get("NF4_FORCE", "").strip().lower() or None,
    }


def rows_of(points, ratios, seconds):
    """Return [section, case, contender, unit, values] of all that was measured."""
    rows = [["protocol", "puzzle's line", name, "x", values] for name, values in (ratios or {}).items()]
    rows += [["protocol", "total", name, "s", values] for name, values in (seconds or {}).items()]
    for version, column in points.items():
        for criterion, value in column.items():
            rows.append(["score", criterion, version, "points", [] if value is None else [value]])
    return [row for row in rows if row[-1]]


def print_rows(versions, points, ratios, seconds):
    """Print what a GPU measured, one line of JSON for `python -m helpers draw`; nothing with NF4_QUICK."""
    if ON_GPU and not os.environ.get("NF4_QUICK"):
        content = {"environment": environment_of(versions), "rows": rows_of(points, ratios, seconds)}
        print(json.dumps(content, separators=(",", ":")))
