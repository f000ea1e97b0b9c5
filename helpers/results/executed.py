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

from helpers import machine
from helpers.names import CRITERIA, LABELS
from helpers.results.store import CARDS, Record, Row, slug

SIZES = {"4.2M bf16": 1, "16.8M fp16": 0, "58.7M bf16": 2}  # {elements and dtype: its place among CONFIGS}


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


def rows_of(points: dict, ratios: dict | None, times: dict | None) -> list[Row]:
    """Return the rows of what the notebook's cells measured. Raises ValueError, which names what is missing.

    points: {criterion: points}. ratios: {Unsloth's name: speedups, one for each run of the puzzle's line}.
    times: {contender: turns}; a turn is (us until return, us on the GPU, s of 100 rounds) of each CONFIG.
    """
    missing = [criterion for criterion, *_ in CRITERIA if points.get(criterion) is None]
    missing += [name for name, values in {"turns": times, **(ratios or {})}.items() if not values]
    if missing:
        text = ", ".join(missing)
        raise ValueError(f"not measured: {text}. Install what its cells say is missing; run all cells again")
    rows, seconds, ours = [], {}, times["ours"]
    for name, turns in times.items():
        until_return = [us for _, (us, _, _), _ in turns]  # of the smallest weight, 4096x1024 in bf16
        seconds[name] = [sum(s for *_, s in turn) for turn in turns]
        rows.append(Row("protocol", "until return", name, "us", until_return))
        rows.append(Row("protocol", "100 rounds", name, "s", seconds[name]))
        over = [theirs / own for theirs, own in zip(seconds[name], seconds["ours"], strict=True)]
        rows.append(Row("protocol", "over this kernel", name, "x", over))
    for size, place in SIZES.items():
        for name, turns in times.items():
            gpu_us = [turn[place][1] for turn in turns]
            rows.append(Row("protocol_gpu", size, name, "us", gpu_us))
            if name == "unsloth_today":
                over = [us / turn[place][1] for us, turn in zip(gpu_us, ours, strict=True)]
                rows.append(Row("on_gpu", size, name, "x", over))
    both = zip(seconds["bitsandbytes"], seconds["ours"], strict=True)
    speedups = {**ratios, "bitsandbytes": [theirs / ours for theirs, ours in both]}
    rows.append(Row("claim", "score (of 14)", "ours", "points", [sum(points.values())]))
    for name, values in speedups.items():
        rows.append(Row("claim", f"vs {LABELS[name]}", "ours", "x", values))
    return rows


def check_card(environment: dict) -> None:
    """Raise ValueError for a card with the capability of another."""
    card = CARDS.get(slug(environment))
    if card and environment["capability"] != card.capability:
        found = f"capability is {environment['capability']}"
        raise ValueError(f"{found}, expected {card.capability} of {card.name}")


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
        environment = sent.pop("environment")
        check_card(environment)
        return notebook, Record(environment, rows_of(**sent))
    except Exception as error:  # it can be any file
        sys.exit(f"{path}: {type(error).__name__}: {error}")
