"""The puzzle's official protocol: correctness first, then 1000 timed rounds per configuration.

One round dequantizes up, gate and down of an MLP of `Linear4bit` layers, transposes each, and synchronizes
after each. What comes before the clock are checks, at `torch.testing.assert_close`'s default tolerances.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from helpers.machine import environment
from helpers.measure import clocks
from helpers.oracle import baselines, reference

WARMUPS = 2
NOT_MEASURED = "not measured (needs an NVIDIA GPU)"


@dataclass(frozen=True)
class Config:
    """One MLP of the protocol: its sizes, the seed of its weights and input, and the dtype of everything."""

    batch: int
    seq: int
    hidden: int
    intermediate: int
    seed: int
    dtype: torch.dtype

    @property
    def label(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.hidden}x{self.intermediate} {name}, input {self.batch}x{self.seq}, seed {self.seed}"


OFFICIAL = (
    Config(2, 3333, 2048, 8192, 3407, torch.float16),
    Config(5, 777, 1024, 4096, 3409, torch.bfloat16),
    Config(3, 2048, 4096, 14336, 3408, torch.bfloat16),
)
# For Triton's interpreter. Rows are whole blocks: bitsandbytes 0.50.2 with AVX512 decodes others wrongly.
SMALL = (
    Config(2, 33, 128, 448, 3407, torch.float16),
    Config(5, 7, 64, 192, 3409, torch.bfloat16),
    Config(3, 20, 192, 320, 3408, torch.bfloat16),
)


class Mlp(torch.nn.Module):
    """Gate, up and down projections in nested NF4 with SiLU, as in Llama, on `device`.

    It stays in training mode: in evaluation mode a CPU with AVX512-BF16 would repack the weights in place.
    """

    def __init__(self, config: Config, device: str):
        super().__init__()
        self.gate_proj = self._linear(config.hidden, config.intermediate, config.dtype, device)
        self.up_proj = self._linear(config.hidden, config.intermediate, config.dtype, device)
        self.down_proj = self._linear(config.intermediate, config.hidden, config.dtype, device)

    @staticmethod
    def _linear(in_features, out_features, dtype, device):
        from bitsandbytes.nn import Linear4bit

        layer = Linear4bit(
            in_features,
            out_features,
            bias=None,
            compute_dtype=dtype,
            compress_statistics=True,
            quant_type="nf4",
        ).to(device)
        layer.weight.quant_state.dtype = dtype
        return layer

    def forward(self, x):
        """x: (batch, seq, hidden) -> the same shape and dtype."""
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def forward_with(self, x, dequantize):
        """The same computation, each weight made by `dequantize(layer)`."""
        up = x @ dequantize(self.up_proj).t()
        gate = x @ dequantize(self.gate_proj).t()
        return torch.nn.functional.silu(gate) * up @ dequantize(self.down_proj).t()


@dataclass
class Result:
    """What one run of the protocol found. `elapsed`: seconds over all configurations, None without a GPU."""

    elapsed: float | None
    per_config: list[dict]
    rounds: int
    checked_against: str
    device: str

    @property
    def elapsed_text(self) -> str:
        return NOT_MEASURED if self.elapsed is None else f"{self.elapsed:.4f} s"


@dataclass
class Entry:
    """One candidate or baseline of a comparison. `seconds[i]` is repeat i, summed over the configurations.

    An entry that fails a check keeps the text in `failure` and no times; an absent one says why in `reason`.
    """

    label: str
    seconds: list[float] = field(default_factory=list)
    per_config: dict[str, list[float]] = field(default_factory=dict)
    identical: bool | None = None  # every checked weight equal to the partner's bit for bit
    version: str | None = None
    failure: str = ""
    reason: str = ""
    note: str = ""

    @property
    def spread(self) -> dict[str, float] | None:
        """p20, p50 and p80 of `seconds`; None without times."""
        return clocks.percentiles(self.seconds) if self.seconds else None


@dataclass
class Comparison:
    """Interleaved protocol runs of several candidates in one process."""

    entries: dict[str, Entry]
    rounds: int
    repeats: int
    checked_against: str
    device: str
    configs: list[str]

    def median(self, name: str) -> float | None:
        entry = self.entries.get(name)
        return entry.spread["p50"] if entry and entry.seconds else None

    def speedup(self, name: str, baseline: str) -> float | None:
        """Median time of `baseline` over that of `name`; None where either has no time."""
        mine, theirs = self.median(name), self.median(baseline)
        return theirs / mine if mine and theirs else None

    def to_dict(self) -> dict:
        """JSON types only; speedups of every entry over every other one with times."""
        timed = [name for name, entry in self.entries.items() if entry.seconds]
        entries = {
            name: vars(entry)
            | {
                "spread": entry.spread,
                "speedup_over": {b: self.speedup(name, b) for b in timed if name in timed},
            }
            for name, entry in self.entries.items()
        }
        return vars(self) | {"entries": entries}


def test_dequantize(
    candidate: Callable,
    configs: tuple[Config, ...] | None = None,
    rounds: int = 1000,
    device: str | None = None,
) -> Result:
    """Check and time `candidate` (layer -> weight); AssertionError with place and numbers where it is wrong.

    configs: OFFICIAL on a GPU and SMALL on the CPU unless given. On the CPU nothing is timed and at most two
    rounds run.
    """
    device, configs, rounds = _where(device, configs, rounds)
    partner = _partner()
    per_config = []
    for config in configs:
        per_config.append(_run(candidate, partner.fn, config, rounds, device))
        _free(device)
    elapsed = sum(row["seconds"] for row in per_config) if _is_gpu(device) else None
    return Result(elapsed, per_config, rounds, partner.label, device)


test_dequantize.__test__ = False  # the puzzle's name for it; not a test for pytest to collect


def compare(
    candidates: dict[str, Callable],
    configs: tuple[Config, ...] | None = None,
    rounds: int = 1000,
    repeats: int = 5,
    device: str | None = None,
    against: dict[str, baselines.Baseline] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Comparison:
    """Check, then time all `candidates` and baselines in turns, on the same layers.

    Each repeat times every contestant's `rounds` once, starting with another one each time. A failure is
    recorded in the entry and never raised. `against` defaults to all baselines; `tick` is called after each
    timed part (configurations x repeats x contestants at most).
    """
    device, configs, rounds = _where(device, configs, rounds)
    against = baselines.available() if against is None else against
    partner = _partner()
    entries = {name: Entry(label=name) for name in candidates}
    functions = dict(candidates)
    for name, baseline in against.items():
        entries[name] = Entry(
            label=baseline.label, version=baseline.version, reason=baseline.reason, note=baseline.note
        )
        if baseline.fn is not None:
            functions[name] = baseline.fn
    repeats = repeats if _is_gpu(device) else 0
    for config in configs:
        _contest(functions, entries, partner.fn, config, rounds, repeats, device, tick)
        _free(device)
    for entry in entries.values():
        if entry.failure:  # also where it passed and was timed in an earlier configuration
            entry.per_config, entry.identical = {}, None
        entry.seconds = [sum(parts) for parts in zip(*entry.per_config.values(), strict=True)]
    labels = [config.label for config in configs]
    return Comparison(entries, rounds, repeats, partner.label, device, labels)


def _run(candidate, partner, config, rounds, device):
    """One configuration of the protocol for one candidate."""
    mlp, x = _build(config, device)
    identical = _check(candidate, partner, mlp, x, config)
    seconds = _timed(candidate, mlp, rounds, device)
    return {"config": config.label, "seconds": seconds if _is_gpu(device) else None, "identical": identical}


def _contest(functions, entries, partner, config, rounds, repeats, device, tick):
    """One configuration of a comparison: fills `entries`; whoever fails its checks leaves `functions`."""
    mlp, x = _build(config, device)

    def attempt(name, step):
        try:
            return step()
        except Exception as error:  # an out-of-memory error is a finding here like a wrong value
            entries[name].failure = f"{config.label}: {type(error).__name__}: {error}"
            del functions[name]

    for name in list(functions):
        identical = attempt(name, lambda name=name: _check(functions[name], partner, mlp, x, config))
        entries[name].identical = bool(identical) and entries[name].identical is not False
    order = list(functions)
    for _ in range(repeats):
        for name in order:
            if name in functions:
                seconds = attempt(name, lambda name=name: _timed(functions[name], mlp, rounds, device))
                entries[name].per_config.setdefault(config.label, []).append(seconds)
                tick()
        order = order[1:] + order[:1]


def _where(device, configs, rounds):
    """The device, configurations and number of rounds that fit this machine."""
    device = device or ("cuda" if environment.has_gpu() else "cpu")
    if _is_gpu(device):
        return device, configs or OFFICIAL, rounds
    return device, configs or SMALL, min(rounds, 2)


def _partner():
    """Whose weights are the expected ones: Unsloth's, or bitsandbytes' where Unsloth cannot run."""
    found = baselines.available()
    for name in ("unsloth_today", "bitsandbytes"):
        if found[name].fn is not None:
            return found[name]
    raise RuntimeError(f"the protocol needs bitsandbytes: {found['bitsandbytes'].reason}")


def _build(config, device):
    """The configuration's MLP and input, made in the protocol's order from its seed."""
    from transformers import set_seed

    default = torch.get_default_dtype()
    set_seed(config.seed)
    torch.set_default_dtype(torch.float32)
    try:
        mlp = Mlp(config, device)
        x = torch.randn((config.batch, config.seq, config.hidden), dtype=config.dtype, device=device)
    finally:
        torch.set_default_dtype(default)
    _synchronizer(device)()
    return mlp, x


def _free(device):
    """Give the memory of the configuration that just ended back to the device."""
    gc.collect()
    if _is_gpu(device):
        torch.cuda.empty_cache()


def _check(candidate, partner, mlp, x, config):
    """The protocol's warm-up; AssertionError where it fails. Returns whether every bit was equal."""
    synchronize = _synchronizer(x.device)
    identical = True
    for _ in range(WARMUPS):
        _assert_close(mlp.forward_with(x, candidate), mlp(x), config.dtype, "MLP output")
        for name in ("up_proj", "gate_proj", "down_proj"):
            check_quant_state(getattr(mlp, name), config.dtype, name)
        mine = _one_round(candidate, mlp, synchronize)
        theirs = _one_round(partner, mlp, synchronize)
        for name, actual, expected in zip(("up", "gate", "down"), mine, theirs, strict=True):
            _assert_close(actual, expected, config.dtype, f"{name} weight")
            identical = identical and reference.same_bits(actual, expected)
    return identical


def check_quant_state(layer, dtype: torch.dtype, name: str = "layer") -> None:
    """Assert that a layer is what the protocol expects: nested NF4, blocks of 64 and 256, `dtype` out."""
    state = layer.weight.quant_state
    expected = {
        "weight.dtype": (layer.weight.dtype, torch.uint8),
        "quant_state.dtype": (state.dtype, dtype),
        "absmax.dtype": (state.absmax.dtype, torch.uint8),
        "code.dtype": (state.code.dtype, torch.float32),
        "offset.dtype": (state.offset.dtype, torch.float32),
        "blocksize": (state.blocksize, 64),
        "state2.absmax.dtype": (state.state2.absmax.dtype, torch.float32),
        "state2.code.dtype": (state.state2.code.dtype, torch.float32),
        "state2.blocksize": (state.state2.blocksize, 256),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise AssertionError(f"{name}: {what} is {found}, expected {wanted}")


def _assert_close(actual, expected, dtype, what):
    """The protocol's comparison: the dtype, then torch's own default tolerances and strides."""
    if actual.dtype != dtype:
        raise AssertionError(f"{what}: dtype is {actual.dtype}, expected {dtype}")
    torch.testing.assert_close(actual, expected, check_stride=True, msg=lambda text: f"{what}: {text}")


def _one_round(dequantize, mlp, synchronize):
    """Up, gate and down weights, transposed, with a synchronize after each."""
    up = dequantize(mlp.up_proj).t()
    synchronize()
    gate = dequantize(mlp.gate_proj).t()
    synchronize()
    down = dequantize(mlp.down_proj).t()
    synchronize()
    return up, gate, down


def _timed(dequantize, mlp, rounds, device):
    """Wall-clock seconds of `rounds` rounds."""
    synchronize = _synchronizer(device)
    synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        _one_round(dequantize, mlp, synchronize)
    return time.perf_counter() - start


def _synchronizer(device):
    return torch.cuda.synchronize if _is_gpu(device) else lambda: None


def _is_gpu(device):
    return torch.device(device).type == "cuda"
