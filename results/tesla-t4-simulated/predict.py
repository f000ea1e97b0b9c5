"""Predict the puzzle's test on a Tesla T4 from inputs.json; docs/t4.md has the formula.

Prints the tables of that page and the scatter of placements; --store replaces the stored rows.
"""

import json
import sys
from itertools import product
from pathlib import Path

import pandas

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from helpers.names import LABELS  # noqa: E402
from helpers.results import pages, plots, store  # noqa: E402

INPUTS = json.loads((HERE / "inputs.json").read_text())
FACTS = {name: fact["value"] for name, fact in INPUTS["facts"].items()}
RUNS = pandas.DataFrame(INPUTS["runs"]).explode("steady_us").astype({"steady_us": float})
LINES = {1.0: 3, 1.05: 1, 1.10: 2, 1.15: 2}  # points for each speedup reached; everything else gives 6
UNSLOTH = ("unsloth_today", "unsloth_classic")
PLAIN = "rushilbhat's kernel"  # launched by kernel[grid]


def simulated(calibration, ratios=None):
    """Return the seconds of the test's kernels by contender: 3000 of each of three weights.

    ratios: the calibration whose ratios to a copy count at 16,777,216 elements; the same by default.
    """
    runs = RUNS[RUNS.mhz == 1590]
    us = runs.pivot_table("steady_us", ["calibration", "elements", "contender"], "dtype")
    us["bf16"] = us["bf16"].fillna(us["fp16"])  # rushilbhat's test was in fp16 alone
    small, large = us.xs((calibration, 4194304)), us.xs((ratios or calibration, 16777216))
    large = large / large.loc["copy_kernel"] * us.loc[calibration, 16777216, "copy_kernel"]
    return 3e-3 * (small["bf16"] + large["fp16"] + 3.5 * large["bf16"])  # the third has 58,720,256 elements


def median(rows, *fields):
    """Return the median of the one row that begins with these fields."""
    [row] = store.select(rows, *fields)
    return row.median


def launch_shares(card, measured, plain):
    """Yield launch overhead over kernel[grid]'s by contender, from the rows of a card.

    measured: (section, case, rounds of the puzzle's test in it, whose kernels are taken off). plain: who
    launches this kernel by kernel[grid].
    """
    rows, names = store.rows(card), {name: name for name in ("ours", *UNSLOTH)} | {PLAIN: plain}
    for section, case, rounds in measured:
        overhead = {}
        for who, name in names.items():
            overhead[who] = median(rows, section, case, name)
            for size in plots.SHAPES if rounds else ():
                kernel = median(rows, "gpu_time", size, "ours" if name == plain else name)
                overhead[who] -= 3e-6 * rounds * kernel
        yield pandas.Series(overhead) / overhead[PLAIN]


def combine(plain=1, calibrations=("burst", "turn"), bandwidths=None, ratios=None, unsloth=1, repeated=1):
    """Return the seconds of kernels and of launches by contender, a row for each combination.

    plain: rushilbhat's kernel over its simulation. bandwidths: of published kernels, GB/s. ratios: see
    simulated(). unsloth, repeated: what a newer Triton makes of Unsloth's kernel, and what repeating a launch
    makes of its launch overhead.
    """
    shares = [share for source in FACTS["stored_shares"] for share in launch_shares(**source)]
    kernels, launches = [], []
    for calibration, bandwidth in product(calibrations, bandwidths or FACTS["published_bandwidth"]):
        alone = simulated(calibration, ratios)
        factor = FACTS["copy_bandwidth"][calibration] / bandwidth
        published = alone[PLAIN] * factor * plain
        for slower, share in product({1, factor}, shares):
            kernels.append({**alone * slower, PLAIN: published})
            launches.append(share * (FACTS["plain"] - published))
    kernels, launches = pandas.DataFrame(kernels), pandas.DataFrame(launches)
    kernels["unsloth_today"] *= unsloth
    launches["unsloth_today"] *= repeated
    copy = simulated("burst")["copy_kernel"]  # classic was simulated with bursts alone
    kernels["unsloth_classic"] = FACTS["classic_kernels"] * kernels["copy_kernel"] / copy
    return kernels, launches


def points(speedups):
    """Return the score of each combination."""
    return 6 + sum(more * (speedups >= line) for line, more in LINES.items())


def t4_prediction():
    """Yield (case, contender, unit, lowest and highest value of all combinations)."""
    kernels, launches = combine()
    for who in launches:
        yield "kernels", who, "s", kernels[who].agg(["min", "max"])
        yield "calls", who, "s", launches[who].agg(["min", "max"])
        yield "total", who, "s", (kernels[who] + launches[who]).agg(["min", "max"])
    for calibration, name in (("burst", "bursts"), ("turn", "turnarounds")):
        over_copy = simulated(calibration) / simulated(calibration)["copy_kernel"]
        for who in ("ours", "unsloth_today", PLAIN):
            yield f"kernels over a copy, {name}", who, "x", [over_copy[who]]
    for who in UNSLOTH:
        speedups = (kernels[who] + launches[who]) / (kernels["ours"] + launches["ours"])
        yield "speedup, Triton 3.6", who, "x", speedups.agg(["min", "max"])
        yield "median speedup, Triton 3.6", who, "x", [speedups.median()]
        yield "points, Triton 3.6", who, "points", points(speedups).agg(["min", "max"])
        scores = points(speedups).value_counts(normalize=True)  # the most frequent first
        likely = scores[scores > 0.25].index
        yield "likely points, Triton 3.6", who, "points", likely[:1]
        if len(likely) > 1:
            yield "next likely points, Triton 3.6", who, "points", likely[1:2]


def claim():
    """Yield the lowest, the commonest or middle, and the highest value: a row of the claim."""
    kernels, launches = combine()
    totals = kernels + launches
    speedups = totals.div(totals["ours"], axis=0)
    scores = points(speedups["unsloth_today"])
    yield "score (of 14)", "ours", "points", [scores.min(), scores.mode()[0], scores.max()]
    for who in UNSLOTH:
        yield f"vs {LABELS[who]}", "ours", "x", speedups[who].agg(["min", "median", "max"])


def t4_sensitivity():
    """Yield speedups over Unsloth today and how many combinations give each score, for one change a case."""
    for case, entry in INPUTS["sensitivity"].items():
        change = entry.get("change", {})
        if patch := entry.get("patch"):  # of docs/for_unsloth.py, over an equal copy without one
            rows = store.select(store.rows("nvidia-h200"), "for_unsloth", "until return: W.t()")
            us = {row.contender: row.median for row in rows}
            if patch not in us:
                continue  # not measured yet
            change = {"repeated": us[patch] / us["again"]}
        total = sum(combine(**change))
        speedups = total["unsloth_today"] / total["ours"]
        yield case, "speedup", "x", speedups.agg(["min", "max"])
        for score in (6, 9, 10, 12, 14):
            yield case, f"{score} points", "combinations", [sum(points(speedups) == score)]


def published():
    """Yield what others measured."""
    for case, entry in INPUTS["published"].items():
        for row in entry["rows"]:
            yield case, *row


def rows(section):
    """Return the rows of a section."""
    return [store.Row(section.__name__, *key, tuple(map(float, values))) for *key, values in section()]


if __name__ == "__main__":
    for section in (published, t4_prediction, t4_sensitivity, claim):
        name, found = section.__name__, rows(section)
        print(pages.table(found, name), "\n")
        if sys.argv[1:] == ["--store"]:
            environment = INPUTS["environments"]["t4_prediction" if section is claim else name]
            store.write(name, found, environment=environment)
    kernel = RUNS.groupby(["elements", "calibration", "mhz", "contender", "dtype"])["steady_us"]
    scatter = (100 * kernel.std() / kernel.mean()).groupby(level=[0, 1, 2])
    print("Standard deviation over placements, %:", scatter.agg(["mean", "max"]).round(1), sep="\n")
