"""Who is measured, on what and how long, and the gate before any clock starts: bitsandbytes' bits."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tqdm import tqdm

from helpers.bench import clocks
from helpers.nf4.layers import quantized_layer
from helpers.results.names import BASELINES_ON_GPU, LARGEST, SMALLEST, TARGET_SIZES, bytes_moved
from helpers.puzzle import protocol

_POWERS = {2**power for power in range(10, 40)} - {2**26, 2**28}  # 58.7M and 235M stand for these two
SIZES = tuple(n for n in sorted(_POWERS | set(TARGET_SIZES)) if SMALLEST <= n <= LARGEST)
# Weights of a decoder layer of Llama-3 8B and 70B, (out_features, in_features).
LLAMA_3 = (
    *((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    *((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
)
MOST_LAYERS = 2048  # to rotate through


@dataclass(frozen=True)
class Scope:
    """What a run covers: sizes in elements, layers as ((out_features, in_features), dtype)."""

    sizes: tuple[int, ...] = SIZES
    ablation: tuple[int, ...] = (2**20, *TARGET_SIZES)  # the first does not fill a large card
    layers: tuple = (((1024, 4096), "bfloat16"), ((2048, 8192), "float16"), ((4096, 14336), "bfloat16"))
    configs: tuple[protocol.Config, ...] = protocol.OFFICIAL
    gemm: tuple[protocol.Config, ...] = protocol.OFFICIAL
    tokens: tuple[int, ...] = (64, 512, 2048)
    weights: int = 24  # under one torch.compile
    shape: tuple[int, int] = (1024, 2816)  # of each of them
    backend: str = "inductor"
    compile_seconds: float = 150.0  # for all torch.compile; what would end later is left out
    most_rounds: int = 1000
    rotate: int = 1_100_000_000  # bytes through which GPU calls rotate: many times any L2 cache
    inner: int = 100  # calls a round; far below the launch queue's depth


FULL = Scope()
QUICK = Scope(
    sizes=(SMALLEST, *TARGET_SIZES),
    ablation=TARGET_SIZES[:2],
    gemm=protocol.OFFICIAL[:1],
    rotate=500_000_000,
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

    def rotation(self, numel: int) -> int:
        """How many layers of a size the calls rotate through: at least 2, at most MOST_LAYERS."""
        return max(2, min(MOST_LAYERS, math.ceil(self.scope.rotate / bytes_moved(numel))))

    def progress(self, items, what: str):
        """The items, with a bar."""
        return tqdm(list(items), desc=what, leave=False, disable=None)  # None: no bar in a file or a notebook

    def contenders(self) -> dict[str, Callable]:
        """layer -> weight, the kernel first."""
        present = {name: baseline.fn for name, baseline in self.baselines.items() if baseline.fn is not None}
        return {"kernel": self.module.your_dequantize_nf4} | present

    def on_gpu(self) -> dict[str, Callable]:
        """Those with GPU code of their own; PEFT calls bitsandbytes'."""
        return {n: fn for n, fn in self.contenders().items() if n in ("kernel", *BASELINES_ON_GPU)}


def random_layers(
    shape, dtype, count: int, nested: bool = True, device: str = "cuda"
) -> list[SimpleNamespace]:
    """Random packed weights with the codebooks and the range of scales of a real bitsandbytes layer.

    shape: (out_features, in_features), in all a multiple of 64 elements. Every layer has contents of its
    own: `.weight`, uint8 (numel / 2, 1), with its `.quant_state`, as in a Linear4bit.
    """
    numel = math.prod(shape)
    real = quantized_layer(4096, 256, dtype, nested, device=device).weight.quant_state

    def random_bytes(*size):
        return torch.randint(0, 256, size, dtype=torch.uint8, device=device)

    def scales_like(values, size):
        low, high = values.aminmax()
        return torch.rand(size, device=device) * (high - low) + low

    layers = []
    for _ in range(count):
        weight, state = random_bytes(numel // 2, 1), copy.copy(real)
        state.shape = torch.Size(shape)
        if nested:
            state.absmax, state.state2 = random_bytes(numel // 64), copy.copy(real.state2)
            state.state2.absmax = scales_like(real.state2.absmax, -(-numel // 16384))
        else:
            state.absmax = scales_like(real.absmax, numel // 64)
        weight.quant_state = state
        layers.append(SimpleNamespace(weight=weight))
    return layers


def users_bitsandbytes() -> Callable | None:
    """layer -> weight by what users call as bitsandbytes, where another library has replaced it."""
    from bitsandbytes import functional

    replaced = functional.dequantize_4bit
    if replaced is protocol.own_dequantize_4bit(functional):
        return None
    return lambda layer: replaced(layer.weight.data, layer.weight.quant_state)


def why(error: BaseException) -> str:
    """An error's type and first line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def wrong_bits(call: Callable[[], object], expected: torch.Tensor, out=None) -> str:
    """Why call() does not give the bits of `expected`, or write them into `out`; "" when it does.

    NaN is written beforehand into `out`, else into the memory that a new output is likely to get, so that
    elements left unwritten show.
    """
    poison = torch.full_like(expected, math.nan) if out is None else out.fill_(math.nan)
    del poison
    try:
        result = call()
        clocks.synchronize()
        same = protocol.same_bits(result if out is None else out, expected)
    except Exception as error:  # also of what is no tensor
        return why(error)
    return "" if same else "not bit-identical to bitsandbytes: not timed"
