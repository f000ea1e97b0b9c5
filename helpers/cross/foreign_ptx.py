"""Run the PTX that an older GPU gets, such as a T4's sm_75, on this one and compare every bit.

The driver of a newer GPU accepts the same PTX, so it computes what the older GPU would.
"""

import dataclasses
import math

import torch

from helpers.cross import compile as cross
from helpers.puzzle import layers
from nf4_triton import environment, kernel, launch, reference, settings

SIZES = {"random layer": (4160, 1000), "odd tail": (4099, 1), "short last block": (1365, 3)}  # (in, out)
GUARD = 256  # elements on either side of the output that must stay as they are


def run_foreign(weight, state, out, arch: int) -> None:
    """Dequantize into `out` with the PTX and settings of sm_`arch`.

    Raises RuntimeError with the driver's message if it does not accept the PTX.
    """
    theirs = cross.settings_of(arch)
    with settings.force(**dataclasses.asdict(theirs)):
        ours = launch.launch_ordinary(launch.read_state(weight, state))  # for the grid and the arguments
    weight, _, *rest = ours.arguments
    arguments = [weight, out, *rest]
    fn, named = kernel._your_dequantize_nf4_kernel, settings.launch_options(theirs)
    found = cross.compile_for(arch, fn, arguments, named)
    if f".target sm_{arch}" not in found.asm["ptx"]:  # sm_90a counts as sm_90
        raise RuntimeError(f"Triton did not compile for sm_{arch}")
    found.kernel = found.asm["ptx"].encode()  # instead of the cubin: the driver loads either
    found[(ours.grid, 1, 1)](*arguments)


def cases(dtype):
    """Yield (name, layer) of what is compared."""
    yield "every code with every scale", layers.every_code(dtype)
    for name, size in SIZES.items():
        yield name, layers.quantized_layer(*size, dtype)
        yield f"{name}, flat", layers.quantized_layer(*size, dtype, nested=False)


def compare(layer, arch: int) -> tuple[int, int]:
    """Return how many elements of a layer differ from bitsandbytes, and how many outside it were written."""
    import bitsandbytes

    weight, state = layer.weight.data, layer.weight.quant_state
    size = math.prod(state.shape) + 2 * GUARD
    whole = torch.full((size,), math.nan, dtype=state.dtype, device=weight.device)
    out = whole[GUARD:-GUARD].view(state.shape)
    run_foreign(weight, state, out, arch)
    differ = reference.different(out, bitsandbytes.functional.dequantize_4bit(weight, state))
    out.fill_(math.nan)
    return differ, int((~whole.isnan()).sum())


def report(archs: list[int]) -> int:
    """Compare and print what differs. Returns 1 if a bit does, 2 if no card's PTX can run here, else 0."""
    statuses = []
    for arch in archs:
        if not environment.has_gpu() or torch.cuda.get_device_capability() < divmod(arch, 10):
            print(f"PTX for sm_{arch}: not run (needs an NVIDIA GPU of sm_{arch} or newer)")
            continue
        tried = faults = 0
        for dtype in cross.DTYPES.values():
            for name, layer in cases(dtype):
                tried += 1
                differ, outside = compare(layer, arch)
                if differ or outside:
                    faults += 1
                    print(f"  {name}, {dtype}: {differ} differ, {outside} written outside")
        print(f"PTX for sm_{arch} on {environment.gpu_name()}: {tried - faults} of {tried} cases exact")
        statuses.append(1 if faults else 0)
    return max(statuses, default=2)
