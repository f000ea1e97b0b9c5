"""What a T4 would take: GPU time and the official protocol predicted, and the same model's error elsewhere.

Published figures are other people's, measured ones come from this project's stored runs, predicted ones from
`helpers.t4.cards`; nothing here was measured on a T4.
"""

import json

from helpers.machine import environment
from helpers.t4 import cards

STORED = "benchmark"  # result file of `python -m helpers bench`
DTYPES = ("float16", "bfloat16")
LARGE = 2**22  # elements from which on a kernel outweighs its first and last wave


def find(rows: list, who: str, dtype: str, label: str = ""):
    """The nested (or only) row of a contender; None when absent or not compiled."""
    matching = [r for r in rows if r.who == who and r.dtype == dtype and r.counted and label in r.label]
    return next((r for r in matching if r.nested), matching[0] if matching else None)


def contenders(rows: list) -> dict[str, str]:
    """{key: label} of those whose time on a card can be predicted from `rows`."""
    labels = {
        "kernel": "ours",
        "unsloth_default": "Unsloth today, Triton < 3.7",
        "unsloth_t4": "Unsloth today, Triton >= 3.7",
        "unsloth_classic": "Unsloth classic, 3 launches",
    }
    needs = {
        "kernel": [find(rows, "ours", dtype) for dtype in DTYPES],
        "unsloth_default": [find(rows, "unsloth default", dtype) for dtype in DTYPES],
        "unsloth_t4": [find(rows, "unsloth T4 table", dtype) for dtype in DTYPES],
        "unsloth_classic": [find(rows, "bitsandbytes", dtype, "weight") for dtype in DTYPES]
        + [find(rows, "bitsandbytes", "float32", "absmax")],
    }
    return {key: label for key, label in labels.items() if None not in needs[key]}


def predict(rows, card, key: str, elements: int, dtype: str, gb_s: float | None = None) -> cards.Prediction:
    """One call's GPU time on `card`: of classic's three launches the sum."""
    who = {"kernel": "ours", "unsloth_default": "unsloth default", "unsloth_t4": "unsloth T4 table"}
    if key in who:
        counts = find(rows, who[key], dtype).counted.per_element()
        return cards.predict(card, elements, cards.dram_bytes(elements), counts, gb_s)
    decode, weight = (
        find(rows, "bitsandbytes", "float32", "absmax"),
        find(rows, "bitsandbytes", dtype, "weight"),
    )
    counts = {
        cards.CLASSIC_LABELS[0]: decode.counted.per_element(),
        cards.CLASSIC_LABELS[1]: {},  # one addition a scale: its bytes decide
        cards.CLASSIC_LABELS[2]: weight.counted.per_element(),
    }
    parts = [
        cards.predict(card, size, nbytes, counts[what], gb_s)
        for what, size, nbytes in cards.classic_kernels(elements)
    ]
    return cards.Prediction(
        sum(p.low for p in parts),
        sum(p.high for p in parts),
        parts[-1].bound_low,
        parts[-1].bound_high,
        parts[-1].pipes,
    )


def stored_run() -> tuple[dict | None, str]:
    """(data of the benchmark stored for the H200, where it lies); data is None when there is none."""
    path = environment.ROOT / "results" / "nvidia-h200" / f"{STORED}.json"
    where = path.relative_to(environment.ROOT).as_posix()
    return (json.loads(path.read_text())["data"], where) if path.exists() else (None, where)


def bandwidth(data: dict | None) -> tuple[float, str] | None:
    """(GB/s, what moved them) of the no-arithmetic kernel at a stored run's largest size; None without."""
    cases = (data or {}).get("gpu", {}).get("sizes", [])
    found = [
        (case["numel"], case["rows"][name]["gb_s"], name)
        for case in cases
        for name in ("floor_cuda", "floor_triton")
        if name in case.get("rows", {})
    ]
    if not found:
        return None
    largest = max(numel for numel, *_ in found)
    gb_s, name = max((gb_s, name) for numel, gb_s, name in found if numel == largest)
    return gb_s, f"{name} at {largest / 1e6:.0f}M elements"


def model_errors(rows: list, data: dict | None, card=cards.H200) -> list[dict]:
    """Predicted against measured GPU time of each contender and size that the stored run has."""
    found = bandwidth(data)
    if not found:
        return []
    keys = {"kernel": "kernel", "unsloth_default": "unsloth_today", "unsloth_classic": "unsloth_classic"}
    known, errors = contenders(rows), []
    for key, name in keys.items():
        for case in data["gpu"]["sizes"]:
            row = case.get("rows", {}).get(name)
            if key not in known or row is None or case["dtype"] not in DTYPES:
                continue
            predicted = predict(rows, card, key, case["numel"], case["dtype"], found[0])
            errors.append(
                {
                    "contender": key,
                    "elements": case["numel"],
                    "dtype": case["dtype"],
                    "predicted_us": predicted.high,
                    "bound_by": predicted.bound_high,
                    "measured_us": row["p50"],
                    "error": predicted.high / row["p50"] - 1,
                }
            )
    return errors


def host_ratios(data: dict | None) -> dict[str, float]:
    """Our host time a call over Unsloth today's in a stored run, returned and synchronized; {} without."""
    ratios = {}
    for case in (data or {}).get("host", {}).get("cases", []):
        for what in ("returned", "synchronized"):
            found = case.get(what, {})
            if case["shape"] == [1024, 4096] and {"kernel", "unsloth_today"} <= set(found):
                ratios[what] = found["kernel"]["p50"] / found["unsloth_today"]["p50"]
    return ratios


def official(rows: list, data: dict | None, card=cards.T4) -> dict:
    """Predicted seconds of the official protocol on `card`: kernels and calls, each a (low, high) range.

    Of classic the published total is given instead of a prediction.
    """
    ratios = host_ratios(data)
    totals = {}
    for key, label in contenders(rows).items():
        kernels = cards.official_total(lambda n, dtype, key=key: predict(rows, card, key, n, dtype))
        published = cards.PUBLISHED_TOTALS["Unsloth classic"] if key == "unsloth_classic" else None
        scale = list(ratios.values()) if key == "kernel" else [1.0]
        calls = cards.call_cost(scale) if scale and not published else None
        totals[key] = {
            "label": label,
            "kernels_s": kernels,
            "calls_s": calls,
            "total_s": (kernels[0] + calls[0], kernels[1] + calls[1]) if calls else None,
            "published_s": published,
        }
    return {"contenders": totals, "host_ratios": ratios, "where": stored_run()[1]}
