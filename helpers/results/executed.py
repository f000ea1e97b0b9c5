"""Read what an executed copy of the notebook measured: the JSON that its cell `rows` shows.

Anyone can send such a file: its code must be ours, and nothing may be missing. Read the numbers before you
commit them.
"""

import json
import re
import sys
from itertools import zip_longest
from pathlib import Path

import nbformat

from helpers import machine
from helpers.names import CRITERIA
from helpers.results.store import CARDS, Record, Row, slug

UNSLOTH = ("unsloth_today", "unsloth_classic")


def code_cells(notebook) -> list:
    """Return a notebook's code cells, without the empty ones."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def check_code(notebook) -> None:
    """Raise ValueError, which names the cell, unless a notebook's code is that of this checkout's."""
    here = code_cells(nbformat.read(machine.NOTEBOOK, as_version=4))
    sources = ([cell.source.strip() for cell in cells] for cells in (code_cells(notebook), here))
    for number, (theirs, ours) in enumerate(zip_longest(*sources), 1):
        if theirs != ours:
            raise ValueError(
                f"code cell {number} ({(theirs or ours).splitlines()[0]}) was edited, added, or removed: "
                f"expected the code of {machine.NOTEBOOK.name} here; of another version, check that out first"
            )


def check_rows(rows: list[Row]) -> None:
    """Raise ValueError, which names what is missing, unless every criterion has points."""
    scored = [row.case for row in rows if row.section == "score"]
    if missing := ", ".join(criterion for criterion, *_ in CRITERIA if criterion not in scored):
        raise ValueError(f"not scored: {missing}. Install what its cells say is missing; run all cells again")


def check_card(environment: dict) -> None:
    """Raise ValueError for a card with the capability of another."""
    card = CARDS.get(slug(environment))
    if card and environment["capability"] != card.capability:
        found = f"capability is {environment['capability']}"
        raise ValueError(f"{found}, expected {card.capability} of {card.name}")


def record_of(notebook) -> Record:
    """Return what an executed notebook printed. Raises some error unless its code is this checkout's."""
    check_code(notebook)
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    pages = "\n".join(data.get("text/html", "") for data in outputs)
    found = re.findall('{"environment":.*(?=</details>)', pages)  # Colab may change ids of cells
    if len(found) != 1:
        problem = f"it has {len(found)} outputs with rows, expected 1"
        raise ValueError(f"{problem}: run all its cells on a GPU, without NF4_QUICK")
    sent = json.loads(found[0])
    record = Record(sent["environment"], [Row(*fields) for fields in sent["rows"]])
    check_card(record.environment)
    check_rows(record.rows)
    return record


def read(path: Path | str) -> tuple:
    """Return (an executed notebook, its Record). Exits with one line if it is not as it should be."""
    try:
        notebook = nbformat.read(path, as_version=4)
        return notebook, record_of(notebook)
    except Exception as error:  # it can be any file
        sys.exit(f"{path}: {type(error).__name__}: {error}")
