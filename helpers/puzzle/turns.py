"""This function and others, timed in turns; the section is a notebook cell."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import timeit

import torch
import triton

from helpers.names import LABELS
from helpers.puzzle.layers import CONFIGS, many_layers
from helpers.puzzle.protocol import (
    NEEDS_GPU,  # noqa: F401  in the cell's call
    allocate_and_fill,
    baselines,
    kernel_grid,
    mlp_dequantize,
    needed,
    synchronize,
    wrong_elements,
)


# %% id="turns" call="times = attempt(time_all, your_dequantize_nf4, NEEDS_GPU)"
def times_of(fx, layers, mlp, X):
    """Compare bits; return us until a call returns, us on the GPU (cold cache), s of 100 test rounds."""
    wrong, last = wrong_elements(fx, layers[-1]), {}

    def each_once():
        in_graph = torch.cuda.is_current_stream_capturing()
        if in_graph not in last:  # a replay changes the weight: what was launched past the graph is wrong
            layers[-1].weight.data[0].add_(1)
        last[in_graph] = [fx(layer) for layer in layers][-1]

    gpu_us = 1e3 * triton.testing.do_bench_cudagraph(each_once) / len(layers)
    wrong += wrong_elements(lambda layer: last[True], layers[-1])
    assert wrong == 0 or fx is allocate_and_fill, "wrong bits"
    us = 1e4 * timeit.timeit(lambda: fx(layers[0]), synchronize, number=100)
    return us, gpu_us, timeit.timeit(lambda: mlp_dequantize(X, mlp, fx), synchronize, number=100)


def time_all(candidate):
    """Let functions take five turns at the puzzle's sizes; print the medians, return all times."""
    functions = {"ours": candidate, "this kernel, kernel[grid]": kernel_grid}
    functions |= baselines() | {"allocate and fill": allocate_and_fill}
    works, times = [many_layers(size) for size in CONFIGS], {name: [] for name in functions}
    for _ in range(5):
        for name in [*times]:
            try:
                assert name not in baselines() or not needed(name), f"needs {needed(name)}"
                times[name].append([times_of(functions[name], *work) for work in works])
            except Exception as error:
                if name == "ours":
                    raise
                print(f"{LABELS.get(name, name)}: not measured ({type(error).__name__}: {error})")
                del times[name]
    for column, title in enumerate(("us until a call returns", "us on the GPU", "s of 100 rounds")):
        print(f"{title:27}  8192x2048   4096x1024  14336x4096")
        for name, turns in times.items():
            medians = torch.tensor(turns)[:, :, column].median(0).values
            print(f"{LABELS.get(name, name):26}", *(f"{value:#11.4g}" for value in medians))
    return times
