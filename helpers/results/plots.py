"""Draw the pictures of README, docs and the notebook from stored rows.

Each function returns a Picture, whose `alt` says in words what it shows.
"""

import io
import statistics

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from PIL import Image

from helpers.results import store
from helpers.results.store import one, select

CARD, T4 = "nvidia-h200", "tesla-t4-simulated"  # the folders that the pages quote
SHAPES = {
    "2048x8192 fp16": 2048 * 8192,
    "1024x4096 bf16": 1024 * 4096,
    "4096x14336 bf16": 4096 * 14336,
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
CONTENDERS = ("ours", "unsloth_today", "unsloth_classic", "bitsandbytes")  # those that pictures show
WIDTH, DPI = 7.6, 105  # inches and dots: as wide as an output cell in Colab
PALE, BLUE, GREEN, ARROW = "#EEF2F6", "#CFE3F5", "#D7EFD9", "#D55E00"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
STYLE |= matplotlib.style.library["tableau-colorblind10"]  # its colors are C0, C1, ...
FOLLOWED = 3  # the code of the word that the idea picture follows
styled = matplotlib.rc_context(STYLE)


class Picture(Figure):
    """A matplotlib Figure with alternative text that renders to a small PNG."""

    alt = ""

    def png(self) -> bytes:
        """Return the picture as PNG with a palette, at most 45 kB."""
        drawn, small = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=DPI)
        Image.open(drawn).convert("RGB").quantize(dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        return small.getvalue()


def _picture(height: float, panels: int = 1):
    """Return (an empty figure, its panels in a row)."""
    figure = Picture(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _finish(figure: Picture, title: str, facts: list[str]) -> Picture:
    """Add the title, the legend above the panels, and the alternative text."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, title=title, title_fontsize=11, ncols=4, loc="outside upper center")
    figure.alt = f"{title}. {'; '.join(facts)}."
    return figure


def _bars(title: str, parts: dict[str, str], unit: str, bars: dict[str, tuple]) -> Picture:
    """Draw bars of several parts; parts: {label: color}; bars: {name: (text, *where its parts end)}."""
    figure, (panel,) = _picture(1.1 + 0.33 * len(bars))
    starts, (texts, *ends) = [0.0] * len(bars), zip(*bars.values(), strict=True)
    for (part, color), stops in zip(parts.items(), ends, strict=True):
        lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        drawn, starts = panel.barh(list(bars), lengths, 0.6, starts, color=color, label=part), stops
    panel.bar_label(drawn, texts, padding=3, fontsize=8)
    panel.invert_yaxis()
    panel.set(xlabel=unit, xlim=(0, 1.15 * max(starts)))
    return _finish(figure, title, [f"{name}: {bar[0]}" for name, bar in bars.items()])


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
    rows, bars = store.rows(CARD), {}
    for name in CONTENDERS:
        on_gpu, rest = call_us(rows, name)
        bars[LABELS[name]] = f"{on_gpu:.1f} + {rest:.1f} = {on_gpu + rest:.1f}", on_gpu, on_gpu + rest
    title = f"Average call of the official protocol, {store.meta(CARD)['card']}"
    return _bars(title, {"GPU kernels": "C0", "launch path and synchronization": "C1"}, "microseconds", bars)


@styled
def share_by_size() -> Picture:
    """Speed of each kernel relative to one that only moves the bytes, by size, fp16 and bf16."""
    figure, panels = _picture(3.3, panels=2)
    rows, facts = select(store.rows(CARD), "gpu_time"), []
    for panel, dtype in zip(panels, ("fp16", "bf16"), strict=True):
        of_dtype = [row for row in rows if row.case.endswith(dtype)]
        reference = {row.case: row.median for row in select(of_dtype, contender="copy_kernel")}
        for name in CONTENDERS[:3]:
            speeds = {size_text(int(row.case.split()[0])): reference[row.case] / row.median
                      for row in select(of_dtype, contender=name) if row.case in reference}  # fmt: skip
            label = LABELS[name] + " (runs bitsandbytes' kernels)" * (name == "unsloth_classic")
            panel.plot(list(speeds), speeds.values(), "o-", label=label, markersize=4)
            facts.append(f"{dtype}, {LABELS[name]}: {min(speeds.values()):.2f} to {max(speeds.values()):.2f}")
        panel.set(title=dtype, xlabel="elements of the weight", ylim=(0, 1.1))
        panel.tick_params(axis="x", labelrotation=45)
        panel.grid(color="#DDDDDD")
    panels[0].set_ylabel("relative speed")
    title = f"GPU speed relative to the memory-bound reference, {store.meta(CARD)['card']}"
    return _finish(figure, title, facts)


@styled
def t4() -> Picture:
    """Predicted seconds of the official protocol on a T4: simulated kernels, and calls as published."""
    rows, bars = store.rows(T4), {}
    for name in CONTENDERS[:3]:
        kernels, total = (one(rows, "t4_prediction", case, name) for case in ("kernels", "total"))
        bars[LABELS[name]] = f"{total.low:.1f} to {total.high:.1f} s", kernels.low, total.low, total.high
    parts = {"kernels, at least": "C0", "launch overhead, at least": "C1", "uncertainty of both": "C8"}
    return _bars("Official protocol on a Tesla T4, predicted, not measured", parts, "seconds", bars)


def speedups(rows, section: str, case: str) -> list[float]:
    """Return the time without the kernel over that with it, round by round."""
    without, with_ = (one(rows, section, case, name).values for name in ("without", "with"))
    return [a / b for a, b in zip(without, with_, strict=True)]


@styled
def training() -> Picture:
    """Speedup of a QLoRA step by library and tokens: median and range of the rounds."""
    rows, bars = store.rows(CARD), {}
    for case in dict.fromkeys(row.case for row in select(rows, "training")):
        ratios = speedups(rows, "training", case)
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        bars[case] = f"{(speed := statistics.median(ratios)):.2f}{spread}", speed
    title = f"QLoRA step with the kernel, {store.meta(CARD)['card']}"
    return _bars(title, {"step time without / with": "C0"}, "times as fast", bars)


def numbers() -> dict:
    """Return the numbers of the idea picture: the first two blocks of a real layer, in fp16."""
    import torch

    from helpers.nf4.reference import NF4_VALUES, quantized_layer

    layer = quantized_layer(128, 2, torch.float16, device="cpu")
    state = layer.weight.quant_state
    code2, absmax2, offset = state.state2.code[state.absmax[:2].long()], state.state2.absmax[0], state.offset
    scales = code2 * absmax2 + offset
    formula = f"code2[{state.absmax[0]}] x absmax2 + offset = {code2[0]:.4f} x {absmax2:.4f} + {offset:.4f}"
    codes = [nibble for byte in layer.weight.data.flatten()[:4].tolist() for nibble in divmod(byte, 16)]
    table = [(torch.tensor(NF4_VALUES) * scale).to(torch.float16).tolist() for scale in scales]
    return {
        "nf4": NF4_VALUES,
        "codes": codes,
        "formula": formula,
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
    figure = Picture(figsize=(WIDTH, 4.3))
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, 100), ylim=(0, 56))
    panel.set_axis_off()

    def box(x, y, width, text, color=PALE, size=7.0, strong=False):
        edge, line, layer = (ARROW, 1.6, 3) if strong else ("#8A97A3", 0.6, 2)
        style = dict(facecolor=color, edgecolor=edge, linewidth=line, zorder=layer)
        panel.add_patch(Rectangle((x, y), width, 3.4, **style))
        say(x + width / 2, y + 1.6, text, size, ha="center", zorder=4)

    def say(x, y, text, size=7.6, **style):
        panel.text(x, y, text, fontsize=size, va="center", **style)

    def arrow(start, end):
        style = dict(arrowstyle="-|>", mutation_scale=10, color=ARROW, linewidth=1.3, zorder=5)
        panel.add_patch(FancyArrowPatch(start, end, **style))

    say(1, 53.5, "1  The bytes: one scale per block of 64 weights, 8 codes per 32-bit word", 9, weight="bold")
    say(3, 49.4, "absmax: one byte per block; absmax2: one per 256 blocks")
    say(3, 46.0, f"scale = {n['formula']}")
    say(3, 42.6, f"= {n['scales'][0]:.4f}: two roundings, never an FMA", weight="bold")
    for i, nibble in enumerate(n["codes"]):
        box(word + 4.6 * i, 46.6, 4.6, f"{nibble:X}", (BLUE, PALE)[i // 2 % 2], 9, i == FOLLOWED)
    say(lane_x + 1.5, 42.6, f"code {code:X} reads lane {code:X}", color=ARROW)

    say(1, 38.6, "2  The table: one register in 16 lanes serves two blocks", 9, weight="bold")
    rows = (
        ("lane", PALE, [f"{lane:X}" for lane in range(16)]),
        ("NF4 value", PALE, [f"{value:.3f}" for value in n["nf4"]]),
        (f"x {n['scales'][0]:.4f}, low half", BLUE, [f"{value:.3f}" for value in n["table"][0]]),
        (f"x {n['scales'][1]:.4f}, high half", GREEN, [f"{value:.3f}" for value in n["table"][1]]),
    )
    for row, (text, color, cells) in enumerate(rows):
        y = 33.4 - 3.4 * row
        say(18.6, y + 1.6, text, 6.8, ha="right")
        for lane, cell in enumerate(cells):
            box(19.2 + 5 * lane, y, 5, cell, color, 6.0, row == 2 and lane == code)
    say(3, 20.6, "16 products per block, each rounded once: the only values its 64 weights can take")

    say(1, 15.4, "3  The lookup: 8 codes, 8 shuffles, one 128-bit store", 9, weight="bold")
    for i, value in enumerate(n["stored"]):
        box(lane_x - 3.5 * 6.2 + 6.2 * i, 8.6, 6.2, f"{value:.3f}", BLUE, 7.0, i == FOLLOWED)
    say(3, 10.2, "8 x 16 bits, in order; fp16 here. bf16 is rounded")
    say(3, 7.2, "in step 2, with integer arithmetic on a T4")
    text = "bytes per weight: read 0.5 (codes) + 1/64 (absmax) + 4/16384 (absmax2), write 2: 2.516 in all"
    say(3, 2.6, text, weight="bold")
    arrow((lane_x, 46.4), (lane_x, 37.2))
    arrow((lane_x, 23.0), (lane_x, 12.3))
    figure.alt = (
        f"The codes {' '.join(f'{c:X}' for c in n['codes'])} of a 32-bit word; the scale "
        f"{n['scales'][0]:.4f} from an absmax byte, absmax2 and the offset; 16 lanes, each with its NF4 "
        f"value times the scales of two blocks in the halves of one register; code {code:X} fetches "
        f"{stored:.3f} from lane {code:X}, one of 8 values written with one 128-bit store."
    )
    return figure
