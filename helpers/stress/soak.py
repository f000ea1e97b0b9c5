"""Millions of launches over changing layers in one process: no growth of memory, no slowdown, no wrong bit.

`python -m helpers soak --launches 10000000` keeps a set of small layers in rotation and replaces one of them
every 2000 launches, so that plans are made, used and dropped all the time. New layers are compared with the
oracle on the GPU; time and memory are noted window by window, and only between windows is there a
synchronization.
"""

import argparse
import gc
import os
import statistics
import sys
import time

import torch
from tqdm import tqdm

from helpers.nf4 import kernel as nf4_kernel
from helpers.nf4 import reference
from helpers.results import store as results
from helpers.stress.libraries import Layout, set_elements
from helpers.stress.states import mismatches
from helpers.puzzle.protocol import DEVICE

LAYERS = 64
EVERY = 2000  # launches between two replacements
SIZES = (1, 63, 640, 4097, 20480, 65536)
WARM_UP = 0.1  # share of the windows that are not compared: allocator and caches settle
SLOWER = 1.10  # last third against first
GROWN = {"host": 8 * 2**20, "allocated": 2**20}  # bytes


def resident_bytes() -> int:
    """Memory of this process in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def run(launches: int, windows: int) -> dict:
    """Totals, and one row a window: us a call, bytes of host and of allocated memory."""
    gpu, call = DEVICE == "cuda", nf4_kernel.your_dequantize_nf4
    every, count = (EVERY, LAYERS) if gpu else (50, 6)
    made, done, rows, layers = 0, 0, [], {}
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def replace_one():
        nonlocal made, wrong
        contents = set_elements(SIZES[made % len(SIZES)], reference.DTYPES[made % 3], seed=made)
        layers[made % count] = layer = Layout(before=contents).make(DEVICE)
        expected = reference.dequantize(layer.weight, layer.weight.quant_state)
        for _ in range(2):  # the first call makes the plan
            wrong += mismatches(call(layer), expected)
        made += 1

    for _ in range(count):
        replace_one()
    with tqdm(total=launches, unit=" launches", unit_scale=True, mininterval=5, file=sys.stdout) as bar:
        for window in range(windows):
            first, bound, seconds = done, launches * (window + 1) // windows, 0.0
            while done < bound:
                rotation = [layers[(done + i) % count] for i in range(min(every, bound - done))]
                start = time.perf_counter()
                for layer in rotation:
                    call(layer)
                seconds += time.perf_counter() - start
                done += len(rotation)
                replace_one()
            gc.collect()
            if gpu:
                torch.cuda.synchronize()
            rows.append({
                "us": 1e6 * seconds / (done - first),
                "host": resident_bytes(),
                "allocated": torch.cuda.memory_allocated() if gpu else 0,
            })  # fmt: skip
            bar.update(done - first)
    return {"launches": done, "layers": made, "wrong": int(wrong), "windows": rows}


def growth(windows: list[dict]) -> list[str]:
    """A sentence for each thing that grew from the first to the last third of the windows (medians)."""
    kept = windows[int(len(windows) * WARM_UP) :]
    third, sentences = max(1, len(kept) // 3), []
    for name, label in (("us", ""), ("host", "host memory"), ("allocated", "GPU memory")):
        before, after = (statistics.median(w[name] for w in end) for end in (kept[:third], kept[-third:]))
        if name == "us" and after > before * SLOWER:
            sentences.append(f"slower: {before:.2f} us a call at first, {after:.2f} us at last")
        elif name != "us" and after - before > GROWN[name]:
            sentences.append(f"{label} grew by {(after - before) / 2**20:.1f} MiB")
    return sentences


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--launches", type=int, default=10_000_000)
    parser.add_argument("--windows", type=int, default=50)
    arguments = parser.parse_args(argv)
    start = time.perf_counter()
    data = run(arguments.launches, arguments.windows)
    data["seconds"] = round(time.perf_counter() - start, 1)
    data["grown"] = growth(data["windows"]) if DEVICE == "cuda" else []  # the interpreter's own does vary
    print(f"{data['launches']:,} launches, {data['layers']:,} layers, {data['wrong']} wrong")
    print("us a call, bytes of memory:", data["windows"][0], "->", data["windows"][-1])
    print("\n".join(data["grown"]) or "nothing grew")
    print(f"written: {results.write('soak', data)}")
    return 1 if data["wrong"] or data["grown"] else 0
