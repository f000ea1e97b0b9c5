"""Run the PTX that an older GPU gets, such as a T4's sm_75, on this one and compare every bit.

The driver of a newer GPU accepts the same PTX, so it computes what the older GPU would.
"""

import itertools
import math

import torch

from helpers.nf4 import environment, reference
from helpers.t4 import compile as cross

EVERY = "every code with every scale"
SIZES = {"random layer": (4160, 1000), "odd tail": (4099, 1), "short last block": (1365, 3)}  # (in, out)
CASES = ((EVERY, True), *itertools.product(SIZES, (True, False)))  # and whether it is nested
GUARD = 256  # elements on either side of the output that must stay as they are


def run_foreign(weight, state, out, arch: int) -> None:
    """Dequantize into `out` with the PTX and settings of sm_`arch`.

    Raises RuntimeError with the driver's message if it does not accept the PTX.
    """
    n = math.prod(state.shape)
    names = {getattr(torch, long): short for short, long in cross.DTYPES.items()}
    variant = cross.Variant(arch, names[state.dtype], state.nested)
    kernel, _, constexprs, options = cross.launch(variant, n)
    table = torch.tensor(reference.NF4_VALUES, dtype=torch.float32, device=weight.device)
    second = (state.state2.code, state.state2.absmax, state.offset) if state.nested else (table,) * 3
    packed = weight.reshape(-1).view(torch.uint8)
    arguments = (packed, out, state.absmax, table, *second, n // 8, n % 8)
    found = cross.compiled(arch, kernel, arguments, constexprs | options)
    if f".target sm_{arch}" not in found.asm["ptx"]:  # sm_90a counts as sm_90
        raise RuntimeError(f"Triton did not compile for sm_{arch}")
    found.kernel = found.asm["ptx"].encode()  # instead of the cubin: the driver loads either
    grid = -(-n // (constexprs["THREADS"] * constexprs["WORDS"] * 8))
    found[(grid, 1, 1)](*arguments, *constexprs.values())


def examine(case: str, dtype, nested: bool, arch: int, device="cuda") -> tuple[int, str]:
    """Return (elements compared with bitsandbytes, what is wrong or "")."""
    import bitsandbytes

    if case == EVERY:
        layer = reference.every_code(dtype, device)
    else:
        layer = reference.quantized_layer(*SIZES[case], dtype, nested=nested, device=device)
    weight, state = layer.weight, layer.weight.quant_state
    n = math.prod(state.shape)
    around = torch.full((n + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    out = around[GUARD:-GUARD].view(state.shape)
    run_foreign(weight.data, state, out, arch)
    differ = reference.different(out, bitsandbytes.functional.dequantize_4bit(weight.data, state))
    outside = int((~torch.cat([around[:GUARD], around[-GUARD:]]).isnan()).sum())
    fault = f"{case}, {dtype}, {'nested' if nested else 'flat'}: {differ} differ, {outside} outside written"
    return n, fault if differ or outside else ""


def report(
    arch: int, device="cuda", dtypes=(torch.float16, torch.bfloat16, torch.float32)
) -> tuple[bool | None, str]:
    """Return (passed, or None if it cannot run here, the result in a few lines)."""
    if not environment.has_gpu() or environment.capability(device) < divmod(arch, 10):
        return None, f"PTX for sm_{arch}: not run (needs an NVIDIA GPU of sm_{arch} or newer)"
    kinds = [(case, dtype, nested) for case, nested in CASES for dtype in dtypes]
    sizes, faults = zip(*(examine(*kind, arch, device) for kind in kinds), strict=True)
    faults = list(filter(None, faults))
    how = "NOT" if faults else f"all {sum(sizes)} elements"
    text = f"PTX for sm_{arch} on {environment.gpu_name()}: {how} equal to bitsandbytes in {len(kinds)} cases"
    return not faults, "\n  ".join([text, *faults])
