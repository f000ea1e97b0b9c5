"""The speed goals, and what one benchmark result says of each."""

import statistics
from typing import NamedTuple

from helpers.record.names import BYTE_MOVER, CEILINGS, DTYPES, LARGEST, SHARES, SMALLEST, label, size_text
from helpers.record.results import Benchmark, ratio

ROUNDS = 1000  # of the official protocol
NOT_MEASURED = "not measured"
HEADER = ("goal", "Unsloth today", "ours", "must reach", "met")
HOST_SHAPE, HOST_DTYPE = (1024, 4096), "bfloat16"  # the smallest official layer: there a call weighs most


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


def _protocol(data: Benchmark) -> list[Goal]:
    goals, timed, mover = [], data.protocol, data.byte_mover
    short = f" ({timed.rounds} rounds only)" if timed and timed.rounds < ROUNDS else ""
    for baseline, must_reach in (("unsloth_today", ">= 1.60"), ("unsloth_classic", ">= 2.00")):
        ours, today = (timed and timed.speedup(name, baseline) for name in ("kernel", "unsloth_today"))
        name = f"official protocol, speedup over {label(baseline)}{short}"
        goals.append(_goal(name, must_reach, ours, today, enough=not short))
    name = f"official protocol, share of a kernel that {label(BYTE_MOVER)} on the same launch path"
    share, enough = (mover.share, mover.rounds >= ROUNDS) if mover else (None, False)
    return [*goals, _goal(name, ">= 0.95", share, enough=enough)]


def _host(data: Benchmark) -> list[Goal]:
    cases = data.host.cases if data.host else []
    case = next((c for c in cases if (c.shape, c.dtype) == (HOST_SHAPE, HOST_DTYPE)), None)
    goals = []
    for moment, words in (("returned", "until the call returns"), ("synchronized", "with a synchronize")):
        rows = getattr(case, moment) if case else {}
        ratios = (ratio(rows, name, "empty_strided + fill_") for name in ("kernel", "unsloth_today"))
        name = f"host time {words}, 1024x4096 bf16, over allocate + fill"
        goals.append(_goal(name, "<= 1.05", *ratios))
    return goals


def _pair(values: list[float | None]) -> str:
    return NOT_MEASURED if None in values else " / ".join(f"{value:.3f}" for value in values)


def _shares(data: Benchmark) -> list[Goal]:
    """Share of the speed of the kernel without arithmetic; both dtypes must reach the bar."""
    sizes, goals = data.gpu_rows(), []
    kind = next((kind for kind in CEILINGS if any(kind in rows for rows in sizes.values())), None)
    language = label(kind or next(iter(CEILINGS))).removeprefix("ceiling, ")
    for numel, bar in SHARES.items():
        rows = [sizes.get((numel, dtype), {}) for dtype in DTYPES]
        ours, today = ([ratio(row, kind, name) for row in rows] for name in ("kernel", "unsloth_today"))
        size = f"{numel / 1e6:.3g}M elements, fp16 / bf16"
        name = f"GPU time, share of a no-arithmetic {language} kernel, {size}"
        goal = _goal(name, f">= {bar:.2f}", None if None in ours else min(ours))
        goals.append(goal._replace(today=_pair(today), ours=_pair(ours)))
    return goals


def _gpu(data: Benchmark) -> list[Goal]:
    """The lowest ratio and the mean; no verdict unless the whole span was measured in both dtypes."""
    ratios = {key: ratio(rows, "unsloth_today", "kernel") for key, rows in data.gpu_rows().items()}
    ratios = {key: value for key, value in ratios.items() if value is not None}
    whole = {(numel, dtype) for numel in (SMALLEST, LARGEST) for dtype in DTYPES} <= ratios.keys()
    sizes = [numel for numel, _ in ratios] or [SMALLEST, LARGEST]
    span = f"{size_text(min(sizes))} to {size_text(max(sizes))} elements"
    low, at = min(((value, key) for key, value in ratios.items()), default=(None, None))
    text = f"{{:.3f}} (at {size_text(at[0])} {DTYPES[at[1]]})" if at else ""
    mean, today = (statistics.geometric_mean(ratios.values()), 1.0) if ratios else (None, None)
    name = "GPU time, speedup over Unsloth today"
    return [
        _goal(f"{name}, lowest, {span}", ">= 1.00", low, today, text, whole),
        _goal(f"{name}, geometric mean, {span}", ">= 1.10", mean, today, "{:.3f}", whole),
    ]


def _compile(data: Benchmark) -> list[Goal]:
    """The worst of all numbers of tokens, forward and with backward."""
    rows = [case.compiled | {"eager": case.eager["kernel"]} if "kernel" in case.eager else case.compiled
            for case in (data.compile.cases if data.compile else [])]  # fmt: skip
    goals = []
    for words, must_reach, numerator, denominator, worst in (
        ("over this kernel eager", "<= 1.00", "kernel", "eager", max),
        ("under Unsloth today compiled", ">= 1.20", "unsloth_today", "kernel", min),
        ("under bitsandbytes compiled", ">= 2.20", "bitsandbytes", "kernel", min),
    ):
        name = f"torch.compile, 24 weights and products, this kernel compiled {words}, worst case"
        ratios = [ratio(row, numerator, denominator) for row in rows]
        goals.append(_goal(name, must_reach, worst(ratios) if ratios and None not in ratios else None))
    return goals


def _compiles(data: Benchmark) -> Goal:
    rows = data.compiles.rows if data.compiles else []
    kinds = ", ".join(f"{row.dtype} {row.state}" for row in rows)
    name = "compiles over all layer shapes of Llama-3 8B and 70B" + (f" ({kinds})" if kinds else "")
    counts = ", ".join(str(row.compiles) for row in rows) or NOT_MEASURED
    met = all(row.compiles == 1 for row in rows) if rows else None
    return Goal(name, NOT_MEASURED, counts, "1 each", met)


def _cold(data: Benchmark) -> list[Goal]:
    bars = {
        "empty": ("first call ever (empty caches)", "<= 1.0 s"),
        "warm": ("first call in a new process (warm disk cache)", "<= 0.2 s"),
    }
    seconds = {state: data.cold.kernel.median(state, "first_call") for state in bars} if data.cold else {}
    return [_goal(*bar, seconds.get(state), text="{:.2f} s") for state, bar in bars.items()]


def goals(data: Benchmark) -> list[Goal]:
    """Every goal, with what this result says of it."""
    measured = [*_protocol(data), *_host(data), *_shares(data), *_gpu(data)]
    return [*measured, *_compile(data), _compiles(data), *_cold(data)]


def table(data: Benchmark) -> list[list[str]]:
    """The goals as rows of texts, the header first."""
    met = {True: "yes", False: "no", None: NOT_MEASURED}
    return [list(HEADER), *([*goal[:-1], met[goal.met]] for goal in goals(data))]
