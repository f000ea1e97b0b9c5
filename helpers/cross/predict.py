"""Predict the official protocol on a T4: simulated kernels plus launch overhead from a published T4 run.

Nothing was measured on a T4. results/tesla-t4-simulated/inputs.json holds every input with its source; they
are stored as rows beside the prediction. Shares of launch overhead are stored rows of an H200 at 8a9dd5e.
"""

import json
import statistics
from itertools import product

from helpers.results import store
from helpers.results.store import Row, one

CARD = "tesla-t4-simulated"
INPUTS = store.ROOT / "results" / CARD / "inputs.json"
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


def input_rows(inputs: dict) -> list[Row]:
    """Return the inputs as rows of the sections simulated, published, and t4_inputs."""
    rows = []
    for run in inputs["runs"]:
        model = "" if run["calibration"] == "burst" else ", turnaround"
        case = f"{run['elements']} {run['dtype']} at {run['mhz']} MHz{model}"
        rows.append(Row("simulated", case, run["contender"], "us", run["steady_us"]))
    for run in inputs["published"]:
        rows += [Row("published", run["source"], who, "s", run[who]) for who in run["contenders"]]
    for fact in inputs["facts"]:
        rows.append(Row("t4_inputs", fact["what"], fact["contender"], fact["unit"], fact["values"]))
    return rows


def overhead_shares() -> dict[str, tuple[float, float]]:
    """Return {contender: its overhead over that of this kernel launched by kernel[grid]}, measured two ways
    with an H200: the time until a call returns, and the official protocol less the kernels' time.

    "public_launcher" is this kernel, replayed as under Triton 3.7, by Triton's Python launcher.
    """
    return {row.contender: row.values for row in store.select(store.rows(CARD), "t4_inputs", SHARES)}


def kernel_seconds(rows: list[Row], who: str, model: str = "") -> float:
    """Return the simulated seconds of the protocol's kernels."""
    us = [
        one(rows, "simulated", f"{size} at 1590 MHz{model}", who).median * more for size, more in SIZES[model]
    ]
    return statistics.mean(us) * CALLS * 1e-6


def predict(rows: list[Row], shares: dict) -> list[Row]:
    """Return the rows of section t4_prediction, values low and high.

    rows: of `input_rows`; shares: of `overhead_shares`. Published kernels are slower than simulated ones:
    either a T4's memory is, and with it every kernel, or those kernels are. Every combination of this, the
    model's calibration, and the way that overhead was measured is one possible T4; a range spans them all.
    """
    published = one(rows, "t4_inputs", "published kernels over simulated ones").values
    newer = one(rows, "t4_inputs", "Unsloth's kernel with Triton 3.7").values
    classic = one(rows, "t4_inputs", "kernels of the protocol, s", "unsloth_classic").median
    total = one(rows, "published", "rushilbhat/unsloth-puzzles, 2025-03", "solution").median
    limit = kernel_seconds(rows, "copy_kernel")
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
    """Store the inputs and the prediction under results/tesla-t4-simulated/."""
    inputs = json.loads(INPUTS.read_text(encoding="utf-8"))
    rows, shares = input_rows(inputs), overhead_shares()
    here = {"card": "Tesla T4 (simulated)", "date": inputs["date"], "versions": inputs["versions"]}
    here |= {"kernel": inputs["kernel"]["kernel"], "commit": None}  # that was simulated
    nobody = here | {"kernel": None, "versions": {}}
    simulated = f"{inputs['simulator']}; nothing was measured on a T4"
    for who, pair in shares.items():
        rows.append(Row("t4_inputs", SHARES, who, "x", pair))
    for section in ("simulated", "t4_inputs"):
        store.write(section, store.select(rows, section), CARD, simulated, here)
    store.write("published", store.select(rows, "published"), CARD, "by others, on a T4 in Colab", nobody)
    store.write("t4_prediction", predict(rows, shares), CARD, simulated, here)


if __name__ == "__main__":
    write()
