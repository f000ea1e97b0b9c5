"""Fill the marked blocks of README, docs and the notebook's text cells from stored rows; file sent results.

A block is everything between `<!-- name -->` and `<!-- /name -->`; the function of that name returns its
text. `<!-- figure name -->` holds the picture of that name.
"""

import argparse
import base64
import dataclasses
import json
import os
import re
import statistics
from pathlib import Path

import nbformat

from helpers.results import plots, store
from helpers.results.plots import CARD, LABELS, SHAPES, T4, call_us, size_text
from helpers.results.store import ROOT, one, select

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
FIGURES = ROOT / "docs" / "figures"
BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n.*?<!-- /(?P=name) -->", re.S)
BASELINES = {"today": "unsloth_today", "classic": "unsloth_classic"}
HEADS = {
    "kernels": "kernels, s",
    "calls": "launch overhead, s",
    "total": "sum, s",
    "speedup": "this kernel is faster by",
    "measured": "measured, s",
    "s": "seconds",
    "x": "speedup over classic",
    "until_return": "us until it returns",
    "synchronized": "us with a synchronize",
    "first_call_new_layer": "us, first call of a new layer",
    "ordinary": "this kernel, `kernel[grid](...)`",
    "compiled_grid": "this kernel, `compiled[grid](...)`",
    "direct": "this kernel, direct launch",
    "allocate_and_launch": "allocate and launch only",
    "products_only": "products alone",
    "geometric mean": "ours is faster by (geometric mean)",
}
TITLES = LABELS | HEADS
REPOSITORY = re.compile(r"[\w-]+/[\w-]+")
LONG_TESTS = {  # contender and case of the counts that are shown
    "fuzz": "{ours wrong} of {ours layers} random layers wrong",
    "soak": "{ours wrong} wrong results in {ours launches} launches",
    "sanitizer": "errors: memcheck {ours memcheck}, racecheck {ours racecheck}, initcheck {ours initcheck}, "
    "synccheck {ours synccheck}",
    "seeded_bugs": "caught: {caught cpu} of {seeded cpu} on a CPU, {caught gpu} of {seeded gpu} on a GPU",
    "bitsandbytes_tests": "{ours passed} passed and {ours failed} failed with this kernel",
}
ALL = 1 << 34  # a setting for every size
PNG = re.compile(r"(?<=data:image/png;base64,)[\w+/=]+")


def table(head: str, lines: list[list[str]]) -> str:
    """Return a markdown table; head: its column titles, separated by " | "."""
    titles = head.split(" | ")
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *lines))


def _title(name: str) -> str:
    """Return how a contender, a unit or a case is shown: repositories as links, sizes in a few letters."""
    name = re.sub(r"^\d{5,}", lambda size: size_text(int(size[0])), TITLES.get(name, name))
    return f"[{name}](https://github.com/{name})" if REPOSITORY.fullmatch(name) else name


def pivot(head: str, rows, down="case", across="contender", cell=lambda row: f"{row.median:.1f}") -> str:
    """Return a table with a line per value of the field `down` and a column per value of `across`."""
    rows = list(rows)
    sides, tops = (list(dict.fromkeys(getattr(row, field) for row in rows)) for field in (down, across))
    cells = {(getattr(row, down), getattr(row, across)): cell(row) for row in rows}
    lines = [[_title(side), *(cells.get((side, top), "-") for top in tops)] for side in sides]
    return table(" | ".join([head, *map(_title, tops)]), lines)


def span(row: store.Row) -> str:
    return f"{row.low:.2f} to {row.high:.2f}" if len(row.values) > 1 else f"{row.median:.2f}"


# --- what the blocks say ---


def environment(card: str = CARD) -> str:
    """Return one line: card, driver, dates, versions, and which sections an earlier kernel produced."""
    facts, now, old = store.meta(card), store.hashes(), []
    for name, at in facts["sections"].items():
        parts = ["device"] if name == "gpu_time" else list(now)
        old += [name] * any(at[part] and at[part] != now[part] for part in parts)
    dates = " and ".join(sorted({section["date"] for section in facts["sections"].values()}))
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    text = f"{facts['card']}, driver {facts['driver']}, CUDA {facts['cuda']}, {dates}; {versions}."
    which = ", ".join(old) if len(old) < len(facts["sections"]) else "everything"
    return text + f" Measured with an earlier version of the kernel: {which}." * bool(old)


def claim() -> str:
    """The score on the stored card, in a sentence."""
    rows = select(store.rows(CARD), "score")
    score = min(sum(row.median for row in select(rows, contender=c, unit="points")) for c in BASELINES)
    today, classic = (one(rows, case="total", contender=c, unit="x").median for c in BASELINES)
    return (
        f"{score:.0f} of 14 points on an {store.meta(CARD)['card']}: {today:.2f} times as fast as Unsloth "
        f"today and {classic:.2f} times as fast as classic, its code path when the puzzle was published."
    )


def protocol() -> str:
    """Official protocol: median seconds and how much faster ours is."""
    rows = select(store.rows(CARD), "protocol", "total", unit="s")
    ours = one(rows, contender="ours").median
    lines = [[LABELS[row.contender], f"{row.median:.3f}", f"{row.median / ours:.2f}x"] for row in rows]
    return table("official protocol | median s | this kernel is faster by", lines)


def gpu_time() -> str:
    """GPU time at the official sizes and the speed relative to the memory-bound reference."""
    sizes = {f"{numel} {case.split()[1]}": case for case, numel in SHAPES.items()}
    rows = [dataclasses.replace(row, case=sizes[row.case])
            for row in select(store.rows(CARD), "gpu_time") if row.case in sizes]  # fmt: skip
    least = {row.case: row.median for row in select(rows, contender="copy_kernel")}
    return pivot("GPU time, us (share of the reference's speed)", rows,
                 cell=lambda row: f"{row.median:.1f} ({least[row.case] / row.median:.0%})")  # fmt: skip


def stored_score() -> str:
    """The marking table of the stored run against both baselines."""
    rows = select(store.rows(CARD), "score")
    both = [select(rows, contender=c, unit="points") for c in BASELINES]
    lines = [[a.case, *(f"{row.median:+.0f}".replace("+0", "0") for row in (a, b))]
             for a, b in zip(*both, strict=True)]  # fmt: skip
    lines.append(["**Sum**", *(f"**{sum(row.median for row in column):.0f} of 14**" for column in both)])
    speedups = [f"{one(rows, case='total', contender=c, unit='x').median:.2f}x" for c in BASELINES]
    return table("criterion | vs Unsloth today | vs Unsloth classic", [*lines, ["Speedup", *speedups]])


def launch_forms() -> str:
    """The official protocol with three ways to launch the same kernel."""
    rows, lines = select(store.rows(CARD), "launch_forms"), []
    theirs = [one(rows, contender=name).median for name in BASELINES.values()]
    for form in ("ordinary", "compiled_grid", "direct"):
        seconds = one(rows, contender=form).median
        lines.append([HEADS[form], f"{seconds:.3f}", *(f"{other / seconds:.2f}x" for other in theirs)])
    return table("launch form | official protocol, s | over Unsloth today | over Unsloth classic", lines)


def shares() -> str:
    """How much of the time saved is GPU kernel and how much launch path; H200 measured, T4 predicted."""
    rows, predicted, texts = store.rows(CARD), store.rows(T4), []
    ours, card = call_us(rows, "ours"), store.meta(CARD)["card"]
    for name in BASELINES.values():
        on_gpu, rest = (a - b for a, b in zip(call_us(rows, name), ours, strict=True))
        kernels, total = (
            statistics.mean(one(predicted, "t4_prediction", case, name).values)
            - statistics.mean(one(predicted, "t4_prediction", case, "ours").values)
            for case in ("kernels", "total")
        )
        measured, guessed = on_gpu / (on_gpu + rest), kernels / total
        texts.append(
            f"Of the time saved over {LABELS[name]}, {measured:.0%} comes from the kernel and "
            f"{1 - measured:.0%} from the launch path ({card}); on a T4 the prediction is {guessed:.0%} "
            f"and {1 - guessed:.0%}."
        )
    return " ".join(texts)


def t4_claim() -> str:
    """The speedup on a T4 and the puzzle's points, predicted or, once there is a result, measured."""
    rows, texts = store.rows(T4), []
    measured = select(store.rows("tesla-t4"), "score")
    known = len(select(measured, case="total", unit="x")) == len(BASELINES)
    for short, name in BASELINES.items():
        speed, worth = (one(rows, "t4_prediction", case, name) for case in ("speedup", "points"))
        low, high = worth.low, worth.high
        if known:
            speed = one(measured, case="total", contender=short, unit="x")
            low = high = sum(row.median for row in select(measured, contender=short, unit="points"))
        won = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        texts.append(f"{span(speed)} times as fast as {LABELS[name]} ({won} of 14 points)")
    return f"{'Measured' if known else 'Predicted'} on a Tesla T4: {' and '.join(texts)}."


def t4() -> str:
    """The official protocol on a T4: predicted parts, and measured seconds once there is a result."""
    rows = [row for row in select(store.rows(T4), "t4_prediction") if row.case in HEADS]
    measured = select(store.rows("tesla-t4"), "protocol", "total", unit="s")
    rows += [dataclasses.replace(row, case="measured") for row in measured]
    return pivot("official protocol on a T4, predicted", rows, "contender", "case", span)


def settings() -> str:
    """GPU time with one setting changed, relative to the default."""
    rows, lines = select(store.rows(CARD), "settings"), []
    for row in select(rows, contender="changed"):
        setting, size = row.case.replace(str(ALL), "ALL").split(" at ")
        default = one(rows, case=row.case, contender="default").median
        lines.append(store.Row("", f"`{setting}`", size, "", (row.median / default,)))
    return pivot("setting changed: time relative to the default", lines, cell=span)


def host_time() -> str:
    """Time of one call on the host, and of the first call of a process."""
    rows = select(store.rows(CARD), "host_time")
    warm, empty = (one(rows, case="first_call", contender=c).median for c in ("ours", "ours_empty_cache"))
    calls = pivot("one call, 1024x4096 bf16", select(rows, unit="us"), "contender", "case")
    first = f"The first call of a process takes {warm:.1f} s, {empty:.1f} s if Triton's cache is empty."
    return f"{calls}\n\n{first}"


def compiled() -> str:
    """24 weights and their products, eager and under torch.compile."""
    rows = select(store.rows(CARD), "compiled")
    fast = [row for row in rows if not row.contender.endswith("_eager")]

    def cell(row):
        eager = one(rows, case=row.case, contender=f"{row.contender}_eager").median
        return f"{eager:.2f}x / {row.median:.2f}x" if row.unit == "x" else f"{eager:.0f} / {row.median:.0f}"

    return pivot("24 weights and their products, us, eager / compiled", fast, cell=cell)


def training_claim() -> str:
    """The range of training speedups per library, in a sentence."""
    speeds = {}
    for case in dict.fromkeys(row.case for row in select(store.rows(CARD), "training")):
        speed = statistics.median(plots.speedups(store.rows(CARD), "training", case))
        speeds.setdefault(case.split(", ")[0], []).append(speed)
    texts = [f"{min(x):.2f} to {max(x):.2f} with {name}" for name, x in speeds.items()]
    return f"Speedup of a QLoRA step on an {store.meta(CARD)['card']}: {', '.join(texts)}."


def evidence() -> str:
    """Counts of the long tests."""
    rows, lines = store.rows(CARD) + store.rows("cpu"), []
    for section, text in LONG_TESTS.items():
        counts = {f"{row.contender} {row.case}": f"{row.median:,.0f}" for row in select(rows, section)}
        lines.append([section.replace("_", " "), text.format(**counts)])
    return table("long test | result", lines)


# Sections shown as they are: head, card, section, and what `pivot` takes.
PIVOTS = {
    "protocol_sizes": ("official protocol, median s (range)", CARD, "protocol", "contender", "case",
                       lambda row: f"{row.median:.3f} ({row.low:.3f} to {row.high:.3f})"),
    "t4_kernels": ("one kernel on a simulated T4, us", T4, "t4_prediction"),
    "published": ("measured on a T4 by others", T4, "published", "case", "unit", span),
    "several_gpus": ("two GPUs, ms per step", CARD, "several_gpus"),
    "whole_model": ("whole model, ms", CARD, "whole_model"),
    "machine_code": ("machine code for a T4", "cross-compiled", "machine_code", "case", "unit",
                     lambda row: f"{round(row.median, 2):g}"),
}  # fmt: skip
KEEP = {  # ... and the rows of them that are shown, if not all
    "protocol_sizes": lambda row: row.case != "total",
    "t4_kernels": lambda row: row.unit == "us",
    "machine_code": lambda row: row.case.startswith("sm_75"),
}
TEXTS = (environment, claim, protocol, gpu_time, stored_score, launch_forms, shares, t4_claim, t4, settings,
         host_time, compiled, training_claim, evidence)  # fmt: skip
PICTURES = (plots.idea, plots.where_time_goes, plots.share_by_size, plots.t4, plots.training)


def block(name: str):
    """Return the text or the Picture of a block. Raises KeyError for an unknown name."""
    if name in PIVOTS:
        head, card, section, *how = PIVOTS[name]
        return pivot(head, filter(KEEP.get(name), select(store.rows(card), section)), *how)
    texts, pictures = ({f.__name__: f for f in functions} for functions in (TEXTS, PICTURES))
    return (texts | {f"figure {name}": f for name, f in pictures.items()})[name]()


# --- filling them in ---


def render(text: str, address) -> str:
    """Return `text` with every block filled in; address(name, picture) is where a picture is found.

    Raises KeyError for a block of unknown name or a missing row.
    """

    def fill(match):
        name = match["name"]
        body = block(name)
        if not isinstance(body, str):
            body = f"![{body.alt}]({address(name.removeprefix('figure '), body)})"
        return f"<!-- {name} -->\n{body}\n<!-- /{name} -->"

    return BLOCK.sub(fill, text)


def draw_page(path: Path, check: bool) -> bool:
    """Fill a markdown page and write its pictures to docs/figures; return True if it was up to date."""

    def address(name, picture):
        file = FIGURES / f"{name}.png"
        if not check:
            file.write_bytes(picture.png())
        return os.path.relpath(file, path.parent) if file.exists() else "no picture"

    before = path.read_text(encoding="utf-8")
    after = render(before, address)
    if not check:
        path.write_text(after, encoding="utf-8")
    return before == after


def draw_notebook(path: Path, check: bool) -> bool:
    """Fill the text cells of a notebook; return True if they were up to date.

    Pictures are data URIs, which Colab and GitHub show. Their bytes are not compared: the alternative text
    holds the numbers, and other versions of matplotlib draw other bytes.
    """

    def address(_, picture):
        return "data:image/png;base64," + base64.b64encode(b"" if check else picture.png()).decode()

    notebook, fresh = nbformat.read(path, as_version=4), True
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and BLOCK.search(cell.source):
            after = render(cell.source, address)
            fresh &= PNG.sub("", cell.source) == PNG.sub("", after)
            cell.source = after
    if not check:
        nbformat.write(notebook, path)
    return fresh


def draw(check: bool = False) -> list[str]:
    """Fill every page and the notebook; return the names of those that were out of date."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    fresh = {path.name: draw_page(path, check) for path in pages}
    fresh[NOTEBOOK.name] = draw_notebook(NOTEBOOK, check)
    return [name for name, up_to_date in fresh.items() if not up_to_date]


def file_result(path: Path) -> Path:
    """Store an nf4_<card>.json, which a run of the notebook leaves, under results/<card>/.

    Returns that folder. Raises ValueError if the file is of another form.
    """
    try:
        sent = json.loads(path.read_text(encoding="utf-8"))
        rows = [store.Row(*texts, values) for *texts, values in sent["rows"]]
        facts = sent["environment"] | {"kernel": sent["kernel"] or {"device": None, "host": None}}
        facts["card"], facts["date"]  # what decides the folder and its stamp
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result of the notebook: {error!r}") from error
    for section in dict.fromkeys(row.section for row in rows):
        store.write(section, select(rows, section), environment=facts)
    return store.folder(store.slug(facts))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the tables and pictures of README, docs and notebook.")
    parser.add_argument("file", nargs="?", type=Path, help="store this nf4_<card>.json under results/ first")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a page is out of date"
    )
    options = parser.parse_args(argv)
    if options.file:
        print(f"stored in {file_result(options.file)}")
    old = draw(options.check)
    verb = "out of date" if options.check else "updated"
    print(f"{verb}: {', '.join(old)}" if old else "everything is up to date")
    return int(options.check and bool(old))
