"""`python -m helpers run`: execute the notebook with this very Python and keep what it showed."""

import argparse
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime, timezone
from pathlib import Path

from helpers.record import hashes
from helpers.machine import environment
from helpers.record import results

NAME = "Unsloth_Puzzles_A"
SOURCE = environment.ROOT / f"{NAME}.ipynb"
# Ids of cells: those that the stored times tell apart, and the one that shows these times.
PROTOCOL, SETUP, FOREIGN, SHOWS_TIMES = "protocol", "setup", "t4-ptx", "t4-estimate"
# Ids of cells that measure nothing and show stored result files.
FROM_FILES = ("ceiling", "steps", "t4-stored", "t4-forced", "t4-estimate", "targets", "gemm")
LARGEST_COPY = 1_500_000  # bytes of a stored copy of the executed notebook


def titles(notebook_cells) -> list[str]:
    """What each cell is called: its #@title, else how the text above it begins, else its first line."""
    names, above = [], ""
    for cell in notebook_cells:
        lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
        if cell.cell_type != "code":
            above = next((line for line in lines if line.startswith("#")), lines[0] if lines else "")
            names.append(above)
            continue
        named = [line for line in lines if line.lower().replace(" ", "").startswith("#@title")]
        text = next(iter([*named, *filter(None, [above]), *lines]), "(empty cell)")
        text = re.sub(r"^#+\s*(@title)?|\{.*\}$|[*`]", "", text, flags=re.IGNORECASE).strip()
        text = re.split(r"[.:] ", text)[0].rstrip(".:")
        names.append(text if len(text) <= 60 else f"{text[:57]}...")
        above = ""
    return names


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


def folders(out: Path) -> dict[str, str]:
    """This machine's folders, longest first, and the name each gets in a stored notebook."""
    named = {
        str(out): "build",
        str(environment.ROOT): ".",
        sysconfig.get_path("purelib"): "site-packages",
        sysconfig.get_path("stdlib"): "python",
        sys.prefix: "python",
        str(Path.home()): "~",
    }
    named = {place: name for place, name in named.items() if len(place) > 4}  # never "/" or "/usr"
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


def execute(
    notebook, folder: Path, timeout: int, keep_times: Callable[[list[dict]], object] | None = None
) -> None:
    """Run every cell in `folder`, outputs into `notebook`, one line of progress a cell.

    keep_times: given the rows of `_time` of the code cells once all have run; the cell that shows stored
    times then runs once more. Raises nbclient's CellExecutionError when a cell raised; the outputs until
    then are kept.
    """
    from nbclient import NotebookClient
    from tqdm import tqdm

    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    names, started, times = titles(notebook.cells), {}, {}
    # disable=None: no bar where the output is a file or a log, the lines alone are readable there
    with tqdm(total=total, unit="cell", file=sys.stdout, dynamic_ncols=True, disable=None) as bar:

        def start(cell, cell_index):
            if cell.cell_type == "code":
                started[cell_index] = time.monotonic()
                bar.set_description(names[cell_index])

        def done(cell, cell_index, execute_reply):
            if cell_index in times:  # the second run of one cell is not counted
                return
            times[cell_index] = seconds = time.monotonic() - started[cell_index]
            tqdm.write(f"[{len(started):2}/{total}] {seconds:6.1f} s  {names[cell_index]}", file=sys.stdout)
            sys.stdout.flush()
            bar.update()

        client = NotebookClient(
            notebook,
            km=kernel_manager(),
            timeout=timeout,
            record_timing=False,
            coalesce_streams=True,  # of a progress bar only its last state
            resources={"metadata": {"path": str(folder)}},
            on_cell_start=start,
            on_cell_executed=done,
        )
        if keep_times is None:
            client.execute()
            return
        client.reset_execution_trackers()
        with client.setup_kernel():
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
            keep_times([_time(notebook.cells[index], names[index], times[index]) for index in sorted(times)])
            for index, cell in enumerate(notebook.cells):
                if cell.get("id") == SHOWS_TIMES:
                    client.execute_cell(cell, index, execution_count=cell.execution_count)


def _time(cell, title: str, seconds: float) -> dict:
    """One row of notebook.json."""
    name = cell.get("id")
    return {
        "title": title,
        "seconds": round(seconds, 3),
        "protocol": name == PROTOCOL,
        "setup": name == SETUP,
        "not_on_a_t4": name == FOREIGN,
    }


def redraw(notebook, folder: Path, timeout: int = 120) -> None:
    """Run the cells of FROM_FILES alone and again, on any machine: for result files newer than the notebook's
    run. Their new outputs go into `notebook`, whose metadata says so; everything else stays as it is."""
    import nbformat
    from nbclient import NotebookClient

    start = (
        "from helpers.machine import environment\nenvironment.prepare()\nfrom helpers.show import notebook"
    )
    chosen = [cell for cell in notebook.cells if cell.get("id") in FROM_FILES]
    # Copies: the counts of the whole run stay in `notebook`.
    alone = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(start), *deepcopy(chosen)])
    options = dict(km=kernel_manager(), timeout=timeout, resources={"metadata": {"path": str(folder)}})
    NotebookClient(alone, record_timing=False, coalesce_streams=True, **options).execute()
    for cell, drawn in zip(chosen, alone.cells[1:], strict=True):
        cell.outputs = nbformat.from_dict(scrub(drawn.outputs, folders(folder)))
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
    today = datetime.now(timezone.utc).isoformat(timespec="seconds")
    notebook.metadata["nf4"]["drawn_from_files"] = {"cells": list(FROM_FILES), "date": today}


def stamp(notebook) -> None:
    """Write into the notebook's metadata of which kernel, and of which machine, its outputs are."""
    notebook.metadata["nf4"] = {"kernel_hash": hashes.kernel_hash(), "environment": environment.describe()}


def store_forced(notebook, score: Path) -> Path:
    """Store a run with a card's decisions forced apart from the notebook, labelled, with its score.

    notebook: executed; it gets a first cell that says what it is, and loses pictures where it would be larger
    than 1.5 MB. Returns the file's path, in this card's result folder for forced runs.
    """
    import nbformat

    stamp(notebook)
    facts = notebook.metadata["nf4"]["environment"]
    label = environment.forced_text(environment.forced())
    text = (
        f"> **{facts['gpu']}, {label}** (`NF4_FORCE={environment.forced()}`), {facts['date'][:10]}, kernel "
        f"`{hashes.kernel_hash()}`. Not a run on a T4: it shows that a T4's decisions give the right bits; "
        "each time below is this card's."
    )
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(text, id="forced"))
    while len(nbformat.writes(notebook).encode()) > LARGEST_COPY and drop_largest_picture(notebook):
        pass
    folder = environment.result_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.executed.ipynb"
    nbformat.write(notebook, path)
    if score.exists():
        shutil.copyfile(score, folder / score.name)
    return path


def drop_largest_picture(notebook) -> bool:
    """Leave the largest picture out of the outputs; its text stays. False when there is none."""
    found = [
        (len(output.data[kind]), output.data, kind)
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        for kind in output.get("data", ())
        if kind.startswith("image/")
    ]
    if not found:
        return False
    _, data, kind = max(found, key=lambda item: item[0])
    del data[kind]
    return True


def write_html(notebook, path: Path) -> bool:
    """The notebook as one HTML page; without nbconvert a line says so."""
    if importlib.util.find_spec("nbconvert") is None:
        print("no HTML page: nbconvert is not installed (pip install nbconvert)", file=sys.stderr)
        return False
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
    path.write_text(body, encoding="utf-8")
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers run", description=__doc__.split(": ")[1])
    parser.add_argument("--notebook", type=Path, default=SOURCE, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=environment.ROOT / "build", help="folder for what it writes"
    )
    parser.add_argument("--quick", action="store_true", help="fewer timed rounds (NF4_QUICK=1)")
    in_place = "outputs also into the repository's notebook, measurements into results/; with NF4_FORCE into "
    in_place += "results/<gpu>-forced-<card>/ alone"
    parser.add_argument("--in-place", action="store_true", help=in_place)
    parser.add_argument("--timeout", type=int, default=1800, help="seconds a cell may take (default 1800)")
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="only draw the cells that show stored result files again, in place",
    )
    options = parser.parse_args(argv)

    import nbformat
    from nbclient.exceptions import CellExecutionError

    if options.redraw:
        notebook = nbformat.read(options.notebook, as_version=4)
        redraw(notebook, options.notebook.resolve().parent)
        nbformat.write(notebook, options.notebook)
        print(f"drawn again in {options.notebook.name}: {', '.join(FROM_FILES)}")
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    page, copy, score = out / f"{NAME}.html", out / f"{NAME}.executed.ipynb", out / "score.txt"
    for old in (page, copy, score, out / "score.json"):
        old.unlink(missing_ok=True)
    # The kernel inherits these: where the score goes, which Python the set-up cell is to use.
    os.environ.update(NF4_BUILD=str(out), PYTHON=sys.executable)
    if not options.in_place:
        os.environ.setdefault("NF4_RESULTS", str(out / "results"))
    if options.quick:
        os.environ["NF4_QUICK"] = "1"

    notebook = nbformat.read(options.notebook, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    print(
        f"executing {options.notebook.name} on {environment.gpu_name() or 'the CPU, in Triton’s interpreter'}"
    )
    failure, start = None, time.monotonic()
    # Like a benchmark's: a CPU's times and those of a quick run are not stored.
    measured = environment.has_gpu() and not os.environ.get("NF4_QUICK")
    keep_times = (lambda found: results.write("notebook", {"cells": found})) if measured else None
    try:
        execute(notebook, options.notebook.resolve().parent, options.timeout, keep_times)
    except CellExecutionError as error:
        failure = str(error)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = nbformat.from_dict(scrub(cell.outputs, folders(out)))
    # First of all what cannot be had again: a missing converter must not cost the run.
    nbformat.write(notebook, copy)
    paged = write_html(notebook, page)
    if options.in_place and not failure:
        if not environment.forced():
            stamp(notebook)
            nbformat.write(notebook, options.notebook)
            print(f"outputs written into {options.notebook.name}")
            if measured and score.with_suffix(".json").exists():
                shutil.copyfile(score.with_suffix(".json"), environment.result_folder() / "score.json")
        elif environment.has_gpu():
            print(f"stored as {store_forced(notebook, score.with_suffix('.json'))}")
        else:
            print("nothing stored: a run with forced decisions shows something on a GPU only")
    print(f"\n{time.monotonic() - start:.0f} s\n")
    if failure:
        text = re.sub(r"\x1b\[[0-9;]*m", "", failure)[-4000:]
        print(f"A cell failed; what ran until then is in {copy}\n\n{text}", file=sys.stderr)
        return 1
    if not score.exists():
        print(f"The notebook ran, but wrote no {score.name}: there is no score to show.", file=sys.stderr)
        return 1
    print(score.read_text().rstrip(), "\n")
    print(f"executed notebook  {copy}")
    if paged:
        print(f"as a page          {page}")
    print(f"score              {score.with_suffix('.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
