"""The ceiling: a CUDA C kernel that moves exactly the bytes a dequantization must move and computes nothing.

Each thread loads packed 32-bit words (8 codes each) and writes every word four times, 16 bytes: the traffic
of a 16-bit output. Scales are loaded too and mixed in with XOR, so that no load can be optimized away and a
test can prove by the output that every byte was read.
"""

import functools
from collections.abc import Callable
from itertools import product

import torch
import triton
import triton.language as tl


@triton.jit
def trivial_kernel(out_ptr):
    """Stores one number: what a launch, or Triton's first call, costs with nothing to do."""
    tl.store(out_ptr, 1)


_CUDA_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(%(threads)d) %(name)s(
    const unsigned* __restrict__ weight, const unsigned char* __restrict__ absmax,
    const unsigned* __restrict__ absmax2, uint4* __restrict__ out, int n_words) {
  const int first = blockIdx.x * (%(threads)d * %(words)d);
  const int scales = %(threads)d * %(words)d / 8;
  const int block = blockIdx.x * scales + (threadIdx.x & (scales - 1));
  unsigned mix = 0;
  if (block * 8 < n_words) mix = __ldcs(absmax + block) ^ absmax2[block / 256];
  unsigned loaded[%(words)d];
  #pragma unroll
  for (int row = 0; row < %(words)d; row++) {
    const int i = first + row * %(threads)d + threadIdx.x;
    loaded[row] = i < n_words ? __ldcs(weight + i) : 0;
  }
  #pragma unroll
  for (int row = 0; row < %(words)d; row++) {
    const int i = first + row * %(threads)d + threadIdx.x;
    const unsigned value = loaded[row] ^ mix;
    if (i < n_words) %(store)s;
  }
}
"""
_CUDA_STORES = {
    ".cs": "__stcs(out + i, make_uint4(value, value, value, value))",
    "": "out[i] = make_uint4(value, value, value, value)",
}


@functools.cache
def _cuda_kernel(words: int, threads: int, store: str):
    name = f"ceiling_{words}_{threads}_{'stream' if store else 'plain'}"
    source = _CUDA_SOURCE % {"name": name, "words": words, "threads": threads, "store": _CUDA_STORES[store]}
    return torch.cuda._compile_kernel(source, name)


def cuda_ceiling(weight, absmax, absmax2, out, words, threads, store):
    """Launch the kernel, compiled at run time.

    weight: uint8, numel / 2 bytes; absmax: uint8, one per 64 elements; absmax2: fp32, one per 16384;
    out: fp16 or bf16, contiguous, numel elements (a multiple of 8 below 2**31), overwritten.
    """
    n_words = out.numel() // 8
    grid = (-(-n_words // (words * threads)), 1, 1)
    arguments = [weight, absmax, absmax2, out, n_words]
    _cuda_kernel(words, threads, store)(grid=grid, block=(threads, 1, 1), args=arguments)


def oracle(weight, absmax, absmax2, numel, words, threads):
    """What it must write, in plain torch: int32 (numel / 8, 4). It depends on every byte read."""
    packed = weight.reshape(-1).view(torch.uint8)[: numel // 2].view(torch.int32)
    word, scales = torch.arange(packed.numel(), device=packed.device), words * threads // 8
    block = word // (words * threads) * scales + (word % threads & (scales - 1))
    exists = block * 8 < packed.numel()
    block = torch.where(exists, block, 0)
    mix = absmax.reshape(-1)[block].int() ^ absmax2.reshape(-1).view(torch.int32)[block // 256]
    return (packed ^ torch.where(exists, mix, 0))[:, None].expand(-1, 4)


def launches(quick: bool = False) -> list[Callable]:
    """Launch choices to try: the fastest is the ceiling. None where torch cannot compile CUDA source.

    quick: those alone that have been the fastest at some size. Arguments as `cuda_ceiling`.
    """
    try:
        _cuda_kernel(1, 128, ".cs")
    except Exception:  # private, and it needs a GPU: which one depends on the version of torch
        return []
    words, stores = ((1, 4), (".cs",)) if quick else ((1, 2, 4, 8), (".cs", ""))
    return [
        functools.partial(cuda_ceiling, words=words, threads=threads, store=store)
        for words, threads, store in product(words, (128, 256), stores)
    ]
