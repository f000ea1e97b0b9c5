"""NVIDIA's compute-sanitizer over the kernel's edge cases: memcheck, racecheck, initcheck, synccheck.

By hand on a GPU with compute-sanitizer on PATH (`pip install nvidia-cuda-sanitizer-api` has it, too):
pytest -m long tests/long/test_sanitizer.py -n 4. This file as a program runs the cases.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from helpers import machine
from helpers.puzzle.layers import DEVICE
from nf4_triton.core import launch_general, settings
from nf4_triton.core.reference import same_bits
from states import WAYS, oracle, random_state

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Sizes that end inside a byte, a word, a block, a tile (1024, 2048, or 8192 elements), and after each.
SIZES = (1, 7, 8, 9, 63, 64, 65, 2047, 2048, 2055, 4095, 4097, 8191, 8193)
LAYOUTS = (
    dict(dtype=torch.bfloat16),
    dict(dtype=torch.float32, quant_type="fp4"),
    dict(dtype=torch.bfloat16, blocksize=32, blocksize2=1),
    dict(dtype=torch.bfloat16, blocksize=4096),
)
CASES = [(n, dict(dtype=torch.float16, nested=nested)) for n in SIZES for nested in (True, False)]
CASES += [(n, options) for n in (1, 2055, 2112, 8193) for options in LAYOUTS]  # 2112 is the puzzle's, too
# Only the two kernels are watched: torch's would take minutes. Both names contain "_dequantize_".
WATCHED = ("--kernel-name", "kns=_dequantize_", "--error-exitcode", "9", "--print-limit", "5")


def on_gpu(x):
    """Return a copy in an allocation of exactly its size: reading or writing one byte beside it is an
    error."""
    return x.to(DEVICE, copy=True) if isinstance(x, torch.Tensor) else x


def launch(n, options):
    """Launch four times. Contents and comparison are on the CPU, so that no other kernel needs to run."""
    packed, state = random_state((n,), **options, device="cpu")
    expected = oracle(packed, state, flush_subnormal=DEVICE == "cuda")
    for owner in (state, state.state2):
        if owner:
            for name, value in vars(owner).items():
                setattr(owner, name, on_gpu(value))
    weight = on_gpu(packed)
    odd_out = on_gpu(torch.empty(n + 1, dtype=state.dtype))[1:]
    odd_weight = on_gpu(torch.cat([packed[:1], packed]))[1:]
    for source, out in ((weight, None), (weight, None), (weight, odd_out), (odd_weight, None)):
        result = launch_general.dequantize_weight(source, state, out)
        assert same_bits(result.cpu(), expected), (n, options)


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("tool", TOOLS)
def test_no_errors(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        pytest.skip("needs compute-sanitizer on PATH: pip install nvidia-cuda-sanitizer-api")
    # Without torch's cache, each tensor has its own allocation.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sanitizer, "--tool", tool, *WATCHED, sys.executable, __file__]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    found = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert found == ["0"], done.stdout[-3000:]


if __name__ == "__main__":
    machine.prepare()
    for way in WAYS.values():
        with settings.force(**way):
            for case in CASES:
                launch(*case)
