"""Who is measured and how long, and the gate before any clock starts: the bits must be bitsandbytes'."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from helpers.measure import clocks, workload
from helpers.record.names import BASELINES_ON_GPU, TARGET_SIZES
from helpers.submission import protocol


@dataclass(frozen=True)
class Scope:
    """What a run covers: sizes in elements, layers as ((out_features, in_features), dtype)."""

    sizes: tuple[int, ...] = workload.SIZES
    ablation: tuple[int, ...] = (2**20, *TARGET_SIZES)  # the first does not fill a large card
    layers: tuple = (((1024, 4096), "bfloat16"), ((2048, 8192), "float16"), ((4096, 14336), "bfloat16"))
    configs: tuple[protocol.Config, ...] = protocol.OFFICIAL
    gemm: tuple[protocol.Config, ...] = protocol.OFFICIAL
    tokens: tuple[int, ...] = (64, 512, 2048)
    weights: int = 24  # under one torch.compile
    shape: tuple[int, int] = (1024, 2816)  # of each of them
    backend: str = "inductor"
    compile_seconds: float = 100.0  # for all torch.compile; what would end later is left out
    most_rounds: int = 1000
    rotate: int = workload.ROTATE_BYTES  # through which GPU calls rotate
    inner: int = 100  # calls a round; far below the launch queue's depth


FULL = Scope()
QUICK = Scope(
    sizes=workload.QUICK_SIZES,
    ablation=TARGET_SIZES[:2],
    gemm=protocol.OFFICIAL[:1],
    rotate=workload.QUICK_ROTATE_BYTES,
)


@dataclass
class Bench:
    """What one run measures with: the kernel, the baselines, how much, and the GPU's clocks."""

    module: object
    baselines: dict[str, protocol.Baseline]
    quick: bool = False
    scope: Scope = FULL
    device: str = "cuda"
    gpu: object = clocks

    def rounds(self, full: int, quick: int) -> int:
        return min(quick if self.quick else full, self.scope.most_rounds)

    def bar(self, total: int, what: str):
        return tqdm(total=total, desc=what, leave=False, disable=None)  # None: no bar in a file or a notebook

    def progress(self, items, what: str):
        """The items, with a bar."""
        return tqdm(list(items), desc=what, leave=False, disable=None)

    def contenders(self) -> dict[str, Callable]:
        """layer -> weight, the kernel first."""
        present = {name: baseline.fn for name, baseline in self.baselines.items() if baseline.fn is not None}
        return {"kernel": self.module.your_dequantize_nf4} | present

    def on_gpu(self) -> dict[str, Callable]:
        """Those with GPU code of their own; PEFT calls bitsandbytes'."""
        return {n: fn for n, fn in self.contenders().items() if n in ("kernel", *BASELINES_ON_GPU)}

    def forced(self, overrides: dict):
        """The kernel's settings with these changed, inside a `with` block."""
        return self.module.force(**overrides) if overrides else contextlib.nullcontext()


def users_bitsandbytes() -> Callable | None:
    """layer -> weight by what users call as bitsandbytes, where another library has replaced it."""
    from bitsandbytes import functional

    replaced = functional.dequantize_4bit
    if replaced is protocol.own_dequantize_4bit(functional):
        return None
    return lambda layer: replaced(layer.weight.data, layer.weight.quant_state)


def why(error: BaseException) -> str:
    """An error's type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def wrong_bits(call: Callable[[], torch.Tensor], expected: torch.Tensor, out=None) -> str:
    """Why call() does not give the bits of `expected`; "" when it does.

    NaN is written beforehand into `out` where the call is known to write there, else into the memory that a
    new output is likely to get, so that elements left unwritten show.
    """
    poison = torch.full_like(expected, math.nan) if out is None else out.fill_(math.nan)
    del poison
    try:
        result = call()
        if result.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        return why(error)
    return "" if protocol.same_bits(result, expected) else "not bit-identical to bitsandbytes: not timed"
