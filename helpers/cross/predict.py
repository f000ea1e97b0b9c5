"""Predict the official protocol on a T4: simulated kernels plus launch overhead from a published T4 run.

Nothing was measured on a T4. Inputs are rows beside the prediction, in results/tesla-t4-simulated/, where
inputs.json names the source of each. Shares of launch overhead are of an H200 at 8a9dd5e.
"""

import statistics
from itertools import product

from helpers.results import store
from helpers.results.store import Row, one

CARD = "tesla-t4-simulated"
CALLS = 9000  # of the official protocol: 1000 rounds, 3 layers, 3 weights
# Of its three weight sizes, each called 3000 times: (size simulated, factor to the size called).
LARGE = 58720256 / 16777216
SIZES = {
    "": (("4194304 bf16", 1.0), ("16777216 fp16", 1.0), ("16777216 bf16", LARGE)),
    # With this calibration Unsloth's large kernel was simulated in bf16 alone.
    ", turnaround": (("4194304 bf16", 1.0), ("16777216 bf16", 1.0), ("16777216 bf16", LARGE)),
}
SHARES = "launch overhead, kernel[grid] = 1"
POINTS = {1.05: 1, 1.10: 2, 1.15: 2}  # the puzzle's lines for the speedup; everything else gives 9


def kernel_seconds(rows: list[Row], who: str, model: str = "") -> float:
    """Return the simulated seconds of the protocol's kernels."""
    us = [
        one(rows, "simulated", f"{size} at 1590 MHz{model}", who).median * more for size, more in SIZES[model]
    ]
    return statistics.mean(us) * CALLS * 1e-6


def predict(rows: list[Row]) -> list[Row]:
    """Return the rows of section t4_prediction, values low and high.

    rows: the inputs. A share is a contender's overhead over that of this kernel launched by kernel[grid], by
    the time until a call returns, and by the official protocol less the kernels' time; "public_launcher" is
    this kernel, replayed as under Triton 3.7, by Triton's Python launcher.

    Published kernels are slower than simulated ones: either a T4's memory is, and with it every kernel, or
    those kernels are. Every combination of this, the model's calibration, and the way that overhead was
    measured is one possible T4; a range spans them all.
    """
    published = one(rows, "t4_inputs", "published kernels over simulated ones").values
    newer = one(rows, "t4_inputs", "Unsloth's kernel with Triton 3.7").values
    classic = one(rows, "t4_inputs", "kernels of the protocol, s", "unsloth_classic").median
    total = one(rows, "published", "rushilbhat/unsloth-puzzles, 2025-03", "solution").median
    limit = kernel_seconds(rows, "copy_kernel")
    shares = {row.contender: row.values for row in store.select(rows, "t4_inputs", SHARES)}
    found: dict = {}

    def add(case, who, unit, value):
        found.setdefault((case, who, unit), []).append(value)

    for slower, memory, model, way in product(published, (True, False), SIZES, (0, 1)):
        ordinary = total - limit * slower  # what that solution's launches took
        dram = slower if memory else 1.0
        kernels = {who: kernel_seconds(rows, who, model) * dram for who in ("ours", "unsloth_today")}
        kernels["unsloth_classic"] = classic * dram
        calls = {who: ordinary * share[way] for who, share in shares.items()}
        ours = kernels["ours"] + calls["ours"]
        for who in kernels:
            theirs = kernels[who] + calls[who]
            add("kernels", who, "s", kernels[who])
            add("calls", who, "s", calls[who])
            add("total", who, "s", theirs)
            if who != "ours":
                add("speedup, Triton 3.6", who, "x", theirs / ours)
        for faster in newer:
            with_newer = kernels["unsloth_today"] * faster + calls["unsloth_today"]
            ours_newer = kernels["ours"] + calls["public_launcher"]
            add("speedup, Triton 3.7", "unsloth_today", "x", with_newer / ours_newer)
    for (case, who, unit), values in list(found.items()):
        found[case, who, unit] = ends = (min(values), max(values))
        if unit == "x":
            found[case.replace("speedup", "points"), who, "points"] = tuple(map(points, ends))
    return [Row("t4_prediction", *key, values) for key, values in found.items()]


def points(speedup: float) -> int:
    """Return the puzzle's points: 9 for everything else, and those of each line reached."""
    return 9 + sum(more for line, more in POINTS.items() if speedup >= line)


def write() -> None:
    """Store the prediction under results/tesla-t4-simulated/."""
    at = store.meta(CARD)["sections"]["simulated"]
    store.write("t4_prediction", predict(store.rows(CARD)), CARD, at["note"], at)


if __name__ == "__main__":
    write()
