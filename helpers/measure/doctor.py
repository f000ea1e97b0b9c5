"""`python -m helpers doctor`: what is here, what is missing, whether the kernel is right and fast here."""

import argparse
import dataclasses
import json
import statistics
import sys

from helpers.machine import environment, install

SIZES = (1024, 4096, 8192)  # square layers
DTYPES = ("float16", "bfloat16")
LAYER = (200, 33)  # (in_features, out_features): 6600 elements end mid-tile, mid-block and on half a word
KERNEL = "this kernel"
CLOSE = 1.03  # speeds nearer than this are called equal


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding: ok, failed, or None where it could not be checked here (the detail says why)."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def packages() -> list[Check]:
    """What requirements.txt asks for here and is missing or out of range."""
    found = install.installed()
    gaps = install.missing(install.wanted([], install.nvidia_gpus()), found)
    if not gaps:
        return [Check("packages", True, "all of requirements.txt that is used here is installed")]
    fix = "bash colab_setup.sh"
    return [
        Check(
            f"package {name}", False, f"{requirement} is needed, {found.get(name, 'none')} is installed", fix
        )
        for name, requirement in gaps.items()
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


def triton_smoke(device: str) -> Check:
    """A tiny kernel, compiled on a GPU, interpreted elsewhere."""
    if text := environment.old_triton():
        return Check("Triton", False, text, "bash colab_setup.sh")
    how = "interprets" if environment.interpreter() else "compiles and runs"
    try:
        from helpers.measure import smoke

        good = smoke.works(device)
    except Exception as error:
        return Check("Triton", False, f"a tiny kernel fails: {type(error).__name__}: {error}")
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

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.oracle import reference
    from helpers.submission import checks
    from helpers.oracle.layers import quantized_layer

    layer = quantized_layer(*LAYER, getattr(torch, dtype), device=device)
    weight, state = layer.weight.data, layer.weight.quant_state
    ours = nf4_kernel.your_dequantize_nf4(layer)
    others = {
        f"bitsandbytes {bitsandbytes.__version__}": checks.expected(layer),  # past its AVX512 faults
        "the oracle": reference.dequantize(weight, state),
    }
    wrong = {name: reference.different(ours, other) for name, other in others.items()}
    bad = [f"{count} of {ours.numel()} elements differ from {name}" for name, count in wrong.items() if count]
    return not bad, "; ".join(bad) or f"{ours.numel()} elements as in {' and '.join(others)}"


def cold_start() -> dict[str, float]:
    """Seconds of the very first call in a fresh process, with Triton's cache empty and filled."""
    from helpers.measure import first_call

    return {state: run["median"]["first_call"] for state, run in first_call.starts("kernel", 1).items()}


def speed(quick: bool) -> list[dict]:
    """Microseconds a call (with a synchronize, as in the protocol), kernel and baselines interleaved."""
    import torch

    from helpers.nf4 import kernel as nf4_kernel
    from helpers.oracle import baselines
    from helpers.oracle.layers import quantized_layer
    from helpers.measure.clocks import time_interleaved

    functions = {KERNEL: nf4_kernel.your_dequantize_nf4}
    functions |= {found.label: found.fn for found in baselines.available().values() if found.fn}
    rows = []
    for dtype in DTYPES:
        for size in SIZES:
            layer = quantized_layer(size, size, getattr(torch, dtype), device="cuda")
            calls = {name: lambda fn=fn, layer=layer: fn(layer) for name, fn in functions.items()}
            times = time_interleaved(calls, rounds=5 if quick else 15, inner=50, synchronize=True)
            us = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
            rows.append({"size": size, "dtype": dtype, "microseconds": us})
            torch.cuda.empty_cache()
    return rows


def recommend(checks, rows) -> str:
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
    ratios = {}
    for row in rows:
        ours = row["microseconds"][KERNEL]
        for name, us in row["microseconds"].items():
            ratios.setdefault(name, []).append(us / ours)
    ratios.pop(KERNEL)
    if not ratios:
        return "NF4_BACKEND=triton; no baseline is installed to compare with (bash colab_setup.sh)."
    name, found = min(ratios.items(), key=lambda item: statistics.geometric_mean(item[1]))
    span = f"{min(found):.2f} to {max(found):.2f} times as fast as {name}, the fastest of the others"
    if min(found) >= CLOSE:
        return f"NF4_BACKEND=triton: {span}."
    if max(found) < 1 / CLOSE:
        return f"{name} is faster here (this kernel: {span}); please report this with --json."
    return f"NF4_BACKEND=triton or {name}, as you like: {span}."


def examine(quick: bool = False) -> dict:
    """All findings as JSON types: environment, checks, cold_start_seconds, speed, backend, recommendation."""
    checks = packages()
    try:
        environment.prepare()
        facts = environment.describe()
        checks.append(gpu())
    except ImportError as error:
        checks.append(Check("torch", False, f"does not import: {error}", "bash colab_setup.sh"))
        return _report(environment.versions(), checks)
    device = "cuda" if environment.has_gpu() and not environment.old_gpu() else "cpu"
    from helpers.oracle import baselines

    # before all other imports: Unsloth wants to come first
    absent = [found for found in baselines.available().values() if found.fn is None]
    checks += [triton_smoke(device), *equality(device)]
    right = all(check.ok for check in checks if check.name.startswith(("Triton", "bit-equal")))
    checks += [Check(found.label, None, found.reason) for found in absent]
    if not right or device == "cpu":
        why = "needs an NVIDIA GPU" if device == "cpu" else "the kernel is not right here"
        checks.append(Check("speed", None, f"not measured ({why})"))
        return _report(facts, checks, backend=_backend(device) if right else None)
    return _report(facts, checks, speed(quick), cold_start(), _backend(device))


def _backend(device: str) -> dict:
    import torch

    from helpers.nf4 import backend

    return dataclasses.asdict(backend.choose(device, torch.float16))


def _report(facts, checks, rows=(), cold=None, backend=None) -> dict:
    return {
        "environment": facts,
        "checks": [dataclasses.asdict(check) for check in checks],
        "cold_start_seconds": cold,
        "speed": list(rows),
        "backend": backend,
        "recommendation": recommend(checks, rows),
    }


def show(report: dict) -> None:
    """Print a report for people."""
    for name, value in report["environment"].items():
        print(f"{name:15} {'-' if value is None else value}")
    print()
    for check in report["checks"]:
        mark = {True: "ok", False: "FAIL", None: "-"}[check["ok"]]
        print(f"{mark:5} {check['name']}: {check['detail']}")
        if check["fix"]:
            print(f"      fix: {check['fix']}")
    if cold := report["cold_start_seconds"]:
        empty, warm = cold["empty"], cold["warm"]
        print(f"\nfirst call of a process: {empty:.2f} s to compile, {warm:.2f} s from Triton's cache")
    if rows := report["speed"]:
        print("\nmicroseconds a call, with a synchronize (times slower than this kernel)")
        for row in rows:
            us = row["microseconds"]
            cells = (f"{name} {value:.1f} ({value / us[KERNEL]:.2f}x)" for name, value in us.items())
            print(f"{row['size']}x{row['size']} {row['dtype']:8}  " + "  ".join(cells))
    if backend := report["backend"]:
        print(f"\nbackend: {backend['name']} ({backend['reason']})")
    print(f"\n{report['recommendation']}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers doctor", description=__doc__.split(": ")[1])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer timed rounds")
    options = parser.parse_args(argv)
    report = examine(options.quick)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 1 if any(check["ok"] is False for check in report["checks"]) else 0


if __name__ == "__main__":
    sys.exit(main())
