import nbformat
import pytest

from helpers.puzzle import sync

MODULE = '''"""What the module is for."""

# %% tags=["module-only"]
from somewhere import name

# %% [markdown] id="idea"
# **The idea.**

# %% id="first"
x = 1


def f():
    return x


# %% The details id="second" folded=true
y = 2
'''
FORM = '#@title The details { display-mode: "form" }\n'


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def notebook():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [text("Some", id="some-text"), code("own code", id="own"), text("end", id="end")]
    return nbformat.v4.new_notebook(cells=cells)


def ids(notebook):
    return [cell.id for cell in notebook.cells]


def cell(notebook, name):
    return next(cell for cell in notebook.cells if cell.id == name)


def different(notebook, modules=sync.MODULES):
    """The modules whose sections are not what the notebook's cells say."""
    cells = {name: sync.as_cells(sync.read_module(path)[1], name, notebook) for name, path in modules.items()}
    return [name for name in modules if cells[name] != sync.cells_of(notebook, name)]


def test_the_notebook_has_the_modules_sections():
    assert different(nbformat.read(sync.NOTEBOOK, 4)) == []


def test_sections_become_cells_behind_the_text_of_their_module(module, notebook):
    assert sync.sync(notebook, modules={"some": module}) == {}
    assert ids(notebook) == ["some-text", "idea", "first", "second", "own", "end"]
    assert cell(notebook, "idea").source == "**The idea.**"
    assert cell(notebook, "first").source == "x = 1\n\n\ndef f():\n    return x"
    second = cell(notebook, "second")
    assert second.source == FORM + "y = 2" and second.metadata.cellView == "form"
    assert second.metadata.tags == ["some"]
    assert different(notebook, {"some": module}) == []
    nbformat.validate(notebook)


def test_sections_may_come_go_and_move_while_the_notebooks_own_cells_stay(module, notebook):
    sync.sync(notebook, modules={"some": module})
    for name in ("first", "second"):
        own = nbformat.v4.new_markdown_cell(f"about {name}", id=f"{name}-text")
        notebook.cells.insert(ids(notebook).index(name), own)
    cell(notebook, "first").outputs = [nbformat.v4.new_output("stream", text="kept")]
    head, first, second = MODULE.split("\n# %% ")[0:1] + MODULE.split("\n# %% ")[3:5]
    module.write_text(f'{head}\n# %% {second}\n# %% id="new"\nz = 3\n\n# %% {first}')
    sync.sync(notebook, modules={"some": module})
    expected = ["some-text", "second-text", "second", "new", "first-text", "first", "own", "end"]
    assert ids(notebook) == expected
    assert cell(notebook, "first").outputs[0].text == "kept"
    module.write_text(f"{head}\n# %% {second}")
    sync.sync(notebook, modules={"some": module})
    assert ids(notebook) == ["some-text", "second-text", "second", "first-text", "own", "end"]


def test_back_changes_the_edited_sections_alone(module, notebook):
    sync.sync(notebook, modules={"some": module})
    cell(notebook, "second").source = FORM.replace("The details", "More") + "y = 22"
    texts = sync.sync(notebook, back=True, modules={"some": module})
    assert texts == {"some": MODULE.replace("y = 2", "y = 22").replace("The details", "More")}
    module.write_text(texts["some"])
    assert sync.sync(notebook, modules={"some": module}) == {}
    assert sync.sync(notebook, back=True, modules={"some": module}) == {}


def change_file(module, notebook):
    module.write_text(MODULE.replace("x = 1", "x = 11"))


def change_notebook(module, notebook):
    cell(notebook, "first").source += "\n# edited"


def change_both(module, notebook):
    change_file(module, notebook)
    change_notebook(module, notebook)


def delete_cell(module, notebook):
    notebook.cells.remove(cell(notebook, "first"))


@pytest.mark.parametrize(
    ("change", "back", "why"),
    [
        (change_both, False, "changed on both sides"),
        (change_both, True, "changed on both sides"),
        (change_notebook, False, "use `python -m helpers sync --back`"),
        (change_file, True, "use `python -m helpers sync`"),
        (delete_cell, True, "add, delete and move cells in some.py"),
    ],
)
def test_nothing_is_overwritten(module, notebook, change, back, why):
    sync.sync(notebook, modules={"some": module})
    change(module, notebook)
    before = nbformat.writes(notebook)
    with pytest.raises(sync.SyncError, match=why):
        sync.sync(notebook, back, {"some": module})
    assert nbformat.writes(notebook) == before
    assert different(notebook, {"some": module}) == ["some"]


def test_what_cannot_be_placed_is_refused(module, notebook):
    module.write_text(MODULE + "\n# %%\nz = 3\n")
    with pytest.raises(sync.SyncError, match='section "z = 3" has no id'):
        sync.sync(notebook, modules={"some": module})
    module.write_text(MODULE)
    del notebook.cells[0]
    with pytest.raises(sync.SyncError, match="no text cell some-text"):
        sync.sync(notebook, modules={"some": module})


def test_the_command_writes_both_ways(module, notebook, monkeypatch, tmp_path, capsys):
    path = tmp_path / "book.ipynb"
    nbformat.write(notebook, path)
    monkeypatch.setattr(sync, "NOTEBOOK", path)
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    monkeypatch.setitem(sync.MODULES, "some", module)
    for name in [name for name in sync.MODULES if name != "some"]:
        monkeypatch.delitem(sync.MODULES, name)
    assert sync.main([]) == 0 and "book.ipynb written" in capsys.readouterr().out
    assert sync.main([]) == 0 and capsys.readouterr().out == ""
    edited = nbformat.read(path, 4)
    change_notebook(module, edited)
    nbformat.write(edited, path)
    assert sync.main([]) == 1 and "sync --back" in capsys.readouterr().err
    assert sync.main(["--back"]) == 0 and "# edited" in module.read_text()
    assert sync.main([]) == 0 and sync.main(["--back"]) == 0
