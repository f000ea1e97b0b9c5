"""Plausible bugs seeded into the code, one at a time, each of which the tests must catch.

By hand: pytest -m long tests/long/test_seeded_bugs.py -n 2; those that only a GPU shows: -k gpu -n 8 on one.
Each bug is seeded in a copy of the repository, where the tests of its row run until one fails. Controls run
the same tests without a bug. That every row still applies is checked in the gate.
"""

import ast
import os
import re
import shutil
import sys

import pytest

from helpers import machine
from tests.long.bugs import BUGS

LIMIT = 1800  # seconds; tests that do not end have caught the bug
GAP = r"(?:\s|(?<=\s)#.*)*"  # layout and comments


def occurrences(text, old):
    """Where the words and signs of `old` follow each other in `text`, however it is laid out."""
    parts = []
    for part in re.findall(r"\w+|[^\w\s]", re.sub(r"\s#.*", "", old)):
        word = rf"\b{part}\b" if part[0].isalnum() or part[0] == "_" else re.escape(part)
        parts.append(rf"(?:,{GAP})?{word}" if part in (")", "]", "}") else word)  # a trailing comma is layout
    return [match.span() for match in re.finditer(GAP.join(parts), text)]


def seeded(bug):
    """The text of the bug's file with the bug in it."""
    text = (machine.ROOT / bug.file).read_text(encoding="utf-8")
    if text.count(bug.old) == 1:
        return text.replace(bug.old, bug.new)
    places = occurrences(text, bug.old)
    assert len(places) == 1, f"occurs {len(places)} times in {bug.file}, expected once: {bug.old}"
    ((first, last),) = places
    return text[:first] + bug.new + text[last:]


@pytest.mark.parametrize("name", BUGS)
def test_every_row_still_applies(name):
    """Its fragment occurs once, what comes of it is Python, and its tests are there."""
    ast.parse(seeded(BUGS[name]))
    assert all((machine.ROOT / "tests" / test.partition("::")[0]).exists() for test in BUGS[name].tests)


@pytest.mark.parametrize("text", ["y = f(a, b) + g[1]", "y = f(\n    a,  # a comment\n    b,\n) + g[1]"])
def test_layout_does_not_matter(text):
    assert [text[first:last][-1] for first, last in occurrences(text, "f(a, b) + g")] == ["g"]
    assert not occurrences(text, "b + g") and not occurrences(text, "f(a, b) + g[1] g")


def run_tests(tests, gpu, folder, bug=None):
    """(exit status, output) of tests in a copy of the repository with a bug; the status is None if they do
    not end. Bugs of the CPU are run in the interpreter on a GPU machine, too."""
    for part in ("helpers", "tests"):
        shutil.copytree(machine.ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in machine.ROOT.iterdir():
        if part.is_file():
            shutil.copy(part, folder)
    if bug:
        (folder / bug.file).write_text(seeded(bug), encoding="utf-8")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "TRITON_CACHE_DIR": str(machine.ROOT / "build" / "cache" / "triton"),
    }
    if not gpu:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    variables |= {name: None for name in os.environ if name.startswith("PYTEST_")}
    command = ["-m", "pytest", "-x", "-q", "-n0", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-m", "long or not long"] * ("::" in tests[0])  # one test, which may be a long one
    command += [f"tests/{name}" for name in tests]
    done = machine.python(command, folder=folder, variables=variables, timeout=LIMIT, check=False)
    return done.status, done.out + done.err[-2000:]


def by_hand(parameters):
    """Test parameters of long tests, marked gpu where only a GPU shows the bug."""
    return [pytest.param(*each, id=name, marks=[pytest.mark.gpu] * gpu) for name, gpu, *each in parameters]


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "gpu, tests",
    by_hand(
        sorted(
            {
                (f"{'gpu' if bug.gpu else 'cpu'} {bug.tests[0]}", bug.gpu, bug.gpu, bug.tests)
                for bug in BUGS.values()
            }
        )
    ),
)
def test_control(gpu, tests, tmp_path):
    """Without a bug the tests pass."""
    status, text = run_tests(tests, gpu, tmp_path)
    assert status == 0, text[-4000:]


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", by_hand((name, bug.gpu, name) for name, bug in BUGS.items()))
def test_caught(name, tmp_path, record_property):
    """A test fails, or the process dies or does not end."""
    bug = BUGS[name]
    record_property("seeded", [name[:3], sum(other.gpu == bug.gpu for other in BUGS.values())])  # conftest.py
    status, text = run_tests(bug.tests, bug.gpu, tmp_path, bug)
    assert status != 0, f"survived: {bug.old} -> {bug.new}"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    assert status is None or status < 0 or status in (1, 2) and failed, text[-3000:]
    print(f"{name}: {failed[:1] or status}")
