"""Who is measured and how long, and the gate before any clock starts: the bits must be bitsandbytes'."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from helpers.oracle.baselines import Baseline
from helpers.oracle.reference import same_bits

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BASELINES_ON_GPU = ("unsloth_today", "unsloth_classic", "bitsandbytes")
DEQUANTIZERS = ("kernel", *BASELINES_ON_GPU)


@dataclass
class Bench:
    """What one run measures with: the kernel's module, the baselines and the size of the run."""

    module: object
    found: dict[str, Baseline]
    quick: bool = False
    device: str = "cuda"

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def bar(self, total: int, what: str):
        return tqdm(total=total, desc=what, leave=False, disable=None)  # None: no bar in a file or a notebook

    def candidates(self) -> dict[str, Callable]:
        """layer -> weight, the kernel first."""
        present = {name: baseline.fn for name, baseline in self.found.items() if baseline.fn is not None}
        return {"kernel": self.module.your_dequantize_nf4} | present

    def launchers(self) -> dict[str, Callable]:
        """(weight, quant_state) -> new output, for everything with GPU code of its own."""
        calls = {"kernel": self.module._your_dequantize_nf4}
        if self.found["unsloth_today"].fn is not None:
            utils = importlib.import_module("unsloth.kernels.utils")
            calls["unsloth_today"] = utils.fast_dequantize
            if hasattr(utils, "_fast_dequantize_ctypes"):
                calls["unsloth_classic"] = utils._fast_dequantize_ctypes
        if self.found["bitsandbytes"].fn is not None:
            calls["bitsandbytes"] = importlib.import_module("bitsandbytes.functional").dequantize_4bit
        return calls


def why(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def wrong_bits(call: Callable, expected, out=None) -> str:
    """Why call() does not give the bits of `expected`; "" when it does.

    NaN is written beforehand into `out` where the call is known to write there, else into the memory that a
    new output is likely to get, so that elements left unwritten show.
    """
    poison = torch.full_like(expected, math.nan) if out is None else out.fill_(math.nan)
    del poison
    try:
        found = call()
        torch.cuda.synchronize()
    except Exception as error:
        return why(error)
    return "" if same_bits(found, expected) else "not bit-identical to bitsandbytes: not timed"
