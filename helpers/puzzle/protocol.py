"""The puzzle's test, and the libraries it compares; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import collections
import os
import sys

import torch

from helpers.names import LABELS, shown
from helpers.puzzle.layers import (
    CONFIGS,
    ON_GPU,
    assert_correct_bnb,
    build,
    layers_of,
    mlp_forward,
)
from nf4_triton import tracing  # noqa: F401  it registers the operator
from nf4_triton.kernel import _your_dequantize_nf4_kernel
from nf4_triton.launch import prepare, read

# %% The libraries, and how cells run checks id="protocol-libraries" folded=true call="import_libraries()"
import contextlib
import functools
import inspect
import io
import itertools
import math
import secrets
import statistics
from time import perf_counter  # bound here: replacing time.perf_counter later changes nothing
from unittest import mock

NEEDS_GPU = "an NVIDIA GPU"
ROUNDS = (200 if os.environ.get("NF4_QUICK") else 1000) if ON_GPU else 1
synchronize = torch.cuda.synchronize if ON_GPU else lambda: None
SLOWS_UNSLOTH = ("UNSLOTH_TRITON_FAST_LAUNCH", "UNSLOTH_BNB_TRITON")  # 0: no launcher, no kernel of its own
Baseline = collections.namedtuple("Baseline", "fn reason")  # reason: what is missing if fn is None


def load(name, loader, needs=""):
    """Import a library without its banners; return its Baseline. needs: what is missing already."""
    if needs:
        return Baseline(None, needs)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return Baseline(loader(), "")
    except Exception as error:  # not installed, or a broken installation, which can raise anything
        return Baseline(None, f"a working {LABELS[name]}: {type(error).__name__}: {error}")


def own_dequantize_4bit():
    """Return bitsandbytes' own function: unsloth_zoo puts a wrapper in its place."""
    from bitsandbytes import functional

    own = inspect.unwrap(functional.dequantize_4bit)
    if own.__module__ != functional.__name__:
        raise RuntimeError(f"{own.__module__} replaced bitsandbytes' dequantize_4bit")
    return own


def own_libraries():
    """Inside this block PEFT calls bitsandbytes' own function, not Unsloth's wrapper."""
    return mock.patch("bitsandbytes.functional.dequantize_4bit", own_dequantize_4bit())


def load_bitsandbytes():
    own = own_dequantize_4bit()
    return lambda layer: own(layer.weight.data, layer.weight.quant_state)


def load_peft():
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight


def load_unsloth_classic():  # the puzzle's baseline when it was published: three launches
    from unsloth.kernels.utils import _fast_dequantize_ctypes

    return lambda layer: _fast_dequantize_ctypes(layer.weight, layer.weight.quant_state, None, False)


def load_unsloth(**options):
    from unsloth.kernels.utils import fast_dequantize

    return lambda layer: fast_dequantize(layer.weight, layer.weight.quant_state, **options)


@functools.cache
def baselines():
    """Return {name: Baseline} of what the kernel is compared with. The first call imports the libraries."""
    classic = today = "" if ON_GPU else NEEDS_GPU
    for variable in SLOWS_UNSLOTH:
        if variable in os.environ:
            today = f"{variable} unset: it slows Unsloth"
    # As Unsloth's training forward calls it: every result in one buffer.
    one_buffer = functools.partial(load_unsloth, use_global_buffer=True)
    known = {
        "bitsandbytes": load("bitsandbytes", load_bitsandbytes),  # before Unsloth changes it
        "peft": load("peft", load_peft),
        "unsloth_classic": load("unsloth_classic", load_unsloth_classic, classic),
        "unsloth_today": load("unsloth_today", load_unsloth, today),
        "unsloth_buffered": load("unsloth_buffered", one_buffer, today),
    }
    launcher_at_import()
    return known


def import_libraries():
    """Import what the kernel is compared with; print what is missing."""
    for name, one in baselines().items():
        print(f"{LABELS[name]}: {f'not measured (needs {one.reason})' if one.reason else 'imported'}")


def unsloths_launcher():
    """Return whether Unsloth's launcher is on, and how many launches of its kernel it keeps."""
    launches, nf4 = (sys.modules.get(f"unsloth.kernels.{name}") for name in ("triton_launch", "nf4"))
    try:
        return launches._ENABLED, sum(key[0] is nf4._nf4_dequant_kernel for key in launches._CACHE)
    except AttributeError:  # another version
        return None, None


@functools.cache
def launcher_at_import():
    """Return unsloths_launcher() of the time when the libraries were imported."""
    return unsloths_launcher()


def needed(name):
    """Return what is missing to measure a contender, "" for nothing."""
    (before, _), (now, _) = launcher_at_import(), unsloths_launcher()
    if name in ("unsloth_today", "unsloth_buffered") and before and not now:
        return "Unsloth's launcher: after an error it went off, which slows Unsloth"
    return baselines()[name].reason if name in baselines() else ""


def reference(layer):
    """Return the weight to compare with: Unsloth's as in the puzzle, bitsandbytes' without a GPU."""
    return (baselines()["unsloth_today"].fn or baselines()["bitsandbytes"].fn)(layer)


def attempt(check, candidate, gpu=True):
    """Return check(candidate). If something is missing, say so and return None; after an error, False.

    gpu: whether the check needs one.
    """
    needs = NEEDS_GPU if gpu and not ON_GPU else baselines()["bitsandbytes"].reason
    if needs:
        print(f"not measured (needs {needs})")
        return None
    try:
        verdict = check(candidate)
    except ImportError as error:  # of a package that is missing, or whose first import was interrupted
        print(f"not measured ({error}): restart the runtime and run all cells")
        return None
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).strip()[:500]}")
        verdict = False
    if verdict in (True, False):
        print("passed" if verdict else "FAILED")
    return verdict


def wrong_elements(function, layer):
    """Count the elements whose bits differ from bitsandbytes'."""
    expected = baselines()["bitsandbytes"].fn(layer)
    torch.full_like(expected, math.nan)  # freed at once, so the result is likely to get this memory
    result = function(layer).contiguous()
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), "another dtype or shape"
    return int((result.view(torch.int16) != expected.view(torch.int16)).sum())


# %% id="protocol-test"
def flip(mlp):
    """Flip all bits of one byte of each weight, any of its bytes."""
    for layer in layers_of(mlp):
        codes = layer.weight.data.view(-1)
        codes[secrets.randbelow(len(codes))] ^= 255


def mlp_dequantize(X, mlp, fx):
    """Run one timed round: dequantize and transpose three weights, with a synchronize after each."""
    a = fx(mlp.up_proj).t()
    synchronize()
    b = fx(mlp.gate_proj).t()
    synchronize()
    c = fx(mlp.down_proj).t()
    synchronize()
    return a, b, c


def time_rounds(X, mlp, fx):
    """Return the seconds of ROUNDS rounds, and the results of one of them, drawn at random."""
    chosen = secrets.randbelow(ROUNDS)
    start = perf_counter()
    for i in range(ROUNDS):
        if i == chosen:  # not in the puzzle: the weights change, and this round's results are kept
            flip(mlp)
            changed = mlp_dequantize(X, mlp, fx)
        else:
            mlp_dequantize(X, mlp, fx)
    return perf_counter() - start, changed


def assert_same(x, y, dtype):
    """Compare the dtype, then values and strides at torch's default tolerances."""
    assert type(x) is torch.Tensor, f"the result is a {type(x).__name__}, expected a plain tensor"
    assert x.dtype == dtype, f"dtype is {x.dtype}, expected {dtype}"
    torch.testing.assert_close(x, y, check_stride=True)


def test_dequantize(dequantize_fx):
    """Check every weight, then return the seconds of ROUNDS rounds, summed over the three MLPs."""
    elapsed = 0
    for config in CONFIGS:
        mlp, X = build(config)
        for _ in range(2):
            assert_same(mlp_forward(X, mlp, dequantize_fx), mlp(X), config.dtype)
            for layer in layers_of(mlp):
                assert_correct_bnb(layer, config.dtype)
            results, expected = (mlp_dequantize(X, mlp, fx) for fx in (dequantize_fx, reference))
            for x, y in zip(results, expected, strict=True):
                assert_same(x, y, config.dtype)
        seconds, changed = time_rounds(X, mlp, dequantize_fx)
        elapsed += seconds
        for x, y in zip(changed, mlp_dequantize(X, mlp, reference), strict=True):
            assert_same(x, y, config.dtype)
        addresses = {x.data_ptr() for x in (*results, *changed)}
        assert len(addresses) == 6, "two results have the same address"
    return elapsed


# %% tags=["module-only"]
test_dequantize.__test__ = False  # the puzzle's name: not a test for pytest


# %% id="ratio" call="ratios = attempt(puzzles_line, your_dequantize_nf4, gpu=False)"
def puzzles_line(your_dequantize_nf4):
    """Run the puzzle's line five times over each Unsloth; return {its name: five ratios}."""
    ratios = {"unsloth_today": [], "unsloth_classic": []}
    for _ in range(5):
        for name, values in ratios.items():
            if unsloth_dequantize := baselines()[name].fn:
                values.append(test_dequantize(unsloth_dequantize) / test_dequantize(your_dequantize_nf4))
    if not any(ratios.values()):
        test_dequantize(your_dequantize_nf4)
        print(f"all weights are correct; not timed (needs {needed('unsloth_classic')})")
        return None
    for name, values in ratios.items():
        if needs := needed(name):
            print(f"vs {LABELS[name]}: not measured (needs {needs})")
            values.clear()
        else:
            texts = [shown(value) for value in (statistics.median(values), *sorted(values))]
            print(f"vs {LABELS[name]}: median {texts[0]} of {', '.join(texts[1:])}")
    on, count = unsloths_launcher()
    how = {True: "on", False: "OFF", None: "unknown to this cell"}[on]
    print(f"Unsloth's launcher is {how}; launches of its kernel _nf4_dequant_kernel that it keeps: {count}")
    return ratios


# %% Contenders in turns id="turns" folded=true call="seconds = attempt(chart, your_dequantize_nf4)"
def by_kernel_grid(layer, known):
    """Allocate and call kernel[grid], without checks. known: {layout: what else the kernel takes}."""
    tensors, layout = read(layer.weight.data, layer.weight.quant_state)
    (weight, *scales), (shape, dtype, *_) = tensors, layout
    result = torch.empty(shape, dtype=dtype, device=weight.device)
    if layout not in known:
        grid, arguments, options = prepare(tensors, layout, result)
        known[layout] = (grid,), arguments[6:], options
    grid, rest, options = known[layout]
    _your_dequantize_nf4_kernel[grid](weight, result, *scales, *rest, **options)
    return result


def launch_forms(candidate):
    """Return the candidate as "ours" and, on a GPU, our kernel under Triton's kernel[grid]."""
    ordinary = {"ordinary": functools.partial(by_kernel_grid, known={})} if ON_GPU else {}
    return {"ours": candidate} | ordinary


def checked_seconds(X, mlp, fx, dtype):
    """Return the seconds of ROUNDS rounds. All that is left of the random one is checked, too."""
    for layer in layers_of(mlp):  # one by one: all results may be in one buffer
        assert_same(fx(layer), reference(layer), dtype)
    seconds, changed = time_rounds(X, mlp, fx)
    expected = mlp_dequantize(X, mlp, reference)
    left = {x.data_ptr(): (x, y) for x, y in zip(changed, expected, strict=True)}
    for x, y in left.values():
        assert_same(x, y, dtype)
    return seconds


def in_turns(contenders, turns=5):
    """Time contenders, {name: layer -> weight}, on the same three MLPs, one after another in each turn.

    Returns {name: seconds of each turn}. A contender that fails gets no time.
    """
    seconds = {name: [0.0] * turns for name in contenders}
    with own_libraries():
        for config in CONFIGS:
            mlp, X = build(config)
            for turn, name in itertools.product(range(turns), contenders):
                if name not in seconds:
                    continue
                try:
                    seconds[name][turn] += checked_seconds(X, mlp, contenders[name], config.dtype)
                    assert not needed(name), f"needs {needed(name)}"
                except Exception as error:
                    text = f"{type(error).__name__}: {str(error).strip()[:200]}"
                    print(f"{LABELS[name]}: not measured ({text})")
                    del seconds[name]
    return seconds


def chart(candidate):
    """Time every library and launch form in turns; print and draw seconds of the puzzle's test."""
    import pandas

    contenders = launch_forms(candidate) | {name: one.fn for name, one in baselines().items() if one.fn}
    seconds = in_turns({name: contenders[name] for name in LABELS if name in contenders})
    frame = pandas.DataFrame({LABELS[name]: values for name, values in seconds.items()})
    frame = frame.agg(["median", "min", "max"]).T
    print(frame.to_string(float_format="{:.4f} s".format))
    colors = ["#0B63CE"] + ["#9AA4AF"] * (len(frame) - 1)
    title = "Seconds of the puzzle's test (shorter is better)"
    axes = frame["median"].plot.barh(figsize=(9, 3), color=colors, title=title)
    axes.bar_label(axes.containers[0], fmt="%.3f s", padding=4)
    axes.invert_yaxis()
    return seconds
