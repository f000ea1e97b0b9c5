"""Read and write measurements: results/<card>/rows.csv, one row per number shown anywhere, and meta.json.

A row is (section, case, contender, unit, values); `values` holds every repeat. meta.json names the
card and, for each section, the date, commit, hashes of the kernel and launch path, driver, and versions.
"""

import csv
import json
import os
import re
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NF4 = ROOT / "helpers" / "src" / "nf4_triton"
HEADER = ["section", "case", "contender", "unit", "values"]
FACTS = ("card", "driver", "cuda", "versions")  # of the machine that measured a section
GPU_ONLY = ("gpu_time", "settings", "machine_code")  # sections that do not depend on the launch path


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
    """Return meta.json of a card: its name as "card", and "sections"; {} if there is none."""
    path = folder(card) / "meta.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def old(card: str) -> set[str]:
    """Return the sections of a card that another version of the code measured."""
    now, found = hashes(), set()
    for name, at in meta(card).get("sections", {}).items():
        parts = ["kernel"] if name in GPU_ONLY else now
        if any(at[part] not in (None, now[part]) for part in parts):
            found.add(name)
    return found


def commit() -> str | None:
    """Return this checkout's commit, with "-dirty" if helpers/ differs from it; None without git.

    NF4_COMMIT names the commit of a copy whose .git is missing or of another state.
    """
    if named := os.environ.get("NF4_COMMIT"):
        return named
    git = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        clean = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "helpers"], capture_output=True)
    except FileNotFoundError:
        return None
    return head.stdout.strip() + ("-dirty" if clean.returncode else "") if head.returncode == 0 else None


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
    """Replace one section of a card's rows and record when, where, and with which code it was measured.

    card: the folder under results/, this machine's by default. environment: what `describe()` returned on
    the machine that measured, with the hashes of its code as "kernel". The commit is recorded
    if this checkout has that code. Returns the card's folder.
    """
    from nf4_triton.environment import describe

    here = environment or describe()
    card = card or slug(here)
    code = here.get("kernel") or hashes()
    code = {"commit": commit() if code == hashes() else None, **code}
    stored = meta(card)
    sections = stored.get("sections", {})
    facts = {name: here.get(name) for name in FACTS}
    sections[section] = {"date": here["date"][:10], **code, **facts, "note": note}
    kept = [row for row in rows(card) if row.section != section]
    return save(card, [*kept, *new], {"card": here.get("card"), "sections": sections})


# --- files that people send ---

# Of a text that becomes a folder's name or stands on a page: no path, HTML, or mark of a page.
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .:'+_()-]{0,59}")
NEEDED = {  # cases and contenders of the headline
    *(("puzzle's line", who) for who in ("unsloth_today", "unsloth_classic")),
    *(("total", who) for who in ("ours", "unsloth_today")),
}


def check_sent(facts: dict, found: list[Row]) -> None:
    """Raise ValueError for an environment or a row that must not be stored."""
    texts = [facts["card"], facts["date"], *facts["kernel"].values(), *facts["versions"]]
    optional = (facts["driver"], facts["cuda"], facts["forced"], *facts["versions"].values())
    texts += [text for text in optional if text is not None]
    for row in found:
        texts += [row.section, row.case, row.contender, row.unit]
    for text in texts:
        if not PLAIN.fullmatch(text):
            raise ValueError(f"{text[:60]!r} is not a short plain text")
    for row in found:
        # points may be 0 or negative; a time or a ratio may not
        lowest = -14 if row.unit == "points" else 1e-6
        if not row.values or not all(lowest <= value <= 1e6 for value in row.values):
            raise ValueError(f"values of {row.contender} are {row.values[:3]}, expected {lowest} to 1e6")
    if missing := NEEDED - {(row.case, row.contender) for row in found}:
        raise ValueError(f"rows are missing: {sorted(missing)}")


def read_sent(path: Path) -> tuple[dict, list[Row]]:
    """Return (environment, rows) of an nf4_<card>.json that a run of the notebook wrote.

    Raises ValueError with one line if the file is anything else.
    """
    try:
        sent = json.loads(path.read_text(encoding="utf-8"))
        facts = {name: sent["environment"][name] for name in (*FACTS, "date", "forced")}
        facts["kernel"] = {part: sent["kernel"][part] for part in PARTS}
        found = [Row(*fields) for fields in sent["rows"]]
        check_sent(facts, found)
    except Exception as error:  # no file, no JSON, or another program's
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not a result file of the notebook: {problem}") from error
    return facts, found


def file_result(path: Path, replace: bool = False) -> Path:
    """Store an nf4_<card>.json, which a run of the notebook leaves, under results/<card>/; return that.

    Raises ValueError if the file is anything else, or if that folder holds results and `replace` is not set.
    """
    facts, found = read_sent(path)
    card = slug(facts)
    if rows(card) and not replace:
        raise ValueError(f"results/{card} holds results already; add --replace to store {path}")
    for section in ("protocol", "score"):
        write(section, select(found, section), card, environment=facts)
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


PARTS = {  # files of the package by what depends on them
    "kernel": ("kernel", "settings"),
    "launch": ("private", "state", "replay", "launch"),
}


def hash_of_parts(codes):
    """Return {"kernel", "launch"}: hashes of the codes of each part's files, given by file name."""
    return {
        part: hashlib.sha256("".join(code_hash(codes[name]) for name in names).encode()).hexdigest()[:12]
        for part, names in PARTS.items()
    }


def hashes_of(cells):
    """Return {"kernel", "launch"}: hashes of the notebook's cells of these files that ran.

    An edited cell gives a hash that no version of the code has.
    """
    codes = {}
    for name in sum(PARTS.values(), ()):
        ran = [cell for cell in dict.fromkeys(cells) if f"# helpers/src/nf4_triton/{name}.py" in cell[:200]]
        codes[name] = "\n".join(ran)
    return hash_of_parts(codes)


# %% tags=["module-only"]
def hashes() -> dict[str, str]:
    """Return {"kernel", "launch"}: hashes of the notebook's cells in the package's files, see PARTS.

    GPU times depend on `kernel` only; everything else depends on both.
    """
    codes = {}
    for name in sum(PARTS.values(), ()):
        parts = re.split(r"^# %%(.*)$", (NF4 / f"{name}.py").read_text(encoding="utf-8"), flags=re.M)
        cells = [code for title, code in zip(parts[1::2], parts[2::2], strict=True) if " id=" in title]
        codes[name] = "\n".join(cells)
    return hash_of_parts(codes)
