"""Draw the pictures of README, docs and the notebook from stored rows.

Each function of PICTURES returns a figure and its alternative text, which says in words what it shows.
"""

import hashlib
import math
import statistics
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from helpers.results import store
from helpers.results.store import one, select
from nf4_triton.kernel import NF4

CARD, T4 = "nvidia-h200", "tesla-t4-simulated"  # the folders that the pages quote
CARD_NAME = "NVIDIA H200"
SHAPES = {  # of the official protocol, by their elements
    "4194304 bf16": "1024x4096 bf16",
    "16777216 fp16": "2048x8192 fp16",
    "58720256 bf16": "4096x14336 bf16",
}
CALLS = 9000  # of the official protocol: 1000 rounds, 3 configurations, 3 weights
BYTES = 0.5 + 1 / 64 + 4 / 16384 + 2  # read and written per weight
LABELS = {  # slowest first
    "peft": "PEFT",
    "bitsandbytes": "bitsandbytes",
    "unsloth_classic": "Unsloth classic",
    "unsloth_today": "Unsloth today",
    "ours": "this kernel",
}
# One color per contender in all pictures; as text on PAPER each has a contrast of at least 4.5. No color has
# that on a white page and on GitHub's dark one (#0d1117), so a picture brings its own background.
COLORS = dict(zip(LABELS, ("#57606A", "#2E7D32", "#7A4FB5", "#C2410C", "#0B63CE"), strict=True))
PAPER, INK = "#FFFFFF", "#1F2328"
FIRST, SECOND, PLAIN = "#FFDF85", "#A6DCE8", "#F0F2F5"  # idea: block 0, block 1, neither
WORD, SCALE = "855A8A74", 0.0391  # idea: a word of block 1 and its scale
FOLLOWED = 5  # the code that the arrows follow

matplotlib.rcParams.update(
    {
        "font.size": 11,
        "figure.facecolor": PAPER,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.alpha": 0.5,
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


def digest(figure: Figure, alt: str) -> str:
    """Return a hash of what a picture is drawn from: the code of this file, its words, lines and bars."""
    inputs = [store.code_hash(Path(__file__).read_text(encoding="utf-8")), alt]
    for panel in figure.axes:
        inputs += [np.round(line.get_xydata(), 3).tolist() for line in panel.lines]
        inputs += [np.round(bar.get_bbox().bounds, 3).tolist() for bar in panel.patches]
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:12]


def save(figure: Figure, alt: str, file: Path) -> None:
    """Write a PNG with a palette, at most 45 kB, that carries its digest."""
    figure.savefig(file, dpi=100)
    note = PngImagePlugin.PngInfo()
    note.add_text("inputs", digest(figure, alt))
    Image.open(file).convert("RGB").quantize().save(file, optimize=True, pnginfo=note)


def rounded_down(ratio: float) -> str:
    """Return 1.0968 as '1.09': no speedup is rounded up."""
    return f"{math.floor(round(100 * ratio, 6)) / 100:.2f}"


def extent(values) -> str:
    """Return the range of ratios: '0.96 to 1.23'."""
    return f"{rounded_down(min(values))} to {rounded_down(max(values))}"


def span(row) -> str:
    """Return the range of whole numbers: '10 to 14', or '14' if it has one value."""
    return " to ".join(f"{value:.0f}" for value in sorted({row.low, row.high}))


def protocol() -> tuple[Figure, str]:
    """Seconds of the official protocol, contenders in turns."""
    rows, facts = select(store.rows(CARD), "protocol", "total"), []
    ours = one(rows, contender="ours").median
    figure, panel = panel_of(2.9)
    for name, label in LABELS.items():
        seconds = one(rows, contender=name).median
        text = f"{seconds:.3f} s"
        if name != "ours":
            text += f", {rounded_down(seconds / ours)} times as long"
        panel.bar_label(panel.barh(label, seconds, color=COLORS[name]), [text], padding=4)
        facts.append(f"{label}: {text}")
    panel.invert_yaxis()
    panel.margins(x=0.3)
    panel.set_xlabel("seconds: 9,000 calls, each with a synchronize; shorter is better")
    return described(figure, f"The puzzle's test on an {CARD_NAME}", facts)


def where_time_goes() -> tuple[Figure, str]:
    """Average call of the official protocol: GPU kernels, and launch path plus synchronization."""
    rows, facts = store.rows(CARD), []
    figure, panel = panel_of(3.2)
    for name in ("bitsandbytes", "unsloth_classic", "unsloth_today", "ours"):
        seconds = one(rows, "protocol", "total", name).median
        on_gpu = statistics.mean(one(rows, "gpu_time", size, name).median for size in SHAPES)
        on_gpu, whole = round(on_gpu, 1), round(1e6 * seconds / CALLS, 1)
        facts.append(f"{LABELS[name]}: {on_gpu} + {whole - on_gpu:.1f} = {whole}")
        panel.barh(facts[-1], on_gpu, color=COLORS[name])
        panel.barh(facts[-1], whole - on_gpu, left=on_gpu, color=COLORS[name], alpha=0.35)
    panel.invert_yaxis()
    panel.set_xlabel("dark: GPU kernels, measured separately; light: the rest of a call")
    return described(figure, f"Average call of the official protocol in us, {CARD_NAME}", facts)


def speed_by_size() -> tuple[Figure, str]:
    """Bytes that each kernel moves per second, by size."""
    rows, facts = select(store.rows(CARD), "gpu_time"), []
    if not rows:
        raise store.Missing("gpu_time")
    sizes = np.array(sorted({int(row.case.split()[0]) for row in rows}))

    def us(name):
        return np.array([one(rows, case=f"{size} bf16", contender=name).median for size in sizes])

    figure, panel = panel_of(4.2)
    for name, marker in {"ours": "o", "unsloth_today": "s", "unsloth_classic": "^"}.items():
        speeds = BYTES * sizes / us(name) / 1e6
        panel.semilogx(sizes, speeds, f"{marker}-", label=LABELS[name], color=COLORS[name])
        facts.append(f"{LABELS[name]}: {extent(speeds)} TB/s")
    for size, shape in SHAPES.items():
        panel.axvline(int(size.split()[0]), color=INK, linestyle=":")
        top = panel.get_xaxis_transform()
        panel.text(int(size.split()[0]), 1.01, shape.split()[0], ha="center", fontsize=9, transform=top)
    panel.set(xlabel="elements of the weight, bf16 (dotted: the official shapes)", ylabel="TB/s")
    panel.set_ylim(bottom=0)
    panel.grid()
    figure.legend(loc="outside lower center", ncols=3)
    return described(figure, f"Bytes moved per second on the GPU, {CARD_NAME}", facts)


def t4_speedups() -> list[tuple]:
    """Return the predicted speedups on a T4, each with the points that it wins, as pairs of rows."""
    rows = select(store.rows(T4), "t4_prediction")
    found = [row for row in rows if row.case.startswith("speedup")]
    if not found:
        raise store.Missing("speedup")
    return [
        (row, one(rows, case=row.case.replace("speedup", "points"), contender=row.contender)) for row in found
    ]


def t4() -> tuple[Figure, str]:
    """Predicted speedup on a T4, with the puzzle's lines for points."""
    facts = []
    figure, panel = panel_of(1.3 + 0.4 * len(t4_speedups()))
    for row, won in t4_speedups():
        over = f"over {LABELS[row.contender]}{row.case.removeprefix('speedup')}"
        facts.append(f"{over}: {extent(row.values)}, {span(won)} of 14 points")
        panel.plot([row.low, row.high], [facts[-1]] * 2, "|-", color=COLORS[row.contender], linewidth=4)
    for line in (1.05, 1.10, 1.15):
        panel.axvline(line, color=INK, linestyle="--")
    panel.invert_yaxis()
    panel.margins(y=0.2)
    panel.set_xlim(left=0.98)
    panel.set_xlabel("speedup (dashed: the lines that give points)")
    return described(figure, "Predicted speedup on a Tesla T4, not measured", facts)


def idea() -> tuple[Figure, str]:
    """Draw how a tile's codes become weights: one scale a row, one lookup a code, two products at a time."""
    codes = [int(code, 16) for code in WORD]
    weights = np.char.mod("%.4f", np.float16(np.float32(SCALE * np.take(NF4.value, codes))))
    figure, panel = panel_of(4.6)
    panel.set_axis_off()
    panel.set_ylim(0, 1.03)

    def step(y, text, weight="bold"):
        panel.text(-0.2, y, text, weight=weight)

    def cells(y, label, texts, color, followed=None):
        """Draw a row of cells; the bold one is on the way that the arrows follow."""
        bars = panel.bar(np.arange(len(texts)) / len(texts), 0.07, 1 / len(texts), y, align="edge")
        for bar in bars:
            bar.set(facecolor=color, edgecolor=INK)
        if followed is not None:
            bars[followed].set(linewidth=3, zorder=3)
        panel.bar_label(bars, texts, label_type="center", fontsize=10)
        panel.text(-0.01, y + 0.02, label, ha="right")

    def arrow(*ends):
        panel.annotate("", *ends, arrowprops={"arrowstyle": "<|-", "linewidth": 2, "color": INK})

    step(0.98, "1  Each row of 64 codes of a program's tile lies in one block, so it has one scale.")
    for block, color in enumerate((FIRST, SECOND)):
        words = [f"{start}\u2013{start + 7}" for start in range(64 * block, 64 * block + 64, 8)]
        cells(0.88 - 0.08 * block, f"row {block} = block {block}", words, color, block or None)
    step(0.73, "scale = code2[absmax] \u00d7 absmax2 + offset, rounded twice (no FMA)", "normal")
    step(0.64, "2  A 32-bit word holds 8 codes of its row, high nibble first.")
    cells(0.54, "codes 72\u201379", [*WORD], SECOND, FOLLOWED)
    arrow(((FOLLOWED + 0.5) / 8, 0.54), ((codes[FOLLOWED] + 0.5) / 16, 0.41))
    step(0.45, "3  16 values on 16 lanes: one tl.gather looks up every code.")
    cells(0.34, "lane", [*"0123456789ABCDEF"], PLAIN, codes[FOLLOWED])
    cells(0.26, "NF4 value", np.char.mod("%.2f", NF4.value), PLAIN, codes[FOLLOWED])
    arrow(((codes[FOLLOWED] + 0.5) / 16, 0.26), ((FOLLOWED // 2 + 0.5) / 4, 0.11))
    step(0.16, f"4  Multiply by the row's scale {SCALE}, round, pack pairs.")
    pairs = [" and ".join(pair) for pair in weights.reshape(4, 2)]
    cells(0.04, "32-bit registers", pairs, SECOND, FOLLOWED // 2)
    alt = (
        "A tile of rows of 64 codes: row 0 is block 0, row 1 is block 1, and each has one scale. A word of "
        f"32 bits holds 8 codes, high nibble first; the word {WORD} holds codes 72 to 79, all of block 1. "
        f"tl.gather looks up code {WORD[FOLLOWED]} among 16 values on 16 lanes. Two values at a time are "
        "multiplied by the scale of block 1, rounded, and packed into one 32-bit register."
    )
    return figure, alt


PICTURES = {picture.__name__: picture for picture in (idea, protocol, where_time_goes, speed_by_size, t4)}
