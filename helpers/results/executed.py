"""Read what an executed copy of the notebook measured: the line of JSON that its cell `rows` printed.

Anyone can send such a file. What is unsound in it raises some error, which `python -m helpers draw` prints.
"""

import json
import re
from itertools import zip_longest
from pathlib import Path

import nbformat

from helpers.machine import NOTEBOOK
from helpers.results.store import CARDS, Record, Row, slug

FACTS = ("card", "capability", "cpu", "driver", "cuda", "versions", "date", "forced")
LIMITS = {  # case: unit, lowest and highest value; every other case is a criterion
    "puzzle's line": ("x", 0.01, 100),
    "total": ("s", 0.01, 3600),
}


def code_cells(path: Path) -> list[str]:
    """Return the code of a notebook's cells, without the empty ones."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source.strip() for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def check_code(path: Path) -> None:
    """Raise ValueError, which names the cell, unless a notebook's code is that of this checkout's."""
    for number, (theirs, ours) in enumerate(zip_longest(code_cells(path), code_cells(NOTEBOOK)), 1):
        if theirs != ours:
            raise ValueError(
                f"code cell {number} ({(theirs or ours).splitlines()[0]}) was edited, added, or removed: "
                f"expected the code of {NOTEBOOK.name} here; name the version with --commit if it is another"
            )


def check_rows(rows: list[Row]) -> None:
    """Raise ValueError, which names the row, for one that this checkout's notebook cannot have printed."""
    code = "\n".join(code_cells(NOTEBOOK))
    for row in rows:
        unit, low, high = LIMITS.get(row.case, ("points", -3, 3))
        if row.unit != unit or not all(f'"{name}"' in code for name in row[:4]):
            raise ValueError(f"unknown name or wrong unit, expected those of the notebook: {row}")
        if not row.values or not all(low <= value <= high for value in row.values):
            raise ValueError(f"expected values of {low} to {high} {unit}: {row}")
    if len({row[:4] for row in rows}) < len(rows):
        raise ValueError("a row stands twice, expected it once")


def known_facts(sent: dict) -> dict:
    """Return the machine that a notebook describes, without what `describe()` does not say.

    Raises ValueError for a card with the capability of another.
    """
    facts = {name: sent.get(name) for name in FACTS}
    card = CARDS.get(slug(facts))
    if card and facts["capability"] != card.capability:
        raise ValueError(f"capability is {facts['capability']}, expected {card.capability} of {card.name}")
    return facts


def read(path: Path, commit: str | None = None) -> Record:
    """Return what an executed notebook printed. commit: of its code, if that is not this checkout's."""
    if not commit:
        check_code(path)
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output.get("text", "") for cell in cells for output in cell.get("outputs", [])]
    printed = re.findall('^{"environment":.*', "\n".join(outputs), re.M)  # Colab may change ids of cells
    if len(printed) != 1:
        problem = f"{path} has {len(printed)} lines of rows, expected 1"
        raise ValueError(f"{problem}: run all its cells on a GPU, without NF4_QUICK")
    sent = json.loads(printed[0])
    record = Record(known_facts(sent["environment"]), [Row(*fields) for fields in sent["rows"]])
    check_rows(record.rows)
    if commit:
        record.environment["commit"] = commit
    return record
