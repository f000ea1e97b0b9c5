"""`python -m helpers doctor`: what is here, what is missing, whether the kernel is right and fast here."""

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import NamedTuple

from helpers.machine import environment, install
from helpers.record.names import CONTENDERS, label

SIZES = (1024, 4096, 8192)  # square layers
DTYPES = ("float16", "bfloat16")
LAYER = (200, 33)  # (in_features, out_features): 6600 elements end mid-tile, mid-block and on half a word
KERNEL = label("kernel")
SETUP = "bash colab_setup.sh"


class Check(NamedTuple):
    """One finding: ok, failed, or None where it could not be checked here (the detail says why)."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


Speed = dict[tuple[int, str], dict[str, float]]  # {(size, dtype): microseconds a call by contender}


def packages() -> list[Check]:
    """What requirements.txt asks for here and is missing or out of range."""
    versions = install.installed()
    gaps = install.missing(install.wanted([], install.nvidia_gpus()), versions)
    lacking = [
        Check(f"package {n}", False, f"{need} is needed, {versions.get(n, 'none')} is installed", SETUP)
        for n, need in gaps.items()
    ]
    complete = Check("packages", True, "all of requirements.txt that is used here is installed")
    return lacking or [complete]


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


def _attempt(name: str, examine: Callable, *arguments) -> Check:
    """What `examine(*arguments)` finds, (ok, detail); what it raises is a failure."""
    try:
        return Check(name, *examine(*arguments))
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


def _triton(device: str) -> tuple[bool, str]:
    """A kernel that stores one number; compiled on a GPU, interpreted elsewhere."""
    import torch

    from helpers.measure.ceilings import trivial_kernel

    out = torch.zeros(2, dtype=torch.int32, device=device)
    trivial_kernel[(1,)](out)
    how = "interprets" if environment.interpreter() else "compiles and runs"
    return out.tolist() == [1, 0], f"{how} a tiny kernel, which wrote {out.tolist()}, expected [1, 0]"


def _equal(device: str, dtype: str) -> tuple[bool, str]:
    """The kernel bit for bit against bitsandbytes and the oracle, on a small layer of an awkward size."""
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


def _backend(device: str) -> tuple[bool, str]:
    """What decodes for a user who leaves the choice to NF4_BACKEND=auto."""
    import torch

    from helpers.nf4 import backend

    choice = backend.choose(device, torch.float16)
    return True, f"{choice.name} ({choice.reason})"


def _first_call() -> tuple[bool, str]:
    """How long the first call of a new process takes."""
    from helpers.measure import first_call

    starts = first_call.starts("kernel", 1)
    empty, warm = (starts.median(state, "first_call") for state in ("empty", "warm"))
    return True, f"{empty:.2f} s to compile, {warm:.2f} s from Triton's cache"


def _speed(rows: Speed) -> tuple[bool, str]:
    """Fill in rows of the kernel and the baselines, interleaved, each call with a synchronize."""
    from helpers.measure.contenders import Bench
    from helpers.measure.host_time import case
    from helpers.nf4 import kernel
    from helpers.submission import protocol

    bench = Bench(kernel, protocol.baselines(), quick=True)
    for dtype, size in itertools.product(DTYPES, SIZES):
        timed, _ = case(bench, (size, size), dtype)
        if "kernel" in timed.failures:
            return False, f"{size}x{size} {dtype}: {timed.failures['kernel']}"
        us = {label(name): row.p50 for name, row in timed.synchronized.items() if name in CONTENDERS}
        rows[size, dtype] = us
    return True, "the table below"


def recommend(checks: list[Check], rows: Speed) -> str:
    """What to do on this machine, from the findings alone."""
    if failed := [check for check in checks if check.ok is False]:
        fixes = [check.fix for check in failed if check.fix]
        first = f"run `{fixes[0]}`, then this command again" if fixes else f"see to '{failed[0].name}' first"
        return f"{len(failed)} check(s) failed: {first}."
    if not rows:
        text = "The kernel is correct here; without a GPU nothing can be gained by it. To measure:"
        return f"{text} {environment.switch_on_gpu()}"
    names = {name for us in rows.values() for name in us} - {KERNEL}
    if not names:
        return f"The kernel is correct here; no baseline is installed to compare with ({SETUP})."
    ratios = {name: [us[name] / us[KERNEL] for us in rows.values()] for name in names}
    name = min(ratios, key=lambda name: statistics.geometric_mean(ratios[name]))
    low, high = min(ratios[name]), max(ratios[name])
    what_next = "; please report it" if high < 1 else ""
    return f"{low:.2f} to {high:.2f} times as fast as {name}, the fastest of the others{what_next}."


def examine() -> tuple[list[Check], Speed]:
    """All findings, and how fast the kernel is where it is right and there is a GPU."""
    checks = packages()
    try:
        environment.prepare()
        checks.append(gpu())
        from helpers.submission import protocol
    except ImportError as error:
        return [*checks, Check("torch", False, f"does not import: {error}", SETUP)], {}
    absent = [b for b in protocol.baselines().values() if b.fn is None]  # imports the libraries first
    device = "cuda" if environment.has_gpu() and not environment.old_gpu() else "cpu"
    if text := environment.old_triton():
        tried = [Check("Triton", False, text, SETUP)]
    else:
        tried = [_attempt("Triton", _triton, device)]
        tried += [_attempt(f"bit-equal, {dtype}", _equal, device, dtype) for dtype in DTYPES]
    checks += [*tried, *(Check(b.label, None, b.reason) for b in absent)]
    right = all(check.ok for check in tried)
    if right:
        checks.append(_attempt("backend", _backend, device))
    if not right or device == "cpu":
        why = "the kernel is not right here" if not right else "needs an NVIDIA GPU"
        return [*checks, Check("speed", None, f"not measured ({why})")], {}
    rows = {}
    checks += [_attempt("first call of a process", _first_call), _attempt("speed", _speed, rows)]
    return checks, rows


def main(argv: list[str] | None = None) -> int:
    """Print what was found. 1 when a check failed, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m helpers doctor", description=__doc__.split(": ")[1])
    parser.parse_args(argv)
    checks, rows = examine()
    torch_works = not any(check.name == "torch" for check in checks)
    for name, value in (environment.describe() if torch_works else environment.versions()).items():
        print(f"{name:15} {'-' if value is None else value}")
    print()
    for check in checks:
        mark = {True: "ok", False: "FAIL", None: "-"}[check.ok]
        print(f"{mark:5} {check.name}: {check.detail}" + (f"\n      fix: {check.fix}" if check.fix else ""))
    if rows:
        print("\nmicroseconds a call, with a synchronize (times slower than this kernel)")
    for (size, dtype), us in rows.items():
        cells = (f"{name} {value:.1f} ({value / us[KERNEL]:.2f}x)" for name, value in us.items())
        print(f"{size}x{size} {dtype:8}  " + "  ".join(cells))
    print(f"\n{recommend(checks, rows)}")
    return int(any(check.ok is False for check in checks))
