"""The self-test: a library's function and its replacement are bit-identical to plain PyTorch."""

import contextlib
import importlib
import itertools

import torch

from ..core.checks import DTYPES
from ..core.reference import VALUES, exact_weight, same_bits
from ..core.state import read_state
from ..log import local_rank

SCALES = "nested", "flat"
LAYOUTS = [  # to compare: (quant_type, scales, dtype, blocksize)
    *itertools.product(("nf4", "fp4"), SCALES, DTYPES, (64,)),
    *itertools.product(("nf4",), SCALES, (torch.bfloat16,), [32 << k for k in range(8)]),  # to 4096
]


def dequantized(packed, quant_state, weight):
    """Return [(arguments, named arguments, result)]: the self-test's calls of a function that takes
    (packed, quant_state, out=...). weight: PyTorch's result."""
    out = torch.full_like(weight, torch.nan)
    return [
        ((packed, quant_state), {}, weight),
        ((packed, quant_state), {"out": out}, weight),
        ((packed.t(), quant_state), {}, weight.t()),
    ]


def self_test(trial, replacement) -> None:
    """Compare a Site's original in LAYOUTS, and its replacement in the first two, with PyTorch, bit for bit.

    Raises RuntimeError for other bits, and if the original dequantizes no layout. The original declines a
    layout if it raises or returns no tensor: there are no bits to compare.
    """
    device = self_test_device()
    # On a CPU, bitsandbytes has other zeros in fp4, and takes seconds to compile code for long blocks.
    layouts = LAYOUTS if device.type == "cuda" else LAYOUTS[:6]
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        failed = f"{trial.name} failed its self-test"
        declined = compare(trial.original, trial.calls_of, layouts, device, failed)
        if all(declined):
            raise RuntimeError(f"{failed}: {declined[0]}")
        failed = f"the kernel failed the self-test of {trial.name}"
        declined = compare(replacement, trial.calls_of, layouts[:2], device, failed)
    for problem in filter(None, (trial.why_not, *declined)):
        raise RuntimeError(f"{failed}: {problem}")


def compare(function, calls_of, layouts, device, failed) -> list[str]:
    """Compare the bits of each call with PyTorch's. Return why each call was declined, "" if it was not.

    failed: the beginning of the RuntimeError for other bits.
    """
    declined = []
    for layout in layouts:
        for arguments, named, expected in calls_of(*small_layer(device, *layout)):
            try:
                result = function(*arguments, **named)
                same = same_bits(result, expected) and same_bits(named.get("out", result), expected)
            except Exception as error:
                declined.append(f"{type(error).__name__}: {error}".split("\n")[0])
                continue
            if not same:
                how = ", ".join(["{}, {}, {}, blocksize {}".format(*layout), *named])
                raise RuntimeError(f"{failed}: other bits in {how}")
            declined.append("")
    return declined


def self_test_device() -> torch.device:
    """Return the current GPU, or LOCAL_RANK's if the process has not chosen a GPU yet: tests on GPU 0 would
    open a context there for every rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = local_rank()
    chosen = torch.cuda.current_device()
    return torch.device("cuda", chosen or (rank if rank < torch.cuda.device_count() else 0))


def small_layer(device, quant_type, scales, dtype, blocksize) -> tuple:
    """Return (packed, quant_state, PyTorch's weight) of 8 x 4096, with every byte. No block spans two rows:
    there bitsandbytes is wrong on a CPU.

    bitsandbytes quantizes nothing here: it would keep tables in torch's current default dtype.
    """
    # The device is named: in transformers' from_pretrained, torch.linspace ignores `with device`.
    codes = torch.arange(8 * 2048, device=device).to(torch.uint8)
    floats = torch.linspace(-1, 1, 256, dtype=torch.float32, device=device)
    make = importlib.import_module("bitsandbytes.functional").QuantState
    blocks = 8 * 4096 // blocksize
    absmax, offset, second = floats.repeat(4)[:blocks], None, None
    if scales == "nested":
        absmax, offset = codes[:blocks], floats[240]
        second = make(floats[200 : 200 - -blocks // 256], code=floats, blocksize=256, dtype=torch.float32)
    table = torch.tensor(VALUES[quant_type], dtype=torch.float32, device=device)
    shape, packed = torch.Size((8, 4096)), codes.view(-1, 1)
    quant_state = make(absmax, shape, table, blocksize, quant_type, dtype, offset, second)
    return packed, quant_state, exact_weight(*read_state(packed, quant_state))


def small_stack(packed: torch.Tensor) -> tuple:
    """Return (ids, shape) for the small layer as eight experts of 1 x 4096. Ids repeat and are not sorted."""
    return torch.tensor([5, 0, 7, 5], device=packed.device), (8, 1, 4096)
