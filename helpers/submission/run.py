"""`python -m helpers run`: execute the notebook with this very Python and keep what it showed."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from unittest import mock

from helpers.machine import environment
from helpers.record import hashes, results

NAME = "Unsloth_Puzzles_A"
SOURCE = environment.ROOT / f"{NAME}.ipynb"
# Ids of cells: what they cost elsewhere is told apart, and the last one prints the score.
INSTALL, PROTOCOL, FOREIGN, SCORE = "install", "protocol", "t4-ptx", "score"


def scrub(value, places: dict[str, str]):
    """Replace this machine's folders in every text of an output, so that a stored notebook names none."""
    if isinstance(value, str):
        for place, name in places.items():
            value = value.replace(place, name)
        return value
    if isinstance(value, list):
        return [scrub(item, places) for item in value]
    if isinstance(value, dict):
        return {key: item if key.startswith("image/") else scrub(item, places) for key, item in value.items()}
    return value


def folders(*more: Path) -> dict[str, str]:
    """This machine's folders, longest first, and the name each gets in a stored notebook."""
    named = {
        **{str(folder): folder.name for folder in more},
        str(environment.ROOT): ".",
        tempfile.gettempdir(): "tmp",
        sysconfig.get_path("purelib"): "site-packages",
        sysconfig.get_path("stdlib"): "python",
        sys.prefix: "python",
        str(Path.home()): "~",
    }
    named = {place: name for place, name in named.items() if len(place) > 4 or name == "tmp"}
    return dict(sorted(named.items(), key=lambda item: -len(item[0])))


def kernel_manager():
    """A Jupyter kernel that is this very Python, whatever kernels are registered on the machine."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name):
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            command.append("--IPKernelApp.log_level=ERROR")
            return KernelSpec(argv=command, display_name="Python 3", language="python")

    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())


def execute(notebook, folder: Path, timeout: int = 1800) -> dict[str, float]:
    """Run every cell in `folder`, outputs into `notebook`, a line of progress a cell.

    Returns the seconds of each code cell by id. Raises nbclient's CellExecutionError when a cell raised; the
    outputs until then are kept.
    """
    from nbclient import NotebookClient

    started, seconds = {}, {}

    def start(cell, cell_index):
        started[cell_index] = time.monotonic()

    def done(cell, cell_index, execute_reply):
        seconds[cell.id] = time.monotonic() - started[cell_index]
        print(f"{seconds[cell.id]:6.1f} s  {cell.id}", flush=True)

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        km=kernel_manager(),
        timeout=timeout,
        record_timing=False,
        coalesce_streams=True,  # of a progress bar only its last state
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=start,
        on_cell_executed=done,
    ).execute()
    return {cell.id: seconds[cell.id] for cell in code}


def alone(notebook, timeout: int = 1800) -> dict[str, float]:
    """`execute` in an empty folder: no repository, no `helpers`, nothing prepared in the environment."""
    import nbformat

    prepared = ("TRITON_INTERPRET", "CUBLAS_WORKSPACE_CONFIG")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [path for path in paths if path and not (Path(path) / "helpers").exists()]
    with tempfile.TemporaryDirectory(prefix="alone-") as folder, mock.patch.dict(os.environ):
        for name in prepared:
            os.environ.pop(name, None)
        os.environ["PYTHONPATH"] = os.pathsep.join(packages)
        nbformat.write(notebook, Path(folder) / SOURCE.name)
        return execute(notebook, Path(folder), timeout)


def score_text(notebook) -> str:
    """What the cell of the score printed; "" where it printed nothing."""
    outputs = [
        output for cell in notebook.cells if cell.get("id") == SCORE for output in cell.get("outputs", ())
    ]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts).strip()


def stamp(notebook) -> None:
    """Write into the notebook's metadata of which kernel, and of which machine, its outputs are."""
    facts = {"kernel": hashes.label(), "environment": environment.describe()}
    notebook.metadata.setdefault("nf4", {}).update(facts)


def store_forced(notebook, folder: Path) -> Path:
    """Store a run with a card's decisions forced, labelled and without its pictures; returns its path."""
    import nbformat

    stamp(notebook)
    facts, forced = notebook.metadata["nf4"]["environment"], environment.forced()
    text = (
        f"> **{facts['gpu']}, {environment.forced_text(forced)}** (`NF4_FORCE={forced}`), "
        f"{facts['date'][:10]}, kernel `{hashes.label()}`. Not a run on a T4: it shows that a T4's decisions "
        "give the right bits; each time below is this card's."
    )
    for cell in notebook.cells:
        cell.pop("attachments", None)
        for output in cell.get("outputs", ()):
            for kind in [kind for kind in output.get("data", {}) if kind.startswith("image/")]:
                del output.data[kind]
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(text, id="forced"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.executed.ipynb"
    nbformat.write(notebook, path)
    return path


def write_html(notebook, path: Path) -> None:
    """The notebook as one HTML page; without nbconvert a line says so."""
    if importlib.util.find_spec("nbconvert") is None:
        print("no HTML page: nbconvert is not installed (pip install nbconvert)", file=sys.stderr)
        return
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter(template_name="lab", embed_images=True).from_notebook_node(notebook)
    path.write_text(body, encoding="utf-8")
    print(f"as a page          {path}")


def keep(out: Path) -> None:
    """Store what the run itself wrote (nf4_<card>.json) as this card's score and protocol."""
    for path in out.glob("nf4_*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))["data"]
        results.write("score", data["score"])
        results.write("protocol", data["protocol"], schema=results.Protocol)


def times(seconds: dict[str, float]) -> dict:
    """The content of notebook.json: what each cell took, and which of them cost something else on a T4."""
    flags = {INSTALL: "setup", PROTOCOL: "protocol", FOREIGN: "not_on_a_t4"}
    rows = [{"title": name, "seconds": round(value, 3)} for name, value in seconds.items()]
    return {"cells": [row | ({flags[row["title"]]: True} if row["title"] in flags else {}) for row in rows]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers run", description=__doc__.split(": ")[1])
    parser.add_argument("--notebook", type=Path, default=SOURCE, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=environment.ROOT / "build", help="folder for what it writes"
    )
    parser.add_argument("--quick", action="store_true", help="fewer timed rounds (NF4_QUICK=1)")
    parser.add_argument("--alone", action="store_true", help="the notebook alone, in an empty folder")
    in_place = "outputs also into the repository's notebook, measurements into results/; with NF4_FORCE into "
    parser.add_argument(
        "--in-place", action="store_true", help=in_place + "results/<gpu>-forced-<card>/ alone"
    )
    parser.add_argument("--timeout", type=int, default=1800, help="seconds a cell may take (default 1800)")
    redraw = (
        "run nothing: only draw the texts and pictures that show result files again (python -m helpers draw)"
    )
    parser.add_argument("--redraw", action="store_true", help=redraw)
    options = parser.parse_args(argv)
    draw = [sys.executable, "-m", "helpers", "draw"]
    if options.redraw:
        return subprocess.call(draw, cwd=environment.ROOT)

    import nbformat
    from nbclient.exceptions import CellExecutionError

    out, gpu, forced = options.out.resolve(), environment.has_gpu(), environment.forced()
    stored = options.in_place and gpu and not options.alone
    out.mkdir(parents=True, exist_ok=True)
    copy, page = out / f"{NAME}.executed.ipynb", out / f"{NAME}.html"
    for old in (copy, page, *out.glob("nf4_*.json")):
        old.unlink(missing_ok=True)
    if options.quick:
        os.environ["NF4_QUICK"] = "1"
    os.environ["NF4_BUILD"] = str(out)  # the notebook's kernel inherits it: where its result file goes

    notebook = nbformat.read(options.notebook, as_version=4)
    if forced and not options.alone:
        source = (
            "from helpers.machine import environment\n\nenvironment.prepare()  # no native bf16, as on a T4"
        )
        notebook.cells.insert(0, nbformat.v4.new_code_cell(source, id="forced-card"))
    print(
        f"executing {options.notebook.name} on {environment.gpu_name() or 'the CPU, in Triton’s interpreter'}"
    )
    failure, start, seconds = "", time.monotonic(), {}
    try:
        run = alone if options.alone else execute
        folder = () if options.alone else (options.notebook.resolve().parent,)
        seconds = run(notebook, *folder, timeout=options.timeout)
    except CellExecutionError as error:
        failure = re.sub(r"\x1b\[[0-9;]*m", "", str(error))[-4000:]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = nbformat.from_dict(scrub(cell.outputs, folders(out)))
    nbformat.write(notebook, copy)  # first of all what cannot be had again
    print(f"\n{time.monotonic() - start:.0f} s\nexecuted notebook  {copy}")
    write_html(notebook, page)
    score = score_text(notebook)
    if failure or not score:
        print(
            f"\nA cell failed:\n\n{failure}" if failure else "\nThe notebook printed no score.",
            file=sys.stderr,
        )
        return 1
    if stored and not os.environ.get("NF4_QUICK"):
        results.write("notebook", times(seconds))
        keep(out)
    if stored and forced:
        print(f"stored as {store_forced(notebook, environment.result_folder())}")
    elif options.in_place and not options.alone and not forced:
        stamp(notebook)
        nbformat.write(notebook, options.notebook)
        print(f"outputs written into {options.notebook.name}")
        subprocess.call(draw, cwd=environment.ROOT)
    print(f"\n{score}")
    return 0
