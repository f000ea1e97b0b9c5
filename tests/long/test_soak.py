"""Millions of launches with changing layers: memory does not grow, and calls do not slow down.

The bits: test_fuzz.py. By hand on a GPU: pytest -m long tests/long/test_soak.py
"""

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from nf4_triton.core import launch_general
from states import DTYPES, random_state

LAUNCHES = int(os.environ.get("NF4_SOAK_LAUNCHES", 10_000_000))
LAYERS = 64
WINDOWS = 50
EVERY = min(2000, LAUNCHES // WINDOWS)  # launches between two new layers
SIZES = (1, 63, 640, 4097, 20480, 65536)


def new_layer(seed):
    """Return (weight, state)."""
    dtype = DTYPES[seed // len(SIZES) % len(DTYPES)]
    return random_state((SIZES[seed % len(SIZES)], 1), dtype, seed=seed)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(0)
def test_nothing_grows():
    """Call 64 layers in rotation and replace one every 2,000 launches. The test compares the lowest time
    and memory of the first third with those of the last third: other programs can only raise them."""
    call = launch_general.dequantize_weight
    layers = [new_layer(seed) for seed in range(LAYERS)]
    made = 0
    windows = []
    for _ in range(WINDOWS):
        seconds = 0.0
        for _ in range(LAUNCHES // WINDOWS // EVERY):
            start = time.perf_counter()
            for i in range(EVERY):
                call(*layers[i % LAYERS])
            seconds += time.perf_counter() - start
            layers[made % LAYERS] = new_layer(LAYERS + made)
            made += 1
        gc.collect()
        windows.append((seconds, resident_bytes(), torch.cuda.memory_allocated()))
    kept = windows[5:]  # allocator and caches settle first
    first = [min(values) for values in zip(*kept[:15], strict=True)]
    last = [min(values) for values in zip(*kept[-15:], strict=True)]
    print(f"{LAUNCHES:,} launches; seconds, host memory, GPU memory: first {first}, last {last}")
    assert last[0] <= 1.10 * first[0]
    assert last[1] - first[1] <= 8 * 2**20
    assert last[2] - first[2] <= 2**20
