"""Fill the marked blocks of README, docs and the notebook's text cells from stored rows.

A block is everything between `<!-- name -->` and `<!-- /name -->`: the claim, a stored section's table, or a
figure. Prose is written by hand.
"""

import base64
import math
import re
from pathlib import Path

import nbformat
import pandas

from helpers.machine import NOTEBOOK, write_whole
from helpers.names import shown
from helpers.results import executed, plots, store
from helpers.results.plots import CARD, SHAPES
from helpers.results.store import CARDS, ROOT, Row, select
from nf4_triton.core.supported import VERSION

FIGURES = ROOT / "docs" / "figures"
BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n(?P<body>.*?)<!-- /(?P=name) -->", re.S)
SIMULATED = "tesla-t4-simulated"
TURNED = ("protocol", "on_gpu", "host_time", "gpu_time")  # a row for each contender, a column for each case
TITLES = {  # how contenders and cases are shown; others by their own names
    **plots.NAMES,
    **SHAPES,
    "total": "seconds",
    "100 rounds": "seconds of 100 rounds",
    "until return": "us until it returns",
    "calls": "launch overhead",
}


def number(value: float, unit: str, median: float) -> str:
    """Return a value with the decimals that three digits of `median` need; a ratio is rounded down."""
    if unit == "x":
        return shown(value)
    decimals = 0
    if unit not in ("points", "combinations", "launches"):
        decimals = max(0, 2 - math.floor(math.log10(median)))
    return f"{value:,.{decimals}f}"


def cell(row: Row) -> str:
    """Return a row's median with its range, or the range of two values: a prediction's, or two steps'."""
    low, median, high = (number(value, row.unit, row.median) for value in (row.low, row.median, row.high))
    if low == high:
        return median
    return f"{low} to {high}" if len(row.values) == 2 else f"{median} ({low} to {high})"


def markdown(cells: list[tuple], turned=False) -> str:
    """Return cells, each (row, column, text for the corner, text), as a Markdown table.

    turned: rows are columns.
    """
    if not cells:
        return "Not measured yet."
    frame = pandas.DataFrame(cells, columns=["row", "column", "corner", "text"])
    wide = frame.pivot_table("text", "row", "column", aggfunc="first", sort=False).fillna("-")
    corner = ", ".join(frame["corner"].unique())
    return (wide.T if turned else wide).rename_axis(corner).to_markdown(disable_numparse=True)


def table(rows: list[Row], section: str) -> str:
    """Return a section's rows as a Markdown table."""
    cells = []
    for row in select(rows, section):
        case, contender = (TITLES.get(name, name) for name in (row.case, row.contender))
        if section.startswith("step_gpu_time"):
            if row.unit != "launches":
                cells.append((case, f"{row.unit}, {contender}", "", cell(row)))
        elif section != "gpu_time" or row.case in SHAPES:  # speed_by_size shows all sizes
            text = number(row.median, row.unit, row.median) if section == "for_unsloth" else cell(row)
            cells.append((case, contender, row.unit, text))
    return markdown(cells, section in TURNED)


def claim() -> str:
    """Return points and speedups of the cards that have rows of this version; a measured T4 replaces the
    predicted one."""
    found = {folder: select(store.rows(folder, VERSION), "claim") for folder in CARDS}
    if found["tesla-t4"]:
        del found[SIMULATED]
    cells = []
    for folder, rows in found.items():
        cells += [(CARDS[folder], row.case, "card", cell(row)) for row in rows]
    return markdown(cells)


def filled(page: Path, rows: list[Row]) -> str:
    """Return the text of a page or a notebook with every block filled in."""

    def fill(block: re.Match) -> str:
        name, body = block["name"], block["body"]
        if name == "claim":
            body = claim() + "\n"
        elif name == "figure idea":  # the notebook's: Colab and GitHub show no files beside it
            data = base64.b64encode((FIGURES / "idea.png").read_bytes()).decode()  # rendered from idea.svg
            body = re.sub(r"base64,[\w+/=]*", f"base64,{data}", body)
        elif name.startswith("figure "):
            body = re.sub(r"!\[.*?\]", f"![{plots.TEXTS[name.removeprefix('figure ')]}]", body)
        else:
            body = table(rows, name) + "\n"
        return f"<!-- {name} -->\n{body}<!-- /{name} -->"

    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return BLOCK.sub(fill, text)
    notebook = nbformat.reads(text, as_version=4)
    for part in notebook.cells:
        part.source = BLOCK.sub(fill, part.source)
    return nbformat.writes(notebook) + "\n"


def draw() -> dict[Path, str | bytes]:
    """Return {file: what it must hold} of all pages, the notebook, and the pictures."""
    rows = store.rows(CARD) + store.rows(SIMULATED)
    files = {FIGURES / f"{name}.png": plots.png(picture(rows)) for name, picture in plots.PICTURES.items()}
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), NOTEBOOK)
    return files | {page: filled(page, rows) for page in pages}


def main(notebook: str | None = None) -> int:
    """`python -m helpers draw`: store the rows of an executed notebook, if one is given; fill all pages."""
    if notebook:
        _, (environment, rows) = executed.read(notebook)
        print(f"stored in {store.write('notebook', rows, environment=environment)}")
    for path, content in draw().items():
        write_whole(path, content)
    return 0
