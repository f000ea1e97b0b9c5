"""The speed goals, and what one benchmark result says of each."""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from helpers.results import names
from helpers.results.names import DTYPES, label, size_text
from helpers.results.old_store import Benchmark, ratio

ROUNDS = 1000  # of the official protocol
NOT_MEASURED = "not measured"
HEADER = ("goal", "Unsloth today", "ours", "must reach", "met")


class Goal(NamedTuple):
    """A row of texts; `met` is None where there is no verdict."""

    name: str
    today: str
    ours: str
    must_reach: str
    met: bool | None


def _goal(name, must_reach: str, ours=None, today=None, text: str = "{:.2f}", enough: bool = True) -> Goal:
    """The goal that `ours`, shown as `text`, be what `must_reach` says, such as ">= 1.60".

    None is not measured; without `enough` measurements there is no verdict.
    """
    sign, bar = must_reach.split()[:2]
    met = None
    if ours is not None and enough:
        met = ours <= float(bar) if sign == "<=" else ours >= float(bar)
    today = NOT_MEASURED if today is None else f"{today:.2f}"
    return Goal(name, today, NOT_MEASURED if ours is None else text.format(ours), must_reach, met)


def _protocol(data: Benchmark) -> Iterator[Goal]:
    timed, mover = data.protocol, data.byte_mover
    short = f" ({timed.rounds} rounds only)" if timed and timed.rounds < ROUNDS else ""
    for baseline, must_reach in (("unsloth_today", ">= 1.60"), ("unsloth_classic", ">= 2.00")):
        ours, today = (timed and timed.speedup(name, baseline) for name in ("kernel", "unsloth_today"))
        name = f"official protocol, speedup over {label(baseline)}{short}"
        yield _goal(name, must_reach, ours, today, enough=not short)
    name = f"official protocol, share of a kernel that {label(names.BYTE_MOVER)} on the same launch path"
    share, enough = (mover.share, mover.rounds >= ROUNDS) if mover else (None, False)
    yield _goal(name, ">= 0.95", share, enough=enough)


def _host(data: Benchmark) -> Iterator[Goal]:
    cases = data.host.cases if data.host else []
    case = next((c for c in cases if (c.shape, c.dtype) == (names.HOST_SHAPE, "bfloat16")), None)
    for moment, words in (("returned", "until the call returns"), ("synchronized", "with a synchronize")):
        rows = getattr(case, moment, {})
        ratios = (ratio(rows, name, names.ALLOCATE_FILL) for name in ("kernel", "unsloth_today"))
        yield _goal(f"host time {words}, 1024x4096 bf16, over allocate + fill", "<= 1.05", *ratios)


def _pair(values: list[float | None]) -> str:
    return NOT_MEASURED if None in values else " / ".join(f"{value:.3f}" for value in values)


def _shares(data: Benchmark) -> Iterator[Goal]:
    """Share of the speed of the kernel without arithmetic; both dtypes must reach the bar."""
    sizes = data.gpu_rows()
    for numel, bar in names.SHARES.items():
        ours, today = (
            [ratio(sizes.get((numel, dtype), {}), names.CEILING, name) for dtype in DTYPES]
            for name in ("kernel", "unsloth_today")
        )
        name = f"GPU time, share of a no-arithmetic CUDA C kernel, {numel / 1e6:.3g}M elements, fp16 / bf16"
        goal = _goal(name, f">= {bar:.2f}", None if None in ours else min(ours))
        yield goal._replace(today=_pair(today), ours=_pair(ours))


def _gpu(data: Benchmark) -> Iterator[Goal]:
    """The lowest ratio and the mean; no verdict unless the whole span was measured in both dtypes."""
    ratios = {key: ratio(rows, "unsloth_today", "kernel") for key, rows in data.gpu_rows().items()}
    ratios = {key: value for key, value in ratios.items() if value is not None}
    whole = {(numel, dtype) for numel in (names.SMALLEST, names.LARGEST) for dtype in DTYPES} <= ratios.keys()
    sizes = [numel for numel, _ in ratios] or [names.SMALLEST, names.LARGEST]
    span = f"{size_text(min(sizes))} to {size_text(max(sizes))} elements"
    low, at = min(((value, key) for key, value in ratios.items()), default=(None, None))
    text = f"{{:.3f}} (at {size_text(at[0])} {DTYPES[at[1]]})" if at else ""
    mean, today = (statistics.geometric_mean(ratios.values()), 1.0) if ratios else (None, None)
    name = "GPU time, speedup over Unsloth today"
    yield _goal(f"{name}, lowest, {span}", ">= 1.00", low, today, text, whole)
    yield _goal(f"{name}, geometric mean, {span}", ">= 1.10", mean, today, "{:.3f}", whole)


def _compile(data: Benchmark) -> Iterator[Goal]:
    """The worst of all numbers of tokens, forward and with backward."""
    rows = [case.compiled | {"eager": case.eager["kernel"]} if "kernel" in case.eager else case.compiled
            for case in (data.compile.cases if data.compile else [])]  # fmt: skip
    for words, must_reach, numerator, denominator, worst in (
        ("over this kernel eager", "<= 1.00", "kernel", "eager", max),
        ("under Unsloth today compiled", ">= 1.20", "unsloth_today", "kernel", min),
        ("under bitsandbytes compiled", ">= 2.20", "bitsandbytes", "kernel", min),
    ):
        name = f"torch.compile, 24 weights and products, this kernel compiled {words}, worst case"
        ratios = [ratio(row, numerator, denominator) for row in rows]
        yield _goal(name, must_reach, worst(ratios) if ratios and None not in ratios else None)


def _first_call(data: Benchmark) -> Iterator[Goal]:
    """How many compiles the layers of two models take, and how long a first call takes."""
    rows = data.compiles.rows if data.compiles else []
    kinds = ", ".join(f"{row['dtype']} {row['state']}" for row in rows)
    name = "compiles over all layer shapes of Llama-3 8B and 70B" + (f" ({kinds})" if kinds else "")
    counts = ", ".join(str(row["compiles"]) for row in rows) or NOT_MEASURED
    met = all(row["compiles"] == 1 for row in rows) if rows else None
    yield Goal(name, NOT_MEASURED, counts, "1 each", met)
    for state, name, must_reach in (
        ("empty", "first call ever (empty caches)", "<= 1.0 s"),
        ("warm", "first call in a new process (warm disk cache)", "<= 0.2 s"),
    ):
        seconds = data.cold.kernel.median(state) if data.cold else None
        yield _goal(name, must_reach, seconds, text="{:.2f} s")


def goals(data: Benchmark) -> list[Goal]:
    """Every goal, with what this result says of it."""
    groups = (_protocol, _host, _shares, _gpu, _compile, _first_call)
    return [goal for group in groups for goal in group(data)]


def table(data: Benchmark) -> list[list[str]]:
    """The goals as rows of texts, the header first."""
    met = {True: "yes", False: "no", None: NOT_MEASURED}
    return [list(HEADER), *([*goal[:-1], met[goal.met]] for goal in goals(data))]
