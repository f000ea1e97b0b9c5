"""How long "Run all" takes on a T4 Colab, and how much of its 15 GB: each line with its assumption."""

from helpers import turing
from helpers.forecast import host_ratios

# A T4 Colab has two slow cores: its Python takes this many times a server's (published rule of thumb).
COLAB_HOST = (2.0, 3.0)
SETUP_S = (60.0, 150.0)  # assumed: download and install of bitsandbytes, Unsloth and what they need
# TFLOP/s of matrix products on a T4, assumed: fp16 on tensor cores (65 peak), bf16 without them (8.1 peak).
GEMM_TFLOPS = {"float16": (20.0, 40.0), "bfloat16": (2.0, 8.0)}
INIT_ELEMENTS_S = (40e6, 100e6)  # assumed: layers initialized on the CPU and quantized, a second
PASSES = 4  # forward passes of the checks before the clock: two warm-ups, each the MLP and its copy
CONTEXT_GB = (0.6, 1.2)  # assumed: CUDA context, cuBLAS workspaces, loaded libraries
T4_GB = 15.0


def estimate_run_all(results: dict | None = None, repeats: int = 1) -> dict:
    """How long "Run all" takes on a T4 Colab and what memory: a range a line, each with its assumption.

    results: {name: data} of stored result files; read are "benchmark" and "notebook" ({"cells": [{"title",
    "seconds", "protocol": bool}]}). repeats: how often the notebook runs the protocol. A line without its
    data has low_s None and counts nothing; `missing` says what it needs. Seconds, and 1e9 bytes a GB.
    """
    results = results or {}
    benchmark = results.get("benchmark")
    lines = [_seconds("set-up", *SETUP_S, "assumed: packages over Colab's network")]
    lines += _protocol_seconds(benchmark, repeats)
    lines += _check_seconds(repeats)
    cold = (benchmark or {}).get("cold", {}).get("kernel", {}).get("empty", {}).get("median", {})
    lines.append(
        _scaled("first compile of the kernel", cold.get("first_call"), "benchmark.json, section cold")
    )
    cells = (results.get("notebook") or {}).get("cells")
    other = sum(cell["seconds"] for cell in cells if not cell.get("protocol")) if cells else None
    lines.append(_scaled("all cells but the protocol", other, "notebook.json, seconds a cell"))
    found = [line for line in lines if line["low_s"] is not None]
    memory = _memory_lines()
    total = tuple(sum(line[end] for line in memory) for end in ("low_gb", "high_gb"))
    return {
        "lines": lines,
        "total_s": (sum(line["low_s"] for line in found), sum(line["high_s"] for line in found)),
        "missing": [line["needs"] for line in lines if line["low_s"] is None],
        "memory": memory,
        "peak_gb": total,
        "fits_15_gb": total[1] < T4_GB,
    }


def _seconds(what, low, high, assumption, needs="") -> dict:
    return {"what": what, "low_s": low, "high_s": high, "assumption": assumption, "needs": needs}


def _scaled(what, seconds, needs) -> dict:
    """A time measured on the H200's host, times what Colab's slower cores make of it."""
    low, high = COLAB_HOST
    if seconds is None:
        return _seconds(what, None, None, "not measured", f"results/nvidia-h200/{needs}")
    text = f"measured on the H200's host, times {low:g} to {high:g} for Colab's cores"
    return _seconds(what, low * seconds, high * seconds, text)


def _protocol_seconds(benchmark, repeats) -> list[dict]:
    """The timed rounds of every contestant."""
    kernels = turing.official_total(lambda n, dtype: turing.predict(turing.T4, n, turing.dram_bytes(n), {}))
    fused = "predicted: bytes at the DRAM rate, published cost of a call"
    lines = []
    for what, ratios in (("ours", list(host_ratios(benchmark).values()) or [1.0]), ("Unsloth today", [1.0])):
        ends = [kernel + call for kernel, call in zip(kernels, turing.call_cost(ratios), strict=True)]
        lines.append(_seconds(f"protocol, {what}", *(repeats * end for end in ends), fused))
    classic = turing.PUBLISHED_TOTALS["Unsloth classic"]
    ends = [repeats * end for end in classic]
    lines.append(_seconds("protocol, Unsloth classic", *ends, "published totals on a T4"))
    entries = (benchmark or {}).get("protocol", {}).get("entries", {})
    reference = (entries.get("unsloth_classic", {}).get("spread") or {}).get("p50")
    for name in ("bitsandbytes", "peft"):
        own = (entries.get(name, {}).get("spread") or {}).get("p50")
        if own and reference:
            text = f"published total of classic times {own / reference:.2f}, measured on the H200"
            ends = [repeats * end * own / reference for end in classic]
            lines.append(_seconds(f"protocol, {name}", *ends, text))
        else:
            needs = "results/nvidia-h200/benchmark.json, section protocol"
            lines.append(_seconds(f"protocol, {name}", None, None, "not measured", needs))
    return lines


def _check_seconds(repeats) -> list[dict]:
    """What the protocol does before its clock starts: five contestants' forward passes, making the layers."""
    low = high = 0.0
    for config in _configs():
        flop = 2 * 3 * config.batch * config.seq * config.hidden * config.intermediate * PASSES * 5
        slow, fast = GEMM_TFLOPS[str(config.dtype).removeprefix("torch.")]
        low, high = low + flop / fast / 1e12, high + flop / slow / 1e12
    made = 3 * sum(elements for elements, *_ in turing.OFFICIAL)
    slow, fast = INIT_ELEMENTS_S
    rates = ", ".join(f"{dtype} {a:g} to {b:g}" for dtype, (a, b) in GEMM_TFLOPS.items())
    return [
        _seconds("protocol, checks", repeats * low, repeats * high, f"assumed TFLOP/s on a T4: {rates}"),
        _seconds(
            "protocol, making the layers", made / fast, made / slow, "assumed: 40 to 100 M elements a second"
        ),
    ]


def _configs():
    from helpers import harness  # imports torch

    return harness.OFFICIAL


def _memory_lines() -> list[dict]:
    """Gigabytes at the peak of the largest configuration; the rest of the notebook is smaller."""
    config = max(_configs(), key=lambda c: c.hidden * c.intermediate)
    weight, tokens = config.hidden * config.intermediate, config.batch * config.seq
    packed = 3 * weight * (0.5 + 1 / 64 + 4 / 16384) / 1e9
    activations = (2 * tokens * config.hidden + 3 * tokens * config.intermediate) * 2 / 1e9
    return [
        {"what": "CUDA context", "low_gb": CONTEXT_GB[0], "high_gb": CONTEXT_GB[1], "assumption": "assumed"},
        {
            "what": "packed weights",
            "low_gb": packed,
            "high_gb": packed,
            "assumption": "three layers, NF4 nested",
        },
        {
            "what": "input and activations",
            "low_gb": activations,
            "high_gb": 2 * activations,
            "assumption": "the MLP once, or twice while both results are compared",
        },
        {
            "what": "dequantized weights",
            "low_gb": 2 * weight * 2 / 1e9,
            "high_gb": 4 * weight * 2 / 1e9,
            "assumption": "2 to 4 alive at once, 2 bytes an element",
        },
        {
            "what": "one layer before it is quantized",
            "low_gb": weight * 4 / 1e9,
            "high_gb": weight * 8 / 1e9,
            "assumption": "fp32, and a copy of it at worst",
        },
    ]


def render_estimate(found: dict) -> str:
    """The estimate as a table, a line each."""
    lines = ['"Run all" on a T4 Colab, seconds (estimated, not measured there)']
    for line in found["lines"]:
        ends = "not measured" if line["low_s"] is None else f"{line['low_s']:.1f} to {line['high_s']:.1f}"
        reason = f"needs {line['needs']}" if line["needs"] else line["assumption"]
        lines.append(f"  {line['what']:29}{ends:>14}  {reason}")
    low, high = found["total_s"]
    rest = f", without {len(found['missing'])} lines that were not measured" if found["missing"] else ""
    lines.append(f"  {'in all':29}{f'{low:.0f} to {high:.0f}':>14}  of 300 allowed{rest}")
    low, high = found["peak_gb"]
    lines.append(f"  {'peak memory, GB':29}{f'{low:.1f} to {high:.1f}':>14}  of {T4_GB:.0f}")
    return "\n".join(lines)
