"""Run PTX that was compiled for another card: the driver translates it for the GPU at hand.

A T4 executes sm_75 PTX, and every newer GPU accepts the same text. So what a T4 would compute can be
checked on any card, bit for bit: `python -m helpers foreign-ptx`, or from Python

    print(foreign_ptx.summary(foreign_ptx.prove(arch=75)))
"""

import argparse
import itertools
import math

import torch

from helpers import machine
from helpers.nf4 import kernel as nf4_kernel
from helpers.nf4 import reference
from helpers.puzzle import checks as evidence, protocol
from helpers.t4 import other_card

EVERY = "every code with every scale"
# (in, out)
SIZES = {"random layer": (4160, 1000), "odd tail": (4099, 1), "tail in the last block": (1365, 3)}
CASES = (EVERY, *SIZES)
ON_HOPPER = (75, 80, 86, 89, 90)  # whose PTX a Hopper card runs
_GUARD = 256  # elements on either side of the output that must stay untouched


def _layer(case: str, dtype, nested: bool, device):
    """A Linear4bit on `device`: every byte under 256 scales, or random of one of SIZES."""
    if case != EVERY:
        return evidence.quantized_layer(*SIZES[case], dtype, nested=nested, device=device)
    if nested:
        return evidence.every_code(dtype, device)
    layer = evidence.quantized_layer(64, 2048, dtype, nested=False, device=device)
    layer.weight.data.copy_(torch.arange(256, device=device).repeat(256).view(-1, 1))
    absmax = layer.weight.quant_state.absmax
    absmax.copy_(absmax[:256].repeat_interleave(8))  # 8 blocks of 32 bytes hold all 256
    return layer


def _examine(case: str, layer, arch: int, module) -> dict:
    """What the foreign kernel gets wrong of a layer: elements, how many of them differ, a sentence or ""."""
    state, device = layer.weight.quant_state, layer.weight.device
    n = math.prod(state.shape)
    around = torch.full((n + 2 * _GUARD,), math.nan, dtype=state.dtype, device=device)
    out = around[_GUARD:-_GUARD].view(state.shape)
    other_card.run_foreign(layer.weight, state, out, arch, module)
    differing = protocol.different(out, protocol.expected(layer))
    outside = int((~torch.cat([around[:_GUARD], around[-_GUARD:]]).isnan()).sum())
    fault = f"{case}, {protocol.name_of(state.dtype)}, {'nested' if state.nested else 'flat'}, sm_{arch}: "
    fault += f"{differing} differ, {outside} written outside the output"
    return {"elements": n, "differing": differing, "fault": fault if differing or outside else ""}


def prove(device="cuda", arch: int = 75, dtypes=reference.DTYPES, module=nf4_kernel) -> dict:
    """Run the kernel's sm_`arch` PTX on `device` and compare every bit with bitsandbytes.

    Every packed byte under every absmax code, a random layer, odd tails; nested and flat, in each of
    `dtypes`; outputs filled with NaN first and guarded on both sides. module: what holds the kernel (a live
    notebook passes its own). Returns "passed", "arch", "device" and "cases"; "passed" is None where "needs"
    says what is missing.
    """
    needs = "an NVIDIA GPU"
    if machine.has_gpu():
        needs = f"a card of sm_{arch} or newer" if machine.capability(device) < divmod(arch, 10) else ""
        needs = needs or ("" if machine.version_of("bitsandbytes") else "bitsandbytes")
    if needs:
        return {"passed": None, "arch": arch, "needs": needs, "cases": []}
    cases = [
        _examine(case, _layer(case, dtype, nested, device), arch, module)
        for dtype, nested, case in itertools.product(dtypes, (True, False), CASES)
    ]
    capability = "".join(map(str, machine.capability(device)))
    return {
        "passed": not any(case["fault"] for case in cases),
        "arch": arch,
        "device": f"{torch.cuda.get_device_name(device)} (sm_{capability})",
        "cases": cases,
    }


def summary(proof: dict) -> str:
    """What `prove` returned, in a few lines."""
    arch, cases = proof["arch"], proof["cases"]
    if proof["passed"] is None:
        return f"PTX compiled for sm_{arch}: not run (needs {proof['needs']})"
    triton, bitsandbytes = map(machine.version_of, ("triton", "bitsandbytes"))
    differing, elements = (sum(case[name] for case in cases) for name in ("differing", "elements"))
    return "\n".join([
        f"PTX compiled for sm_{arch} by Triton {triton}, run through the driver on {proof['device']}:",
        f"{differing} of {elements} elements differ from bitsandbytes {bitsandbytes} in {len(cases)} cases: "
        f"{'every bit equal' if proof['passed'] else 'NOT equal'}",
        *(f"  {case['fault']}" for case in cases if case["fault"]),
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the proof for each card asked for. 1 when a bit differs, 2 where nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="*", default=list(ON_HOPPER), help="75: a T4's sm_75")
    proofs = [prove(arch=arch) for arch in parser.parse_args(argv).arch]
    print("\n".join(map(summary, proofs)))
    verdicts = {proof["passed"] for proof in proofs}
    return 1 if False in verdicts else 0 if True in verdicts else 2
