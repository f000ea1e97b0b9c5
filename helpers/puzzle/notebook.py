"""Write the modules' sections into the notebook's cells; execute the notebook and print its score.

Every `# %%` section of a module that has an `id` is the notebook's cell of that id, with one blank line
between functions; `folded=true` makes it a form under its title, and `call="..."` adds a last line. A section
tagged `module-only` stays in its module.
"""

import json
import sys
import time
from pathlib import Path

import nbformat

from helpers import machine
from helpers.results import executed
from nf4_triton.core.supported import forced_card
from nf4_triton.environment import describe

LIMIT = 1800  # seconds for a cell
EXECUTED = machine.ROOT / "build" / f"{machine.NOTEBOOK.stem}.executed.ipynb"
MODULES = [
    "helpers/src/nf4_triton/core/supported.py",
    "helpers/src/nf4_triton/core/kernel.py",
    "helpers/src/nf4_triton/core/settings.py",
    "helpers/src/nf4_triton/core/private.py",
    "helpers/src/nf4_triton/core/launch.py",
    "helpers/src/nf4_triton/core/operators.py",
    "helpers/src/nf4_triton/core/reference.py",
    "helpers/names.py",
    "helpers/puzzle/layers.py",
    "helpers/puzzle/protocol.py",
    "helpers/puzzle/turns.py",
    "helpers/puzzle/checks.py",
    "helpers/puzzle/marking.py",
]


def cells_of_module(file: str, root: Path) -> list:
    """Return a module's cells, tagged with its name. A cell from the package names its file."""
    import jupytext

    cells = []
    for section in jupytext.read(root / file, fmt="py:percent").cells[1:]:
        facts, lines = section.metadata, [section.source]
        if "module-only" in facts.get("tags", ()):
            continue
        cell = nbformat.v4.new_code_cell(id=facts["id"], metadata={"tags": [Path(file).stem]})
        if file.startswith("helpers/src/"):
            lines.insert(0, f"# {file}")
        if "call" in facts:
            lines.append(f"\n{facts['call']}")
        if facts.get("folded"):
            lines.insert(0, f'#@title {facts["title"]} {{ display-mode: "form" }}')
            cell.metadata.update(cellView="form", jupyter={"source_hidden": True})
        cell.source = "\n".join(lines).replace("\n\n\n", "\n\n")
        cells.append(cell)
    return cells


def sync(notebook, root: Path = machine.ROOT) -> list[str]:
    """Write the modules' sections into a notebook; return the ids of the cells that changed.

    Outputs stay. A new section's cell is added at the end: move it.
    """
    made = {}
    for file in MODULES:
        made |= {cell.id: cell for cell in cells_of_module(file, root)}
    changed, cells = [], []
    modules = {Path(file).stem for file in MODULES}
    for old in notebook.cells:
        cell = made.pop(old.id, None)
        if cell:
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
        elif modules.isdisjoint(old.metadata.get("tags", ())):
            cell = old
        if cell != old:
            changed.append(old.id)
        if cell:
            cells.append(cell)
    notebook.cells = [*cells, *made.values()]
    return [*changed, *made]


def without_folders(outputs: list) -> list:
    """Return a cell's outputs with names instead of this machine's folders."""
    text = json.dumps(outputs)
    for folder, name in ((sys.prefix, "python"), (str(machine.ROOT), "."), (str(Path.home()), "~")):
        if len(folder) > 4:  # not / and not /usr
            text = text.replace(folder, name)
    return nbformat.from_dict(json.loads(text))


def execute(notebook, folder: Path) -> str:
    """Run every cell with this Python in `folder`, and put the outputs into `notebook`. Print when each cell
    ended.

    Returns why it stopped before the last cell, or "". The outputs until then are kept. Processes that a cell
    started end with the notebook.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    start, code = time.monotonic(), [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    first_lines = []
    if forced_card():  # torch must report no native bf16, as on a T4
        first_lines = ["--IPKernelApp.exec_lines=from helpers import machine; machine.prepare()"]
    this_python = KernelSpecManager(kernel_dirs=[])  # ignores kernels registered on the machine
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=this_python),
        extra_arguments=["--IPKernelApp.log_level=ERROR", *first_lines],
        timeout=LIMIT,
        shutdown_kernel="immediate",  # SIGKILL to its process group
        record_timing=False,
        coalesce_streams=True,  # keeps only the last state of a progress bar
        resources={"metadata": {"path": str(folder)}},
    )
    cell = code[0]
    try:
        with client.setup_kernel(cleanup_kc=True):
            for cell in code:
                client.execute_cell(cell, notebook.cells.index(cell))
                print(f"{time.monotonic() - start:6.1f} s  {cell.id}", flush=True)
    except CellExecutionError as error:
        return f"cell {cell.id} failed: {error.ename}: {error.evalue}"
    except CellTimeoutError:
        return f"cell {cell.id} took more than {LIMIT} s"
    except DeadKernelError:
        return f"the kernel was killed in cell {cell.id}: is there enough memory?"
    except KeyboardInterrupt:
        return f"interrupted in cell {cell.id}"
    return ""


def score_text(notebook) -> str:
    """Return the output of the score's cell."""
    outputs = [output for cell in notebook.cells if cell.id == "score" for output in cell.outputs]
    return "\n".join(output.get("text", "") for output in outputs).strip()


def save(notebook, path: Path) -> None:
    """Write a whole notebook, or leave the file as it was."""
    machine.write_whole(path, nbformat.writes(notebook) + "\n")


def run() -> int:
    """`python -m helpers run`: execute the notebook with this Python and print its score."""
    EXECUTED.parent.mkdir(exist_ok=True)
    EXECUTED.unlink(missing_ok=True)  # from an earlier run
    card = describe()["card"] or "the CPU (Triton interpreter)"
    print(f"executing {machine.NOTEBOOK.name} on {card}", flush=True)
    notebook = nbformat.read(machine.NOTEBOOK, as_version=4)
    failure = execute(notebook, machine.NOTEBOOK.parent)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = without_folders(cell.outputs)
    try:
        print(f"\n{score_text(notebook)}\n", flush=True)  # before saving, which fails on a full disk
    finally:
        save(notebook, EXECUTED)
    if failure:
        print(f"stopped: {failure}; what ran is in {EXECUTED}", file=sys.stderr)
        return 130 if failure.startswith("interrupted") else 1
    print(f"the executed notebook is {EXECUTED}")
    return 0


def write(copy: str | None = None) -> int:
    """`python -m helpers sync`: write the modules' sections into the notebook's cells; then, if there is an
    executed copy, its outputs. Exits with one line unless all cells ran on a GPU with its own settings."""
    notebook = nbformat.read(machine.NOTEBOOK, as_version=4)
    changed = sync(notebook)
    save(notebook, machine.NOTEBOOK)
    print("changed:", ", ".join(changed) or "nothing")
    if copy:
        ran, record = executed.read(copy)
        if forced := record.environment["forced"]:
            sys.exit(f"{copy} ran with NF4_FORCE={forced}, expected the card's own settings")
        for cell, theirs in zip(executed.code_cells(notebook), executed.code_cells(ran), strict=True):
            cell.outputs, cell.execution_count = theirs.outputs, theirs.execution_count
        save(notebook, machine.NOTEBOOK)
    return 0
