"""The puzzle's marking table, computed from evidence: its sections are cells of the notebook."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re

import torch

from helpers.puzzle.checks import Evidence
from helpers.puzzle.protocol import NEEDS_GPU, ON_GPU, Comparison, Entry

# %% How the table looks, the machine, and the file that a run leaves id="marking-result" folded=true
import datetime
import pathlib
import platform
import subprocess
import sys
import textwrap

MAXIMUM = 14
COLUMNS = {"classic": "unsloth_classic", "today": "unsloth_today"}


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
        wrap = textwrap.TextWrapper(width=110, subsequent_indent=" " * 53).fill
        table = [wrap("{:30}{:>11}{:>10}  {}".format(*cells)) for cells in self.rows()]
        also = [wrap(f"{name}: {text}") for name, text in self.also.items()]
        return "\n".join([self.headline, "", *table, "", "Also checked (no points):", *also])


def machine() -> dict:
    """What the run ran on, as every result file has it."""
    packages = ("torch", "triton", "bitsandbytes", "unsloth", "peft", "transformers")
    versions = dict.fromkeys(packages)
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = ON_GPU and subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name() if ON_GPU else None,
        "capability": torch.cuda.get_device_capability() if ON_GPU else None,
        "driver": driver or None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "colab": "google.colab" in sys.modules,
        "kaggle": "KAGGLE_KERNEL_RUN_TYPE" in os.environ,
        "interpreter": not ON_GPU,
        "forced": os.environ.get("NF4_FORCE") or None,
    }


def summary(lines, totals, speeds, failed):
    """The headline: points and speedups, the stricter column first, and what is missing."""
    facts = machine()
    where = facts["gpu"] or "this CPU (Triton's interpreter)"
    where += ", T4's decisions forced" * (facts["forced"] == "t4") + f", {facts['date'][:10]}"
    text = f"{min(totals.values())} of {MAXIMUM} points on {where}"
    columns = sorted((totals[c], x, c) for c, (x, _) in speeds.items() if x is not None)
    against = [f"Unsloth {c} {sum_} ({f'{x:.2f}x' if x else 'wrong'})" for sum_, x, c in columns]
    text += f"; against {', '.join(against)}" * bool(against)
    missing = sum(line.best for line in lines if None in line.points.values())
    text += f"; {missing} points not measured" * bool(missing)
    return text + f"; FAILED without points: {', '.join(failed)}" * bool(failed) + "."


def keep_result(score, comparison: Comparison, folder=".", **stamp) -> pathlib.Path:
    """Write environment, score, protocol and `stamp` to nf4_<card>.json, and say so."""
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
TABLE = (  # line, what decides (a check, or the speedup), points where it holds and where not
    ("One fused kernel", "single_kernel", 3, 0),
    ("Penalty: speedup at most 1.00", lambda ratio: ratio > 1.00, 0, -3),
    ("Speedup at least 1.05", lambda ratio: ratio >= 1.05, 1, 0),
    ("Speedup at least 1.10", lambda ratio: ratio >= 1.10, 2, 0),
    ("Speedup at least 1.15", lambda ratio: ratio >= 1.15, 2, 0),
    ("Works under torch.compile", "torch_compile", 1, -1),
    ("Custom assembly works", "custom_asm", 3, 0),
    ("Uses cache eviction", "cache_eviction", 1, 0),
    ("Tested in fp16 and bf16", "exact", 1, -1),
)


def speed(comparison, name, baseline):
    """(how many times as fast as a baseline, in words): 0 if wrong, None if one was not timed."""
    absent = Entry(baseline, reason="not compared")
    mine, theirs = comparison.entries[name], comparison.entries.get(baseline, absent)
    if mine.failure:
        return 0.0, f"no time: {mine.failure.splitlines()[0]}"
    if not mine.seconds or not theirs.seconds:
        missing = f"a time of {baseline}: {theirs.reason or theirs.failure}"
        return None, f"not measured (needs {missing if mine.seconds else NEEDS_GPU})"
    ratio = comparison.speedup(name, baseline)
    return ratio, f"{ratio:.3f}x, {mine.p50:.4f} s instead of {theirs.p50:.4f} s"


def mark(comparison: Comparison, evidence: dict[str, Evidence]) -> Score:
    """The table for a comparison's first contender and what `examine` says of it."""
    name, entry = next(iter(comparison.entries.items()))
    speeds = {column: speed(comparison, name, baseline) for column, baseline in COLUMNS.items()}
    lines = []
    for title, judge, won, lost in TABLE:
        if callable(judge):
            held = {c: None if ratio is None else judge(ratio) for c, (ratio, _) in speeds.items()}
            short = [words if lost else words.split(",")[0] for _, words in speeds.values()]
            text = "; ".join(f"{c}: {words}" for c, words in zip(COLUMNS, short, strict=True))
        else:
            seen = evidence.get(judge) or Evidence(title, None, needs="this check")
            held, text = dict.fromkeys(COLUMNS, seen.passed), str(seen)
        points = {c: {True: won, False: lost, None: None}[verdict] for c, verdict in held.items()}
        lines.append(Line(title, points, won, text))
    official = entry.failure or f"right against {comparison.checked_against}, and to the bit while timed"
    evidence = {"official": Evidence("official protocol", not entry.failure, official)} | evidence
    judges = [judge for _, judge, _, _ in TABLE]
    also = [seen for check, seen in evidence.items() if check not in judges]
    totals = {column: sum(line.points[column] or 0 for line in lines) for column in COLUMNS}
    failed = [seen.criterion for seen in also if seen.passed is False]
    verdicts = {True: "yes; ", False: "NO; ", None: ""}
    also = {seen.criterion: f"{verdicts[seen.passed]}{seen}" for seen in also}
    return Score(summary(lines, totals, speeds, failed), totals, lines, also, evidence)
