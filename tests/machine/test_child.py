import os
import time

import pytest

from helpers import machine


def test_what_a_process_prints_and_how_it_ended(tmp_path):
    code = "import os, sys; print(os.getcwd(), sys.stdin.read(), os.environ['MINE']); sys.exit(3)"
    done = machine.python(["-c", code], variables={"MINE": "x"}, folder=tmp_path, stdin="in", check=False)
    assert (done.status, done.out.split()) == (3, [str(tmp_path), "in", "x"])


def test_a_variable_can_be_taken_away_and_the_repository_is_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import os, helpers.results.names; print('TRITON_INTERPRET' in os.environ)"
    done = machine.python(["-c", code], variables={"TRITON_INTERPRET": None}, folder=tmp_path)
    assert done.out.split() == ["False"]


def test_a_failure_is_raised_with_what_was_printed():
    with pytest.raises(machine.ChildFailed, match="ended with 1(.|\n)*ZeroDivisionError"):
        machine.python(["-c", "1 / 0"])


def test_after_its_time_a_process_ends_with_those_it_started(tmp_path):
    mark = tmp_path / "pid"
    code = (
        "import subprocess, sys; print('begun', flush=True);"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(mark)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    done = machine.python(["-c", code], timeout=3, check=False)
    assert done.status is None and done.out.split() == ["begun"]
    grandchild = int(mark.read_text())
    for _ in range(50):  # until it has been reaped, or is a zombie
        try:
            os.kill(grandchild, 0)
            state = open(f"/proc/{grandchild}/stat").read().split(")")[-1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the process it started is still there")


def test_a_time_out_is_raised_too():
    with pytest.raises(machine.ChildFailed, match="did not end within 1 s"):
        machine.python(["-c", "import time; time.sleep(60)"], timeout=1)
