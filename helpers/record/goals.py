"""The table of speed targets, filled from one benchmark result."""

SMALLEST, LARGEST = 2**16, 2**30  # elements: the span in which no size may be slower than Unsloth today
TARGET_SIZES = (4_194_304, 16_777_216, 58_720_256, 234_881_024)  # elements, each with a share to reach
ROUNDS = 1000  # of the official protocol
NOT_MEASURED = "not measured"
DTYPES = ("float16", "bfloat16")
FLOORS = {"floor_cuda": "CUDA C", "floor_triton": "Triton"}  # the ceiling to use, the stricter one first
HEADER = ("target", "Unsloth today", "ours", "must reach", "met")


def size_text(numel: int) -> str:
    """65536 -> '64K', 2**30 -> '1G', 58720256 -> '58.7M' (decimal where it is no power of two)."""
    for unit, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if numel >= scale and numel.bit_count() == 1:
            return f"{numel // scale}{unit}"
    return f"{numel / 1e6:.3g}M" if numel >= 1e6 else f"{numel / 1e3:.3g}k"


def _row(name: str, today: str | None, ours: str | None, must_reach: str, met: bool | None) -> dict:
    texts = {"unsloth_today": today, "ours": ours}
    filled = {key: NOT_MEASURED if text is None else text for key, text in texts.items()}
    return {"name": name, **filled, "must_reach": must_reach, "met": None if ours is None else met}


def _number(value: float | None, digits: int = 2, unit: str = "") -> str | None:
    return None if value is None else f"{value:.{digits}f}{unit}"


def _pair(values: list[float | None], digits: int) -> str | None:
    return None if None in values else " / ".join(f"{value:.{digits}f}" for value in values)


def _protocol(data: dict) -> list[dict]:
    found = data.get("protocol", {})
    rows = []
    for baseline, label, bar in (
        ("unsloth_today", "Unsloth today", 1.60),
        ("unsloth_classic", "Unsloth classic", 2.00),
    ):
        ours, today = (
            found.get("entries", {}).get(name, {}).get("speedup_over", {}).get(baseline)
            for name in ("kernel", "unsloth_today")
        )
        name, met = f"official protocol, speedup over {label}", ours is not None and ours >= bar
        if found.get("rounds", ROUNDS) < ROUNDS:
            name, met = f"{name} ({found['rounds']} rounds only)", None
        rows.append(_row(name, _number(today), _number(ours), f">= {bar:.2f}", met))
    return rows


def _host(data: dict) -> list[dict]:
    cases = {(*case["shape"], case["dtype"]): case for case in data.get("host", {}).get("cases", [])}
    case = cases.get((1024, 4096, "bfloat16"), {})
    rows = []
    for what, label in (("returned", "until the call returns"), ("synchronized", "with a synchronize")):
        ours, today = (case.get(what, {}).get(name, {}).get("ratio") for name in ("kernel", "unsloth_today"))
        name = f"host time {label}, 1024x4096 bf16, over allocate + fill"
        met = ours is not None and ours <= 1.05
        rows.append(_row(name, _number(today), _number(ours), "<= 1.05", met))
    return rows


def _shares(data: dict) -> list[dict]:
    """Share of the speed of the kernel without arithmetic; both dtypes must reach the bar."""
    cases = {(case["numel"], case["dtype"]): case for case in data.get("gpu", {}).get("sizes", [])}
    kind = next((k for k in FLOORS if any(k in case.get("share", {}) for case in cases.values())), None)
    rows = []
    for numel in TARGET_SIZES:
        bar = 0.90 if numel == TARGET_SIZES[0] else 0.97
        shares = [cases.get((numel, dtype), {}).get("share", {}).get(kind, {}) for dtype in DTYPES]
        ours, today = ([share.get(name) for share in shares] for name in ("kernel", "unsloth_today"))
        name = f"GPU time, share of a no-arithmetic {FLOORS.get(kind, 'CUDA C')} kernel, {numel / 1e6:.3g}M"
        met = None not in ours and min(ours) >= bar
        name += " elements, fp16 / bf16"
        rows.append(_row(name, _pair(today, 3), _pair(ours, 3), f">= {bar:.2f}", met))
    return rows


def _gpu(data: dict) -> list[dict]:
    """Against Unsloth today on GPU time; no verdict unless the whole span was measured in both dtypes."""
    gpu = data.get("gpu", {})
    found = gpu.get("vs_unsloth_today")
    measured = {
        (case["numel"], case["dtype"])
        for case in gpu.get("sizes", [])
        if "unsloth_today" in case.get("vs", {})
    }
    whole = {(numel, dtype) for numel in (SMALLEST, LARGEST) for dtype in DTYPES} <= measured
    span = f"{size_text(SMALLEST)} to {size_text(LARGEST)} elements"
    lowest = mean = today = worst = None
    if found:
        sizes = [numel for numel, _ in measured]
        span = f"{size_text(min(sizes))} to {size_text(max(sizes))} elements, {found['cases']} cases"
        lowest, mean, today = found["lowest"], found["geometric_mean"], "1.00"
        worst = f"{lowest:.3f} (at {size_text(found['lowest_at'][0])} {found['lowest_at'][1]})"
    return [
        _row(f"{name}, {span}", today, text, must_reach, (value or 0) >= bar if whole else None)
        for name, value, text, must_reach, bar in (
            ("GPU time, speedup over Unsloth today, lowest", lowest, worst, ">= 1.00", 1.00),
            ("GPU time, speedup over Unsloth today, geometric mean", mean, _number(mean, 3), ">= 1.10", 1.10),
        )
    ]


def _sass(data: dict) -> list[dict]:
    found = data.get("sass", {}).get("rows", {})
    ours, today = ([found.get(dtype, {}).get(name) for dtype in DTYPES] for name in ("ours", "unsloth_today"))
    missed = [text for row in found.values() for text in row["over_budget"]]
    name = "SASS for sm_75, instructions per output element above 2M elements, fp16 / bf16"
    bar = "<= 7 / 9, no shared memory, no spills, 128-bit stores"
    return [_row(name, _pair(today, 2), _pair(ours, 2), bar, not missed)]


def _compiles(data: dict) -> dict:
    found = data.get("compiles", {}).get("rows", [])
    counts = [row["compiles"] for row in found]
    kinds = ", ".join(f"{row['dtype']} {row['state']}" for row in found)
    name = "compiles over all layer shapes of Llama-3 8B and 70B" + (f" ({kinds})" if kinds else "")
    met = bool(counts) and all(count == 1 for count in counts)
    return _row(name, None, ", ".join(map(str, counts)) or None, "1 each", met)


def _cold(data: dict) -> list[dict]:
    found = data.get("cold", {}).get("kernel", {})
    rows = []
    for state, label, bar in (
        ("empty", "first call ever (empty caches)", 1.0),
        ("warm", "first call in a new process (warm disk cache)", 0.2),
    ):
        seconds = found.get(state, {}).get("median", {}).get("first_call")
        met = seconds is not None and seconds <= bar
        rows.append(_row(label, None, _number(seconds, 2, " s"), f"<= {bar:.1f} s", met))
    return rows


def targets(result: dict) -> list[dict]:
    """Rows {name, unsloth_today, ours, must_reach, met}: texts, and met True, False or None (no verdict).

    result: the content of a benchmark result file, or its `data`.
    """
    data = result.get("data", result)
    rows = [*_protocol(data), *_host(data), *_shares(data), *_gpu(data)]
    return [*rows, *_sass(data), _compiles(data), *_cold(data)]


def table(result: dict) -> list[list[str]]:
    """The targets of a result as a table for `helpers.record.tables`: rows of texts, the header first."""
    met = {True: "yes", False: "no", None: NOT_MEASURED}
    columns = ("name", "unsloth_today", "ours", "must_reach")
    return [list(HEADER), *([*(row[key] for key in columns), met[row["met"]]] for row in targets(result))]
