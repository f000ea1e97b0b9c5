"""`python -m helpers draw`: what README, docs and the notebook show of stored results, drawn anew.

A block of markdown stands between `<!-- name -->` and `<!-- /name -->`, a picture between
`<!-- figure name -->` and `<!-- /figure name -->`; the text around them is written by hand. In the notebook a
picture is an attachment of its text cell, elsewhere a file in docs/figures/.
"""

import argparse
import base64
import functools
import os
import re
from pathlib import Path

import nbformat

from helpers.machine.environment import ROOT
from helpers.show import appendix, idea, plots
from helpers.submission.sync import NOTEBOOK

FIGURE_FOLDER = ROOT / "docs" / "figures"
FIGURES = {
    "idea": idea.idea,
    "share_by_size": lambda: plots.share_by_size(appendix.stored("benchmark")),
    "call_parts": lambda: plots.call_parts(appendix.stored("benchmark")),
    "t4": appendix.t4_picture,
    "training": lambda: plots.training(appendix.stored("training")),
}
ELSEWHERE = ("versions",)  # drawn by what measures them: tests/nf4/one_version.py --table
BLOCKS = {function.__name__: function for function in appendix.BLOCKS}
MARKED = re.compile(r"(<!-- (figure )?(\w+) -->\n).*?(<!-- /\2?\3 -->)", re.DOTALL)

block = functools.cache(lambda name: BLOCKS[name]())
figure = functools.cache(lambda name: FIGURES[name]())


def render(text: str, place) -> str:
    """A text with its blocks drawn anew. place(name): where the picture of that name is for a reader of it.

    Raises KeyError for a block or picture that does not exist, ValueError for a mark without its end.
    """

    def drawn(match):
        head, is_figure, name, end = match.groups()
        if name in ELSEWHERE:
            return match[0]
        content = f"![{figure(name).alt}]({place(name)})" if is_figure else block(name)
        return f"{head}{content}\n{end}" if content else head + end

    marks, result = len(re.findall(r"<!-- /?(?:figure )?\w+ -->", text)), MARKED.sub(drawn, text)
    if marks != 2 * len(MARKED.findall(text)):
        raise ValueError("a mark <!-- name --> without its end <!-- /name -->, or the other way round")
    return result


def draw_notebook(notebook) -> None:
    """Draw the text cells of a notebook; their pictures become attachments."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            shown = []
            place = functools.partial(_attach, shown)
            cell.source = render(cell.source, place)
            cell.pop("attachments", None)
            if shown:
                cell.attachments = {f"{name}.png": {"image/png": _base64(name)} for name in shown}


def _attach(shown: list[str], name: str) -> str:
    shown.append(name)
    return f"attachment:{name}.png"


def _base64(name: str) -> str:
    return base64.b64encode(figure(name).png()).decode()


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def draw(check: bool = False) -> list[str]:
    """Draw everything; returns what was not up to date. check: write nothing."""
    old = []
    for path in documents():
        shown, before = [], path.read_text(encoding="utf-8")

        def place(name, shown=shown, path=path):
            shown.append(name)
            return os.path.relpath(FIGURE_FOLDER / f"{name}.png", path.parent)

        after = render(before, place)
        if after != before or not all((FIGURE_FOLDER / f"{name}.png").exists() for name in shown):
            old.append(path.name)
        if not check:
            path.write_text(after, encoding="utf-8")
            for name in shown:
                FIGURE_FOLDER.mkdir(parents=True, exist_ok=True)
                (FIGURE_FOLDER / f"{name}.png").write_bytes(figure(name).png())
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = texts(notebook)
    draw_notebook(notebook)
    if texts(notebook) != before:
        old.append(NOTEBOOK.name)
    if not check:
        nbformat.write(notebook, NOTEBOOK)
    return old


def texts(notebook) -> list:
    """What a notebook's text cells say, and the names of their pictures (bytes vary with matplotlib)."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    return [(cell.source, sorted(cell.get("attachments", ()))) for cell in cells]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helpers draw",
        description="Draw README, docs and the notebook's stored pictures anew from the result files.",
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail where one is not up to date"
    )
    options = parser.parse_args(argv)
    old = draw(options.check)
    print(
        f"{'not up to date' if options.check else 'drawn anew'}: {', '.join(old)}"
        if old
        else "all up to date"
    )
    return int(options.check and bool(old))
