"""Read what an executed copy of the notebook measured: the JSON that its cell `rows` shows,

    {"environment": ..., "points": ..., "ratios": ..., "times": ...}, the last three as rows_of() takes them.

Anyone can send such a file: its code must be ours, and nothing may be missing. Read the numbers before you
commit them.
"""

import json
import re
import sys
from itertools import zip_longest
from pathlib import Path

import nbformat
import pandas

from helpers import machine
from helpers.names import CRITERIA, LABELS
from helpers.results.store import Record, Row


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
                f"expected the code of {machine.NOTEBOOK.name} here: for another one, check out that version"
            )


def rows_of(points: dict, ratios: dict | None, times: dict) -> list[Row]:
    """Return the rows of what the notebook's cells measured. Raises ValueError, which names what is missing.

    points: {criterion: points}. ratios: {Unsloth's name: speedups, one for each run of the puzzle's line}.
    times: {column: values}, a value for each function, size, and turn.
    """
    missing = [criterion for criterion, *_ in CRITERIA if criterion not in points]
    missing += [name for name, values in (ratios or {"ratios": ()}).items() if not values]
    if missing:
        what = f"not measured: {', '.join(missing)}"
        raise ValueError(f"{what}. Install what its cells say is missing; run all cells again")
    frame = pandas.DataFrame(times).replace({"function": {label: name for name, label in LABELS.items()}})
    wide = frame.pivot_table(index="function", columns=["size", "turn"], sort=False)
    on_gpu = wide["us on the GPU"]
    sizes = frame["size"].unique()  # the smallest first
    rounds = sum(wide["ms for 100 rounds"][size] for size in sizes)
    over = rounds / rounds.loc["ours"]
    tables = [
        ("protocol", "until return", "us", wide["us until a call returns"][sizes[0]]),
        ("protocol", "100 rounds", "s", rounds / 1e3),
        ("protocol", "over this kernel", "x", over),
    ]
    for size in sizes:
        tables.append(("protocol_gpu", size, "us", on_gpu[size]))
        over_ours = on_gpu[size].filter(["unsloth_today"], axis=0) / on_gpu.loc["ours", size]
        tables.append(("on_gpu", size, "x", over_ours))
    rows = []
    for *fields, unit, table in tables:
        rows += [Row(*fields, name, unit, values.tolist()) for name, values in table.iterrows()]
    rows.append(Row("claim", "score (of 14)", "ours", "points", [sum(points.values())]))
    for name, values in {**ratios, "bitsandbytes": over.loc["bitsandbytes"].tolist()}.items():
        rows.append(Row("claim", f"vs {LABELS[name]}", "ours", "x", values))
    return rows


def read(path: Path | str) -> tuple:
    """Return an executed notebook, and the Record that it shows. Exits with one line if its code is not this
    checkout's, or if something is missing."""
    try:
        notebook = nbformat.read(path, as_version=4)
        check_code(notebook)
        outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
        pages = "\n".join(data.get("text/html", "") for data in outputs)
        found = re.findall('{"environment":.*(?=</details>)', pages)  # Colab may change ids of cells
        if len(found) != 1:
            problem = f"it has {len(found)} outputs with rows, expected 1"
            raise ValueError(f"{problem}: run all its cells on a GPU, without NF4_QUICK")
        sent = json.loads(found[0])
        return notebook, Record(sent.pop("environment"), rows_of(**sent))
    except Exception as error:  # it can be any file
        sys.exit(f"{path}: {type(error).__name__}: {error}")
