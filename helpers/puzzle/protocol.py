"""The puzzle's test, and the libraries it compares; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from helpers.puzzle.layers import DEVICE, LARGE, ON_GPU, quantized_layer
from nf4_triton import tracing  # noqa: F401  it registers the operator
from nf4_triton.kernel import _your_dequantize_nf4_kernel
from nf4_triton.launch import prepare, read
from nf4_triton.reference import different

# %% Run a cell's function, compare with bitsandbytes id="protocol-attempt" folded=true
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import math
import secrets
import statistics
import traceback
from collections.abc import Callable
from time import perf_counter  # bound here: replacing time.perf_counter later changes nothing
from unittest import mock

NEEDS_GPU = "an NVIDIA GPU"
# Imports that stopped halfway; kept when this cell runs again, since only a restart repairs a library.
unfinished = globals().get("unfinished", [])
RESTART = "not measured: the import of a library did not finish; restart the runtime and run all cells"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A library's function from a Linear4bit to its weight."""

    label: str
    fn: Callable | None = None
    reason: str = ""  # what is missing where fn is None


def from_an_import(error):
    """Return whether an error came out of a module that was being imported."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__spec__"):
            return True
    return isinstance(error, ImportError)


def load(label, loader):
    """Import a library without its banners; return its Baseline."""
    try:
        if not ON_GPU and label.startswith("Unsloth"):
            return Baseline(label, None, NEEDS_GPU)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return Baseline(label, loader())
    except Exception as error:  # not installed, or a broken installation, which can raise anything
        return Baseline(label, None, f"a working {label}: {type(error).__name__}: {error}")
    except KeyboardInterrupt as error:
        unfinished.append(error)
        raise


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


@functools.cache
def bitsandbytes_baseline() -> Baseline:
    """Return bitsandbytes' own function. Called first, before Unsloth is imported."""
    return load("bitsandbytes", load_bitsandbytes)


def synchronize():
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def shown(ratio):
    """Return a ratio as text, rounded down to two decimals; a dash for None."""
    return "-" if ratio is None else f"{math.floor(round(100 * ratio, 6)) / 100:.2f}x"


def attempt(check, candidate, needs_gpu=True):
    """Return check(candidate). If something is missing, say so and return None; after an error, False."""
    needs = NEEDS_GPU if needs_gpu and not ON_GPU else bitsandbytes_baseline().reason
    if unfinished or needs:
        print(RESTART if unfinished else f"not measured (needs {needs})")
        return None
    try:
        verdict = check(candidate)
    except ModuleNotFoundError as error:
        print(f"not measured ({error})")
        return None
    except (Exception, KeyboardInterrupt) as error:
        if from_an_import(error):
            unfinished.append(error)
        if isinstance(error, KeyboardInterrupt):
            raise
        print(f"{type(error).__name__}: {str(error).strip()[:500]}")
        verdict = False
    if unfinished:
        print(RESTART)
        return None
    if verdict in (True, False):
        print("passed" if verdict else "FAILED")
    return verdict


def wrong_elements(function, layer):
    """Count the elements whose bits differ from bitsandbytes'."""
    expected = bitsandbytes_baseline().fn(layer)
    torch.full_like(expected, math.nan)  # freed at once, so the result is likely to get this memory
    return different(function(layer), expected)


def compare(dequantize):
    """Print and check that a function's weight of one layer has bitsandbytes' bits."""
    layer = quantized_layer(*LARGE, torch.bfloat16)
    wrong = wrong_elements(dequantize, layer)
    print(f"{wrong:,} of {layer.weight.quant_state.shape.numel():,} elements differ from bitsandbytes")
    return wrong == 0


# %% The puzzle's layers and MLP id="protocol-names" folded=true
import collections
import os
import sys

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

Config = collections.namedtuple("Config", "batch seq hidden intermediate seed dtype")
OFFICIAL = (
    Config(2, 3333, 2048, 8192, 3407, torch.float16),
    Config(5, 777, 1024, 4096, 3409, torch.bfloat16),
    Config(3, 2048, 4096, 14336, 3408, torch.bfloat16),
)
SMALL = (  # for Triton's interpreter
    Config(2, 33, 128, 192, 3407, torch.float16),
    Config(5, 7, 64, 128, 3409, torch.bfloat16),
    Config(3, 20, 192, 128, 3408, torch.bfloat16),
)
CONFIGS, ROUNDS = (OFFICIAL, 1000) if ON_GPU else (SMALL, 1)
if ON_GPU and os.environ.get("NF4_QUICK"):
    ROUNDS = 200


def bnb_Linear4bit(hd, m, dtype=torch.float16):
    """Return a Linear4bit with a random (m, hd) weight in double-quantized NF4."""
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(hd, m, bias=None, compute_dtype=dtype, compress_statistics=True, quant_type="nf4")
    layer.to(DEVICE)
    layer.weight.quant_state.dtype = dtype
    return layer


class MLP(torch.nn.Module):
    """Gate, up, and down projections with SiLU, as in Llama."""

    def __init__(self, hd=4096, m=14336, dtype=torch.float16):
        super().__init__()
        self.gate_proj = bnb_Linear4bit(hd, m, dtype)
        self.up_proj = bnb_Linear4bit(hd, m, dtype)
        self.down_proj = bnb_Linear4bit(m, hd, dtype)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def build(config):
    """Return (MLP, input) of a configuration, drawn from its seed in the puzzle's order."""
    from transformers import set_seed

    default = torch.get_default_dtype()
    set_seed(config.seed)
    torch.set_default_dtype(torch.float32)
    mlp = MLP(config.hidden, config.intermediate, config.dtype)
    X = torch.randn(config.batch, config.seq, config.hidden, dtype=config.dtype, device=DEVICE)
    torch.set_default_dtype(default)
    return mlp, X


def mlp_forward(X, mlp, fx):
    """Return the MLP's output, computed with the weights that `fx` returns for its layers."""
    up = X @ fx(mlp.up_proj).t()
    gate = X @ fx(mlp.gate_proj).t()
    return (torch.nn.functional.silu(gate) * up) @ fx(mlp.down_proj).t()


def layers_of(mlp):
    """Return the MLP's layers in the order of a timed round."""
    return mlp.up_proj, mlp.gate_proj, mlp.down_proj


def assert_correct_bnb(layer, dtype):
    """Check that a layer is double-quantized NF4 with blocks of 64 and 256, dequantized to `dtype`."""
    state, second = layer.weight.quant_state, layer.weight.quant_state.state2
    assert layer.weight.dtype == state.absmax.dtype == torch.uint8
    assert state.dtype == dtype
    assert state.code.dtype == state.offset.dtype == torch.float32
    assert second.absmax.dtype == second.code.dtype == torch.float32
    assert (state.blocksize, second.blocksize) == (64, 256)


def flip(mlp, at):
    """Flip all bits of one byte of each weight, the one at `at`."""
    for layer in layers_of(mlp):
        layer.weight.data.view(-1)[at] ^= 255


def load_unsloth_buffered():  # as Unsloth's training forward calls it: every result in one buffer
    from unsloth.kernels.utils import fast_dequantize

    return lambda layer: fast_dequantize(layer.weight, layer.weight.quant_state, use_global_buffer=True)


def load_peft():
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight


def unsloths_launches():
    """Return a line on how Unsloth launches: its fallbacks would flatter this kernel."""
    try:
        launches, kernel = sys.modules["unsloth.kernels.triton_launch"], sys.modules["unsloth.kernels.nf4"]
        count = sum(key[0] is kernel._nf4_dequant_kernel for key in launches._CACHE)
        how = "replays its launches" if launches._ENABLED else "does NOT replay its launches"
    except (KeyError, AttributeError) as error:
        return f"Unsloth today: this version does not show how it launches ({type(error).__name__}: {error})"
    return f"Unsloth today {how}: {count} launches of its kernel _nf4_dequant_kernel are in its cache"


def reference(layer):
    """Return the weight to compare with: Unsloth's as in the puzzle, bitsandbytes' without a GPU."""
    known = baselines()
    return (known["unsloth_today"].fn or known["bitsandbytes"].fn)(layer)


# %% The libraries it is compared with id="protocol-libraries" folded=true call="import_libraries()"
def load_unsloth_today():
    from unsloth.kernels.utils import fast_dequantize

    return lambda layer: fast_dequantize(layer.weight, layer.weight.quant_state)


def load_unsloth_classic():  # the puzzle's baseline when it was published: three launches
    from unsloth.kernels.utils import _fast_dequantize_ctypes

    return lambda layer: _fast_dequantize_ctypes(layer.weight, layer.weight.quant_state, None, False)


@functools.cache
def baselines() -> dict[str, Baseline]:
    """Return what the kernel is compared with. The first call imports the libraries."""
    return {
        "bitsandbytes": bitsandbytes_baseline(),  # before Unsloth changes it
        "peft": load("PEFT", load_peft),
        "unsloth_classic": load("Unsloth classic", load_unsloth_classic),
        "unsloth_today": load("Unsloth today", load_unsloth_today),
        "unsloth_buffered": load("Unsloth today, one buffer", load_unsloth_buffered),
    }


def import_libraries():
    """Import what the kernel is compared with; print what is missing."""
    for one in baselines().values():
        print(f"{one.label}: {f'not measured (needs {one.reason})' if one.reason else 'imported'}")


# %% id="protocol-test"
def mlp_dequantize(X, mlp, fx):
    """Run one timed round: dequantize and transpose three weights, with a synchronize after each."""
    a = fx(mlp.up_proj).t()
    synchronize()
    b = fx(mlp.gate_proj).t()
    synchronize()
    c = fx(mlp.down_proj).t()
    synchronize()
    return a, b, c


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
        chosen = secrets.randbelow(ROUNDS)
        start = perf_counter()
        for i in range(ROUNDS):
            if i == chosen:  # not in the puzzle: a byte of each weight changes, and these results are kept
                flip(mlp, chosen)
                changed = mlp_dequantize(X, mlp, dequantize_fx)
            else:
                mlp_dequantize(X, mlp, dequantize_fx)
        elapsed += perf_counter() - start
        for x, y in zip(changed, mlp_dequantize(X, mlp, reference), strict=True):
            assert_same(x, y, config.dtype)
        addresses = {x.data_ptr() for x in (*results, *changed)}
        assert len(addresses) == 6, "two results have the same address"
    return elapsed


# %% tags=["module-only"]
test_dequantize.__test__ = False  # the puzzle's name: not a test for pytest


# %% id="ratio" call="ratios = attempt(puzzles_line, your_dequantize_nf4, needs_gpu=False)"
def puzzles_line(your_dequantize_nf4):
    """Run the puzzle's line five times; return {"today": five ratios, "classic": five ratios}."""
    known, ratios = baselines(), {"today": [], "classic": []}
    if known["unsloth_today"].reason:
        test_dequantize(your_dequantize_nf4)
        print(f"all weights are correct; not timed (needs {known['unsloth_today'].reason})")
        return None
    for _ in range(5):
        for version, values in ratios.items():
            if unsloth_dequantize := known[f"unsloth_{version}"].fn:
                values.append(test_dequantize(unsloth_dequantize) / test_dequantize(your_dequantize_nf4))
    for version, values in ratios.items():
        if values:
            texts = [shown(value) for value in (statistics.median(values), *sorted(values))]
            print(f"vs Unsloth {version}: median {texts[0]} of {', '.join(texts[1:])}")
    print(unsloths_launches())
    return ratios


# %% How contenders take turns, and the chart id="protocol-turns" folded=true
LABELS = {
    "ours": "this kernel",
    "unsloth_today": "Unsloth today",
    "unsloth_buffered": "Unsloth today, one buffer",
    "ordinary": "this kernel, kernel[grid]",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
    "peft": "PEFT",
}


def by_kernel_grid(layer, known):
    """Allocate, launch by Triton's kernel[grid], check nothing. known: what follows the kernel's tensors, by
    layout."""
    tensors, layout = read(layer.weight.data, layer.weight.quant_state)
    (weight, *scales), (shape, dtype, *_) = tensors, layout
    result = torch.empty(shape, dtype=dtype, device=weight.device)
    if layout not in known:
        grid, arguments, options = prepare(tensors, layout, result)
        known[layout] = grid, arguments[6:], options
    grid, rest, options = known[layout]
    _your_dequantize_nf4_kernel[(grid,)](weight, result, *scales, *rest, **options)
    return result


def launch_forms(candidate) -> dict[str, Callable]:
    """Return the candidate as "ours" and, on a GPU, our kernel under Triton's kernel[grid]."""
    ordinary = {"ordinary": functools.partial(by_kernel_grid, known={})} if ON_GPU else {}
    return {"ours": candidate} | ordinary


def in_turns(contenders, turns=5):
    """Time contenders, {name: layer -> weight}, on the same three MLPs, one after another in each turn.

    Returns {name: seconds of each turn}. A contender that fails gets no time.
    """
    seconds = {name: [0.0] * turns for name in contenders}
    with own_libraries():
        for config in CONFIGS:
            mlp, X = build(config)
            for name in list(seconds):
                try:
                    for layer in layers_of(mlp):  # one by one: all results may be in one buffer
                        assert_same(contenders[name](layer), reference(layer), config.dtype)
                except Exception as error:
                    print(
                        f"{LABELS[name]}: not measured ({type(error).__name__}: {str(error).strip()[:200]})"
                    )
                    del seconds[name]
            for turn, name in itertools.product(range(turns), seconds):
                start = perf_counter()
                for _ in range(ROUNDS):
                    mlp_dequantize(X, mlp, contenders[name])
                seconds[name][turn] += perf_counter() - start
    return seconds


def draw_seconds(medians):
    """Draw {contender: seconds} as bars."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(9, 3), layout="constrained", facecolor="white")
    bars = plt.barh([*medians], [*medians.values()], color="#9AA4AF")
    bars[0].set_color("#0B63CE")  # this kernel
    plt.bar_label(bars, fmt="%.3f s", padding=4)
    plt.gca().invert_yaxis()
    plt.margins(x=0.1)
    plt.title("Seconds of the puzzle's test (shorter is better)", loc="left")
    plt.show()


# %% All in turns id="turns" folded=true call="seconds = attempt(ladder, your_dequantize_nf4) or {}"
def ladder(candidate):
    """Time every library and launch form in turns; print and draw seconds of the puzzle's test."""
    contenders = launch_forms(candidate) | {name: one.fn for name, one in baselines().items() if one.fn}
    seconds = in_turns({name: contenders[name] for name in LABELS if name in contenders})
    medians = {}
    for name, values in seconds.items():
        label, median = LABELS[name], statistics.median(values)
        medians[label] = median
        print(f"{label:28}{median:.4f} s   {min(values):.4f} to {max(values):.4f}")
    draw_seconds(medians)
    return seconds
