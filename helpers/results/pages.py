"""Fill the marked blocks of README, docs and the notebook's text cells from stored rows; file sent results.

A block is everything between `<!-- name -->` and `<!-- /name -->`; the function of that name returns its
text. `<!-- figure name -->` holds the picture of that name. What has no rows is "Not measured yet."
"""

import argparse
import base64
import os
import re
from functools import partial
from operator import attrgetter
from pathlib import Path

import nbformat

from helpers.results import plots, store
from helpers.results.plots import CARD, T4, extent, rounded_down, span
from helpers.results.store import ROOT, one, select

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
FIGURES = ROOT / "docs" / "figures"
BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n.*?<!-- /(?P=name) -->", re.S)
FORMS = {
    "ours": "this kernel, replayed",
    "compiled_grid": "this kernel, `compiled[grid](...)`",
    "ordinary": "this kernel, `kernel[grid](...)`",
    "unsloth_today": "Unsloth today, replayed",
    "unsloth_buffered": "Unsloth today, one buffer",
    "unsloth_ordinary": "Unsloth today, `kernel[grid](...)`",
}
TITLES = {
    **FORMS,
    **plots.LABELS,
    "ours_out": "this kernel, with out=",
    "unsloth_out": "Unsloth today, with out=",
    "ours_empty_cache": "this kernel, Triton's cache empty",
    "public_launcher": "this kernel, replayed by Triton's Python launcher",
    "unsloth_stack": "Unsloth's `nf4_dequant_triton`",
    "products_only": "multiplication only",
    "copy_kernel": "memory-bound reference",
    "without": "without the kernel",
    "with": "with the kernel",
    "calls": "launch overhead",
    "until_return": "until it returns",
    "synchronized": "with a synchronize",
    "first_call_new_layer": "first call of a new layer",
    "first_call": "first call of a process, s",
    "geometric mean": "speedup of this kernel (geometric mean)",
    "speedup": "speedup of this kernel",
}
SECOND = "nvidia-h100-80gb-hbm3"  # another card that the pages quote
RANGES = ("t4_prediction", "t4_inputs", "published")  # sections whose values are shown from lowest to highest
CASE, CONTENDER = attrgetter("case"), attrgetter("contender")
TIMED = ("protocol", "host_time")
CLAIM = (
    "{points} points in {runs} runs of the puzzle's benchmark on one {card}. The kernel has {unsloth_today} "
    "times the speed of *Unsloth today*, the `fast_dequantize` of the current release (median; "
    "{unsloth_today range}). It has {unsloth_classic} times the speed of *Unsloth classic*, the code path of "
    "that function when the puzzle was published ({unsloth_classic range}). With contenders taking turns, as "
    "in the picture, it has {in turns} times the speed of Unsloth today."
)
SECOND_CLAIM = (
    " On one {card}: {points} points, {unsloth_today} times the speed of Unsloth today "
    "({unsloth_today range}), and {unsloth_classic} times that of Unsloth classic ({unsloth_classic range})."
)
HALVES = (
    "- **GPU:** from 16.8M elements on, this kernel moves {speed ours} TB/s, and Unsloth's {speed "
    "unsloth_today}.\n"
    "- **Launch path:** launched the ordinary way, with `kernel[grid]`, this kernel takes "
    "{total ordinary:.3f} s for the puzzle's test. Unsloth's function, which replays its launches, takes "
    "{total unsloth_today:.3f} s. Replayed, this kernel takes {total ours:.3f} s.\n"
    "- **In training:** Unsloth's forward pass reuses one buffer, and its call returns after "
    "{until_return unsloth_buffered:.1f} us. This one returns after {until_return ours:.1f} us. In the "
    "puzzle's test, that form takes {total unsloth_buffered:.3f} s."
)
LONG_TESTS = {  # section: (its name, what its rows say)
    "fuzz": (
        "random layers",
        "{layers_ours:,.0f} layers, {elements_ours:,.0f} weights, {wrong_ours:.0f} wrong",
    ),
    "soak": ("long run", "{launches_ours:,.0f} launches, {layers_ours:,.0f} layers, {wrong_ours:.0f} wrong"),
    "sanitizer": (
        "compute-sanitizer, errors",
        "memcheck {memcheck_ours:.0f}, racecheck {racecheck_ours:.0f}, initcheck {initcheck_ours:.0f}, "
        "synccheck {synccheck_ours:.0f}",
    ),
    "bitsandbytes_tests": (
        "bitsandbytes' own 4-bit tests, this kernel in place of its own",
        "{passed_ours:,.0f} passed, {failed_ours:.0f} failed "
        "(with its own kernel {passed_bitsandbytes:,.0f} and {failed_bitsandbytes:.0f})",
    ),
}


def title(name: str) -> str:
    """Return how a contender, unit or case is shown: "ours_eager" as "this kernel, eager"."""
    name = re.sub(r"\b\d{5,}", lambda found: f"{int(found[0]):,}", TITLES.get(name, name))
    mode = re.fullmatch(r"(\w+)_(eager|reduce_overhead)", name)
    return f"{title(mode[1])}, {mode[2].replace('_', '-')}" if mode else name


def table(corner: str, cells: dict[tuple[str, str], str]) -> str:
    """Return a markdown table; cells: {(line, column): text}, in the order of lines and columns."""
    if not cells:
        raise store.Missing(corner)
    lines, columns = map(dict.fromkeys, zip(*cells, strict=True))
    grid = [[corner, *map(title, columns)], ["---"] * (1 + len(columns))]
    for line in lines:
        grid.append([title(line), *(cells.get((line, column), "-") for column in columns)])
    return "\n".join(f"| {' | '.join(texts)} |" for texts in grid)


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def shown(row) -> str:
    """Return a row's median, with its range where that matters, or a prediction's range; ratios are rounded
    down."""
    show = rounded_down if row.unit == "x" else digits
    if row.section in RANGES and row.unit == "s":
        show = "{:.2f}".format
    if row.section in RANGES and row.low < row.high:
        return f"{show(row.low)} to {show(row.high)}"
    if row.section == "training" and row.unit == "x":  # low, median and high of the interval
        # A low end below 1.01 is shown as 1.00 or less.
        noise = ", within noise" if row.low < 1.01 and row.high >= 1 else ""
        return f"{show(row.median)} ({extent(row.values)}){noise}"
    if row.section == "host_time" and len(row.values) > 2:  # other work on the host shows
        return f"{show(row.median)} ({show(row.low)} to {show(row.high)})"
    return show(row.median)


def pivot(corner, card, section, units, line=CASE, column=CONTENDER) -> str:
    """Return a table of the rows of a section that have one of these units; line, column: their titles."""
    rows = [row for row in store.rows(card) if row.section == section and row.unit in units.split()]
    return table(corner, {(line(row), column(row)): shown(row) for row in rows})


def cards(section: str):
    """Yield (name, rows of a section) of each card that has them."""
    for card in (CARD, SECOND, "tesla-t4"):
        if rows := select(store.rows(card), section):
            yield store.meta(card)["card"].split()[1], rows  # NVIDIA H200, Tesla T4


# --- what the blocks say ---


def stale(card: str, *sections: str) -> str:
    """Return a sentence that names which of these sections of a card other code measured."""
    names = ", ".join(sorted(store.old(card).intersection(sections)))
    return f" Measured with an earlier version of this code: {names}." if names else ""


def provenance() -> str:
    """Return a line for each card, commit and set of versions: what was measured there, and when."""
    found = {}
    for card in sorted(path.parent.name for path in store.folder("").glob("*/meta.json")):
        old = store.old(card)
        for section, at in store.meta(card).get("sections", {}).items():
            facts = {"driver": at["driver"], "CUDA": at["cuda"], "commit": at["commit"], **at["versions"]}
            # The notebook's versions have no suffix such as +cu130.
            parts = [f"{name} {text.partition('+')[0]}" for name, text in facts.items() if text]
            texts = [at["card"] or "a CPU", *parts]
            if card.endswith("-forced-t4"):
                texts[0] += " with T4 settings forced"
            sections = found.setdefault(f"{', '.join(texts)}; {at['date']}", [])
            sections.append(f"{section} (earlier code)" if section in old else section)
    if not found:
        raise store.Missing("meta.json")
    return "\n".join(f"- {text}: {', '.join(sections)}." for text, sections in found.items())


def headline(card: str) -> dict[str, str]:
    """Return a card's score, the ratios of the puzzle's own line, and that of contenders in turns."""
    rows = store.rows(card)
    points = sum(row.median for row in select(rows, "score", contender="today"))
    facts = {"card": store.meta(card).get("card"), "points": f"{points:.0f} of 14"}
    for row in select(rows, case="puzzle's line"):
        facts |= {"runs": len(row.values), row.contender: rounded_down(row.median)}
        facts[f"{row.contender} range"] = extent(row.values)
    totals = {row.contender: row.median for row in select(rows, "protocol", "total")}
    facts["in turns"] = rounded_down(totals["unsloth_today"] / totals["ours"])
    return facts


def claim(card: str = CARD) -> str:
    """Return a card's headline in sentences; that of the pages' card is followed by the second card's."""
    text = CLAIM.format_map(headline(card)) + stale(card, "protocol", "score")
    if card == CARD and store.rows(SECOND):
        text += SECOND_CLAIM.format_map(headline(SECOND)) + stale(SECOND, "protocol", "score")
    return text


def halves() -> str:
    """Return what the kernel gains and what the launch path gains."""
    rows = store.rows(CARD)
    facts = {f"{row.case} {row.contender}": row.median for row in rows if row.section in TIMED}
    speeds = {}
    for row in select(rows, "gpu_time"):
        numel = int(row.case.split()[0])
        if numel >= 2**24:
            speed = plots.BYTES * numel / row.median / 1e6
            speeds.setdefault(f"speed {row.contender}", []).append(speed)
    facts |= {name: f"{min(values):.2f} to {max(values):.2f}" for name, values in speeds.items()}
    return HALVES.format_map(facts) + stale(CARD, *TIMED, "gpu_time")


def official(corner: str, names: dict[str, str], section="protocol") -> str:
    """The official protocol: median seconds by contender, and how many times those of the first."""
    cells = {}
    for card, rows in cards(section):
        found = [row for name in names for row in select(rows, case="total", contender=name)]
        for row in found:
            label = names[row.contender]
            cells[label, f"seconds, {card}"] = f"{row.median:.3f}"
            cells[label, f"speedup of this kernel, {card}"] = f"{rounded_down(row.median / found[0].median)}x"
    return table(corner, cells)


def gpu_time() -> str:
    """GPU time at the official sizes, and the bytes moved per second."""
    cells = {}
    for card, rows in cards("gpu_time"):
        for size, shape in plots.SHAPES.items():
            for row in select(rows, case=size):
                speed = plots.BYTES * int(size.split()[0]) / row.median / 1e6
                cells[f"{shape}, {card}", row.contender] = f"{row.median:.1f} ({speed:.2f} TB/s)"
    return table("GPU time, us", cells)


def t4_claim() -> str:
    """The speedup on a T4 and the puzzle's points: measured if there is a result, else predicted."""
    if store.rows("tesla-t4"):
        return claim("tesla-t4")
    cells = {}
    for row, won in plots.t4_speedups():
        cells[title(row.contender), row.case] = f"{extent(row.values)} times ({span(won)} points)"
    return f"Not yet run on a T4. A simulation predicts:\n\n{table('speedup over', cells)}"


def triton_versions() -> str:
    """The kernel, its calls, and the puzzle's test under other versions of Triton."""
    cells = {}
    for row in store.rows(CARD):
        if not row.section.startswith("triton "):
            continue
        if row.contender not in ("ours", "unsloth_today", "unsloth_buffered"):
            continue
        if row.case in (*plots.SHAPES, "total", "until_return"):
            line = f"{row.section.title()}: {title(row.case)}, {row.unit}"
            cells[line, row.contender] = f"{row.median:.3g}"
    return table("version", cells)


def changed_settings() -> str:
    """GPU time with one setting changed, relative to the default."""
    rows, cells = select(store.rows(CARD), "settings"), {}
    for row in select(rows, contender="changed"):
        default = one(rows, case=row.case, contender="default").median
        change, size = row.case.split(" at ")
        cells[f"`{change}`", size] = rounded_down(row.median / default)
    return table("setting changed: time relative to the default", cells)


def evidence() -> str:
    """Counts of the long tests."""
    cells = {}
    for section, (name, text) in LONG_TESTS.items():
        rows = select(store.rows(CARD), section)
        counts = {f"{row.case}_{row.contender}": row.median for row in rows}
        cells[name, "result"] = text.format_map(counts) if rows else "Not measured yet."
    return table("long test", cells)


BLOCKS = {
    "provenance": provenance,
    "claim": claim,
    "halves": halves,
    "launch_forms": partial(official, "official protocol by launch form", FORMS),
    "ordinary_launches": partial(official, "both by Triton's ordinary launch", FORMS, "ordinary_launches"),
    "gpu_time": gpu_time,
    "experts": partial(pivot, "experts x outputs x inputs, GPU us", CARD, "experts", "us"),
    "settings": changed_settings,
    "host_time": partial(pivot, "one call, 1024x4096 bf16, us", CARD, "host_time", "us s", CONTENDER, CASE),
    "launcher": partial(pivot, "one call, 1024x4096 bf16, us", CARD, "launcher", "us", CONTENDER, CASE),
    "compiled": partial(
        pivot,
        "24 weights, each dequantized and multiplied by, us; under torch.compile unless eager",
        CARD,
        "compiled",
        "us x",
        CONTENDER,
        CASE,
    ),
    "training": partial(pivot, "one step, ms; speedup with its 95% interval", CARD, "training", "ms x"),
    "training_speedup": partial(
        pivot,
        "tokens per step",
        CARD,
        "training",
        "x",
        lambda row: row.case.split(", ")[1].removesuffix(" tokens"),
        lambda row: row.case.split(", ")[0],
    ),
    "axolotl": partial(pivot, "Axolotl's dequantization, us", CARD, "axolotl", "us"),
    "triton": triton_versions,
    "evidence": evidence,
    "t4_claim": t4_claim,
    "t4": partial(pivot, "official protocol on a T4, s", T4, "t4_prediction", "s x", CONTENDER, CASE),
    "t4_inputs": partial(pivot, "input of the prediction", T4, "t4_inputs", "x s"),
    "t4_kernels": partial(pivot, "one kernel on a simulated T4, us", T4, "simulated", "us"),
    "published": partial(pivot, "the puzzle's test on a T4, by others, s", T4, "published", "s"),
    "machine_code": partial(
        pivot,
        "machine code, instructions per element",
        "cross-compiled",
        "machine_code",
        "instructions registers",
        column=lambda row: f"{row.contender} {row.unit}",
    ),
}


# --- filling them in ---


def body(name: str, page: Path) -> str:
    """Return what stands between the markers of a block; a picture is drawn to docs/figures first."""
    block = BLOCKS.get(name) or plots.PICTURES[name.removeprefix("figure ")]
    try:
        found = block()
    except KeyError:  # store.Missing, or a fact that no row gave
        return "Not measured yet."
    if isinstance(found, str):
        return found
    figure, alt = found
    file = FIGURES / f"{block.__name__}.png"
    plots.save(figure, alt, file)
    link = os.path.relpath(file, page.parent)
    if page.suffix == ".ipynb":  # Colab and GitHub show no files beside a notebook
        link = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    return f"![{alt}]({link})"


def render(text: str, page: Path) -> str:
    """Return the text of a page with every block filled in. Raises KeyError for a block of unknown name."""
    return BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n{body(found[1], page)}\n<!-- /{found[1]} -->", text)


def filled(page: Path) -> str:
    """Return the text of a page or a notebook with every block filled in."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return render(text, page)
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = render(cell.source, page)
    return nbformat.writes(notebook) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Fill every page and the notebook. Returns 1 if a file to store is not a result file."""
    parser = argparse.ArgumentParser(description="Fill the tables and pictures of README, docs and notebook.")
    parser.add_argument("file", nargs="?", type=Path, help="store this nf4_<card>.json under results/ first")
    parser.add_argument("--replace", action="store_true", help="also if that card has results")
    options = parser.parse_args(argv)
    try:
        if options.file:
            print(f"stored in {store.file_result(options.file, options.replace)}")
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), NOTEBOOK):
        page.write_text(filled(page), encoding="utf-8")
    return 0
