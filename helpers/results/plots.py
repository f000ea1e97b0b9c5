"""Draw the pictures of README, docs and the notebook from stored rows.

Each function of PICTURES returns a figure and its alternative text, which says in words what it shows.
"""

import math
import statistics
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from helpers.results import store
from helpers.results.store import one, select
from nf4_triton.reference import NF4_VALUES

CARD, T4 = "nvidia-h200", "tesla-t4-simulated"  # the folders that the pages quote
CARD_NAME = "NVIDIA H200"
SHAPES = {  # of the official protocol, by their elements
    "4194304 bf16": "1024x4096 bf16",
    "16777216 fp16": "2048x8192 fp16",
    "58720256 bf16": "4096x14336 bf16",
}
CALLS = 9000  # of the official protocol: 1000 rounds, 3 configurations, 3 weights
BYTES = 0.5 + 1 / 64 + 4 / 16384 + 2  # read and written per weight
LABELS = {
    "ours": "this kernel",
    "unsloth_today": "Unsloth today",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
}  # the contenders that pictures show
# Colors: C0, C1, C2 are contenders in the order of LABELS; the others mean one thing in all pictures.
GPU, LAUNCH = "C4", "C6"
STORED, FIRST, SECOND = "#F7F8FA", "#FFDF85", "#A6DCE8"  # idea: inputs, first block, second block
INK = "#768390"  # text and lines, on no background: readable on a light page and on a dark one
CODES, SCALES = "855A8A74", (3.919, 2.6715)  # idea: an example, a word and the scales of two blocks
FOLLOWED = 5  # its code that the arrows follow
IDEA_TEXTS = (  # height, weight, text
    (0.98, "bold", "1  Load a word of 8 codes, and one absmax byte per block of 64"),
    (0.83, "normal", "scale = code2[absmax] × absmax2 + offset, rounded twice (no FMA)"),
    (0.74, "bold", "2  Multiply: 16 lanes hold all results of two blocks"),
    (0.44, "normal", "Rounded to fp32, then to 16 bits. Block 0 in the low half, block 1 in the high half."),
    (0.35, "bold", "3  Look up: a shuffle per code, a prmt per byte, one store"),
    (0.19, "normal", "This word is in block 0: prmt keeps the low halves of two registers."),
    (
        0.02,
        "normal",
        "Bytes per weight: 0.5 (codes) + 1/64 (absmax) + 4/16384 (absmax2) read, 2 written: 2.516",
    ),
)

matplotlib.rcParams.update(
    {
        "font.size": 11,
        "savefig.transparent": True,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": INK,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def panel_of(height: float) -> tuple:
    """Return an empty figure, 900 pixels wide, and its panel."""
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots()


def described(figure: Figure, title: str, facts) -> tuple[Figure, str]:
    """Return a figure with its title, and its alternative text."""
    figure.suptitle(title, fontsize=13)
    return figure, f"{title}: {'; '.join(facts)}."


def save(figure: Figure, file: Path) -> None:
    """Write a PNG with a palette, at most 45 kB."""
    figure.savefig(file, dpi=100)
    Image.open(file).quantize().save(file, optimize=True)


def rounded_down(ratio: float) -> str:
    """Return 1.0968 as '1.09': no speedup is rounded up."""
    return f"{math.floor(round(100 * ratio, 6)) / 100:.2f}"


def extent(values) -> str:
    """Return the range of ratios: '0.96 to 1.23'."""
    return f"{rounded_down(min(values))} to {rounded_down(max(values))}"


def where_time_goes() -> tuple[Figure, str]:
    """Average call of the official protocol: GPU kernels, and launch path plus synchronization."""
    rows, labels = store.rows(CARD), []
    figure, panel = panel_of(3.2)
    for name, label in LABELS.items():
        seconds = one(rows, "protocol", "total", name).median
        on_gpu = statistics.mean(one(rows, "gpu_time", size, name).median for size in SHAPES)
        on_gpu, whole = round(on_gpu, 1), round(1e6 * seconds / CALLS, 1)
        labels.append(f"{label}: {on_gpu} + {whole - on_gpu:.1f} = {whole}")
        panel.barh(labels[-1], on_gpu, color=GPU)
        panel.barh(labels[-1], whole - on_gpu, left=on_gpu, color=LAUNCH)
    panel.invert_yaxis()
    panel.set_xlabel("microseconds")
    parts = ["GPU kernels, measured separately in CUDA graphs", "the rest: launch path and synchronization"]
    figure.legend(parts, loc="outside lower center", ncols=2)
    return described(figure, f"Average call of the official protocol in us, {CARD_NAME}", labels)


def share_by_size() -> tuple[Figure, str]:
    """GPU speed of each kernel relative to one that only moves the bytes, and TB/s, by size."""
    rows, facts = select(store.rows(CARD), "gpu_time"), []
    if not rows:
        raise store.Missing("gpu_time")
    sizes = np.array(sorted({int(row.case.split()[0]) for row in rows}))

    def us(name):
        return np.array([one(rows, case=f"{size} bf16", contender=name).median for size in sizes])

    figure, panel = panel_of(4.2)
    for name in ("ours", "unsloth_today", "unsloth_classic"):
        shares = us("copy_kernel") / us(name)
        panel.semilogx(sizes, shares, "o-", label=LABELS[name])
        facts.append(f"{LABELS[name]}: {extent(shares)}")
    speeds = BYTES * sizes / us("ours") / 1e6
    right = panel.twinx()
    right.plot(sizes, speeds, ":", label="this kernel, TB/s (right)")
    right.set(ylabel="TB/s", ylim=(0, 5.5))
    panel.set(xlabel="elements of the weight, bf16", ylabel="share of the reference's speed", ylim=(0, 1.1))
    panel.grid()
    figure.legend(loc="outside lower center", ncols=4)
    facts.append(f"this kernel moves up to {max(speeds):.2f} TB/s")
    return described(figure, f"GPU speed as a share of the memory-bound reference, {CARD_NAME}", facts)


def _ranges(title: str, unit: str, ratios: dict[str, tuple], lines: tuple, marker: str) -> tuple[Figure, str]:
    """Draw ranges of speedups, {label: values}, with a marker at the median, and vertical lines."""
    figure, panel = panel_of(1.2 + 0.4 * len(ratios))
    for name, values in ratios.items():
        middle = statistics.median(values)
        reach = [[middle - min(values)], [max(values) - middle]]
        panel.errorbar(middle, name, xerr=reach, fmt=marker, capsize=6, color="C0")
    for line in lines:
        panel.axvline(line, color=INK, linestyle="--")
    panel.invert_yaxis()
    panel.margins(y=0.2)
    panel.set_xlabel(unit)
    return described(figure, title, ratios)


def t4() -> tuple[Figure, str]:
    """Predicted speedup on a T4, with the puzzle's lines for points."""
    rows, ratios = select(store.rows(T4), "t4_prediction"), {}
    for name in ("unsloth_today", "unsloth_classic"):
        values = one(rows, case="speedup", contender=name).values
        points = one(rows, case="points", contender=name)
        won = f"{points.low:.0f} of 14 points"
        if points.low < points.high:
            won = f"{points.low:.0f} to {points.high:.0f} of 14 points"
        ratios[f"over {LABELS[name]}: {extent(values)}, {won}"] = values
    title = "Predicted speedup on a Tesla T4 with Triton 3.6, not measured"
    unit = "speedup (dashed: the lines that give points)"
    figure, text = _ranges(title, unit, ratios, (1.05, 1.10, 1.15), "none")
    figure.axes[0].set_xlim(left=1.0)
    return figure, text


def training() -> tuple[Figure, str]:
    """Speedup of a QLoRA step by library and tokens: median and range of the rounds."""
    rows, ratios = select(store.rows(CARD), "training"), {}
    if not rows:
        raise store.Missing("training")
    for with_ in select(rows, contender="with"):
        without = one(rows, case=with_.case, contender="without")
        values = np.divide(without.values, with_.values)
        ratios[f"{with_.case}: {rounded_down(statistics.median(values))} ({extent(values)})"] = values
    title = f"Speedup of a QLoRA step on an {CARD_NAME}, median and range of the rounds"
    return _ranges(title, "step time without the kernel / with it", ratios, (1,), "o")


def idea() -> tuple[Figure, str]:
    """Draw how 4 bytes and two scales become 8 weights in one 128-bit store."""
    first, second = table = np.char.mod("%.2f", np.float16(np.outer(SCALES, NF4_VALUES)))
    codes = [int(code, 16) for code in CODES]
    word_x, lane_x = (FOLLOWED + 0.4) / 8, (codes[FOLLOWED] + 0.5) / 16
    figure, panel = panel_of(5.4)
    panel.set_axis_off()

    def cells(y, label, texts, x, *colors):
        row = panel.table([texts], [np.resize(colors, len(texts))], cellLoc="center", bbox=(0, y, 1, 0.075))
        for cell in row.get_celld().values():
            cell.get_text().set_color("black")
            cell.set_edgecolor(INK)
        row[0, int(x * len(texts))].set(linewidth=3, zorder=3, edgecolor="black")
        panel.text(-0.01, y + 0.03, label, ha="right")

    def arrow(*ends):
        panel.annotate("", *ends, arrowprops={"arrowstyle": "<|-", "linewidth": 2, "color": INK})

    for y, weight, text in IDEA_TEXTS:
        panel.text(-0.24, y, text, weight=weight)
    cells(0.88, "codes of a word", [*CODES], word_x, STORED)
    arrow((word_x, 0.88), (lane_x, 0.715))
    cells(0.64, "lane", [*"0123456789ABCDEF"], lane_x, STORED)
    cells(0.565, f"block 0: NF4 × {SCALES[0]}", first, lane_x, FIRST)
    cells(0.49, f"block 1: NF4 × {SCALES[1]}", second, lane_x, SECOND)
    arrow((lane_x, 0.49), (word_x, 0.325))
    cells(0.25, "shfl: lane's register", table.T[codes].flatten(), word_x, FIRST, SECOND)
    arrow((word_x, 0.25), (word_x, 0.165))
    cells(0.09, "one 128-bit store", first[codes], word_x, FIRST)
    alt = (
        f"16 lanes hold each NF4 value times {SCALES[0]} in the low half of a register and times "
        f"{SCALES[1]} in the high half, rounded to fp32, then to 16 bits. A shuffle fetches the register of "
        f"lane {CODES[FOLLOWED]}, prmt keeps its low half, and one 128-bit store writes 8 results."
    )
    return figure, alt


PICTURES = {picture.__name__: picture for picture in (idea, where_time_goes, share_by_size, t4, training)}
