"""Figures drawn from stored results. Nothing is measured or stored here.

Each takes a `results.Result` (None: there is no file) and returns a `Picture`; what was not measured becomes
a panel that says so. `alt` says in words what a picture shows.
"""

import io

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from helpers.record.names import ALLOCATE_FILL, BASELINES_ON_GPU, CEILINGS, DTYPES, label, size_text
from helpers.record.results import caption, ratio

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


class Picture(Figure):
    """A Figure that shows itself in a notebook without pyplot."""

    alt = ""

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, facecolor="white")
        return buffer.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict]:
        return self.png(), {"alt": self.alt}  # into the output's metadata, where nbconvert reads it


def _picture(result, height: float, panels: int = 1, what: str = "call"):
    figure = Picture(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    figure.supxlabel(caption(result, what), fontsize=7.5)
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _reason(result, section: str) -> str:
    """Why a section of a benchmark is not there."""
    if result is None:
        return "no result file"
    data = result.data
    return data.not_measured.get(section) or data.failed.get(section) or "not in this result file"


def _say_not_measured(panel, reason: str):
    panel.set_axis_off()
    text = f"not measured ({reason})"
    panel.text(0.5, 0.5, text, ha="center", va="center", wrap=True, fontsize=10, transform=panel.transAxes)


def _title(figure, title: str, drawn: list[str], source: str):
    """Title and one legend for all panels, above them, where it hides nothing; and the alternative text."""
    handles = {}
    for panel in figure.axes:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    if handles:
        place = {"loc": "outside upper center", "ncols": 4 if max(map(len, handles)) < 40 else 3}
        figure.legend(handles.values(), handles.keys(), title=title, title_fontsize=11, **place)
    else:
        figure.suptitle(title, fontsize=11)
    figure.alt = f"{title}. {'; '.join(drawn)}. {source}."
    return figure


def _shares(cases, ceiling: str) -> dict[str, tuple[str, list]]:
    """{name: (label, [(elements, share of the ceiling's speed)])}, without classic where bitsandbytes' line
    hides it: both launch the same kernels."""
    series = {}
    for name in ("kernel", *BASELINES_ON_GPU):
        points = [(case.numel, ratio(case.rows, ceiling, name)) for case in cases]
        points = [(numel, share) for numel, share in points if share is not None]
        if points:
            series[name] = label(name), points
    _, theirs = series.get("bitsandbytes", ("", []))
    _, classic = series.get("unsloth_classic", ("", []))
    same = theirs and [x for x, _ in theirs] == [x for x, _ in classic]
    if same and all(abs(a / b - 1) < 0.03 for (_, a), (_, b) in zip(theirs, classic, strict=True)):
        series["bitsandbytes"] = "bitsandbytes, Unsloth classic (same kernels)", theirs
        del series["unsloth_classic"]
    return series


def share_by_size(result) -> Picture:
    """The one speed picture: speed of each kernel as a share of one that only moves the bytes, by size."""
    with matplotlib.rc_context(STYLE):
        figure, panels = _picture(result, 3.5, panels=2, what="gpu")
        gpu = result.data.gpu if result else None
        cases = sorted((case for case in gpu.sizes if case.rows), key=lambda case: case.numel) if gpu else []
        ceiling = next((kind for kind in CEILINGS if any(kind in case.rows for case in cases)), "")
        drawn = []
        for panel, dtype in zip(panels, DTYPES, strict=True):
            series = _shares([case for case in cases if case.dtype == dtype], ceiling)
            if not series:
                _say_not_measured(panel, _reason(result, "gpu") if not cases else "no sizes of this dtype")
                drawn.append(f"{DTYPES[dtype]}: not measured")
                continue
            for name, (text, points) in series.items():
                xs, ys = zip(*points, strict=True)
                panel.plot(xs, ys, color=COLORS[name], marker=MARKERS[name], label=text)
                drawn.append(f"{DTYPES[dtype]}, {text}: {min(ys):.2f} to {max(ys):.2f}")
            panel.axhline(1.0, color=INK, linewidth=0.9)
            panel.set(title=DTYPES[dtype], xlabel="elements of the weight", xscale="log", ylim=(0, 1.1))
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
            panel.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
        panels[0].set_ylabel("share of that speed")
        return _title(
            figure, "GPU speed, as a share of a kernel that only moves the bytes", drawn, caption(result)
        )


def _bars(panel, names, ends, unit: str):
    """What horizontal bars have in common: names, totals behind the bars, the longest at the bottom."""
    for name in names:
        panel.text(ends[name], name, f" {ends[name]:.1f}", va="center", fontsize=8)
    panel.set_yticks(range(len(names)), [label(name) for name in names])
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_xlim(right=1.12 * max(ends.values()))
    panel.set_xlabel(unit)


def call_parts(result) -> Picture:
    """Where the microseconds of one synchronized call go; allocate + fill is the reference."""
    host = result.data.host if result else None
    parts = {name: part for name, part in host.parts.items() if part.rest_us is not None} if host else {}
    title = "Where the microseconds of one call go"
    with matplotlib.rc_context(STYLE):
        figure, (panel,) = _picture(result, 0.38 * len(parts) + 1.8)
        if not parts:
            _say_not_measured(panel, _reason(result, "host"))
            return _title(figure, title, ["not measured"], caption(result))
        case = host.cases[0]
        title += f": {case.shape[0]}x{case.shape[1]} {DTYPES[case.dtype]}, with a synchronize"
        names = sorted(parts, key=lambda name: parts[name].returned_us + parts[name].wait_us)
        ends = dict.fromkeys(names, 0.0)
        for key, (text, color) in PARTS.items():
            # A part comes out slightly below zero where a launcher is cheaper than the cheapest one known.
            widths = [max(getattr(parts[name], key), 0.0) for name in names]
            panel.barh(names, widths, left=list(ends.values()), color=color, label=text, height=0.62)
            ends = {name: ends[name] + width for name, width in zip(names, widths, strict=True)}
        _bars(
            panel, names, ends, f"microseconds ({label(ALLOCATE_FILL)} is the reference: it decodes nothing)"
        )
        return _title(
            figure, title, [f"{label(name)} {ends[name]:.1f} us" for name in names], caption(result)
        )


def t4(totals: dict, published: dict, source: str) -> Picture:
    """The official protocol on a T4: {contender: simulated.Total}, {contender: (low, high) seconds that
    others measured}, and where the figures are from."""
    title = "The official protocol on a Tesla T4, seconds: predicted, not measured here"
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(WIDTH, 2.6), dpi=DPI, layout="constrained")
        figure.supxlabel(source, fontsize=7.5)
        panel = figure.subplots()
        for name, total in totals.items():
            spans = (
                (0, total.kernels.low, 1.0, "kernels"),
                (total.kernels.low, total.both.low - total.kernels.low, 0.55, "and calls, at least"),
                (total.both.low, total.both.high - total.both.low, 0.25, "at most"),
            )
            for left, width, alpha, text in spans:
                style = dict(color=COLORS[name], alpha=alpha, height=0.55, linewidth=0)
                panel.barh(label(name), width, left=left, label=text if name == "kernel" else "", **style)
            panel.text(total.both.high, label(name), f" {total.both}", va="center", fontsize=8)
        for name, (low, high) in published.items():
            panel.errorbar(
                (low + high) / 2, list(totals).index(name) + 0.4, xerr=(high - low) / 2, color=INK,
                capsize=3, linewidth=1.2, label="measured by others",
            )  # fmt: skip
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        ends = [total.both.high for total in totals.values()] + [high for _, high in published.values()]
        panel.set_xlim(right=1.1 * max(ends))
        drawn = [f"{label(name)}: kernels {t.kernels} s, with calls {t.both} s" for name, t in totals.items()]
        drawn += [f"{label(name)}, by others: {low} to {high} s" for name, (low, high) in published.items()]
        return _title(figure, title, drawn, source)


def training(result) -> Picture:
    """Step time without the kernel over that with it, by tokens and library: median, 95% interval."""
    libraries = (
        {name: found.sizes for name, found in result.data.libraries.items() if found.sizes} if result else {}
    )
    title = "QLoRA step with the kernel (layer sizes of Llama-3 8B): time without / with"
    with matplotlib.rc_context(STYLE):
        figure, (panel,) = _picture(result, 3.0)
        if not libraries:
            _say_not_measured(panel, result.data.not_measured if result else "no result file")
            return _title(figure, title, ["not measured"], caption(result))
        drawn, width = [], 0.8 / len(libraries)
        tokens = sorted({size.tokens for sizes in libraries.values() for size in sizes})
        for index, (name, sizes) in enumerate(libraries.items()):
            at = [tokens.index(size.tokens) + (index - (len(libraries) - 1) / 2) * width for size in sizes]
            middle = [size.speedup.p50 for size in sizes]
            ends = [(s.speedup.low or s.speedup.p20, s.speedup.high or s.speedup.p80) for s in sizes]
            errors = [[max(0, m - low) for m, (low, _) in zip(middle, ends, strict=True)],
                      [max(0, high - m) for m, (_, high) in zip(middle, ends, strict=True)]]  # fmt: skip
            color, text = (
                (COLORS["unsloth_today"], "Unsloth")
                if name == "unsloth"
                else (COLORS["bitsandbytes"], "PEFT")
            )
            bars = panel.bar(at, middle, width * 0.9, yerr=errors, color=color, label=text)
            panel.bar_label(bars, fmt="%.2f", padding=2)
            drawn.append(f"{text} {', '.join(f'{value:.2f}' for value in middle)}")
        panel.axhline(1, color=INK, linewidth=0.9)
        panel.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens])
        panel.set(xlabel="tokens per step", ylim=(0.9, None))
        return _title(figure, title, drawn, caption(result))
