"""Measurements that need a fresh process: cold start and the number of compiles.

`python -m helpers.measure.first_call kernel|trivial|compiles` measures in this process and prints one JSON
line; `measure` starts such processes with a Triton cache of their own.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from helpers.machine import child
from helpers.record.results import Cold, Compiles, Starts

SHAPE = (1024, 4096)  # of the weight in the cold start


def _first_calls(make) -> dict[str, float]:
    """Seconds of each step, this process being fresh, up to the second call of what `make()` returns."""
    seconds, last = {}, time.perf_counter()

    def lap(name: str):
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now

    import torch

    lap("import_torch")
    import triton  # noqa: F401

    lap("import_triton")
    call = make()
    torch.cuda.synchronize()
    lap("prepare")
    for name in ("first_call", "second_call"):
        call()
        torch.cuda.synchronize()
        lap(name)
    return seconds


def _kernel():
    """A call of the kernel on a weight made by hand: bitsandbytes' import takes longer than all the rest."""
    from types import SimpleNamespace

    import torch

    from helpers.nf4 import kernel

    def random(dtype, *size):
        return torch.zeros(size, device="cuda").uniform_(0, 200).to(dtype)

    blocks = SHAPE[0] * SHAPE[1] // 64
    state2 = SimpleNamespace(
        absmax=random(torch.float32, blocks // 256), code=random(torch.float32, 256), blocksize=256
    )
    state2.dtype = torch.float32
    state = SimpleNamespace(
        absmax=random(torch.uint8, blocks),
        shape=torch.Size(SHAPE),
        dtype=torch.bfloat16,
        quant_type="nf4",
        blocksize=64,
        nested=True,
        state2=state2,
        offset=random(torch.float32).reshape(()),
    )
    weight = random(torch.uint8, SHAPE[0] * SHAPE[1] // 2, 1)
    return lambda: kernel._your_dequantize_nf4(weight, state)


def _trivial():
    """A call of a kernel that stores one number: Triton's own share of a cold start."""
    import torch

    from helpers.measure.ceilings import trivial_kernel

    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    return lambda: trivial_kernel[(1,)](out)


def count_compiles() -> dict:
    """Compiles over all layer shapes of Llama-3 8B and 70B, for each output dtype and state kind.

    `compiles`: machine codes of this kernel that appeared in the (initially empty) Triton cache;
    `specializations`: entries in the jit function's own in-memory cache, None where this Triton hides it.
    """
    import torch

    from helpers.measure.workload import LLAMA_3, make_buffers
    from helpers.nf4 import kernel as module

    kernel, cache = module._your_dequantize_nf4_kernel, Path(os.environ["TRITON_CACHE_DIR"])

    def seen() -> tuple[int, int | None]:
        known = getattr(kernel, "device_caches", None)
        entries = None if known is None else sum(len(entry[0]) for entry in known.values())
        return len(list(cache.rglob(f"{kernel.fn.__name__}*.cubin"))), entries

    rows, before, shapes = [], seen(), sorted(set(LLAMA_3))
    for nested in (True, False):
        for dtype in (torch.float16, torch.bfloat16):
            for shape in shapes:
                module.your_dequantize_nf4(make_buffers(shape, dtype, 1, nested).layers[0])
            torch.cuda.synchronize()
            after = seen()
            row = {"dtype": str(dtype).removeprefix("torch."), "state": "nested" if nested else "flat"}
            row |= {"shapes": len(shapes), "compiles": after[0] - before[0]}
            rows.append(row | {"specializations": None if after[1] is None else after[1] - before[1]})
            before = after
    return {"rows": rows, "shapes": shapes}


JOBS = {
    "kernel": lambda: _first_calls(_kernel),
    "trivial": lambda: _first_calls(_trivial),
    "compiles": count_compiles,
}


def measure(job: str, cache: str) -> dict:
    """One job's data from a new process with `cache` as Triton's cache folder. Raises child.ChildFailed."""
    variables = {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": None}
    done = child.python(["-m", "helpers.measure.first_call", job], variables=variables)
    return json.loads(done.out.splitlines()[-1])


def starts(job: str, repeats: int, tick=lambda: None) -> Starts:
    """Cold starts of `job` ("kernel" or "trivial"), each repeat with a new empty cache folder; the "warm"
    process is the next one on the same folder."""
    found = Starts(empty=[], warm=[])
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="triton-cold-") as cache:
            for runs in (found.empty, found.warm):
                runs.append(measure(job, cache))
                tick()
    return found


def cold(bench) -> Cold:
    """First call with an empty Triton cache and in a new process with a warm one; imports apart."""
    repeats = bench.rounds(2, 1)
    with bench.bar((2 if bench.quick else 4) * repeats, "cold") as bar:
        kernel = starts("kernel", repeats, bar.update)
        return Cold(kernel=kernel, trivial=None if bench.quick else starts("trivial", repeats, bar.update))


def compiles(bench) -> Compiles:
    """`count_compiles` in a new process whose Triton cache starts empty."""
    import msgspec

    with tempfile.TemporaryDirectory(prefix="triton-compiles-") as cache:
        return msgspec.convert(measure("compiles", cache), Compiles)


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]]()))
