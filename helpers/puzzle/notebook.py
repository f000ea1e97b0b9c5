"""Write the modules' sections into the notebook's cells; execute the notebook and print its score.

Every `# %%` section of a module that has an `id` is the notebook's cell of that id; `folded=true` makes it a
form under its title, and `call="..."` adds a last line. A section tagged `module-only` stays in its module.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat

from helpers import machine

NOTEBOOK = machine.ROOT / "Unsloth_Puzzles_A.ipynb"
MODULES = {
    "kernel": "helpers/src/nf4_triton/kernel.py",
    "settings": "helpers/src/nf4_triton/settings.py",
    "private": "helpers/src/nf4_triton/private.py",
    "state": "helpers/src/nf4_triton/state.py",
    "replay": "helpers/src/nf4_triton/replay.py",
    "launch": "helpers/src/nf4_triton/launch.py",
    "reference": "helpers/src/nf4_triton/reference.py",
    "layers": "helpers/puzzle/layers.py",
    "protocol": "helpers/puzzle/protocol.py",
    "checks": "helpers/puzzle/checks.py",
    "marking": "helpers/puzzle/marking.py",
    "store": "helpers/results/store.py",
}


def cells_of_module(name: str, path: Path) -> list:
    """Return the cells that a module makes. A cell of the package names its file."""
    import jupytext

    cells = []
    for section in jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent").cells[1:]:
        facts, lines = section.metadata, [section.source]
        if "module-only" in facts.get("tags", ()):
            continue
        cell = nbformat.v4.new_code_cell(id=facts["id"], metadata={"tags": [name]})
        if MODULES[name].startswith("helpers/src/"):
            lines.insert(0, f"# {MODULES[name]}")
        if "call" in facts:
            lines.append(f"\n\n{facts['call']}")
        if facts.get("folded"):
            lines.insert(0, f'#@title {facts["title"]} {{ display-mode: "form" }}')
            cell.metadata.update(cellView="form", jupyter={"source_hidden": True})
        cell.source = "\n".join(lines)
        cells.append(cell)
    return cells


def sync(notebook, root: Path = machine.ROOT) -> list[str]:
    """Write the modules' sections into a notebook; return the ids of the cells that changed.

    Outputs stay. The cell of a new section becomes the last one: move it.
    """
    made = {}
    for name, file in MODULES.items():
        made |= {cell.id: cell for cell in cells_of_module(name, root / file)}
    changed, cells = [], []
    for old in notebook.cells:
        cell = made.pop(old.id, None)
        if cell:
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
        elif MODULES.keys().isdisjoint(old.metadata.get("tags", ())):
            cell = old
        if cell != old:
            changed.append(old.id)
        if cell:
            cells.append(cell)
    notebook.cells = [*cells, *made.values()]
    return [*changed, *made]


def without_folders(outputs: list, out: Path) -> list:
    """Return a cell's outputs with a name in place of each of this machine's folders."""
    names = {str(out): out.name, str(machine.ROOT): ".", sys.prefix: "python", str(Path.home()): "~"}
    text = json.dumps(outputs)
    for folder in sorted(names, key=len, reverse=True):
        if len(folder) > 4:  # not / and not /usr
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
        timeout=1800,  # seconds for a cell
        record_timing=False,
        coalesce_streams=True,  # keeps only the last state of a progress bar
        resources={"metadata": {"path": str(folder)}},
        on_cell_executed=lambda cell, **_: print(f"{time.monotonic() - start:6.1f} s  {cell.id}", flush=True),
    ).execute()


def score_text(notebook) -> str:
    """Return what the cell with the score printed; "" if it printed nothing."""
    outputs = [output for cell in notebook.cells if cell.id == "score" for output in cell.outputs]
    return "\n".join(output.get("text", "") for output in outputs).strip()


def executed(out: Path) -> tuple:
    """Execute a copy of the notebook and store it in `out`. Return (notebook, text of the failure or "")."""
    from nbclient.exceptions import CellExecutionError

    notebook, failure = nbformat.read(NOTEBOOK, as_version=4), ""
    if os.environ.get("NF4_FORCE"):  # torch must report no native bf16, as on a T4
        source = "from helpers import machine\n\nmachine.prepare()"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(source, id="forced-card"))
    try:
        execute(notebook, NOTEBOOK.parent)
    except CellExecutionError as error:
        failure = "A cell failed:\n\n" + re.sub(r"\x1b\[[0-9;]*m", "", str(error))[-4000:]
    if not failure and not score_text(notebook):
        failure = "The notebook printed no score."
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = without_folders(cell.outputs, out)
    nbformat.write(notebook, out / f"{NOTEBOOK.stem}.executed.ipynb")
    return notebook, failure


def result_files(out: Path) -> dict[Path, int]:
    """Return each result file in a folder and when it was written."""
    return {path: path.stat().st_mtime_ns for path in out.glob("nf4_*.json")}


def run(argv: list[str] | None = None) -> int:
    """`python -m helpers run`: execute the notebook with this Python and print its score."""
    parser = argparse.ArgumentParser(description="Execute the notebook with this Python and print its score.")
    parser.add_argument("--quick", action="store_true", help="200 timed rounds per MLP instead of 1000")
    help = "write outputs into the notebook (not with NF4_FORCE) and a GPU's results into results/"
    parser.add_argument("--in-place", action="store_true", help=help)
    parser.add_argument("--out", type=Path, default=machine.ROOT / "build", help="folder for what it writes")
    options = parser.parse_args(argv)
    if options.in_place and not machine.has_gpu():
        parser.error("--in-place stores what a GPU measured, and this machine has none: leave it out")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    earlier = result_files(out)
    os.environ["NF4_BUILD"] = str(out)  # the notebook writes its result file there
    if options.quick:
        os.environ["NF4_QUICK"] = "1"
    print(f"executing {NOTEBOOK.name} on {machine.gpu_name() or 'the CPU (Triton’s interpreter)'}")
    notebook, failure = executed(out)
    print(f"the executed notebook is in {out}")
    if failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    if options.in_place and not os.environ.get("NF4_FORCE"):
        for cell in notebook.cells:
            if cell.id == "install":
                cell.outputs = []  # pip's messages are about that machine, and no result
        nbformat.write(notebook, NOTEBOOK)
    if options.in_place:
        draw = [sys.executable, "-m", "helpers", "draw"]
        new = [str(path) for path, time in result_files(out).items() if earlier.get(path) != time]
        if new:
            draw += ["--replace", *new]
        subprocess.call(draw, cwd=machine.ROOT)
    print(f"\n{score_text(notebook)}")
    return 0


def write(argv: list[str] | None = None) -> int:
    """`python -m helpers sync`: write the modules' sections into the notebook's cells."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    print("changed:", ", ".join(sync(notebook)) or "nothing")
    nbformat.write(notebook, NOTEBOOK)
    return 0
