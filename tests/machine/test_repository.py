"""The whole repository: formatting, the order of the rooms, dead code."""

import json
import subprocess
import sys

import pytest

from helpers import machine


def run(*command):
    done = subprocess.run([sys.executable, *command], cwd=machine.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [["check", "--output-format=concise"], ["format", "--check"]])
def test_lint(command):
    run("-m", "ruff", *command, ".")


def test_rooms_import_only_what_stands_below_them():
    """The contracts are in pyproject.toml."""
    pytest.importorskip("importlinter")
    run("-c", "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_cache=True))")


def test_every_room_says_what_it_is_for():
    rooms = [
        path for path in machine.ROOT.joinpath("helpers").iterdir() if (path / "__init__.py").exists()
    ]
    assert len(rooms) >= 10
    for room in rooms:
        assert (room / "__init__.py").read_text().startswith('"""'), room.name


def test_nothing_is_dead_or_used_by_tests_alone(tmp_path):
    """Functions, classes and imports that neither helpers, examples nor the notebook use."""
    vulture = pytest.importorskip("vulture")
    from vulture.config import make_config

    notebook = json.loads((machine.ROOT / "Unsloth_Puzzles_A.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n".join(code), encoding="utf-8")
    config = make_config(["--config", str(machine.ROOT / "pyproject.toml")])
    scan = vulture.Vulture(ignore_names=config["ignore_names"])
    scan.scavenge([*(machine.ROOT / path for path in config["paths"]), tmp_path])
    kinds = ("function", "method", "property", "class", "import", "unreachable_code")
    dead = [item.get_report() for item in scan.get_unused_code() if item.typ in kinds]
    assert not dead, "\n".join(dead)
