"""Measurements that need a fresh process: cold start and the number of compiles.

`python -m helpers.measure.first_call kernel|trivial|compiles` measures in this process and prints one JSON line;
`measure(...)` starts such processes with a Triton cache of their own. The trivial kernel stores one number:
its first call is what Triton alone costs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (1024, 4096)  # of the layer in the cold start


class _Stopwatch:
    def __init__(self):
        self.seconds, self._last = {}, time.perf_counter()

    def lap(self, name: str):
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _first_calls(call, watch: _Stopwatch, synchronize) -> dict:
    watch.lap("prepare")
    call()
    synchronize()
    watch.lap("first_call")
    call()
    synchronize()
    watch.lap("second_call")
    return watch.seconds


def kernel_start() -> dict:
    """Seconds of each step up to the second call of `your_dequantize_nf4`, this process being fresh."""
    watch = _Stopwatch()
    import torch

    watch.lap("import_torch")
    import triton  # noqa: F401

    watch.lap("import_triton")
    import bitsandbytes  # noqa: F401

    watch.lap("import_bitsandbytes")
    from helpers.nf4 import kernel as nf4_kernel
    from helpers.oracle.layers import quantized_layer

    module = nf4_kernel
    watch.lap("load_kernel_module")
    layer = quantized_layer(SHAPE[1], SHAPE[0], torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    return _first_calls(lambda: module.your_dequantize_nf4(layer), watch, torch.cuda.synchronize)


def trivial_start() -> dict:
    """The same for a kernel that stores one number: Triton's own share of a cold start."""
    watch = _Stopwatch()
    import torch

    watch.lap("import_torch")
    import triton  # noqa: F401

    watch.lap("import_triton")
    from helpers.measure.ceilings import trivial_kernel

    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    return _first_calls(lambda: trivial_kernel[(1,)](out), watch, torch.cuda.synchronize)


def count_compiles() -> dict:
    """Compiles over all layer shapes of Llama-3 8B and 70B, for each output dtype and state kind.

    `compiles`: machine codes of this kernel that appeared in the (initially empty) Triton cache;
    `specializations`: entries in the jit function's own in-memory cache, None where this Triton hides it.
    """
    import torch

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.measure.workload import LAYERS, make_buffers

    module = nf4_kernel
    kernel = module._your_dequantize_nf4_kernel
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    shapes = sorted({shape for model in ("Llama-3 8B", "Llama-3 70B") for shape in LAYERS[model]})

    def seen() -> tuple[int, int | None]:
        known = getattr(kernel, "device_caches", None)
        entries = None if known is None else sum(len(entry[0]) for entry in known.values())
        return len(list(cache.rglob(f"{kernel.fn.__name__}*.cubin"))), entries

    rows, before = [], seen()
    for nested in (True, False):
        for dtype in (torch.float16, torch.bfloat16):
            for shape in shapes:
                buffers = make_buffers(shape, dtype, count=1, nested=nested)
                module._your_dequantize_nf4(buffers.weights[0], buffers.states[0])
            torch.cuda.synchronize()
            after = seen()
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "state": "nested" if nested else "flat",
                    "shapes": len(shapes),
                    "compiles": after[0] - before[0],
                    "specializations": None if after[1] is None else after[1] - before[1],
                }
            )
            before = after
    return {"rows": rows, "shapes": [list(shape) for shape in shapes]}


JOBS = {"kernel": kernel_start, "trivial": trivial_start, "compiles": count_compiles}


def measure(job: str, cache: str) -> dict:
    """One job's data from a new process with `cache` as Triton's cache folder.

    RuntimeError with the end of its error output when it failed.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "helpers.measure.first_call", job]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{job} in a fresh process failed: {done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"process": time.perf_counter() - start}


def starts(job: str, repeats: int, tick=lambda: None) -> dict:
    """Cold starts of `job`: {"empty": ..., "warm": ...}, each step's seconds for every repeat and its median.

    Each repeat gets a new empty cache folder; the "warm" process is the next one on the same folder.
    """
    runs: dict[str, list[dict]] = {"empty": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="triton-cold-") as cache:
            for state in runs:
                runs[state].append(measure(job, cache))
                tick()
    return {
        state: {
            "median": {step: statistics.median(run[step] for run in found) for step in found[0]},
            "runs": found,
        }
        for state, found in runs.items()
    }


def compiles() -> dict:
    """`count_compiles` in a new process whose Triton cache starts empty."""
    with tempfile.TemporaryDirectory(prefix="triton-compiles-") as cache:
        return measure("compiles", cache)


def main(argv: list[str] | None = None) -> int:
    (job,) = argv if argv is not None else sys.argv[1:]
    print(json.dumps(JOBS[job]()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
