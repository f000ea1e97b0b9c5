"""Figures of training with the kernel and without: two runs at hand, and results/<gpu>/training.json."""

import statistics

import matplotlib
from matplotlib.ticker import MaxNLocator

from helpers.show.plots import COLORS, DPI, STYLE, WIDTH, Picture, caption
from helpers.training.tiny_training import Record, differences

WITHOUT, WITH = "#999999", COLORS["kernel"]
NAMES = {"peft": "PEFT + bitsandbytes", "unsloth": "Unsloth"}


def comparison(without: Record, with_kernel: Record, timed: bool = True) -> Picture:
    """Loss curves of two runs on top of each other, and their median step times as bars.

    timed=False (Triton's interpreter) leaves the bars out.
    """
    differ = differences(without, with_kernel)
    verdict = "every bit the same" if not differ else "differ: " + ", ".join(differ)
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(WIDTH, 3.0), dpi=DPI, layout="constrained")
        curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
        steps = range(1, len(without.losses) + 1)
        curves.plot(steps, without.losses_as_floats(), color=WITHOUT, linewidth=6, label="without the kernel")
        curves.plot(
            steps, with_kernel.losses_as_floats(), color=WITH, linestyle="--", label="with the kernel"
        )
        curves.set(xlabel="step", ylabel="loss", title=f"Losses and LoRA gradients: {verdict}")
        curves.xaxis.set_major_locator(MaxNLocator(integer=True))
        curves.legend()
        figure.alt = f"Losses over {len(without.losses)} steps with and without the kernel: {verdict}."
        if timed:
            times = [statistics.median(run.step_seconds) * 1e3 for run in (without, with_kernel)]
            drawn = bars.bar(("without", "with"), times, color=(WITHOUT, WITH), width=0.6)
            bars.bar_label(drawn, fmt="%.1f")
            bars.margins(y=0.12)
            bars.set(ylabel="ms per step, median", title=f"without / with: {times[0] / times[1]:.2f}")
            figure.alt += f" Median step {times[0]:.1f} ms without, {times[1]:.1f} ms with."
        else:
            bars.set_axis_off()
            bars.text(0.5, 0.5, "step time\nnot measured\n(needs a GPU)", ha="center", va="center")
    return figure


def training(result: dict | None) -> Picture:
    """Speedup of a step by tokens, p20 to p80, a group of bars per library; `result`: a whole result file."""
    data = (result or {}).get("data", {})
    libraries = {
        name: found["sizes"] for name, found in data.get("libraries", {}).items() if found.get("sizes")
    }
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(WIDTH, 3.2), dpi=DPI, layout="constrained")
        figure.supxlabel(caption(result), fontsize=7.5)
        panel = figure.subplots()
        if not libraries:
            panel.set_axis_off()
            reason = data.get("not_measured", "no result file")
            panel.text(0.5, 0.5, f"not measured ({reason})", ha="center", va="center", wrap=True)
            figure.alt = f"Training speed not measured ({reason})."
            return figure
        said, width = [], 0.8 / len(libraries)
        tokens = sorted({size["tokens"] for sizes in libraries.values() for size in sizes})
        for index, (name, sizes) in enumerate(libraries.items()):
            at = [tokens.index(size["tokens"]) + (index - (len(libraries) - 1) / 2) * width for size in sizes]
            speed = [size["speedup"] for size in sizes]
            middle = [one["p50"] for one in speed]
            spread = [
                [max(0, one["p50"] - one["p20"]) for one in speed],
                [max(0, one["p80"] - one["p50"]) for one in speed],
            ]
            color = COLORS["unsloth_today" if name == "unsloth" else "bitsandbytes"]
            drawn = panel.bar(at, middle, width * 0.9, yerr=spread, color=color, label=NAMES[name])
            panel.bar_label(drawn, fmt="%.2f", padding=2)
            said.append(f"{NAMES[name]} " + ", ".join(f"{x:.2f}" for x in middle))
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens])
        panel.set(xlabel="tokens per step", ylabel="step time without / with", ylim=(0.9, None))
        panel.legend(loc="upper right")
        panel.set_title("QLoRA step with the kernel (Llama-3 8B's layer sizes)")
        figure.alt = f"QLoRA step time without / with the kernel at {', '.join(map(str, tokens))} tokens: "
        figure.alt += f"{'; '.join(said)}."
    return figure
