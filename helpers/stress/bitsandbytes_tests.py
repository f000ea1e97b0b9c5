"""bitsandbytes' own functional and Linear4bit 4-bit tests, with this kernel in place of its dequantization.

`python -m helpers bitsandbytes-tests [FOLDER] [pytest arguments]`. FOLDER is bitsandbytes' source, or any
folder that holds its `tests`; without one, the source distribution of the installed version is fetched into
build/. The tests run twice, at the same time and in several processes: as they are, and with the kernel
substituted; what fails in both is not this kernel's doing. This module is also the plugin of these processes:
it takes a share of the tests, substitutes in the second run, and counts the launches.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.machine import environment
from helpers.record import results

FILES = ("test_functional.py", "test_linear4bit.py", "test_ops.py", "test_autograd.py", "test_parametrize.py")
SELECTION = "(4bit or test_parametrize.py) and not bench"
OPTIONS = ("-q", "-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short", "-k", SELECTION)
RUNS = ("original", "substituted")
launches = {"functional": 0, "operator": 0}
outcomes = {"passed": 0, "failed": [], "skipped": 0}


def substitute() -> None:
    """bitsandbytes.functional.dequantize_4bit, and what its CUDA operators launch, become this kernel."""
    import bitsandbytes.functional as functional
    import torch

    from helpers.nf4 import kernel as nf4_kernel

    here = "cuda" if environment.has_gpu() else "cpu"
    original = functional.dequantize_4bit

    def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        if A.device.type != here:
            return original(A, quant_state, absmax, out, blocksize or 64, quant_type)
        if quant_state is None:
            if absmax is None or out is None:
                raise ValueError("dequantize_4bit needs absmax and out where there is no quant_state")
            quant_state = functional.QuantState(
                absmax, out.shape, dtype=out.dtype, blocksize=blocksize or 64, quant_type=quant_type
            )
        if not torch.compiler.is_compiling():  # a traced backward must not touch what is outside of it
            launches["functional"] += 1
        return nf4_kernel._your_dequantize_nf4(A, quant_state, out=out)

    def operator(A, absmax, blocksize, quant_type, dtype, out):
        state = SimpleNamespace(
            absmax=absmax, shape=out.shape, dtype=dtype, blocksize=blocksize, quant_type=quant_type
        )
        state.nested, state.state2, state.offset = False, None, None
        launches["operator"] += 1
        nf4_kernel._your_dequantize_nf4(A.contiguous().view(-1, 1), state, out=out)

    functional.dequantize_4bit = dequantize_4bit
    if here == "cuda":
        import bitsandbytes.backends.cuda.ops as operators

        operators._dequantize_4bit_impl = operator


def pytest_configure(config):
    environment.prepare()
    if os.environ["NF4_SUBSTITUTE"] == RUNS[1]:
        substitute()


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config, items):
    share, shares = map(int, os.environ["NF4_SHARE"].split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % shares != share])
    items[:] = items[share::shares]


def pytest_runtest_logreport(report):
    if report.failed:
        outcomes["failed"].append(report.nodeid)
    elif report.skipped:
        outcomes["skipped"] += 1
    elif report.when == "call":
        outcomes["passed"] += 1


def pytest_sessionfinish(session):
    report = {**outcomes, "failed": sorted(set(outcomes["failed"])), "launches": launches}
    Path(os.environ["NF4_REPORT"]).write_text(json.dumps(report), encoding="utf-8")


def start(folder: Path, arguments: list[str], run: str, share: str, report: Path) -> subprocess.Popen:
    """A pytest process over a share ("0/4") of bitsandbytes' tests; its output goes beside the report."""
    variables = {
        **os.environ,
        "NF4_SUBSTITUTE": run,
        "NF4_SHARE": share,
        "NF4_REPORT": str(report),
        "BNB_TEST_DEVICE": "cuda" if environment.has_gpu() else "cpu",
        "PYTHONPATH": os.pathsep.join([str(folder), str(environment.ROOT), *sys.path]),
    }
    files = [str(folder / "tests" / name) for name in FILES if (folder / "tests" / name).exists()]
    command = [sys.executable, "-m", "pytest", "-p", __name__, *OPTIONS, *files, *arguments]
    with open(f"{report}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT)


def merged(reports: list[Path]) -> dict:
    """The sum of several processes' reports."""
    rows = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    total = {name: sum(row[name] for row in rows) for name in ("passed", "skipped")}
    total["failed"] = sorted(name for row in rows for name in row["failed"])
    total["launches"] = {name: sum(row["launches"][name] for row in rows) for name in launches}
    return total


def source() -> Path | None:
    """The folder of bitsandbytes' source, fetched from the package registry; None where that fails."""
    version, build = environment.version_of("bitsandbytes"), environment.ROOT / "build"
    folder = build / f"bitsandbytes-{version}"
    if not (folder / "tests").exists():
        fetch = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "bitsandbytes"]
        command = [sys.executable, "-m", "pip", *fetch, f"bitsandbytes=={version}", "-d", str(build)]
        if subprocess.run(command).returncode:
            return None
        with tarfile.open(f"{folder}.tar.gz") as archive:
            archive.extractall(build)
    return folder


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of bitsandbytes' source (default: fetched)")
    arguments, others = parser.parse_known_args(argv)
    folder = (arguments.folder or source() or Path()).resolve()
    if not (folder / "tests" / "test_functional.py").exists():
        version = environment.version_of("bitsandbytes")
        print(f"no tests of bitsandbytes {version}: clone its repository at that tag and give its folder")
        return 2
    shares = max(1, (os.cpu_count() or 1) // 3)
    with tempfile.TemporaryDirectory() as scratch:
        reports = {run: [Path(scratch) / f"{run}{i}.json" for i in range(shares)] for run in RUNS}
        running = [
            start(folder, others, run, f"{i}/{shares}", report)
            for run in RUNS
            for i, report in enumerate(reports[run])
        ]
        for process in running:
            process.wait()
        logs = {
            run: [Path(f"{each}.log").read_text(encoding="utf-8") for each in reports[run]] for run in RUNS
        }
        if not all(report.exists() for run in RUNS for report in reports[run]):
            print("\n".join(log[-3000:] for run in RUNS for log in logs[run]))
            return 1
        original, substituted = (merged(reports[run]) for run in RUNS)
    new = sorted(set(substituted["failed"]) - set(original["failed"]))
    for name, row in (("as they are", original), ("with this kernel", substituted)):
        print(f"{name}: {row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped")
    print(f"launches of this kernel: {substituted['launches']}")
    if new:
        print(f"failed only with this kernel: {new}\n{''.join(log[-4000:] for log in logs['substituted'])}")
    data = {
        "bitsandbytes": environment.version_of("bitsandbytes"),
        "tests": folder.name,
        "selection": SELECTION,
        "original": original,
        "substituted": substituted,
        "failed_only_with_this_kernel": new,
    }
    print(f"written: {results.write('bitsandbytes_own', data)}")
    return 1 if new or not sum(substituted["launches"].values()) or not substituted["passed"] else 0
