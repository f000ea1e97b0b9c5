"""Read what an executed copy of the notebook measured: the JSON that its cell `rows` shows.

Anyone can send such a file. What is unsound in it raises some error, which `python -m helpers draw` prints.
"""

import json
import re
from itertools import zip_longest
from pathlib import Path

import nbformat

from helpers.machine import NOTEBOOK
from helpers.names import CRITERIA, KERNELS, LABELS, LAUNCHES
from helpers.results.store import CARDS, Record, Row, slug

FACTS = ("card", "capability", "cpu", "driver", "cuda", "versions", "date", "forced")
UNSLOTH = ("unsloth_today", "unsloth_classic")
CONTENDERS = (*LABELS, *(f"{kernel}, {launch}" for kernel in KERNELS for launch in LAUNCHES))
TIMED = {  # case: unit, contenders, lowest and highest value
    "puzzle's line": ("x", UNSLOTH, 0.01, 100),
    "until return": ("us", CONTENDERS, 0.1, 1e6),
    "100 rounds": ("s", CONTENDERS, 0.001, 3600),
}
POINTS = {criterion: (won, lost) for criterion, won, lost, _ in CRITERIA}
CLAIMED = {  # what the claim needs: section, case, contender
    *(("protocol", "puzzle's line", name) for name in UNSLOTH),
    *(("protocol", "100 rounds", name) for name in ("ours", "bitsandbytes")),
    *(("score", criterion, "today") for criterion in POINTS),
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


def is_printed(row: Row) -> bool:
    """Return whether the notebook can print this row."""
    if row.section == "score":
        right = row[2:4] == ("today", "points") and len(row.values) == 1
        return right and row.values[0] in POINTS.get(row.case, ())
    unit, contenders, low, high = TIMED.get(row.case, ("", (), 0, 0))
    right = row.section == "protocol" and row.contender in contenders and row.unit == unit
    return right and len(row.values) > 0 and all(low <= value <= high for value in row.values)


def check_rows(rows: list[Row]) -> None:
    """Raise ValueError, which names the row, for one that the notebook cannot print or that is missing."""
    for row in rows:
        if not is_printed(row):
            raise ValueError(f"the notebook prints no such row, unit, or value: {row}")
    found = {row[:3] for row in rows}
    if len(found) < len(rows):
        raise ValueError("a row stands twice, expected it once")
    if missing := sorted(CLAIMED - found):
        names = ", ".join(f"{case} of {contender}" for _, case, contender in missing)
        raise ValueError(f"not measured: {names}. Install what its cells say is missing; run all cells again")


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
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pages = "\n".join(data.get("text/html", "") for data in outputs)
    found = re.findall('{"environment":.*(?=</details>)', pages)  # Colab may change ids of cells
    if len(found) != 1:
        problem = f"{path} has {len(found)} outputs with rows, expected 1"
        raise ValueError(f"{problem}: run all its cells on a GPU, without NF4_QUICK")
    sent = json.loads(found[0])
    record = Record(known_facts(sent["environment"]), [Row(*fields) for fields in sent["rows"]])
    check_rows(record.rows)
    if commit:
        record.environment["commit"] = commit
    return record
