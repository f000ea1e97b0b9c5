"""Draw the pictures of README, docs and the notebook from stored rows.

Each function of PICTURES takes {card: its rows}. This kernel comes first and in color, the others are grey.
"""

import io
import statistics

import matplotlib
from matplotlib.figure import Figure

from helpers.names import LABELS
from helpers.results.store import CARDS, one, select

CARD = "nvidia-h200"  # the folder that pages and pictures show
ON = f"on an {CARDS[CARD].name}"
BYTES = 0.5 + 1 / 64 + 4 / 16384 + 2  # read and written per weight
CALLS = 9000  # of the puzzle's test: 1000 rounds, 3 configurations, 3 weights
SHAPES = {  # of the puzzle's test, outputs x inputs, by their elements
    "4194304 bf16": "1024x4096 bf16",
    "16777216 fp16": "2048x8192 fp16",
    "58720256 bf16": "4096x14336 bf16",
}
NAMES = LABELS | {"unsloth_b200": "Unsloth, its B200 settings"}
GREY = "#6E7781"  # on white paper, so that it reads on a dark page too
COLORS = {"ours": "#0B63CE"}
STYLES = {  # of lines
    "unsloth_classic": "D-.",
    "unsloth_b200": "^:",
    "unsloth_today": "s--",
    "ours": "o-",
}
matplotlib.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})


def panel_of(title: str, height: float):
    """Return an empty figure, 9 inches wide, and its panel."""
    figure = Figure(figsize=(9, height), layout="constrained")
    figure.suptitle(f"{title} {ON}", weight="bold", fontsize=13)
    return figure, figure.subplots()


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200)  # two pixels for each of a 900-pixel layout
    return file.getvalue()


def protocol(stored: dict) -> Figure:
    """Bars: seconds of the puzzle's test, one for each contender."""
    figure, panel = panel_of("The puzzle's test", 3.6)
    rows = select(stored[CARD], "protocol", "total")  # bars begin at the bottom
    for row in sorted(rows, key=lambda row: (row.contender == "ours", -row.median)):
        bar = panel.barh(NAMES[row.contender], row.median, color=COLORS.get(row.contender, GREY))
        panel.bar_label(bar, fmt="%.3f s", padding=4)
    panel.margins(x=0.1)
    panel.set_xlabel("seconds for 9,000 calls, each with a synchronize (shorter is better)")
    return figure


def where_time_goes(stored: dict) -> Figure:
    """Bars: time of an average call of the puzzle's test, GPU kernels and launch path."""
    rows = stored[CARD]
    figure, panel = panel_of("An average call of the puzzle's test", 3.0)
    for name in ("bitsandbytes", "unsloth_classic", "unsloth_today", "ours"):
        label, color = NAMES[name], COLORS.get(name, GREY)
        whole = round(1e6 * one(rows, "protocol", "total", name).median / CALLS, 1)
        kernels = round(statistics.mean(one(rows, "gpu_time", size, name).median for size in SHAPES), 1)
        dark = panel.barh(label, kernels, color=color)
        light = panel.barh(label, whole - kernels, left=kernels, color=color, alpha=0.3)
        panel.bar_label(dark, fmt="%.1f", label_type="center", color="white")
        panel.bar_label(light, fmt="%.1f", label_type="center")
        panel.bar_label(light, [f"{whole:.1f} us"], padding=4)
    panel.margins(x=0.1)
    panel.set_xlabel("dark: GPU kernels; light: launch path, with allocation and synchronize")
    return figure


def speed_by_size(stored: dict) -> Figure:
    """Lines: memory traffic by size of the weight, below what the card's memory is specified for."""
    figure, panel = panel_of("Memory traffic in bf16", 4.4)
    speeds = {}  # {contender: {elements: TB/s}}
    for row in select(stored[CARD], "gpu_time"):
        size, dtype = row.case.split()
        if dtype == "bf16":
            speed = BYTES * int(size) / row.median / 1e6
            speeds.setdefault(row.contender, {})[int(size)] = speed
    for name, style in STYLES.items():
        sizes = speeds.get(name, {})
        color = COLORS.get(name, GREY)
        panel.semilogx([*sizes], sizes.values(), style, label=NAMES[name], color=color)
    sizes = speeds["ours"]
    panel.set_xticks([*sizes], [f"{size / 1e6:.3g}" for size in sizes])
    limit = CARDS[CARD].bandwidth
    panel.axhline(limit, color="black", linestyle="--")
    panel.text(2**16, 1.02 * limit, f"specified: {limit} TB/s")
    panel.minorticks_off()
    panel.set(xlabel="millions of elements", ylabel="TB/s", ylim=(0, 1.1 * limit))
    figure.legend(loc="outside lower center", ncols=4, frameon=False, reverse=True)
    return figure


PICTURES = {"protocol": protocol, "where_time_goes": where_time_goes, "speed_by_size": speed_by_size}
