"""bitsandbytes' own 4-bit tests with this kernel in place of its dequantization (tests/stress/bitsandbytes_own.sh).

    python tests/stress/bitsandbytes_own.py FOLDER [pytest arguments]

FOLDER holds bitsandbytes' `tests` package. Its tests run twice, at the same time and in several processes: as
they are, and with the kernel substituted; what fails in both is not this kernel's doing. Also the plugin
of these processes: it takes a share of the tests, substitutes in the second run, and counts the launches.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FILES = ("test_functional.py", "test_linear4bit.py", "test_ops.py", "test_autograd.py", "test_parametrize.py")
SELECTION = "(4bit or test_parametrize.py) and not bench"
launches = {"functional": 0, "operator": 0}
outcomes = {"passed": 0, "failed": [], "skipped": 0}


def substitute():
    """bitsandbytes.functional.dequantize_4bit, and what its CUDA operators launch, become this kernel."""
    from types import SimpleNamespace

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.machine import environment

    environment.prepare()
    import bitsandbytes.functional as functional
    import torch

    kernel = nf4_kernel
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
        return kernel._your_dequantize_nf4(A, quant_state, out=out)

    def operator(A, absmax, blocksize, quant_type, dtype, out):
        state = SimpleNamespace(
            absmax=absmax, shape=out.shape, dtype=dtype, blocksize=blocksize, quant_type=quant_type
        )
        state.nested, state.state2, state.offset = False, None, None
        launches["operator"] += 1
        kernel._your_dequantize_nf4(A.contiguous().view(-1, 1), state, out=out)

    functional.dequantize_4bit = dequantize_4bit
    if here == "cuda":
        import bitsandbytes.backends.cuda.ops as operators

        operators._dequantize_4bit_impl = operator


def pytest_configure(config):
    if os.environ.get("NF4_SUBSTITUTE") == "1":
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
    Path(os.environ["NF4_OWN_REPORT"]).write_text(json.dumps(report), encoding="utf-8")


def start(folder, arguments, substituted, share, report):
    """A pytest process over a share ("0/4") of bitsandbytes' tests; its output goes beside the report."""
    from helpers.machine import environment

    device = "cuda" if environment.has_gpu() else "cpu"
    variables = {
        **os.environ,
        "NF4_SUBSTITUTE": str(int(substituted)),
        "NF4_SHARE": share,
        "NF4_OWN_REPORT": str(report),
        "BNB_TEST_DEVICE": device,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests"), *sys.path]),
    }
    files = [str(folder / "tests" / name) for name in FILES if (folder / "tests" / name).exists()]
    options = ["-q", "-o", "addopts=", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short"]
    command = [sys.executable, "-m", "pytest", "-p", "bitsandbytes_own", *options, "-k", SELECTION]
    with open(f"{report}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, *files, *arguments], cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT
        )


def merged(reports):
    """The sum of several processes' reports."""
    rows = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    total = {name: sum(row[name] for row in rows) for name in ("passed", "skipped")}
    total["failed"] = sorted(name for row in rows for name in row["failed"])
    total["launches"] = {name: sum(row["launches"][name] for row in rows) for name in launches}
    return total


def main(argv: list[str]) -> int:
    from helpers.machine import environment
    from helpers.record import results

    folder = Path(argv[0]).resolve()
    if not (folder / "tests" / "test_functional.py").exists():
        print(f"{folder}/tests/test_functional.py is missing: give the folder that holds bitsandbytes' tests")
        return 2
    shares = max(1, (os.cpu_count() or 1) // 3)
    with tempfile.TemporaryDirectory() as scratch:
        reports = {
            run: [Path(scratch) / f"{run}{i}.json" for i in range(shares)]
            for run in ("original", "substituted")
        }
        running = [
            start(folder, argv[1:], run == "substituted", f"{i}/{shares}", report)
            for run in reports
            for i, report in enumerate(reports[run])
        ]
        for process in running:
            process.wait()
        logs = {
            run: [Path(f"{report}.log").read_text(encoding="utf-8") for report in reports[run]]
            for run in reports
        }
        if not all(report.exists() for run in reports for report in reports[run]):
            print("\n".join(log[-3000:] for run in logs for log in logs[run]))
            return 1
        found = {run: merged(reports[run]) for run in reports}
    mine, theirs = found["substituted"], found["original"]
    new = sorted(set(mine["failed"]) - set(theirs["failed"]))
    data = {
        "bitsandbytes": environment.version_of("bitsandbytes"),
        "tests": folder.name,
        "selection": SELECTION,
        **found,
    }
    data["failed_only_with_this_kernel"] = new
    for name, found in (("as they are", theirs), ("with this kernel", mine)):
        print(f"{name}: {found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped")
    print(f"launches of this kernel: {mine['launches']}")
    if new:
        print(f"failed only with this kernel: {new}\n{''.join(log[-4000:] for log in logs['substituted'])}")
    print(f"written: {results.write('bitsandbytes_own', data)}")
    return 1 if new or not sum(mine["launches"].values()) or not mine["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
