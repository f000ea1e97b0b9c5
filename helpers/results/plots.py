"""Draw the pictures of README, docs and the notebook from stored rows.

Each function returns a Picture, whose `alt` says in words what it shows.
"""

import io
import statistics

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import LogLocator
from PIL import Image

from helpers.results import store
from helpers.results.store import one, select

CARD, T4 = "nvidia-h200", "tesla-t4-simulated"  # the folders that the pages quote
SHAPES = {
    "2048x8192 fp16": 16_777_216,
    "1024x4096 bf16": 4_194_304,
    "4096x14336 bf16": 58_720_256,
}  # official
CALLS = 1000 * len(SHAPES) * 3  # of the official protocol: rounds, configurations, weights
LABELS = {
    "ours": "this kernel",
    "unsloth_today": "Unsloth today",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
    "peft": "PEFT",
    "copy_kernel": "memory-bound reference",
}
# Okabe and Ito's palette: readers with any color vision can tell these apart.
COLORS = {
    "ours": "#0072B2",
    "unsloth_today": "#D55E00",
    "unsloth_classic": "#B27D00",
    "bitsandbytes": "#00815E",
}
MARKERS = {"ours": "o", "unsloth_today": "s", "unsloth_classic": "^", "bitsandbytes": "D"}
WIDTH, DPI = 7.6, 105  # inches and dots: as wide as an output cell in Colab
INK, PALE, BLUE, GREEN, GOLD, ARROW = "#1A1A1A", "#EEF2F6", "#CFE3F5", "#D7EFD9", "#FDEBC8", "#D55E00"
# Explicit colors: a dark theme around the picture changes nothing in it.
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.fontsize": 8,
    "legend.frameon": False,
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "white"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
FOLLOWED = 3  # the code of the word that the idea picture follows
BEHIND = dict(facecolor="white", edgecolor="none", pad=0.5)  # keeps a label on a line readable
styled = matplotlib.rc_context(STYLE)


class Picture(Figure):
    """A matplotlib Figure with alternative text that renders to a small PNG."""

    alt = ""

    def png(self) -> bytes:
        """Return the picture as PNG with a palette, at most 45 kB."""
        drawn, small = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=DPI)
        Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            small, "PNG", optimize=True
        )
        return small.getvalue()


def _picture(height: float, panels: int = 1):
    """Return (an empty figure, its panels in a row)."""
    figure = Picture(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _finish(figure: Picture, title: str, facts: list[str]) -> Picture:
    """Add the title, one legend for all panels above them, and the alternative text."""
    handles = {}
    for panel in figure.axes:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), title=title, title_fontsize=11, ncols=4,
                  loc="outside upper center")  # fmt: skip
    figure.alt = f"{title}. {'; '.join(facts)}."
    return figure


def size_text(numel: float) -> str:
    """Return 65536 as '64K', 2**30 as '1G', 58720256 as '58.7M'."""
    for unit, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if numel >= scale and int(numel).bit_count() == 1:
            return f"{int(numel) // scale}{unit}"
    return f"{numel / 1e6:.3g}M"


def call_us(rows, contender: str) -> tuple[float, float]:
    """Return (GPU kernels, everything else) of the official protocol's average call, in microseconds."""
    whole = 1e6 * one(rows, "protocol", "total", contender).median / CALLS
    sizes = [f"{numel} {case.split()[1]}" for case, numel in SHAPES.items()]
    on_gpu = statistics.mean(one(rows, "gpu_time", size, contender).median for size in sizes)
    return on_gpu, whole - on_gpu


@styled
def where_time_goes() -> Picture:
    """Average call of the official protocol: GPU kernels, and launch path plus synchronization."""
    rows, facts = store.rows(CARD), []
    figure, (panel,) = _picture(2.5)
    for name in COLORS:
        on_gpu, rest = call_us(rows, name)
        first = name == "ours"
        panel.barh(LABELS[name], on_gpu, color="#0072B2", height=0.6, label="GPU kernels" if first else "")
        text = "launch path and synchronization" if first else ""
        panel.barh(LABELS[name], rest, left=on_gpu, color="#E69F00", height=0.6, label=text)
        panel.text(on_gpu + rest, LABELS[name], f" {on_gpu:.1f} + {rest:.1f}", va="center", fontsize=8)
        facts.append(f"{LABELS[name]} {on_gpu:.1f} + {rest:.1f}")
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_xlabel("microseconds")
    panel.set_xlim(right=1.15 * panel.dataLim.x1)
    return _finish(figure, f"Average call of the official protocol, {store.meta(CARD)['card']}", facts)


@styled
def share_by_size() -> Picture:
    """Speed of each kernel relative to one that only moves the bytes, by size, fp16 and bf16."""
    figure, panels = _picture(3.3, panels=2)
    rows, facts = select(store.rows(CARD), "gpu_time"), []
    for panel, dtype in zip(panels, ("fp16", "bf16"), strict=True):
        of_dtype = [row for row in rows if row.case.endswith(dtype)]
        reference = {row.case: row.median for row in select(of_dtype, contender="copy_kernel")}
        for name, color in COLORS.items():
            points = sorted((int(row.case.split()[0]), reference[row.case] / row.median)
                            for row in select(of_dtype, contender=name) if row.case in reference)  # fmt: skip
            xs, ys = zip(*points, strict=True)
            line = "--" if name == "bitsandbytes" else "-"  # the same GPU kernels as classic
            panel.plot(xs, ys, line, color=color, marker=MARKERS[name], label=LABELS[name])
            facts.append(f"{dtype}, {LABELS[name]}: {min(ys):.2f} to {max(ys):.2f}")
        panel.axhline(1.0, color=INK, linewidth=0.9)
        panel.set(title=dtype, xlabel="elements of the weight")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        panel.xaxis.set_major_formatter(lambda value, _: size_text(value))
        panel.minorticks_off()
    panels[0].set(ylim=(0, 1.1), ylabel="relative speed")
    title = f"GPU speed relative to the memory-bound reference, {store.meta(CARD)['card']}"
    return _finish(figure, title, facts)


@styled
def t4() -> Picture:
    """Predicted seconds of the official protocol on a T4: simulated kernels, and calls as published."""
    rows, facts = store.rows(T4), []
    figure, (panel,) = _picture(2.3)
    for name in ("ours", "unsloth_today", "unsloth_classic"):
        kernels, total = (one(rows, "t4_prediction", case, name) for case in ("kernels", "total"))
        for left, right, alpha, text in (
            (0, kernels.low, 1.0, "kernels"),
            (kernels.low, total.low, 0.55, "launch overhead, at least"),
            (total.low, total.high, 0.25, "at most"),
        ):
            style = dict(color=COLORS[name], alpha=alpha, height=0.55, linewidth=0)
            panel.barh(LABELS[name], right - left, left=left, label=text if name == "ours" else "", **style)
        span = f"{total.low:.1f} to {total.high:.1f}"
        panel.text(total.high, LABELS[name], f" {span}", va="center", fontsize=8)
        facts.append(f"{LABELS[name]}: {span} s")
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set(xlim=(0, 1.15 * panel.dataLim.x1), xlabel="seconds")
    return _finish(figure, "Official protocol on a Tesla T4, predicted, not measured", facts)


def speedups(rows, section: str, case: str) -> list[float]:
    """Return the time without the kernel over that with it, round by round."""
    without, with_ = (one(rows, section, case, name).values for name in ("without", "with"))
    return [a / b for a, b in zip(without, with_, strict=True)]


@styled
def training() -> Picture:
    """Speedup of a QLoRA step by library and tokens: median and middle half of the rounds."""
    rows, facts = store.rows(CARD), []
    cases = list(dict.fromkeys(row.case for row in select(rows, "training")))
    libraries, tokens = (list(dict.fromkeys(case.split(", ")[at] for case in cases)) for at in (0, 1))
    figure, (panel,) = _picture(2.8)
    for index, library in enumerate(libraries):
        rounds = [speedups(rows, "training", f"{library}, {text}") for text in tokens]
        speeds = [statistics.median(ratios) for ratios in rounds]
        quarters = [statistics.quantiles(ratios * 2, method="inclusive") for ratios in rounds]
        errors = [[q[1] - q[0] for q in quarters], [q[2] - q[1] for q in quarters]]
        at = [place + 0.4 * (index - (len(libraries) - 1) / 2) for place in range(len(tokens))]
        color = COLORS["unsloth_today" if library == "Unsloth" else "bitsandbytes"]
        panel.bar_label(
            panel.bar(at, speeds, 0.36, yerr=errors, color=color, label=library),
            fmt="%.2f",
            padding=2,
            bbox=BEHIND,
        )
        facts += [f"{library}, {text}: {speed:.2f}" for text, speed in zip(tokens, speeds, strict=True)]
    panel.axhline(1, color=INK, linewidth=0.9)
    panel.set_xticks(range(len(tokens)), tokens)
    panel.set(ylim=(0.8, None), ylabel="step time without / with")
    return _finish(figure, f"QLoRA step with the kernel, {store.meta(CARD)['card']}", facts)


def numbers() -> dict:
    """Return the numbers of the idea picture: the first two blocks of a real layer, in fp16."""
    import torch

    from helpers.nf4.reference import NF4_VALUES, quantized_layer

    layer = quantized_layer(128, 2, torch.float16, device="cpu")
    state = layer.weight.quant_state
    absmax, absmax2, offset = int(state.absmax[0]), state.state2.absmax[0], state.offset
    scales = (state.state2.code[state.absmax.long()] * absmax2 + offset)[:2]
    codes = [nibble for byte in layer.weight.data.flatten()[:4].tolist() for nibble in divmod(byte, 16)]
    table = [(torch.tensor(NF4_VALUES) * scale).to(torch.float16).tolist() for scale in scales]
    return {
        "nf4": NF4_VALUES,
        "codes": codes,
        "absmax": absmax,
        "code2": float(state.state2.code[absmax]),
        "absmax2": float(absmax2),
        "offset": float(offset),
        "scales": scales.tolist(),
        "table": table,
        "stored": [table[0][code] for code in codes],
    }


@styled
def idea() -> Picture:
    """Draw how 4 bytes and a scale become 8 weights in one 128-bit store."""
    n = numbers()
    code, stored = n["codes"][FOLLOWED], n["stored"][FOLLOWED]
    lane_x = 19.2 + 5 * code + 2.5
    word = lane_x - 4.6 * (FOLLOWED + 0.5)
    figure = Picture(figsize=(WIDTH, 4.7), dpi=DPI)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, 100), ylim=(0, 62))
    panel.set_axis_off()

    def box(x, y, width, text, color=PALE, size=7.0, strong=False):
        edge, line, layer = (ARROW, 1.6, 3) if strong else ("#8A97A3", 0.6, 2)
        style = dict(facecolor=color, edgecolor=edge, linewidth=line, zorder=layer)
        panel.add_patch(Rectangle((x, y), width, 3.4, **style))
        say(x + width / 2, y + 1.6, text, size, ha="center", zorder=4)

    def say(x, y, text, size=7.6, **style):
        panel.text(x, y, text, fontsize=size, va="center", **({"color": INK} | style))

    def arrow(start, end):
        style = dict(arrowstyle="-|>", mutation_scale=10, color=ARROW, linewidth=1.3, zorder=5)
        panel.add_patch(FancyArrowPatch(start, end, **style))

    say(1, 59.5, "1  The bytes", 9, weight="bold")
    facts = (
        (f"absmax {n['absmax']}", f"one byte per block: code2[{n['absmax']}] = {n['code2']:.4f}"),
        (f"{n['absmax2']:.4f}", "times absmax2, fp32, one per 256 blocks"),
        (f"{n['offset']:.4f}", "plus offset, fp32, one per tensor"),
    )
    for row, (value, text) in enumerate(facts):
        box(3, 53.4 - 3.9 * row, 11, value, GOLD)
        say(15.2, 55 - 3.9 * row, text)
    say(3, 43.2, f"scale = {n['scales'][0]:.4f}: two roundings, never an FMA", weight="bold")
    say(53, 57.8, "one 32-bit word: 4 bytes, 8 codes, high nibble first")
    for i, nibble in enumerate(n["codes"]):
        color = BLUE if i // 2 % 2 == 0 else PALE
        box(word + 4.6 * i, 52, 4.6, f"{nibble:X}", color, 9, i == FOLLOWED)
    say(53, 49, "8 words hold one block")
    say(lane_x + 1.5, 45, f"code {code:X} reads lane {code:X}", color=ARROW)

    say(
        1,
        39.6,
        "2  The table: one register in 16 lanes serves two blocks",
        9,
        weight="bold",
    )
    rows = (
        ("lane", PALE),
        ("NF4 value", PALE),
        (f"x {n['scales'][0]:.4f}, low half", BLUE),
        (f"x {n['scales'][1]:.4f}, high half", GREEN),
    )
    for row, (text, color) in enumerate(rows):
        y = 33.4 - 3.4 * row
        say(18.6, y + 1.6, text, 6.8, ha="right")
        for lane in range(16):
            halves = (f"{half[lane]:.3f}" for half in n["table"])
            cell = (f"{lane:X}", f"{n['nf4'][lane]:.3f}", *halves)[row]
            box(19.2 + 5 * lane, y, 5, cell, color, 6.0, row == 2 and lane == code)
    say(3, 20.6, "16 products per block, each rounded once: the only values its 64 weights can take")

    say(1, 15.4, "3  The lookup: 8 codes, 8 shuffles, one 128-bit store", 9, weight="bold")
    for i, value in enumerate(n["stored"]):
        box(lane_x - 3.5 * 6.2 + 6.2 * i, 8.6, 6.2, f"{value:.3f}", BLUE, 7.0, i == FOLLOWED)
    say(3, 10.2, "8 x 16 bits, in order; fp16 here. bf16 is rounded")
    say(3, 7.2, "in step 2, with integer arithmetic on a T4")
    text = "bytes per weight: read 0.5 (codes) + 1/64 (absmax) + 4/16384 (absmax2), write 2: 2.516 in all"
    say(3, 2.6, text, weight="bold")
    arrow((lane_x, 51.8), (lane_x, 37.2))
    arrow((lane_x, 23.0), (lane_x, 12.3))
    figure.alt = (
        f"The codes {' '.join(f'{c:X}' for c in n['codes'])} of a 32-bit word; the scale "
        f"{n['scales'][0]:.4f} from an absmax byte, absmax2 and the offset; 16 lanes, each with its NF4 "
        f"value times the scales of two blocks in the halves of one register; code {code:X} fetches "
        f"{stored:.3f} from lane {code:X}, one of 8 values written with one 128-bit store."
    )
    return figure
