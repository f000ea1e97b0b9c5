"""Read and write measurements: results/<card>/<section>.jsonl, one file for what a command measured at once.

Its first line says where, when, and with which code: what `describe()` returns, this version, a commit, and a
note.
Each other line is a row [section, case, contender, unit, values] with every repeat. `python -m helpers bench`
writes a file a section; notebook.jsonl holds what an executed notebook printed.
"""

import functools
import json
import os
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from helpers.machine import ROOT, write_whole
from nf4_triton.core.supported import VERSION
from nf4_triton.environment import describe

CARDS = {  # that the pages can show, by their folders
    "nvidia-h200": "NVIDIA H200",
    "nvidia-h100-80gb-hbm3": "NVIDIA H100",
    "tesla-t4": "Tesla T4",
    "tesla-t4-simulated": "Tesla T4 with Triton 3.6, predicted",
}


class Row(NamedTuple):
    """One number, or all repeats of it."""

    section: str
    case: str
    contender: str
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


class Record(NamedTuple):
    """A file: what one command measured at one time."""

    environment: dict
    rows: list[Row]


def root() -> Path:
    """Return results/, or the folder that the environment variable NF4_RESULTS names."""
    return Path(os.environ.get("NF4_RESULTS") or ROOT / "results")


def slug(environment: dict) -> str:
    """Return the folder name of a described machine: "tesla-t4", "nvidia-h200-forced-t4", "cpu"."""
    name = environment["card"] or "cpu"
    if environment.get("forced"):
        name += f" forced {environment['forced']}"
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def records(card: str) -> dict[str, Record]:
    """Return {section: its record} of a card."""
    found = {}
    for path in sorted((root() / card).glob("*.jsonl")):
        environment, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found[path.stem] = Record(environment, [Row(*key, tuple(values)) for *key, values in rows])
    return found


def rows(card: str, version: str | None = None) -> list[Row]:
    """Return all rows stored for a card, or only those of a version; an empty list if there are none."""
    found = records(card).values()
    if version:
        found = [record for record in found if record.environment.get("version") == version]
    return [row for record in found for row in record.rows]


def select(rows: Iterable[Row], *fields: str) -> list[Row]:
    """Return the rows that begin with these fields: section, case, contender, unit."""
    return [row for row in rows if row[: len(fields)] == fields]


@functools.cache  # the results that a process writes change the checkout
def commit() -> str | None:
    """Return this checkout's commit, with "-dirty" if a file in git differs from it.

    Without .git it is None, stored as null. NF4_COMMIT takes precedence: for a copy without .git, or for
    several commands, the first of which changes results.
    """
    if named := os.environ.get("NF4_COMMIT"):
        return named
    git = "git --git-dir=.git describe --always --dirty --exclude '*'"
    done = subprocess.run(git, shell=True, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def write(section: str, new: Iterable[Row], note: str = "", environment=None) -> Path:
    """Store a section, replacing the one before; return its file. Raises OSError, and the old file stays.

    environment: what `describe()` returned on the machine that measured, with "version" and "commit" if they
    were not this checkout's.
    """
    here = {"version": VERSION, "commit": commit(), "note": note, **(environment or describe())}
    path = root() / slug(here) / f"{section}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in (here, *new)))
    return path
