"""Result files: their typed schema, one reader and one writer. One folder a card under results/.

A file holds `environment`, `kernel` (which one was measured) and `data`, whose type follows from the file's
name (`SCHEMA`; a score is a `marking.Score`). A figure that is not in such a file is not shown anywhere.
"""

import statistics
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from helpers import machine
from helpers.results import hashes

EARLIER = "measured with an earlier kernel"


class Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What every part of a result file is made of: a misspelt or unknown key is an error."""


def percentiles(values: list[float]) -> dict[str, float]:
    """p20, p50 and p80; the outer two are values that were measured. ValueError when there are none."""
    if not values:
        raise ValueError("percentiles of nothing: at least one value is needed")
    ordered, last = sorted(values), len(values) - 1
    low, high = (ordered[round(share * last)] for share in (0.2, 0.8))
    return {"p20": low, "p50": statistics.median(ordered), "p80": high}


class Times(Record):
    """Microseconds of one call over the rounds of an interleaved run."""

    p50: float
    rounds: int
    p20: float | None = None  # of ten rounds or more
    p80: float | None = None
    repeats: list[float] = []  # all of them, of fewer than ten rounds

    @classmethod
    def of(cls, seconds: list[float]) -> "Times":
        """From seconds by round. ValueError when there are none."""
        us = [1e6 * value for value in seconds]
        if len(us) < 10:
            return cls(p50=percentiles(us)["p50"], rounds=len(us), repeats=us)
        return cls(rounds=len(us), **percentiles(us))


Rows = dict[str, Times]


def ratio(rows: Rows, numerator: str, denominator: str) -> float | None:
    """The canonical ratio: medians of interleaved rounds, divided. None where either was not measured."""
    if numerator not in rows or denominator not in rows:
        return None
    return rows[numerator].p50 / rows[denominator].p50


# --- helpers bench ---


class Parts(Record):
    """Where the microseconds of one call go; `kernels` is None where they cannot be counted."""

    allocations: int
    kernels: int | None
    returned_us: float
    wait_us: float
    allocate_us: float
    launch_us: float | None = None
    rest_us: float | None = None


class HostCase(Record):
    shape: tuple[int, int]  # (out_features, in_features), of one layer
    dtype: str
    returned: Rows  # until the call returns
    synchronized: Rows  # with a synchronize
    failures: dict[str, str] = {}


class Host(Record):
    cases: list[HostCase]
    units: Rows  # single steps that a call is made of
    parts: dict[str, Parts]
    steps: Rows = {}  # our call with one of its shortcuts taken away, until it returns


class Entry(Record):
    """One contestant of the official protocol. `seconds[i]` is repeat i over all configurations."""

    label: str
    seconds: list[float]
    per_config: dict[str, list[float]]
    identical: bool | None = None  # every checked weight equal bit for bit
    version: str | None = None
    failure: str = ""
    reason: str = ""
    note: str = ""

    @property
    def p50(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


class Protocol(Record):
    entries: dict[str, Entry]
    rounds: int
    repeats: int
    checked_against: str
    device: str
    configs: list[str]

    def speedup(self, name: str, baseline: str) -> float | None:
        """Median seconds of `baseline` over those of `name`; None where either has no time."""
        mine, theirs = (self.entries[n].p50 if n in self.entries else None for n in (name, baseline))
        return theirs / mine if mine and theirs else None


class ByteMover(Record):
    """The official protocol's timed rounds with a kernel that only moves the bytes, on our launch path."""

    rounds: int
    seconds: dict[str, list[float]]  # kernel, byte_mover: one value a repeat, over all configurations

    @property
    def share(self) -> float:
        """Of the byte-mover's speed that the kernel reaches."""
        return statistics.median(self.seconds["byte_mover"]) / statistics.median(self.seconds["kernel"])


class GpuCase(Record):
    """GPU times of one size, or of one product. `skipped` says why nothing was measured."""

    dtype: str
    rows: Rows = {}
    failures: dict[str, str] = {}
    skipped: str = ""
    numel: int | None = None
    shape: tuple[int, int] | None = None  # of a product's weight
    tokens: int | None = None


class Gpu(Record):
    sizes: list[GpuCase]


class Cases(Record):
    cases: list[GpuCase]


class Starts(Record):
    """Seconds of each step of fresh processes, one dictionary a process."""

    empty: list[dict[str, float]]  # Triton's cache was empty
    warm: list[dict[str, float]]  # ... filled by another process

    def median(self, state: str) -> float:
        """Seconds of the first call; state: 'empty' or 'warm'."""
        return statistics.median(run["first_call"] for run in getattr(self, state))


class Cold(Record):
    kernel: Starts
    trivial: Starts | None = None  # a kernel that stores one number: Triton's own share


class Compiles(Record):
    rows: list[dict[str, str | int]]  # dtype, state ("nested" or "flat"), compiles


class CompileCase(Record):
    """24 weights, each followed by its product, eager and under one torch.compile."""

    tokens: int
    backward: bool
    eager: Rows
    compiled: Rows
    failures: dict[str, str] = {}


class Compile(Record):
    weights: int
    shape: tuple[int, int]
    dtype: str
    cases: list[CompileCase]
    call_eager: Rows  # one dequantization alone, until it returns
    call_compiled: Rows
    failures: dict[str, str] = {}
    parts: CompileCase | None = None  # our forward with one thing less from row to row, and launches alone


class Benchmark(Record):
    """A section that was not measured is None, and `not_measured` or `failed` says why."""

    quick: bool
    host: Host | None = None
    call_cost: dict[str, dict[str, int]] | None = None  # of one call: bytecodes, python_calls, c_calls
    protocol: Protocol | None = None
    byte_mover: ByteMover | None = None
    gpu: Gpu | None = None
    gemm: Cases | None = None  # rows: everyone, and the multiplication alone
    compile: Compile | None = None
    cold: Cold | None = None
    compiles: Compiles | None = None
    ablation: Cases | None = None  # rows: "as chosen", and one decision changed at a time
    not_measured: dict[str, str] = {}
    failed: dict[str, str] = {}
    unsloth_fused: bool | None = None  # Unsloth's fused kernel was in use to the end

    def gpu_rows(self) -> dict[tuple[int, str], Rows]:
        """GPU times by (elements, dtype), of the sizes that were measured."""
        cases = self.gpu.sizes if self.gpu else []
        return {(case.numel, case.dtype): case.rows for case in cases if case.rows}


# --- the other commands ---


class Cell(Record):
    title: str
    seconds: float
    protocol: bool = False
    setup: bool = False
    not_on_a_t4: bool = False


class NotebookRun(Record):
    cells: list[Cell]


class Spread(Record):
    p20: float
    p50: float
    p80: float
    low: float | None = None  # a 95% interval of the median
    high: float | None = None


class Arm(Record):
    """A training step with or without the kernel."""

    ms: Spread
    gpu_ms: float
    dequantize_ms: float


class TrainingSize(Record, rename={"with_": "with"}):
    rows: int
    length: int
    tokens: int
    same_bits: bool
    repeatable: bool
    different_results: dict[str, int]
    strict: bool
    without: Arm
    with_: Arm
    speedup: Spread
    rounds: int
    steps_a_round: int
    calls: dict[str, int]  # kernel, library, fused


class Operation(Record, rename={"with_": "with"}):
    """Something done with a whole model, in ms with and without the kernel; `failed` says why it has none."""

    name: str
    without: Spread | None = None
    with_: Spread | None = None
    speedup: Spread | None = None
    rounds: int = 0
    steps_a_round: int = 1
    same_bits: bool | None = None
    calls: dict[str, int] = {}  # kernel, library, fused
    failed: str = ""


class Library(Record):
    sizes: list[TrainingSize] = []
    operations: list[Operation] = []
    failed: str = ""


class Training(Record):
    layers: int | None = None
    rank: int | None = None
    model: dict[str, int] = {}
    libraries: dict[str, Library] = {}


class Engine(Record):
    processes: int | None = None
    steps: int | None = None
    step_ms: dict[str, Spread] = {}  # without, with
    speedup: Spread | None = None
    same_losses: bool | None = None
    decoded_by_the_kernel: list[int] = []
    failed: str = ""


class SeveralGpus(Record):
    model: dict[str, int]
    engines: dict[str, Engine]


class Outcome(Record):
    outcome: str  # exact, wrong, refused, accepted or crash
    text: str


class Fuzz(Record):
    cases: int
    elements: int
    kinds: int
    failed: int
    first_failures: list[Any]
    seed: int
    seconds: float
    device: str
    ways: dict[str, int]


class Soak(Record):
    launches: int
    layers: int
    wrong: int
    windows: list[dict[str, float | int]]  # us, and bytes: host, allocated, reserved
    seconds: float
    grown: list[str]


class Mutants(Record):
    caught: int
    mutants: list[dict[str, str | float]]  # mutant, verdict, by, seconds


class SuiteRun(Record):
    passed: int
    skipped: int
    failed: list[str]
    launches: dict[str, int]


class OwnTests(Record):
    """bitsandbytes' own tests with and without this kernel in its place."""

    bitsandbytes: str
    tests: str
    selection: str
    original: SuiteRun
    substituted: SuiteRun
    failed_only_with_this_kernel: list[str]


SCHEMA = {
    "benchmark": Benchmark,
    "protocol": Protocol,
    "notebook": NotebookRun,
    "training": Training,
    "several_gpus": SeveralGpus,
    "libraries": dict[str, dict[str, Outcome]],
    "fuzz": Fuzz,
    "soak": Soak,
    "mutants": Mutants,
    "mutants_gpu": Mutants,
    "bitsandbytes_own": OwnTests,
}


# --- the file ---


class Environment(Record):
    """What `helpers.machine.describe()` says."""

    gpu: str | None
    capability: tuple[int, int] | None
    driver: str | None
    cuda: str | None
    python: str
    torch: str | None
    triton: str | None
    bitsandbytes: str | None
    unsloth: str | None
    peft: str | None
    transformers: str | None
    date: str
    colab: bool
    kaggle: bool
    interpreter: bool
    forced: str | None


class Kernel(Record):
    """Which kernel was measured: two hashes over its code, and every decision for the card at hand."""

    label: str  # what a caption shows
    device: str | None = None  # None in files from before there were two hashes
    host: str | None = None
    settings: dict[str, Any] = {}


Data = TypeVar("Data")


class Result(Record, Generic[Data], omit_defaults=False):
    environment: Environment
    kernel: Kernel
    data: Data


def now(data: Data) -> Result[Data]:
    """A result of this machine and of the kernel as it is now."""
    facts = msgspec.convert(machine.describe(), Environment)
    return Result(environment=facts, kernel=Kernel(**hashes.stamp()), data=data)


def _file(name: str, folder: Path) -> Path:
    return Path(folder) / f"{name.removesuffix('.json')}.json"


def _type(name: str, schema=None):
    return schema or SCHEMA.get(name.removesuffix(".json"), dict[str, Any])


def write(name: str, data, folder: Path | None = None, schema=None) -> Path:
    """Store `data`, a Record or what converts to the type of that name, and return the file's path.

    folder: this card's folder under results/ by default. schema: for a file of another name than its type's.
    Raises msgspec.ValidationError where data does not fit.
    """
    data = msgspec.convert(data, _type(name, schema), from_attributes=True)
    return save(name, now(data), folder or machine.result_folder())


def save(name: str, result: Result, folder: Path) -> Path:
    """Store a whole result."""
    path = _file(name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def read(name: str, folder: Path, schema=None) -> Result:
    """The result stored under that name.

    Raises FileNotFoundError, and msgspec.ValidationError for a file that is not of its type.
    """
    content = _file(name, folder).read_bytes()
    return msgspec.json.decode(content, type=Result[_type(name, schema)])


def find(name: str, folder: Path, schema=None) -> Result | None:
    """`read`, or None where there is no such file."""
    return read(name, folder, schema) if _file(name, folder).exists() else None


def stale(result: Result, what: str = "call") -> bool:
    """Whether the kernel has changed since, in what the figure depends on.

    what: "gpu" for GPU times (they depend on what is compiled alone), "call" for everything else.
    """
    if what not in ("gpu", "call"):
        raise ValueError(f"what is {what!r}, expected 'gpu' or 'call'")
    measured = result.kernel
    if measured.device != hashes.device() or (what == "call" and measured.host != hashes.host()):
        return True
    now_decided = hashes.decisions(result.environment, measured.settings["sms"])
    return hashes.deciding(measured.settings) != now_decided


def caption(result: Result | None, what: str = "call") -> str:
    """Card, date, kernel and versions of a result in one line; it says when the kernel is an earlier one."""
    if result is None:
        return "no result file"
    facts = result.environment
    forced = f" ({facts.forced.upper()}'s decisions forced)" if facts.forced else ""
    quick = ", quick run" if getattr(result.data, "quick", False) else ""
    versions = ", ".join(f"{n} {v}" for n, v in (("torch", facts.torch), ("triton", facts.triton)) if v)
    parts = [f"{facts.gpu or 'no GPU'}{forced}", f"{facts.date[:10]}{quick}", f"kernel {result.kernel.label}"]
    earlier = f" ({EARLIER})" if stale(result, what) else ""
    return " | ".join([*parts, versions]) + earlier
