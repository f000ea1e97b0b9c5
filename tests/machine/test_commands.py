"""python -m helpers COMMAND, and what importing a module may do."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys

import pytest

import helpers
from helpers import __main__ as commands
from helpers import machine


def test_each_command_has_one_line(capsys):
    assert commands.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(commands.COMMANDS)
    assert all(len(line) <= 100 for line in lines)
    assert commands.main(["no such command"]) == commands.main([]) == 2


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_has_its_own_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m helpers {name}" in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_tool_has_no_second_entry(name):
    """What starts it in another way passes by the preparation of the process."""
    module = importlib.import_module(f"helpers.{commands.COMMANDS[name][0]}")
    with open(module.__file__, encoding="utf-8") as file:
        assert not re.search(r"^if __name__ ==", file.read(), re.M)


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError("No module named 'nbclient'", name="nbclient")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert commands.main(["run"]) == 1
    assert capsys.readouterr().err == "nbclient is not installed: bash colab_setup.sh test installs it\n"


def test_importing_a_module_changes_no_variable_and_starts_nothing():
    """Only the command line, the notebook and the tests prepare the process."""
    modules = [module.name for module in pkgutil.walk_packages(helpers.__path__, "helpers.")]
    code = f"""
import importlib, os, sys, threading
import torch, bitsandbytes, matplotlib  # which do set variables
before = dict(os.environ)
for name in {modules}:
    if not name.startswith("helpers.__main__"):
        importlib.import_module(name)
changed = {{name: value for name, value in os.environ.items() if before.get(name) != value}}
assert not changed and set(before) <= set(os.environ), changed
assert threading.active_count() == 1
"""
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=machine.ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
