"""Write the modules' sections into the notebook's cells, execute the notebook, print the score.

Every `# %%` section of a module that has an `id` is the notebook's cell of that id. `folded=true` makes it a
form under its title; sections tagged `module-only` (imports of names that the notebook already has) and the
docstring stay in the module. A cell keeps its place in the notebook; a new one follows the section before it.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from helpers import machine
from helpers.results import store

NOTEBOOK, BUILD = machine.ROOT / "Unsloth_Puzzles_A.ipynb", machine.ROOT / "build"
HELPERS = machine.ROOT / "helpers"
MODULES = {  # tag of the cells: file
    **{name: HELPERS / "nf4" / f"{name}.py" for name in ("environment", "kernel", "launch", "reference")},
    **{name: HELPERS / "puzzle" / f"{name}.py" for name in ("protocol", "checks", "marking")},
}
ONE_CELL = {  # modules whose sections share one folded cell, and its title
    "environment": "Describe this machine",
    "reference": "Exact dequantization in plain PyTorch, to compare with",
}
FORMAT = {"extension": ".py", "format_name": "percent", "comment_magics": False}
SECONDS = 1800  # time limit of a cell


class SyncError(Exception):
    """The notebook cannot take a module's sections; the text says why and what to do."""


def cells_of_module(name: str, path: Path) -> list:
    """Return the cells that a module's sections make. Raises SyncError if a section has no id."""
    import jupytext

    sections = []
    for section in jupytext.reads(path.read_text(encoding="utf-8"), fmt=FORMAT).cells[1:]:
        if "id" in section.metadata:
            sections.append(section)
        elif "module-only" not in section.metadata.get("tags", ()):
            line = section.source.split("\n")[0]
            raise SyncError(f'{path.name}: the section "{line}" has no id="..." and no tag module-only')
    if name in ONE_CELL:
        metadata = {"id": name, "folded": True, "title": ONE_CELL[name]}
        text = "\n\n\n".join(section.source for section in sections)
        sections = [nbformat.v4.new_code_cell(text, metadata=metadata)]
    cells = []
    for section in sections:
        make = nbformat.v4.new_code_cell if section.cell_type == "code" else nbformat.v4.new_markdown_cell
        cell = make(section.source, id=section.metadata["id"], metadata={"tags": [name]})
        if section.metadata.get("folded"):
            title = section.metadata.get("title", cell.id)
            cell.source = f'#@title {title} {{ display-mode: "form" }}\n{cell.source}'
            cell.metadata.update(cellView="form", jupyter={"source_hidden": True})
        cells.append(cell)
    return cells


def stamp(notebook) -> dict:
    """Return the hashes of the kernel, and of its cells: a run tells with them which kernel it measured."""
    sources = [
        cell.source for cell in notebook.cells if {"kernel", "launch"} & {*cell.metadata.get("tags", ())}
    ]
    cells = [hashlib.sha256(text.strip().encode()).hexdigest()[:8] for text in sources]
    return {"kernel": store.hashes(), "cells": cells}


def sync(notebook, modules: dict[str, Path] = MODULES) -> list[str]:
    """Write the modules' sections into a notebook; return the ids of the cells that changed.

    Outputs stay. Raises SyncError if the first section of a module has no cell yet, or two are out of order.
    """
    changed = []
    for name, path in modules.items():
        new, last = cells_of_module(name, path), -1
        if name == "marking":
            new[0].source = new[0].source.replace("STAMP = {}", f"STAMP = {stamp(notebook)}")
        ids = {cell.id for cell in new}
        for cell in [one for one in notebook.cells if name in one.metadata.get("tags", ())]:
            if cell.id not in ids:
                notebook.cells.remove(cell)
                changed.append(cell.id)
        for cell in new:
            at = next((i for i, old in enumerate(notebook.cells) if old.id == cell.id), None)
            if at is None and last < 0:
                raise SyncError(
                    f"{NOTEBOOK.name} has no cell {cell.id}: add an empty one where {name} starts"
                )
            if at is None:
                at = last + 1
                notebook.cells.insert(at, cell)
                changed.append(cell.id)
            elif at < last:
                raise SyncError(
                    f"{path.name} has {cell.id} after a section that follows it in {NOTEBOOK.name}"
                )
            else:
                old = notebook.cells[at]
                if old.cell_type == cell.cell_type == "code":
                    cell.outputs, cell.execution_count = old.outputs, old.execution_count
                changed += [cell.id] * (cell != old)
                notebook.cells[at] = cell
            last = at
    return changed


def scrub(value, places: dict[str, str]):
    """Replace this machine's folders in every text of an output."""
    if isinstance(value, str):
        for place, name in places.items():
            value = value.replace(place, name)
    elif isinstance(value, list):
        return [scrub(item, places) for item in value]
    elif isinstance(value, dict):
        return {key: item if key.startswith("image/") else scrub(item, places) for key, item in value.items()}
    return value


def folders(out: Path) -> dict[str, str]:
    """Return this machine's folders, longest first, and the name that each gets in a stored notebook."""
    named = {str(out): out.name, str(machine.ROOT): ".", sys.prefix: "python", str(Path.home()): "~"}
    named = {place: name for place, name in named.items() if len(place) > 4}  # no / and no /usr
    named[tempfile.gettempdir()] = "tmp"
    return dict(sorted(named.items(), key=lambda item: -len(item[0])))


def execute(notebook, folder: Path) -> None:
    """Run every cell with this Python in `folder`; outputs go into `notebook`, one line per cell is printed.

    Raises nbclient's CellExecutionError if a cell raised; the outputs until then are kept.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    started = {}

    def done(cell, cell_index, execute_reply):
        print(f"{time.monotonic() - started[cell.id]:6.1f} s  {cell.id}", flush=True)

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    this_python = KernelSpecManager(kernel_dirs=[])  # ignores kernels registered on the machine
    NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=this_python),
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        timeout=SECONDS,
        record_timing=False,
        coalesce_streams=True,  # keeps only the last state of a progress bar
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=lambda cell, cell_index: started.setdefault(cell.id, time.monotonic()),
        on_cell_executed=done,
    ).execute()


def score_text(notebook) -> str:
    """Return what the cell with the score printed; "" if it printed nothing."""
    outputs = [output for cell in notebook.cells if cell.id == "score" for output in cell.outputs]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts).strip()


def print_score() -> int:
    """Mark the kernel of this checkout, without the notebook. Returns 1 if a check fails or costs points."""
    from helpers.nf4.launch import your_dequantize_nf4
    from helpers.puzzle import checks, marking, protocol

    comparison = protocol.compare(protocol.launch_forms(your_dequantize_nf4))
    print(comparison, end="\n\n")
    evidence = checks.examine(your_dequantize_nf4)
    score = marking.mark(comparison, evidence)
    print("", score, "", marking.forms_table(comparison), sep="\n")
    points = [value or 0 for line in score.lines for value in line.points.values()]
    return int(any(one.passed is False for one in evidence.values()) or min(points) < 0)


def run(argv: list[str] | None = None) -> int:
    """`python -m helpers run`: execute the notebook with this Python and print its score."""
    parser = argparse.ArgumentParser(description=run.__doc__.split(": ")[1])
    parser.add_argument("--quick", action="store_true", help="200 timed rounds per MLP instead of 1000")
    parser.add_argument("--in-place", action="store_true",
                        help="write outputs into the repository's notebook and a GPU's results into results/ "
                        "(with NF4_FORCE=t4 only the results)")  # fmt: skip
    parser.add_argument("--score", action="store_true", help="only mark the kernel of this checkout")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for what it writes")
    parser.add_argument("--notebook", type=Path, default=NOTEBOOK, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        os.environ["NF4_QUICK"] = "1"
    if options.score:
        return print_score()

    from nbclient.exceptions import CellExecutionError

    out, forced = options.out.resolve(), machine.forced()
    out.mkdir(parents=True, exist_ok=True)
    copy = out / f"{NOTEBOOK.stem}.executed.ipynb"
    for old in (copy, *out.glob("nf4_*.json")):
        old.unlink(missing_ok=True)
    os.environ["NF4_BUILD"] = str(out)  # the notebook writes its result file there
    notebook = nbformat.read(options.notebook, as_version=4)
    if forced:  # torch must report no native bf16, as on a T4
        source = "from helpers import machine\n\nmachine.prepare()"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(source, id="forced-card"))
    print(f"executing {options.notebook.name} on {machine.gpu_name() or 'the CPU (Triton’s interpreter)'}")
    failure, start, completed = "The notebook printed no score.", time.monotonic(), False
    try:
        execute(notebook, options.notebook.resolve().parent)
        completed = True
    except CellExecutionError as error:
        failure = "A cell failed:\n\n" + re.sub(r"\x1b\[[0-9;]*m", "", str(error))[-4000:]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = nbformat.from_dict(scrub(cell.outputs, folders(out)))
    nbformat.write(notebook, copy)
    print(f"\n{time.monotonic() - start:.0f} s\nexecuted notebook: {copy}")
    score = score_text(notebook)
    if not completed or not score:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    if options.in_place:
        if not forced:
            nbformat.write(notebook, options.notebook)
            print(f"outputs written into {options.notebook.name}")
        measured = [str(path) for path in out.glob("nf4_*.json")] * (machine.has_gpu() and not options.quick)
        subprocess.call([sys.executable, "-m", "helpers", "draw", *measured], cwd=machine.ROOT)
    print(f"\n{score}")
    return 0


def write(argv: list[str] | None = None) -> int:
    """`python -m helpers sync`: write the modules' sections into the notebook's cells."""
    parser = argparse.ArgumentParser(description=write.__doc__.split(": ")[1])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a cell differs")
    check = parser.parse_args(argv).check
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    try:
        changed = sync(notebook)
    except SyncError as error:
        print(error, file=sys.stderr)
        return 1
    if changed:
        print(f"{NOTEBOOK.name}: {'differs in' if check else 'wrote'} {', '.join(changed)}")
        if not check:
            nbformat.write(notebook, NOTEBOOK)
    return int(check and bool(changed))
