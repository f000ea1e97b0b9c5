"""The puzzle's test, and the libraries it compares; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import contextlib
import functools
import os
import sys

import torch
import triton

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
from nf4_triton.core.settings import settings

# %% The libraries, and how cells run checks id="protocol-libraries" folded=true call="baselines();"
import gc
import inspect
import pathlib
import secrets
import statistics
import timeit

load_hook = getattr(triton.knobs.runtime, "kernel_load_end_hook", None)  # public; none in Triton 3.4
NEEDS_GPU = "" if ON_GPU else "an NVIDIA GPU"
NEEDS_HOOK = NEEDS_GPU or ("" if load_hook else "Triton 3.5 or newer, which says what it loads")
synchronize = torch.cuda.synchronize if ON_GPU else lambda: None

if "loaded_kernels" not in globals():  # when this cell runs again, the hook is there
    loaded_kernels = []  # (name, our settings' fields then, {ending: path}) of all that Triton loads

    def note(module, function, name, files, *more):
        paths = map(pathlib.Path, files.values())
        loaded_kernels.append((name, vars(settings()), {path.suffix: path for path in paths}))

    if load_hook:
        load_hook.add(note)


def imported(name):
    """Import a library; return its layer -> weight."""
    if name == "bitsandbytes":
        from bitsandbytes import functional

        own = inspect.unwrap(functional.dequantize_4bit)  # unsloth_zoo puts a wrapper in its place
        return lambda layer: own(layer.weight.data, layer.weight.quant_state)
    from unsloth.kernels import utils

    if name == "unsloth_buffered":  # as in Unsloth's training forward: every result in one buffer
        today = utils.fast_dequantize
        return lambda layer: today(layer.weight, layer.weight.quant_state, use_global_buffer=True)
    # classic: of the puzzle's time, three launches
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
    """Return what is missing to measure a library, "" for nothing."""
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
    if verdict in (True, False):
        print("passed" if verdict else "FAILED")
    return verdict


def wrong_elements(function, layer):
    """Count the elements whose bits differ from bitsandbytes'. The result is copied before these exist."""
    allocate_and_fill(layer).fill_(torch.nan)  # freed at once, so the result is likely to get this memory
    result = function(layer).clone(memory_format=torch.contiguous_format)
    expected = baselines()["bitsandbytes"](layer)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), "another dtype or shape"
    return int((result.view(torch.int16) != expected.view(torch.int16)).sum())


prepared = {}  # {layout: what prepare() returns}


def kernel_grid(layer):
    """Dequantize by this kernel and Triton's own kernel[grid]."""
    tensors, layout = read_nested(layer.weight, layer.weight.quant_state)
    if layout not in prepared:
        prepared[layout] = prepare(tensors, layout, None)
    grid, _, after, options = prepared[layout]
    result = torch.empty(layout[0], dtype=layout[1], device=DEVICE)
    _your_dequantize_nf4_kernel[(grid,)](tensors[0], result, *tensors[1:], *after, **options)
    return result


# %% id="protocol-test"
ROUNDS = (200 if os.environ.get("NF4_QUICK") else 1000) if ON_GPU else 2
SMALL = 65536  # bytes that may stay on the GPU; the smallest weight's absmax takes 262,144 when decoded


def allocated(what="current"):
    """Return the bytes of all tensors on the GPU, or their "peak"; 0 without a GPU."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"] if ON_GPU else 0


def allocate_and_fill(layer):
    """Return zeros of a weight's shape and dtype: allocate and write, and read nothing."""
    return torch.zeros(layer.out_features, layer.in_features, dtype=layer.compute_dtype, device=DEVICE)


def flip(layer):
    """Flip all bits of one byte of a weight, any of its bytes."""
    codes = layer.weight.data.view(-1)
    codes[secrets.randbelow(len(codes))] ^= 255


def reference(layer):
    """Return the weight to compare with: Unsloth's as in the puzzle, bitsandbytes' without a GPU."""
    return baselines().get("unsloth_today", baselines()["bitsandbytes"])(layer)


def mlp_dequantize(X, mlp, fx):
    """Run one timed round: dequantize and transpose three weights, with a synchronize after each."""
    a = fx(mlp.up_proj).t()
    synchronize()
    b = fx(mlp.gate_proj).t()
    synchronize()
    c = fx(mlp.down_proj).t()
    synchronize()
    return a, b, c


def watch(mlp, fx, change, others, held):
    """Run a round with change(layer) before each call. Copy each result, then compute what to compare with.

    Return the seconds of the calls. Add to `held` the bytes on the GPU before each call, without results.
    """
    seconds, results = 0, [*others]
    for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj):
        held.append(allocated() - sum(x.nbytes for x in results))
        change(layer)
        allocate_and_fill(layer).fill_(torch.nan)  # freed at once: the result is likely to get this memory
        synchronize()
        start = timeit.default_timer()
        results.append(fx(layer).t())
        synchronize()
        seconds += timeit.default_timer() - start
        assert_same(results[-1].clone(), reference(layer).t(), layer.compute_dtype)
    assert len({x.data_ptr() for x in results}) == len(results), "two results have the same address"
    return seconds


def time_rounds(X, mlp, fx, others):
    """Return the seconds of all rounds, and the most bytes held in two watched ones, without results.

    Not in the puzzle: two random rounds are watched. In one of them each weight changes before its call.
    """
    changed, unchanged = secrets.SystemRandom().sample(range(ROUNDS), 2)
    held = []
    start = timeit.default_timer()
    for i in range(ROUNDS):
        if i in (changed, unchanged):
            pause = timeit.default_timer()
            seconds = watch(mlp, fx, flip if i == changed else lambda layer: None, others, held)
            start += timeit.default_timer() - pause - seconds
        else:
            mlp_dequantize(X, mlp, fx)
    return timeit.default_timer() - start, max(held)


def assert_same(x, y, dtype):
    """Compare the dtype, then values and strides at torch's default tolerances."""
    assert type(x) is torch.Tensor, f"the result is a {type(x).__name__}, expected a plain tensor"
    assert x.dtype == dtype, f"dtype is {x.dtype}, expected {dtype}"
    torch.testing.assert_close(x, y, check_stride=True)


def check_and_time(config, fx):
    """Check every weight of an MLP, then return the seconds of ROUNDS rounds."""
    mlp, X = build(config)
    mlp(X)  # what torch and the libraries allocate once is not the candidate's
    reference(mlp.up_proj)
    gc.collect()
    before = allocated()
    for _ in range(2):
        assert_same(mlp_forward(X, mlp, fx), mlp(X), config.dtype)
        for layer in mlp.children():
            assert_correct_bnb(layer, config.dtype)
        results, expected = (mlp_dequantize(X, mlp, function) for function in (fx, reference))
        for x, y in zip(results, expected, strict=True):
            assert_same(x, y, config.dtype)
    seconds, held = time_rounds(X, mlp, fx, results)
    kept = held - before - sum(x.nbytes for x in expected)
    if kept > 0:
        print(f"{kept:,} bytes of GPU memory are kept between calls")
    assert kept <= SMALL, f"expected at most {SMALL:,} bytes"
    return seconds


def test_dequantize(dequantize_fx):
    """Check every weight, then return the seconds of ROUNDS rounds, summed over the three MLPs."""
    return sum(check_and_time(config, dequantize_fx) for config in CONFIGS)


# %% tags=["module-only"]
test_dequantize.__test__ = False  # the puzzle's name: not a test for pytest


# %% id="ratio" call="ratios = attempt(puzzles_line, your_dequantize_nf4)"
def puzzles_line(your_dequantize_nf4):
    """Run the puzzle's line five times over each Unsloth; return {its name: five ratios}."""
    ratios = {"unsloth_today": [], "unsloth_classic": []}
    for _ in range(5):
        for name, values in ratios.items():
            unsloth_dequantize = baselines().get(name)
            if unsloth_dequantize and (seconds := attempt(test_dequantize, unsloth_dequantize)):
                values.append(seconds / test_dequantize(your_dequantize_nf4))
    if not any(ratios.values()):
        test_dequantize(your_dequantize_nf4)
        print("all weights are correct")
    for name, values in ratios.items():
        if needs := needed(name) or ("" if values else f"a working {LABELS[name]}"):
            print(f"vs {LABELS[name]}: not measured (needs {needs})")
            values.clear()
        else:
            print(f"vs {LABELS[name]}: {shown(statistics.median(values))}, median of", *map(shown, values))
    return ratios
