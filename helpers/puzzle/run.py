"""`python -m helpers run`: execute the notebook with this very Python and keep what it showed."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from helpers import machine
from helpers.results import hashes, store as results

NAME = "Unsloth_Puzzles_A"
SOURCE, BUILD = machine.ROOT / f"{NAME}.ipynb", machine.ROOT / "build"
SCORE = "score"  # id of the cell that prints it
# Cells that an estimate of another machine's time tells apart.
FLAGS = {"install": {"setup": True}, "protocol": {"protocol": True}, "t4-ptx": {"not_on_a_t4": True}}
SECONDS = 1800  # that a cell may take
STORES = """outputs also into the repository's notebook, measurements into results/; with NF4_FORCE into
    results/<gpu>-forced-<card>/ alone"""


def scrub(value, places: dict[str, str]):
    """Replace this machine's folders in every text of an output, so that a stored notebook names none."""
    if isinstance(value, str):
        for place, name in places.items():
            value = value.replace(place, name)
    elif isinstance(value, list):
        return [scrub(item, places) for item in value]
    elif isinstance(value, dict):
        return {key: item if key.startswith("image/") else scrub(item, places) for key, item in value.items()}
    return value


def folders(out: Path) -> dict[str, str]:
    """This machine's folders, longest first, and the name each gets in a stored notebook."""
    named = {str(out): out.name, str(machine.ROOT): ".", sys.prefix: "python", str(Path.home()): "~"}
    named = {place: name for place, name in named.items() if len(place) > 4}  # no / and no /usr
    named[tempfile.gettempdir()] = "tmp"
    return dict(sorted(named.items(), key=lambda item: -len(item[0])))


def execute(notebook, folder: Path) -> dict[str, float]:
    """Run every cell in `folder`, outputs into `notebook`, a line of progress a cell.

    Returns the seconds of each code cell by id. Raises nbclient's CellExecutionError when a cell raised; the
    outputs until then are kept.
    """
    seconds = {}

    def start(cell, cell_index):
        seconds[cell.id] = -time.monotonic()

    def done(cell, cell_index, execute_reply):
        seconds[cell.id] = round(seconds[cell.id] + time.monotonic(), 3)
        print(f"{seconds[cell.id]:6.1f} s  {cell.id}", flush=True)

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    this_python = KernelSpecManager(kernel_dirs=[])  # no kernel that is registered on the machine
    NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=this_python),
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        timeout=SECONDS,
        record_timing=False,
        coalesce_streams=True,  # of a progress bar only its last state
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=start,
        on_cell_executed=done,
    ).execute()
    return seconds


def score_text(notebook) -> str:
    """What the cell of the score printed; "" where it printed nothing."""
    outputs = [output for cell in notebook.cells if cell.get("id") == SCORE for output in cell.outputs]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts).strip()


def keep(out: Path, seconds: dict[str, float]) -> None:
    """Store each cell's seconds, and the score and protocol that the run wrote (nf4_<card>.json)."""
    from helpers.puzzle import marking  # which imports torch

    cells = [{"title": name, "seconds": each, **FLAGS.get(name, {})} for name, each in seconds.items()]
    results.write("notebook", {"cells": cells})
    for path in out.glob("nf4_*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))["data"]
        results.write("score", data["score"], schema=marking.Score)
        results.write("protocol", data["protocol"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(": ")[1])
    parser.add_argument("--notebook", type=Path, default=SOURCE, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for what it writes")
    parser.add_argument("--quick", action="store_true", help="fewer timed rounds (NF4_QUICK=1)")
    parser.add_argument("--in-place", action="store_true", help=STORES)
    options = parser.parse_args(argv)

    out, forced = options.out.resolve(), machine.forced()
    out.mkdir(parents=True, exist_ok=True)
    copy = out / f"{NAME}.executed.ipynb"
    for old in (copy, *out.glob("nf4_*.json")):
        old.unlink(missing_ok=True)
    if options.quick:
        os.environ["NF4_QUICK"] = "1"
    os.environ["NF4_BUILD"] = str(out)  # the notebook's kernel inherits it: where its result file goes

    notebook = nbformat.read(options.notebook, as_version=4)
    if forced:
        source = "from helpers import machine\n\nenvironment.prepare()  # of bf16, too"
        notebook.cells.insert(0, nbformat.v4.new_code_cell(source, id="forced-card"))
    where = machine.gpu_name() or "the CPU, in Triton’s interpreter"
    print(f"executing {options.notebook.name} on {where}")
    failure, start, seconds = "The notebook printed no score.", time.monotonic(), {}
    try:
        seconds = execute(notebook, options.notebook.resolve().parent)
    except CellExecutionError as error:
        failure = "A cell failed:\n\n" + re.sub(r"\x1b\[[0-9;]*m", "", str(error))[-4000:]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = nbformat.from_dict(scrub(cell.outputs, folders(out)))
    nbformat.write(notebook, copy)  # first of all what cannot be had again
    print(f"\n{time.monotonic() - start:.0f} s\nexecuted notebook: {copy}")
    score = score_text(notebook)
    if not seconds or not score:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    if options.in_place:
        if machine.has_gpu() and not os.environ.get("NF4_QUICK"):
            keep(out, seconds)
        if not forced:
            facts = {"kernel": hashes.label(), "environment": machine.describe()}
            notebook.metadata.setdefault("nf4", {}).update(facts)  # of which kernel its outputs are
            nbformat.write(notebook, options.notebook)
            print(f"outputs written into {options.notebook.name}")
            subprocess.call([sys.executable, "-m", "helpers", "draw"], cwd=machine.ROOT)
    print(f"\n{score}")
    return 0
