"""Fill the marked blocks of README, docs and the notebook's text cells from stored rows; file sent results.

A block is everything between `<!-- name -->` and `<!-- /name -->`; the function of that name returns its
text. `<!-- figure name -->` holds the picture of that name. What has no rows is "Not measured yet."
"""

import argparse
import base64
import os
import re
import statistics
from functools import partial
from pathlib import Path

import nbformat

from helpers.results import plots, store
from helpers.results.plots import CARD, CARD_NAME, T4, extent, rounded_down
from helpers.results.store import ROOT, one, select

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
FIGURES = ROOT / "docs" / "figures"
BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n.*?<!-- /(?P=name) -->", re.S)
LIBRARIES = plots.LABELS | {"peft": "PEFT"}
FORMS = {
    "ours": "this kernel, replayed",
    "compiled_grid": "this kernel, `compiled[grid](...)`",
    "ordinary": "this kernel, `kernel[grid](...)`",
    "unsloth_today": "Unsloth today, replayed",
    "unsloth_ordinary": "Unsloth today, `kernel[grid](...)`",
}
TITLES = {
    **FORMS,
    **LIBRARIES,
    "ours_empty_cache": "this kernel, Triton's cache empty",
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
    "today": "vs Unsloth today",
    "classic": "vs Unsloth classic",
    "s": "seconds",
    "x": "its speedup over classic",
    "speedup": "speedup of this kernel",
}
RANGES = ("t4_prediction", "published")  # sections whose values are shown from lowest to highest
GPU_ONLY = ("gpu_time", "settings", "machine_code")  # sections that do not depend on the launch path
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
    "seeded_bugs": (
        "seeded bugs that the tests catch",
        "{gpu_caught:.0f} of {gpu_seeded:.0f} on a GPU, {cpu_caught:.0f} of {cpu_seeded:.0f} on a CPU",
    ),
    "bitsandbytes_tests": (
        "bitsandbytes' own tests with this kernel",
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
    """Return the median of a row, or its range if it is a prediction; ratios are rounded down."""
    show = rounded_down if row.unit == "x" else digits
    if row.section in RANGES and row.unit == "s":
        show = "{:.2f}".format
    if row.section in RANGES and row.low < row.high:
        return f"{show(row.low)} to {show(row.high)}"
    return show(row.median)


def pivot(corner, card, section, units, line="{0.case}", column="{0.contender}") -> str:
    """Return a table of the rows of a section that have one of these units; line, column: their titles."""
    rows = [row for row in store.rows(card) if row.section == section and row.unit in units.split()]
    return table(corner, {(line.format(row), column.format(row)): shown(row) for row in rows})


def cards(section: str):
    """Yield (name, rows of a section) of each card that has them."""
    for card in (CARD, "nvidia-h100-80gb-hbm3", "tesla-t4"):
        if rows := select(store.rows(card), section):
            yield store.meta(card)["card"].removeprefix("NVIDIA "), rows


# --- what the blocks say ---


def stale(*sections: str) -> str:
    """Return a sentence that names what another version of the code produced, among sections or among all."""
    now, old = store.hashes(), set()
    for card in os.listdir(store.folder("")):
        for name, at in store.meta(card).get("sections", {}).items():
            parts = ["kernel"] if name in GPU_ONLY else now
            if any(at[part] not in (None, now[part]) for part in parts):
                old.add(name)
    names = ", ".join(sorted(old.intersection(sections or old)))
    return f" Measured with an earlier version of this code: {names}." if names else ""


def environment() -> str:
    """Return one line: card, driver, dates, versions, and what an earlier version produced."""
    facts = store.meta(CARD)
    dates = " and ".join(sorted({at["date"] for at in facts["sections"].values()}))
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    text = f"{facts['card']}, driver {facts['driver']}, CUDA {facts['cuda']}, {dates}; {versions}."
    return text + stale()


def points(card: str, column: str) -> str:
    rows = select(store.rows(card), "score", contender=column, unit="points")
    return f"{sum(row.median for row in rows):.0f} of 14"


def claim(card: str = CARD) -> str:
    """Return the score and the headline: the ratios of the puzzle's own line, and its control."""
    rows = store.rows(card)
    line = one(rows, "protocol", "puzzle's line", unit="x").values
    seconds = {row.contender: row.median for row in select(rows, "protocol", "total")}
    today, classic = (rounded_down(seconds[f"unsloth_{x}"] / seconds["ours"]) for x in ("today", "classic"))
    name, speed = store.meta(card)["card"], rounded_down(statistics.median(line))
    return (
        f"Measured on one {name}: {points(card, 'today')} points; {speed} times the speed of Unsloth's "
        f"current `fast_dequantize` (*Unsloth today*) by the puzzle's line (median of {len(line)} runs, "
        f"{extent(line)}). With contenders alternating, medians give {today} times Unsloth today and "
        f"{classic} times *Unsloth classic*, its code path when the puzzle was published."
    ) + stale("protocol", "score")


def stored_score() -> str:
    """The marking table of the stored run against both versions of Unsloth."""
    lines = pivot(f"Measured on an {CARD_NAME}", CARD, "score", "points")
    return f"{lines}\n| **Sum** | **{points(CARD, 'today')}** | **{points(CARD, 'classic')}** |"


def official(corner: str, names: dict[str, str], case="total") -> str:
    """The official protocol: median seconds by contender, and how many times those of the first."""
    cells = {}
    for card, rows in cards("protocol"):
        found = [row for name in names for row in select(rows, case=case, contender=name)]
        for row in found:
            label = names[row.contender]
            cells[label, f"seconds, {card}"] = f"{row.median:.3f}"
            cells[label, f"speedup of this kernel, {card}"] = f"{rounded_down(row.median / found[0].median)}x"
    return table(corner, cells)


def gpu_time() -> str:
    """GPU time at the official sizes, TB/s, and the speed relative to the memory-bound reference."""
    cells = {}
    for card, rows in cards("gpu_time"):
        for size, shape in plots.SHAPES.items():
            reference = one(rows, case=size, contender="copy_kernel").median
            for row in select(rows, case=size):
                speed = plots.BYTES * int(size.split()[0]) / row.median / 1e6
                share = f"{reference / row.median:.0%}"
                cells[f"{shape}, {card}", row.contender] = f"{row.median:.1f} ({speed:.2f} TB/s, {share})"
    return table("GPU time, us (TB/s, share of the reference's speed)", cells)


def t4_claim() -> str:
    """The speedup on a T4 and the puzzle's points: measured if there is a result, else predicted."""
    return claim("tesla-t4") if store.rows("tesla-t4") else plots.t4()[1]


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
    rows, cells = store.rows(CARD) + store.rows("cpu"), {}
    for section, (name, text) in LONG_TESTS.items():
        counts = {f"{row.case}_{row.contender}": row.median for row in select(rows, section)}
        try:
            cells[name, "result"] = text.format_map(counts)
        except KeyError:
            cells[name, "result"] = "Not measured yet."
    return table("long test", cells)


BLOCKS = {
    "environment": environment,
    "claim": claim,
    "stored_score": stored_score,
    "protocol": partial(official, "official protocol", LIBRARIES),
    "launch_forms": partial(official, "official protocol by launch form", FORMS),
    "ordinary_launches": partial(official, "both by Triton's ordinary launch", FORMS, "ordinary launches"),
    "gpu_time": gpu_time,
    "settings": changed_settings,
    "host_time": partial(
        pivot, "one call, 1024x4096 bf16, us", CARD, "host_time", "us s", "{0.contender}", "{0.case}"
    ),
    "compiled": partial(
        pivot,
        "24 weights, each dequantized and multiplied by, us; under torch.compile unless eager",
        CARD,
        "compiled",
        "us x",
        "{0.contender}",
        "{0.case}",
    ),
    "training_claim": lambda: plots.training()[1],
    "axolotl": partial(pivot, "Axolotl's dequantization, us", CARD, "axolotl", "us"),
    "evidence": evidence,
    "t4_claim": t4_claim,
    "t4": partial(
        pivot, "official protocol on a T4, s", T4, "t4_prediction", "s x", "{0.contender}", "{0.case}"
    ),
    "t4_kernels": partial(pivot, "one kernel on a simulated T4, us", T4, "t4_prediction", "us"),
    "published": partial(pivot, "measured on a T4 by others", T4, "published", "s x", "{0.case}", "{0.unit}"),
    "machine_code": partial(
        pivot,
        "machine code, instructions per element",
        "cross-compiled",
        "machine_code",
        "instructions registers",
        "{0.case}",
        "{0.contender} {0.unit}",
    ),
}


# --- filling them in ---


def body(name: str, page: Path) -> str:
    """Return what stands between the markers of a block; a picture is drawn to docs/figures first."""
    block = BLOCKS.get(name) or plots.PICTURES[name.removeprefix("figure ")]
    try:
        found = block()
    except store.Missing:
        return "Not measured yet."
    if isinstance(found, str):
        return found
    figure, alt = found
    file = FIGURES / f"{block.__name__}.png"
    plots.save(figure, file)
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
    options = parser.parse_args(argv)
    try:
        if options.file:
            print(f"stored in {store.file_result(options.file)}")
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), NOTEBOOK):
        page.write_text(filled(page), encoding="utf-8")
    return 0
