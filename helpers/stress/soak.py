"""Millions of launches over changing layers in one process: no growth of memory, no slowdown, no wrong bit.

`python -m helpers.stress.soak --launches 10000000` keeps a set of small layers in rotation and replaces one of them
every 2000 launches, so that plans are made, used and dropped all the time. New layers are compared to
the oracle on the GPU; time and memory are noted window by window, and only between windows is there a
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
from helpers.machine import environment
from helpers.oracle import reference
from helpers.record import results
from helpers.stress import compare_libraries

LAYERS = 64
EVERY = 2000  # launches between two replacements
SIZES = (1, 63, 640, 4097, 20480, 65536)
WARM_UP = 0.1  # share of the windows that are not compared: allocator and caches settle
SLOWER, GROWN = 1.10, 8 * 2**20  # last third against first: a factor, and bytes


def resident_bytes() -> int:
    """Memory of this process in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def fresh(number: int, device: str):
    """Layer `number`: sizes and dtypes in turn, random contents."""
    dtype = reference.DTYPES[number % 3]
    layer = compare_libraries.of_elements(device, SIZES[number % len(SIZES)], dtype)
    layer.weight.data.bitwise_xor_(number & 255)
    return layer


def wrong_bits(result, layer):
    """Whether a result differs from the oracle, as a tensor on the device: nothing waits for it."""
    expected = reference.dequantize(layer.weight, layer.weight.quant_state)
    bits = torch.int32 if expected.dtype == torch.float32 else torch.int16
    return (result.contiguous().view(bits) != expected.contiguous().view(bits)).any()


def run(launches: int, windows: int, device: str) -> dict:
    """Totals, and one row a window: us a call, bytes of host, allocated and reserved memory."""
    call = nf4_kernel.your_dequantize_nf4
    every = EVERY if device == "cuda" else 50
    layers = [fresh(number, device) for number in range(LAYERS if device == "cuda" else 6)]
    made, done, rows = len(layers), 0, []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for layer in layers:
        wrong += wrong_bits(call(layer), layer)
    bounds = [launches * (i + 1) // windows for i in range(windows)]
    with tqdm(total=launches, unit=" launches", unit_scale=True, mininterval=5, file=sys.stdout) as bar:
        for bound in bounds:
            first, seconds = done, 0.0
            while done < bound:
                count = min(every, bound - done)
                rotation = [layers[(done + i) % len(layers)] for i in range(count)]
                start = time.perf_counter()
                for layer in rotation:
                    call(layer)
                seconds += time.perf_counter() - start
                done += count
                layer = fresh(made, device)
                wrong += wrong_bits(call(layer), layer)
                wrong += wrong_bits(call(layer), layer)
                layers[made % len(layers)] = layer
                made += 1
            gc.collect()
            row = {
                "us": 1e6 * seconds / (done - first),
                "host": resident_bytes(),
                "allocated": 0,
                "reserved": 0,
            }
            if device == "cuda":
                torch.cuda.synchronize()
                row |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
            rows.append(row)
            bar.update(done - first)
    return {"launches": done, "layers": made, "wrong": int(wrong), "windows": rows}


def growth(windows: list[dict]) -> list[str]:
    """A sentence for each thing that grew from the first to the last third of the windows (medians)."""
    kept = windows[int(len(windows) * WARM_UP) :]
    third = max(1, len(kept) // 3)

    def medians(name):
        ends = kept[:third], kept[-third:]
        return [statistics.median(window[name] for window in end) for end in ends]

    found = []
    before, after = medians("us")
    if after > before * SLOWER:
        found.append(f"slower: {before:.2f} us a call at first, {after:.2f} us at last")
    for name, label, limit in (("host", "host memory", GROWN), ("allocated", "GPU memory", 2**20)):
        before, after = medians(name)
        if after - before > limit:
            found.append(f"{label} grew by {(after - before) / 2**20:.1f} MiB")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.stress.soak", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--launches", type=int, default=10_000_000)
    parser.add_argument("--windows", type=int, default=50)
    arguments = parser.parse_args(argv)
    environment.prepare()
    device = "cuda" if environment.has_gpu() else "cpu"
    start = time.perf_counter()
    data = run(arguments.launches, arguments.windows, device)
    data["seconds"] = round(time.perf_counter() - start, 1)
    data["grown"] = (
        growth(data["windows"]) if device == "cuda" else []
    )  # the interpreter's time is not its own
    first, last = data["windows"][0], data["windows"][-1]
    host, allocated = ([window[name] / 2**20 for window in (first, last)] for name in ("host", "allocated"))
    total = f"{data['launches']:,} launches, {data['layers']:,} layers"
    print(f"{total}, {data['wrong']} wrong, {data['seconds']} s")
    print(f"us a call {first['us']:.2f} -> {last['us']:.2f}, MiB of host {host[0]:.0f} -> {host[1]:.0f}, "
          f"of GPU {allocated[0]:.1f} -> {allocated[1]:.1f}")  # fmt: skip
    print("\n".join(data["grown"]) or "nothing grew")
    print(f"written: {results.write('soak', data)}")
    return 1 if data["wrong"] or data["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
