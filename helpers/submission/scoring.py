"""The marking table, computed line by line from evidence: `python -m helpers score`.

Two columns, because the baseline moved: Unsloth's classic path is what the puzzle was set against, today's
fused one is what an installed Unsloth runs. A line without evidence here says what it needs and adds nothing.
"""

import argparse
import html
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from helpers.machine import environment
from helpers.submission import checks, harness
from helpers.submission.checks import Evidence

COLUMNS = {"classic": "unsloth_classic", "today": "unsloth_today"}
HEADS = {"classic": "vs classic", "today": "vs today"}
MAXIMUM = 14
CANDIDATE = "your_dequantize_nf4"
WIDTH = 110
# key of the evidence, its name in the table, points if it passed, points if it failed
CRITERIA = (
    ("single_kernel", "One fused kernel", 3, 0),
    ("torch_compile", "Works under torch.compile", 1, -1),
    ("custom_asm", "Custom assembly works", 3, 0),
    ("cache_eviction", "Uses cache eviction", 1, 0),
    ("dtypes", "Tested in fp16 and bf16", 1, -1),
)
# name, whether a ratio earns it, points
TIERS = (
    ("Penalty: speedup at most 1.00", lambda ratio: ratio <= 1.00, -3),
    ("Speedup at least 1.05", lambda ratio: ratio >= 1.05, 1),
    ("Speedup at least 1.10", lambda ratio: ratio >= 1.10, 2),
    ("Speedup at least 1.15", lambda ratio: ratio >= 1.15, 2),
)
ALSO = "Also checked (no points):"
WITHOUT_POINTS = ("official_checks", "exact", "no_sync", "no_large_buffers", "fresh_output")


@dataclass(frozen=True)
class Line:
    """One line of the table; points by column, None where nothing was measured."""

    name: str
    points: dict[str, int | None]
    best: int
    evidence: str

    def shown(self, column: str) -> str:
        points = self.points[column]
        return "-" if points is None else f"{points:+d}" if points else "0"


@dataclass(frozen=True)
class Score:
    """The computed table. `totals`: points by column; `headline`: the stricter column in a sentence."""

    lines: list[Line]
    totals: dict[str, int]
    headline: str
    where: str
    also: list[tuple[str, str]] = field(default_factory=list)  # (name, verdict and evidence) without points
    evidence: dict[str, Evidence] = field(default_factory=dict)

    def to_dict(self) -> dict:
        """JSON types: the table, and the evidence with its details."""
        return {
            "headline": self.headline,
            "totals": self.totals,
            "maximum": MAXIMUM,
            "lines": [vars(line) for line in self.lines],
            "also": dict(self.also),
            "evidence": {name: found.to_dict() for name, found in self.evidence.items()},
        }

    def rows(self) -> list[list[str]]:
        """Cells of the table without its head: name, one cell a column, evidence; the totals last."""
        rows = [[line.name, *(line.shown(c) for c in COLUMNS), line.evidence] for line in self.lines]
        return [*rows, ["Sum", *(f"{self.totals[c]} of {MAXIMUM}" for c in COLUMNS), self.where]]

    def to_text(self) -> str:
        """The table in at most 110 columns."""
        head = ["Criterion", *HEADS.values(), "Evidence"]
        widths = [max(len(row[i]) for row in [head, *self.rows()]) for i in range(3)]
        left = "  ".join(f"{{:{'<' if i == 0 else '>'}{width}}}" for i, width in enumerate(widths)) + "  "
        indent = len(left.format("", "", ""))
        out = [self.headline, ""]
        for row in [head, *self.rows()]:
            first, *more = textwrap.wrap(row[3], WIDTH - indent) or [""]
            out += [left.format(*row[:3]) + first, *(" " * indent + text for text in more)]
        if self.also:
            out += ["", ALSO]
            for name, text in self.also:
                out += textwrap.wrap(f"{name}: {text}", WIDTH, subsequent_indent="    ")
        return "\n".join(line.rstrip() for line in out)

    def to_markdown(self) -> str:
        cells = [["Criterion", *HEADS.values(), "Evidence"], ["---", "---:", "---:", "---"], *self.rows()]
        table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
        also = [f"- {name}: {text}" for name, text in self.also]
        return "\n".join([f"**{self.headline}**", "", *table, *(["", ALSO, "", *also] if also else [])])

    def to_html(self) -> str:
        """A table without colours of its own: legible on light and dark pages."""
        cell = 'style="padding:4px 10px;border-bottom:1px solid rgba(128,128,128,.4);text-align:{}"'
        first, middle = cell.format("left;white-space:nowrap"), cell.format("right;white-space:nowrap")
        last = cell.format("left")

        def row(cells, tag="td"):
            name, *points, evidence = (html.escape(text) for text in cells)
            shown = "".join(f"<{tag} {middle}><b>{text}</b></{tag}>" for text in points)
            return f"<tr><{tag} {first}>{name}</{tag}>{shown}<{tag} {last}>{evidence}</{tag}></tr>"

        head = row(["Criterion", *HEADS.values(), "Evidence"], "th")
        body = "".join(map(row, self.rows()))
        also = "".join(f"<li>{html.escape(name)}: {html.escape(text)}</li>" for name, text in self.also)
        return (
            f'<div style="color:inherit"><p><b>{html.escape(self.headline)}</b></p>'
            f'<table style="border-collapse:collapse;color:inherit">{head}{body}</table>'
            + (f"<p>{ALSO}</p><ul>{also}</ul>" if also else "")
            + "</div>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return self.to_text()


def table(evidence: dict[str, Evidence], where: str = "") -> Score:
    """The marking table from evidence by key: CRITERIA, WITHOUT_POINTS, "speed_classic", "speed_today"."""
    speeds = {column: evidence.get(f"speed_{column}", _absent()) for column in COLUMNS}
    lines = [_line(evidence, *CRITERIA[0])]
    lines += [
        Line(
            name,
            {column: _tier(found, earned, points) for column, found in speeds.items()},
            max(points, 0),
            _both(speeds, in_full=earned is TIERS[0][1]),
        )
        for name, earned, points in TIERS
    ]
    lines += [_line(evidence, *criterion) for criterion in CRITERIA[1:]]
    totals = {column: sum(line.points[column] or 0 for line in lines) for column in COLUMNS}
    also = [
        (found.criterion, {True: "yes; ", False: "NO; ", None: ""}[found.passed] + _said(found))
        for found in (evidence[key] for key in WITHOUT_POINTS if key in evidence)
    ]
    headline = _headline(lines, totals, speeds, where) + _failures(evidence)
    return Score(lines, totals, f"{headline}.", where, also, evidence)


def _line(evidence, key, name, passed, failed):
    found = evidence.get(key, _absent())
    points = {True: passed, False: failed, None: None}[found.passed]
    return Line(name, dict.fromkeys(COLUMNS, points), passed, _said(found))


def _tier(found, earned, points):
    """Points of one speed line; a candidate that fails the official checks is faster than nothing."""
    if found.passed is None:
        return None
    return points if earned(found.details.get("ratio", 0.0)) else 0


def _both(speeds, in_full):
    """The speed evidence of both columns in words; only one line of the table gives it in full."""
    texts = {}
    for column, found in speeds.items():
        ratio = found.details.get("ratio")
        text = f"{ratio:.3f}x" if ratio is not None and not in_full else _said(found)
        texts.setdefault(text, []).append(column)
    return "; ".join(f"{' and '.join(columns)}: {text}" for text, columns in texts.items())


def _absent():
    return Evidence("", None, needs="evidence: this check was not run")


def _said(found):
    """The evidence in words; without a verdict what it needs comes first."""
    if found.passed is not None:
        return found.text
    return f"not measured (needs {found.needs})" + (f"; {found.text}" if found.text else "")


def _failures(evidence):
    """What failed without costing a point, for the headline: "; FAILED: exact", or nothing."""
    done = (evidence[key] for key in WITHOUT_POINTS if key in evidence)
    names = ", ".join(found.criterion for found in done if found.passed is False)
    return f"; FAILED: {names}" if names else ""


def _headline(lines, totals, speeds, where):
    place = f" on {where}" if where else ""
    measured = {column: found for column, found in speeds.items() if found.passed is not None}
    if not measured:
        best = sum(line.best for line in lines if line.points["today"] is not None)
        return f"{totals['today']} of {MAXIMUM} points; {best} can be measured{place or ' here'}"
    strict = min(measured, key=lambda column: (totals[column], measured[column].details.get("ratio", 0.0)))
    labels = {"classic": "Unsloth classic", "today": "Unsloth today"}
    ratio = measured[strict].details.get("ratio")
    text = f"{totals[strict]} of {MAXIMUM} points{place}, against {labels[strict]}"
    text += f" ({ratio:.2f}x)" if ratio else f" ({measured[strict].text})"
    for column in COLUMNS:
        if column != strict:
            other = measured.get(column)
            other_ratio = other.details.get("ratio") if other else None
            text += f"; {labels[column]}: " + (
                f"{totals[column]} ({other_ratio:.2f}x)" if other_ratio else "speed not measured"
            )
    open_points = sum(line.best for line in lines if None in line.points.values())
    return text + (f"; {open_points} points not measured in full" if open_points else "")


def collect(
    candidate: Callable,
    comparison: harness.Comparison | None = None,
    name: str = CANDIDATE,
    quick: bool = False,
    tick: Callable[[str], object] = lambda what: None,
    evidence: dict[str, Evidence] | None = None,
) -> dict[str, Evidence]:
    """All evidence that this machine can give about `candidate`, by key.

    comparison: an official comparison that holds `candidate` under `name`; made here if there is none
    (`quick`: 3 repeats of 200 rounds instead of 5 of 1000). `tick` is told what runs next. evidence: checks
    already done, by key; they are not run again.
    """
    found = dict(evidence or {})
    timed = {f"speed_{column}": baseline for column, baseline in COLUMNS.items()}
    if comparison is None and not found.keys() >= {*timed, "official_checks"}:
        tick("official protocol")
        rounds, repeats = (200, 3) if quick else (1000, 5)
        comparison = harness.compare({name: candidate}, rounds=rounds, repeats=repeats)
    for key, baseline in timed.items():
        if key not in found:
            found[key] = checks.speed(comparison, name, baseline)
    if "official_checks" not in found:
        found["official_checks"] = checks.official_checks(comparison, name)
    for key in (*(key for key, *_ in CRITERIA), *WITHOUT_POINTS):
        if key not in found:
            tick(key.replace("_", " "))
            found[key] = getattr(checks, key)(candidate)
    return found


def score(candidate: Callable, comparison: harness.Comparison | None = None, **options) -> Score:
    """Collect the evidence for `candidate` on this machine and compute the table; options as in `collect`."""
    facts = environment.describe()
    where = facts["gpu"] or "this CPU (Triton's interpreter)"
    where += f", {environment.forced_text(facts['forced'])}" if facts.get("forced") else ""
    return table(collect(candidate, comparison, **options), f"{where}, {facts['date'][:10]}")


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 when a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers score",
        description="The marking table from evidence collected on this machine.",
    )
    parser.add_argument("--quick", action="store_true", help="3 repeats of 200 rounds instead of 5 of 1000")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the table and its evidence")
    options = parser.parse_args(argv)

    environment.prepare()
    from helpers.nf4 import kernel as nf4_kernel
    from helpers.oracle import baselines
    from helpers.record import results

    baselines.available()  # Unsloth must be imported before what it patches
    found = score(
        nf4_kernel.your_dequantize_nf4,
        quick=options.quick,
        tick=lambda what: print(f"... {what}", file=sys.stderr, flush=True),
    )
    print(found.to_text())
    if options.json:
        results.write(options.json.name, found.to_dict(), options.json.parent)
    return 1 if any(item.passed is False for item in found.evidence.values()) else 0
