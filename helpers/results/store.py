"""Read and write measurements: results/<card>/rows.csv, one row per number shown anywhere, and meta.json.

A row is (section, case, contender, unit, values); `values` holds every repeat. meta.json names the card and,
for each section, when, where, and with which commit and kernel it was measured.
"""

import csv
import hashlib
import json
import os
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from helpers.machine import ROOT, SRC
from nf4_triton.environment import describe

FACTS = ("commit", "kernel", "card", "cpu", "driver", "cuda", "versions")  # in meta.json, of each section


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


def root() -> Path:
    """Return results/, or the folder that the environment variable NF4_RESULTS names."""
    return Path(os.environ.get("NF4_RESULTS") or ROOT / "results")


def slug(environment: dict) -> str:
    """Return the folder name of a described machine: "tesla-t4", "nvidia-h200-forced-t4", "cpu"."""
    name = environment.get("card") or "cpu"
    if environment.get("forced"):
        name += f" forced {environment['forced']}"
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def rows(card: str) -> list[Row]:
    """Return all rows stored for a card; an empty list if there are none."""
    path = root() / card / "rows.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = list(csv.reader(file))[1:]
    return [Row(*key, tuple(map(float, values.split()))) for *key, values in lines]


def meta(card: str) -> dict:
    """Return meta.json of a card: its name as "card", and "sections"; {} if there is none."""
    path = root() / card / "meta.json"
    return json.loads(path.read_text()) if path.exists() else {}


def cards() -> list[str]:
    """Return the folders of all cards that have rows."""
    return sorted(path.parent.name for path in root().glob("*/rows.csv"))


def select(rows: Iterable[Row], *fields: str) -> list[Row]:
    """Return the rows that begin with these fields: section, case, contender, unit."""
    return [row for row in rows if row[: len(fields)] == fields]


def one(rows: Iterable[Row], *fields: str) -> Row:
    """Return the one row that begins with these fields. Raises KeyError if none or several do."""
    found = select(rows, *fields)
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows for {fields}, expected one")
    return found[0]


def kernel_hash() -> str:
    """Return a hash of kernel.py and settings.py; a section with another one measured an earlier kernel."""
    package = SRC / "nf4_triton"
    text = (package / "kernel.py").read_bytes() + (package / "settings.py").read_bytes()
    return hashlib.sha256(text).hexdigest()[:12]


def earlier(card: str) -> list[str]:
    """Return the sections of a card that measured another kernel than this checkout's."""
    sections = meta(card).get("sections", {})
    return [name for name, at in sections.items() if at["kernel"] not in (None, kernel_hash())]


def commit() -> str | None:
    """Return this checkout's commit, with "-dirty" if helpers/ differs from it; None without git.

    NF4_COMMIT names the commit of a copy whose .git is missing or of another state.
    """
    if named := os.environ.get("NF4_COMMIT"):
        return named
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "helpers"])
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def write(
    section: str, new: Iterable[Row], card: str | None = None, note: str = "", environment=None
) -> Path:
    """Replace one section of a card's rows; return the card's folder.

    card: the folder under results/, this machine's by default. environment: what `describe()` returned on the
    machine that measured, with "commit" and "kernel" if it measured another code than this checkout's.
    """
    here = {"commit": commit(), "kernel": kernel_hash(), **(environment or describe())}
    card = card or slug(here)
    folder, sections = root() / card, meta(card).get("sections", {})
    sections[section] = {"date": here["date"][:10], "note": note, **{name: here.get(name) for name in FACTS}}
    kept = [row for row in rows(card) if row.section != section]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(Row._fields)
        for *key, values in [*kept, *new]:
            table.writerow([*key, " ".join(f"{value:.9g}" for value in values)])
    text = json.dumps({"card": here.get("card"), "sections": sections}, indent=1)
    (folder / "meta.json").write_text(text + "\n")
    return folder
