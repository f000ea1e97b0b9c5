"""Figures drawn from one benchmark result file. Nothing is measured or stored here.

Every function takes the content of a result file ({environment, kernel_hash, data}, or None where there is
none) and returns a `Picture`; what was not measured becomes a panel that says so.
"""

import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from helpers.record.goals import DTYPES, FLOORS, size_text

WIDTH, DPI = 7.6, 105  # inches and dots: as wide as an output cell in Colab
# Okabe and Ito's palette: told apart by colour-blind readers, and dark enough on white.
COLORS = {
    "kernel": "#0072B2",
    "unsloth_today": "#D55E00",
    "unsloth_classic": "#B27D00",
    "bitsandbytes": "#00815E",
    "peft": "#A6518A",
    "floor": "#000000",
    "copy": "#767676",
}
LABELS = {
    "kernel": "this kernel",
    "unsloth_today": "Unsloth today",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
    "peft": "PEFT",
    "empty_strided + fill_": "torch.empty_strided + fill_",
    "copy": "torch copy",
}
MARKERS = {
    "kernel": "o",
    "unsloth_today": "s",
    "unsloth_classic": "^",
    "bitsandbytes": "D",
    "floor": "",
    "copy": "x",
}
PARTS = {
    "allocate_us": ("allocation", "#56B4E9"),
    "launch_us": ("kernel launch", "#0072B2"),
    "rest_us": ("checks, Python", "#E69F00"),
    "wait_us": ("waiting for the GPU", "#BBBBBB"),
}
DTYPE_LABELS = {"float16": "fp16", "bfloat16": "bf16"}
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
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#1A1A1A"
    ),
}


class Picture(Figure):
    """A Figure that shows itself in a notebook without pyplot; `alt` says in words what it shows."""

    alt = ""

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, facecolor="white")
        return buffer.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict]:
        # Into the output's metadata, where nbconvert's classic template reads it.
        return self.png(), {"alt": self.alt}


def caption(result: dict | None) -> str:
    """Card, date, kernel hash and versions of a result file, in one line."""
    if not result:
        return "no result file"
    environment = result["environment"]
    card, date = environment.get("gpu") or "no GPU", (environment.get("date") or "no date")[:10]
    versions = ", ".join(
        f"{name} {environment[name]}" for name in ("torch", "triton") if environment.get(name)
    )
    forced = f" (decisions forced: {environment['forced']})" if environment.get("forced") else ""
    quick = ", quick run" if result.get("data", {}).get("quick") else ""
    return f"{card}{forced} | {date}{quick} | kernel {result['kernel_hash']} | {versions}"


def _picture(result, height: float, panels: int = 1):
    figure = Picture(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    figure.supxlabel(caption(result), fontsize=7.5)
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _section(result, name: str) -> tuple[dict, str]:
    """(the section's data, why it is not there): one of the two is empty."""
    if not result:
        return {}, "no result file"
    section = result.get("data", {}).get(name)
    if not section:
        return {}, "not in this result file"
    reason = section.get("not_measured") or section.get("failed")
    return ({}, reason) if reason else (section, "")


def _say_not_measured(panel, reason: str):
    panel.set_axis_off()
    text = f"not measured ({reason})"
    panel.text(0.5, 0.5, text, ha="center", va="center", wrap=True, fontsize=10, transform=panel.transAxes)


def _title(figure, title: str):
    """Title and one legend for all panels, above them, where the legend hides nothing."""
    handles = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        figure.suptitle(title, fontsize=11)
        return
    place = {"loc": "outside upper center", "ncols": 4 if max(map(len, handles)) < 40 else 3}
    figure.legend(handles.values(), handles.keys(), title=title, title_fontsize=11, **place)


def _size_axis(panel):
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
    panel.set_xlabel("elements of the weight")


def _cases(section: dict, dtype: str) -> list[dict]:
    measured = (case for case in section.get("sizes", []) if case["dtype"] == dtype and "rows" in case)
    return sorted(measured, key=lambda case: case["numel"])


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _drawn_once(series: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[str, list]]:
    """{name: (label, points)} of those with points, without classic where bitsandbytes' line would hide it.

    Unsloth classic launches bitsandbytes' kernels: their GPU times differ by noise only.
    """
    found = {name: (LABELS[name], points) for name, points in series.items() if points}
    theirs, classic = series.get("bitsandbytes"), series.get("unsloth_classic")
    if theirs and classic and [x for x, _ in theirs] == [x for x, _ in classic]:
        if all(abs(a / b - 1) < 0.03 for (_, a), (_, b) in zip(theirs, classic, strict=True)):
            found["bitsandbytes"] = "bitsandbytes (and Unsloth classic: same kernels)", theirs
            del found["unsloth_classic"]
    return found


def _line(panel, points: list[tuple[float, float]], name: str, label: str, **style):
    """Plot (x, y) points; returns a sentence part for the alternative text."""
    xs, ys = zip(*points, strict=True)
    panel.plot(xs, ys, color=COLORS[name], marker=MARKERS[name], label=label, **style)
    return f"{label} {_figure(min(ys))} to {_figure(max(ys))}"


def _by_size(result, title: str, ylabel: str, draw) -> Picture:
    """Two panels, fp16 and bf16; draw(panel, cases) returns what it drew, in words."""
    with matplotlib.rc_context(STYLE):
        figure, panels = _picture(result, 3.6, panels=2)
        section, reason = _section(result, "gpu")
        said = []
        for panel, dtype in zip(panels, DTYPES, strict=True):
            cases = _cases(section, dtype)
            drawn = draw(panel, cases) if cases else []
            if not drawn:
                _say_not_measured(panel, reason or f"no {DTYPE_LABELS[dtype]} sizes in this result file")
                said.append(f"{DTYPE_LABELS[dtype]} not measured")
                continue
            panel.set_title(DTYPE_LABELS[dtype])
            _size_axis(panel)
            said.append(f"{DTYPE_LABELS[dtype]}: {', '.join(drawn)}")
        panels[0].set_ylabel(ylabel)
        _title(figure, title)
        figure.alt = f"{title}. {'; '.join(said)}. {caption(result)}."
    return figure


def speedup_by_size(result: dict | None) -> Picture:
    """GPU time of each baseline over ours against the weight's size."""

    def draw(panel, cases):
        series = {
            name: [(case["numel"], case["vs"][name]) for case in cases if name in case.get("vs", {})]
            for name in ("unsloth_today", "unsloth_classic", "bitsandbytes")
        }
        said = [_line(panel, points, name, label) for name, (label, points) in _drawn_once(series).items()]
        if said:
            panel.axhline(1.0, color="#1A1A1A", linewidth=0.9)
            panel.set_yscale("log")
            low, high = panel.get_ylim()
            panel.set_ylim(min(0.9, low), high)
            panel.yaxis.set_major_locator(FixedLocator([0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8]))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return said

    return _by_size(result, "GPU time alone over ours, by size", "time / ours", draw)


def bandwidth_by_size(result: dict | None) -> Picture:
    """Achieved GB/s of everyone against the weight's size, with the ceiling measured in the same run."""

    def draw(panel, cases):
        said = []
        series = {
            name: [
                (case["numel"], case["rows"][name]["gb_s"])
                for case in cases
                if name in case["rows"] and (name != "copy" or case.get("buffers") != 1)  # not onto itself
            ]
            for name in ("kernel", "unsloth_today", "unsloth_classic", "bitsandbytes", "copy")
        }
        for name, (label, points) in _drawn_once(series).items():
            style = {"linestyle": ":"} if name == "copy" else {}
            said.append(_line(panel, points, name, label, **style))
        for kind, label in FLOORS.items():
            points = [(case["numel"], case["rows"][kind]["gb_s"]) for case in cases if kind in case["rows"]]
            if points:
                style = "-" if kind == "floor_cuda" else "--"
                label = f"ceiling: no arithmetic, {label}"
                said.append(_line(panel, points, "floor", label, linestyle=style, linewidth=1.1))
        panel.set_ylim(bottom=0)
        return said

    return _by_size(result, "Achieved bandwidth by size: bytes that must move / GPU time", "GB/s", draw)


def call_parts(result: dict | None) -> Picture:
    """Where the microseconds of one synchronized call go, for us, the baselines and empty_strided + fill_."""
    with matplotlib.rc_context(STYLE):
        section, reason = _section(result, "host")
        parts = {name: row for name, row in section.get("parts", {}).items() if "rest_us" in row}
        title = "Where the microseconds of one call go"
        if parts:
            case = section["cases"][0]
            title += f", {case['shape'][0]}x{case['shape'][1]} {DTYPE_LABELS[case['dtype']]}"
        figure, (panel,) = _picture(result, 0.42 * len(parts) + 1.8)
        if not parts:
            _say_not_measured(panel, reason or "the kernels of a call could not be counted")
            _title(figure, title)
            figure.alt = f"{title}: not measured. {caption(result)}."
            return figure
        names = sorted(parts, key=lambda name: parts[name]["returned_us"] + parts[name]["wait_us"])
        left = dict.fromkeys(names, 0.0)
        for key, (label, color) in PARTS.items():
            # A part can come out slightly below zero when a launcher is cheaper than the cheapest one known.
            widths = [max(parts[name][key], 0.0) for name in names]
            panel.barh(names, widths, left=list(left.values()), color=color, label=label, height=0.62)
            left = {name: left[name] + width for name, width in zip(names, widths, strict=True)}
        for name in names:
            panel.text(left[name], name, f" {left[name]:.1f}", va="center", fontsize=8)
        panel.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set_xlim(right=1.1 * max(left.values()))
        panel.set_xlabel("microseconds per call with a synchronize")
        _title(figure, title)
        totals = ", ".join(f"{LABELS.get(name, name)} {left[name]:.1f} us" for name in names)
        figure.alt = f"{title}. {totals}. {caption(result)}."
    return figure


def protocol(result: dict | None) -> Picture:
    """Seconds of the official protocol, p20 to p80 as whiskers, and the ratio to ours, the first entry."""
    title = "The official protocol, seconds"
    with matplotlib.rc_context(STYLE):
        section, reason = _section(result, "protocol")
        entries = {name: entry for name, entry in section.get("entries", {}).items() if entry.get("spread")}
        figure, (panel,) = _picture(result, 0.42 * len(entries) + 1.6)
        if not entries:
            _say_not_measured(panel, reason or "no candidate has times")
            _title(figure, title)
            figure.alt = f"{title}: not measured. {caption(result)}."
            return figure
        names = sorted(entries, key=lambda name: entries[name]["spread"]["p50"])
        middle = [entries[name]["spread"]["p50"] for name in names]
        low, high = ([entries[name]["spread"][key] for name in names] for key in ("p20", "p80"))
        whiskers = [
            [m - v for m, v in zip(middle, low, strict=True)],
            [v - m for m, v in zip(middle, high, strict=True)],
        ]
        colors = [COLORS.get(name, COLORS["kernel"]) for name in names]  # a candidate has a name of its own
        panel.barh(names, middle, xerr=whiskers, color=colors, height=0.62, error_kw={"elinewidth": 1})
        said, first = [], next(iter(section["entries"]))
        ours = dict(zip(names, middle, strict=True)).get(first)  # None where it failed
        for name, seconds, end in zip(names, middle, high, strict=True):
            ratio = "1" if name == first else ours and f"{seconds / ours:.2f}"
            text = f"{seconds:.3f} s" + (f" ({ratio})" if ratio else "")
            panel.text(end, name, f" {text}", va="center", fontsize=8)
            said.append(f"{LABELS.get(name, name)} {text}")
        panel.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set_xlim(right=1.22 * max(high))
        panel.set_xlabel(
            f"seconds of {section['rounds']} rounds, median of {section['repeats']} (time / ours)"
        )
        _title(figure, title)
        figure.alt = f"{title}. {'; '.join(said)}. {caption(result)}."
    return figure


FIGURES = {
    "speedup_by_size": speedup_by_size,
    "bandwidth_by_size": bandwidth_by_size,
    "call_parts": call_parts,
    "protocol": protocol,
}


def alt_text(figure: Picture) -> str:
    """What a figure shows, in words, for readers who do not see it."""
    return figure.alt


def save_all(result: dict | None, folder: Path) -> dict[str, Path]:
    """Write every figure as PNG into `folder`; {name: path}."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.png" for name in FIGURES}
    for name, path in paths.items():
        path.write_bytes(FIGURES[name](result).png())
    return paths
