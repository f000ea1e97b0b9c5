"""Millions of launches over changing layers: no growth of memory, no slowdown, no wrong bit.

By hand on a GPU: pytest -m long tests/long/test_soak.py
"""

import gc
import os
import statistics
import time

import pytest
import torch

from helpers.nf4 import launch
from helpers.nf4.reference import default_device, dequantize, different
from states import DTYPES, random_state

GPU = default_device() == "cuda"
LAUNCHES, EVERY, LAYERS = (10_000_000, 2000, 64) if GPU else (120, 20, 6)  # EVERY: between replacements
WINDOWS = 50 if GPU else 3
SIZES = (1, 63, 640, 4097, 20480, 65536)
GROWN = {"host": 8 * 2**20, "allocated": 2**20}  # bytes, from the first to the last third
SLOWER = 1.10


def resident_bytes():
    """Memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.mark.long
@pytest.mark.timeout(0)
def test_nothing_grows(store):
    """64 layers in rotation; every 2000 launches another replaces one and is compared with the oracle. Time
    and memory are noted in 50 windows."""
    call, layers, windows, made, done = launch._your_dequantize_nf4, {}, [], 0, 0
    wrong = 0

    def replace_one():
        nonlocal made, wrong
        weight, state = random_state((SIZES[made % len(SIZES)], 1), DTYPES[made % 3], seed=made)
        expected = dequantize(weight, state)
        wrong += different(call(weight, state), expected) + different(call(weight, state), expected)
        layers[made % LAYERS] = weight, state
        made += 1

    for _ in range(LAYERS):
        replace_one()
    for window in range(WINDOWS):
        first, end, seconds = done, LAUNCHES * (window + 1) // WINDOWS, 0.0
        while done < end:
            rotation = [layers[i % LAYERS] for i in range(done, min(done + EVERY, end))]
            start = time.perf_counter()
            for layer in rotation:
                call(*layer)
            seconds += time.perf_counter() - start
            done += len(rotation)
            replace_one()
        gc.collect()
        if GPU:
            torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated() if GPU else 0
        windows.append(
            {"us": 1e6 * seconds / (done - first), "host": resident_bytes(), "allocated": allocated}
        )
    kept = windows[len(windows) // 10 :]  # allocator and caches settle first
    ends = kept[: len(kept) // 3], kept[-(len(kept) // 3) :]
    before, after = ({name: statistics.median(w[name] for w in end) for name in kept[0]} for end in ends)
    print(f"{done:,} launches, {made:,} layers, {wrong} wrong; first third {before}, last {after}")
    assert not wrong
    assert not GPU or all(after[name] - before[name] <= most for name, most in GROWN.items())
    assert not GPU or after["us"] <= SLOWER * before["us"]
    store("soak", {("launches", "ours"): done, ("layers", "ours"): made, ("wrong", "ours"): int(wrong)})
