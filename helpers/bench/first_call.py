"""Measurements that need a fresh process: cold start and the number of compiles.

`python -m helpers.bench.first_call kernel|trivial|compiles` measures in this process and prints one JSON
line; `measure` starts such processes with a Triton cache of their own.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from helpers import machine
from helpers.bench.ceilings import trivial_kernel
from helpers.nf4 import kernel
from helpers.results.names import DTYPES
from helpers.results.store import Cold, Compiles, Starts

SHAPE = (1024, 4096)  # of the weight in the cold start


def _first_call(call) -> dict[str, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return {"first_call": time.perf_counter() - start}


def _kernel():
    """A call of the kernel on a weight made by hand: bitsandbytes' import takes longer than all the rest."""

    def random(dtype, *size):
        return torch.zeros(size, device="cuda").uniform_(0, 200).to(dtype)

    blocks, fp32 = SHAPE[0] * SHAPE[1] // 64, torch.float32
    second = dict(absmax=random(fp32, blocks // 256), code=random(fp32, 256), blocksize=256, dtype=fp32)
    first = dict(absmax=random(torch.uint8, blocks), offset=random(fp32), blocksize=64, nested=True)
    result = dict(shape=torch.Size(SHAPE), dtype=torch.bfloat16, quant_type="nf4")
    state = SimpleNamespace(**first, **result, state2=SimpleNamespace(**second))
    weight = random(torch.uint8, SHAPE[0] * SHAPE[1] // 2, 1)
    return lambda: kernel._your_dequantize_nf4(weight, state)


def _trivial():
    """A call of a kernel that stores one number: Triton's own share of a cold start."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    return lambda: trivial_kernel[(1,)](out)


def count_compiles() -> list[dict]:
    """Machine codes of the kernel that appear in the (initially empty) Triton cache over all layer shapes of
    Llama-3 8B and 70B, for each output dtype and state kind."""
    from helpers.bench.contenders import LLAMA_3, random_layers  # imports what a cold start does without

    name, cache = kernel._your_dequantize_nf4_kernel.fn.__name__, Path(os.environ["TRITON_CACHE_DIR"])
    rows, before = [], 0
    for nested in (True, False):
        for dtype in DTYPES:
            for shape in LLAMA_3:
                kernel.your_dequantize_nf4(*random_layers(shape, getattr(torch, dtype), 1, nested))
            torch.cuda.synchronize()
            after = len(list(cache.rglob(f"{name}*.cubin")))
            state = "nested" if nested else "flat"
            rows.append({"dtype": dtype, "state": state, "compiles": after - before})
            before = after
    return rows


JOBS = {
    "kernel": lambda: _first_call(_kernel()),
    "trivial": lambda: _first_call(_trivial()),
    "compiles": count_compiles,
}


def measure(job: str, cache: str):
    """One job's data from a new process with `cache` as Triton's cache folder. Raises machine.ChildFailed."""
    variables = {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": None}
    done = machine.python(["-m", "helpers.bench.first_call", job], variables=variables)
    return json.loads(done.out.splitlines()[-1])


def starts(job: str, repeats: int) -> Starts:
    """Cold starts of `job` ("kernel" or "trivial"), each repeat with a new empty cache folder; the "warm"
    process is the next one on the same folder."""
    empty, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="triton-cold-") as cache:
            for runs in (empty, warm):
                runs.append(measure(job, cache))
    return Starts(empty=empty, warm=warm)


def cold(bench) -> Cold:
    """First call with an empty Triton cache and in a new process with a warm one, after all imports."""
    repeats = bench.rounds(2, 1)
    jobs = ("kernel",) if bench.quick else ("kernel", "trivial")
    return Cold(**{job: starts(job, repeats) for job in bench.progress(jobs, "cold")})


def compiles(bench) -> Compiles:
    """`count_compiles` in a new process whose Triton cache starts empty."""
    with tempfile.TemporaryDirectory(prefix="triton-compiles-") as cache:
        return Compiles(rows=measure("compiles", cache))


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]]()))
