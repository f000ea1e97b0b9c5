"""What is measured: sizes, layer shapes of real models, and rotated buffers that no cache can hold."""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch

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
_ALIGN = 512  # bytes; torch's allocator gives the same


@dataclass
class Buffers:
    """Independent sets of packed weight, quant state and output of the same size."""

    layers: list[SimpleNamespace]  # .weight: uint8 (numel / 2, 1) with its .quant_state, as in a Linear4bit
    outs: list[torch.Tensor]  # `shape`, `dtype`; empty where none were asked for
    shape: tuple[int, int]
    dtype: torch.dtype
    nested: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_moved(self) -> int:
        """By one dequantization."""
        return bytes_moved(self.numel, self.dtype.itemsize, self.nested)

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


def quick_bytes(l2_bytes: int) -> int:
    """Enough to rotate through in a quick run: eight times the card's own L2 cache, 64 MB at least."""
    return min(ROTATE_BYTES, max(64_000_000, 8 * l2_bytes))


@functools.cache
def _template(nested: bool, device: str):
    """The quant state of a small real layer: codebooks, offset and the size of its second-level scales."""
    from bitsandbytes.functional import quantize_4bit

    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(256, 4096, generator=generator) * 0.02).to(device)
    return quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")[1]


def _rows(count: int, length: int, dtype, device, make):
    """`count` rows of `length` elements of one allocation, each aligned as a tensor of its own would be."""
    per_row = _ALIGN // dtype.itemsize
    slab = make((count, -(-length // per_row) * per_row), dtype=dtype, device=device)
    return [row[:length] for row in slab]


def make_buffers(
    shape, dtype, count: int, nested: bool = True, outputs: bool = False, device: str = "cuda"
) -> Buffers:
    """Random packed weights with the codebooks and the range of scales of a real bitsandbytes layer.

    shape: (out_features, in_features), in all a multiple of 64 elements. Every set has contents of its own.
    """
    from bitsandbytes.functional import QuantState

    numel = math.prod(shape)
    if numel % 64:
        raise ValueError(f"sizes must be a multiple of 64 elements, got {tuple(shape)}")
    blocks = numel // 64
    template = _template(nested, device)

    def random_bytes(size, dtype, device):
        return torch.randint(0, 256, size, dtype=dtype, device=device)

    def scales_like(values):
        low, high = values.min().item(), values.max().item()
        return lambda size, dtype, device: torch.rand(size, dtype=dtype, device=device) * (high - low) + low

    common = dict(shape=torch.Size(shape), code=template.code, blocksize=64, quant_type="nf4", dtype=dtype)
    if nested:
        second = template.state2
        absmax = _rows(count, blocks, torch.uint8, device, random_bytes)
        absmax2 = _rows(count, -(-blocks // 256), torch.float32, device, scales_like(second.absmax))
        states = [
            QuantState(
                absmax=a,
                offset=template.offset,
                state2=QuantState(absmax=b, code=second.code, blocksize=256, dtype=torch.float32),
                **common,
            )
            for a, b in zip(absmax, absmax2, strict=True)
        ]
    else:
        absmax = _rows(count, blocks, torch.float32, device, scales_like(template.absmax))
        states = [QuantState(absmax=a, **common) for a in absmax]
    weights = [row.view(-1, 1) for row in _rows(count, numel // 2, torch.uint8, device, random_bytes)]
    for weight, state in zip(weights, states, strict=True):
        weight.quant_state = state
    outs = [row.view(shape) for row in _rows(count, numel, dtype, device, torch.empty)] if outputs else []
    return Buffers([SimpleNamespace(weight=w) for w in weights], outs, tuple(shape), dtype, nested)
