"""Time the puzzle's official protocol, as the puzzle has it and watched; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from helpers.nf4.reference import different

# %% The puzzle's layers and MLP, and the libraries to compare with id="protocol-names" folded=true
import collections
import copy
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import os
import time
import types
from collections.abc import Callable
from unittest import mock

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"  # on a CPU: small shapes, and times that mean nothing
NEEDS_GPU = "an NVIDIA GPU"
ROUNDS = 200 if os.environ.get("NF4_QUICK") else 1000
NOT_INSTALLED = globals().get("NOT_INSTALLED", "not installed")  # the notebook's install cell tried

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
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
WEIGHTS = ("up_proj", "gate_proj", "down_proj")  # in the order of a round


def must(true, text):
    """`assert` that also runs under `python -O`."""
    if not true:
        raise AssertionError(text)


class NotMeasured:
    """A time that could not be measured. A ratio with it is not measured either."""

    def __init__(self, needs, note=""):
        self.needs, self.note = needs, note

    def __repr__(self):
        return f"not measured (needs {self.needs}){self.note}"

    def __truediv__(self, other):
        return self

    __rtruediv__ = __truediv__


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A library's function from a Linear4bit layer to its weight, or what is missing for it."""

    label: str
    fn: Callable | None = None
    reason: str = ""  # what it needs where fn is None


def own_dequantize_4bit(functional):
    """Return bitsandbytes' own function. unsloth_zoo wraps it; anything else in its place is refused."""
    own = inspect.unwrap(functional.dequantize_4bit)
    if (own.__module__, own.__code__.co_filename) != (functional.__name__, functional.__file__):
        raise RuntimeError(f"{own.__module__} replaced bitsandbytes.functional.dequantize_4bit")
    return own


def layer_to_weight(name, module):
    """Return a baseline's function, looked up once in the module that has it."""
    if name == "bitsandbytes":
        own = own_dequantize_4bit(module)
        return lambda layer: own(layer.weight.data, layer.weight.quant_state)
    if name == "unsloth_today":
        fast = module.fast_dequantize
        return lambda layer: fast(layer.weight, layer.weight.quant_state)
    if name == "unsloth_classic":
        classic = module._fast_dequantize_ctypes
        return lambda layer: classic(layer.weight, layer.weight.quant_state, None, False)
    return module.dequantize_module_weight


@functools.cache
def baselines() -> dict[str, Baseline]:
    """Return what the kernel is compared with. The first call imports the libraries, bitsandbytes first."""
    made = {}
    for name, label, module in (
        ("bitsandbytes", "bitsandbytes", "bitsandbytes.functional"),
        ("unsloth_today", "Unsloth today", "unsloth.kernels.utils"),
        ("unsloth_classic", "Unsloth classic", "unsloth.kernels.utils"),
        ("peft", "PEFT", "peft.utils.integrations"),
    ):
        fn, reason, package = None, "", module.partition(".")[0]
        try:
            if ON_GPU or package != "unsloth":
                importlib.metadata.version(package)
                fn = layer_to_weight(name, importlib.import_module(module))
            else:
                reason = NEEDS_GPU
        except importlib.metadata.PackageNotFoundError:
            reason = f"{package}: {NOT_INSTALLED}"
        except Exception as error:  # a broken installation may raise anything
            reason = f"{package}: {type(error).__name__}: {error}"
        made[name] = Baseline(label, fn, reason)
    return {name: made[name] for name in ("unsloth_today", "unsloth_classic", "bitsandbytes", "peft")}


def baseline(name):
    """Return a library's function from a layer to its weight, or NotMeasured with the reason."""
    found = baselines()[name]
    return found.fn or NotMeasured(found.reason)


def own_libraries():
    """Inside this block PEFT and Linear4bit call bitsandbytes' own function, whatever replaced it."""
    from bitsandbytes import functional

    return mock.patch.object(functional, "dequantize_4bit", own_dequantize_4bit(functional))


def expected(layer) -> torch.Tensor:
    """Return the layer's weight as bitsandbytes dequantizes it now.

    On a CPU with AVX512, bitsandbytes 0.50 needs rows of whole blocks: there it dequantizes one long row.
    """
    own, weight = baselines()["bitsandbytes"].fn, layer.weight
    if weight.is_cuda:
        return own(layer)
    state = copy.copy(weight.quant_state)
    shape, n = state.shape, state.shape.numel()
    state.shape = torch.Size([1, n + n % 2])
    flat = types.SimpleNamespace(data=weight.data.view(-1, 1), quant_state=state)
    result = own(types.SimpleNamespace(weight=flat)).flatten()[:n].view(shape)
    return result.t() if weight.shape[0] == 1 else result


def bnb_Linear4bit(hd, m, dtype=torch.float16):
    """Return a layer with a random (m, hd) weight in doubly quantized NF4."""
    from bitsandbytes.nn import Linear4bit

    how = dict(compute_dtype=dtype, compress_statistics=True, quant_type="nf4")
    layer = Linear4bit(hd, m, bias=None, **how).to(DEVICE)
    layer.weight.quant_state.dtype = dtype
    return layer


class MLP(torch.nn.Module):
    """Gate, up and down projection with SiLU, as in Llama."""

    def __init__(self, hd=4096, m=14336, dtype=torch.float16):
        super().__init__()
        self.gate_proj = bnb_Linear4bit(hd, m, dtype)
        self.up_proj = bnb_Linear4bit(hd, m, dtype)
        self.down_proj = bnb_Linear4bit(m, hd, dtype)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def mlp_forward(X, mlp, fx):
    """Return the MLP's output, computed with the weights that `fx` returns for its layers."""
    up = X @ fx(mlp.up_proj).t()
    gate = X @ fx(mlp.gate_proj).t()
    return (torch.nn.functional.silu(gate) * up) @ fx(mlp.down_proj).t()


def synchronize():
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


def assert_same(x, y, dtype, what="result"):
    """Compare the dtype, then values and strides at torch's default tolerances."""
    must(x.dtype == dtype, f"{what}: dtype is {x.dtype}, expected {dtype}")
    torch.testing.assert_close(x, y, check_stride=True, msg=lambda text: f"{what}: {text}")


def assert_correct_bnb(weight, dtype):
    """Check that the layer is in doubly quantized NF4 with blocks of 64 and 256, dequantized to `dtype`."""
    state, u8, fp32 = weight.weight.quant_state, torch.uint8, torch.float32
    inner, wanted = state.state2, (u8, dtype, u8, fp32, fp32, 64, fp32, fp32, 256)
    facts = (weight.weight.dtype, state.dtype, state.absmax.dtype, state.code.dtype, state.offset.dtype,
             state.blocksize, inner.absmax.dtype, inner.code.dtype, inner.blocksize)  # fmt: skip
    must(facts == wanted, f"quant_state: {facts}, expected {wanted}")


def build(config):
    """Return (MLP, input) of a configuration, made from its seed in the protocol's order."""
    from transformers import set_seed

    default = torch.get_default_dtype()
    set_seed(config.seed)
    torch.set_default_dtype(torch.float32)
    mlp = MLP(config.hidden, config.intermediate, config.dtype)
    X = torch.randn(config.batch, config.seq, config.hidden, dtype=config.dtype, device=DEVICE)
    torch.set_default_dtype(default)
    return mlp, X


def warm_up(fx, X, mlp, dtype):
    """Run the official checks, twice: the MLP's output, every state, every weight.

    Weights are compared with Unsloth's, where it cannot run with bitsandbytes'.
    """
    reference = baselines()["unsloth_today"].fn or expected
    for _ in range(2):
        assert_same(mlp_forward(X, mlp, fx), mlp(X), dtype, "MLP output")
        results, wanted = (mlp_dequantize(X, mlp, function) for function in (fx, reference))
        for name, x, y in zip(WEIGHTS, results, wanted, strict=True):
            assert_correct_bnb(getattr(mlp, name), dtype)
            assert_same(x, y, dtype, name)


# %% id="protocol-test"
def test_dequantize(dequantize_fx):
    """Check the weights, then return the seconds of 1000 rounds, summed over the three MLPs.

    Raises AssertionError if a weight is wrong. Without a GPU it checks small MLPs and returns NotMeasured.
    """
    for needed in (baseline("bitsandbytes"), dequantize_fx):
        if isinstance(needed, NotMeasured):
            return needed
    elapsed = 0
    for config in OFFICIAL if ON_GPU else SMALL:
        mlp, X = build(config)
        warm_up(dequantize_fx, X, mlp, config.dtype)
        start = time.perf_counter()
        for _ in range(ROUNDS if ON_GPU else 1):
            mlp_dequantize(X, mlp, dequantize_fx)
        elapsed += time.perf_counter() - start
    return elapsed if ON_GPU else NotMeasured(NEEDS_GPU, "; all weights are correct")


test_dequantize.__test__ = False  # the puzzle's name: not a test for pytest

# %% The same test, watched id="protocol-watched" folded=true
import gc
import itertools
import json
import math
import pathlib
import random
import statistics
import tempfile

STOPS = 10  # how often a clock stops to compare the results
secret = random.SystemRandom()


def change(mlp, how):
    """Change each layer in place, past autograd's version counters.

    how: "values" for every value of one tensor of its state, "byte" for a single byte, "nothing".
    """
    for name in WEIGHTS if how != "nothing" else ():
        weight = getattr(mlp, name).weight
        state = weight.quant_state
        codes, scales = (weight.data, state.absmax.data), (state.state2.absmax.data, state.offset.data)
        value = secret.choice(codes if how == "byte" else codes + scales)
        if how == "byte":
            at = secret.randrange(value.numel())
            value = value.view(-1)[at : at + 1]
        if value.is_floating_point():
            value.mul_(secret.uniform(1.05, 1.1) ** secret.choice((-1, 1)))  # never too little to see
        else:
            value.bitwise_xor_(secret.randrange(128, 256))  # the highest bit


def assert_exact(results, mlp):
    """Check that each result is a plain tensor, bit-identical to the layer's current weight. Then fill it
    with NaN, so memory that is reused or kept by the contender holds no weight."""
    for result, name in zip(results, WEIGHTS, strict=True):
        must(type(result) is torch.Tensor, f"{name}: the result is a {type(result).__name__}, not a Tensor")
        wrong = different(result, expected(getattr(mlp, name)).t())
        must(not wrong, f"{name}, watched: {wrong} of {result.numel()} elements differ from bitsandbytes")
        result.fill_(math.nan)


def timed(fx, X, mlp, rounds):
    """Return the seconds that `rounds` rounds take. The clock stops at random rounds, alternately to change
    the layers (or not) and to compare the latest results with bitsandbytes."""
    stops, seconds = min(STOPS, rounds // 2), 0.0
    changes = (["byte", "nothing", "values"] * stops)[: stops - 1]
    secret.shuffle(changes)
    cuts = sorted(secret.sample(range(1, rounds), 2 * stops - 1))
    for i, (first, end) in enumerate(itertools.pairwise((0, *cuts, rounds))):
        synchronize()
        start = time.perf_counter()
        for _ in range(first + 1, end):
            mlp_dequantize(X, mlp, fx)
        results = mlp_dequantize(X, mlp, fx)
        seconds += time.perf_counter() - start
        if i % 2:
            assert_exact(results, mlp)
        else:
            change(mlp, ["values", *changes][i // 2])
        del results
    return seconds


def gpu_events(call, count=3):
    """Profile `count` calls after one more: (name, seconds, threads) of everything they ran on the GPU."""
    call()
    synchronize()
    activities = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text("utf-8"))["traceEvents"]
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    sizes = [math.prod(e["args"].get("grid", [0]) + e["args"].get("block", [0])) for e in on_gpu]
    return [(e["name"], e["dur"] * 1e-6, size) for e, size in zip(on_gpu, sizes, strict=True)]


def assert_whole(events, layers, what):
    """Check that what ran on the GPU could dequantize these layers: enough threads, enough time.

    A thread has registers for 256 elements; bytes that do not fit in the L2 must cross the DRAM bus.
    """
    from triton.testing import get_dram_gbps

    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    peak = 1e9 * get_dram_gbps() or math.inf  # 0 if the driver does not know it
    states = [layer.weight.quant_state for layer in layers]
    sizes = [(state.shape.numel(), state.dtype.itemsize) for state in states]
    least = sum(max(0, n * (0.5 + 1 / 64 + 4 / 16384 + size) - l2) / peak for n, size in sizes)
    n, threads = sum(n for n, _ in sizes), sum(threads for _, _, threads in events)
    seconds = sum(seconds for _, seconds, _ in events)
    must(threads * 256 >= n, f"{what}: {threads} threads cannot dequantize {n} elements")
    must(seconds >= least, f"{what}: took {seconds * 1e6:.1f} us, its bytes take {least * 1e6:.1f} us")


def profiled(fx, X, mlp, before=None):
    """Profile one round, check that it could dequantize the layers, and return what ran, sorted.

    before: what ran before the timed rounds. Raises AssertionError if something else runs now.
    """
    events = gpu_events(lambda: mlp_dequantize(X, mlp, fx), 1)
    assert_whole(events, [getattr(mlp, name) for name in WEIGHTS], "a round")
    ran = sorted(name for name, _, _ in events)
    must(before in (None, ran), f"the GPU runs {ran} after the timed rounds, {before} before them")
    return ran


@dataclasses.dataclass
class Entry:
    """A contender's result; it has times only if it passed every check."""

    label: str
    reason: str = ""  # what it needs, if it could not take part
    failure: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)  # one value per turn, all MLPs
    per_config: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def p50(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclasses.dataclass
class Comparison:
    """The watched protocol of several contenders that took turns in one process; the first is ours."""

    entries: dict[str, Entry]
    rounds: int
    checked_against: str
    forms: list[str] = dataclasses.field(default_factory=list)  # other launches of the same kernel

    def speedup(self, name: str, baseline: str) -> float | None:
        """Return the median seconds of `baseline` over those of `name`; None where either has none."""
        mine, theirs = (self.entries[n].p50 if n in self.entries else None for n in (name, baseline))
        return theirs / mine if mine and theirs else None

    def __repr__(self):
        ours = next(iter(self.entries))
        lines = [f"{self.rounds} rounds per MLP; weights checked against {self.checked_against}", ""]
        if self.entries[ours].seconds:
            lines.append(f"{'':20} {'median s':>8}   ours is faster by   each turn")
        for name, entry in self.entries.items():
            if name in self.forms:
                continue
            text = "exact; " * (not entry.reason) + f"not measured (needs {entry.reason or NEEDS_GPU})"
            if entry.failure:
                text = f"FAILED: {entry.failure.splitlines()[0]}"
            if entry.seconds:
                faster = f"{self.speedup(ours, name) or 0:.3f}x" * (name != ours)
                turns = " ".join(f"{seconds:.4f}" for seconds in entry.seconds)
                text = f"{entry.p50:8.4f}   {faster:17}   {turns}"
            lines.append(f"{entry.label:20} {text}")
        return "\n".join(lines)


def turns_of(name, first):
    """Return how often a contender is timed: 5 times; on a T4 ours and Unsloth today 3 times, others once."""
    if not ON_GPU:
        return 1
    if torch.cuda.get_device_capability() > (7, 5) and os.environ.get("NF4_FORCE") != "t4":
        return 5
    return 3 if name in (first, "unsloth_today") else 1


def compare(candidates, rounds=ROUNDS, repeats=None, configs=None, against=None):
    """Check, then time `candidates` ({name: layer -> weight}) and `against` (all baselines) in turns.

    Each turn starts with another contender; a failure is recorded and ends a contender's part.
    repeats: turns of each, else as in `turns_of`.
    """
    known = baselines()  # before own_libraries: importing Unsloth replaces functions
    against = known if against is None else against
    entries = {name: Entry(name) for name in candidates}
    entries |= {name: Entry(baseline.label, baseline.reason) for name, baseline in against.items()}
    functions = candidates | {name: baseline.fn for name, baseline in against.items() if baseline.fn}
    ours, *forms = candidates
    turns = {name: repeats or turns_of(name, ours) for name in functions}
    rounds = rounds if ON_GPU else min(rounds, 6)
    checked = known["unsloth_today" if known["unsloth_today"].fn else "bitsandbytes"].label
    result, ran = Comparison(entries, rounds, checked, forms), {}
    if not known["bitsandbytes"].fn:
        for entry in entries.values():
            entry.reason = known["bitsandbytes"].reason
        return result

    def run(name, step, *arguments):
        """Run a step of a contender's part; None once it failed."""
        try:
            return None if entries[name].failure else step(functions[name], *arguments)
        except Exception as error:  # out of memory is a failure like a wrong value
            entries[name].failure = f"{label}: {type(error).__name__}: {error}"

    with own_libraries():
        for config in configs or (OFFICIAL if ON_GPU else SMALL):
            label = f"{config.hidden}x{config.intermediate} {SHORT[config.dtype]}"
            mlp, X = build(config)
            mlp(X), mlp_forward(X, mlp, expected)  # what libraries load now counts for no contender
            for name in functions:
                run(name, warm_up, X, mlp, config.dtype)
                if ON_GPU and name in candidates:
                    ran[name] = run(name, profiled, X, mlp)
            for turn in range(max(turns.values())):
                first = turn % len(functions)
                for name in [*functions, *functions][first : first + len(functions)]:
                    if turn < turns[name]:
                        seconds = run(name, timed, X, mlp, rounds)
                        entries[name].per_config.setdefault(label, []).append(seconds)
            for name in ran:
                run(name, profiled, X, mlp, ran[name])
            del mlp, X
            if ON_GPU:
                gc.collect()
                torch.cuda.empty_cache()
    for entry in entries.values():
        entry.per_config = {} if entry.failure or not ON_GPU else entry.per_config
        entry.seconds = [sum(parts) for parts in zip(*entry.per_config.values(), strict=True)]
    return result


def launch_forms(candidate):
    """Return {name: layer -> weight}: the candidate, and its kernel under Triton's two public launches.

    kernel[grid] is the ordinary one, compiled[grid] that of Triton's fused-softmax tutorial. Both allocate
    and launch on the layer's tensors and check nothing. Without a GPU or our wrapper: the candidate alone.
    """
    cells, forms = getattr(candidate, "__globals__", {}), {candidate.__name__: candidate}
    if not ON_GPU or "_launch_plain" not in cells:
        return forms
    kept = {}  # what a first call of a shape and dtype finds out

    def form(layer, public):
        weight, state = layer.weight.data, layer.weight.quant_state
        key = state.shape, state.dtype, public
        if key not in kept:
            fields = cells["_fields"](weight, state)
            _, compiled, grid, arguments, constexprs, _ = cells["_launch_plain"](*fields)
            options = constexprs | cells["_options"](cells["settings"](weight.device))
            launch = functools.partial(cells["_your_dequantize_nf4_kernel"][(grid,)], **options)
            if public == "compiled[grid]":
                launch, arguments = compiled[(grid, 1, 1)], [*arguments, *constexprs.values()]
            kept[key] = launch, arguments[3], arguments[7:]
        launch, table, rest = kept[key]
        out, second = torch.empty(state.shape, dtype=state.dtype, device=weight.device), state.state2
        launch(weight, out, state.absmax, table, second.code, second.absmax, state.offset, *rest)
        return out

    return forms | {name: functools.partial(form, public=name) for name in ("kernel[grid]", "compiled[grid]")}
