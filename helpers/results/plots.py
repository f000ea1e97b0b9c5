"""Draw the pictures of README, docs and the notebook from stored rows.

Each function of PICTURES takes the rows of CARD. This kernel is in color, the others are grey.
"""

import io

import matplotlib
from matplotlib.figure import Figure

from helpers.names import LABELS
from helpers.results.store import CARDS, Row, select

CARD = "nvidia-h200"  # the folder that pages and pictures show
ON = f"on an {CARDS[CARD]}"
LIMIT = 4.8  # TB/s, as NVIDIA specifies its memory
TEXTS = {  # for readers who do not see the pictures
    "protocol": f"Bars: seconds of the puzzle's test {ON}.",
    "speed_by_size": f"Lines: memory traffic by size of the weight {ON}, below its specified {LIMIT} TB/s.",
}
BYTES = 0.5 + 1 / 64 + 4 / 16384 + 2  # read and written per weight
SHAPES = {  # of the puzzle's test, outputs x inputs, by their elements
    "4194304 bf16": "1024x4096 bf16",
    "16777216 fp16": "2048x8192 fp16",
    "58720256 bf16": "4096x14336 bf16",
}
NAMES = LABELS | {
    "ordinary": "this kernel, kernel[grid]",
    "unsloth_b200": "Unsloth, its B200 settings",
}
GREY = "#6E7781"  # on white paper, so that it reads on a dark page too
BLUE = "#0B63CE"  # this kernel
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


def protocol(rows: list[Row]) -> Figure:
    """Bars: seconds of the puzzle's test, one for each contender, sorted. This kernel's are blue."""
    figure, panel = panel_of("The puzzle's test", 3.8)
    rows = select(rows, "protocol", "100 rounds")
    for row in sorted(rows, key=lambda row: -row.median):  # bars begin at the bottom
        if row.contender in ("again", "no asm", "no hints"):
            continue
        name = NAMES.get(row.contender, row.contender)
        color = BLUE if name.startswith("this kernel") else GREY
        bar = panel.barh(name, row.median, color=color)
        panel.bar_label(bar, fmt="%.4f s", padding=4)
    panel.margins(x=0.15)
    panel.set_xlabel("seconds for 900 calls, each with a synchronize (blue: this kernel)")
    return figure


def speed_by_size(rows: list[Row]) -> Figure:
    """Lines: memory traffic by size of the weight, below what the card's memory is specified for."""
    figure, panel = panel_of("Memory traffic in bf16", 4.4)
    speeds = {}  # {contender: {elements: TB/s}}
    for row in select(rows, "gpu_time"):
        size, dtype = row.case.split()
        if dtype == "bf16":
            speed = BYTES * int(size) / row.median / 1e6
            speeds.setdefault(row.contender, {})[int(size)] = speed
    for name, style in STYLES.items():
        sizes = speeds.get(name, {})
        color = BLUE if name == "ours" else GREY
        panel.semilogx([*sizes], sizes.values(), style, label=NAMES[name], color=color)
    sizes = speeds["ours"]
    panel.set_xticks([*sizes], [f"{size / 1e6:.3g}" for size in sizes])
    panel.axhline(LIMIT, color="black", linestyle="--")
    panel.text(2**16, 1.02 * LIMIT, f"specified: {LIMIT} TB/s")
    panel.minorticks_off()
    panel.set(xlabel="millions of elements", ylabel="TB/s", ylim=(0, 1.1 * LIMIT))
    figure.legend(loc="outside lower center", ncols=4, frameon=False, reverse=True)
    return figure


PICTURES = {"protocol": protocol, "speed_by_size": speed_by_size}
