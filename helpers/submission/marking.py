"""The puzzle's marking table, computed from evidence: its sections are cells of the notebook."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import dataclasses
import importlib.metadata
import json
import os
import re

import torch

from helpers.submission.evidence import Evidence
from helpers.submission.protocol import NEEDS_GPU, ON_GPU, Comparison

# %% The machine, and the file that a run leaves id="marking-result" folded=true
import datetime
import pathlib
import platform
import subprocess
import sys


def machine() -> dict:
    """What the run ran on, as every result file has it."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "bitsandbytes", "unsloth", "peft", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = ON_GPU and subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name() if ON_GPU else None,
        "capability": torch.cuda.get_device_capability() if ON_GPU else None,
        "driver": driver or None,
        "cuda": torch.version.cuda,
        **versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "colab": "google.colab" in sys.modules,
        "kaggle": "KAGGLE_KERNEL_RUN_TYPE" in os.environ,
        "interpreter": not ON_GPU,
        "forced": os.environ.get("NF4_FORCE") or None,
    }


def keep_result(score, comparison: Comparison, folder=".", **stamp) -> pathlib.Path:
    """Write {"environment", "data": {"score", "protocol"}} and `stamp` to nf4_<card>.json, and say so."""
    facts = machine()
    card = re.sub(r"[^a-z0-9]+", "-", (facts["gpu"] or "cpu-interpreter").lower()).strip("-")
    data = {"score": dataclasses.asdict(score), "protocol": dataclasses.asdict(comparison)}
    path = pathlib.Path(folder, f"nf4_{card}.json")
    path.write_text(json.dumps({"environment": facts, **stamp, "data": data}, indent=1) + "\n")
    print(f"written: {path}")
    if facts["gpu"] and facts["capability"] == (7, 5):
        print("Figures of a T4 are rare: please attach this file to an issue of the repository.")
    return path


# %% id="marking"
import textwrap

MAXIMUM = 14
COLUMNS = {"classic": "unsloth_classic", "today": "unsloth_today"}
CRITERIA = {  # check: (line of the table, points if it passed, points if it failed)
    "single_kernel": ("One fused kernel", 3, 0),
    "torch_compile": ("Works under torch.compile", 1, -1),
    "custom_asm": ("Custom assembly works", 3, 0),
    "cache_eviction": ("Uses cache eviction", 1, 0),
    "exact": ("Tested in fp16 and bf16", 1, -1),
}
TIERS = {  # line of the table: (which speedups earn it, points)
    "Penalty: speedup at most 1.00": (lambda ratio: ratio <= 1.00, -3),
    "Speedup at least 1.05": (lambda ratio: ratio >= 1.05, 1),
    "Speedup at least 1.10": (lambda ratio: ratio >= 1.10, 2),
    "Speedup at least 1.15": (lambda ratio: ratio >= 1.15, 2),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table; points by column, None where nothing was measured."""

    name: str
    points: dict[str, int | None]
    best: int
    evidence: str


@dataclasses.dataclass(frozen=True)
class Score:
    """The table with its sums by column; the headline gives the stricter column first."""

    headline: str
    totals: dict[str, int]
    lines: list[Line]
    also: dict[str, str]  # checked without points
    evidence: dict[str, Evidence]
    maximum: int = MAXIMUM

    def rows(self):
        """Cells of the table: the head, a row a line, the sums."""
        yield ["Criterion", *(f"vs {column}" for column in COLUMNS), "Evidence"]
        for line in self.lines:
            points = ("-" if p is None else f"{p:+d}" if p else "0" for p in line.points.values())
            yield [line.name, *points, line.evidence]
        yield ["Sum", *(f"{self.totals[column]} of {MAXIMUM}" for column in COLUMNS), ""]

    def __repr__(self):
        left = "{:30}{:>11}{:>10}  "
        wrap = textwrap.TextWrapper(width=110, subsequent_indent=" " * 53)
        table = [wrap.fill(left.format(*cells) + text) for *cells, text in self.rows()]
        also = [f"{name}: {text}" for name, text in self.also.items()]
        return "\n".join([self.headline, "", *table, "", "Also checked (no points):", *map(wrap.fill, also)])


def speed(comparison, name, baseline) -> Evidence:
    """How many times as fast as a baseline: details["ratio"], 0 for a candidate that is wrong."""
    mine, theirs = comparison.entries[name], comparison.entries.get(baseline)
    what = f"speed against {baseline}"
    if mine.failure:
        return Evidence(what, False, f"no time: {mine.failure.splitlines()[0]}", details={"ratio": 0.0})
    if not mine.seconds:
        return Evidence(what, None, needs=NEEDS_GPU)
    if theirs is None or not theirs.seconds:
        missing = theirs and (theirs.reason or theirs.failure) or "not compared"
        return Evidence(what, None, needs=f"a time of {baseline}: {missing}")
    ratio = comparison.speedup(name, baseline)
    text = f"{ratio:.3f}x, {mine.p50:.4f} s instead of {theirs.p50:.4f} s"
    return Evidence(what, ratio > 1, text, details={"ratio": ratio})


def mark(comparison: Comparison, evidence: dict[str, Evidence]) -> Score:
    """The table for a comparison's first contender and what `examine` says of it."""
    name, entry = next(iter(comparison.entries.items()))
    speeds = {column: speed(comparison, name, baseline) for column, baseline in COLUMNS.items()}
    lines = []
    for key, (title, passed, failed) in CRITERIA.items():
        seen = evidence.get(key) or Evidence(title, None, needs="this check")
        points = {True: passed, False: failed, None: None}[seen.passed]
        lines.append(Line(title, dict.fromkeys(COLUMNS, points), passed, str(seen)))
    for place, (title, (earned, points)) in enumerate(TIERS.items(), 1):
        ratios = {column: seen.details.get("ratio") for column, seen in speeds.items()}
        won = {c: None if ratio is None else earned(ratio) * points for c, ratio in ratios.items()}
        texts = (f"{c}: {seen if place == 1 else str(seen).split(',')[0]}" for c, seen in speeds.items())
        lines.insert(place, Line(title, won, max(points, 0), "; ".join(texts)))
    official = entry.failure or f"right against {comparison.checked_against}, and to the bit while timed"
    evidence = {"official": Evidence("official protocol", not entry.failure, official)} | evidence
    also = [seen for key, seen in evidence.items() if key not in CRITERIA]
    totals = {column: sum(line.points[column] or 0 for line in lines) for column in COLUMNS}
    headline = summary(lines, totals, ratios, [seen.criterion for seen in also if seen.passed is False])
    verdict = {True: "yes; ", False: "NO; ", None: ""}
    also = {seen.criterion: f"{verdict[seen.passed]}{seen}" for seen in also}
    evidence |= {f"speed_{column}": seen for column, seen in speeds.items()}
    return Score(headline, totals, lines, also, evidence)


def summary(lines, totals, ratios, failed):
    """The headline: points and speedups, the stricter column first, and what is missing."""
    facts = machine()
    where = facts["gpu"] or "this CPU (Triton's interpreter)"
    where += ", T4's decisions forced" * (facts["forced"] == "t4") + f", {facts['date'][:10]}"
    columns = sorted((totals[c], ratio, c) for c, ratio in ratios.items() if ratio is not None)
    texts = [
        f"Unsloth {c} {points} ({f'{ratio:.2f}x' if ratio else 'wrong'})" for points, ratio, c in columns
    ]
    text = f"{min(totals.values())} of {MAXIMUM} points on {where}"
    text += f"; against {', '.join(texts)}" * bool(texts)
    missing = sum(line.best for line in lines if None in line.points.values())
    text += f"; {missing} points not measured" * bool(missing)
    return text + f"; FAILED without points: {', '.join(failed)}" * bool(failed) + "."
