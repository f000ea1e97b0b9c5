"""`python -m helpers doctor`: what is here, what is missing, whether the kernel is right here."""

import argparse
from typing import NamedTuple

from helpers import machine, install
from helpers.results.names import DTYPES

LAYER = (200, 33)  # (in_features, out_features): 6600 elements end mid-tile, mid-block and on half a word
FIX = "run `bash colab_setup.sh`, then this command again"


class Check(NamedTuple):
    """One finding: ok, failed, or None where it could not be checked here (the detail says why)."""

    name: str
    ok: bool | None
    detail: str


def packages() -> Check:
    """Whether all is here that requirements.txt asks for; prints what is not."""
    if install.main(["--check"]):
        return Check("packages", False, f"those above are missing or out of range: {FIX}")
    return Check("packages", True, "all of requirements.txt that is used here is installed")


def gpu() -> Check:
    """Whether there is a GPU that the kernel supports."""
    if text := machine.old_gpu():
        return Check("GPU", False, text)
    if text := machine.no_gpu():
        broken = bool(machine.nvidia_smi("name"))  # a GPU is there, torch cannot use it
        return Check("GPU", False if broken else None, text)
    major, minor = machine.capability()
    bf16 = "native" if machine.native_bf16() else "rounded in integers"
    return Check("GPU", True, f"{machine.gpu_name()}, sm_{major}{minor}, bf16 {bf16}")


def _equal(device: str, dtype: str) -> tuple[bool, str]:
    """The kernel bit for bit against bitsandbytes and the oracle, on a small layer of an awkward size."""
    import bitsandbytes
    import torch

    from helpers.nf4 import kernel
    from helpers.nf4 import reference
    from helpers.nf4.layers import quantized_layer
    from helpers.puzzle import protocol

    layer = quantized_layer(*LAYER, getattr(torch, dtype), device=device)
    ours = kernel.your_dequantize_nf4(layer)
    others = {
        f"bitsandbytes {bitsandbytes.__version__}": protocol.expected(layer),
        "the oracle": reference.dequantize(layer.weight.data, layer.weight.quant_state),
    }
    wrong = {name: protocol.different(ours, other) for name, other in others.items()}
    bad = [f"{count} of {ours.numel()} elements differ from {name}" for name, count in wrong.items() if count]
    return not bad, "; ".join(bad) or f"{ours.numel()} elements as in {' and '.join(others)}"


def recommend(checks: list[Check]) -> str:
    """What to do on this machine, from the findings alone."""
    if failed := [check for check in checks if check.ok is False]:
        return f"{len(failed)} check(s) failed: see to '{failed[0].name}' first."
    if machine.has_gpu():
        return "The kernel is right here; `python -m helpers bench --quick` says how fast it is."
    text = "The kernel is right here; without a GPU nothing can be gained by it. To measure:"
    return f"{text} {machine.switch_on_gpu()}"


def examine() -> list[Check]:
    """All findings."""
    checks = [packages()]
    try:
        machine.prepare()
        checks.append(gpu())
        from helpers.puzzle import protocol
    except ImportError as error:
        return [*checks, Check("torch", False, f"does not import: {error}: {FIX}")]
    absent = [b for b in protocol.baselines().values() if b.fn is None]  # imports the libraries first
    device = "cuda" if machine.has_gpu() and not machine.old_gpu() else "cpu"
    for dtype in DTYPES:
        try:
            ok, detail = _equal(device, dtype)
        except Exception as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        checks.append(Check(f"bit-equal, {dtype}", ok, detail))
    return [*checks, *(Check(b.label, None, b.reason) for b in absent)]


def main(argv: list[str] | None = None) -> int:
    """Print what was found. 1 when a check failed, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m helpers doctor", description=__doc__.split(": ")[1])
    parser.parse_args(argv)
    checks = examine()
    torch_works = not any(check.name == "torch" for check in checks)
    for name, value in (machine.describe() if torch_works else machine.versions()).items():
        print(f"{name:15} {'-' if value is None else value}")
    print()
    for check in checks:
        mark = {True: "ok", False: "FAIL", None: "-"}[check.ok]
        print(f"{mark:5} {check.name}: {check.detail}")
    print(f"\n{recommend(checks)}")
    return int(any(check.ok is False for check in checks))
