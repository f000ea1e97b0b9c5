"""Read what an executed copy of the notebook measured: the line of JSON that its cell `rows` printed."""

import json
import math
import re
from itertools import zip_longest
from pathlib import Path

import nbformat

from helpers.results.plots import NAMES
from helpers.results.store import ROOT, Row, select

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
UNSLOTH = ("unsloth_today", "unsloth_classic")
CRITERIA = (
    "One fused kernel",
    "Penalty: speedup at most 1.00",
    "Speedup at least 1.05",
    "Speedup at least 1.10",
    "Speedup at least 1.15",
    "Works under torch.compile",
    "Custom assembly works",
    "Uses cache eviction",
    "Tested in fp16 and bf16",
)
KNOWN = {  # section, case, contender, unit
    *(("protocol", "puzzle's line", who, "x") for who in UNSLOTH),
    *(("protocol", "total", who, "s") for who in NAMES),
    *(("score", criterion, who, "points") for criterion in CRITERIA for who in ("today", "classic")),
}


def sources(path: Path) -> list[str]:
    """Return the code of a notebook's cells, without the empty ones."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source.strip() for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def check_code(path: Path) -> None:
    """Raise ValueError, which names the cell, unless a notebook's code is that of this checkout's."""
    for number, (theirs, ours) in enumerate(zip_longest(sources(path), sources(NOTEBOOK)), 1):
        if theirs != ours:
            raise ValueError(
                f"code cell {number} ({(theirs or ours).splitlines()[0]}) was edited, added, or removed: "
                f"expected the code of {NOTEBOOK.name} here; name the version with --commit if it is another"
            )


def check_rows(rows: list[Row]) -> None:
    """Raise ValueError, which names the row, for one that is not as the notebook prints it."""
    seen = set()
    for row in rows:
        key = row[:4]
        if key not in KNOWN:
            raise ValueError(f"row {key} is unknown or of the wrong unit: expected one of helpers/results")
        if key in seen:
            raise ValueError(f"row {key} stands twice: expected it once")
        if not row.values or not all(map(math.isfinite, row.values)):
            raise ValueError(f"row {key} has the values {row.values}: expected finite numbers")
        seen.add(key)


def read(path: Path, commit: str | None = None) -> tuple[dict, dict[str, list[Row]]]:
    """Return (environment, {section: rows}) that an executed notebook printed.

    commit: the version of its code, if it is not this checkout's. Raises ValueError if something is unsound.
    """
    if not commit:
        check_code(path)
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output.get("text", "") for cell in cells for output in cell.get("outputs", [])]
    printed = re.findall('^{"environment":.*', "\n".join(outputs), re.M)  # Colab may change ids of cells
    if len(printed) != 1:
        problem = f"{path} has {len(printed)} lines of rows, expected 1"
        raise ValueError(f"{problem}: run all its cells on a GPU, without NF4_QUICK")
    sent = json.loads(printed[0])
    rows = [Row(*fields) for fields in sent["rows"]]
    check_rows(rows)
    environment = sent["environment"]
    if commit:
        environment |= {"commit": commit, "kernel": f"of {commit}"}
    return environment, {row.section: select(rows, row.section) for row in rows}
