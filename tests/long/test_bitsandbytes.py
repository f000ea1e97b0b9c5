"""bitsandbytes' own functional and Linear4bit 4-bit tests, with this kernel as its dequantization.

By hand: clone bitsandbytes at the installed version's tag to build/bitsandbytes-VERSION (or set
NF4_BITSANDBYTES to any folder that holds its `tests`), then pytest -m long tests/long/test_bitsandbytes.py.
They run as they are and with the kernel; what fails in both is not this kernel's doing. This file is also the
plugin of those two runs: it substitutes in the second and counts.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from helpers import machine
from helpers.nf4.reference import default_device

FILES = ("test_functional.py", "test_linear4bit.py", "test_ops.py", "test_autograd.py", "test_parametrize.py")
SELECTION = "(4bit or test_parametrize.py) and not bench"
OPTIONS = ("-q", "-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short", "-k", SELECTION)
launches = {"functional": 0, "operator": 0}
outcomes = {"passed": 0, "failed": set(), "launches": 0}


def substitute():
    """bitsandbytes.functional.dequantize_4bit, and what its CUDA operators launch, become this kernel."""
    import bitsandbytes.functional as functional
    import torch

    from helpers.nf4 import launch

    original = functional.dequantize_4bit

    def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        if A.device.type != default_device() or quant_state is None:  # its own code then calls the operator
            return original(A, quant_state, absmax, out, blocksize or 64, quant_type)
        if not torch.compiler.is_compiling():  # a traced backward must not touch what is outside of it
            launches["functional"] += 1
        return launch._your_dequantize_nf4(A, quant_state, out=out)

    def operator(A, absmax, blocksize, quant_type, dtype, out):
        state = functional.QuantState(absmax, out.shape, None, blocksize, quant_type, dtype)
        launches["operator"] += 1
        launch._your_dequantize_nf4(A.contiguous().view(-1, 1), state, out=out)

    functional.dequantize_4bit = dequantize_4bit
    if default_device() == "cuda":
        import bitsandbytes.backends.cuda.ops as operators

        operators._dequantize_4bit_impl = operator


def pytest_configure(config):
    machine.prepare()
    if os.environ.get("NF4_SUBSTITUTE") == "ours":
        substitute()


def pytest_runtest_teardown(item):
    item.user_properties.append(("launches", sum(launches.values())))  # goes with the report to xdist's first
    launches.update(functional=0, operator=0)


def pytest_runtest_logreport(report):
    if report.failed:
        outcomes["failed"].add(report.nodeid)
    outcomes["passed"] += report.passed and report.when == "call"
    outcomes["launches"] += dict(report.user_properties).get("launches", 0)


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput") and "NF4_REPORT" in os.environ:  # not in xdist's processes
        Path(os.environ["NF4_REPORT"]).write_text(json.dumps(outcomes, default=sorted), encoding="utf-8")


def run(folder, files, who, report):
    """What bitsandbytes' tests say as they are ("bitsandbytes") or with the kernel ("ours")."""
    variables = {"NF4_SUBSTITUTE": who, "NF4_REPORT": str(report), "BNB_TEST_DEVICE": default_device()}
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(folder), str(machine.ROOT), str(Path(__file__).parent), *sys.path]
    )
    several = ["-n", str(max(1, (os.cpu_count() or 1) // 2))] if importlib.util.find_spec("xdist") else []
    command = ["-m", "pytest", "-p", Path(__file__).stem, *several, *OPTIONS, *files]
    done = machine.python(command, variables=variables, folder=folder, timeout=6 * 3600, check=False)
    assert report.exists(), done.out[-6000:] + done.err[-2000:]
    return json.loads(report.read_text(encoding="utf-8")), done.out


@pytest.mark.long
@pytest.mark.timeout(0)
def test_nothing_fails_only_with_this_kernel(tmp_path, store):
    version = importlib.metadata.version("bitsandbytes")
    folder = Path(os.environ.get("NF4_BITSANDBYTES", machine.ROOT / "build" / f"bitsandbytes-{version}"))
    files = [path for name in FILES if (path := folder / "tests" / name).exists()]
    if not files:
        pytest.skip(f"needs the tests of bitsandbytes {version} in {folder}")
    counts, failed = {}, {}
    for who in ("bitsandbytes", "ours"):
        found, log = run(folder, files, who, tmp_path / f"{who}.json")
        counts |= {("passed", who): found["passed"], ("failed", who): len(found["failed"])}
        failed[who] = set(found["failed"])
    new = sorted(failed["ours"] - failed["bitsandbytes"])
    assert not new, f"failed only with this kernel: {new}\n{log[-8000:]}"
    assert found["launches"] > 0 and counts["passed", "ours"] > 0
    store("bitsandbytes_tests", counts, note=f"bitsandbytes {version}; {found['launches']} launches")
