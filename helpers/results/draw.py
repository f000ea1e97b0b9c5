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

from helpers.machine import ROOT
from helpers.results import appendix, idea, plots
from helpers.puzzle.sync import NOTEBOOK

FIGURE_FOLDER = ROOT / "docs" / "figures"
FIGURES = {
    "idea": idea.idea,
    "share_by_size": lambda: plots.share_by_size(appendix.stored("benchmark")),
    "call_parts": lambda: plots.call_parts(appendix.stored("benchmark")),
    "t4": appendix.t4_picture,
    "training": lambda: plots.training(appendix.stored("training")),
}
ELSEWHERE = ("versions",)  # drawn by what measures them: tests/nf4/one_version.py --table
MARKED = re.compile(r"(<!-- (figure )?(\w+) -->\n).*?(<!-- /\2?\3 -->)", re.DOTALL)
PICTURE = re.compile(r"<!-- figure (\w+) -->")

block = functools.cache(lambda name: appendix.BLOCKS[name]())
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


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def draw_document(path: Path, check: bool) -> bool:
    """Draw a page of markdown, its pictures beside it; True where it was up to date."""
    before = path.read_text(encoding="utf-8")
    after = render(before, f"{os.path.relpath(FIGURE_FOLDER, path.parent)}/{{}}.png".format)
    pictures = {FIGURE_FOLDER / f"{name}.png": name for name in PICTURE.findall(after)}
    fresh = after == before and all(picture.exists() for picture in pictures)
    if not check:
        path.write_text(after, encoding="utf-8")
        for picture, name in pictures.items():
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(figure(name).png())
    return fresh


def draw_notebook(path: Path, check: bool) -> bool:
    """Draw the text cells of a notebook, with their pictures; True where their texts were up to date."""
    notebook, fresh = nbformat.read(path, as_version=4), True
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            after, attached = render(cell.source, "attachment:{}.png".format), cell.pop("attachments", {})
            pictures = {f"{name}.png": name for name in PICTURE.findall(after)}
            fresh &= cell.source == after and attached.keys() == pictures.keys()
            cell.source = after
            if pictures and not check:
                coded = {file: base64.b64encode(figure(name).png()) for file, name in pictures.items()}
                cell.attachments = {file: {"image/png": png.decode()} for file, png in coded.items()}
    if not check:
        nbformat.write(notebook, path)
    return fresh


def draw(check: bool = False) -> list[str]:
    """Draw everything; returns what was not up to date. check: write nothing."""
    fresh = {path.name: draw_document(path, check) for path in documents()}
    fresh[NOTEBOOK.name] = draw_notebook(NOTEBOOK, check)
    return [name for name, up_to_date in fresh.items() if not up_to_date]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(": ")[1].split("\n")[0])
    help = "change nothing, fail where one is not up to date"
    parser.add_argument("--check", action="store_true", help=help)
    check = parser.parse_args(argv).check
    old = draw(check)
    what = "not up to date" if check else "drawn anew"
    print(f"{what}: {', '.join(old)}" if old else "all up to date")
    return int(check and bool(old))
