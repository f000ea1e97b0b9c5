"""This function and others, timed in turns; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import importlib.util
import timeit

import torch
import triton

from helpers.names import LABELS, shown
from helpers.puzzle.layers import CONFIGS, many_layers
from helpers.puzzle.protocol import (
    NEEDS_GPU,  # noqa: F401  in the cell's call
    baselines,
    kernel_grid,
    mlp_dequantize,
    needed,
    synchronize,
    wrong_elements,
)
from nf4_triton.core.settings import force, settings


# %% id="turns" call="times = attempt(time_all, your_dequantize_nf4, NEEDS_GPU)"
import pandas

SIZES = "4.2M bf16", "16.8M fp16", "58.7M bf16"  # elements and dtype
COLUMNS = ["us until a call returns", "us on the GPU", "ms for 100 rounds"]


def times_of(fx, layers, mlp, X):
    """Compare bits. Return a call's host time (us), its GPU time (us, cold cache), and 100 rounds (ms)."""
    last = {}

    def each_once():
        in_graph = torch.cuda.is_current_stream_capturing()
        if in_graph not in last:  # a replay changes all scales, so a result from outside the graph is wrong
            layers[-1].weight.quant_state.absmax.add_(1)
        last[in_graph] = [fx(layer) for layer in layers][-1]

    gpu_us = 1e3 * triton.testing.do_bench_cudagraph(each_once) / len(layers)
    wrong = wrong_elements(lambda layer: last[True], layers[-1], change=lambda layer: None)
    assert wrong + wrong_elements(fx, layers[-1]) == 0, "wrong bits"
    us = 1e4 * timeit.timeit(lambda: fx(layers[0]), synchronize, number=100)
    rounds = timeit.timeit(lambda: mlp_dequantize(X, mlp, fx), synchronize, number=100)
    return us, gpu_us, 1e3 * rounds


def time_all(candidate):
    """Time functions in five turns at the puzzle's sizes. Return a row for each function, size, and turn."""
    ours = {"ours": {}, "again": {}, "no asm": {"asm": False}, "no hints": {"hints": False}}  # their settings
    functions = dict.fromkeys(ours, candidate) | {"this kernel, kernel[grid]": kernel_grid} | baselines()
    works, rows = [many_layers(config) for config in sorted(CONFIGS, key=lambda config: config.hidden)], []
    for turn in range(1, 6):
        for name in [*functions]:
            try:
                assert name not in baselines() or not needed(name), f"needs {needed(name)}"
                with force(**vars(settings()) | ours.get(name, {})):
                    for size, work in zip(SIZES, works, strict=True):
                        rows.append((name, size, turn, *times_of(functions[name], *work)))
            except Exception as error:
                if name in ours:
                    raise
                print(f"{LABELS.get(name, name)}: not measured ({type(error).__name__}: {error})")
                del functions[name]
    times = pandas.DataFrame(rows, columns=["function", "size", "turn", *COLUMNS])
    times = times[times["function"].isin(functions)].replace({"function": LABELS})
    print_times(times)
    return times


def print_times(times):
    """Print the medians of five turns, then 100 rounds over this kernel's: their median, and each turn."""
    medians = times.pivot_table(COLUMNS, "function", "size", aggfunc="median", sort=False)
    for column in COLUMNS:
        print(f"\n{column}", medians[column].to_string(float_format="{:#.3g}".format), sep="\n")
    rounds = times.pivot_table("ms for 100 rounds", "function", "turn", aggfunc="sum", sort=False)
    over = rounds / rounds.loc["this kernel"]
    over.insert(0, "median", over.median(axis=1))
    print("\n100 rounds over this kernel's", over.to_string(float_format=shown), sep="\n")


# %% The same as a picture id="picture" folded=true call="draw_times(times)"
def draw_times(times):
    """Draw the medians, this kernel's in blue. A line says so if there are none, or no matplotlib."""
    if type(times) is not pandas.DataFrame or not importlib.util.find_spec("matplotlib"):
        return print("no picture (needs section 4's times, and matplotlib)")
    from matplotlib import pyplot

    medians = times.pivot_table(COLUMNS[:2], "function", "size", aggfunc="median", sort=False)
    _, panels = pyplot.subplots(2, 3, figsize=(10, 7), sharey=True, layout="constrained")
    for (column, size), panel in zip(medians, panels.flat, strict=True):
        bars = panel.barh(medians.index, medians[column, size], color=["#0B63CE"] + 9 * ["#6E7781"])
        panel.bar_label(bars, fmt=" %.3g")
        panel.set(title=f"{column}\n{size}", xmargin=0.2, ylim=(len(medians) - 0.5, -0.5))
