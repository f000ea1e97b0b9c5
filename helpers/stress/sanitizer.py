"""compute-sanitizer over the kernel's edge cases: memcheck, racecheck, initcheck, synccheck.

`python -m helpers sanitizer` runs the cases alone (they must be right, and fill Triton's cache), then under
every tool at once; exit status 0 when all are clean. Every tensor has an allocation of its own of exactly
its size, so that one byte read or written beside it is an error; results are compared on the CPU, so that no
other kernel needs to run. The summary is sanitizer.txt in this card's folder under results/.
"""

import argparse
import concurrent.futures
import datetime
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from helpers import machine
from helpers.nf4 import kernel as nf4_kernel
from helpers.nf4 import reference
from helpers.results import hashes
from helpers.stress.states import random_contents, state_of
from helpers.puzzle.protocol import DEVICE

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Ends inside a byte, a word, a block, a tile (2048 elements), a large tile (8192), and just behind each.
SIZES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 2047, 2048, 2049, 2055, 8191, 8193, 8200)
WAYS = ({}, {"asm": False}, {"card": "t4"}, {"small_up_to": 0}, {"small_up_to": 0, "int_bf16": True})
# Only this kernel is watched: torch's own are not the subject, and would take minutes.
WATCHED = ("--kernel-name", "kns=_your_dequantize_nf4_kernel", "--error-exitcode", "9", "--print-limit", "5")


def cases():
    """(n, options): every size in fp16, and the other options where all of it ends in the middle."""
    for n, nested in itertools.product(SIZES, (True, False)):
        yield n, dict(dtype=torch.float16, nested=nested)
    for n in (1, 2055, 8193):
        for dtype in (torch.bfloat16, torch.float32):
            yield n, dict(dtype=dtype)
        yield n, dict(dtype=torch.float16, quant_type="fp4")
        for blocksize in (32, 128, 4096):
            yield n, dict(dtype=torch.bfloat16, blocksize=blocksize)
        yield n, dict(dtype=torch.bfloat16, blocksize2=1)


def launched(n: int, options: dict) -> list[bool]:
    """Which of a case's launches are right."""
    packed, state = state_of((n,), *random_contents(n, "cpu", "cpu"), **options)
    expected = reference.dequantize(packed, state, flush_subnormal=DEVICE == "cuda")
    weight, state = state_of((n,), *random_contents(n, "cpu", DEVICE), **options)
    # Twice (the second launch is the plan's), into an output that begins at an odd element, and from a weight
    # that begins at an odd byte.
    memory = torch.empty(n + 1, dtype=state.dtype, device=DEVICE)
    shifted = torch.empty(len(packed) + 1, 1, dtype=torch.uint8, device=DEVICE)[1:]
    shifted.copy_(weight)
    launches = ((weight, None), (weight, None), (weight, memory[1:]), (shifted, None))
    results = [nf4_kernel._your_dequantize_nf4(source, state, out=out) for source, out in launches]
    return [reference.same_bits(result.cpu(), expected) for result in results]


def run_cases() -> int:
    """All cases in this process."""
    count, wrong = 0, []
    for way in WAYS if DEVICE == "cuda" else WAYS[:1]:
        with nf4_kernel.force(**way):
            for n, options in cases():
                right = launched(n, options)
                wrong += [(way, n, options)] * right.count(False)
                count += len(right)
    print(f"{count} launches of the edge cases, {len(wrong)} wrong {wrong[:3] if wrong else ''}")
    return int(bool(wrong))


def find_sanitizer() -> str | None:
    """compute-sanitizer: $COMPUTE_SANITIZER, on PATH, in NVIDIA's packages or in CUDA's folder."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [*Path(sysconfig.get_path("purelib"), "nvidia").glob("*/compute-sanitizer")]
    folders += [cuda / "bin", cuda / "compute-sanitizer"]
    named = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    return named or shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, folders)))


def summary(tool: str, status: int, log: str) -> str:
    """One line on a tool's run."""
    launches = re.findall(r".*launches of the edge cases.*", log) or ["did not finish"]
    errors = re.findall(r"^=* *(.*SUMMARY.*)$", log, re.M) or ["no summary"]
    return f"{tool}: exit {status}; {launches[0].strip()}; {errors[-1]}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", action="store_true", help="only run the cases, watched by nobody")
    parser.add_argument("tools", nargs="*", default=TOOLS, help=f"of {', '.join(TOOLS)} (default: all)")
    arguments = parser.parse_args(argv)
    if arguments.cases:
        return run_cases()
    sanitizer = find_sanitizer()
    install = "pip install nvidia-cuda-sanitizer-api, or set COMPUTE_SANITIZER"
    problem = machine.no_gpu() or (not sanitizer and f"compute-sanitizer was not found: {install}")
    if problem:
        print(problem)
        return 2
    command = [sys.executable, "-m", "helpers", "sanitizer", "--cases"]
    options = {"env": os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "cwd": machine.ROOT}
    run = functools.partial(subprocess.run, **options, capture_output=True, text=True)
    run(command, check=True)
    version = run([sanitizer, "--version"]).stdout.strip().splitlines()[-1]
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    lines = [f"compute-sanitizer over the kernel's edge cases, kernel {hashes.label()}, {now}", version]
    watched = [[sanitizer, "--tool", tool, *WATCHED, *command] for tool in arguments.tools]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(run, watched))
    clean = True
    for tool, done in zip(arguments.tools, runs, strict=True):
        log = done.stdout + done.stderr
        lines.append(summary(tool, done.returncode, log))
        if done.returncode or "did not finish" in lines[-1]:
            clean = False
            print("\n".join(log.splitlines()[:60]))
    folder = machine.result_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sanitizer.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return int(not clean)
