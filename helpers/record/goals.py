"""The speed goals, and what one benchmark result says of each."""

import statistics
from typing import NamedTuple

from helpers.record.names import BYTE_MOVER, CEILINGS, DTYPES, LARGEST, SHARES, SMALLEST, label, size_text
from helpers.record.results import Benchmark, GpuCase, ratio

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


def _goal(name: str, today: str | None, ours: str | None, must_reach: str, met: bool | None) -> Goal:
    verdict = None if ours is None else met
    return Goal(name, today or NOT_MEASURED, ours or NOT_MEASURED, must_reach, verdict)


def _text(value: float | None, digits: int = 2, unit: str = "") -> str | None:
    return None if value is None else f"{value:.{digits}f}{unit}"


def _pair(values: list[float | None], digits: int = 3) -> str | None:
    return None if None in values else " / ".join(f"{value:.{digits}f}" for value in values)


def _protocol(data: Benchmark) -> list[Goal]:
    goals, found = [], data.protocol
    short = f" ({found.rounds} rounds only)" if found and found.rounds < ROUNDS else ""
    for baseline, bar in (("unsloth_today", 1.60), ("unsloth_classic", 2.00)):
        ours, today = (found and found.speedup(name, baseline) for name in ("kernel", "unsloth_today"))
        name = f"official protocol, speedup over {label(baseline)}{short}"
        met = None if short else (ours or 0) >= bar
        goals.append(_goal(name, _text(today), _text(ours), f">= {bar:.2f}", met))
    mover = data.byte_mover
    share = mover and mover.share
    name = f"official protocol, share of a kernel that {label(BYTE_MOVER)} on the same launch path"
    met = None if mover and mover.rounds < ROUNDS else (share or 0) >= 0.95
    return [*goals, _goal(name, None, _text(share), ">= 0.95", met)]


def _host(data: Benchmark) -> list[Goal]:
    cases = data.host.cases if data.host else []
    case = next((c for c in cases if (c.shape, c.dtype) == (HOST_SHAPE, HOST_DTYPE)), None)
    goals = []
    for moment, words in (("returned", "until the call returns"), ("synchronized", "with a synchronize")):
        rows = getattr(case, moment) if case else {}
        ours, today = (ratio(rows, name, "empty_strided + fill_") for name in ("kernel", "unsloth_today"))
        name = f"host time {words}, 1024x4096 bf16, over allocate + fill"
        goals.append(_goal(name, _text(today), _text(ours), "<= 1.05", (ours or 9) <= 1.05))
    return goals


def _cases(data: Benchmark) -> dict[tuple[int, str], GpuCase]:
    return {(case.numel, case.dtype): case for case in data.gpu.sizes if case.rows} if data.gpu else {}


def _shares(data: Benchmark) -> list[Goal]:
    """Share of the speed of the kernel without arithmetic; both dtypes must reach the bar."""
    cases = _cases(data)
    kind = next((kind for kind in CEILINGS if any(kind in case.rows for case in cases.values())), None)
    language = label(kind or next(iter(CEILINGS))).removeprefix("ceiling, ")
    goals = []
    for numel, bar in SHARES.items():
        rows = [cases[numel, dtype].rows if (numel, dtype) in cases else {} for dtype in DTYPES]
        ours, today = ([ratio(row, kind, name) for row in rows] for name in ("kernel", "unsloth_today"))
        name = (
            f"GPU time, share of a no-arithmetic {language} kernel, {numel / 1e6:.3g}M elements, fp16 / bf16"
        )
        met = None not in ours and min(ours) >= bar
        goals.append(_goal(name, _pair(today), _pair(ours), f">= {bar:.2f}", met))
    return goals


def against_today(data: Benchmark) -> dict[tuple[int, str], float]:
    """{(elements, dtype): GPU time of Unsloth today over ours}, of all sizes that have both."""
    found = {key: ratio(case.rows, "unsloth_today", "kernel") for key, case in _cases(data).items()}
    return {key: value for key, value in found.items() if value is not None}


def _gpu(data: Benchmark) -> list[Goal]:
    """The lowest ratio and the mean; no verdict unless the whole span was measured in both dtypes."""
    ratios = against_today(data)
    whole = {(numel, dtype) for numel in (SMALLEST, LARGEST) for dtype in DTYPES} <= ratios.keys()
    sizes = [numel for numel, _ in ratios] or [SMALLEST, LARGEST]
    span = f"{size_text(min(sizes))} to {size_text(max(sizes))} elements"
    low = mean = lowest = None
    if ratios:
        (numel, dtype), low = min(ratios.items(), key=lambda item: item[1])
        mean = statistics.geometric_mean(ratios.values())
        lowest = f"{low:.3f} (at {size_text(numel)} {DTYPES[dtype]})"
    return [
        _goal(f"GPU time, speedup over Unsloth today, {what}, {span}", ratios and "1.00", text, bar, verdict)
        for what, text, bar, verdict in (
            ("lowest", lowest, ">= 1.00", low >= 1 if whole else None),
            ("geometric mean", _text(mean, 3), ">= 1.10", mean >= 1.1 if whole else None),
        )
    ]


def _compile(data: Benchmark) -> list[Goal]:
    """The worst of all numbers of tokens, forward and with backward."""
    cases = data.compile.cases if data.compile else []
    goals = []
    for words, reference, way, must_reach, bar in (
        ("over this kernel eager", "kernel", "eager", "<= 1.00", 1.0),
        ("under Unsloth today compiled", "unsloth_today", "compiled", ">= 1.20", 1.2),
        ("under bitsandbytes compiled", "bitsandbytes", "compiled", ">= 2.20", 2.2),
    ):
        name = f"torch.compile, 24 weights and products, this kernel compiled {words}, worst case"
        times = [(case.compiled.get("kernel"), getattr(case, way).get(reference)) for case in cases]
        if not times or any(None in pair for pair in times):
            goals.append(_goal(name, None, None, must_reach, None))
            continue
        own = reference == "kernel"
        ratios = [ours.p50 / other.p50 if own else other.p50 / ours.p50 for ours, other in times]
        worst = max(ratios) if own else min(ratios)
        goals.append(_goal(name, None, _text(worst), must_reach, worst <= bar if own else worst >= bar))
    return goals


def _compiles(data: Benchmark) -> Goal:
    rows = data.compiles.rows if data.compiles else []
    counts = [row.compiles for row in rows]
    kinds = ", ".join(f"{row.dtype} {row.state}" for row in rows)
    name = "compiles over all layer shapes of Llama-3 8B and 70B" + (f" ({kinds})" if kinds else "")
    return _goal(name, None, ", ".join(map(str, counts)) or None, "1 each", all(n == 1 for n in counts))


def _cold(data: Benchmark) -> list[Goal]:
    goals = []
    for state, name, bar in (
        ("empty", "first call ever (empty caches)", 1.0),
        ("warm", "first call in a new process (warm disk cache)", 0.2),
    ):
        seconds = data.cold.kernel.median(state, "first_call") if data.cold else None
        goals.append(_goal(name, None, _text(seconds, 2, " s"), f"<= {bar:.1f} s", (seconds or 9) <= bar))
    return goals


def goals(data: Benchmark) -> list[Goal]:
    """Every goal, with what this result says of it."""
    found = [*_protocol(data), *_host(data), *_shares(data), *_gpu(data)]
    return [*found, *_compile(data), _compiles(data), *_cold(data)]


def table(data: Benchmark) -> list[list[str]]:
    """The goals as rows of texts, the header first."""
    met = {True: "yes", False: "no", None: NOT_MEASURED}
    return [list(HEADER), *([*goal[:-1], met[goal.met]] for goal in goals(data))]
