"""Plausible bugs, seeded one at a time into a copy of the repository: the tests of its row must fail.

By hand: pytest tests/long/test_seeded_bugs.py -n 2 -m "long and not gpu", and on a GPU -m "long and gpu".
Controls run the same tests without a bug. The gate checks that every row still applies.
"""

import ast
import os
import shutil
import sys

import pytest

from helpers import machine
from tests.long.bugs import BUGS

LIMIT = 1800  # seconds; tests that do not end have caught the bug


def source_of(text, name):
    """Return the source of a function or class; all of the text if the name is empty."""
    if not name:
        return text
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and node.name == name:
            return ast.get_source_segment(text, node)
    raise LookupError(f"no function or class is named {name}")


def seeded(bug):
    """Return the text of the bug's file with the bug in it."""
    text = (machine.ROOT / bug.file).read_text(encoding="utf-8")
    source = source_of(text, bug.function)
    times = source.count(bug.old)
    assert times == 1, f"{bug.file}, {bug.function}: {bug.old} occurs {times} times, expected once"
    return text.replace(source, source.replace(bug.old, bug.new))


@pytest.mark.parametrize("name", BUGS)
def test_every_row_still_applies(name):
    ast.parse(seeded(BUGS[name]))
    for test in BUGS[name].tests:
        assert (machine.ROOT / "tests" / test.partition("::")[0]).exists()


def run_tests(folder, tests, where, bug=None):
    """Run tests in a copy of the repository with a bug, on a GPU or in the interpreter.

    Returns (exit status, output); the status is None if the tests do not end.
    """
    for part in ("helpers", "tests"):
        shutil.copytree(machine.ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in machine.ROOT.iterdir():
        if part.is_file():
            shutil.copy(part, folder)
    if bug:
        (folder / bug.file).write_text(seeded(bug), encoding="utf-8")
    variables = {
        "PYTEST_ADDOPTS": None,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "TRITON_CACHE_DIR": str(machine.ROOT / "build" / "cache" / "triton"),
    }
    for name in os.environ:
        if name.startswith("PYTEST_XDIST"):
            variables[name] = None
    if where == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["TRITON_INTERPRET"] = "1"
    command = ["-m", "pytest", "-x", "-q", "-n0", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    done = machine.python(command, folder=folder, variables=variables, timeout=LIMIT, check=False)
    return done.status, done.out + done.err[-2000:]


def marked(names):
    """Return test parameters; what begins with "gpu" runs on a GPU only."""
    marks = {"cpu": (), "gpu": pytest.mark.gpu}
    return [pytest.param(name, marks=marks[name[:3]]) for name in names]


def control_names():
    """Return "cpu" or "gpu" and the tests, once for all rows that name the same tests."""
    names = set()
    for name, bug in BUGS.items():
        names.add(" ".join([name[:3], *bug.tests]))
    return sorted(names)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", marked(control_names()))
def test_control(name, tmp_path):
    where, *tests = name.split()
    status, output = run_tests(tmp_path, tests, where)
    assert status == 0, output[-4000:]


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", marked(BUGS))
def test_caught(name, tmp_path, count):
    """A test fails, or the process dies or does not end."""
    bug = BUGS[name]
    where = name[:3]
    status, output = run_tests(tmp_path, bug.tests, where, bug)
    caught = status is None or status < 0 or status in (1, 2)
    total = len([other for other in BUGS if other.startswith(where)])
    numbers = {(where, "seeded"): 1, (where, "caught"): int(caught)}
    count("seeded_bugs", numbers, total, "cpu" if where == "cpu" else None)
    assert caught, f"survived: {bug.old} -> {bug.new}\n{output[-3000:]}"
