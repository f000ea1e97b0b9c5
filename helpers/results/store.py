"""Read and write measurements: results/<card>/rows.csv, one row per number shown anywhere, and meta.json.

A row is (section, case, contender, unit, values); `values` holds every repeat. meta.json names the card, its
driver and versions, and when and with which kernel and launch path each section was measured.
"""

import csv
import json
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NF4 = ROOT / "helpers" / "src" / "nf4_triton"
HEADER = ["section", "case", "contender", "unit", "values"]
SENT = ["kernel", "launch", "protocol", "score"]  # hashes and sections of a result file of the notebook


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


class Missing(KeyError):
    """A row that a table or a picture needs is not stored."""


def folder(card: str) -> Path:
    """Return results/<card>; the environment variable NF4_RESULTS replaces `results`."""
    return Path(os.environ.get("NF4_RESULTS") or ROOT / "results") / card


def slug(environment: dict) -> str:
    """Return the folder name of a described machine: "tesla-t4", "nvidia-h200-forced-t4", "cpu"."""
    card = environment.get("card") or "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    forced = environment.get("forced")
    return f"{name}-forced-{forced}" if forced else name


def rows(card: str) -> list[Row]:
    """Return all rows stored for a card; an empty list if there are none."""
    path = folder(card) / "rows.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))[1:]
    return [Row(*texts, values.split()) for *texts, values in lines]


def meta(card: str) -> dict:
    """Return meta.json of a card: card, driver, cuda, versions and sections; {} if there is none."""
    path = folder(card) / "meta.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def select(rows: Iterable[Row], section=None, case=None, contender=None, unit=None) -> list[Row]:
    """Return the rows that match every field given."""
    wanted = {"section": section, "case": case, "contender": contender, "unit": unit}
    for field, text in wanted.items():
        if text is not None:
            rows = [row for row in rows if getattr(row, field) == text]
    return list(rows)


def one(rows: Iterable[Row], *fields, **named) -> Row:
    """Return the only row that `select` finds. Raises Missing, a KeyError, if none or several match."""
    found = select(rows, *fields, **named)
    if len(found) != 1:
        raise Missing(f"{len(found)} rows for {fields} {named}, expected one")
    return found[0]


def save(card: str, rows: Iterable[Row], meta: dict) -> Path:
    """Replace everything stored for a card; return its folder."""
    place = folder(card)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEADER)
        for row in rows:
            values = " ".join(f"{value:.9g}" for value in row.values)
            table.writerow([row.section, row.case, row.contender, row.unit, values])
    text = json.dumps(meta, indent=1, ensure_ascii=False)
    (place / "meta.json").write_text(text + "\n", encoding="utf-8")
    return place


def write(
    section: str, new: Iterable[Row], card: str | None = None, note: str = "", environment=None
) -> Path:
    """Replace one section of a card's rows and record when and with which code it was measured.

    card: the folder under results/, this machine's by default. environment: what `describe()` returned on
    the machine that measured, with the hashes of its code as "kernel". Returns the card's folder.
    """
    from nf4_triton.environment import describe

    here = environment or describe()
    card = card or slug(here)
    facts = {name: here.get(name) for name in ("card", "driver", "cuda", "versions")}
    code = here.get("kernel") or hashes()
    sections = meta(card).get("sections", {})
    sections[section] = {"date": here["date"][:10], **code, "note": note}
    kept = [row for row in rows(card) if row.section != section]
    return save(card, [*kept, *new], facts | {"sections": sections})


# --- files that people send ---


def file_result(path: Path) -> Path:
    """Store an nf4_<card>.json, which a run of the notebook leaves, under results/<card>/; return that.

    Raises ValueError with one line if the file is anything else.
    """
    problem = "it needs a card, a date, both hashes, and rows of protocol and score"
    try:
        sent = json.loads(path.read_text(encoding="utf-8"))
        found = [Row(*fields) for fields in sent["rows"]]
        code = sent["kernel"]
        facts = sent["environment"] | {"kernel": code}
        sections = sorted({row.section for row in found})
        if facts["card"] and facts["date"] and [*sorted(code), *sections] == SENT:
            problem = ""
    except OSError as error:
        problem = error.strerror
    except (json.JSONDecodeError, UnicodeDecodeError):
        problem = "it is not JSON"
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # another program's JSON
    if problem:
        raise ValueError(f"{path} is not a result file of the notebook: {problem}")
    card = slug(facts)
    for section in sections:
        new = select(found, section)
        same_code = code.items() <= meta(card).get("sections", {}).get(section, {}).items()
        if same_code:  # what the bench alone measures stays
            cases = {row.case for row in new}
            new += [row for row in select(rows(card), section) if row.case not in cases]
        write(section, new, card, environment=facts)
    return folder(card)


# %% A hash of the code that ran id="code-hash" folded=true
import ast  # noqa: E402
import hashlib  # noqa: E402


def syntax(node):
    """Return a syntax tree as nested tuples, without docstrings and imports, the same in every Python."""
    if isinstance(node, list):
        return tuple(syntax(one) for one in node if not isinstance(one, (ast.Import, ast.ImportFrom)))
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    found = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name not in ("ctx", "kind") and value not in (None, []):
            found.append((name, syntax(value)))
    return tuple(found)


def code_hash(text):
    """Return a hash of Python code without comments, docstrings, and imports."""
    return hashlib.sha256(repr(syntax(ast.parse(text))).encode()).hexdigest()[:12]


def hashes_of(cells):
    """Return {"kernel", "launch"}: hashes of the notebook's cells of kernel.py and launch.py that ran.

    An edited cell gives a hash that no version of the code has.
    """
    found = {}
    for part in ("kernel", "launch"):
        ran = [cell for cell in dict.fromkeys(cells) if f"# helpers/src/nf4_triton/{part}.py" in cell[:200]]
        found[part] = code_hash("\n".join(ran))
    return found


# %% tags=["module-only"]
def hashes() -> dict[str, str]:
    """Return {"kernel", "launch"}: hashes of kernel.py and launch.py.

    GPU times depend on `kernel` only; everything else depends on both.
    """
    files = {part: NF4 / f"{part}.py" for part in ("kernel", "launch")}
    return {part: code_hash(file.read_text(encoding="utf-8")) for part, file in files.items()}
