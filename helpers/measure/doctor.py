"""`python -m helpers doctor`: what is here, what is missing, whether the kernel is right and fast here."""

import argparse
import dataclasses
import json
import statistics

from helpers.machine import environment, install

SIZES = (1024, 4096, 8192)  # square layers
DTYPES = ("float16", "bfloat16")
LAYER = (200, 33)  # (in_features, out_features): 6600 elements end mid-tile, mid-block and on half a word
KERNEL = "this kernel"
CLOSE = 1.03  # speeds nearer than this are called equal
SETUP = "bash colab_setup.sh"


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding: ok, failed, or None where it could not be checked here (the detail says why)."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Microseconds of one call with a synchronize, by contender, on a square layer."""

    size: int
    dtype: str
    us: dict[str, float]


@dataclasses.dataclass
class Report:
    environment: dict
    checks: list[Check]
    speed: list[Speed] = dataclasses.field(default_factory=list)
    cold_start_seconds: dict[str, float] | None = None  # first call: with an empty cache, with a warm one
    backend: dict | None = None
    recommendation: str = ""


def packages() -> list[Check]:
    """What requirements.txt asks for here and is missing or out of range."""
    found = install.installed()
    gaps = install.missing(install.wanted([], install.nvidia_gpus()), found)
    lacking = (
        Check(f"package {n}", False, f"{need} is needed, {found.get(n, 'none')} is installed", SETUP)
        for n, need in gaps.items()
    )
    return list(lacking) or [
        Check("packages", True, "all of requirements.txt that is used here is installed")
    ]


def gpu() -> Check:
    """Whether there is a GPU that the kernel supports."""
    if text := environment.old_gpu():
        return Check("GPU", False, text)
    if text := environment.no_gpu():
        broken = bool(install.nvidia_gpus())  # a GPU is there, torch cannot use it
        return Check("GPU", False if broken else None, text)
    major, minor = environment.capability()
    bf16 = "native" if environment.native_bf16() else "rounded in integers"
    return Check("GPU", True, f"{environment.gpu_name()}, sm_{major}{minor}, bf16 {bf16}")


def triton_check(device: str) -> Check:
    """A tiny kernel that loads, computes and stores under masks; compiled on a GPU, interpreted elsewhere."""
    if text := environment.old_triton():
        return Check("Triton", False, text, SETUP)
    try:
        from helpers.measure import ceilings

        good = ceilings.works(device)
    except Exception as error:
        return Check("Triton", False, f"a tiny kernel fails: {type(error).__name__}: {error}")
    how = "interprets" if environment.interpreter() else "compiles and runs"
    return Check("Triton", good, f"{how} a tiny kernel" if good else "a tiny kernel returns wrong numbers")


def equality(device: str) -> list[Check]:
    """The kernel bit for bit against bitsandbytes and the oracle, on a small layer of an awkward size."""
    checks = []
    for dtype in DTYPES:
        name = f"bit-equal, {dtype}"
        try:
            checks.append(Check(name, *_equal(device, dtype)))
        except Exception as error:
            checks.append(Check(name, False, f"{type(error).__name__}: {error}"))
    return checks


def _equal(device: str, dtype: str) -> tuple[bool, str]:
    import bitsandbytes
    import torch

    from helpers.nf4 import kernel
    from helpers.oracle import reference
    from helpers.oracle.layers import quantized_layer
    from helpers.submission import protocol

    layer = quantized_layer(*LAYER, getattr(torch, dtype), device=device)
    ours = kernel.your_dequantize_nf4(layer)
    others = {
        f"bitsandbytes {bitsandbytes.__version__}": protocol.expected(layer),
        "the oracle": reference.dequantize(layer.weight.data, layer.weight.quant_state),
    }
    wrong = {name: protocol.different(ours, other) for name, other in others.items()}
    bad = [f"{count} of {ours.numel()} elements differ from {name}" for name, count in wrong.items() if count]
    return not bad, "; ".join(bad) or f"{ours.numel()} elements as in {' and '.join(others)}"


def speed(quick: bool) -> list[Speed]:
    """The kernel and the baselines, interleaved, each call with a synchronize as in the protocol."""
    import torch

    from helpers.measure.clocks import time_interleaved
    from helpers.nf4 import kernel
    from helpers.oracle.layers import quantized_layer
    from helpers.submission import protocol

    functions = {KERNEL: kernel.your_dequantize_nf4}
    functions |= {baseline.label: baseline.fn for baseline in protocol.baselines().values() if baseline.fn}
    rows = []
    for dtype in DTYPES:
        for size in SIZES:
            layer = quantized_layer(size, size, getattr(torch, dtype), device="cuda")
            calls = {name: lambda fn=fn, layer=layer: fn(layer) for name, fn in functions.items()}
            times = time_interleaved(calls, rounds=5 if quick else 15, inner=50, wait=True)
            us = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
            rows.append(Speed(size, dtype, us))
            torch.cuda.empty_cache()
    return rows


def recommend(checks: list[Check], rows: list[Speed]) -> str:
    """What to do on this machine, from the findings alone."""
    if failed := [check for check in checks if check.ok is False]:
        fixes = list(dict.fromkeys(check.fix for check in failed if check.fix))
        first = f"run `{fixes[0]}`, then this command again" if fixes else f"see to '{failed[0].name}' first"
        return f"{len(failed)} check(s) failed: {first}."
    if not rows:
        return (
            "The kernel is correct here; without a GPU nothing can be gained by it, and NF4_BACKEND=torch is "
            f"exact too. To measure: {environment.switch_on_gpu()}"
        )
    others = {name for row in rows for name in row.us} - {KERNEL}
    if not others:
        return f"NF4_BACKEND=triton; no baseline is installed to compare with ({SETUP})."
    ratios = {name: [row.us[name] / row.us[KERNEL] for row in rows] for name in others}
    name = min(ratios, key=lambda name: statistics.geometric_mean(ratios[name]))
    low, high = min(ratios[name]), max(ratios[name])
    span = f"{low:.2f} to {high:.2f} times as fast as {name}, the fastest of the others"
    if low >= CLOSE:
        return f"NF4_BACKEND=triton: {span}."
    if high < 1 / CLOSE:
        return f"{name} is faster here (this kernel: {span}); please report this with --json."
    return f"NF4_BACKEND=triton or {name}, as you like: {span}."


def examine(quick: bool = False) -> Report:
    """All findings and the recommendation that follows from them."""
    checks = packages()
    try:
        environment.prepare()
        report = Report(environment.describe(), checks)
        checks.append(gpu())
    except ImportError as error:
        checks.append(Check("torch", False, f"does not import: {error}", SETUP))
        return Report(environment.versions(), checks, recommendation=recommend(checks, []))
    device = "cuda" if environment.has_gpu() and not environment.old_gpu() else "cpu"
    _try_kernel(report, device, quick)
    report.recommendation = recommend(checks, report.speed)
    return report


def _try_kernel(report: Report, device: str, quick: bool) -> None:
    """Add whether the kernel is right here, and how fast it is where that is so."""
    from helpers.submission import protocol

    absent = [b for b in protocol.baselines().values() if b.fn is None]  # imports the libraries first
    tried = [triton_check(device), *equality(device)]
    report.checks += [*tried, *(Check(b.label, None, b.reason) for b in absent)]
    right = all(check.ok for check in tried)
    if right:
        import torch

        from helpers.nf4 import backend

        report.backend = dataclasses.asdict(backend.choose(device, torch.float16))
    if not right or device == "cpu":
        why = "needs an NVIDIA GPU" if device == "cpu" else "the kernel is not right here"
        report.checks.append(Check("speed", None, f"not measured ({why})"))
        return
    from helpers.measure import first_call

    report.speed, starts = speed(quick), first_call.starts("kernel", 1)
    report.cold_start_seconds = {state: starts.median(state, "first_call") for state in ("empty", "warm")}


def show(report: Report) -> None:
    """Print a report for people."""
    for name, value in report.environment.items():
        print(f"{name:15} {'-' if value is None else value}")
    print()
    for check in report.checks:
        mark = {True: "ok", False: "FAIL", None: "-"}[check.ok]
        print(f"{mark:5} {check.name}: {check.detail}" + (f"\n      fix: {check.fix}" if check.fix else ""))
    if cold := report.cold_start_seconds:
        line = "first call of a process: {empty:.2f} s to compile, {warm:.2f} s from Triton's cache"
        print(f"\n{line.format(**cold)}")
    if report.speed:
        print("\nmicroseconds a call, with a synchronize (times slower than this kernel)")
    for row in report.speed:
        cells = (f"{name} {value:.1f} ({value / row.us[KERNEL]:.2f}x)" for name, value in row.us.items())
        print(f"{row.size}x{row.size} {row.dtype:8}  " + "  ".join(cells))
    if report.backend:
        print(f"\nbackend: {report.backend['name']} ({report.backend['reason']})")
    print(f"\n{report.recommendation}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers doctor", description=__doc__.split(": ")[1])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer timed rounds")
    options = parser.parse_args(argv)
    report = examine(options.quick)
    if options.json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        show(report)
    return int(any(check.ok is False for check in report.checks))
