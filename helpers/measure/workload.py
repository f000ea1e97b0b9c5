"""What is measured: sizes, layer shapes of real models, and rotated layers that no cache can hold."""

import copy
import math
from types import SimpleNamespace

import torch

from helpers.oracle.layers import quantized_layer
from helpers.record.names import LARGEST, SMALLEST, TARGET_SIZES, bytes_moved

_POWERS = {2**power for power in range(10, 40)} - {2**26, 2**28}  # 58.7M and 235M stand for these two
SIZES = tuple(n for n in sorted(_POWERS | set(TARGET_SIZES)) if SMALLEST <= n <= LARGEST)
QUICK_SIZES = (SMALLEST, *TARGET_SIZES)
# Weights of a decoder layer of Llama-3 8B and 70B, (out_features, in_features).
LLAMA_3 = (
    *((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
    *((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)),
)
ROTATE_BYTES, QUICK_ROTATE_BYTES = 1_100_000_000, 500_000_000  # several times the largest L2 caches
MOST_LAYERS = 2048


def rotation(numel: int, nbytes: int = ROTATE_BYTES) -> int:
    """How many layers calls rotate through: for `nbytes` moved in all, at least 2, at most MOST_LAYERS."""
    return max(2, min(MOST_LAYERS, math.ceil(nbytes / bytes_moved(numel))))


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
