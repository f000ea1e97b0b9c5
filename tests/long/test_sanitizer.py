"""NVIDIA's compute-sanitizer over the kernel's edge cases: memcheck, racecheck, initcheck, synccheck.

By hand on a GPU: pytest -m long tests/long/test_sanitizer.py, with compute-sanitizer on PATH, in
$COMPUTE_SANITIZER, or from `pip install nvidia-cuda-sanitizer-api`. This file as a program runs the cases.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from helpers import machine
from helpers.nf4 import kernel, launch
from helpers.nf4.reference import default_device, dequantize, same_bits
from states import random_state

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Ends inside a byte, a word, a block, a tile (2048 elements), a large tile (8192), and just behind each.
SIZES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 2047, 2048, 2049, 2055, 8191, 8193, 8200)
WAYS = ({}, {"asm": False}, {"card": "t4"}, {"small_up_to": 0}, {"small_up_to": 0, "int_bf16": True})
# Only this kernel is watched: torch's own would take minutes.
WATCHED = ("--kernel-name", "kns=_your_dequantize_nf4_kernel", "--error-exitcode", "9", "--print-limit", "5")


def cases():
    """(n, options of random_state): every size in fp16, other options at three."""
    for n, nested in itertools.product(SIZES, (True, False)):
        yield n, dict(dtype=torch.float16, nested=nested)
    for n in (1, 2055, 8193):
        yield from ((n, dict(dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
        yield n, dict(dtype=torch.float16, quant_type="fp4")
        yield from ((n, dict(dtype=torch.bfloat16, blocksize=blocksize)) for blocksize in (32, 128, 4096))
        yield n, dict(dtype=torch.bfloat16, blocksize2=1)


def on_gpu(x):
    """A copy in an allocation of exactly its size, so that one byte read or written beside it is an error."""
    return x.to(default_device(), copy=True) if isinstance(x, torch.Tensor) else x


def right(n, options):
    """Which of a case's launches are right. Contents and comparison are on the CPU, so that no other kernel
    needs to run."""
    packed, state = random_state((n,), **options, device="cpu")
    expected = dequantize(packed, state, flush_subnormal=default_device() == "cuda")
    for owner in filter(None, (state.state2, state)):
        vars(owner).update({name: on_gpu(x) for name, x in vars(owner).items()})
    weight, memory = on_gpu(packed), torch.empty(n + 1, dtype=state.dtype, device=default_device())
    shifted = torch.empty(len(packed) + 1, 1, dtype=torch.uint8, device=default_device())[1:]
    shifted.copy_(weight)
    # Twice (the second replays the launch), into an output from an odd element, from a weight at an odd byte.
    launches = ((weight, None), (weight, None), (weight, memory[1:]), (shifted, None))
    results = [launch._your_dequantize_nf4(source, state, out=out) for source, out in launches]
    return [same_bits(result.cpu(), expected) for result in results]


def run_cases():
    count, wrong = 0, []
    for way in WAYS if default_device() == "cuda" else WAYS[:1]:
        with kernel.force(**way):
            for n, options in cases():
                verdicts = right(n, options)
                wrong += [(way, n, options)] * verdicts.count(False)
                count += len(verdicts)
    print(f"{count} launches, {len(wrong)} wrong {wrong[:3] or ''}")
    return int(bool(wrong))


def run(*command):
    """A program over the cases, without torch's cache of memory; None: the cases alone."""
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(machine.ROOT)}
    return subprocess.run([*command, sys.executable, __file__], env=variables, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_the_cases_alone():
    done = run()
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.timeout(0)
def test_clean_under_every_tool(store):
    packaged = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/compute-sanitizer/compute-sanitizer")
    named = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    sanitizer, errors = named or next(packaged, None), {}
    if not sanitizer:
        pytest.skip("needs compute-sanitizer: pip install nvidia-cuda-sanitizer-api")
    assert run().returncode == 0  # and fills Triton's cache
    for tool in TOOLS:
        done = run(sanitizer, "--tool", tool, *WATCHED)
        found = re.findall(r"SUMMARY: (\d+) error", done.stdout) or re.findall(r"(\d+) hazards?", done.stdout)
        assert done.returncode == 0 and " 0 wrong" in done.stdout and found, done.stdout[-3000:] + done.stderr
        errors[tool, "ours"] = int(found[-1])
    assert not any(errors.values())
    store("sanitizer", errors)


if __name__ == "__main__":
    machine.prepare()
    sys.exit(run_cases())
