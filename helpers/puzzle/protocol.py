"""The puzzle's official protocol under its own names, and watched: its sections are cells of the notebook."""

# ruff: noqa: E402
# %% The libraries' own functions id="protocol-libraries" folded=true
import collections
import copy
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import inspect
import itertools
import os
import random
import statistics
import time
import types
from collections.abc import Callable
from unittest import mock

import torch

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"  # where Triton interprets the kernel: small shapes, no times
NEEDS_GPU = "an NVIDIA GPU"


def must(true, text):
    """`assert`, also under `python -O`."""
    if not true:
        raise AssertionError(text)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A library's way from a Linear4bit layer to its weight: `fn(layer)`, or the reason why not."""

    name: str
    label: str
    version: str | None = None
    fn: Callable | None = None
    reason: str = ""
    note: str = ""


def own_dequantize_4bit(functional):
    """bitsandbytes' own function, where unsloth_zoo puts a wrapper; proved by module and file."""
    own = inspect.unwrap(functional.dequantize_4bit)
    if (own.__module__, own.__code__.co_filename) != (functional.__name__, functional.__file__):
        raise RuntimeError(f"{own.__module__} replaced bitsandbytes.functional.dequantize_4bit")
    return own


def layer_to_weight(name, module):
    """The function of a layer that a baseline is, from the module that has it."""
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
    """What the kernel is compared with. The first call imports the libraries, bitsandbytes first."""
    made = {}
    for name, label, module, note in (
        ("bitsandbytes", "bitsandbytes", "bitsandbytes.functional",
         "its own dequantize_4bit; beside Unsloth users get unsloth_zoo's wrapper of it"),
        ("unsloth_today", "Unsloth today", "unsloth.kernels.utils", "fast_dequantize as installed"),
        ("unsloth_classic", "Unsloth classic", "unsloth.kernels.utils",
         "_fast_dequantize_ctypes of the same package, three launches: the puzzle's baseline"),
        ("peft", "PEFT", "peft.utils.integrations",
         "dequantize_module_weight, in the protocol on bitsandbytes' own dequantize_4bit"),
    ):  # fmt: skip
        version, fn, reason, package = None, None, "", module.partition(".")[0]
        try:
            version = importlib.metadata.version(package)
            if ON_GPU or package != "unsloth":
                fn = layer_to_weight(name, importlib.import_module(module))
            else:
                reason = f"needs {NEEDS_GPU}"
        except importlib.metadata.PackageNotFoundError:
            reason = "not installed"
        except Exception as error:  # whatever a broken installation raises is the reason to show
            reason = f"{type(error).__name__}: {error}"
        made[name] = Baseline(name, label, version, fn, reason, note)
    shown = ("unsloth_today", "unsloth_classic", "bitsandbytes", "peft")
    return {name: made[name] for name in shown}


def own_libraries():
    """A block in which PEFT and Linear4bit meet bitsandbytes' own function, whoever replaced it."""
    from bitsandbytes import functional

    return mock.patch.object(functional, "dequantize_4bit", own_dequantize_4bit(functional))


def expected(layer) -> torch.Tensor:
    """The weight as bitsandbytes' own function decodes the state as it is.

    On a CPU with AVX512 it wants rows of whole blocks (0.50.2): there it decodes one long row.
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


# %% id="protocol-names"
Config = collections.namedtuple("Config", "batch seq hidden intermediate seed dtype")
OFFICIAL = (
    Config(2, 3333, 2048, 8192, 3407, torch.float16),
    Config(5, 777, 1024, 4096, 3409, torch.bfloat16),
    Config(3, 2048, 4096, 14336, 3408, torch.bfloat16),
)
WEIGHTS = ("up_proj", "gate_proj", "down_proj")  # in the order of a round


def bnb_Linear4bit(hd, m, dtype=torch.float16):
    """A layer with a random (m, hd) weight in doubly quantized NF4."""
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


def unsloth_dequantize(weight):
    """What weights are checked against: Unsloth's, or bitsandbytes' where Unsloth cannot run."""
    return (baselines()["unsloth_today"].fn or expected)(weight)


def mlp_forward(X, mlp, fx):
    """The MLP computed with the weights that `fx` makes of its layers."""
    up = X @ fx(mlp.up_proj).t()
    gate = X @ fx(mlp.gate_proj).t()
    return (torch.nn.functional.silu(gate) * up) @ fx(mlp.down_proj).t()


def synchronize():
    if ON_GPU:
        torch.cuda.synchronize()


def mlp_dequantize(X, mlp, fx):
    """One round: what is timed."""
    a = fx(mlp.up_proj).t()
    synchronize()
    b = fx(mlp.gate_proj).t()
    synchronize()
    c = fx(mlp.down_proj).t()
    synchronize()
    return a, b, c


def assert_same(x, y, dtype, what="result"):
    """The dtype, then values and strides at torch's default tolerances."""
    must(x.dtype == dtype, f"{what}: dtype is {x.dtype}, expected {dtype}")
    torch.testing.assert_close(x, y, check_stride=True, msg=lambda text: f"{what}: {text}")


def assert_correct_bnb(weight, dtype):
    """The layer is in doubly quantized NF4, blocks of 64 and 256, `dtype` out."""
    state, u8, fp32 = weight.weight.quant_state, torch.uint8, torch.float32
    inner, wanted = state.state2, (u8, dtype, u8, fp32, fp32, 64, fp32, fp32, 256)
    facts = (weight.weight.dtype, state.dtype, state.absmax.dtype, state.code.dtype, state.offset.dtype,
             state.blocksize, inner.absmax.dtype, inner.code.dtype, inner.blocksize)  # fmt: skip
    must(facts == wanted, f"quant_state: {facts}, expected {wanted}")


def build(config):
    """(MLP, input) of a configuration, in the protocol's order from its seed."""
    from transformers import set_seed

    default = torch.get_default_dtype()
    set_seed(config.seed)
    torch.set_default_dtype(torch.float32)
    mlp = MLP(config.hidden, config.intermediate, config.dtype)
    X = torch.randn(config.batch, config.seq, config.hidden, dtype=config.dtype, device=DEVICE)
    torch.set_default_dtype(default)
    return mlp, X


def warm_up(fx, X, mlp, dtype):
    """The official checks, twice: the MLP's output, every state, every weight."""
    for _ in range(2):
        assert_same(mlp_forward(X, mlp, fx), mlp(X), dtype, "MLP output")
        results, wanted = (mlp_dequantize(X, mlp, function) for function in (fx, unsloth_dequantize))
        for name, x, y in zip(WEIGHTS, results, wanted, strict=True):
            assert_correct_bnb(getattr(mlp, name), dtype)
            assert_same(x, y, dtype, name)


# %% id="protocol-watch"
STOPS = 10  # of a clock, to compare
secret = random.SystemRandom()


def different(x: torch.Tensor, y: torch.Tensor) -> int:
    """Number of elements whose bits differ; NaN equals NaN. ValueError where shape or dtype differ."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"cannot compare {x.dtype} {tuple(x.shape)} with {y.dtype} {tuple(y.shape)}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    differ = x.contiguous().view(bits) != y.contiguous().view(bits)
    return int((differ & ~(x.isnan() & y.isnan())).sum())


def change(mlp, count):
    """Give each layer other values, in place and past autograd's version counters.

    In turn all weight bytes, all absmax codes, the absmax of the absmax, the offset.
    """
    for i, name in enumerate(WEIGHTS):
        weight, kind = getattr(mlp, name).weight, (count + i) % 4
        state = weight.quant_state
        value = (weight, state.absmax, state.state2.absmax, state.offset)[kind].data
        if kind < 2:
            value.bitwise_xor_(secret.randrange(1, 256))
        else:
            value.mul_(secret.uniform(0.9, 1.1))


def assert_right_now(results, mlp):
    """Every bit is that of the state as it is. Then the results are overwritten, so that memory
    handed out again holds no weight."""
    for result, name in zip(results, WEIGHTS, strict=True):
        wrong = different(result, expected(getattr(mlp, name)).t())
        must(not wrong, f"{name} while timed: {wrong} of {result.numel()} elements differ")
        result.fill_(float("nan"))


def timed(fx, X, mlp, rounds):
    """Seconds of `rounds` rounds. The clock stops at secret ones, in turn to change the layers and to
    compare the last round's results with them."""
    stops, seconds = min(STOPS, rounds // 2), 0.0
    cuts = sorted(secret.sample(range(1, rounds), 2 * stops - 1))
    for i, (first, end) in enumerate(itertools.pairwise((0, *cuts, rounds))):
        synchronize()
        start = time.perf_counter()
        for _ in range(first + 1, end):
            mlp_dequantize(X, mlp, fx)
        results = mlp_dequantize(X, mlp, fx)
        seconds += time.perf_counter() - start
        if i % 2:
            assert_right_now(results, mlp)
        else:
            change(mlp, i // 2)
        del results
    return seconds


# %% Contenders in turns id="protocol-turns" folded=true
def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree; NaN equals NaN."""
    return x.dtype == y.dtype and x.shape == y.shape and different(x, y) == 0


SMALL = (  # for Triton's interpreter
    Config(2, 33, 128, 448, 3407, torch.float16),
    Config(5, 7, 64, 192, 3409, torch.bfloat16),
    Config(3, 20, 192, 320, 3408, torch.bfloat16),
)
LEFT_BEHIND = 8 << 20  # bytes of each configuration that a contender may take past torch's allocator


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def uncounted() -> int:
    """Bytes in use on the GPU that torch's allocator does not know of."""
    if not ON_GPU:
        return 0
    synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@dataclasses.dataclass
class Entry:
    """A contender's part in the protocol; it has times only if it passed every check."""

    label: str
    version: str | None = None
    reason: str = ""  # why it took no part
    note: str = ""
    failure: str = ""
    identical: bool | None = None  # to bitsandbytes' weights, every bit compared
    seconds: list[float] = dataclasses.field(default_factory=list)  # a value a turn, all configurations
    per_config: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def p50(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclasses.dataclass
class Comparison:
    """The protocol of several contenders who took turns in one process."""

    entries: dict[str, Entry]
    rounds: int
    repeats: int
    checked_against: str
    device: str
    configs: list[str]

    def speedup(self, name: str, baseline: str) -> float | None:
        """Median seconds of `baseline` over those of `name`; None where either has none."""
        mine, theirs = (self.entries[n].p50 if n in self.entries else None for n in (name, baseline))
        return theirs / mine if mine and theirs else None

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def __repr__(self):
        """A line a contender: median seconds, over the first one's, every turn."""
        lines = [f"{self.rounds} rounds a configuration; checked against {self.checked_against}"]
        for name, entry in self.entries.items():
            text = entry.reason or entry.failure.split("\n")[0] or f"right; not timed (needs {NEEDS_GPU})"
            if entry.seconds:
                ratio = self.speedup(next(iter(self.entries)), name) or 0
                turns = " ".join(f"{seconds:.4f}" for seconds in entry.seconds)
                text = f"{entry.p50:.4f} s  {ratio:5.3f}x  of {turns}"
            lines.append(f"{entry.label:20} {text}")
        return "\n".join(lines)


def turns_of(name, baseline):
    """How often a contender is timed: 5 times; on a T4 3 times, and baselines but Unsloth's once."""
    if not ON_GPU:
        return 1
    if torch.cuda.get_device_capability() > (7, 5) and os.environ.get("NF4_FORCE") != "t4":
        return 5
    return 1 if baseline and name != "unsloth_today" else 3


def compare(candidates, rounds=1000, repeats=None, configs=None, against=None, tick=lambda: None):
    """Check, then time `candidates` ({name: layer -> weight}) and `against` (all baselines) in turns.

    In each turn another contender begins; a failure is recorded and ends a contender's part.
    repeats: turns of each, else `turns_of` says. tick() is called after each.
    """
    known = baselines()  # before own_libraries: importing Unsloth replaces functions
    against = known if against is None else against
    entries = {name: Entry(name) for name in candidates}
    entries |= {name: Entry(b.label, b.version, b.reason, b.note) for name, b in against.items()}
    functions = candidates | {name: b.fn for name, b in against.items() if b.fn}
    turns = {name: repeats or turns_of(name, name in against) for name in functions}
    configs, rounds = configs or (OFFICIAL if ON_GPU else SMALL), rounds if ON_GPU else min(rounds, 4)
    taken = {name: [] for name in functions}

    def run(name, step, *arguments):
        """A step of a contender's part, None once it failed; counts memory taken past torch."""
        before = uncounted()
        try:
            return None if entries[name].failure else step(functions[name], *arguments)
        except Exception as error:  # out of memory is a failure like a wrong value
            entries[name].failure = f"{label(config)}: {type(error).__name__}: {error}"
        finally:
            taken[name][-1] += uncounted() - before

    def label(config):
        size = f"{config.hidden}x{config.intermediate} {name_of(config.dtype)}"
        return f"{size}, input {config.batch}x{config.seq}, seed {config.seed}"

    with own_libraries():
        for config in configs:
            mlp, X = build(config)
            mlp(X), mlp_forward(X, mlp, unsloth_dequantize)  # what libraries load now is nobody's
            for name in functions:
                taken[name].append(0)
                run(name, warm_up, X, mlp, config.dtype)
            for turn in range(max(turns.values())):
                first = turn % len(functions)
                for name in [*functions, *functions][first : first + len(functions)]:
                    if turn < turns[name]:
                        seconds = run(name, timed, X, mlp, rounds)
                        entries[name].per_config.setdefault(label(config), []).append(seconds)
                        tick()
            del mlp, X
            gc.collect()
            torch.cuda.empty_cache()
    for name in functions:
        entry, least = entries[name], min(taken[name])
        if least > LEFT_BEHIND and not entry.failure:
            entry.failure = f"takes {least >> 20} MiB past torch in each configuration"
        entry.identical = None if entry.failure else True
        entry.per_config = {} if entry.failure or not ON_GPU else entry.per_config
        entry.seconds = [sum(parts) for parts in zip(*entry.per_config.values(), strict=True)]
    checked = known["unsloth_today" if known["unsloth_today"].fn else "bitsandbytes"].label
    return Comparison(entries, rounds, max(turns.values()), checked, DEVICE, [label(c) for c in configs])


def test_dequantize(dequantize_fx):
    """Seconds of the official protocol; None without a GPU. AssertionError where a weight is wrong."""
    entry = compare({"fx": dequantize_fx}, repeats=1, against={}).entries["fx"]
    must(not entry.failure, entry.failure)
    return entry.p50


test_dequantize.__test__ = False  # the puzzle's name for it: no test for pytest
