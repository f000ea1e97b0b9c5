"""bitsandbytes' own functional and Linear4bit 4-bit tests, with this kernel as its dequantization.

By hand: clone bitsandbytes at the tag of the installed version and set NF4_BITSANDBYTES to it, then
pytest -m long tests/long/test_bitsandbytes.py. What fails with bitsandbytes' kernel, too, is not this one's
doing. This file is also a pytest plugin of the run that substitutes the kernel.
"""

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers import machine
from helpers.puzzle.layers import DEVICE

FILES = ("test_functional.py", "test_linear4bit.py", "test_ops.py", "test_autograd.py", "test_parametrize.py")
SELECTION = "(4bit or test_parametrize.py) and not bench"
launches = 0


def substitute():
    """Make bitsandbytes.functional.dequantize_4bit, and what its CUDA operators launch, this kernel."""
    import bitsandbytes.functional as functional
    import torch

    from nf4_triton import launch

    original = functional.dequantize_4bit

    def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        global launches
        if A.device.type != DEVICE or quant_state is None:  # its own code then calls the operator
            return original(A, quant_state, absmax, out, blocksize or 64, quant_type)
        if not torch.compiler.is_compiling():
            launches += 1
        return launch._your_dequantize_nf4(A, quant_state, out)

    def operator(A, absmax, blocksize, quant_type, dtype, out):
        global launches
        launches += 1
        state = functional.QuantState(absmax, out.shape, None, blocksize, quant_type, dtype)
        launch._your_dequantize_nf4(A.contiguous().view(-1, 1), state, out)

    functional.dequantize_4bit = dequantize_4bit
    if DEVICE == "cuda":
        import bitsandbytes.backends.cuda.ops as operators

        operators._dequantize_4bit_impl = operator


def pytest_configure():
    machine.prepare()
    if os.environ["NF4_SUBSTITUTE"] == "ours":
        substitute()


def pytest_runtest_teardown(item):
    global launches
    item.user_properties.append(("launches", launches))
    launches = 0


def run(folder, who, report):
    """Run bitsandbytes' tests as they are ("bitsandbytes") or with the kernel ("ours").

    Returns (number passed, names failed, launches of the kernel).
    """
    path = [str(folder), str(machine.ROOT), str(Path(__file__).parent), *sys.path]
    variables = {
        "NF4_SUBSTITUTE": who,
        "BNB_TEST_DEVICE": DEVICE,
        "PYTHONPATH": os.pathsep.join(path),
    }
    command = ["-m", "pytest", "-p", Path(__file__).stem, "-n", "auto", "-q", "--junitxml", report]
    command += ["-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider", "-k", SELECTION]
    command += [folder / "tests" / name for name in FILES]
    done = machine.python(command, variables=variables, folder=folder, timeout=6 * 3600, check=False)
    assert report.exists(), done.out[-6000:] + done.err[-2000:]
    passed, failed, launched = 0, set(), 0
    for test in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in test}
        if outcomes & {"failure", "error"}:
            failed.add(f"{test.get('classname')}.{test.get('name')}")
        elif "skipped" not in outcomes:
            passed += 1
        launched += sum(int(found.get("value")) for found in test.iter("property"))
    return passed, failed, launched


@pytest.mark.long
@pytest.mark.timeout(0)
def test_nothing_fails_only_with_this_kernel(tmp_path):
    if "NF4_BITSANDBYTES" not in os.environ:
        pytest.skip("needs NF4_BITSANDBYTES, a clone of bitsandbytes at the installed version")
    folder = Path(os.environ["NF4_BITSANDBYTES"])

    theirs, ours = (run(folder, who, tmp_path / f"{who}.xml") for who in ("bitsandbytes", "ours"))
    assert ours[1] <= theirs[1], f"failed only with this kernel: {ours[1] - theirs[1]}"
    assert ours[0] > 0 and ours[2] > 0
    print(f"passed {ours[0]}, failed {len(ours[1])}; with bitsandbytes' kernel {theirs[0]}, {len(theirs[1])}")
