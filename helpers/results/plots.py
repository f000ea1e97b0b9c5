"""Draw the pictures of README, docs and the notebook from stored rows.

Each function of PICTURES takes {card: its rows}.
"""

import io
import statistics

import matplotlib
from matplotlib.figure import Figure

from helpers.results.store import one, select

CARD = "nvidia-h100-80gb-hbm3"  # the folder that pages and pictures show
BANDWIDTH = 3.35  # TB/s, as NVIDIA specifies this card's memory
BYTES = 0.5 + 1 / 64 + 4 / 16384 + 2  # read and written per weight
CALLS = 9000  # of the puzzle's test: 1000 rounds, 3 configurations, 3 weights
SHAPES = {  # of the puzzle's test, outputs x inputs, by their elements
    "4194304 bf16": "1024x4096 bf16",
    "16777216 fp16": "2048x8192 fp16",
    "58720256 bf16": "4096x14336 bf16",
}
NAMES = {
    "peft": "PEFT",
    "bitsandbytes": "bitsandbytes",
    "unsloth_classic": "Unsloth classic",
    "unsloth_today": "Unsloth today",
    "unsloth_b200": "Unsloth, its B200 settings",
    "ordinary": "this kernel, kernel[grid]",
    "unsloth_buffered": "Unsloth, one buffer",
    "ours": "this kernel",
}
COLORS = {  # one per contender in all pictures, on white paper so that they read on a dark page too
    "peft": "#6E7781",
    "bitsandbytes": "#2E7D32",
    "unsloth_classic": "#7A4FB5",
    "unsloth_today": "#C2410C",
    "unsloth_b200": "#8C6D00",
    "ordinary": "#3E8296",
    "unsloth_buffered": "#B0417E",
    "ours": "#0B63CE",
}
matplotlib.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})


def panel_of(title: str, height: float):
    """Return an empty figure, 900 pixels wide, and its panel."""
    figure = Figure(figsize=(9, height), layout="constrained")
    figure.suptitle(title, weight="bold", fontsize=13)
    return figure, figure.subplots()


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def protocol(stored: dict) -> Figure:
    """Bars: seconds of the puzzle's test on an NVIDIA H100, one for each contender."""
    figure, panel = panel_of("The puzzle's test on an NVIDIA H100", 3.6)
    for row in sorted(select(stored[CARD], "protocol", "total"), key=lambda row: -row.median):
        bar = panel.barh(NAMES[row.contender], row.median, color=COLORS[row.contender])
        panel.bar_label(bar, [f"{row.median:.3f} s"], padding=4)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel("seconds for 9,000 calls, each with a synchronize (shorter is better)")
    return figure


def where_time_goes(stored: dict) -> Figure:
    """Bars: time of an average call of the puzzle's test on an NVIDIA H100, GPU kernels and launch path."""
    rows = stored[CARD]
    figure, panel = panel_of("An average call of the puzzle's test on an NVIDIA H100", 3.0)
    for name in ("bitsandbytes", "unsloth_classic", "unsloth_today", "ours"):
        label, color = NAMES[name], COLORS[name]
        whole = 1e6 * one(rows, "protocol", "total", name).median / CALLS
        kernels = statistics.mean(one(rows, "gpu_time", size, name).median for size in SHAPES)
        rest = round(whole, 1) - round(kernels, 1)
        dark = panel.barh(label, kernels, color=color)
        light = panel.barh(label, rest, left=kernels, color=color, alpha=0.3)
        panel.bar_label(dark, [f"{kernels:.1f}"], label_type="center", color="white")
        panel.bar_label(light, [f"{rest:.1f}"], label_type="center")
        panel.bar_label(light, [f"{whole:.1f} us"], padding=4)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel("dark: GPU kernels; light: launch path, with allocation and synchronize")
    return figure


def speed_by_size(stored: dict) -> Figure:
    """Lines: memory traffic by size of the weight on an NVIDIA H100, below its specified 3.35 TB/s."""
    figure, panel = panel_of("Memory traffic of the kernels on an NVIDIA H100, bf16", 4.4)
    for name in ("ours", "unsloth_today", "unsloth_b200", "unsloth_classic"):
        speeds = {}
        for row in select(stored[CARD], "gpu_time"):
            size, dtype = row.case.split()
            if row.contender == name and dtype == "bf16":
                speeds[int(size)] = BYTES * int(size) / row.median / 1e6
        if speeds:
            panel.semilogx([*speeds], speeds.values(), "o-", label=NAMES[name], color=COLORS[name])
            panel.set_xticks([*speeds], [f"{size / 1e6:.3g}" for size in speeds])
    panel.axhline(BANDWIDTH, color="black", linestyle="--")
    panel.text(2**16, BANDWIDTH + 0.07, f"specified: {BANDWIDTH} TB/s")
    panel.minorticks_off()
    panel.set(xlabel="millions of elements", ylabel="TB/s", ylim=(0, 3.7))
    panel.set_yticks(range(4))
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


PICTURES = {"protocol": protocol, "where_time_goes": where_time_goes, "speed_by_size": speed_by_size}
