"""What README, docs and the notebook show of stored results: one function a block of markdown.

They quote complete runs of one card, `names.CARD`; of others there may be less.
"""

import math
from collections.abc import Callable

from helpers import machine
from helpers.bench.compiled import DECODED, LAUNCHES, NO_ASSERTS, NO_BODY, NO_GUARDS, PRODUCTS
from helpers.results import goals, hashes, names, tables
from helpers.results.old_store import EARLIER, caption, find, ratio, stale
from helpers.results import plots
from helpers.puzzle import marking
from helpers.puzzle.repository import NOTEBOOK_NAME, REPO_URL
from helpers.t4 import sass, simulated
from helpers.training import several_gpus, train_bench

RESULTS = machine.ROOT / "results"
# What is changed in the stored ablation, and why the kernel decides otherwise.
REASONS = {
    "portable path (general, no assembly)": "finished results in 16 lanes: one shuffle per code",
    "code2 not staged in shared memory": "code2 is fetched beside absmax: one memory latency instead of two",
    "2 words per thread": "8 words per thread: their loads are under way before the first is used",
    "4 words per thread": "... and 16M elements fit the card in one wave of programs",
    "no cache hints": "results are written to leave the cache first",
    "no hints on loads": "up to 8M elements, what is read once leaves the cache first",
    "hints on loads": "above 8M elements they cost more than they save",
    "any number of programs per SM": "beyond one wave, fewer programs at a time: fewer streams in memory",
    "bf16 rounded in integers": "what a T4 needs costs little where hardware converts",
}
BASELINES = ("unsloth_today", "unsloth_classic")


def stored(name: str, card: str = names.CARD):
    """A card's stored result of that name, or None."""
    return find(name, RESULTS / card, marking.Score if name == "score" else None)


def with_caption(result, table: tables.Table, what: str = "call") -> str:
    return f"{tables.markdown(table)}\n\n*{caption(result, what)}*"


def block(name: str, table: Callable, what: str = "call") -> Callable:
    """The block that shows the table of a stored result's data."""

    def drawn() -> str:
        result = stored(name)
        rows = table(result.data)
        return with_caption(result, rows, what) if rows[1:] else "Not measured in the stored run."

    return drawn


def badge() -> str:
    """The link to Colab, once there is an address: a badge that leads nowhere is worse than none."""
    if not REPO_URL:
        return ""
    link = f"https://colab.research.google.com/github/{REPO_URL.removeprefix('https://github.com/')}"
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    return f"[![Open In Colab]({image})]({link}/blob/main/{NOTEBOOK_NAME})"


def claim() -> str:
    """The score in one sentence: card, both baselines, and what is known of a T4."""
    result, timed = stored("score"), stored("protocol").data
    ours, score = next(iter(timed.entries)), result.data
    today, classic = (timed.speedup(ours, name) for name in BASELINES)
    return (
        f"**{min(score.totals.values())} of {score.maximum} points on an {result.environment.gpu}: the "
        f"official protocol runs {today:.2f} times as fast as Unsloth's `fast_dequantize` of today and "
        f"{classic:.2f} times as fast as its classic path, the puzzle's own baseline; {t4_in_words()}.**\n\n"
        f"*Stored run: {caption(result)}.*"
    )


def _predicted():
    """Of a T4: (the simulator, seconds by contender, how many times as fast as each baseline)."""
    result, shares = simulated.stored(RESULTS)
    ratios = (simulated.ratio(result.data, shares, name) for name in BASELINES)
    over = [f"{low:.2f} to {high:.2f}" for low, _, high in ratios]
    return result.data.simulator, simulated.totals(result.data, shares), over


def t4_in_words() -> str:
    """What is known of a T4, as the end of a sentence."""
    run = simulated.measured(RESULTS)
    if run and run.data.protocol:
        today, classic = (run.data.protocol.speedup("kernel", name) for name in BASELINES)
        return f"measured on a Tesla T4, {today:.2f} and {classic:.2f} times as fast"
    today, classic = _predicted()[2]
    return f"it has not run on a Tesla T4, where {today} and {classic} times as fast are predicted"


def t4_picture() -> plots.Picture:
    simulator, totals, _ = _predicted()
    source = f"kernels: {simulator}; calls: published for a T4 Colab, ours scaled"
    return plots.t4(totals, simulated.CLASSIC_TOTAL_S, source)


def score() -> str:
    """The marking table that the notebook's stored run computed."""
    result = stored("score")
    head, *lines, sums = result.data.rows()
    rows = [[cell.lower() for cell in head], *lines, ["sum", *sums[1:]]]
    return f"**{result.data.headline}**\n\n{with_caption(result, rows)}"


def saved(data, baseline: str) -> tuple[float, float] | None:
    """Microseconds saved over a baseline, summed over the official shapes, and the share of GPU time in them.
    None where a shape was not measured both ways."""
    sizes, whole, on_gpu = data.gpu_rows(), 0.0, 0.0
    for case in data.host.cases if data.host else []:
        rows = sizes.get((case.shape[0] * case.shape[1], case.dtype), {})
        if not {"kernel", baseline} <= rows.keys() & case.synchronized.keys():
            return None
        whole += case.synchronized[baseline].p50 - case.synchronized["kernel"].p50
        on_gpu += rows[baseline].p50 - rows["kernel"].p50
    return (whole, on_gpu / whole) if whole else None


def microseconds() -> str:
    """How much of the win is the kernel and how much is the call, in words."""
    result, lines = stored("benchmark"), []
    for name in BASELINES:
        us, on_gpu = saved(result.data, name)
        lines.append(
            f"over {names.label(name)} {us:.0f} us are saved, {on_gpu:.0%} of them "
            f"by the kernel on the GPU and {1 - on_gpu:.0%} by the call on the host"
        )
    return (
        "**How much is the kernel, how much the call?** One synchronized call of each of the protocol's "
        f"three shapes, added up: {'; '.join(lines)}. *{caption(result)}.*"
    )


def cards() -> str:
    """One row a card: the official protocol against both baselines, and what of the gain is the kernel's."""
    rows = [["official protocol", "this kernel, s", "times as fast as Unsloth today",
             "times as fast as Unsloth classic", "of the time saved over today: kernel, call"]]  # fmt: skip
    kept = (path for path in RESULTS.glob("*/*.json") if path.stem in ("benchmark", "protocol"))
    folders = {path.parent.name for path in kept}
    for card in sorted(folders, key=lambda name: (name != names.CARD, name)):
        bench, run = (stored(name, card) for name in ("benchmark", "protocol"))
        result, timed = run or bench, run.data if run else bench.data.protocol
        facts = result.environment
        if not timed or facts.forced:
            continue
        ours = next(iter(timed.entries))
        over = [f"{timed.speedup(ours, name):.2f}" for name in BASELINES]
        date = facts.date[:10] + (", quick run" if not run and bench.data.quick else "")
        date += f" ({EARLIER})" if stale(result) else ""
        gain = saved(bench.data, "unsloth_today") if bench else None
        parts = f"{gain[1]:.0%}, {1 - gain[1]:.0%}" if gain else "not measured"
        rows.append([f"{facts.gpu}, {date}", f"{timed.entries[ours].p50:.3f}", *over, parts])
    if names.T4 not in folders:
        _, totals, over = _predicted()
        ours, today = totals["kernel"], totals["unsloth_today"]
        part = (sum(today.kernels) - sum(ours.kernels)) / (sum(today.both) - sum(ours.both))
        name = "Tesla T4, predicted (kernels simulated, calls published), not measured"
        rows.append([name, str(ours.both), *over, f"{part:.0%}, {1 - part:.0%}"])
    return tables.markdown(rows)


def _host_steps(data) -> tables.Table:
    """Our call with one of its shortcuts taken away: microseconds until it returns."""
    steps = data.host.steps
    chosen = next(iter(steps.values())).p50
    rows = [["the call, without", "us until it returns", "over as it is"]]
    return rows + [[name, f"{t.p50:.2f}", f"{t.p50 / chosen:.2f}"] for name, t in steps.items()]


def _steps(data) -> tables.Table:
    """GPU time with one decision changed over the time as chosen, bf16, and why it is as it is."""
    cases = [case for case in data.ablation.cases if case.dtype == "bfloat16"]
    heads = [f"{names.size_text(case.numel)} elements" for case in cases]
    rows = [["changed", "why it is as it is", *heads]]
    for name, why in REASONS.items():
        times = [ratio(case.rows, name, "as chosen") for case in cases]
        if any(times):
            rows.append([name, why, *("-" if time is None else f"{time:.2f}" for time in times)])
    return rows


def compiled() -> str:
    """24 weights and products, eager and compiled; of ours, where the microseconds of a weight go."""
    text, found = block("benchmark", tables.compiled)(), stored("benchmark").data.compile
    if not found or not found.parts:
        return text

    def us(rows, name):
        return rows[name].p50 / found.weights if name in rows else math.nan

    one, taken = found.parts, (NO_GUARDS, NO_ASSERTS, NO_BODY, PRODUCTS)
    whole, *less = (us(one.compiled, name) for name in ("kernel", *taken))
    eager, launches, products = (us(one.eager, name) for name in ("kernel", LAUNCHES, DECODED))
    lines = {
        "Dynamo's guards": (whole - less[0],),
        "Inductor's asserts of sizes and strides": (less[0] - less[1],),
        "our call: checks, allocation, launch": (less[1] - less[2], eager - products, launches - products),
        "product": (less[3], products, products),
        "the rest: bytecode, wrappers, what is passed in": (less[2] - less[3],),
        "sum": (whole, eager, launches),
    }
    table = [[f"us a weight, forward, {one.tokens} tokens", "compiled", "eager", "only launches"]]
    for name, times in lines.items():
        cells = ["-" if math.isnan(time) else f"{time:.1f}" for time in times]
        table.append([name, *cells, *[""] * (3 - len(cells))])
    says = (
        f"Of the {whole - eager:.1f} us that compiling adds a weight, guards are {whole - less[0]:.1f} and "
        f"asserts {less[0] - less[1]:.1f}; a graph that does only launches would take {launches:.1f} us, "
        f"{whole - launches:.1f} less. Timed in turns of its own, after the table above, on a shared host: "
        "compare within it."
    )
    missing = "; ".join(f"{name}: {reason}" for name, reason in one.failures.items())
    return "\n\n".join([text, tables.markdown(table), f"Not measured: {missing}." if missing else says])


def speed() -> str:
    """What the picture of speed by size says, in a sentence."""
    sizes, texts = stored("benchmark").data.gpu_rows(), []
    for numel in names.TARGET_SIZES:
        ours, today = (min(ratio(sizes[numel, dtype], names.CEILING, name) for dtype in names.DTYPES)
                       for name in ("kernel", "unsloth_today"))  # fmt: skip
        texts.append(f"{names.size_text(numel)}: {ours:.2f} against {today:.2f}")
    return (
        "**Share of the byte-mover's speed, this kernel against Unsloth today**, the lower of fp16 and bf16: "
        f"{'; '.join(texts)}. Above 1: none of the byte-mover's launch choices was faster."
    )


def t4() -> str:
    """What is known of a T4's times, and how."""
    sentences = "\n".join(f"- {line}" for line in simulated.lines(RESULTS))
    return f"{tables.markdown(simulated.table(RESULTS))}\n\n{sentences}"


def t4_kernels() -> str:
    """Kernels alone on the simulated T4."""
    result, _ = simulated.stored(RESULTS)
    label = f"kernel {result.kernel.label}: {simulated.CAPTION}"
    return f"{tables.markdown(simulated.kernel_table(RESULTS))}\n\n*{result.data.simulator}; {label}*"


def machine_code() -> str:
    """Everyone's machine code for a T4, and this kernel's for the other generations."""
    result = sass.stored(RESULTS)
    table = with_caption(result, sass.table(result.data.code), "gpu")
    return f"{table}\n\n{sass.LEGEND}. {sass.verdict(result.data.code)}."


def forced() -> str:
    """What the whole notebook found with a T4's decisions forced on the card that README quotes."""
    result = stored("score", f"{names.CARD}-forced-t4")
    other = [line for line in result.data.lines if "peed" not in line.name]  # times are the card's own
    points, best = sum(line.points["today"] or 0 for line in other), sum(line.best for line in other)
    return (
        f"With a T4's decisions forced on an {result.environment.gpu} (integer rounding of bf16, its tile "
        f"and hints, no native bf16), the notebook gives {points} of the {best} points that do not depend on "
        f"speed. *{caption(result)}*"
    )


def estimate() -> str:
    """How long "Run all" takes on a T4 Colab."""
    rows = [[what, str(span), source] for what, span, source in simulated.run_all(RESULTS)]
    return tables.markdown([["Run all on a T4 Colab, not measured there", "seconds", "from"], *rows])


def goals_met() -> str:
    """How many of our goals the stored run meets, in a sentence."""
    verdicts = [goal.met for goal in goals.goals(stored("benchmark").data)]
    met, missed, unknown = (verdicts.count(verdict) for verdict in (True, False, None))
    return (
        f"Of our {len(verdicts)} speed goals the stored run meets {met}, misses {missed} and did not "
        f"measure {unknown}; [docs/benchmarks.md](docs/benchmarks.md#goals) has each."
    )


def limits() -> str:
    """What bounds the goals that depend on the host, a line each."""
    data = stored("benchmark").data
    calls = [case.synchronized for case in data.host.cases]
    sums = {name: sum(rows[name].p50 for rows in calls) for name in calls[0]}
    today, classic = (sums[name] / sums[names.ALLOCATE_FILL] for name in BASELINES)
    starts = data.cold.trivial, data.cold.kernel
    times = [each.median(state) for each in starts for state in ("empty", "warm")]
    return (
        "- Reference: allocating and filling the same outputs, with nothing decoded, takes 1/"
        f"{today:.2f} of the time of Unsloth today and 1/{classic:.2f} of classic on this host.\n"
        f"- First call: a Triton kernel that stores one number takes {times[0]:.2f} s with empty caches "
        f"and {times[1]:.2f} s with warm ones; this kernel {times[2]:.2f} and {times[3]:.2f} s."
    )


def other_cards() -> str:
    """The score of every other card, and its goals where its benchmark was run."""
    texts = []
    for path in sorted(RESULTS.glob("*/score.json")):
        marked, bench = (stored(name, path.parent.name) for name in ("score", "benchmark"))
        if path.parent.name != names.CARD and not marked.environment.forced:
            texts.append(f"**{marked.data.headline}**")
            missing = f"Goals: not measured on it.\n\n*{caption(marked)}*"
            texts.append(with_caption(bench, goals.table(bench.data)) if bench else missing)
    return "\n\n".join(texts)


def _training_short(data) -> tables.Table:
    """One row a number of tokens: a QLoRA step with the libraries' own code -> with the kernel."""
    cells = {
        (size.tokens, name): f"{size.without.ms.p50:.1f} -> {size.with_.ms.p50:.1f} ({size.speedup.p50:.2f})"
        for name, measured in data.libraries.items()
        for size in measured.sizes
    }
    libraries = [train_bench.LIBRARIES[name] for name in data.libraries]
    rows = [["one QLoRA step, ms, without -> with", *libraries]]
    for tokens in sorted({tokens for tokens, _ in cells}):
        times = (cells.get((tokens, name), "not measured") for name in data.libraries)
        rows.append([f"{tokens:,} tokens", *times])
    return rows


def libraries() -> str:
    """The layouts on which not everyone is exact; the others in a sentence."""
    result = stored("libraries")
    rows = [["layout", *(names.label(name) for name in result.data)]]
    layouts = list(next(iter(result.data.values())))
    for layout in layouts:
        outcomes = [by_layout[layout].outcome for by_layout in result.data.values()]
        if set(outcomes) != {"exact"}:
            rows.append([layout, *outcomes])
    odd = len(rows) - 1
    text = f"Of {len(layouts)} layouts, all are exact on {len(layouts) - odd}. The other {odd}:"
    return f"{text}\n\n{with_caption(result, rows)}"


def _suite(run) -> str:
    failed = ", ".join(f"`{test.rpartition('::')[2]}`" for test in run.failed)
    return f"{run.passed} passed, {run.skipped} skipped, {len(run.failed)} failed" + (
        failed and f" ({failed})"
    )


def _killed(data) -> str:
    return f"{data.caught} of {len(data.mutants)} caught"


# The long tests: what each tries, its command, the folder and name of its result, and what that says.
STRESS = (
    ("random layouts, sizes, values, settings", "fuzz", names.CARD, "fuzz",
     lambda d: f"{d.failed} of {d.cases:,} cases failed ({d.kinds} kinds, {d.elements:,} elements)"),
    ("time, memory and bits of long runs", "soak", names.CARD, "soak",
     lambda d: f"{d.launches:,} launches: {d.wrong} of {d.layers:,} layers wrong, grown: "
               f"{', '.join(d.grown) or 'nothing'}"),
    ("seeded bugs, without a GPU", "mutants", "cpu-interpreter", "mutants", _killed),
    ("seeded bugs, on the GPU", "mutants --gpu", names.CARD, "mutants_gpu", _killed),
    ("bitsandbytes' own 4-bit tests", "bitsandbytes-tests", names.CARD, "bitsandbytes_own",
     lambda d: f"as they are {_suite(d.original)}; on this kernel "
               f"({sum(d.substituted.launches.values()):,} launches) {_suite(d.substituted)}"),
)  # fmt: skip


def stress() -> str:
    """The latest run of each long test, with what it found."""
    rows = [["what", "command", "found", "stored run"]]
    for what, command, card, name, text in STRESS:
        result = stored(name, card)
        says = text(result.data) if result else "not measured"
        rows.append([what, f"`python -m helpers {command}`", says, caption(result).replace(" | ", ", ")])
    return tables.markdown(rows)


def logs() -> str:
    """What the GPU tests and compute-sanitizer printed where they ran, as it is."""
    texts = []
    for path in sorted(RESULTS.glob("*/*.txt")):
        text = path.read_text(encoding="utf-8").strip()
        earlier = "" if hashes.label() in text else f" ({EARLIER})"
        texts.append(f"`results/{path.parent.name}/{path.name}`{earlier}:\n\n```text\n{text}\n```")
    return "\n\n".join(texts) or "not measured"


WRITTEN = (
    badge, claim, score, cards, microseconds, compiled, speed, t4, t4_kernels, machine_code, forced, estimate,
    goals_met, limits, libraries, other_cards, stress, logs,
)  # fmt: skip
BLOCKS = {function.__name__: function for function in WRITTEN} | {
    "protocol": block("benchmark", tables.protocol),
    "host_steps": block("benchmark", _host_steps),
    "bench_targets": block("benchmark", goals.table),
    "steps": block("benchmark", _steps, "gpu"),
    "gemm": block("benchmark", tables.gemm),
    "call_cost": block("benchmark", tables.call_cost),
    "training": block("training", train_bench.steps),
    "training_short": block("training", _training_short),
    "operations": block("training", train_bench.operations),
    "several_gpus": block("several_gpus", several_gpus.table),
}
