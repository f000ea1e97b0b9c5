"""Fill the marked blocks of README, docs and the notebook's text cells from stored rows.

A block is everything between `<!-- name -->` and `<!-- /name -->`: the claim, a stored section's table, or a
figure, whose PNG goes into the notebook's data URIs. Prose is written by hand, and so is a figure's text.
"""

import base64
import math
import re
import statistics
from pathlib import Path

import nbformat
import pandas
from tabulate import tabulate

from helpers.machine import NOTEBOOK, write_whole
from helpers.names import FUNCTIONS, shown
from helpers.results import executed, plots, store
from helpers.results.plots import CARD, SHAPES
from helpers.results.store import CARDS, ROOT, Row, one, select

FIGURES = ROOT / "docs" / "figures"
BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n(?P<body>.*?)<!-- /(?P=name) -->", re.S)
SIMULATED = "tesla-t4-simulated"
FOLDERS = (CARD, "nvidia-h100-80gb-hbm3", SIMULATED)  # a block shows the first that has its section
COLUMNS = (  # of the claim
    "card",
    "score (of 14)",
    "vs Unsloth today",
    "vs Unsloth classic",
    "vs bitsandbytes",
)
SHOWN = {  # cases of a section's table; the stored rows have more
    "gpu_time": SHAPES,  # speed_by_size shows all sizes
}
STEP_UNITS = ("GPU ms", "GPU ms dequantizing", "launches", "wall ms")
TITLES = {  # how contenders and cases are shown; others by their own names
    **plots.NAMES,
    "total": "seconds",
    "100 rounds": "seconds of 100 rounds",
    "until return": "us until it returns",
    "calls": "launch overhead",
}


def number(value: float, unit: str, median: float = 1) -> str:
    """Return a value with the decimals that three digits of `median` need; a ratio is rounded down."""
    if unit == "x":
        return shown(value)
    decimals = 0
    if unit not in ("points", "combinations", "launches"):
        decimals = max(0, 2 - math.floor(math.log10(median)))
    return f"{value:,.{decimals}f}"


def cell(row: Row) -> str:
    """Return a row's median with its range, or the ends of a prediction, which has just two values."""
    if len(row.values) == 2 and row.low < row.high:
        return f"{number(row.low, row.unit)} to {number(row.high, row.unit)}"
    low, median, high = (number(value, row.unit, row.median) for value in (row.low, row.median, row.high))
    return median if low == high else f"{median} ({low} to {high})"


def table(rows: list[Row], section: str) -> str:
    """Return a section's rows as a Markdown table: cases by contenders, the longer side down."""
    found, rows = [], select(rows, section)
    if rows and section.startswith("step_gpu_time"):
        return step_table(rows, section)
    for row in rows:
        if section in SHOWN and row.case not in SHOWN[section]:
            continue
        case, contender = (TITLES.get(name, name) for name in (row.case, row.contender))
        if section == "protocol":
            contender = FUNCTIONS.get(row.contender, contender)
        if section == "gpu_time":
            case = SHAPES[row.case]
        found.append((case, contender, row.unit, cell(row)))
    if not found:
        return "Not measured yet."
    frame = pandas.DataFrame(found, columns=["case", "contender", "unit", "text"])
    wide = frame.pivot_table("text", "case", "contender", aggfunc="first", sort=False).fillna("-")
    if len(wide) < len(wide.columns):
        wide = wide.T
    units = ", ".join(frame["unit"].unique())
    return wide.rename_axis(units).to_markdown(disable_numparse=True)


def step_table(rows: list[Row], section: str) -> str:
    """Return what training steps take as a Markdown table: medians without the kernel, then with it."""
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        line = [case]
        for unit in STEP_UNITS:
            both = [one(rows, section, case, variant, unit) for variant in ("without", "with")]
            line.append(", ".join(number(row.median, unit, row.median) for row in both))
            if unit == "GPU ms":
                line[-1] += f" ({both[1].median / both[0].median - 1:+.0%})"
            if unit == "wall ms":
                line[-1] = ", ".join(map(cell, both))
        lines.append(line)
    return tabulate(lines, ("without, with", *STEP_UNITS), tablefmt="pipe", disable_numparse=True)


def speedup(ratios) -> str:
    """Return the median of ratios and, in parentheses, the lowest and highest, rounded down."""
    median, low, high = map(shown, (statistics.median(ratios), min(ratios), max(ratios)))
    return f"{median} ({low} to {high})"


def claim(stored: dict) -> str:
    """Return points and speedups of every card that has rows; a measured T4 replaces the predicted one."""
    lines = []
    for folder, card in CARDS.items():
        rows = stored.get(folder, ())
        if scored := select(rows, "score"):
            points = sum(row.median for row in scored if row.contender == "today")
            ratios = [one(rows, "protocol", "puzzle's line", who).values for who in executed.UNSLOTH]
            both = (one(rows, "protocol", "100 rounds", who).values for who in ("bitsandbytes", "ours"))
            ratios.append([theirs / ours for theirs, ours in zip(*both, strict=True)])
            lines.append([card.name, f"{points:.0f}", *map(speedup, ratios)])
    if not select(stored.get("tesla-t4", ()), "score"):  # bitsandbytes was not simulated
        rows = stored[SIMULATED]
        points = one(rows, "t4_prediction", "points, Triton 3.6", "unsloth_today")
        today = [row for row in select(rows, "t4_prediction") if row.contender == "unsloth_today"]
        likely = " or ".join(cell(row) for row in today if "likely points" in row.case)
        score = f"{likely} ({cell(points)})"
        speedups = [cell(one(rows, "t4_prediction", "speedup, Triton 3.6", who)) for who in executed.UNSLOTH]
        lines.append(["Tesla T4, predicted", score, *speedups, "-"])
    return tabulate(lines, COLUMNS, tablefmt="pipe", disable_numparse=True)


def filled(page: Path, stored: dict, images: dict[str, bytes]) -> str:
    """Return the text of a page or a notebook with every block filled in.

    images: {name: PNG}. Raises KeyError for a figure of unknown name.
    """

    def fill(block: re.Match) -> str:
        name, body = block["name"], block["body"]
        if name == "claim":
            body = claim(stored) + "\n"
        elif name.startswith("figure "):  # Colab and GitHub show no files beside a notebook
            data = base64.b64encode(images[name.removeprefix("figure ")]).decode()
            body = re.sub(r"base64,[\w+/=]*", f"base64,{data}", body)
        else:
            found = (select(stored.get(folder, ()), name) for folder in FOLDERS)
            body = table(next(filter(None, found), []), name) + "\n"
        return f"<!-- {name} -->\n{body}<!-- /{name} -->"

    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return BLOCK.sub(fill, text)
    notebook = nbformat.reads(text, as_version=4)
    for part in notebook.cells:
        part.source = BLOCK.sub(fill, part.source)
    return nbformat.writes(notebook) + "\n"


def draw(stored: dict) -> dict[Path, str | bytes]:
    """Return {file: what it must hold} of all pages, the notebook, and the pictures."""
    images = {name: plots.png(picture(stored)) for name, picture in plots.PICTURES.items()}
    files = {FIGURES / f"{name}.png": png for name, png in images.items()}
    images["idea"] = (FIGURES / "idea.png").read_bytes()  # rendered by hand from idea.svg
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), NOTEBOOK):
        files[page] = filled(page, stored, images)
    return files


def main(notebook: str | None = None) -> int:
    """`python -m helpers draw`: store the rows of an executed notebook, if one is given; fill all pages."""
    if notebook:
        _, (environment, rows) = executed.read(notebook)
        print(f"stored in {store.write('notebook', rows, environment=environment)}")
    stored = {card: store.rows(card) for card in store.cards()}
    for path, content in draw(stored).items():
        write_whole(path, content)
    return 0
