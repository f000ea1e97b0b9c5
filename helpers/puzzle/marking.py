"""Compute the puzzle's marking table from times and checks: its section is a cell of the notebook."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import json
import os
import pathlib
import re

from helpers.nf4.environment import describe
from helpers.puzzle.checks import Evidence
from helpers.puzzle.protocol import NEEDS_GPU, ON_GPU, Comparison, Entry

# %% The marking table, and the file that a run leaves id="marking" folded=true
import hashlib
import html
import textwrap

STAMP = {"kernel": {}, "cells": []}  # in the notebook: hashes of its kernel, and of the kernel's cells
MAXIMUM = 14
COLUMNS = {"today": "unsloth_today", "classic": "unsloth_classic"}
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


class Table(list):
    """Rows of texts, the first one the head; shown as an HTML table, or as aligned text."""

    note = ""

    def __repr__(self):
        width = [max(map(len, column)) for column in zip(*self, strict=True)]
        wrap = textwrap.TextWrapper(width=110, subsequent_indent=" " * (sum(width[:-1]) + 2 * len(width[1:])))
        rows = ["  ".join(text.ljust(n) for text, n in zip(row, width, strict=True)) for row in self]
        return "\n".join([*map(wrap.fill, [self.note] * bool(self.note)), *map(wrap.fill, rows)])

    def _repr_html_(self):
        head, *rows = ([html.escape(text) for text in row] for row in self)
        style = ' style="border: 1px solid #8888; padding: 3px 10px; text-align: left"'
        rows = ["".join(f"<{tag}{style}>{text}</{tag}>" for text in row) for tag, row in
                [("th", head), *(("th" if row[0] == "Sum" else "td", row) for row in rows)]]  # fmt: skip
        note = f"<p><b>{html.escape(self.note)}</b></p>" * bool(self.note)
        return f'{note}<table style="border-collapse: collapse"><tr>{"</tr><tr>".join(rows)}</tr></table>'


class Score(Table):
    """The marking table, the stricter column first."""

    totals: dict[str, int]  # by column
    points: dict[str, dict[str, int | None]]  # by criterion and column; None where nothing was measured


def speed(comparison, name, baseline):
    """Return (how many times as fast as a baseline, in words): 0 if wrong, None if one was not timed."""
    mine, theirs = comparison.entries[name], comparison.entries.get(baseline, Entry(baseline, "a comparison"))
    if mine.failure:
        return 0.0, f"no time: {mine.failure.splitlines()[0]}"
    if not mine.seconds or not theirs.seconds:
        return None, f"not measured (needs {mine.reason or theirs.reason or theirs.failure or NEEDS_GPU})"
    ratio = comparison.speedup(name, baseline)
    return ratio, f"{ratio:.3f}x"


def mark(comparison: Comparison, evidence: dict[str, Evidence]) -> Score:
    """Mark a comparison's first contender, with what `examine` found about it."""
    ours = next(iter(comparison.entries))
    speeds = {column: speed(comparison, ours, baseline) for column, baseline in COLUMNS.items()}
    points, measured = {}, {}
    for title, judge, won, lost in TABLE:
        if callable(judge):
            held = {c: None if ratio is None else judge(ratio) for c, (ratio, _) in speeds.items()}
            both = "; ".join(f"{column}: {text}" for column, (_, text) in speeds.items())
            measured[title] = both if len(set(speeds.values())) > 1 else speeds["today"][1]
        else:
            seen = evidence.get(judge) or Evidence(title, None, "not measured (needs this check)")
            held = dict.fromkeys(COLUMNS, seen.passed)
            texts = {True: "yes", False: f"NO: {seen.text}", None: seen.text.split(";")[0]}
            measured[title] = texts[seen.passed]
        points[title] = {c: {True: won, False: lost, None: None}[verdict] for c, verdict in held.items()}
    totals = {c: sum(line[c] or 0 for line in points.values()) for c in COLUMNS}
    totals = dict(sorted(totals.items(), key=lambda item: (item[1], speeds[item[0]][0] or 0)))

    score = Score([["Criterion", *(f"vs Unsloth {column}" for column in totals), "Measured"]])
    for title, line in points.items():
        shown = ("-" if line[c] is None else f"{line[c]:+d}" if line[c] else "0" for c in totals)
        score.append([title, *shown, measured[title]])
    score.append(["Sum", *(f"{total} of {MAXIMUM}" for total in totals.values()), ""])
    score.totals, score.points = totals, points

    facts = describe()
    where = facts["card"] if ON_GPU else "this CPU (Triton's interpreter)"
    where += ", with T4 settings forced" * (facts["forced"] == "t4")
    parts = [f"{min(totals.values())} of {MAXIMUM} points on {where}, {facts['date'][:10]}"]
    times = {
        c: f"{ratio:.2f}x" if ratio else "wrong" for c, (ratio, _) in speeds.items() if ratio is not None
    }
    against = ", ".join(f"Unsloth {c} {totals[c]} ({times[c]})" for c in totals if c in times)
    parts += [f"against {against}"] * bool(against)
    missing = sum(won for title, _, won, _ in TABLE if None in points[title].values())
    parts += [f"{missing} points not measured"] * bool(missing)
    judges = [judge for _, judge, _, _ in TABLE]
    failed = [one.criterion for name, one in evidence.items() if name not in judges and one.passed is False]
    failed += ["Official protocol"] * bool(comparison.entries[ours].failure)
    parts += [f"FAILED (worth no points): {', '.join(failed)}"] * bool(failed)
    score.note = "; ".join(parts) + "."
    return score


def forms_table(comparison: Comparison) -> Table:
    """Return the protocol by launch form: the same kernel, launched in three ways."""
    ours = next(iter(comparison.entries))
    table = Table([["Launch of the same kernel", "median s", "vs Unsloth today", "vs Unsloth classic"]])
    table.note = "The official protocol, with the same kernel launched in three ways"
    names = {"kernel[grid]": "kernel[grid], no checks", "compiled[grid]": "compiled[grid], no checks",
             ours: "direct launch, all checks (your_dequantize_nf4)"}  # fmt: skip
    for name, label in names.items():
        entry = comparison.entries.get(name)
        if entry and entry.seconds:
            ratios = (comparison.speedup(name, baseline) for baseline in COLUMNS.values())
            table.append([label, f"{entry.p50:.4f}", *(f"{x:.2f}x" if x else "-" for x in ratios)])
        else:
            needs = entry and (entry.failure.split("\n")[0] or entry.reason) or NEEDS_GPU
            table.append([label, f"not measured (needs {needs})", "", ""])
    return table


def rows_of(score: Score, comparison: Comparison) -> list:
    """Return [section, case, contender, unit, values] of all that was measured."""
    ours, rows = next(iter(comparison.entries)), []
    names = {ours: "ours", "kernel[grid]": "ordinary", "compiled[grid]": "compiled_grid"}
    for name, entry in comparison.entries.items():
        if entry.seconds and name not in comparison.forms:
            cases = {"total": entry.seconds} | entry.per_config
            rows += [["protocol", case, names.get(name, name), "s", values] for case, values in cases.items()]
    for name in (ours, *comparison.forms, *COLUMNS.values()):
        if comparison.forms and name in comparison.entries and comparison.entries[name].seconds:
            label = "direct" if name == ours else names.get(name, name)
            rows.append(["launch_forms", "total", label, "s", comparison.entries[name].seconds])
    for title, line in score.points.items():
        for column, value in line.items():
            rows += [["score", title, column, "points", [value]]] * (value is not None)
    ratios = {column: comparison.speedup(ours, baseline) for column, baseline in COLUMNS.items()}
    return rows + [["score", "total", column, "x", [ratio]] for column, ratio in ratios.items() if ratio]


def save_result(score: Score, comparison: Comparison) -> None:
    """Write a GPU run to nf4_<card>.json in $NF4_BUILD: environment, kernel, rows. Print its name."""
    if not ON_GPU:
        return
    facts = describe()
    ran = {hashlib.sha256(text.strip().encode()).hexdigest()[:8] for text in globals().get("In", ())}
    kernel = STAMP["kernel"] if ran.issuperset(STAMP["cells"]) else {}  # {} if a cell was edited
    card = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    path = pathlib.Path(os.environ.get("NF4_BUILD") or ".", f"nf4_{card}.json")
    content = {"environment": facts, "kernel": kernel, "rows": rows_of(score, comparison)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Kernel {'.'.join(kernel.values()) or '(edited)'}; results written to {path.name}.")
    if facts["capability"] == [7, 5]:
        print("Few T4 results are known: please send us this file.")
