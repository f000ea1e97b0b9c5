"""`python -m helpers sync`: the submission's modules and the notebook's tagged cells are one text.

A module is a plain file in percent format, read by jupytext: `# %% Title id="..." tags=[...]`. Each section
with an `id` is the notebook's cell of that id, tagged with the module's name. One with `folded=true` becomes
a form under its title; one tagged `module-only` (imports of names that the notebook has already) and the
docstring stay in the file. A module's cells follow the notebook's text cell `NAME-text`; a cell of the
notebook's own keeps its place in front of the section that it stands before.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

import nbformat

from helpers.machine.environment import ROOT

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
MODULES = {
    "kernel": ROOT / "helpers" / "nf4" / "kernel.py",
    **{
        name: ROOT / "helpers" / "submission" / f"{name}.py"
        for name in ("protocol", "evidence", "marking", "repository")
    },
}
FORMAT = {"extension": ".py", "format_name": "percent", "comment_magics": False}
FORM = re.compile(r'#@title (.*) \{ display-mode: "form" \}\n')


class SyncError(Exception):
    """Nothing was written; the text says why and what to do."""


def read_module(path: Path):
    """The module as a notebook of sections. Raises SyncError where a section has no id."""
    import jupytext

    book = jupytext.reads(path.read_text(encoding="utf-8"), fmt=FORMAT)
    for number, section in enumerate(book.cells):
        has_place = "id" in section.metadata or "module-only" in section.metadata.get("tags", ())
        if number and not has_place:  # before the first marker stands the docstring
            line = section.source.split("\n")[0]
            raise SyncError(f'{path.name}: the section "{line}" has no id="..." and no tag module-only')
    return book


def sections(book) -> list:
    """The sections of a module that are the notebook's too."""
    return [c for c in book.cells if "id" in c.metadata and "module-only" not in c.metadata.get("tags", ())]


def as_cell(section, module: str, old=None):
    """The notebook's cell of a section; the outputs are those of the cell `old`."""
    make = nbformat.v4.new_code_cell if section.cell_type == "code" else nbformat.v4.new_markdown_cell
    cell = make(section.source, id=section.metadata["id"], metadata={"tags": [module]})
    if section.metadata.get("folded"):
        title = section.metadata.get("title", cell.id)
        cell.source = f'#@title {title} {{ display-mode: "form" }}\n{cell.source}'
        cell.metadata.update(cellView="form", jupyter={"source_hidden": True})
    if old is not None and old.cell_type == cell.cell_type == "code":
        cell.outputs, cell.execution_count = old.outputs, old.execution_count
    return cell


def cells_of(notebook, module: str) -> list:
    """The notebook's cells of a module, in their order."""
    return [cell for cell in notebook.cells if module in cell.metadata.get("tags", ())]


def digest(cells) -> str:
    """A short hash of cells: ids, order and texts."""
    text = "\0".join(f"{cell.id}\0{cell.source}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_cells(notebook, module: str, new: list) -> None:
    """Replace a module's cells; the notebook's own cells between them keep their place."""
    ids = [cell.id for cell in notebook.cells]
    if f"{module}-text" not in ids:
        raise SyncError(f"{NOTEBOOK.name} has no text cell {module}-text for {module}.py's cells to follow")
    start = ids.index(f"{module}-text") + 1
    old = cells_of(notebook, module)
    end = max([notebook.cells.index(cell) + 1 for cell in old], default=start)
    kept = {cell.id for cell in new}
    in_front, waiting = {}, []
    for cell in notebook.cells[start:end]:
        if module not in cell.metadata.get("tags", ()):
            waiting.append(cell)
        elif cell.id in kept:
            in_front[cell.id], waiting = waiting, []
    block = [one for cell in new for one in (*in_front.get(cell.id, ()), cell)]
    notebook.cells[start:end] = [*block, *waiting]


def write_sections(book, cells) -> None:
    """Bring the texts of a module's cells into its sections."""
    texts = {cell.id: cell for cell in cells}
    for section in sections(book):
        source, form = texts[section.metadata["id"]].source, None
        if section.metadata.get("folded"):
            form = FORM.match(source)
        if form:
            section.metadata["title"], source = form[1], source[form.end() :]
        section.source = source


def sync(notebook, back: bool = False, modules: dict[str, Path] = MODULES) -> dict[str, str]:
    """Make both sides equal: change `notebook` in place, or with `back` return the modules' new texts.

    Returns {module: text of its file} for the modules that `back` changes. Raises SyncError where both sides
    changed since the last sync, where the side to be overwritten did, and where `back` meets a cell that was
    added, deleted or moved.
    """
    import jupytext

    last, texts = notebook.metadata.setdefault("nf4", {}).setdefault("synced", {}), {}
    for module, path in modules.items():
        book, old = read_module(path), cells_of(notebook, module)
        known = {cell.id: cell for cell in old}
        new = [as_cell(section, module, known.get(section.metadata["id"])) for section in sections(book)]
        in_file, in_notebook = digest(new), digest(old)
        overwritten, name, other = (in_file, path.name, "sync")
        if not back:
            overwritten, name, other = (in_notebook, NOTEBOOK.name, "sync --back")
        if in_file != in_notebook and overwritten != last.get(module, digest([])):
            both = last.get(module) not in (in_file, in_notebook)
            do = "bring one side's change over by hand" if both else f"use `python -m helpers {other}`"
            where = f"{module}'s cells changed " + ("on both sides" if both else f"in {name}")
            raise SyncError(f"{where} since the last sync: {do}")
        if not back:
            write_cells(notebook, module, new)
        elif in_file != in_notebook:
            if [cell.id for cell in new] != [cell.id for cell in old]:
                raise SyncError(f"{module}: add, delete and move cells in {path.name}, not in the notebook")
            write_sections(book, old)
            book.metadata = {"jupytext": {"notebook_metadata_filter": "-all", "cell_metadata_filter": "all"}}
            # The docstring has no marker.
            texts[module] = jupytext.writes(book, fmt=FORMAT).removeprefix("# %%\n")
        last[module] = in_notebook if back else in_file
    return texts


def different(notebook, modules: dict[str, Path] = MODULES) -> list[str]:
    """The modules whose sections are not what the notebook's cells say."""

    def facts(cells):
        return [(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in cells]

    return [
        module
        for module, path in modules.items()
        if facts(as_cell(section, module) for section in sections(read_module(path)))
        != facts(cells_of(notebook, module))
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helpers sync",
        description="Write the modules' sections into the notebook's cells, or bring these back.",
    )
    parser.add_argument("--back", action="store_true", help="from the notebook's cells into the modules")
    options = parser.parse_args(argv)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = nbformat.writes(notebook)
    try:
        texts = sync(notebook, options.back)
    except SyncError as error:
        print(error, file=sys.stderr)
        return 1
    for module, text in texts.items():
        MODULES[module].write_text(text, encoding="utf-8")
        print(f"{MODULES[module].relative_to(ROOT)} written")
    if nbformat.writes(notebook) != before:
        nbformat.write(notebook, NOTEBOOK)
        print(f"{NOTEBOOK.name} written")
    return 0
