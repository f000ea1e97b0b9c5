"""Write the modules' sections into the notebook's cells, execute the notebook, print the score.

Every `# %%` section of a module that has an `id` is the notebook's cell of that id. `folded=true` makes it a
form under its title; sections tagged `module-only` (imports of names that the notebook already has) and the
docstring stay in the module. A cell keeps its place in the notebook; a new one follows the section before it.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
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


def cells_of_module(name: str, path: Path) -> list:
    """Return the cells that a module's sections make. Exits with a message if a section has no id."""
    import jupytext

    sections = []
    for section in jupytext.reads(path.read_text(encoding="utf-8"), fmt=FORMAT).cells[1:]:
        if "id" in section.metadata:
            sections.append(section)
        elif "module-only" not in section.metadata.get("tags", ()):
            line = section.source.split("\n")[0]
            sys.exit(f'{path.name}: the section "{line}" has no id="..." and no tag module-only')
    if name in ONE_CELL:
        text = "\n\n\n".join(section.source for section in sections)
        metadata = {"id": name, "folded": True, "title": ONE_CELL[name]}
        sections = [nbformat.v4.new_code_cell(text, metadata=metadata)]
    cells = []
    for section in sections:
        cell = nbformat.v4.new_code_cell(section.source, id=section.metadata["id"], metadata={"tags": [name]})
        if section.metadata.get("folded"):
            cell.source = f'#@title {section.metadata["title"]} {{ display-mode: "form" }}\n{cell.source}'
            cell.metadata.update(cellView="form", jupyter={"source_hidden": True})
        cells.append(cell)
    return cells


def stamp(notebook) -> dict:
    """Return the hashes of the kernel, and of its cells: a run tells with them which kernel it measured."""
    ours = [cell for cell in notebook.cells if {"kernel", "launch"} & {*cell.metadata.get("tags", ())}]
    cells = [hashlib.sha256(cell.source.strip().encode()).hexdigest()[:8] for cell in ours]
    return {"kernel": store.hashes(), "cells": cells}


def sync(notebook, modules: dict[str, Path] = MODULES) -> list[str]:
    """Write the modules' sections into a notebook; return the ids of the cells that changed.

    Outputs stay. Exits with a message if the first section of a module has no cell yet, or if two are out
    of order.
    """
    changed, cells = [], notebook.cells
    for name, path in modules.items():
        new = cells_of_module(name, path)
        if name == "marking":
            new[0].source = re.sub(
                "STAMP = {.*}", f"STAMP = {textwrap.fill(str(stamp(notebook)), 100)}", new[0].source
            )
        ids = [cell.id for cell in new]
        gone = [cell for cell in cells if name in cell.metadata.get("tags", ()) and cell.id not in ids]
        for cell in gone:
            cells.remove(cell)
            changed.append(cell.id)
        last = None  # where the section before stands
        for cell in new:
            at = next((i for i, old in enumerate(cells) if old.id == cell.id), None)
            if at is None:
                if last is None:
                    sys.exit(f"{NOTEBOOK.name} has no cell {cell.id}: add an empty one where {name} starts")
                at = last + 1
                cells.insert(at, nbformat.v4.new_code_cell(id=cell.id))
            if last is not None and at < last:
                sys.exit(f"{path.name} has {cell.id} after a section that follows it in {NOTEBOOK.name}")
            cell.outputs, cell.execution_count = cells[at].outputs, cells[at].execution_count
            changed += [cell.id] * (cell != cells[at])
            cells[at], last = cell, at
    return changed


def without_folders(outputs: list, out: Path) -> list:
    """Return a cell's outputs with a name in place of each of this machine's folders."""
    names = {str(out): out.name, str(machine.ROOT): ".", sys.prefix: "python", str(Path.home()): "~"}
    names = {folder: name for folder, name in names.items() if len(folder) > 4}  # no / and no /usr
    names[tempfile.gettempdir()] = "tmp"
    text = json.dumps(outputs)
    for folder in sorted(names, key=len, reverse=True):
        text = text.replace(folder, names[folder])
    return nbformat.from_dict(json.loads(text))


def execute(notebook, folder: Path) -> None:
    """Run every cell with this Python in `folder`; outputs go into `notebook`. Print when each cell ended.

    Raises nbclient's CellExecutionError if a cell raised; the outputs until then are kept.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    start = time.monotonic()
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
        on_cell_executed=lambda cell, **_: print(f"{time.monotonic() - start:6.1f} s  {cell.id}", flush=True),
    ).execute()


def score_text(notebook) -> str:
    """Return what the cell with the score printed; "" if it printed nothing."""
    outputs = [output for cell in notebook.cells if cell.id == "score" for output in cell.outputs]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts).strip()


def run(argv: list[str] | None = None) -> int:
    """`python -m helpers run`: execute the notebook with this Python and print its score."""
    parser = argparse.ArgumentParser(description=run.__doc__.split(": ")[1])
    parser.add_argument("--quick", action="store_true", help="200 timed rounds per MLP instead of 1000")
    parser.add_argument("--in-place", action="store_true",
                        help="write outputs into the repository's notebook and a GPU's results into results/ "
                        "(with NF4_FORCE=t4 only the results)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for what it writes")
    options = parser.parse_args(argv)

    from nbclient.exceptions import CellExecutionError

    out, forced = options.out.resolve(), machine.forced()
    out.mkdir(parents=True, exist_ok=True)
    copy = out / f"{NOTEBOOK.stem}.executed.ipynb"
    for old in (copy, *out.glob("nf4_*.json")):
        old.unlink(missing_ok=True)
    os.environ |= {"NF4_QUICK": "1"} if options.quick else {}
    os.environ["NF4_BUILD"] = str(out)  # the notebook writes its result file there
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if forced:  # torch must report no native bf16, as on a T4
        source = "from helpers import machine\n\nmachine.prepare()"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(source, id="forced-card"))
    print(f"executing {NOTEBOOK.name} on {machine.gpu_name() or 'the CPU (Triton’s interpreter)'}")
    failure, start = "", time.monotonic()
    try:
        execute(notebook, NOTEBOOK.parent)
    except CellExecutionError as error:
        failure = "A cell failed:\n\n" + re.sub(r"\x1b\[[0-9;]*m", "", str(error))[-4000:]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = without_folders(cell.outputs, out)
    nbformat.write(notebook, copy)
    print(f"\n{time.monotonic() - start:.0f} s\nexecuted notebook: {copy}")
    score = score_text(notebook)
    if failure or not score:
        print(f"\n{failure or 'The notebook printed no score.'}", file=sys.stderr)
        return 1
    if options.in_place:
        if not forced:
            nbformat.write(notebook, NOTEBOOK)
            print(f"outputs written into {NOTEBOOK.name}")
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
    changed = sync(notebook)
    if changed:
        print(f"{NOTEBOOK.name}: {'differs in' if check else 'wrote'} {', '.join(changed)}")
        if not check:
            nbformat.write(notebook, NOTEBOOK)
    return int(check and bool(changed))
