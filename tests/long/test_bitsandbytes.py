"""bitsandbytes' own functional and Linear4bit 4-bit tests, with the kernel switched on.

By hand: clone bitsandbytes at the tag of the installed version and set NF4_BITSANDBYTES to it, then
pytest -m long tests/long/test_bitsandbytes.py. A test that fails with bitsandbytes' kernel, too, does not
count. This file is also a pytest plugin of both runs.
"""

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import processes
from helpers import machine
from helpers.puzzle.layers import DEVICE

FILES = ("test_functional.py", "test_linear4bit.py", "test_autograd.py", "test_parametrize.py")
SELECTION = "(4bit or test_parametrize.py) and not bench"


def pytest_configure():
    machine.prepare()
    if os.environ["NF4_TESTED"] == "ours":
        from nf4_triton import use_nf4_kernel

        use_nf4_kernel("bitsandbytes", strict=True)


def run(folder, who, report):
    """Run bitsandbytes' tests as they are ("bitsandbytes") or with the kernel ("ours").

    Returns (number passed, names failed).
    """
    path = os.pathsep.join([str(folder), str(machine.ROOT), str(Path(__file__).parent), *sys.path])
    variables = {"NF4_TESTED": who, "BNB_TEST_DEVICE": DEVICE, "PYTHONPATH": path}
    command = ["-m", "pytest", "-p", Path(__file__).stem, "-n", "auto", "-q", "--junitxml", report]
    command += ["-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider", "-k", SELECTION]
    command += [folder / "tests" / name for name in FILES]
    done = processes.python(command, variables=variables, folder=folder, timeout=6 * 3600, check=False)
    assert report.exists(), done.out[-6000:] + done.err[-2000:]
    passed, failed = 0, set()
    for test in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in test}
        if outcomes & {"failure", "error"}:
            failed.add(f"{test.get('classname')}.{test.get('name')}")
        elif "skipped" not in outcomes:
            passed += 1
    return passed, failed


@pytest.mark.long
@pytest.mark.timeout(0)
def test_nothing_fails_only_with_this_kernel(tmp_path):
    if "NF4_BITSANDBYTES" not in os.environ:
        pytest.skip("needs NF4_BITSANDBYTES, a clone of bitsandbytes at the installed version")
    folder = Path(os.environ["NF4_BITSANDBYTES"])
    theirs, failed_theirs = run(folder, "bitsandbytes", tmp_path / "bitsandbytes.xml")
    ours, failed = run(folder, "ours", tmp_path / "ours.xml")
    assert failed <= failed_theirs, f"failed only with this kernel: {failed - failed_theirs}"
    assert ours > 0
    print(f"passed {ours}, failed {len(failed)}; with bitsandbytes' kernel {theirs}, {len(failed_theirs)}")
