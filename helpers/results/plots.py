"""Figures drawn from stored results. Nothing is measured or stored here.

Each returns a `Picture`; what a benchmark did not measure becomes a panel that says so.
`alt` says in words what a picture shows.
"""

import io

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from helpers.results.names import ALLOCATE_FILL, BASELINES_ON_GPU, CEILING, DTYPES, label, size_text
from helpers.results.old_store import caption, ratio

WIDTH, DPI = 7.6, 105  # inches and dots: as wide as an output cell in Colab
# Okabe and Ito's palette: told apart by colour-blind readers, and dark enough on white.
COLORS = {
    "kernel": "#0072B2",
    "unsloth_today": "#D55E00",
    "unsloth_classic": "#B27D00",
    "bitsandbytes": "#00815E",
    "peft": "#A6518A",
}
MARKERS = {"kernel": "o", "unsloth_today": "s", "unsloth_classic": "^", "bitsandbytes": "D"}
PARTS = {
    "allocate_us": ("allocation", "#56B4E9"),
    "launch_us": ("kernel launch", "#0072B2"),
    "rest_us": ("checks, Python", "#E69F00"),
    "wait_us": ("waiting for the GPU", "#BBBBBB"),
}
INK = "#1A1A1A"
# Colours and background are set outright, so that a dark theme around the picture changes nothing in it.
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.fontsize": 8,
    "legend.frameon": False,
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "white"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}

styled = matplotlib.rc_context(STYLE)  # decorates what draws


class Picture(Figure):
    """A Figure that shows itself in a notebook without pyplot."""

    alt = ""

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, facecolor="white")
        return buffer.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict]:
        return self.png(), {"alt": self.alt}  # into the output's metadata, where renderers read it


def _picture(source: str, height: float, panels: int = 1):
    """(an empty figure with its source below, its panels in a row)."""
    figure = Picture(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    figure.supxlabel(source, fontsize=7.5)
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _say_not_measured(panel, data, section: str):
    """Say why a section of a benchmark is not there."""
    reason = (data.not_measured | data.failed).get(section)
    panel.set_axis_off()
    text = f"not measured ({reason or 'not in this result file'})"
    panel.text(0.5, 0.5, text, ha="center", va="center", wrap=True, fontsize=10, transform=panel.transAxes)


def _titled(figure, title: str, drawn: list[str]) -> Picture:
    """Title and one legend for all panels, above them, where it hides nothing; and the alternative text."""
    handles = {}
    for panel in figure.axes:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    if handles:
        place = {"loc": "outside upper center", "ncols": 4 if max(map(len, handles)) < 40 else 3}
        figure.legend(handles.values(), handles.keys(), title=title, title_fontsize=11, **place)
    else:
        figure.suptitle(title, fontsize=11)
    figure.alt = f"{title}. {'; '.join(drawn)}. {figure.get_supxlabel()}."
    return figure


def _shares(sizes: dict[int, dict]) -> dict[str, tuple[str, dict]]:
    """{name: (label, {elements: share of the ceiling's speed})}, without classic where bitsandbytes' line
    hides it: both launch the same kernels."""
    series = {
        name: {numel: share for numel, rows in sizes.items() if (share := ratio(rows, CEILING, name))}
        for name in ("kernel", *BASELINES_ON_GPU)
    }
    theirs, classic = series["bitsandbytes"], series["unsloth_classic"]
    labels = {name: label(name) for name, points in series.items() if points}
    same = theirs and theirs.keys() == classic.keys()
    if same and all(abs(theirs[numel] / classic[numel] - 1) < 0.03 for numel in theirs):
        labels["bitsandbytes"] = "bitsandbytes, Unsloth classic (same kernels)"
        del labels["unsloth_classic"]
    return {name: (text, series[name]) for name, text in labels.items()}


@styled
def share_by_size(result) -> Picture:
    """The one speed picture: speed of each kernel as a share of one that only moves the bytes, by size."""
    figure, panels = _picture(caption(result, "gpu"), 3.5, panels=2)
    sizes, drawn = result.data.gpu_rows(), []
    for panel, dtype in zip(panels, DTYPES, strict=True):
        series = _shares({numel: sizes[numel, of] for numel, of in sorted(sizes) if of == dtype})
        if not series:
            _say_not_measured(panel, result.data, "gpu")
            drawn.append(f"{DTYPES[dtype]}: not measured")
            continue
        for name, (text, points) in series.items():
            xs, ys = zip(*points.items(), strict=True)
            panel.plot(xs, ys, color=COLORS[name], marker=MARKERS[name], label=text)
            drawn.append(f"{DTYPES[dtype]}, {text}: {min(ys):.2f} to {max(ys):.2f}")
        panel.axhline(1.0, color=INK, linewidth=0.9)
        panel.set(title=DTYPES[dtype], xlabel="elements of the weight")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
        panel.xaxis.set_major_formatter(lambda value, _: size_text(int(value)))
        panel.minorticks_off()
        panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    highest = max(panel.dataLim.y1 for panel in panels)  # a quick run tries few launches of the byte-mover
    for panel in panels:
        panel.set_ylim(0, max(1.1, 1.05 * highest))
    panels[0].set_ylabel("share of that speed")
    return _titled(figure, "GPU speed, as a share of a kernel that only moves the bytes", drawn)


@styled
def call_parts(result) -> Picture:
    """Where the microseconds of one synchronized call go; allocate + fill is the reference."""
    host = result.data.host
    parts = {name: part for name, part in host.parts.items() if part.rest_us is not None} if host else {}
    title = "Where the microseconds of one call go"
    figure, (panel,) = _picture(caption(result), 0.38 * len(parts) + 1.8)
    if not parts:
        _say_not_measured(panel, result.data, "host")
        return _titled(figure, title, ["not measured"])
    case = host.cases[0]
    title += f": {case.shape[0]}x{case.shape[1]} {DTYPES[case.dtype]}, with a synchronize"
    names = sorted(parts, key=lambda name: parts[name].returned_us + parts[name].wait_us)
    ends = dict.fromkeys(names, 0.0)
    for key, (text, color) in PARTS.items():
        # A part comes out slightly below zero where a launcher is cheaper than the cheapest one known.
        widths = [max(getattr(parts[name], key), 0.0) for name in names]
        panel.barh(names, widths, left=list(ends.values()), color=color, label=text, height=0.62)
        ends = {name: ends[name] + width for name, width in zip(names, widths, strict=True)}
    for name, end in ends.items():
        panel.text(end, name, f" {end:.1f}", va="center", fontsize=8)
    panel.set_yticks(range(len(names)), [label(name) for name in names])
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_xlim(right=1.12 * max(ends.values()))
    panel.set_xlabel(f"microseconds ({label(ALLOCATE_FILL)} is the reference: it decodes nothing)")
    return _titled(figure, title, [f"{label(name)} {end:.1f} us" for name, end in ends.items()])


@styled
def t4(totals: dict, classic: tuple[float, float], source: str) -> Picture:
    """The official protocol on a T4: {contender: simulated.Total}, seconds of Unsloth classic that others
    measured (low, high), and where the figures are from."""
    figure, (panel,) = _picture(source, 2.6)
    for name, total in totals.items():
        kernels, both = total.kernels, total.both
        for left, right, alpha, text in (
            (0, kernels.low, 1.0, "kernels"),
            (kernels.low, both.low, 0.55, "and calls, at least"),
            (both.low, both.high, 0.25, "at most"),
        ):
            style = dict(color=COLORS[name], alpha=alpha, height=0.55, linewidth=0)
            panel.barh(label(name), right - left, left=left, label=text if name == "kernel" else "", **style)
        panel.text(both.high, label(name), f" {both}", va="center", fontsize=8)
    (low, high), row = classic, list(totals).index("unsloth_classic") + 0.4
    style = dict(color=INK, capsize=3, linewidth=1.2, label="measured by others")
    panel.errorbar((low + high) / 2, row, xerr=(high - low) / 2, **style)
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_xlim(right=1.1 * max(high, *(total.both.high for total in totals.values())))
    drawn = [f"{label(name)}: kernels {t.kernels} s, with calls {t.both} s" for name, t in totals.items()]
    drawn.append(f"{label('unsloth_classic')}, by others: {low} to {high} s")
    title = "The official protocol on a Tesla T4, seconds: predicted, not measured here"
    return _titled(figure, title, drawn)


@styled
def training(result) -> Picture:
    """Step time without the kernel over that with it, by tokens and library: median, 95% interval."""
    libraries = {name: library.sizes for name, library in result.data.libraries.items() if library.sizes}
    title = "QLoRA step with the kernel (layer sizes of Llama-3 8B): time without / with"
    figure, (panel,) = _picture(caption(result), 3.0)
    drawn, width = [], 0.8 / len(libraries)
    tokens = sorted({size.tokens for sizes in libraries.values() for size in sizes})
    for index, (name, sizes) in enumerate(libraries.items()):
        at = [tokens.index(size.tokens) + (index - (len(libraries) - 1) / 2) * width for size in sizes]
        speeds = [size.speedup for size in sizes]
        errors = [speed.p50 - speed.low for speed in speeds], [speed.high - speed.p50 for speed in speeds]
        text, color = {"unsloth": ("Unsloth", "unsloth_today")}.get(name, ("PEFT", "bitsandbytes"))
        middle = [speed.p50 for speed in speeds]
        bars = panel.bar(at, middle, width * 0.9, yerr=errors, color=COLORS[color], label=text)
        panel.bar_label(bars, fmt="%.2f", padding=2)
        drawn.append(f"{text} {', '.join(f'{value:.2f}' for value in middle)}")
    panel.axhline(1, color=INK, linewidth=0.9)
    panel.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens])
    lowest = min(size.speedup.low for sizes in libraries.values() for size in sizes)
    panel.set(xlabel="tokens per step", ylim=(min(0.9, lowest - 0.05), None))
    return _titled(figure, title, drawn)
