"""How long "Run all" takes on a T4 Colab, and how much of its 15 GB: each line with its assumption."""

from helpers.t4 import cards
from helpers.t4.forecast import host_ratios

# A T4 Colab has two slow cores: its Python takes this many times a server's (published rule of thumb).
COLAB_HOST = (2.0, 3.0)
# In tests/machine/colab_rehearsal.sh, with Colab's packages on two slow cores: bitsandbytes 9 s, Unsloth 23 s more.
# Colab: one to three times that, assumed.
SETUP_S = (32.0, 96.0)
# TFLOP/s of matrix products on a T4, assumed: fp16 on tensor cores (65 peak), bf16 without them (8.1 peak).
GEMM_TFLOPS = {"float16": (20.0, 40.0), "bfloat16": (2.0, 8.0)}
INIT_ELEMENTS_S = (40e6, 100e6)  # assumed: layers initialized on the CPU and quantized, a second
PASSES = 4  # forward passes of the checks before the clock: two warm-ups, each the MLP and its copy
CONTEXT_GB = (0.6, 1.2)  # assumed: CUDA context, cuBLAS workspaces, loaded libraries
T4_GB = 15.0
T4_L2 = 4 << 20  # bytes of L2 cache: Jia et al., Dissecting the NVidia Turing T4 GPU
ALLOWED_S = 300.0


def estimate_run_all(results: dict | None = None, repeats: int = 1) -> dict:
    """How long "Run all" takes on a T4 Colab and what memory: a range a line, each with its assumption.

    results: {name: data} of stored result files; read are "benchmark" and "notebook" (as helpers.submission.execute
    stores the seconds of its cells). repeats: how often the notebook runs the protocol. A line without its
    data has low_s None and counts nothing; `missing` says what it needs. `fits` is True or False where both
    ends say so, None where only one does or a line is missing. Seconds, and 1e9 bytes a GB.
    """
    results = results or {}
    benchmark = results.get("benchmark")
    lines = [_seconds("set-up", *SETUP_S, "rehearsed with Colab's packages, 32 s; times 1 to 3, assumed")]
    lines += _protocol_seconds(benchmark, repeats)
    lines += _check_seconds()
    lines.append(_sweep_seconds())
    cold = (benchmark or {}).get("cold", {}).get("kernel", {}).get("empty", {}).get("median", {})
    lines.append(
        _scaled("first compile of the kernel", cold.get("first_call"), "benchmark.json, section cold")
    )
    cells = (results.get("notebook") or {}).get("cells")
    elsewhere = ("protocol", "setup", "not_on_a_t4")
    other = sum(c["seconds"] for c in cells if not any(map(c.get, elsewhere))) if cells else None
    lines.append(_scaled("all other cells", other, "notebook.json"))
    found = [line for line in lines if line["low_s"] is not None]
    missing = [line["needs"] for line in lines if line["low_s"] is None]
    low, high = (sum(line[end] for line in found) for end in ("low_s", "high_s"))
    context, sweep, *memory = _memory_lines()
    peak = tuple(
        context[end] + max(sweep[end], sum(line[end] for line in memory)) for end in ("low_gb", "high_gb")
    )
    return {
        "lines": lines,
        "repeats": repeats,
        "total_s": (low, high),
        "middle_s": (low + high) / 2,
        "fits": False if low > ALLOWED_S else True if high <= ALLOWED_S and not missing else None,
        "missing": missing,
        "memory": [context, sweep, *memory],
        "peak_gb": peak,
        "fits_15_gb": peak[1] < T4_GB,
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
    kernels = cards.official_total(lambda n, dtype: cards.predict(cards.T4, n, cards.dram_bytes(n), {}))
    fused = "predicted: bytes at the DRAM rate, published cost of a call"
    lines = []
    for what, ratios in (("ours", list(host_ratios(benchmark).values()) or [1.0]), ("Unsloth today", [1.0])):
        ends = [kernel + call for kernel, call in zip(kernels, cards.call_cost(ratios), strict=True)]
        lines.append(_seconds(f"protocol, {what}", *(repeats * end for end in ends), fused))
    classic = cards.PUBLISHED_TOTALS["Unsloth classic"]
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


def _check_seconds() -> list[dict]:
    """What the protocol does before its clock starts, once however often it repeats: making the layers, and
    five contestants' forward passes."""
    low = high = 0.0
    for config in _configs():
        flop = 2 * 3 * config.batch * config.seq * config.hidden * config.intermediate * PASSES * 5
        slow, fast = GEMM_TFLOPS[str(config.dtype).removeprefix("torch.")]
        low, high = low + flop / fast / 1e12, high + flop / slow / 1e12
    made = 3 * sum(elements for elements, *_ in cards.OFFICIAL)
    slow, fast = INIT_ELEMENTS_S
    rates = ", ".join(f"{dtype} {a:g} to {b:g}" for dtype, (a, b) in GEMM_TFLOPS.items())
    return [
        _seconds("protocol, checks", low, high, f"assumed TFLOP/s on a T4: {rates}"),
        _seconds(
            "protocol, making the layers", made / fast, made / slow, "assumed: 40 to 100 M elements a second"
        ),
    ]


def _sweep_seconds() -> dict:
    """What the sweep over sizes costs on a T4's own clock, beside its share of the host's time.

    Every contender and every ceiling replays a graph over rotated buffers, and before it runs uncaptured.
    """
    from helpers.measure import ceilings, gpu_time  # imports triton

    ceilings = 2 + sum(len(ceilings.variants(kind, quick=True)) for kind in ("cuda", "triton"))
    graphs = len(gpu_time.DEQUANTIZERS) + ceilings
    replays = 2 * gpu_time.ROUNDS[1] + 2
    moved = sum(_buffers(n) * ceilings.bytes_moved(n) for n in gpu_time.QUICK_SIZES)
    nbytes = len(gpu_time.DTYPES) * graphs * replays * moved
    slow, fast = (rate.value for rate in cards.T4.dram_gb_s)
    text = f"its {nbytes / 1e12:.1f} TB at the DRAM rate, {slow:g} to {fast:g} GB/s"
    return _seconds("sweep over sizes, GPU", nbytes / fast / 1e9, nbytes / slow / 1e9, text)


def _buffers(n: int) -> int:
    """How many sets of buffers the sweep takes turns with on a T4."""
    from helpers.measure import workload

    return workload.rotation(n, nbytes=workload.quick_bytes(T4_L2))


def _configs():
    from helpers.submission import harness  # imports torch

    return harness.OFFICIAL


def _memory_lines() -> list[dict]:
    """Gigabytes of the CUDA context, of the sweep over sizes, and of what the largest configuration holds.

    The sweep and the protocol do not run at the same time; the rest of the notebook is smaller."""
    from helpers.measure import ceilings, gpu_time  # imports triton

    largest = max(gpu_time.QUICK_SIZES)
    # Buffers with outputs, a second set of outputs in the graphs' pool, two results in the checks.
    sweep = _buffers(largest) * (ceilings.bytes_moved(largest) + 2 * largest) / 1e9
    config = max(_configs(), key=lambda c: c.hidden * c.intermediate)
    weight, tokens = config.hidden * config.intermediate, config.batch * config.seq
    packed = 3 * weight * (0.5 + 1 / 64 + 4 / 16384) / 1e9
    activations = (2 * tokens * config.hidden + 3 * tokens * config.intermediate) * 2 / 1e9
    return [
        {"what": "CUDA context", "low_gb": CONTEXT_GB[0], "high_gb": CONTEXT_GB[1], "assumption": "assumed"},
        {
            "what": "sweep over sizes",
            "low_gb": sweep,
            "high_gb": sweep + 8 * largest / 1e9,
            "assumption": f"two sets of buffers of {largest / 1e6:.0f}M elements",
        },
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
    times = "once" if found["repeats"] == 1 else f"{found['repeats']} times"
    lines = [
        f'"Run all" on a T4 Colab, seconds, estimated, not measured there (protocol {times}, 1000 rounds)'
    ]
    for line in found["lines"]:
        ends = "not measured" if line["low_s"] is None else f"{line['low_s']:.1f} to {line['high_s']:.1f}"
        reason = f"needs {line['needs']}" if line["needs"] else line["assumption"]
        lines.append(f"  {line['what']:29}{ends:>14}  {reason}")
    low, high = found["total_s"]
    rest = f"; lines not measured: {len(found['missing'])}" if found["missing"] else ""
    middle = f"{ALLOWED_S:.0f} allowed; the middle is {found['middle_s']:.0f}{rest}"
    lines.append(f"  {'in all':29}{f'{low:.0f} to {high:.0f}':>14}  {middle}")
    verdict = {
        True: "Fits, at the upper end too.",
        False: f"Does not fit: the lower end is above {ALLOWED_S:.0f} s.",
        None: f"Not certain: the upper end is above {ALLOWED_S:.0f} s.",
    }[found["fits"]]
    if found["fits"] is None and high <= ALLOWED_S:
        verdict = "Not certain: not every line was measured."
    lines.append(f"  {verdict}")
    low, high = found["peak_gb"]
    lines.append(f"  {'peak memory, GB':29}{f'{low:.1f} to {high:.1f}':>14}  of {T4_GB:.0f}")
    return "\n".join(lines)
