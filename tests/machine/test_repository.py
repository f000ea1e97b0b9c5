"""The whole repository: formatting, order of imports, dead code, commands, what an import may do."""

import re

import nbformat
import pytest

import processes
from helpers import __main__ as commands
from helpers import machine

IMPORTS = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_cache=True))"


@pytest.mark.parametrize(
    "arguments",
    [["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."], ["-m", "mypy"], ["-c", IMPORTS]],
    ids=["lint", "format", "types", "imports go down"],
)
def test_what_pyproject_asks_for(arguments):
    processes.python(arguments)


def test_a_release_has_one_version_and_date():
    from nf4_triton import __version__

    changes = (machine.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changes, re.M).groups()
    citation = (machine.ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert __version__ == version
    assert f"\nversion: {version}\n" in citation and f"date-released: {date}\n" in citation


def test_nothing_is_dead_or_used_by_tests_alone(tmp_path):
    """Functions, classes and imports that neither helpers, examples nor the notebook use."""
    notebook = nbformat.read(machine.NOTEBOOK, as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    file = tmp_path / "notebook.py"
    file.write_text("\n".join(code), encoding="utf-8")
    done = processes.python(["-m", "vulture", "helpers", "examples", file], check=False)
    dead = [line for line in done.out.splitlines() if not re.search("unused (variable|attribute)", line)]
    assert not dead and not done.err


def test_commands_are_listed_and_checked(capsys):
    assert commands.main([]) == 0 and commands.main(["no such command"]) == 2
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in commands.COMMANDS)
    assert commands.main(["run", "--help"]) == 0
    for wrong in (["run", "1"], ["sync", "--in-place"], ["draw", "1", "2"]):
        assert commands.main(wrong) == 2  # before it does anything
