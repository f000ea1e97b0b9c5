"""What the notebook's cells show beside the kernel: each function is one cell's picture or table."""

import html
import json
import math
import os
import textwrap
from pathlib import Path

import torch
from matplotlib.patches import FancyArrowPatch, Rectangle

from helpers.record import hashes
from helpers.machine import environment
from helpers.measure import gpu_time
from helpers.oracle import reference
from helpers.record import tables, goals
from helpers.show import plots
from helpers.submission import checks, scoring
from helpers.t4 import estimate, sass
from helpers.measure.ceilings import bytes_moved

# What is changed in the stored ablation, and why the notebook's kernel decides otherwise.
STEPS = {
    "no inline assembly": "finished results in 16 lanes, one shuffle per code, one 128-bit store per word",
    "code2 not staged in shared memory": "code2 is fetched beside absmax: one memory latency instead of two",
    "2 words a thread": "8 words per thread: their loads are all under way before the first is used",
    "4 words a thread": "... and 16M elements fit the card in one wave of programs",
    "no cache hints": "results are written to leave the cache first",
    "no hints on loads": "up to 8M elements what is read once leaves the cache first",
    "hints on loads": "on all: above 8M elements they cost more than they save",
    "any number of programs an SM": "beyond one wave, fewer programs at a time: fewer streams in memory",
    "bf16 rounded in integers": "what a T4 needs costs a few percent where hardware converts",
}
RESULTS = Path(__file__).resolve().parents[2] / "results"
INK, PALE, ACCENT = "#333333", "#e8eef4", "#2b6cb0"
PROTOCOL_SHAPES = ((8192, 2048, torch.float16), (4096, 1024, torch.bfloat16), (14336, 4096, torch.bfloat16))


class Table:
    """Rows of cells, the head first: HTML in a notebook, text elsewhere; lines above and below."""

    def __init__(self, rows: list[list[str]], above: str = "", below: tuple[str, ...] = ()):
        self.rows, self.above, self.below = rows, above, tuple(below)

    def __repr__(self) -> str:
        return "\n".join([self.above, "", tables.text(self.rows), "", *self.below]).strip()

    def _repr_html_(self) -> str:
        style = 'style="text-align:left;padding:3px 10px;border-bottom:1px solid rgba(128,128,128,.4)"'
        body = ""
        for i, row in enumerate(self.rows):
            tag = "td" if i else "th"
            body += "<tr>" + "".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self.below)
        table = f'<table style="border-collapse:collapse;color:inherit">{body}</table>'
        return f'<div style="color:inherit"><p>{html.escape(self.above)}</p>{table}{lines}</div>'


def steps(card: str = "nvidia-h200") -> Table:
    """The stored ablation, one row a clever step: why it is there, and the time without it (bf16)."""
    result = stored(card)
    if result is None:
        return Table([["no stored benchmark"]])
    cases = [c for c in result["data"]["ablation"]["cases"] if c["dtype"] == "bfloat16"]
    heads = (f"{goals.size_text(case['numel'])} elements, bf16" for case in cases)
    rows = [["changed", "why it is as it is", *heads]]
    for name, why in STEPS.items():
        found = [case["rows"].get(name, {}).get("vs_chosen") for case in cases]
        rows.append([tables.step(name), why, *("-" if ratio is None else f"{ratio:.2f}" for ratio in found)])
    sizes = result["data"].get("gpu", {}).get("sizes", [])
    today = [case["vs"]["unsloth_today"] for case in sizes if "unsloth_today" in case.get("vs", {})]
    long = f"takes {min(today):.1f} to {max(today):.1f} times as long" if today else "was not measured"
    below = (
        "The portable path is written for generality, so its row is not what the assembly alone pays: "
        f"Unsloth's kernel has none either and {long}."
    )
    return Table(rows, f"GPU time / time as chosen. {plots.caption(result)}", [below])


def storage_format() -> plots.Picture:
    """The bytes of a doubly quantized tensor and the way from a code to a weight."""
    figure = plots.Picture(figsize=(plots.WIDTH, 2.9), dpi=plots.DPI)
    figure.alt = (
        "A byte holds two 4-bit codes, high nibble first. 32 bytes are a block of 64 codes "
        "with one absmax byte; "
        "256 blocks share one fp32 absmax2; the tensor has one fp32 offset."
    )
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, 100), ylim=(0, 38))
    panel.set_axis_off()

    def box(x, y, width, text, color=PALE, size=8):
        panel.add_patch(Rectangle((x, y), width, 5, facecolor=color, edgecolor=INK, linewidth=0.8))
        panel.text(x + width / 2, y + 2.5, text, ha="center", va="center", fontsize=size, color=INK)

    def arrow(start, end):
        panel.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=ACCENT))

    def label(x, y, text):
        panel.text(x, y, text, fontsize=7.5, color=INK, va="center")

    for i, text in enumerate(("code 0", "code 1", "code 2", "code 3")):
        box(4 + 9 * i, 29, 9, text, "#cfe3f5" if i % 2 == 0 else PALE)
    box(40, 29, 14, "... code 63")
    label(4, 36, "weight: one byte = two codes, high nibble first; 32 bytes = a block of 64")
    box(4, 17, 14, "absmax[k]")
    label(19.5, 19.5, "uint8, one a block")
    box(4, 9, 14, "absmax2[k / 256]")
    label(19.5, 11.5, "fp32, one for 256 blocks")
    box(4, 1, 14, "offset")
    label(19.5, 3.5, "fp32, one a tensor (on the GPU)")
    box(42, 9, 23, "code2[absmax] * absmax2\n+ offset", "#fdebc8", 7.5)
    box(42, 17, 23, "NF4[code]", "#cfe3f5")
    box(76, 13, 21, "round(NF4 * scale)", "#d7efd9")
    label(76, 10, "fp16 / bf16 / fp32")
    arrow((18, 17.6), (42, 13))
    arrow((37, 11.5), (42, 11.5))
    arrow((41, 4.5), (45, 9))
    arrow((47, 29), (52, 22))
    arrow((65, 19.5), (76, 17))
    arrow((65, 11.5), (76, 14))
    label(66, 8, "scale")
    return figure


def floor() -> str:
    """Bytes of each official shape and the least time they take: that of a kernel without arithmetic.

    Its times are this card's stored ones at that very size, else its rate at 268M elements, measured now;
    without a GPU they are an H200's stored ones.
    """
    gpu, gb_s = environment.has_gpu(), None
    result = stored(environment.result_folder().name) if gpu else stored()
    if result:
        facts = result["environment"]
        source = f"{facts['gpu']}, stored {facts['date'][:10]}, at each size"
    elif gpu:
        gb_s = gpu_time.ceiling()
        source = f"this card, {gb_s:.0f} GB/s measured now on 268M elements; a small tensor stays below"
    else:
        source = "time not measured: needs an NVIDIA GPU"
    lines = [f"a kernel that only moves these bytes ({source}):"]
    for rows, columns, dtype in PROTOCOL_SHAPES:
        moved, name = bytes_moved(rows * columns, dtype.itemsize), str(dtype).removeprefix("torch.")
        if result:
            cases = [
                case["rows"]
                for case in result["data"]["gpu"]["sizes"]
                if case["numel"] == rows * columns and case["dtype"] == name
            ]
            best = min(row["p50"] for row in (cases[0].get(kind) for kind in tables.CEILINGS) if row)
            time = f"{best:.1f} us, {moved / best / 1e3:.0f} GB/s"
        else:
            time = f"{moved / gb_s / 1e3:.1f} us" if gb_s else "-"
        lines.append(f"{rows} x {columns} {name}: {moved / 1e6:.1f} MB -> {time}")
    return "\n".join(lines)


def examine(candidate, *names: str) -> dict[str, checks.Evidence]:
    """Run checks by name (functions of helpers.submission.checks), print a line each, and return what they found."""
    found = {name: getattr(checks, name)(candidate) for name in names}
    for one in found.values():
        verdict = {True: "yes", False: "NO", None: "-"}[one.passed]
        needs = f"not measured (needs {one.needs})" if one.passed is None else ""
        line = f"{verdict:4}{one.criterion}: {'; '.join(filter(None, (needs, one.text)))}"
        print(textwrap.fill(line, 110, subsequent_indent="    "))
    return found


def special(dequantize) -> str:
    """Subnormal, infinite and NaN scales against bitsandbytes, bit for bit (on the GPU).

    dequantize: (weight, quant_state) -> Tensor. Returns the lines to print.
    """
    if not environment.has_gpu():
        return "not measured (needs an NVIDIA GPU): on the CPU bitsandbytes keeps subnormal products"
    from bitsandbytes import functional

    scales = [1e-38, 3e-39, 1.2e-38, 1e-40, 5e-45, math.inf, -math.inf, math.nan, 3e38, -1.0, -0.0, 0.0]
    bytes_ = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(len(scales)).view(-1, 1)
    lines = []
    for quant_type in ("nf4", "fp4"):
        for dtype in reference.DTYPES:
            state = functional.QuantState(
                torch.tensor(scales, device="cuda").repeat_interleave(8),
                shape=torch.Size([8 * len(scales), 64]),
                code=functional.get_4bit_type(quant_type, device="cuda"),
                blocksize=64,
                quant_type=quant_type,
                dtype=dtype,
            )
            wrong = reference.different(dequantize(bytes_, state), functional.dequantize_4bit(bytes_, state))
            name = str(dtype).removeprefix("torch.")
            lines.append(f"{quant_type} {name:9}{wrong} of {bytes_.numel() * 2} elements differ")
    return "\n".join(lines)


def protocol(comparison) -> Table:
    """A harness.Comparison as a table: seconds (p20, p50, p80), ratio to ours, how it passed the checks."""
    head = f"{len(comparison.configs)} configurations, {comparison.rounds} rounds, "
    once = "timed once (a T4 has five minutes for the whole notebook)"
    head += once if comparison.repeats == 1 else f"{comparison.repeats} interleaved repeats"
    head += f"; weights checked against {comparison.checked_against}"
    ours = next(iter(comparison.entries))
    rows = [["", "seconds p50", "p20 to p80", "time / ours", "official checks"]]
    for name, entry in comparison.entries.items():
        checked = "bit-equal" if entry.identical else "close"
        if entry.failure:
            checked = entry.failure.splitlines()[0][:60]
        elif entry.label == comparison.checked_against:
            checked = tables.REFERENCE
        if entry.reason:
            rows.append([entry.label, "absent", "", "", entry.reason[:60]])
        elif not entry.seconds:
            needs = "" if entry.failure else "needs an NVIDIA GPU"
            rows.append([entry.label, "not measured", "", needs, checked])
        else:
            spread, ratio = entry.spread, comparison.speedup(ours, name)
            spans = f"{spread['p20']:.4f} to {spread['p80']:.4f}" if comparison.repeats > 1 else "-"
            times = [f"{spread['p50']:.4f}", spans]
            shown = "1" if name == ours else f"{ratio:.2f}" if ratio else ""
            rows.append([entry.label, *times, shown, checked])
    return Table(rows, head, [f"{e.label}: {e.note}" for e in comparison.entries.values() if e.note])


def stored(card: str = "nvidia-h200") -> dict | None:
    """The full benchmark's result file of a card, if it is there."""
    path = RESULTS / card / "benchmark.json"
    return json.loads(path.read_text()) if path.exists() else None


def stored_targets(card: str = "nvidia-h200") -> Table:
    """The table of targets, from one stored result file, with its card, date and kernel."""
    result = stored(card)
    if result is None:
        return Table(
            [["no stored benchmark: python -m helpers bench on a machine with an NVIDIA GPU writes one"]]
        )
    return Table(goals.table(result), plots.caption(result), limits(result))


def stored_gemm(card: str = "nvidia-h200") -> Table:
    """Dequantize and multiply as one unit under each store policy, from one stored result file."""
    result = stored(card)
    if result is None:
        return Table([["no stored benchmark"]])
    rows = [case["rows"] for case in result["data"].get("gemm", {}).get("cases", [])]
    plain = [r["kernel, plain stores, no hints"]["p50"] / r["kernel"]["p50"] for r in rows]
    below = [f"Plain stores over streaming ones: {min(plain):.3f} to {max(plain):.3f}."] if plain else []
    return Table(tables.gemm(result), plots.caption(result), below)


def limits(result: dict) -> list[str]:
    """What bounds the targets that depend on the host, from the same result file: one line each."""
    data, lines = result["data"], []
    calls = [case["synchronized"] for case in data.get("host", {}).get("cases", [])]
    if calls:
        sums = {name: sum(case[name]["p50"] for case in calls) for name in calls[0]}
        bound = [sums[f"unsloth_{which}"] / sums["empty_strided + fill_"] for which in ("today", "classic")]
        lines.append(
            "Protocol: allocating and filling the same outputs, with no decoding at all, would reach "
            f"{bound[0]:.2f} over Unsloth today and {bound[1]:.2f} over classic on this host."
        )
    cold = data.get("cold", {})
    if cold.get("trivial"):
        first = {
            job: [cold[job][state]["median"]["first_call"] for state in ("empty", "warm")]
            for job in ("trivial", "kernel")
        }
        lines.append(
            f"First call: a Triton kernel that does nothing takes {first['trivial'][0]:.2f} s with empty "
            f"caches and {first['trivial'][1]:.2f} s with warm ones; ours {first['kernel'][0]:.2f} and "
            f"{first['kernel'][1]:.2f} s."
        )
    counts = [row["compiles"] for row in data.get("compiles", {}).get("rows", [])]
    without = _without_load_hints(data)
    if max(counts, default=1) > 1 and without:
        hinted, numel, ratio = without
        lines.append(
            f"Compiles: {max(counts)} per dtype and state kind, one of them for tensors of at most "
            f"{hinted / 1e6:.1f}M elements, whose loads carry hints: without these {ratio:.2f} times as long "
            f"at {numel / 1e6:.2f}M."
        )
    return lines


def _without_load_hints(data: dict) -> tuple[int, int, float] | None:
    """(largest tensor whose loads carry hints, a size with the large tile below it, what they save there)."""
    chosen = data.get("settings", {})
    for case in data.get("ablation", {}).get("cases", []):
        if chosen.get("small", 0) < case["numel"] <= chosen.get("hinted", 0):
            return chosen["hinted"], case["numel"], case["rows"]["no hints on loads"]["vs_chosen"]
    return None


def machine_code() -> str:
    """This kernel's sm_75 machine code (nested), compiled now: instructions per element, widths, budget."""
    return "\n".join(sass.count_lines(sass.ours(75, sass.KINDS[:3]), 75))


def stored_t4() -> str:
    """What a T4 should take, and everyone's machine code for it, as `python -m helpers sass` stored them."""
    path = RESULTS / "t4-predicted" / "machine_code.json"
    if not path.exists():
        return "not stored: python -m helpers sass --json results/t4-predicted/machine_code.json"
    found = json.loads(path.read_text())
    stamp = f"kernel {found['kernel_hash']}, {found['environment']['date'][:10]}"
    return "\n".join([stamp, *sass.brief(found["data"])])


def run_all_estimate(card: str = "nvidia-h200") -> str:
    """How long "Run all" takes on a T4 Colab: from the model and a card's stored result files, each named."""
    files, found = [], {}
    for name in ("benchmark", "notebook"):
        path = RESULTS / card / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            found[name] = result["data"]
            files.append(
                f"{name}.json of {result['environment']['date'][:10]}, kernel {result['kernel_hash']}"
            )
        else:
            files.append(f"{name}.json not stored")
    text = estimate.render_estimate(estimate.estimate_run_all(found, environment.REPEATS_SM75))
    return f"{text}\n  from results/{card}: {'; '.join(files)}"


def stored_forced(card: str = "nvidia-h200", forced: str = "t4") -> str:
    """What a stored run of this notebook with another card's decisions forced found, a line a criterion.

    The lines of speed are left out: their times are the card's own.
    """
    path = RESULTS / f"{card}-forced-{forced}" / "score.json"
    if not path.exists():
        return (
            f"not stored: NF4_FORCE={forced} python -m helpers run --in-place on a machine with an NVIDIA GPU"
        )
    result = json.loads(path.read_text())
    facts, data = result["environment"], result["data"]
    names = {name for _, name, *_ in scoring.CRITERIA}
    lines = [line for line in data["lines"] if line["name"] in names]
    points, best = sum(line["points"]["today"] or 0 for line in lines), sum(line["best"] for line in lines)
    label = environment.forced_text(facts["forced"])
    shown = [f"{facts['gpu']}, {label}, {facts['date'][:10]}, kernel {result['kernel_hash']}"]
    shown.append(
        f"{points} of the {best} points that do not depend on speed (times are the {facts['gpu']}'s)"
    )
    shown += [f"{name}: {text}" for name, text in _criteria(lines, data["also"])]
    return "\n".join(line for text in shown for line in textwrap.wrap(text, 110, subsequent_indent="    "))


def _criteria(lines, also):
    """(name with its points, evidence) of each line, then what counts no points."""
    for line in lines:
        points = line["points"]["today"]
        yield f"{'-' if points is None else f'{points:+d}'} {line['name']}", line["evidence"]
    yield from also.items()


def keep_score(score) -> None:
    """Write the score where `python -m helpers run` asked for it (NF4_BUILD), as JSON and text."""
    folder = os.environ.get("NF4_BUILD")
    if folder:
        content = {
            "environment": environment.describe(),
            "kernel_hash": hashes.kernel_hash(),
            "data": score.to_dict(),
        }
        Path(folder, "score.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
        Path(folder, "score.txt").write_text(score.to_text() + "\n")
