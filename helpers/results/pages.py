"""Fill the marked blocks of README, docs and the notebook's text cells from stored rows.

A block is everything between `<!-- name -->` and `<!-- /name -->`: the claim, a table of one of SECTIONS, or
a figure, whose PNG goes into the notebook's data URIs. Prose is written by hand, and so is a figure's text.
"""

import argparse
import base64
import math
import re
import sys
from pathlib import Path

import nbformat
import pandas

from helpers.results import executed, plots, store
from helpers.results.executed import NOTEBOOK, UNSLOTH
from helpers.results.plots import CARD, SHAPES
from helpers.results.store import ROOT, Row, one, select

FIGURES = ROOT / "docs" / "figures"
BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n(?P<body>.*?)<!-- /(?P=name) -->", re.S)
T4, SIMULATED = "tesla-t4", "tesla-t4-simulated"
TITLES = {  # how contenders and cases are shown; others by their own names
    **plots.NAMES,
    "ours_out": "`dequantize(out=)`",
    "ours_rows": "`dequantize(rows=)`, all rows",
    "copy_kernel": "copy",
    "products_only": "multiplication only",
    "rows": "this kernel, `rows=`",
    "axolotl": "Axolotl",
    "zoo": "unsloth_zoo",
    "zoo_select": "unsloth_zoo, `nf4_select_dequant`",
    "slice": "this kernel, a slice",
    "total": "seconds",
    "until_return": "until it returns",
    "synchronized": "with a synchronize",
    "calls": "launch overhead",
}
SECTIONS = {  # block: the folder whose rows it shows
    "protocol": CARD,
    "host_time": CARD,
    "gpu_time": CARD,
    "settings": CARD,
    "experts": CARD,
    "compiled": CARD,
    "training": CARD,
    "t4_prediction": SIMULATED,
    "t4_sensitivity": SIMULATED,
    "published": SIMULATED,
    "machine_code": "cross-compiled",
}


def shown(name: str) -> str:
    """Return how a contender or case is shown, with commas in a number of elements."""
    return re.sub(r"\d{6,}", lambda digits: f"{int(digits[0]):,}", TITLES.get(name, name))


def number(value: float, unit: str, median: float = 1) -> str:
    """Return a value with the decimals that three digits of `median` need; a ratio is rounded down."""
    if unit == "x":
        return f"{math.floor(round(100 * value, 6)) / 100:.2f}x"
    whole = unit in ("points", "registers", "combinations")
    decimals = 0 if whole else max(0, 2 - math.floor(math.log10(median)))
    return f"{value:,.{decimals}f}"


def cell(row: Row) -> str:
    """Return a row's median with its range, or the ends of a prediction, which has just two values."""
    if len(row.values) == 2 and row.low < row.high:
        return f"{number(row.low, row.unit)} to {number(row.high, row.unit)}"
    low, median, high = (number(value, row.unit, row.median) for value in (row.low, row.median, row.high))
    return median if low == high else f"{median} ({low} to {high})"


def table(rows: list[Row], section: str) -> str:
    """Return a section's rows as a Markdown table: cases by contenders, the longer side down."""
    found = []
    for row in select(rows, section):
        case, contender = shown(row.case), shown(row.contender)
        if section == "gpu_time":
            if row.case not in SHAPES:
                continue  # speed_by_size shows all sizes
            case = SHAPES[row.case]
        if section == "machine_code":
            contender += f" {row.unit}"
        found.append((case, contender, row.unit, cell(row)))
    if not found:
        return "Not measured yet."
    frame = pandas.DataFrame(found, columns=["case", "contender", "unit", "text"])
    wide = frame.pivot_table("text", "case", "contender", aggfunc="first", sort=False).fillna("-")
    if len(wide) < len(wide.columns):
        wide = wide.T
    units = ", ".join(frame["unit"].unique())
    return wide.rename_axis(units).to_markdown(disable_numparse=True)


def claim(stored: dict) -> str:
    """Return points and speedups by card; a measured T4 replaces the predicted one."""
    lines = {}
    for name, card in {"NVIDIA H100": CARD, "Tesla T4": T4}.items():
        if rows := stored.get(card):
            points = sum(row.median for row in select(rows, "score") if row.contender == "today")
            speedups = [one(rows, "protocol", "puzzle's line", who).median for who in UNSLOTH]
            theirs, ours = (one(rows, "protocol", "total", who) for who in ("bitsandbytes", "ours"))
            speedups.append(theirs.median / ours.median)
            lines[name] = [f"{points:.0f}", *(number(speedup, "x") for speedup in speedups)]
    if T4 not in stored:  # bitsandbytes was not simulated
        rows = stored[SIMULATED]
        best = one(rows, "t4_prediction", "points, Triton 3.6", "unsloth_today")
        speedups = [one(rows, "t4_prediction", "speedup, Triton 3.6", who) for who in UNSLOTH]
        lines["Tesla T4, predicted"] = [*map(cell, (best, *speedups)), "-"]
    columns = ["score (of 14)", "vs Unsloth today", "vs Unsloth classic", "vs bitsandbytes"]
    frame = pandas.DataFrame.from_dict(lines, orient="index", columns=columns)
    return frame.rename_axis("card").to_markdown(disable_numparse=True)


def filled(page: Path, stored: dict, images: dict[str, bytes]) -> str:
    """Return the text of a page or a notebook with every block filled in.

    images: {name: PNG}. Raises KeyError for a block of unknown name.
    """

    def fill(block: re.Match) -> str:
        name, body = block["name"], block["body"]
        if name == "claim":
            body = claim(stored) + "\n"
        elif name in SECTIONS:
            body = table(stored.get(SECTIONS[name], []), name) + "\n"
        else:  # Colab and GitHub show no files beside a notebook
            data = base64.b64encode(images[name.removeprefix("figure ")]).decode()
            body = re.sub(r"base64,[^)]*", f"base64,{data}", body)
        return f"<!-- {name} -->\n{body}<!-- /{name} -->"

    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return BLOCK.sub(fill, text)
    notebook = nbformat.reads(text, as_version=4)
    for part in notebook.cells:
        part.source = BLOCK.sub(fill, part.source)
    return nbformat.writes(notebook) + "\n"


def draw(stored: dict) -> dict[Path, bytes]:
    """Return {file: what it must hold} of all pages, the notebook, and the pictures."""
    images = {name: plots.png(picture(stored)) for name, picture in plots.PICTURES.items()}
    files = {FIGURES / f"{name}.png": png for name, png in images.items()}
    images["idea"] = (FIGURES / "idea.png").read_bytes()  # rendered by hand from idea.svg
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), NOTEBOOK):
        files[page] = filled(page, stored, images).encode()
    return files


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 1, with nothing written, if a notebook or a page is not as it should be."""
    parser = argparse.ArgumentParser(description="Fill the tables and pictures of README, docs and notebook.")
    parser.add_argument(
        "notebook", nargs="?", type=Path, help="store the rows of this executed notebook first"
    )
    parser.add_argument("--commit", help="the version of that notebook, if its code is not this checkout's")
    options = parser.parse_args(argv)
    stored = {card: store.rows(card) for card in store.cards()}
    new: dict[str, list[Row]] = {}
    environment = None
    try:
        if options.notebook:
            environment, new = executed.read(options.notebook, options.commit)
            card = store.slug(environment)
            kept = [row for row in stored.get(card, []) if row.section not in new]
            stored[card] = sum(new.values(), kept)
        files = draw(stored)
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    for section, rows in new.items():
        print(f"stored in {store.write(section, rows, environment=environment)}")
    for path, content in files.items():
        path.write_bytes(content)
    for card in store.cards():
        if names := store.earlier(card):
            print(f"results/{card}: measured with an earlier kernel: {', '.join(names)}")
    return 0
