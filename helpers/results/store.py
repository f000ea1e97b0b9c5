"""Read and write measurements: results/<card>/rows.csv, one row per number shown anywhere, and meta.json.

A row is (section, case, contender, unit, values); `values` holds every repeat. meta.json names the card, its
driver and versions, and when and with which kernel each section was measured.
"""

import ast
import csv
import hashlib
import json
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NF4 = ROOT / "helpers" / "nf4"


@dataclass(frozen=True)
class Row:
    """One number, or all repeats of it."""

    section: str
    case: str
    contender: str
    unit: str
    values: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(self, "values", tuple(float(value) for value in self.values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


HEADER = [field.name for field in fields(Row)]


def folder(card: str) -> Path:
    """results/<card>; the environment variable NF4_RESULTS replaces `results`."""
    return Path(os.environ.get("NF4_RESULTS") or ROOT / "results") / card


def slug(environment: dict) -> str:
    """Return the folder name of a described machine: "tesla-t4", "nvidia-h200-forced-t4", "cpu"."""
    name = re.sub(r"[^a-z0-9]+", "-", (environment.get("card") or "cpu").lower()).strip("-")
    return f"{name}-forced-{environment['forced']}" if environment.get("forced") else name


def rows(card: str) -> list[Row]:
    """Return all rows stored for a card; an empty list if there are none."""
    path = folder(card) / "rows.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(*texts, values.split()) for *texts, values in list(csv.reader(file))[1:]]


def meta(card: str) -> dict:
    """Return meta.json of a card: card, driver, cuda, versions and sections; {} if there is none."""
    path = folder(card) / "meta.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def select(rows: Iterable[Row], section=None, case=None, contender=None, unit=None) -> list[Row]:
    """Return the rows that match every field given."""
    wanted = (section, case, contender, unit)
    fields = ((row, (row.section, row.case, row.contender, row.unit)) for row in rows)
    return [row for row, have in fields if all(w in (None, h) for w, h in zip(wanted, have, strict=True))]


def one(rows: Iterable[Row], *fields, **named) -> Row:
    """Return the only row that `select` finds. Raises KeyError with the fields if none or several match."""
    found = select(rows, *fields, **named)
    if len(found) != 1:
        raise KeyError(f"{len(found)} rows for {', '.join([*fields, *named.values()])}, expected one")
    return found[0]


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.5g}"


def save(card: str, rows: Iterable[Row], meta: dict) -> Path:
    """Replace everything stored for a card; returns its folder."""
    place = folder(card)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEADER)
        table.writerows([*astuple(row)[:-1], " ".join(map(_text, row.values))] for row in rows)
    text = json.dumps(meta, indent=1, ensure_ascii=False)
    (place / "meta.json").write_text(text + "\n", encoding="utf-8")
    return place


def write(
    section: str, new: Iterable[Row], card: str | None = None, note: str = "", environment=None
) -> Path:
    """Replace one section of a card's rows and record when and with which kernel it was measured.

    card: the folder under results/, this machine's by default. environment: what `describe()` returned on
    the machine that measured. Returns the card's folder.
    """
    from helpers.nf4.environment import describe

    here = environment or describe()
    card = card or slug(here)
    facts = {name: here.get(name) for name in ("card", "driver", "cuda", "versions")}
    stamp = {"date": here["date"][:10], **(here.get("kernel") or hashes()), "note": note}
    sections = meta(card).get("sections", {}) | {section: stamp}
    kept = [row for row in rows(card) if row.section != section]
    return save(card, [*kept, *new], facts | {"sections": sections})


def _syntax(node):
    """Return a syntax tree as nested tuples, the same in every Python version, without docstrings."""
    if isinstance(node, list):
        return tuple(map(_syntax, node))
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind"))
    return type(node).__name__, *((name, _syntax(value)) for name, value in fields if value not in (None, []))


def hashes() -> dict[str, str]:
    """Return {"device", "host"}: hashes of kernel.py and launch.py without comments and docstrings.

    GPU times depend on `device` only; everything else depends on both.
    """
    found = {}
    for part, file in (("device", "kernel.py"), ("host", "launch.py")):
        tree = _syntax(ast.parse((NF4 / file).read_text(encoding="utf-8")))
        found[part] = hashlib.sha256(repr(tree).encode()).hexdigest()[:12]
    return found
