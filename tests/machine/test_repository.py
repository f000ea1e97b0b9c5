"""The whole repository: formatting, types, imports, dead code, the release, commands."""

import re

import processes
from helpers import __main__ as commands
from helpers import machine


def test_what_is_checked_besides_tests():
    """Formatting, types, imports, dead code."""
    processes.python(["-m", "nox", "-s", "lint"])


def test_a_release_has_one_version_and_date():
    from nf4_triton import __version__

    changes = (machine.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changes, re.M).groups()
    citation = (machine.ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert __version__ == version
    assert f"\nversion: {version}\n" in citation and f"date-released: {date}\n" in citation


def test_commands_are_listed_and_checked(capsys):
    assert commands.main([]) == 0 and commands.main(["no such command"]) == 2
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in commands.COMMANDS)
    assert commands.main(["run", "--help"]) == 0
    for wrong in (["run", "1"], ["sync", "--in-place"], ["draw", "1", "2"]):
        assert commands.main(wrong) == 2  # before it does anything
