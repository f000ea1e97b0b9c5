"""Compute the puzzle's marking table, and print what was measured; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import os
import statistics

import pandas
import torch

from helpers.names import CRITERIA, LABELS, shown
from helpers.puzzle.layers import ON_GPU
from nf4_triton.core.supported import forced_card

# %% The score id="score" folded=true call="points = print_score(passed, ratios, times)"
import datetime


def points_of(passed, speedup):
    """Return {criterion: points} over one version of Unsloth, only for what was measured."""
    points = {}
    for criterion, met, unmet, cell, least in CRITERIA:
        holds = passed.get(cell) if least is None else speedup and speedup >= least
        if holds is not None:
            points[criterion] = met if holds else unmet
    return points


def print_score(passed, ratios, times):
    """Print the marking table; return {criterion: points} over Unsloth today, {} if a rule is broken."""
    where = f"{torch.cuda.get_device_name() if ON_GPU else 'this CPU'}, {datetime.date.today()}"
    rules = {"memory": passed.get("memory"), "puzzles_line": ratios, "time_all": times}
    if broken := [cell for cell, verdict in rules.items() if verdict is False]:
        print(f"No points on {where}: {' and '.join(broken)} failed")
        return {}
    speedups = {name: statistics.median(values) for name, values in (ratios or {}).items() if values}
    points = {name: points_of(passed, speedups.get(name)) for name in speedups or ["unsloth_today"]}
    table = pandas.DataFrame(points, [criterion for criterion, *_ in CRITERIA], dtype=object)
    print(f"{min(table.sum()):.0f} of 14 points on {where}\n")
    table.loc["Sum"] = table.sum()
    table.loc["Speedup"] = {name: shown(speedups.get(name)) for name in points}
    table["shown by"] = [*(cell for *_, cell, _ in CRITERIA), "", "puzzles_line"]
    print(table.rename(columns=LABELS).to_string(na_rep="not measured", float_format="{:.0f}".format))
    return points.get("unsloth_today", {})


# %% What was measured id="rows" folded=true call="print_rows(versions, points, ratios, times)"
import json
from IPython.display import HTML, display


def print_rows(versions, points, ratios, times):
    """Show what a GPU measured as JSON, folded, for `python -m helpers draw`; nothing with NF4_QUICK."""
    if points and ON_GPU and not os.environ.get("NF4_QUICK"):
        machine = {"card": torch.cuda.get_device_name(), "versions": versions}
        machine["forced"] = forced_card() or None
        machine["date"] = f"{datetime.datetime.now(datetime.timezone.utc):%FT%T%z}"
        found = {"environment": machine, "points": points, "ratios": ratios, "times": times.to_dict("list")}
        display(HTML(f"<details><summary>All values, as JSON</summary>{json.dumps(found)}</details>"))
