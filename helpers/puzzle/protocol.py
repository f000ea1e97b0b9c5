"""The puzzle's test, and the libraries it compares; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from helpers.puzzle.layers import DEVICE, ON_GPU
from nf4_triton.kernel import _your_dequantize_nf4_kernel, launch_options, settings
from nf4_triton.launch import launch_kernel

# %% The puzzle's layers, MLP, and comparisons id="protocol-names" folded=true
import collections
import os
import statistics
import time

NEEDS_GPU = "an NVIDIA GPU"
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


def synchronize():
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


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
    assert x.dtype == dtype, f"dtype is {x.dtype}, expected {dtype}"
    torch.testing.assert_close(x, y, check_stride=True)


def assert_correct_bnb(layer, dtype):
    """Check that a layer is double-quantized NF4 with blocks of 64 and 256, dequantized to `dtype`."""
    state, second = layer.weight.quant_state, layer.weight.quant_state.state2
    assert layer.weight.dtype == state.absmax.dtype == torch.uint8
    assert state.dtype == dtype
    assert state.code.dtype == state.offset.dtype == torch.float32
    assert second.absmax.dtype == second.code.dtype == torch.float32
    assert (state.blocksize, second.blocksize) == (64, 256)


def attempt(check, candidate, needs_gpu=True):
    """Return check(candidate). If something is missing, say so and return None; after an error, False."""
    needs = baselines()["bitsandbytes"].reason
    if needs_gpu and not ON_GPU:
        needs = NEEDS_GPU
    if needs:
        print(f"not measured (needs {needs})")
        return None
    try:
        verdict = check(candidate)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).strip()[:500]}")
        verdict = False
    if verdict in (True, False):
        print("passed" if verdict else "FAILED")
    return verdict


# %% The libraries to compare with id="protocol-libraries" folded=true
import contextlib
import dataclasses
import functools
import inspect
import io
from collections.abc import Callable
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A library's function from a Linear4bit to its weight."""

    label: str
    fn: Callable | None = None
    reason: str = ""  # what is missing where fn is None


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


def load_unsloth_today():
    from unsloth.kernels.utils import fast_dequantize

    return lambda layer: fast_dequantize(layer.weight, layer.weight.quant_state)


def load_unsloth_classic():
    from unsloth.kernels.utils import _fast_dequantize_ctypes

    return lambda layer: _fast_dequantize_ctypes(layer.weight, layer.weight.quant_state, None, False)


def load_peft():
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight


def load(label, loader):
    """Import a library without its banners; return its Baseline."""
    try:
        if not ON_GPU and label.startswith("Unsloth"):
            return Baseline(label, None, NEEDS_GPU)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return Baseline(label, loader())
    except ModuleNotFoundError as error:
        return Baseline(label, None, f"{error.name}, which is not installed")
    except Exception as error:  # a broken installation can raise anything
        return Baseline(label, None, f"a working {label}: {type(error).__name__}: {error}")


@functools.cache
def baselines() -> dict[str, Baseline]:
    """Return what the kernel is compared with. The first call imports the libraries."""
    bitsandbytes = load("bitsandbytes", load_bitsandbytes)  # before Unsloth changes it
    return {
        "unsloth_today": load("Unsloth today", load_unsloth_today),
        "unsloth_classic": load("Unsloth classic", load_unsloth_classic),
        "bitsandbytes": bitsandbytes,
        "peft": load("PEFT", load_peft),
    }


def reference(layer):
    """Return the weight to compare with: Unsloth's as in the puzzle, bitsandbytes' without a GPU."""
    known = baselines()
    return (known["unsloth_today"].fn or known["bitsandbytes"].fn)(layer)


# %% id="protocol-test"
def test_dequantize(dequantize_fx, build=build):
    """Check every weight, then return the seconds of 1000 rounds, summed over the three MLPs."""
    elapsed = 0
    for config in CONFIGS:
        mlp, X = build(config)
        for _ in range(2):
            assert_same(mlp_forward(X, mlp, dequantize_fx), mlp(X), config.dtype)
            for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj):
                assert_correct_bnb(layer, config.dtype)
            results, expected = (mlp_dequantize(X, mlp, fx) for fx in (dequantize_fx, reference))
            for x, y in zip(results, expected, strict=True):
                assert_same(x, y, config.dtype)
        start = time.perf_counter()
        for _ in range(ROUNDS):
            mlp_dequantize(X, mlp, dequantize_fx)
        elapsed += time.perf_counter() - start
    return elapsed


# %% tags=["module-only"]
test_dequantize.__test__ = False  # the puzzle's name: not a test for pytest


# %% id="ratio" call="ratios = attempt(puzzles_line, your_dequantize_nf4, needs_gpu=False)"
def puzzles_line(your_dequantize_nf4):
    """Run the puzzle's line five times; return the five ratios."""
    unsloth_dequantize = baselines()["unsloth_today"].fn  # Unsloth's fast_dequantize
    if unsloth_dequantize is None:
        test_dequantize(your_dequantize_nf4)
        print(f"all weights are correct; not timed (needs {baselines()['unsloth_today'].reason})")
        return None
    ratios = []
    for _ in range(5):
        ratios.append(test_dequantize(unsloth_dequantize) / test_dequantize(your_dequantize_nf4))
        print(f"{ratios[-1]:.3f}")
    print(f"median {statistics.median(ratios):.3f}, range {min(ratios):.3f} to {max(ratios):.3f}")
    return ratios


# %% All contenders in turns id="protocol-turns" folded=true
import math

LABELS = {"ours": "this kernel", "ordinary": "... by kernel[grid]", "compiled_grid": "... by compiled[grid]"}
LABELS |= {"unsloth_today": "Unsloth today", "unsloth_classic": "Unsloth classic"}
LABELS |= {"bitsandbytes": "bitsandbytes", "peft": "PEFT"}


def launch_ours(layer, form, known):
    """Allocate and launch the kernel by Triton's kernel[grid] or compiled[grid]; check nothing.

    known: a cache of launches by shape and dtype. compiled[grid] is the form of Triton's softmax tutorial.
    """
    weight, state = layer.weight.data, layer.weight.quant_state
    key = state.shape, state.dtype
    if key not in known:
        first = launch_kernel(weight, state)
        options = launch_options(settings(weight.device))
        launch = functools.partial(_your_dequantize_nf4_kernel[(first.grid,)], **options)
        if form == "compiled_grid":
            launch = first.compiled[(first.grid, 1, 1)]
        known[key] = launch, first.arguments[3], first.arguments[7:]
    launch, table, rest = known[key]
    out = torch.empty(state.shape, dtype=state.dtype, device=weight.device)
    second = state.state2
    launch(weight, out, state.absmax, table, second.code, second.absmax, state.offset, *rest)
    return out


def launch_forms(candidate) -> dict[str, Callable]:
    """Return the candidate as "ours" and, on a GPU, our kernel under Triton's two public launches."""
    forms = {"ours": candidate}
    for form in ("ordinary", "compiled_grid") if ON_GPU else ():
        forms[form] = functools.partial(launch_ours, form=form, known={})
    return forms


def turns_here():
    """Return how often each contender is timed: 5 times, 3 times on a T4, once without a GPU."""
    if not ON_GPU:
        return 1
    slow = torch.cuda.get_device_capability() <= (7, 5) or os.environ.get("NF4_FORCE") == "t4"
    return 3 if slow else 5


def in_turns(contenders, turns=None):
    """Time contenders, {name: layer -> weight}, through test_dequantize, one after another in each turn.

    All get the same layers. Returns ({name: seconds of each turn}, {name: error}).
    """
    shared, seconds, errors = functools.cache(build), {}, {}
    with own_libraries():
        for _ in range(turns or turns_here()):
            for name in [name for name in contenders if name not in errors]:
                try:
                    elapsed = test_dequantize(contenders[name], shared)
                    seconds.setdefault(name, []).append(elapsed)
                except Exception as error:  # one that fails gets no time
                    errors[name] = f"{type(error).__name__}: {str(error).strip()}"
                    seconds.pop(name, None)
    return seconds, errors


def ratio(seconds, baseline, name="ours"):
    """Return how many times as fast a contender is as a baseline, by their medians; None without either."""
    if name not in seconds or baseline not in seconds:
        return None
    return statistics.median(seconds[baseline]) / statistics.median(seconds[name])


def shown(ratio):
    """Return a ratio as text, rounded down to two decimals; a dash for None."""
    return "-" if ratio is None else f"{math.floor(round(100 * ratio, 6)) / 100:.2f}x"


# %% id="turns" call="seconds = attempt(in_turns_table, your_dequantize_nf4) or {}"
def in_turns_table(candidate):
    """Time all contenders in turns; print median seconds and the speed relative to both baselines."""
    libraries = {name: one.fn for name, one in baselines().items() if one.fn}
    seconds, errors = in_turns(launch_forms(candidate) | libraries)
    print(f"{'':24}{'median s':>8}{'vs Unsloth today':>18}{'vs Unsloth classic':>20}")
    for name, values in seconds.items():
        today, classic = (shown(ratio(seconds, who, name)) for who in ("unsloth_today", "unsloth_classic"))
        print(f"{LABELS[name]:24}{statistics.median(values):8.4f}{today:>18}{classic:>20}")
    errors |= {name: f"needs {one.reason}" for name, one in baselines().items() if one.reason}
    for name, error in errors.items():
        print(f"{LABELS[name]:24}not measured ({error[:200]})")
    return seconds
