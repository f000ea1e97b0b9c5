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
from collections.abc import Callable
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
    "total": "total, s",
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
    "products_only": "multiplication only",
    "geometric mean": "ours is faster by (geometric mean)",
}
TITLES = LABELS | HEADS
LONG_TESTS = {  # section: (its name, what its rows say)
    "fuzz": (
        "random layers",
        "{layers_ours:,.0f} layers, {elements_ours:,.0f} weights, {wrong_ours:,.0f} wrong",
    ),
    "soak": ("long run", "{launches_ours:,.0f} launches, {layers_ours:,.0f} layers, {wrong_ours:,.0f} wrong"),
    "sanitizer": (
        "compute-sanitizer, errors",
        "memcheck {memcheck_ours:.0f}, racecheck {racecheck_ours:.0f}, initcheck {initcheck_ours:.0f}, "
        "synccheck {synccheck_ours:.0f}",
    ),
    "seeded_bugs": (
        "seeded bugs that the tests catch",
        "{gpu_caught:.0f} of {gpu_seeded:.0f} on a GPU, {cpu_caught:.0f} of {cpu_seeded:.0f} on a CPU",
    ),
    "bitsandbytes_tests": (
        "bitsandbytes' own tests with this kernel",
        "{passed_ours:,.0f} passed, {failed_ours:,.0f} failed "
        "(with its own kernel {passed_bitsandbytes:,.0f} and {failed_bitsandbytes:,.0f})",
    ),
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
    return f"[{name}](https://github.com/{name})" if re.fullmatch(r"[\w-]+/[\w-]+", name) else name


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


def stale(card: str) -> dict[str, str]:
    """Return {section: "kernel" or "launch path"}: those that an earlier version of it produced."""
    now, old = store.hashes(), {}
    for name, at in store.meta(card).get("sections", {}).items():
        for part, what in (("host", "launch path"), ("device", "kernel")):
            if at[part] and at[part] != now[part] and (name, part) != ("gpu_time", "host"):
                old[name] = what
    return old


def environment(card: str = CARD) -> str:
    """Return one line: card, driver, dates, versions, and which sections an earlier version produced.
    The long tests say that of themselves, in `evidence`."""
    facts, old = store.meta(card), [name for name in stale(card) if name not in LONG_TESTS]
    dates = " and ".join(sorted({section["date"] for section in facts["sections"].values()}))
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    text = f"{facts['card']}, driver {facts['driver']}, CUDA {facts['cuda']}, {dates}; {versions}."
    return text + f" Measured with an earlier version of this code: {', '.join(old)}." * bool(old)


def outputs() -> str:
    """Where the notebook's stored outputs were made."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    printed = "".join(
        output.get("text", "") for cell in cells if cell.id == "install" for output in cell.outputs
    )
    card = re.search(r"^(?:NVIDIA )?(.+) \(sm_", printed, re.M)
    where = f"a GPU run ({card[1]})" if card else "a CPU run, which checks results and times nothing"
    return f"The outputs stored here are from {where}; on Colab, *Run all* replaces them with your T4's."


def claim() -> str:
    """The score on the stored card, in a sentence."""
    rows = select(store.rows(CARD), "score")
    score = min(sum(row.median for row in select(rows, contender=c, unit="points")) for c in BASELINES)
    today, classic = (one(rows, case="total", contender=c, unit="x").median for c in BASELINES)
    earlier = " Measured with an earlier version of this code." * ("score" in stale(CARD))
    return (
        f"{score:.0f} of 14 points on an {store.meta(CARD)['card']}: {today:.2f} times as fast as Unsloth "
        f"today and {classic:.2f} times as fast as Unsloth classic, its code path when the puzzle was "
        "published."
    ) + earlier


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
    if not rows:
        return "Not measured yet (needs `python -m helpers bench --only protocol` on a GPU)."
    theirs = [one(rows, contender=name).median for name in BASELINES.values()]
    for form in ("ordinary", "compiled_grid", "direct"):
        seconds = one(rows, contender=form).median
        lines.append([HEADS[form], f"{seconds:.3f}", *(f"{other / seconds:.2f}x" for other in theirs)])
    return table("launch form | official protocol, s | over Unsloth today | over Unsloth classic", lines)


def shares() -> str:
    """How much of the time saved is GPU kernel and how much launch path; H200 measured, T4 predicted."""
    rows, predicted, lines = store.rows(CARD), store.rows(T4), []
    ours = call_us(rows, "ours")

    def saved(case, name):
        means = (statistics.mean(one(predicted, "t4_prediction", case, who).values) for who in (name, "ours"))
        return next(means) - next(means)

    for name in BASELINES.values():
        on_gpu, rest = (a - b for a, b in zip(call_us(rows, name), ours, strict=True))
        measured, guessed = on_gpu / (on_gpu + rest), saved("kernels", name) / saved("total", name)
        parts = [f"kernel {part:.0%}, launch path {1 - part:.0%}" for part in (measured, guessed)]
        lines.append([f"over {LABELS[name]}", *parts])
    return table(f"where the time saved comes from | {store.meta(CARD)['card']} | Tesla T4, predicted", lines)


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
        both = (one(rows, case=row.case, contender=f"{row.contender}_eager").median, row.median)
        return " / ".join(f"{x:.2f}x" if row.unit == "x" else f"{x:.0f}" for x in both)

    return pivot("dequantize 24 weights and multiply by each, us, eager / compiled", fast, cell=cell)


def training_claim() -> str:
    """The range of training speedups per library, in a sentence."""
    rows, speeds = store.rows(CARD), {}
    for row in select(rows, "training", contender="with"):
        speed = statistics.median(plots.speedups(rows, "training", row.case))
        speeds.setdefault(row.case.split(", ")[0], []).append(speed)
    texts = [f"{min(x):.2f} to {max(x):.2f} with {name}" for name, x in speeds.items()]
    return f"Speedup of a QLoRA step on an {store.meta(CARD)['card']}: {', '.join(texts)}."


def evidence() -> str:
    """Counts of the long tests."""
    rows, old = store.rows(CARD) + store.rows("cpu"), stale("cpu") | stale(CARD)
    lines, earlier, notes = [], {}, []
    for section, (name, text) in LONG_TESTS.items():
        counts = {f"{row.case}_{row.contender}": row.median for row in select(rows, section)}
        lines.append([name, text.format_map(counts)])
        if section in old:
            earlier.setdefault(old[section], []).append(name)
    for what, names in earlier.items():
        which = f"These ran ({', '.join(names)})" if len(names) < len(lines) else "All of these ran"
        notes.append(f"{which} with an earlier version of the {what}.")
    return "\n\n".join([table("long test | result", lines), *notes])


def machine_code() -> str:
    """Instructions and registers of the kernel on each card."""
    rows = select(store.rows("cross-compiled"), "machine_code")
    registers = {(row.case, row.contender): row.median for row in select(rows, unit="registers")}
    return pivot("instructions per output element (registers)", select(rows, unit="instructions"),
                 cell=lambda row: f"{row.median:.2f} ({registers[row.case, row.contender]:.0f})")  # fmt: skip


def stored(head, card, section, *how, keep=None) -> Callable[[], str]:
    """Return a block that shows a section as it is, or the rows of it to keep; how: what `pivot` takes."""
    return lambda: pivot(head, filter(keep, select(store.rows(card), section)), *how)


TEXTS = (environment, outputs, claim, protocol, gpu_time, stored_score, launch_forms, shares, t4_claim, t4,
         settings, host_time, compiled, training_claim, evidence, machine_code)  # fmt: skip
PICTURES = (plots.idea, plots.where_time_goes, plots.share_by_size, plots.t4, plots.training)
BLOCKS = {
    **{function.__name__: function for function in TEXTS},
    **{f"figure {function.__name__}": function for function in PICTURES},
    "t4_kernels": stored("one kernel on a simulated T4, us", T4, "t4_prediction",
                         keep=lambda row: row.unit == "us"),
    "published": stored("measured on a T4 by others", T4, "published", "case", "unit", span),
    "several_gpus": stored("two GPUs, ms per step: median (lowest to highest)", CARD, "several_gpus",
                           "case", "contender",
                           lambda row: f"{row.median:.0f} ({row.low:.0f} to {row.high:.0f})"),
}  # fmt: skip


# --- filling them in ---


def render(text: str, address) -> str:
    """Return `text` with every block filled in; address(name, picture) is where a picture is found.

    Raises KeyError for a block of unknown name or a missing row.
    """

    def fill(match):
        name = match["name"]
        body = BLOCKS[name]()
        if not isinstance(body, str):
            body = f"![{body.alt}]({address(name.removeprefix('figure '), body)})"
        return f"<!-- {name} -->\n{body}\n<!-- /{name} -->"

    return BLOCK.sub(fill, text)


def draw_page(path: Path, check: bool) -> bool:
    """Fill a markdown page, with pictures in docs/figures, or a notebook; return True if it was up to date.

    In a notebook pictures are data URIs, which Colab and GitHub show. Their bytes are not compared: the
    alternative text holds the numbers, and other versions of matplotlib draw other bytes.
    """

    def uri(_, picture):
        return "data:image/png;base64," + base64.b64encode(b"" if check else picture.png()).decode()

    def file(name, picture):
        place = FIGURES / f"{name}.png"
        if not check:
            place.write_bytes(picture.png())
        return os.path.relpath(place, path.parent) if place.exists() else "no picture"

    before = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        notebook = nbformat.reads(before, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = render(cell.source, uri)
        after = nbformat.writes(notebook) + "\n"
    else:
        after = render(before, file)
    if not check:
        path.write_text(after, encoding="utf-8")
    return PNG.sub("", before) == PNG.sub("", after)


def draw(check: bool = False) -> list[str]:
    """Fill every page and the notebook; return the names of those that were out of date."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), NOTEBOOK]
    return [path.name for path in pages if not draw_page(path, check)]


def file_result(path: Path) -> Path:
    """Store an nf4_<card>.json, which a run of the notebook leaves, under results/<card>/; return that."""
    sent = json.loads(path.read_text(encoding="utf-8"))
    rows = [store.Row(*texts, values) for *texts, values in sent["rows"]]
    facts = sent["environment"] | {"kernel": sent["kernel"] or {"device": None, "host": None}}
    for section in dict.fromkeys(row.section for row in rows):
        store.write(section, select(rows, section), environment=facts)
    return store.folder(store.slug(facts))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the tables and pictures of README, docs and notebook.")
    parser.add_argument("file", nargs="?", type=Path, help="store this nf4_<card>.json under results/ first")
    parser.add_argument("--check", action="store_true", help="only exit with 1 if a page is out of date")
    options = parser.parse_args(argv)
    if options.file:
        print(f"stored in {file_result(options.file)}")
    old = draw(options.check)
    verb = "out of date" if options.check else "updated"
    print(f"{verb}: {', '.join(old)}" if old else "everything is up to date")
    return int(options.check and bool(old))
