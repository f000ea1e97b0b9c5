"""The notebook's first code cell, run with a stand-in for pip."""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import nbformat
import pytest

from helpers.puzzle import sync


@pytest.fixture
def cell(monkeypatch):
    """cell(absent, gpu, status) -> the pip commands it ran, with the text of the file of kept versions."""
    source = next(c.source for c in nbformat.read(sync.NOTEBOOK, 4).cells if c.id == "install")

    def run(absent=(), gpu=True, status=0):
        commands = []

        def answer(command, **options):
            if command[0] == "nvidia-smi":
                return SimpleNamespace(returncode=0)
            commands.append((command, open(command[command.index("-c") + 1]).read()))
            return SimpleNamespace(returncode=status, stderr="ERROR: no network\n")

        def find_spec(name, package=None):
            return None if name in absent else importlib.machinery.ModuleSpec(name, None)

        monkeypatch.setattr(subprocess, "run", answer)
        monkeypatch.setattr(shutil, "which", lambda name: name if gpu else None)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        with mock.patch.dict(os.environ):
            exec(compile(source, "install", "exec"), {"__name__": "__main__"})
        monkeypatch.undo()
        return commands

    return run


def test_where_all_is_there_nothing_runs(cell, capsys):
    assert cell() == [] and cell(gpu=False) == []
    assert "installing" not in capsys.readouterr().out


def test_on_colab_it_adds_what_is_missing_and_torch_and_triton_stay(cell):
    absent = ("bitsandbytes", "trl", "unsloth", "unsloth_zoo", "cut_cross_entropy")
    plain, for_unsloth, unsloth = cell(absent)
    for command, kept in (plain, for_unsloth, unsloth):
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        assert "torch==" in kept and "triton==" in kept and "bitsandbytes" not in kept
    assert plain[0][-1].startswith("bitsandbytes>=") and "--no-deps" not in plain[0] + for_unsloth[0]
    assert for_unsloth[0][-1].startswith("trl>=")
    assert "--no-deps" in unsloth[0] and [text.split(">")[0] for text in unsloth[0][-3:]] == list(absent[2:])


def test_without_a_gpu_no_unsloth_and_the_interpreter(cell, capsys):
    commands = cell(("bitsandbytes", "trl", "unsloth"), gpu=False)
    assert [command[-1].split(">")[0] for command, _ in commands] == ["bitsandbytes"]
    assert "No GPU here: Triton's interpreter." in capsys.readouterr().out


def test_a_failure_says_what_and_how_to_mend_it_and_goes_on(cell, capsys):
    assert len(cell(("bitsandbytes", "trl", "unsloth"), status=1)) == 3
    shown = capsys.readouterr().out
    assert shown.count("ERROR: no network") == 3 and "After a network error run this cell again" in shown
