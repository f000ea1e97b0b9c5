"""Try each proposal of for_unsloth.md on a copy of the installed Unsloth: bits, memory, times.

python docs/for_unsloth.py    (needs a GPU, Unsloth 2026.10.9, and pytest; takes about a minute)

Prints rows and stores them in results/. The installed package stays as it is.
"""

import concurrent.futures
import contextlib
import functools
import gc
import hashlib
import importlib.util
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import triton

DOCS = Path(__file__).resolve().parent
VERSION = "2026.10.9"  # the patches have its line numbers
TODAY, SECOND = "unsloth_today", "proposal 2"
PATCHES = {TODAY: [], "proposal 1": ["for_unsloth_1.patch"], SECOND: ["for_unsloth_2.patch"]}
TEST = "for_unsloth_test.py"  # of proposal 2
BUFFER = {"use_global_buffer": True}
HOST = {"until return: fresh": {}, "until return: one buffer": BUFFER, "until return: launcher off": {}}
GPU = {"GPU time: 65,536": 2**16, "GPU time: 4.2M": 2**22, "GPU time: 16.8M": 2**24}
SHOWN = ("until return: fresh", "until return: one buffer", "GPU time: 4.2M")  # in for_unsloth.md
ROUNDS = 20


# --- in the process of a copy ---


def start(folder):
    """Import the copy of Unsloth in this folder, and work there: Unsloth writes files."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    import unsloth

    assert Path(unsloth.__file__).is_relative_to(folder), unsloth.__file__


def quantized(rows, columns, dtype=torch.bfloat16, nested=True):
    """Return a random weight in NF4."""
    from bitsandbytes.nn import Params4bit

    data = torch.randn(rows, columns, dtype=dtype, device="cuda")
    return Params4bit(data, quant_type="nf4", compress_statistics=nested).cuda()


def call_of(weight, **how):
    """Return a function that dequantizes W.t(), as a backward pass does."""
    from unsloth.kernels.utils import fast_dequantize

    return functools.partial(fast_dequantize, weight.t(), weight.quant_state, **how)


@contextlib.contextmanager
def side_stream():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize()


def hooked():
    """Hook launches, as profilers do."""
    return mock.patch.object(triton.knobs.runtime.launch_enter_hook, "calls", [lambda *_: None])


def launcher_off():
    from unsloth.kernels import triton_launch

    return mock.patch.object(triton_launch, "_ENABLED", False)


def fingerprint(result):
    """Return a result's dtype, strides, and hash."""
    data = result.contiguous().view(torch.uint8).cpu().numpy()
    return str(result.dtype), result.stride(), hashlib.sha256(data).hexdigest()


def results():
    """Return the fingerprints of many calls' results."""
    from unsloth.kernels.utils import fast_dequantize

    torch.manual_seed(0)
    shapes = ((3, 50), (320, 64), (1000, 520))  # not of whole words, a small weight's tile, a large one's
    dtypes = (torch.float16, torch.bfloat16)
    places = (contextlib.nullcontext, torch.inference_mode, side_stream, hooked, launcher_off)
    found = []
    for shape, dtype, nested, place in itertools.product(shapes, dtypes, (True, False), places):
        weight = quantized(*shape, dtype, nested)
        with place():
            for form, how in itertools.product((weight, weight.t(), weight.data), ({}, BUFFER)):
                torch.full(shape, torch.nan, dtype=dtype, device="cuda")  # freed: likely the result's memory
                found.append(fingerprint(fast_dequantize(form, weight.quant_state, **how)))
    return found


def compiled():
    """Return the fingerprint of a product that torch.compile traced, in a list."""
    from unsloth.kernels.utils import fast_dequantize

    torch.manual_seed(0)
    weight = quantized(320, 64)
    state = weight.quant_state
    fast_dequantize(weight, state)
    product = torch.compile(lambda x: x @ fast_dequantize(weight, state).t())
    return [fingerprint(product(torch.eye(64, dtype=state.dtype, device="cuda")))]


def repeated():
    """Return how many calls of results() repeat a launch."""
    from unsloth.kernels import nf4, triton_launch, utils

    with mock.patch.object(nf4, "relaunch", wraps=nf4.relaunch) as relaunch:
        results()
    assert utils._USE_NF4_KERNELS and triton_launch._ENABLED, "an error turned it off"
    return relaunch.call_count


def tested():
    """Return whether proposal 2's test passes."""
    import pytest

    return pytest.main(["-q", "--tb=line", TEST]) == pytest.ExitCode.OK


def kept():
    """Return the bytes that stay after W.t() was dequantized into the one buffer, and W deleted."""
    counts = []
    for _ in range(2):  # the second time, what is allocated once is there
        weight = quantized(1024, 1024)
        call_of(weight, **BUFFER)()
        del weight
        gc.collect()
        counts.append(torch.cuda.memory_allocated())
    return counts[1] - counts[0]


@functools.cache
def host_call(case):
    return call_of(quantized(1024, 4096), **HOST[case])


def host_us(case, count=100):
    """Return the microseconds until a call returns."""
    call = host_call(case)
    with launcher_off() if "off" in case else contextlib.nullcontext():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        us = 1e6 * (time.perf_counter() - start) / count
        torch.cuda.synchronize()
    return us


@functools.cache
def graph_of(numel):
    """Return a graph of calls on weights that fill the L2 cache many times, and the calls."""
    count = min(2048, 440_000_000 // numel)
    calls = [call_of(quantized(64, numel // 64)) for _ in range(count)]
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _results = [call() for call in calls]  # each in memory of its own
    return graph, calls


def gpu_us(numel):
    """Return the GPU microseconds of a call."""
    graph, calls = graph_of(numel)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop) / len(calls)


def measured(case):
    return gpu_us(GPU[case]) if case in GPU else host_us(case)


# --- in the process that compares ---


def patched_copy(folder, patches):
    """Copy the installed package into a folder and insert the lines of patches; return the folder."""
    package = Path(importlib.util.find_spec("unsloth").origin).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / "unsloth", ignore=ignored, copy_function=shutil.copyfile)
    shutil.copy(DOCS / TEST, folder)
    for patch in patches:
        for part in (DOCS / patch).read_text().split("--- a/")[1:]:
            name, _, place, *added = part.splitlines()
            lines = (folder / name).read_text().splitlines()
            after = int(re.match(r"@@ -(\d+),0 ", place)[1])
            lines[after:after] = [line.removeprefix("+") for line in added]
            (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def at_once(pools, job, *arguments):
    """Return {name: what the job returned in its process}."""
    futures = {name: pool.submit(job, *arguments) for name, pool in pools.items()}
    return {name: future.result() for name, future in futures.items()}


def compare(pools):
    """Return what is wrong: other bits, or a test that does not tell proposal 2 from the others."""
    problems = []
    for job in (results, compiled):
        found = at_once(pools, job)
        for name, (number, bits) in itertools.product(pools, enumerate(found[TODAY])):
            if found[name][number] != bits:
                problems.append(f"{name}: other bits in call {number} of {job.__name__}()")
    for name, pool in pools.items():
        print(f"{name}, {TEST} (for {SECOND} alone):", flush=True)
        if pool.submit(tested).result() != (name == SECOND):
            problems.append(f"{TEST} must pass for {SECOND} alone")
    return problems


def measure(pools):
    """Yield the fields of rows. The copies take turns on the clock, in changing order."""
    jobs = (("launches repeated", repeated, "launches"), ("kept of a deleted weight", kept, "bytes"))
    for case, job, unit in jobs:
        for name, value in at_once(pools, job).items():
            yield "for_unsloth_more", case, name, unit, [value]
    order = list(pools)
    for case in (*HOST, *GPU):
        at_once(pools, measured, case)  # not timed
        us = {name: [] for name in pools}
        for _ in range(ROUNDS):
            for name in order:
                us[name].append(pools[name].submit(measured, case).result())
            order.reverse()
        for name in pools:
            yield "for_unsloth" if case in SHOWN else "for_unsloth_more", case, name, "us", us[name]


def main():
    sys.path.insert(0, str(DOCS.parent))
    from helpers.results import store
    from nf4_triton.environment import versions

    if (installed := versions(["unsloth"])["unsloth"]) != VERSION:
        sys.exit(f"Not tried: Unsloth {installed} is installed, expected {VERSION}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pools = {}
        for name, patches in PATCHES.items():
            copy = patched_copy(Path(folder).resolve() / name, patches)
            spawn = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
            pool = concurrent.futures.ProcessPoolExecutor(1, spawn, start, (copy,))
            pools[name] = stack.enter_context(pool)
        problems = compare(pools)
        rows = [store.Row(*fields) for fields in measure(pools)]
    for row in rows:
        print(f"{row.case:30} {row.contender:15} {row.median:10,.2f} {row.unit}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"the same bits; stored in {store.write('for_unsloth', rows)}")


if __name__ == "__main__":
    main()
