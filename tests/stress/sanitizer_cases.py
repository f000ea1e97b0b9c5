"""The kernel's edge cases as a plain script, for compute-sanitizer to watch (tests/stress/sanitizer.sh).

Every tensor has an allocation of its own of exactly its size (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that one
byte read or written beside it is an error. Results are compared on the CPU: no other kernel needs to run.
"""

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers.machine import environment  # noqa: E402

environment.prepare()

import torch  # noqa: E402

from helpers.nf4 import kernel as nf4_kernel
from helpers.oracle import reference  # noqa: E402

# Ends inside a byte, a word, a block, a tile (2048 elements), a large tile (8192), and just behind each.
SIZES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 2047, 2048, 2049, 2055, 8191, 8193, 8200)
WAYS = ({}, {"asm": False}, {"card": "t4"}, {"small": 0}, {"small": 0, "int_bf16": True})


def state_of(n, dtype, nested=True, blocksize=64, blocksize2=256, quant_type="nf4"):
    """(packed weight, state) of exactly the bytes that n elements need, on the CPU."""
    generator = torch.Generator().manual_seed(n)

    def codes(count):
        return torch.randint(256, (count,), generator=generator, dtype=torch.uint8)

    blocks = -(-n // blocksize)
    state = SimpleNamespace(
        shape=torch.Size([n]), dtype=dtype, quant_type=quant_type, blocksize=blocksize, nested=nested
    )
    state.state2 = state.offset = None
    if nested:
        count = -(-blocks // blocksize2)
        state.absmax, state.offset = codes(blocks), torch.tensor(0.04)
        state.state2 = SimpleNamespace(
            absmax=torch.rand(count, generator=generator) + 0.1,
            code=torch.randn(256, generator=generator),
            blocksize=blocksize2,
            dtype=torch.float32,
        )
    else:
        state.absmax = torch.rand(blocks, generator=generator) + 0.1
    return codes((n + 1) // 2).view(-1, 1), state


def moved(state, device):
    """The state with its tensors on a device, each an allocation of its own."""
    there = SimpleNamespace(**vars(state))
    there.absmax = state.absmax.to(device)
    if state.nested:
        there.offset = state.offset.to(device)
        there.state2 = SimpleNamespace(**vars(state.state2))
        there.state2.absmax, there.state2.code = state.state2.absmax.to(device), state.state2.code.to(device)
    return there


def cases():
    """(n, options): every size in fp16, and the other options where all of it ends in the middle."""
    for n, nested in itertools.product(SIZES, (True, False)):
        yield n, dict(dtype=torch.float16, nested=nested)
    for n in (1, 2055, 8193):
        for dtype in (torch.bfloat16, torch.float32):
            yield n, dict(dtype=dtype)
        yield n, dict(dtype=torch.float16, quant_type="fp4")
        for blocksize in (32, 128, 4096):
            yield n, dict(dtype=torch.bfloat16, blocksize=blocksize)
        yield n, dict(dtype=torch.bfloat16, blocksize2=1)


def main() -> int:
    kernel = nf4_kernel
    device = "cuda" if environment.has_gpu() else "cpu"
    ways = WAYS if device == "cuda" else WAYS[:1]
    count, wrong = 0, []
    for way in ways:
        with kernel.force(**way):
            for n, options in cases():
                packed, state = state_of(n, **options)
                expected = reference.dequantize(packed, state, flush_subnormal=device == "cuda")
                weight, there = packed.to(device), moved(state, device)
                # Twice (the second launch is the plan's), then into an output that begins at an odd element.
                memory = torch.empty(n + 1, dtype=state.dtype, device=device)
                results = [kernel._your_dequantize_nf4(weight, there) for _ in range(2)]
                results.append(kernel._your_dequantize_nf4(weight, there, out=memory[1:]))
                shifted = torch.empty(len(packed) + 1, 1, dtype=torch.uint8, device=device)[1:]
                shifted.copy_(weight)
                results.append(kernel._your_dequantize_nf4(shifted, there))
                for result in results:
                    flat = result.cpu().reshape(-1)
                    if not reference.same_bits(flat, expected.reshape(-1)):
                        wrong.append((way, n, options))
                count += len(results)
    print(f"{count} launches of the edge cases, {len(wrong)} wrong {wrong[:3] if wrong else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
