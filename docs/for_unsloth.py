"""Try each patch of for_unsloth.md on copies of two modules of the installed Unsloth: bits, memory, times.

python docs/for_unsloth.py    (needs an H100 or H200, Unsloth 2026.10.9, and pytest; takes about a minute)

One process has all copies, which take turns on the clock. "again" is a second copy without a patch: its
difference is noise. Prints rows and stores them in results/. The installed package stays as it is.
"""

import contextlib
import functools
import gc
import hashlib
import importlib.util
import itertools
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
TODAY = "unsloth_today"
PATCHES = ("tuning", "leak", "fresh")
TEST = "for_unsloth_test.py"
BUFFER = {"use_global_buffer": True}
HOST = {"until return: W.t()": (True, {}), "until return: one buffer": (False, BUFFER)}
GPU = {"GPU time: 65,536": 2**16, "GPU time: 4.2M": 2**22, "GPU time: 16.8M": 2**24}
ROUNDS = 20


# --- copies ---


@contextlib.contextmanager
def in_place(modules):
    """Replace these modules of unsloth.kernels for a while."""
    import unsloth.kernels

    def put(which):
        for name, module in which.items():
            sys.modules[f"unsloth.kernels.{name}"] = module
            setattr(unsloth.kernels, name, module)

    own = {name: sys.modules[f"unsloth.kernels.{name}"] for name in modules}
    put(modules)
    try:
        yield
    finally:
        put(own)


def patched(name, patch):
    """Return the source of a module of unsloth.kernels, with the lines that a patch adds to it."""
    lines = Path(importlib.util.find_spec(f"unsloth.kernels.{name}").origin).read_text().splitlines()
    text = (DOCS / f"for_unsloth_{patch}.patch").read_text() if patch in PATCHES else ""
    for part in text.split("--- a/")[1:]:
        file, _, place, *added = part.splitlines()
        if Path(file).stem == name:
            after = int(re.match(r"@@ -(\d+),0 ", place)[1])
            lines[after:after] = [line.removeprefix("+") for line in added]
    return "\n".join(lines) + "\n"


def copied(folder, patch):
    """Return copies of unsloth.kernels' nf4 and utils with a patch, {name: module}."""
    made = {}
    for name in ("nf4", "utils"):  # utils imports from nf4
        path = Path(folder, f"{name}_{patch}.py")
        path.write_text(patched(name, patch))
        spec = importlib.util.spec_from_file_location(f"unsloth.kernels.{name}", path)
        made[name] = importlib.util.module_from_spec(spec)
        with in_place(made):
            spec.loader.exec_module(made[name])
        # torch.compile imports a function's module by its name.
        made[name].__name__ = f"unsloth.kernels.{path.stem}"
        sys.modules[made[name].__name__] = made[name]
    return made


# --- bits and memory ---


def quantized(rows, columns, dtype=torch.bfloat16, nested=True):
    """Return a random weight in NF4."""
    from bitsandbytes.nn import Params4bit

    data = torch.randn(rows, columns, dtype=dtype, device="cuda")
    return Params4bit(data, quant_type="nf4", compress_statistics=nested).cuda()


def call_of(modules, weight, transposed=True, how=None):
    """Return a function that dequantizes W.t(), as a backward pass does, or W."""
    form = weight.t() if transposed else weight
    return functools.partial(modules["utils"].fast_dequantize, form, weight.quant_state, **(how or {}))


def results(modules):
    """Return dtype, strides, and hash of the results of many calls; the last is of a compiled product."""
    from unsloth.kernels import triton_launch

    fast_dequantize, hook = modules["utils"].fast_dequantize, triton.knobs.runtime.launch_enter_hook
    torch.manual_seed(0)
    shapes = ((3, 50), (320, 64), (1000, 520))  # not of whole words, a small weight's tile, a large one's
    places = (
        contextlib.nullcontext,
        torch.inference_mode,
        lambda: torch.cuda.stream(torch.cuda.Stream()),
        lambda: mock.patch.object(hook, "calls", [lambda *_: None]),  # as profilers do
        lambda: mock.patch.object(triton_launch, "_ENABLED", False),
    )
    found = []
    for shape, dtype, nested in itertools.product(shapes, (torch.half, torch.bfloat16), (True, False)):
        weight = quantized(*shape, dtype, nested)
        for place in places:
            torch.cuda.synchronize()
            with place():
                for form, how in itertools.product((weight, weight.t(), weight.data), ({}, BUFFER)):
                    torch.full(shape, torch.nan, dtype=dtype, device="cuda")  # freed: likely the result's
                    result = fast_dequantize(form, weight.quant_state, **how)
                    found.append((result.dtype, result.stride(), result.cpu().contiguous()))
    torch._dynamo.reset()
    product = torch.compile(lambda x: x @ fast_dequantize(weight, weight.quant_state).t())
    found.append((product(torch.eye(520, dtype=dtype, device="cuda")).cpu(),))
    return [(*facts, hashlib.sha256(data.view(torch.uint8).numpy()).hexdigest()) for *facts, data in found]


def kept(modules):
    """Return the bytes that stay after W.t() was dequantized into the one buffer, and W deleted."""
    counts = []
    for _ in range(2):  # the second time, what is allocated once is there
        weight = quantized(1024, 1024)
        call_of(modules, weight, how=BUFFER)()
        del weight
        gc.collect()
        counts.append(torch.cuda.memory_allocated())
    return counts[1] - counts[0]


def passes(modules, patch):
    """Return whether the tests of a patch pass with these modules."""
    import pytest

    sys.modules.pop(Path(TEST).stem, None)
    with in_place(modules):
        return pytest.main(["-q", "--tb=line", "-k", patch, TEST]) == pytest.ExitCode.OK


def check(copies):
    """Return what is wrong (other bits, a patch's tests that pass without it or fail with it), and rows."""
    problems, rows, expected = [], [], results(copies[TODAY])
    for name, modules in copies.items():
        nf4 = modules["nf4"]
        with mock.patch.object(nf4, "relaunch", wraps=nf4.relaunch) as relaunch:
            found = results(modules)
        different = [number for number, right in enumerate(expected) if found[number] != right]
        rows.append(("launches replayed", name, "launches", [relaunch.call_count]))
        rows.append(("kept of a deleted weight", name, "bytes", [kept(modules)]))
        passed = [patch for patch in PATCHES if passes(modules, patch)]
        if different or passed != [patch for patch in PATCHES if patch == name]:
            problems.append(f"{name}: other bits in calls {different}; passes the tests of {passed}")
        if not modules["utils"]._USE_NF4_KERNELS:
            problems.append(f"{name}: an error turned off Unsloth's kernel")
    return problems, rows


# --- times ---


def until_return(call, count=100):
    """Return the microseconds until a call returns."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    us = 1e6 * (time.perf_counter() - start) / count
    torch.cuda.synchronize()
    return us


def host_clock(modules, transposed, how):
    """Return a function that measures a call's us until it returns."""
    return functools.partial(until_return, call_of(modules, quantized(1024, 4096), transposed, how))


def backward_clock(modules):
    """Return a function that measures the us of 48 products of a backward pass of 128 tokens, dX = dY @ W."""
    calls = [call_of(modules, quantized(1024, 4096)) for _ in range(48)]
    dY = torch.randn(128, 1024, device="cuda").bfloat16()

    def products():
        for call in calls:
            dY @ call().t()
        torch.cuda.synchronize()

    return functools.partial(until_return, products, 3)


def gpu_clock(modules, numel):
    """Return a function that measures a call's us on the GPU, in a graph of calls that fill the L2 cache."""
    calls = [call_of(modules, quantized(64, numel // 64)) for _ in range(min(2048, 440_000_000 // numel))]
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _results = [call() for call in calls]  # each in memory of its own

    def gpu_us():
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / len(calls)

    return gpu_us


def measure(copies):
    """Yield the fields of rows. The copies take turns on the clock, in changing order."""
    clocks = {
        case: functools.partial(host_clock, transposed=form, how=how) for case, (form, how) in HOST.items()
    }
    clocks["48 products"] = backward_clock
    clocks |= {case: functools.partial(gpu_clock, numel=numel) for case, numel in GPU.items()}
    for case, clock_of in clocks.items():
        clock = {name: clock_of(modules) for name, modules in copies.items()}
        us = {name: [] for name in copies}
        for number in range(ROUNDS + 1):
            for name in list(copies)[:: 1 if number % 2 else -1]:
                us[name].append(clock[name]())
        for name, values in us.items():
            yield case, name, "us", values[1:]  # the first warms up


def main():
    sys.path.insert(0, str(DOCS.parent))
    from helpers.results import store
    from nf4_triton.environment import versions

    if (installed := versions(["unsloth"])["unsloth"]) != VERSION:
        sys.exit(f"Not tried: Unsloth {installed} is installed, expected {VERSION}")
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        sys.exit(f"Not tried: this GPU is of sm_{capability[0]}{capability[1]}, expected an H100 or H200")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # Unsloth writes files
        import unsloth  # noqa: F401

        shutil.copy(DOCS / TEST, folder)
        copies = {name: copied(folder, name) for name in (TODAY, "again", *PATCHES)}
        problems, more = check(copies)
        rows = [store.Row("for_unsloth_more", *fields) for fields in more]
        rows += [store.Row("for_unsloth", *fields) for fields in measure(copies)]
        os.chdir(DOCS)  # the driver's version is asked by a shell, which needs a folder
    for row in rows:
        print(f"{row.case:30} {row.contender:15} {row.median:12,.2f} {row.unit}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"the same bits; stored in {store.write('for_unsloth', rows)}")


if __name__ == "__main__":
    main()
