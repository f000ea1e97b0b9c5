"""The puzzle's test, and the libraries it compares; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import contextlib
import functools
import os
import sys

import torch

from helpers.names import LABELS, shown
from helpers.puzzle.layers import (
    CONFIGS,
    DEVICE,
    ON_GPU,
    assert_correct_bnb,
    build,
    mlp_forward,
)
from nf4_triton.core import operators  # noqa: F401  it registers the operator
from nf4_triton.core.kernel import _your_dequantize_nf4_kernel
from nf4_triton.core.launch import prepare, read_nested

# %% The libraries, and how cells run checks id="protocol-libraries" folded=true call="baselines();"
import gc
import inspect
import secrets
import statistics
import timeit

NEEDS_GPU = "" if ON_GPU else "an NVIDIA GPU"
SMALL = 65536  # bytes that may stay on the GPU; the smallest weight's absmax takes 262,144 when decoded
synchronize = torch.cuda.synchronize if ON_GPU else lambda: None


def imported(name):
    """Import a library; return its function from a layer to a weight."""
    if name == "bitsandbytes":
        from bitsandbytes import functional

        own = inspect.unwrap(functional.dequantize_4bit)  # unsloth_zoo puts a wrapper in its place
        return lambda layer: own(layer.weight.data, layer.weight.quant_state)
    from unsloth.kernels import utils

    if name == "unsloth_buffered":  # as in Unsloth's training forward: every result in one buffer
        today = utils.fast_dequantize
        return lambda layer: today(layer.weight, layer.weight.quant_state, use_global_buffer=True)
    # classic: as when the puzzle was published, three launches
    own = utils.fast_dequantize if name == "unsloth_today" else utils._fast_dequantize_ctypes
    return lambda layer: own(layer.weight, layer.weight.quant_state)


@functools.cache
def baselines():
    """Import the libraries without banners, Unsloth last: it changes others. Return {name: function}."""
    found, no = {}, open(os.devnull, "w")  # stays open: the libraries' loggers keep it
    for name in [name for name in LABELS if name == "bitsandbytes" or ON_GPU and name != "ours"]:
        try:
            with contextlib.redirect_stdout(no), contextlib.redirect_stderr(no):
                found[name] = imported(name)
        except Exception as error:  # not installed, or a broken installation, which can raise anything
            print(f"{LABELS[name]}: {type(error).__name__}: {error}")
    return found


def needed(name):
    """Return what measuring a library still needs, "" if nothing."""
    for module, switch in (("utils", "_USE_NF4_KERNELS"), ("triton_launch", "_ENABLED")):
        off = getattr(sys.modules.get(f"unsloth.kernels.{module}"), switch, True) is False
        if off and name in ("unsloth_today", "unsloth_buffered"):
            return f"Unsloth's {module}.{switch}, which a variable or an error turned off: that slows it"
    return "" if name in baselines() else NEEDS_GPU or f"a working {LABELS[name]}"


def attempt(check, candidate, needs=""):
    """Return check(candidate); False after an error; None if it needs something, such as bitsandbytes."""
    if needs := needs or ("" if "bitsandbytes" in baselines() else "a working bitsandbytes"):
        return print(f"not measured (needs {needs})")
    try:
        verdict = check(candidate)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).strip()[:500]}")
        verdict = False
    if isinstance(verdict, bool):
        print("passed" if verdict else "FAILED")
    return verdict


def reference(layer):
    """Return the weight to compare with: Unsloth's as in the puzzle, bitsandbytes' without a GPU."""
    return baselines().get("unsloth_today", baselines()["bitsandbytes"])(layer)


def leave_weight(layer):
    """Fill memory with the weight and one random NaN, then free it: the next result likely gets it."""
    weight = reference(layer).view(-1)
    weight[secrets.randbelow(len(weight))] = torch.nan


def change_all(layer):
    """Change all codes and scales of a weight in place."""
    weight, state = layer.weight.data, layer.weight.quant_state
    tensors = read_nested(weight, state)[0] if state.nested else (weight, state.absmax)
    for tensor in tensors:
        tensor.random_(256) if tensor.dtype == torch.uint8 else tensor.uniform_(-1, 1)


def wrong_elements(function, layer, change=change_all):
    """Count the elements whose bits differ from bitsandbytes' after change(layer).

    The result's memory likely holds the weight from before. It is copied before the one to compare exists.
    """
    leave_weight(layer)
    change(layer)
    result = function(layer).clone(memory_format=torch.contiguous_format)
    expected = baselines()["bitsandbytes"](layer)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), "another dtype or shape"
    return int((result.view(torch.int16) != expected.view(torch.int16)).sum())


prepared = {}  # {layout: what prepare() returns}


def kernel_grid(layer):
    """Dequantize with this kernel, launched by Triton's own kernel[grid]."""
    tensors, layout = read_nested(layer.weight, layer.weight.quant_state)
    if layout not in prepared:
        prepared[layout] = prepare(tensors, layout, None)
    grid, _, after, options = prepared[layout]
    result = torch.empty(layout[0], dtype=layout[1], device=DEVICE)
    _your_dequantize_nf4_kernel[(grid,)](tensors[0], result, *tensors[1:], *after, **options)
    return result


def allocated(what="current"):
    """Return the bytes of all tensors on the GPU, or their "peak"; 0 without a GPU."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"] if ON_GPU else 0


# %% id="protocol-test"
ROUNDS = (200 if os.environ.get("NF4_QUICK") else 1000) if ON_GPU else 2


def assert_same(x, y):
    """Compare dtype, strides, and values, at torch's default tolerances."""
    assert type(x) is torch.Tensor, f"the result is a {type(x).__name__}, expected a plain tensor"
    torch.testing.assert_close(x, y, check_stride=True)


def mlp_dequantize(X, mlp, fx):
    """Run one round: dequantize and transpose three weights, with a synchronize after each."""
    weights = []
    for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj):
        weights.append(fx(layer).t())
        synchronize()
    return weights


def check_weights(X, mlp, fx, dtype):
    """Check an MLP's output and weights twice; return the weights from the second check."""
    for _ in range(2):
        assert_same(mlp_forward(X, mlp, fx), mlp(X))
        for layer in mlp.children():
            assert_correct_bnb(layer, dtype)
        results, expected = (mlp_dequantize(X, mlp, function) for function in (fx, reference))
        for x, y in zip(results, expected, strict=True):
            assert_same(x, y)
    return results


def time_rounds(X, mlp, fx, count):
    """Return the seconds that `count` rounds take."""
    start = timeit.default_timer()
    for _ in range(count):
        mlp_dequantize(X, mlp, fx)
    return timeit.default_timer() - start


def official(dequantize_fx):
    """Run the puzzle's test: check the weights of three MLPs; return the seconds that all rounds take."""
    elapsed = 0
    for config in CONFIGS:
        mlp, X = build(config)
        check_weights(X, mlp, dequantize_fx, config.dtype)
        elapsed += time_rounds(X, mlp, dequantize_fx, ROUNDS)
    return elapsed


# %% id="protocol-watch"
def flip(layer):
    """Flip all bits of one random byte of a weight."""
    codes = layer.weight.data.view(-1)
    codes[secrets.randbelow(len(codes))] ^= 255


def watch(mlp, fx, change, weights, held):
    """Run a round with change(layer) before each call. Copy each result, then compute what to compare with.

    Return the seconds of the calls. Add to `held` the bytes on the GPU before each call, without results.
    """
    seconds, results = 0, [*weights]
    for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj):
        held.append(allocated() - sum(x.nbytes for x in results))
        leave_weight(layer)
        change(layer)
        synchronize()
        start = timeit.default_timer()
        results.append(fx(layer).t())
        synchronize()
        seconds += timeit.default_timer() - start
        assert_same(results[-1].clone(), reference(layer).t())
    assert len({x.data_ptr() for x in results}) == len(results), "two results have the same address"
    return seconds


def time_watched(config, fx):
    """Time an MLP's rounds, and watch two random ones; in one, each weight changes before its call."""
    mlp, X = build(config)
    mlp(X), reference(mlp.up_proj)  # what torch and the libraries allocate once does not count
    gc.collect()
    before, held, seconds = allocated(), [], 0
    weights = check_weights(X, mlp, fx, config.dtype)
    changed, unchanged = secrets.SystemRandom().sample(range(ROUNDS), 2)
    changes = {changed: flip, unchanged: lambda layer: None}
    for number in range(ROUNDS):
        if number in changes:
            seconds += watch(mlp, fx, changes[number], weights, held)
        else:
            seconds += time_rounds(X, mlp, fx, 1)
    kept = max(held) - before
    assert kept <= SMALL, f"{kept:,} bytes of GPU memory are kept between calls, expected at most {SMALL:,}"
    return seconds


def test_dequantize(dequantize_fx):
    """Run the puzzle's test with two watched rounds per MLP; return the seconds that all rounds take."""
    return sum(time_watched(config, dequantize_fx) for config in CONFIGS)


# %% tags=["module-only"]
test_dequantize.__test__ = False  # the puzzle's name: not a test for pytest


# %% id="ratio" call="ratios = attempt(puzzles_line, your_dequantize_nf4)"
def puzzles_line(your_dequantize_nf4):
    """Run the puzzle's line over each Unsloth, once plain, five times watched; return the five ratios."""
    test_dequantize(your_dequantize_nf4)
    print("all weights are correct")
    ratios = {"unsloth_today": [], "unsloth_classic": []}
    for name, values in ratios.items():
        for test in [official] + 5 * [test_dequantize]:
            if name in baselines() and (seconds := attempt(test, baselines()[name])):
                values.append(seconds / test(your_dequantize_nf4))
        if needs := needed(name) or ("" if len(values) == 6 else f"a working {LABELS[name]}"):
            print(f"vs {LABELS[name]}: not measured (needs {needs})")
            values.clear()
        else:
            print(f"vs {LABELS[name]}, the plain test: {shown(values.pop(0))}")
            print(f"vs {LABELS[name]}: {shown(statistics.median(values))}, median of", *map(shown, values))
    return ratios
