"""bitsandbytes' own functional and Linear4bit 4-bit tests, with this kernel in place of its dequantization.

`python -m helpers bitsandbytes-tests [FOLDER] [pytest arguments]`. FOLDER is bitsandbytes' source, or any
folder that holds its `tests` (default: build/bitsandbytes-VERSION, of the installed version). The tests run
twice, at the same time and each in several processes (pytest-xdist): as they are, and with the kernel
substituted; what fails in both is not this kernel's doing. This module is also the plugin of these processes:
it substitutes in the second run, and counts the launches.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

from helpers import machine
from helpers.results import store as results

FILES = ("test_functional.py", "test_linear4bit.py", "test_ops.py", "test_autograd.py", "test_parametrize.py")
SELECTION = "(4bit or test_parametrize.py) and not bench"
OPTIONS = ("-q", "-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short", "-k", SELECTION)
RUNS = ("original", "substituted")
LIMIT = 6 * 3600  # seconds
launches = {"functional": 0, "operator": 0}
outcomes = {"passed": 0, "failed": set(), "skipped": 0, "launches": dict(launches)}


def substitute() -> None:
    """bitsandbytes.functional.dequantize_4bit, and what its CUDA operators launch, become this kernel."""
    import bitsandbytes.functional as functional
    import torch

    from helpers.nf4 import kernel as nf4_kernel

    here = "cuda" if machine.has_gpu() else "cpu"
    original = functional.dequantize_4bit

    def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        if A.device.type != here or quant_state is None:  # its own code then calls the operator
            return original(A, quant_state, absmax, out, blocksize or 64, quant_type)
        if not torch.compiler.is_compiling():  # a traced backward must not touch what is outside of it
            launches["functional"] += 1
        return nf4_kernel._your_dequantize_nf4(A, quant_state, out=out)

    def operator(A, absmax, blocksize, quant_type, dtype, out):
        state = functional.QuantState(absmax, out.shape, None, blocksize, quant_type, dtype)
        launches["operator"] += 1
        nf4_kernel._your_dequantize_nf4(A.contiguous().view(-1, 1), state, out=out)

    functional.dequantize_4bit = dequantize_4bit
    if here == "cuda":
        import bitsandbytes.backends.cuda.ops as operators

        operators._dequantize_4bit_impl = operator


def pytest_configure(config):
    machine.prepare()
    if os.environ["NF4_SUBSTITUTE"] == RUNS[1]:
        substitute()


def pytest_runtest_teardown(item):
    item.user_properties.append(("launches", dict(launches)))  # goes with the report to the first process
    launches.update(functional=0, operator=0)


def pytest_runtest_logreport(report):
    if report.failed:
        outcomes["failed"].add(report.nodeid)
    elif report.skipped:
        outcomes["skipped"] += 1
    elif report.when == "call":
        outcomes["passed"] += 1
    for how, count in dict(report.user_properties).get("launches", {}).items():
        outcomes["launches"][how] += count


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):  # not in xdist's processes
        text = json.dumps(outcomes, default=sorted)  # the set
        Path(os.environ["NF4_REPORT"]).write_text(text, encoding="utf-8")


def run_tests(folder: Path, arguments: list[str], run: str, report: Path) -> str:
    """Run bitsandbytes' tests as they are, or with the kernel; returns what they print."""
    variables = {
        "NF4_SUBSTITUTE": run,
        "NF4_REPORT": str(report),
        "PET_MASTER_PORT": str(29501 + RUNS.index(run)),  # torchrun's, of which each run needs one
        "BNB_TEST_DEVICE": "cuda" if machine.has_gpu() else "cpu",
        "PYTHONPATH": os.pathsep.join([str(folder), str(machine.ROOT), *sys.path]),
    }
    files = [str(folder / "tests" / name) for name in FILES if (folder / "tests" / name).exists()]
    processes = str(max(1, (os.cpu_count() or 1) // 3))
    parallel = ["-n", processes] if importlib.util.find_spec("xdist") else []
    command = ["-m", "pytest", "-p", __name__, *parallel, *OPTIONS, *files, *arguments]
    done = machine.python(command, variables=variables, folder=folder, timeout=LIMIT, check=False)
    return done.out + done.err


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    version = machine.version_of("bitsandbytes")
    default = machine.ROOT / "build" / f"bitsandbytes-{version}"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="of bitsandbytes' source")
    arguments, others = parser.parse_known_args(argv)
    folder = arguments.folder.resolve()
    if not (folder / "tests" / "test_functional.py").exists():
        print(f"no tests of bitsandbytes {version}: clone its repository at that tag to {folder}")
        return 2
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor() as pool:
        reports = [Path(scratch) / f"{run}.json" for run in RUNS]
        logs = list(pool.map(lambda *which: run_tests(folder, others, *which), RUNS, reports))
        if not all(report.exists() for report in reports):
            print("\n".join(log[-6000:] for log in logs))
            return 1
        original, substituted = (json.loads(report.read_text(encoding="utf-8")) for report in reports)
    new = sorted(set(substituted["failed"]) - set(original["failed"]))
    for name, row in (("as they are", original), ("with this kernel", substituted)):
        print(f"{name}: {row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped")
    print(f"launches of this kernel: {substituted['launches']}")
    if new:
        print(f"failed only with this kernel: {new}\n{logs[1][-8000:]}")
    data = {"bitsandbytes": version, "tests": folder.name, "selection": SELECTION}
    data |= {"original": original, "substituted": substituted, "failed_only_with_this_kernel": new}
    print(f"written: {results.write('bitsandbytes_own', data)}")
    return int(bool(new) or not sum(substituted["launches"].values()) or not substituted["passed"])
