"""What is measured: sizes, layer shapes of real models, and rotated buffers that no cache can hold."""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from helpers.oracle.layers import quantized_layer
from helpers.record.names import LARGEST, SMALLEST, TARGET_SIZES, bytes_moved
from helpers.submission import protocol

_POWERS = {2**power for power in range(10, 40)} - {2**26, 2**28}  # 58.7M and 235M stand for these two
SIZES = tuple(n for n in sorted(_POWERS | set(TARGET_SIZES)) if SMALLEST <= n <= LARGEST)
QUICK_SIZES = (SMALLEST, *TARGET_SIZES)
# Weights of a decoder layer of Llama-3 8B and 70B, (out_features, in_features).
LLAMA_3 = (
    *((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    *((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
)
ROTATE_BYTES = 1_100_000_000
MOST_BUFFERS = 2048


@dataclass
class Buffers:
    """Independent sets of packed weight, quant state and output of the same size."""

    layers: list[SimpleNamespace]  # .weight: uint8 (numel / 2, 1) with its .quant_state, as in a Linear4bit
    outs: list[torch.Tensor]  # empty where none were asked for
    bytes_moved: int  # by one dequantization

    @property
    def bytes_rotated(self) -> int:
        return self.bytes_moved * len(self.layers)

    def expected(self, index: int) -> torch.Tensor:
        """What bitsandbytes makes of set `index`, in a new tensor."""
        return protocol.expected(self.layers[index])


def as_shape(numel: int) -> tuple[int, int]:
    """A weight's shape of `numel` elements: rows of 4096, or of 64 where that does not divide it."""
    columns = 4096 if numel % 4096 == 0 else 64
    if numel == 0 or numel % columns:
        raise ValueError(f"sizes must be a multiple of 64 elements, got {numel}")
    return numel // columns, columns


def rotation(numel: int, nbytes: int = ROTATE_BYTES) -> int:
    """How many sets of 16-bit buffers: enough for `nbytes` in all, at least 2, at most MOST_BUFFERS."""
    return max(2, min(MOST_BUFFERS, math.ceil(nbytes / bytes_moved(numel))))


def make_buffers(
    shape, dtype, count: int, nested: bool = True, outputs: bool = False, device: str = "cuda"
) -> Buffers:
    """Random packed weights with the codebooks and the range of scales of a real bitsandbytes layer.

    shape: (out_features, in_features), in all a multiple of 64 elements. Every set has contents of its own.
    """
    numel = math.prod(shape)
    if numel % 64:
        raise ValueError(f"sizes must be a multiple of 64 elements, got {tuple(shape)}")
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
    outs = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)] if outputs else []
    return Buffers(layers, outs, bytes_moved(numel, dtype.itemsize, nested))
