"""What README, docs and the notebook show of stored results: one function a block of markdown."""

from helpers.machine import environment
from helpers.record import goals, hashes, names, tables
from helpers.record.results import EARLIER, caption, find, ratio, stale
from helpers.show import plots
from helpers.submission.repository import NOTEBOOK_NAME, REPO_URL
from helpers.t4 import sass, simulated

RESULTS = environment.ROOT / "results"
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
LIBRARIES = {"peft": "PEFT + bitsandbytes", "unsloth": "Unsloth"}


def stored(name: str, card: str = names.CARD):
    """A card's stored result of that name, or None."""
    return find(name, RESULTS / card)


def with_caption(result, table: tables.Table, what: str = "call") -> str:
    return f"{tables.markdown(table)}\n\n*{caption(result, what)}*" if table else "not measured"


def badge() -> str:
    """The link to Colab, once there is an address: a badge that leads nowhere is worse than none."""
    if not REPO_URL:
        return ""
    link = f"https://colab.research.google.com/github/{REPO_URL.removeprefix('https://github.com/')}"
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    return f"[![Open In Colab]({image})]({link}/blob/main/{NOTEBOOK_NAME})"


def claim() -> str:
    """The score in one sentence: card, both baselines, and what is known of a T4."""
    result, timed = stored("score"), stored("protocol")
    if result is None:
        return "No run is stored."
    text = result.data.headline.rstrip(".")
    if timed:
        ours, score = next(iter(timed.data.entries)), result.data
        today, classic = (timed.data.speedup(ours, name) for name in BASELINES)
        text = (
            f"{min(score.totals.values())} of {score.maximum} points on an {result.environment.gpu}: the "
            f"official protocol runs {today:.2f} times as fast as Unsloth's `fast_dequantize` of today and "
            f"{classic:.2f} times as fast as its classic path, the puzzle's own baseline"
        )
    return f"**{text}; {t4_in_words()}.**\n\n*Stored run: {caption(result)}.*"


def _predicted():
    """(the stored simulation of a T4, our host time of a call over Unsloth today's)."""
    run = stored("benchmark")
    shares = simulated.host_shares(run.data if run else None) or (1.0,)
    return simulated.simulation(RESULTS / simulated.FOLDER.name).data, shares


def t4_in_words() -> str:
    """What is known of a T4, as the end of a sentence."""
    run = simulated.measured(RESULTS)
    if run and run.data.protocol:
        today, classic = (run.data.protocol.speedup("kernel", name) for name in BASELINES)
        return f"measured on a Tesla T4, {today:.2f} and {classic:.2f} times as fast"
    spans = [simulated.ratio(*_predicted(), name) for name in BASELINES]
    today, classic = (f"{span.low:.2f} to {span.high:.2f}" for span in spans)
    return f"it has not run on a Tesla T4, where {today} and {classic} times as fast are predicted"


def t4_picture() -> plots.Picture:
    simulation, shares = _predicted()
    source = f"kernels: {simulation.simulator}; calls: published for a T4 Colab, ours scaled"
    published = {"unsloth_classic": simulated.CLASSIC_TOTAL_S}
    return plots.t4(simulated.totals(simulation, shares), published, source)


def score() -> str:
    """The marking table that the notebook's stored run computed."""
    result = stored("score")
    data = result.data
    columns = {"classic": "vs classic", "today": "vs today"}
    rows = [["criterion", *columns.values(), "evidence"]]
    for line in data.lines:
        points = [line.points[column] for column in columns]
        rows.append(
            [line.name, *("-" if p is None else f"{p:+d}" if p else "0" for p in points), line.evidence]
        )
    rows.append(["sum", *(f"{data.totals[column]} of {data.maximum}" for column in columns), ""])
    return f"**{data.headline}**\n\n{with_caption(result, rows)}"


def protocol() -> str:
    result = stored("benchmark")
    return with_caption(result, tables.protocol(result.data))


def saved(data, baseline: str) -> tuple[float, float] | None:
    """Microseconds saved over a baseline, summed over the official shapes: (in all, of it GPU time).
    None where a shape was not measured both ways."""
    gpu = {(case.numel, case.dtype): case.rows for case in data.gpu.sizes} if data.gpu else {}
    whole = on_gpu = 0.0
    for case in data.host.cases if data.host else []:
        rows = gpu.get((case.shape[0] * case.shape[1], case.dtype), {})
        if not {"kernel", baseline} <= rows.keys() & case.synchronized.keys():
            return None
        whole += case.synchronized[baseline].p50 - case.synchronized["kernel"].p50
        on_gpu += rows[baseline].p50 - rows["kernel"].p50
    return (whole, on_gpu) if whole else None


def _parts(gain: tuple[float, float] | None) -> str:
    """What of a gain is the kernel's and what the call's; "-" where it is not known."""
    return f"{gain[1] / gain[0]:.0%}, {1 - gain[1] / gain[0]:.0%}" if gain else "-"


def microseconds() -> str:
    """How much of the win is the kernel and how much is the call, in words."""
    result, lines = stored("benchmark"), []
    for name in BASELINES:
        gain = saved(result.data, name)
        if gain is None:
            return "The parts of a call were not measured in the stored run."
        whole, on_gpu = gain
        lines.append(
            f"over {names.label(name)} {whole:.0f} us are saved, {on_gpu / whole:.0%} of them "
            f"by the kernel on the GPU and {1 - on_gpu / whole:.0%} by the call on the host"
        )
    return (
        "**How much is the kernel, how much the call?** One synchronized call of each of the protocol's "
        f"three shapes, added up: {'; '.join(lines)}. *{caption(result)}.*"
    )


def cards() -> str:
    """One row a card: the official protocol against both baselines, and what of the gain is the kernel's."""
    rows = [["official protocol", "this kernel, s", "times as fast as Unsloth today",
             "times as fast as Unsloth classic", "of the time saved over today: kernel, call"]]  # fmt: skip
    folders = {
        path.parent.name for name in ("benchmark", "protocol") for path in RESULTS.glob(f"*/{name}.json")
    }
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
        parts = _parts(saved(bench.data, "unsloth_today") if bench else None)
        rows.append([f"{facts.gpu}, {date}", f"{timed.entries[ours].p50:.3f}", *over, parts])
    if names.T4 not in folders:
        simulation, shares = _predicted()
        spans = [simulated.ratio(simulation, shares, name) for name in BASELINES]
        over = [f"{span.low:.2f} to {span.high:.2f}" for span in spans]
        totals = simulated.totals(simulation, shares)
        ours, today = totals["kernel"], totals["unsloth_today"]
        gains = [(sum(theirs) - sum(mine)) / 2 for theirs, mine in
                 ((today.both, ours.both), (today.kernels, ours.kernels))]  # fmt: skip
        name = "Tesla T4, predicted (kernels simulated, calls published), not measured"
        rows.append([name, str(ours.both), *over, _parts((gains[0], gains[1]))])
    return tables.markdown(rows)


def host_steps() -> str:
    """Our call with one of its shortcuts taken away: microseconds until it returns."""
    result = stored("benchmark")
    steps = result.data.host.steps if result.data.host else {}
    if not steps:
        return "The steps of a call were not measured in the stored run."
    chosen = next(iter(steps.values())).p50
    rows = [["the call, without", "us until it returns", "over as it is"]]
    rows += [[name, f"{times.p50:.2f}", f"{times.p50 / chosen:.2f}"] for name, times in steps.items()]
    return with_caption(result, rows)


def steps() -> str:
    """GPU time with one decision changed over the time as chosen, bf16, and why it is as it is."""
    result = stored("benchmark")
    cases = [case for case in result.data.ablation.cases if case.dtype == "bfloat16"]
    heads = [f"{names.size_text(case.numel)} elements" for case in cases]
    rows = [["changed", "why it is as it is", *heads]]
    for name, why in REASONS.items():
        times = [ratio(case.rows, name, "as chosen") for case in cases]
        if any(times):
            rows.append([name, why, *("-" if time is None else f"{time:.2f}" for time in times)])
    return with_caption(result, rows, "gpu")


def speed() -> str:
    """What the picture of speed by size says, in a sentence."""
    result, texts = stored("benchmark"), []
    cases = [case for case in result.data.gpu.sizes if case.numel in names.SHARES and case.rows]
    kind = next(kind for kind in names.CEILINGS if kind in cases[0].rows)
    for numel in names.TARGET_SIZES:
        shares = [[ratio(case.rows, kind, name) for case in cases if case.numel == numel]
                  for name in ("kernel", "unsloth_today")]  # fmt: skip
        texts.append(f"{names.size_text(numel)}: {min(shares[0]):.2f} against {min(shares[1]):.2f}")
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
    result = simulated.simulation(RESULTS / simulated.FOLDER.name)
    label = f"kernel {result.kernel.label}: {simulated.CAPTION}"
    return f"{tables.markdown(simulated.kernel_table(RESULTS))}\n\n*{result.data.simulator}; {label}*"


def machine_code() -> str:
    """Everyone's machine code for a T4, and this kernel's for the other generations."""
    result = sass.stored(RESULTS)
    if result is None:
        return "No machine code is stored: `python -m helpers sass --store`"
    text = f"{sass.LEGEND}. {sass.verdict(result.data.code)}."
    return f"{with_caption(result, sass.table(result.data.code), 'gpu')}\n\n{text}"


def forced() -> str:
    """What the whole notebook found with a T4's decisions forced on the card that README quotes."""
    result = stored("score", f"{names.CARD}-forced-t4")
    if result is None:
        return "No run with a T4's decisions forced is stored."
    other = [line for line in result.data.lines if "peed" not in line.name]  # times are the card's own
    points, best = sum(line.points["today"] or 0 for line in other), sum(line.best for line in other)
    return (
        f"With a T4's decisions forced on an {result.environment.gpu} (integer rounding of bf16, its tile "
        f"and hints, no native bf16), the notebook gives {points} of the {best} points that do not depend on "
        "speed. "
        f"*{caption(result)}*"
    )


def estimate() -> str:
    """How long "Run all" takes on a T4 Colab."""
    rows = [[what, str(span or "not measured"), source] for what, span, source in simulated.run_all(RESULTS)]
    return tables.markdown([["Run all on a T4 Colab, not measured there", "seconds", "from"], *rows])


def bench_targets() -> str:
    result = stored("benchmark")
    return with_caption(result, goals.table(result.data))


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
    data, lines = stored("benchmark").data, []
    calls = [case.synchronized for case in data.host.cases] if data.host else []
    if calls:
        sums = {name: sum(rows[name].p50 for rows in calls) for name in calls[0]}
        today, classic = (sums[name] / sums[names.ALLOCATE_FILL] for name in BASELINES)
        lines.append(
            "Reference: allocating and filling the same outputs, with nothing decoded, takes 1/"
            f"{today:.2f} of the time of Unsloth today and 1/{classic:.2f} of classic on this host."
        )
    if data.cold and data.cold.trivial:
        times = [starts.median(state, "first_call") for starts in (data.cold.trivial, data.cold.kernel)
                 for state in ("empty", "warm")]  # fmt: skip
        lines.append(
            f"First call: a Triton kernel that stores one number takes {times[0]:.2f} s with empty caches "
            f"and {times[1]:.2f} s with warm ones; this kernel {times[2]:.2f} and {times[3]:.2f} s."
        )
    return "\n".join(f"- {line}" for line in lines)


def other_cards() -> str:
    """The score and the goals of every other card with results of its own."""
    texts = []
    for path in sorted(RESULTS.glob("*/benchmark.json")):
        card = path.parent.name
        if card == names.CARD or not stored("score", card):
            continue
        texts.append(f"**{stored('score', card).data.headline}**")
        texts.append(with_caption(stored("benchmark", card), goals.table(stored("benchmark", card).data)))
    return "\n\n".join(texts)


def gemm() -> str:
    result = stored("benchmark")
    return with_caption(result, tables.gemm(result.data))


def compiled() -> str:
    result = stored("benchmark")
    return with_caption(result, tables.compiled(result.data))


def training() -> str:
    """One row a library and number of tokens."""
    result = stored("training")
    head = ["", "tokens per step", "ms without", "ms with", "speedup (95% interval)", "GPU time dequantizing"]
    rows = [[*head, "caught", "same bits"]]
    for library, found in result.data.libraries.items():
        for size in found.sizes:
            arms, speed = (size.without, size.with_), size.speedup
            same = ("yes" if size.same_bits else "NO") if size.repeatable else "not repeatable without it"
            rows.append([
                LIBRARIES[library],
                f"{size.tokens:,}",
                *(f"{arm.ms.p50:.1f}" for arm in arms),
                f"{speed.p50:.3f} ({speed.low:.3f} to {speed.high:.3f})",
                " -> ".join(f"{arm.dequantize_ms / arm.gpu_ms:.0%}" for arm in arms),
                f"{size.calls['kernel']} of {size.calls['kernel'] + size.calls['library']}",
                same,
            ])  # fmt: skip
    return with_caption(result, rows)


def training_short() -> str:
    """One row a number of tokens: a QLoRA step with the libraries' own code -> with the kernel."""
    result = stored("training")
    sizes = {name: {size.tokens: size for size in found.sizes} for name, found in
             result.data.libraries.items()}  # fmt: skip
    rows = [["one QLoRA step, ms, without -> with", *(LIBRARIES[name] for name in sizes)]]
    for tokens in sorted({tokens for one in sizes.values() for tokens in one}):
        cells = []
        for size in (one.get(tokens) for one in sizes.values()):
            text = size and f"{size.without.ms.p50:.1f} -> {size.with_.ms.p50:.1f} ({size.speedup.p50:.2f})"
            cells.append(text or "not measured")
        rows.append([f"{tokens:,} tokens", *cells])
    return with_caption(result, rows)


def operations() -> str:
    """What else a whole model goes through, with and without the kernel."""
    result = stored("training")
    rows = [["with a whole model", "ms without", "with", "speedup (95% interval)", "caught", "same bits"]]
    for library, found in result.data.libraries.items():
        for row in found.operations:
            name = f"{LIBRARIES[library]}: {row.name}"
            if row.failed:
                rows.append([name, "failed", "", "", "", row.failed])
                continue
            speed, calls = row.speedup, row.calls
            times = [f"{arm.p50:.1f}" for arm in (row.without, row.with_)]
            interval = f"{speed.p50:.3f} ({speed.low:.3f} to {speed.high:.3f})"
            caught = f"{calls['kernel']} of {calls['kernel'] + calls['library']}"
            rows.append([name, *times, interval, caught, "yes" if row.same_bits else "NO"])
    if len(rows) == 1:
        return "Prefill, loading and merging were not measured in the stored run."
    return with_caption(result, rows)


def several_gpus() -> str:
    result = stored("several_gpus")
    rows = [["engine", "GPUs", "ms per step without", "with", "speedup (p20 to p80)", "losses"]]
    for engine, found in result.data.engines.items():
        if found.failed:
            rows.append([engine, "failed", "", "", "", found.failed])
            continue
        times = [f"{found.step_ms[arm].p50:.1f}" for arm in ("without", "with")]
        speed = f"{found.speedup.p50:.2f} ({found.speedup.p20:.2f} to {found.speedup.p80:.2f})"
        same = f"{'identical' if found.same_losses else 'DIFFER'}, {found.steps} steps"
        rows.append([engine, str(found.processes), *times, speed, same])
    return with_caption(result, rows)


def libraries() -> str:
    """The layouts on which not everyone is exact; the others in a sentence."""
    result = stored("libraries")
    layouts = list(next(iter(result.data.values())))
    odd = [layout for layout in layouts
           if any(outcomes[layout].outcome != "exact" for outcomes in result.data.values())]  # fmt: skip
    rows = [["layout", *(names.label(name) for name in result.data)]]
    rows += [[layout, *(outcomes[layout].outcome for outcomes in result.data.values())] for layout in odd]
    same = len(layouts) - len(odd)
    text = f"Of {len(layouts)} layouts, all are exact on {same}. The other {len(odd)}:"
    return f"{text}\n\n{with_caption(result, rows)}"


def call_cost() -> str:
    result = stored("benchmark")
    table = tables.call_cost(result.data)
    return with_caption(result, table) if table else "What a call executes was not counted in the stored run."


def _suite(run) -> str:
    names_of = ", ".join(f"`{test.rpartition('::')[2]}`" for test in run.failed)
    failed = f"{len(run.failed)} failed" + (f" ({names_of})" if names_of else "")
    return f"{run.passed} passed, {run.skipped} skipped, {failed}"


def stress() -> str:
    """The latest run of each long test, with what it found."""
    here = "cpu-interpreter"
    rows = [["what", "command", "found", "stored run"]]

    def add(what: str, command: str, name: str, text, card: str = names.CARD):
        result = stored(name, card)
        found = text(result.data) if result else "not measured"
        rows.append([what, f"`python -m helpers {command}`", found, caption(result).replace(" | ", ", ")])

    def killed(data) -> str:
        return f"{data.caught} of {len(data.mutants)} caught"

    add(
        "random layouts, sizes, values, settings",
        "fuzz",
        "fuzz",
        lambda d: f"{d.failed} of {d.cases:,} cases failed ({d.kinds} kinds, {d.elements:,} elements)",
    )
    add(
        "time, memory and bits of long runs",
        "soak",
        "soak",
        lambda d: (
            f"{d.launches:,} launches: {d.wrong} of {d.layers:,} layers wrong, grown: "
            f"{', '.join(d.grown) or 'nothing'}"
        ),
    )
    add("seeded bugs, without a GPU", "mutants", "mutants", killed, here)
    add("seeded bugs, on the GPU", "mutants --gpu", "mutants_gpu", killed)
    add(
        "bitsandbytes' own 4-bit tests",
        "bitsandbytes-tests",
        "bitsandbytes_own",
        lambda d: (
            f"as they are {_suite(d.original)}; on this kernel ({sum(d.substituted.launches.values()):,} "
            f"launches) {_suite(d.substituted)}"
        ),
    )
    return tables.markdown(rows)  # fmt: skip


def logs() -> str:
    """What the GPU tests and compute-sanitizer printed where they ran, as it is."""
    texts = []
    for path in sorted(RESULTS.glob("*/*.txt")):
        text = path.read_text(encoding="utf-8").strip()
        earlier = "" if hashes.label() in text else f" ({EARLIER})"
        texts.append(f"`results/{path.parent.name}/{path.name}`{earlier}:\n\n```text\n{text}\n```")
    return "\n\n".join(texts) or "not measured"


BLOCKS = (
    badge, claim, score, protocol, cards, microseconds, host_steps, speed, t4, t4_kernels, machine_code,
    forced, estimate, bench_targets, goals_met, steps, limits, other_cards, gemm, compiled, call_cost,
    training, training_short, operations, several_gpus, libraries, stress, logs,
)  # fmt: skip
