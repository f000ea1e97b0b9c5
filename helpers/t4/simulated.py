"""What is known of a T4's times, where nobody of this project has one: a simulation, published figures, sums.

Kernel times are from a cycle-level simulation of sm_75 machine code (results/t4-simulated/); the cost of a
call was published by others; our share of it is measured on the H200's host. A run on a T4
(`python -m helpers bench --quick` writes results/tesla-t4/) is shown beside all that.
"""

import itertools
import statistics
from pathlib import Path
from typing import NamedTuple

from helpers.machine import ROOT
from helpers.results import names, store as results
from helpers.results.store import Benchmark, Record, Result
from helpers.puzzle import protocol

RESULTS = ROOT / "results"
CAPTION = "simulated for that kernel; its loads have been reordered since"
CONTENDERS = ("kernel", "unsloth_today", "unsloth_classic")
SLOWER = 1.13  # at most, a T4's DRAM than simulated: its assumptions say 6 to 13 %, from published bandwidths
CALLS = 1000 * len(protocol.OFFICIAL) * len(protocol.WEIGHTS)  # of the official protocol
# Published: totals of public solutions on a T4 Colab less their kernels' time, microseconds a call.
CALL_US = (60.0, 77.0)
# Published: seconds of Unsloth classic on a T4, with bitsandbytes 0.48.2 and before.
CLASSIC_TOTAL_S = (3.91, 5.5)
TIERS = (1.05, 1.10, 1.15)  # speedups that the puzzle gives points for
UNKNOWN = (1.0,)  # our share of a call's host time where it was not measured


class Simulation(Record, forbid_unknown_fields=False):
    """Microseconds of kernels alone on a simulated Tesla T4. Nothing in it was measured on one.

    The file says more for its readers: assumptions, variants of the kernel, other sizes.
    """

    simulator: str
    machine_code: str
    precision: str
    us_at_4194304_elements: dict[str, dict[str, float]]
    official_protocol_kernels_only_s: dict[str, float | list[float]]

    def kernels_s(self, contender: str) -> tuple[float, float]:
        """Seconds of the official protocol's kernels as simulated, (low, high)."""
        name = {"kernel": "ours", "unsloth_classic": "classic"}.get(contender, contender)
        seconds = self.official_protocol_kernels_only_s[name]
        return tuple(seconds) if isinstance(seconds, list) else (seconds, seconds)

    def error(self) -> tuple[float, float]:
        """Simulated over published seconds of classic's kernels, less 1: (low, high)."""
        published = self.official_protocol_kernels_only_s["classic_published_total_less_call_cost"]
        seconds, _ = self.kernels_s("unsloth_classic")
        return seconds / max(published) - 1, seconds / min(published) - 1


class Span(NamedTuple):
    low: float
    high: float

    def __str__(self):
        return f"{self.low:.1f} to {self.high:.1f}"


class Total(NamedTuple):
    """Seconds of the official protocol on a T4: kernels, calls, and both."""

    kernels: Span
    calls: Span

    @property
    def both(self) -> Span:
        return _sum([self.kernels, self.calls])


def stored(root: Path = RESULTS) -> tuple[Result[Simulation], tuple[float, ...]]:
    """The simulation, and our host time of a call over Unsloth today's, returned and synchronized.

    Raises FileNotFoundError without the simulation.
    """
    run = results.find("benchmark", root / names.CARD)
    cases = run.data.host.cases if run and run.data.host else []
    small = [case for case in cases if case.shape == names.HOST_SHAPE]
    rows = [rows for case in small for rows in (case.returned, case.synchronized)]
    shares = tuple(filter(None, (results.ratio(row, "kernel", "unsloth_today") for row in rows)))
    return results.read("simulation", root / "t4-simulated", Simulation), shares or UNKNOWN


def totals(simulated: Simulation, shares: tuple[float, ...]) -> dict[str, Total]:
    """The official protocol on a T4: the simulated kernels, up to SLOWER times as long, and calls.

    A call costs CALL_US beside its kernel, ours `shares` of that; classic's as much as today's, though it
    launches three kernels. Python's part of a call scales with the host, the driver's does not.
    """
    sums = {}
    for contender in CONTENDERS:
        low, high = simulated.kernels_s(contender)
        part = shares if contender == "kernel" else (1.0,)
        us = (CALL_US[0] * min(part), CALL_US[1] * max(part))
        sums[contender] = Total(Span(low, high * SLOWER), Span(*(CALLS * 1e-6 * each for each in us)))
    return sums


def ratio(simulated: Simulation, shares: tuple[float, ...], contender: str) -> tuple[float, float, float]:
    """Seconds of `contender` over ours on a T4: (low, middle, high).

    Both meet the same DRAM; what their calls cost there varies independently, as it was published of other
    hosts. The middle is of the middle of each.
    """
    sums, own = totals(simulated, shares), simulated.kernels_s("kernel")[0]

    def over(slower, kernel, call, our_call):
        return (kernel * slower + call) / (own * slower + our_call)

    spans = ((1.0, SLOWER), simulated.kernels_s(contender), sums[contender].calls, sums["kernel"].calls)
    every = list(itertools.starmap(over, itertools.product(*spans)))
    return min(every), over(*map(statistics.mean, spans)), max(every)


def tier(value: float) -> str:
    """The highest of the puzzle's lines that a speedup reaches."""
    return max((f"{line:.2f}" for line in TIERS if value >= line), default="none")


def measured(root: Path = RESULTS) -> Result[Benchmark] | None:
    """The benchmark that someone ran on a T4; None as long as nobody has."""
    return results.find("benchmark", root / names.T4)


def table(root: Path = RESULTS) -> list[list[str]]:
    """Rows of texts, header first: the official protocol on a T4, simulated and, where stored, measured."""
    result, shares = stored(root)
    simulated, run = result.data, measured(root)
    head = "seconds on a T4|kernels, simulated|calls|together|time / ours|measured|time / ours"
    rows = [head.split("|")]
    for contender, total in totals(simulated, shares).items():
        speedup, last = "1", ["not measured"] * 2
        if contender != "kernel":
            low, middle, high = ratio(simulated, shares, contender)
            speedup = f"{low:.2f} to {high:.2f}, middle {middle:.2f}"
        if run and run.data.protocol and (over := run.data.protocol.speedup("kernel", contender)):
            last = [f"{run.data.protocol.entries[contender].p50:.2f}", f"{over:.2f}"]
        rows.append(
            [names.label(contender), *map(str, (total.kernels, total.calls, total.both)), speedup, *last]
        )
    return rows


def kernel_table(root: Path = RESULTS) -> list[list[str]]:
    """Rows of texts, header first: microseconds of one call's kernel alone, as simulated, over ours."""
    times = stored(root)[0].data.us_at_4194304_elements
    clocks = {"sm_clock_1590_mhz": "1590 MHz (boost)", "sm_clock_1000_mhz": "1000 MHz (throttled)"}
    rows = [["us of one kernel, 4.2M elements, simulated", *clocks.values()]]
    for name in times["sm_clock_1590_mhz"]:
        ours = "ours_bf16" if "bf16" in name else "ours_fp16"
        cells = [
            f"{us:.1f} ({us / times[clock][ours]:.2f})" if (us := times[clock].get(name)) else "-"
            for clock in clocks
        ]
        rows.append([name.replace("_", " "), *cells])
    return rows


def lines(root: Path = RESULTS) -> list[str]:
    """How the table came about and what it leaves open, in sentences."""
    result, shares = stored(root)
    simulated = result.data
    low, high = simulated.error()
    our_share = f"{min(shares):.2f} to {max(shares):.2f} of that (H200's host)"
    over = [tier(value) for value in ratio(simulated, shares, "unsloth_today")]
    texts = [
        f"Kernel {result.kernel.label}: {CAPTION}. {simulated.simulator}; {simulated.machine_code}.",
        f"Classic's kernels: {low:+.0%} to {high:+.0%} against what others published (partly circular: the "
        f"DRAM was calibrated to published bandwidths). A T4's DRAM may be up to {SLOWER - 1:.0%} slower, "
        f"for all alike; {simulated.precision}.",
        f"A call of Unsloth's: {CALL_US[0]:.0f} to {CALL_US[1]:.0f} us beside its kernel (published, T4 "
        f"Colab); ours {'not measured' if shares == UNKNOWN else our_share}.",
        "The puzzle's lines that the ratio to Unsloth today reaches: "
        f"{over[0]} at the low end, {over[1]} in the middle, {over[2]} at the high end.",
    ]
    run = measured(root)
    return [*texts, f"Measured: {results.caption(run)}."] if run else texts


def run_all(root: Path = RESULTS) -> list[tuple[str, Span, str]]:
    """How long "Run all" takes on a T4 Colab: (what, seconds, source) of each part, then of all.

    The protocol is timed once there; a T4 Colab's Python takes two to three times a server's (published rule
    of thumb). Raises FileNotFoundError without the stored runs that it scales.
    """
    benchmark, notebook = (results.read(name, root / names.CARD).data for name in ("benchmark", "notebook"))
    result, shares = stored(root)
    sums = totals(result.data, shares)
    timed = [sums[name].both for name in ("kernel", "unsloth_today")] + [Span(*CLASSIC_TOTAL_S)]
    source = "ours and today simulated, classic published"
    for name in ("bitsandbytes", "peft"):
        if times := benchmark.protocol and benchmark.protocol.speedup("unsloth_classic", name):
            timed.append(Span(*(times * seconds for seconds in CLASSIC_TOTAL_S)))
            source += f", {names.label(name)} {times:.2f} times classic (H200)"
    rest = sum(c.seconds for c in notebook.cells if not (c.protocol or c.setup or c.not_on_a_t4))
    parts = [
        ("set-up", Span(32, 96), "a rehearsal with Colab's packages, 32 s; times 1 to 3, assumed"),
        ("protocol, timed once", _sum(timed), source),
        # 40 to 100 million elements made a second; 20 to 40 TFLOP/s in fp16, 2 to 8 in bf16: no tensor cores
        ("its checks and layers", Span(8, 29), "58 TFLOP of matrix products at assumed rates"),
        ("everything else", Span(2 * rest, 3 * rest), "stored on the H200, times 2 to 3"),
    ]
    return [*parts, ("in all", _sum(span for _, span, _ in parts), "300 allowed")]


def _sum(spans) -> Span:
    return Span(*map(sum, zip(*spans, strict=True)))
