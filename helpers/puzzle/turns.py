"""This function and others, timed in turns; the section is a notebook cell."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from helpers.names import FUNCTIONS
from helpers.puzzle.layers import CONFIGS
from helpers.puzzle.protocol import (
    allocate_and_fill,
    baselines,
    kernel_grid,
    many_layers,
    mlp_dequantize,
    needed,
    seconds_of,
    wrong_elements,
)

# %% id="turns" call="times = attempt(time_all, your_dequantize_nf4)"
import numpy


def times_of(fx, layers, mlp, X):
    """Compare bits; return us until a call returns, us on the GPU (cold cache), s of 100 test rounds."""
    wrong, graph = wrong_elements(fx, layers[-1]), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        results = [fx(layer) for layer in layers]
    graph.replay()
    wrong += wrong_elements(lambda layer: results[-1], layers[-1])
    assert wrong == 0 or fx is allocate_and_fill, "wrong bits"
    us = 1e4 * seconds_of(lambda: fx(layers[0]), 100, wait=False)
    gpu_us = 1e5 * seconds_of(graph.replay, 10) / len(layers)
    return us, gpu_us, seconds_of(lambda: mlp_dequantize(X, mlp, fx), 100)


def time_all(candidate):
    """Let functions take five turns at the puzzle's sizes; print the medians, return all times."""
    functions = {"ours": candidate, "this kernel, kernel[grid]": kernel_grid}
    functions |= {name: one.fn for name, one in baselines().items()}
    functions["allocate and fill"] = allocate_and_fill
    times, works = {name: [] for name in functions}, [many_layers(size) for size in CONFIGS]
    for _ in range(5):
        for name in [*times]:
            try:
                assert not needed(name), f"needs {needed(name)}"
                times[name].append([times_of(functions[name], *work) for work in works])
            except Exception as error:
                print(f"{FUNCTIONS.get(name, name)}: not measured ({type(error).__name__}: {error})")
                del times[name]
    shapes = [f"{f'{config.intermediate}x{config.hidden}':>14}" for config in CONFIGS]
    print(f"{'us until return, us on GPU':28}", *shapes, f"{'s of 100 rounds':>18}")
    for name, turns in times.items():
        us = [f"{until:7.1f},{gpu:6.1f}" for until, gpu, _ in numpy.median(turns, 0)]
        print(f"{FUNCTIONS.get(name, name):28}", *us, f"{numpy.median(numpy.sum(turns, 1)[:, 2]):18.4f}")
    return times
