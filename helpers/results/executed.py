"""Read what an executed copy of the notebook measured: the JSON that its cell `rows` shows.

Anyone can send such a file: its code must be ours, and nothing may be missing. What is wrong raises some
error, which `python -m helpers draw` prints. Read the numbers before you commit them.
"""

import json
import re
from itertools import zip_longest
from pathlib import Path

import nbformat

from helpers.machine import NOTEBOOK
from helpers.names import CRITERIA
from helpers.results.store import CARDS, Record, Row, slug

UNSLOTH = ("unsloth_today", "unsloth_classic")


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
                f"expected the code of {NOTEBOOK.name} here; of another version, check that out first"
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


def read(path: Path) -> Record:
    """Return what an executed notebook printed. Its code must be this checkout's."""
    check_code(path)
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pages = "\n".join(data.get("text/html", "") for data in outputs)
    found = re.findall('{"environment":.*(?=</details>)', pages)  # Colab may change ids of cells
    if len(found) != 1:
        problem = f"{path} has {len(found)} outputs with rows, expected 1"
        raise ValueError(f"{problem}: run all its cells on a GPU, without NF4_QUICK")
    sent = json.loads(found[0])
    record = Record(sent["environment"], [Row(*fields) for fields in sent["rows"]])
    check_card(record.environment)
    check_rows(record.rows)
    return record
