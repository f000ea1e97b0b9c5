"""The puzzle's test, and the libraries it compares; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from helpers.puzzle.layers import DEVICE, LARGE, ON_GPU, quantized_layer
from nf4_triton.kernel import _your_dequantize_nf4_kernel
from nf4_triton.launch import launch_ordinary
from nf4_triton.reference import different
from nf4_triton.settings import launch_options, settings
from nf4_triton.state import read_state

# %% Run a cell's function, compare with bitsandbytes id="protocol-attempt" folded=true
import contextlib
import dataclasses
import functools
import inspect
import io
import math
import statistics
import time
from collections.abc import Callable
from unittest import mock

NEEDS_GPU = "an NVIDIA GPU"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A library's function from a Linear4bit to its weight."""

    label: str
    fn: Callable | None = None
    reason: str = ""  # what is missing where fn is None


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
    needs = bitsandbytes_baseline().reason
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


def compare(dequantize, layer=None):
    """Count the elements that differ in any bit from bitsandbytes' weight; print the time of a call."""
    layer = layer or quantized_layer(*LARGE, torch.bfloat16)
    weight = dequantize(layer)
    wrong = different(weight, bitsandbytes_baseline().fn(layer))
    print(f"{wrong:,} of {weight.numel():,} elements differ from bitsandbytes", end="; ")
    seconds = []
    for _ in range(20 if ON_GPU else 0):
        synchronize()
        start = time.perf_counter()
        dequantize(layer)
        synchronize()
        seconds.append(time.perf_counter() - start)
    print(f"{1e3 * statistics.median(seconds):.3f} ms" if ON_GPU else f"not timed (needs {NEEDS_GPU})")
    return wrong == 0


# %% id="format" call="format_is_right = attempt(compare, dequantize_in_pytorch, needs_gpu=False)"
def dequantize_in_pytorch(layer):
    """Return the weight of a double-quantized NF4 layer, one step of the format a line."""
    state = layer.weight.quant_state
    code2, absmax2 = state.state2.code, state.state2.absmax
    byte = layer.weight.data.view(-1)  # two 4-bit codes each, the high nibble first
    code = torch.stack((byte >> 4, byte & 15), dim=1).view(-1, 64)  # 64 codes share a scale
    scale = code2[state.absmax.int()]  # scales are quantized, too: absmax is an index into 256 values
    scale = scale * absmax2.repeat_interleave(256)[: len(scale)]  # 256 scales share an absmax2
    scale = scale + state.offset
    weight = state.code[code.int()] * scale[:, None]  # state.code: the 16 values of NF4
    return weight.to(state.dtype).view(state.shape)


# %% id="one-call" call="call_is_right = attempt(one_call, your_dequantize_nf4, needs_gpu=False)"
def one_call(your_dequantize_nf4):
    """Dequantize one layer, compare every bit with bitsandbytes, and time the call."""
    layer = quantized_layer(*LARGE, torch.bfloat16)
    W = your_dequantize_nf4(layer)
    print(f"{tuple(W.shape)}, {W.dtype}, first weights {[round(w, 4) for w in W[0, :4].tolist()]}")
    return compare(your_dequantize_nf4, layer)


# %% The puzzle's layers and MLP id="protocol-names" folded=true
import collections
import importlib.metadata
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


def imported_versions():
    """Import all libraries, print what is missing, and return {package: version that was imported}."""
    for one in baselines().values():
        if one.reason:
            print(f"{one.label}: not measured (needs {one.reason})")
    versions = {}
    for name in ("bitsandbytes", "unsloth", "peft", "transformers"):
        if module := sys.modules.get(name):
            versions[name] = getattr(module, "__version__", None) or importlib.metadata.version(name)
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    return versions


def flip(mlp):
    """Flip all bits of the last byte of each weight; a second call restores it."""
    for layer in layers_of(mlp):
        layer.weight.data.view(-1)[-1] ^= 255


def load_unsloth_buffered():  # as Unsloth's training forward calls it: every result in one buffer
    from unsloth.kernels.utils import fast_dequantize

    return lambda layer: fast_dequantize(layer.weight, layer.weight.quant_state, use_global_buffer=True)


def load_peft():
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight


def reference(layer):
    """Return the weight to compare with: Unsloth's as in the puzzle, bitsandbytes' without a GPU."""
    known = baselines()
    return (known["unsloth_today"].fn or known["bitsandbytes"].fn)(layer)


def assert_fresh(X, mlp, fx, dtype):
    """Not in the puzzle: flip a byte of each weight; the next results must be right and in new memory."""
    before = mlp_dequantize(X, mlp, fx)
    flip(mlp)
    after = mlp_dequantize(X, mlp, fx)
    for x, y in zip(after, mlp_dequantize(X, mlp, reference), strict=True):
        assert_same(x, y, dtype)
    addresses = {x.data_ptr() for x in (*before, *after)}
    assert len(addresses) == 6, "two results have the same address"


# %% id="protocol-libraries" call="facts['versions'] |= imported_versions()"
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
        start = time.perf_counter()
        for _ in range(ROUNDS):
            mlp_dequantize(X, mlp, dequantize_fx)
        elapsed += time.perf_counter() - start
        assert_fresh(X, mlp, dequantize_fx, config.dtype)
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
    return ratios


# %% How contenders take turns id="protocol-turns" folded=true
LABELS = {"ours": "this kernel, replayed", "compiled_grid": "this kernel, compiled[grid]"}
LABELS |= {"ordinary": "this kernel, kernel[grid]", "unsloth_buffered": "Unsloth today, one buffer"}
LABELS |= {"unsloth_today": "Unsloth today", "unsloth_classic": "Unsloth classic"}
LABELS |= {"bitsandbytes": "bitsandbytes", "peft": "PEFT"}


def launch_ours(layer, form, known):
    """Allocate and launch the kernel by Triton's kernel[grid] or compiled[grid]; check nothing.

    known: a cache of launches by shape and dtype. compiled[grid] is the form of Triton's softmax tutorial.
    """
    packed = read_state(layer.weight.data, layer.weight.quant_state)
    key = packed.shape, packed.dtype
    if key not in known:
        first = launch_ordinary(packed)
        options = launch_options(settings(packed.weight.device))
        launch = functools.partial(_your_dequantize_nf4_kernel[(first.grid,)], **options)
        if form == "compiled_grid":
            launch = first.compiled[(first.grid, 1, 1)]
        known[key] = launch, first.arguments[6:]
    launch, rest = known[key]
    out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.weight.device)
    launch(packed.weight, out, packed.absmax, packed.code2, packed.absmax2, packed.offset, *rest)
    return out


def launch_forms(candidate) -> dict[str, Callable]:
    """Return, on a GPU, our kernel under Triton's two public launches, and the candidate as "ours"."""
    forms = {}
    for form in ("ordinary", "compiled_grid") if ON_GPU else ():
        forms[form] = functools.partial(launch_ours, form=form, known={})
    return forms | {"ours": candidate}


def turns_here():
    """Return how often each contender is timed: 5 times, 3 times on a T4, once without a GPU."""
    if not ON_GPU:
        return 1
    slow = torch.cuda.get_device_capability() <= (7, 5) or os.environ.get("NF4_FORCE") == "t4"
    return 3 if slow else 5


def assert_weights(mlp, fx, dtype):
    """Compare one weight after another: a contender may keep all its results in one buffer."""
    for layer in layers_of(mlp):
        assert_same(fx(layer), reference(layer), dtype)


def timed(config, mlp, X, fx):
    """Return the seconds of ROUNDS rounds. Weights are checked before, and with a flipped byte after."""
    assert_weights(mlp, fx, config.dtype)
    start = time.perf_counter()
    for _ in range(ROUNDS):
        mlp_dequantize(X, mlp, fx)
    elapsed = time.perf_counter() - start
    flip(mlp)
    try:
        assert_weights(mlp, fx, config.dtype)
    finally:
        flip(mlp)
    return elapsed


def in_turns(contenders, turns=None):
    """Time contenders, {name: layer -> weight}, on the same three MLPs, one after another in each turn.

    Returns ({name: seconds of each turn}, {name: error}).
    """
    turns = turns or turns_here()
    seconds, errors = {name: [0.0] * turns for name in contenders}, {}
    with own_libraries():
        for config in CONFIGS:
            mlp, X = build(config)
            for turn in range(turns):
                for name in [name for name in contenders if name not in errors]:
                    try:
                        seconds[name][turn] += timed(config, mlp, X, contenders[name])
                    except Exception as error:  # one that fails gets no time
                        errors[name] = f"{type(error).__name__}: {str(error).strip()}"
    return {name: values for name, values in seconds.items() if name not in errors}, errors


def ratio(seconds, baseline, name="ours"):
    """Return how many times as fast a contender is as a baseline, by their medians; None without either."""
    if name not in seconds or baseline not in seconds:
        return None
    return statistics.median(seconds[baseline]) / statistics.median(seconds[name])


# %% id="turns" call="seconds = attempt(ladder, your_dequantize_nf4) or {}"
def ladder(candidate):
    """Time every library and launch form in turns; print seconds and speed relative to Unsloth."""
    libraries = {name: one.fn for name, one in baselines().items() if one.fn}
    seconds, errors = in_turns(libraries | launch_forms(candidate))
    print(f"{'':28}{'median s':>8}   {'range':16}{'vs Unsloth today':>18}{'vs classic':>12}")
    for name, values in seconds.items():
        today, classic = (shown(ratio(seconds, who, name)) for who in ("unsloth_today", "unsloth_classic"))
        spread = f"{min(values):.4f} to {max(values):.4f}"
        print(f"{LABELS[name]:28}{statistics.median(values):8.4f}   {spread:16}{today:>18}{classic:>12}")
    errors |= {name: f"needs {one.reason}" for name, one in baselines().items() if one.reason}
    for name, error in errors.items():
        print(f"{LABELS[name]:28}not measured ({error[:200]})")
    return seconds
