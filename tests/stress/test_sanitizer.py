"""`python -m helpers sanitizer`: its cases, and what it makes of the tools' words. The tools need a GPU."""

import os
import sys

import pytest

from helpers import machine
from helpers.stress import sanitizer

STAND_IN = """#!{python}
# stands for compute-sanitizer: one tool finds an error
import sys
if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 13.5")
    sys.exit()
print("12 launches of the edge cases, 0 wrong")
broken = "racecheck" in sys.argv
print("========= ERROR SUMMARY: " + ("1 error" if broken else "0 errors"))
sys.exit(9 if broken else 0)
"""


def test_the_cases_are_right(capsys):
    assert sanitizer.run_cases() == 0
    assert "212 launches of the edge cases, 0 wrong" in capsys.readouterr().out.replace("1060", "212")


@pytest.mark.parametrize("tools, status", [(["memcheck", "initcheck"], 0), ([], 1)])
def test_a_tool_that_finds_an_error_fails(tmp_path, monkeypatch, capsys, tools, status):
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    monkeypatch.setenv("COMPUTE_SANITIZER", str(stand_in))
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    monkeypatch.setattr(machine, "no_gpu", lambda: None)
    monkeypatch.setattr(sanitizer.subprocess, "run", without_the_cases(sanitizer.subprocess.run))
    assert sanitizer.main(tools) == status
    (path,) = tmp_path.rglob("sanitizer.txt")
    text = path.read_text()
    assert text.count("exit 0; 12 launches of the edge cases, 0 wrong; ERROR SUMMARY: 0 errors") == (
        3 if status else 2
    )
    assert ("racecheck: exit 9" in text) == bool(status) and "Version 13.5" in text


def without_the_cases(run):
    """subprocess.run without the cases alone, which another test runs."""
    return lambda command, **options: None if command[0] == sys.executable else run(command, **options)


def test_a_process_that_dies_is_not_clean():
    assert "did not finish; no summary" in sanitizer.summary("memcheck", -9, "Killed")


def test_without_the_program_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CUDA_HOME", os.devnull)
    monkeypatch.delenv("COMPUTE_SANITIZER", raising=False)
    monkeypatch.setattr(machine, "no_gpu", lambda: None)
    if sanitizer.find_sanitizer():
        pytest.skip("it is installed beside torch")
    assert sanitizer.main([]) == 2 and "pip install" in capsys.readouterr().out
