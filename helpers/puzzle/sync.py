"""`python -m helpers sync`: the submission's modules and the notebook's tagged cells are one text.

A module is a plain file in percent format, read by jupytext: `# %% Title id="..." tags=[...]`. Each section
with an `id` is the notebook's cell of that id, tagged with the module's name. One with `folded=true` becomes
a form under its title; one tagged `module-only` (imports of names that the notebook has already) and the
docstring stay in the file. A module's cells follow the notebook's text cell `NAME-text`; where the notebook
has a text cell `ID-text`, it stays in front of cell ID.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

import nbformat

from helpers.machine import ROOT

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
MODULES = {"kernel": ROOT / "helpers" / "nf4" / "kernel.py"} | {
    name: ROOT / "helpers" / "puzzle" / f"{name}.py"
    for name in ("protocol", "checks", "marking", "repository")
}
FORMAT = {"extension": ".py", "format_name": "percent", "comment_magics": False}
FORM = re.compile(r'#@title (.*) \{ display-mode: "form" \}\n')


class SyncError(Exception):
    """Nothing was written; the text says why and what to do."""


def read_module(path: Path):
    """(the module as a notebook, its sections that are cells). SyncError where a section has no id."""
    import jupytext

    book = jupytext.reads(path.read_text(encoding="utf-8"), fmt=FORMAT)
    sections = [section for section in book.cells if "id" in section.metadata]
    for section in book.cells[1:]:  # before the first marker stands the docstring
        if section not in sections and "module-only" not in section.metadata.get("tags", ()):
            line = section.source.split("\n")[0]
            raise SyncError(f'{path.name}: the section "{line}" has no id="..." and no tag module-only')
    return book, sections


def cells_of(notebook, module: str) -> list:
    """The notebook's cells of a module, in their order."""
    return [cell for cell in notebook.cells if module in cell.metadata.get("tags", ())]


def as_cells(sections, module: str, notebook) -> list:
    """The cells that sections make, with the outputs that the notebook's of the same ids have."""
    cells, known = [], {cell.id: cell for cell in cells_of(notebook, module)}
    for section in sections:
        make = nbformat.v4.new_code_cell if section.cell_type == "code" else nbformat.v4.new_markdown_cell
        cell = make(section.source, id=section.metadata["id"], metadata={"tags": [module]})
        if section.metadata.get("folded"):
            title = section.metadata.get("title", cell.id)
            cell.source = f'#@title {title} {{ display-mode: "form" }}\n{cell.source}'
            cell.metadata.update(cellView="form", jupyter={"source_hidden": True})
        old = known.get(cell.id, cell)
        if old.cell_type == cell.cell_type == "code":
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
        cells.append(cell)
    return cells


def digest(cells) -> str:
    """A short hash of cells: ids, order and texts."""
    text = "\0".join(f"{cell.id}\0{cell.source}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_cells(notebook, module: str, new: list) -> None:
    """Replace a module's cells; the notebook's own text cell `ID-text` stays in front of cell ID."""
    own = {cell.id: cell for cell in notebook.cells if module not in cell.metadata.get("tags", ())}
    head, block = f"{module}-text", []
    if head not in own:
        raise SyncError(f"{NOTEBOOK.name} has no text cell {head} for {module}.py's cells to follow")
    for cell in new:
        text = f"{cell.id}-text"
        block += [own.pop(text), cell] if text in own and text != head else [cell]
    start, rest = list(own).index(head) + 1, list(own.values())
    notebook.cells = [*rest[:start], *block, *rest[start:]]


def module_text(book, sections, cells) -> str:
    """The module's file with the texts of the notebook's cells in its sections."""
    import jupytext

    for section, cell in zip(sections, cells, strict=True):
        form = FORM.match(cell.source) if section.metadata.get("folded") else None
        if form:
            section.metadata["title"] = form[1]
        section.source = cell.source[form.end() :] if form else cell.source
    book.metadata = {"jupytext": {"notebook_metadata_filter": "-all", "cell_metadata_filter": "all"}}
    return jupytext.writes(book, fmt=FORMAT).removeprefix("# %%\n")  # the docstring has no marker


def sync(notebook, back: bool = False, modules: dict[str, Path] = MODULES) -> dict[str, str]:
    """Make both sides equal: change `notebook` in place, or with `back` return the modules' new texts.

    Returns {module: text of its file} for the modules that `back` changes. Raises SyncError where both sides
    changed since the last sync, where the side to be overwritten did, and where `back` meets a cell that was
    added, deleted or moved.
    """
    last, texts = notebook.metadata.setdefault("nf4", {}).setdefault("synced", {}), {}
    for module, path in modules.items():
        (book, sections), old = read_module(path), cells_of(notebook, module)
        new = as_cells(sections, module, notebook)
        now = {path.name: digest(new), NOTEBOOK.name: digest(old)}
        source, target = (NOTEBOOK.name, path.name) if back else (path.name, NOTEBOOK.name)
        changed = [side for side in now if now[side] != last.get(module, digest([]))]
        if now[source] != now[target] and target in changed:
            where, do = f"in {target}", f"use `python -m helpers {'sync' if back else 'sync --back'}`"
            if len(changed) == 2:
                where, do = "on both sides", "bring one side's change over by hand"
            raise SyncError(f"{module}'s cells changed {where} since the last sync: {do}")
        if not back:
            write_cells(notebook, module, new)
        elif now[source] != now[target]:
            if [cell.id for cell in new] != [cell.id for cell in old]:
                raise SyncError(f"{module}: add, delete and move cells in {path.name}, not in the notebook")
            texts[module] = module_text(book, sections, old)
        last[module] = now[source]
    return texts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(": ")[1].split("\n")[0])
    parser.add_argument("--back", action="store_true", help="from the notebook's cells into the modules")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = nbformat.writes(notebook)
    try:
        texts = sync(notebook, parser.parse_args(argv).back)
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
