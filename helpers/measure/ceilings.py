"""The ceiling: kernels that move exactly the bytes a dequantization must move and compute nothing.

Each thread loads packed 32-bit words (8 codes each) and writes every word four times, 16 bytes: the traffic
of a 16-bit output. Scales are loaded too and mixed in with XOR, so that no load can be optimized away and a
test can prove by the output that every byte was read. Two versions: CUDA C (free of what Triton itself costs)
and Triton (where torch cannot compile CUDA source; with the arguments of our kernel, in whose place it can be
launched).
"""

import functools
from collections.abc import Callable
from itertools import product

import torch
import triton
import triton.language as tl

_READ = ["weight_ptr", "absmax_ptr", "table_ptr", "code2_ptr", "absmax2_ptr", "offset_ptr"]


@triton.jit(do_not_specialize=["n_words", "n_tail"], do_not_specialize_on_alignment=_READ)
def moving_kernel(
    weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, n_words, n_tail,
    ASM: tl.constexpr, NESTED: tl.constexpr, LOG2_BLOCK: tl.constexpr, LOG2_BLOCK2: tl.constexpr,
    MODE: tl.constexpr, TAIL: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
    STAGE: tl.constexpr, LOAD_HINT: tl.constexpr, STORE_HINT: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """Writes every 32-bit word four times, mixed with scales of its tile: 16-bit outputs of whole words."""
    tile: tl.constexpr = THREADS * WORDS
    pid = tl.program_id(0)
    thread = tl.arange(0, THREADS)
    left = n_words - pid * tile
    first = pid.to(tl.int64) * tile
    block = thread & (tile // 8 - 1)  # every scale of the tile is read
    exists = block * 8 < left
    block = (block + pid * (tile // 8)) >> (LOG2_BLOCK - 6)
    mix = tl.load(absmax_ptr + block, mask=exists, other=0, eviction_policy=LOAD_HINT).to(tl.int32)
    mix ^= tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=exists, other=0).to(tl.int32, bitcast=True)
    words_ptr = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first
    words = ()
    for row in tl.static_range(WORDS):
        index = row * THREADS + tl.max_contiguous(thread, 1)
        words = words + (tl.load(words_ptr + index, mask=index < left, eviction_policy=LOAD_HINT),)
    to = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first * 4
    for row in tl.static_range(WORDS):
        index = row * THREADS + tl.max_contiguous(thread, 1)
        value = words[row] ^ mix
        quad = tl.reshape(tl.join(tl.join(value, value), tl.join(value, value)), (THREADS, 4))
        target = index[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(to + target, quad, mask=(index < left)[:, None], cache_modifier=STORE_HINT)


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


def triton_ceiling(weight, absmax, absmax2, out, words=1, threads=128, store=".cs"):
    """The no-arithmetic kernel in Triton.

    weight: uint8, numel / 2 bytes; absmax: uint8, one per 64 elements; absmax2: fp32, one per 16384;
    out: fp16 or bf16, contiguous, numel elements (a multiple of 8 below 2**31), overwritten and returned.
    """
    n_words, unread = out.numel() // 8, absmax2
    state = dict(NESTED=True, LOG2_BLOCK=6, LOG2_BLOCK2=8, TAIL=False)
    arithmetic = dict(ASM=False, MODE=0, STAGE=False, FLUSH=False)  # not done
    choice = dict(WORDS=words, THREADS=threads, LOAD_HINT="evict_first", STORE_HINT=store)
    moving_kernel[(-(-n_words // (words * threads)),)](
        *(weight, out, absmax, unread, unread, absmax2, unread, n_words, 0),
        **(state | arithmetic | choice), num_warps=threads // 32,
    )  # fmt: skip
    return out


@functools.cache
def _cuda_kernel(words: int, threads: int, store: str):
    name = f"ceiling_{words}_{threads}_{'stream' if store else 'plain'}"
    source = _CUDA_SOURCE % {"name": name, "words": words, "threads": threads, "store": _CUDA_STORES[store]}
    return torch.cuda._compile_kernel(source, name)


def cuda_ceiling(weight, absmax, absmax2, out, words=1, threads=128, store=".cs"):
    """The same kernel in CUDA C, compiled at run time; arguments as `triton_ceiling`."""
    n_words = out.numel() // 8
    grid = (-(-n_words // (words * threads)), 1, 1)
    arguments = [weight, absmax, absmax2, out, n_words]
    _cuda_kernel(words, threads, store)(grid=grid, block=(threads, 1, 1), args=arguments)
    return out


def oracle(weight, absmax, absmax2, numel, words, threads):
    """What both kernels must write, in plain torch: int32 (numel / 8, 4). It depends on every byte read."""
    packed = weight.reshape(-1).view(torch.uint8)[: numel // 2].view(torch.int32)
    word, scales = torch.arange(packed.numel(), device=packed.device), words * threads // 8
    block = word // (words * threads) * scales + (word % threads & (scales - 1))
    exists = block * 8 < packed.numel()
    block = torch.where(exists, block, 0)
    mix = absmax.reshape(-1)[block].int() ^ absmax2.reshape(-1).view(torch.int32)[block // 256]
    return (packed ^ torch.where(exists, mix, 0))[:, None].expand(-1, 4)


def variants(kind: str, quick: bool = False) -> list[dict]:
    """Launch choices tried for a ceiling: the fastest one is the ceiling. kind: as in `launches`; `quick`
    tries those alone that have been the fastest at some size."""
    threads = {"ceiling_cuda": (128, 256), "ceiling_triton": (128,)}[kind]
    choices = ((1, 4), threads, (".cs",)) if quick else ((1, 2, 4, 8), threads, (".cs", ""))
    return [dict(zip(("words", "threads", "store"), values, strict=True)) for values in product(*choices)]


@functools.cache
def cuda_compiles() -> bool:
    """Whether the CUDA C version can run: it needs a GPU and a torch that compiles source at run time."""
    try:
        _cuda_kernel(1, 128, ".cs")
    except Exception:  # private: which one depends on the version of torch
        return False
    return True


def launches(quick: bool = False) -> tuple[str, list[Callable]]:
    """(name, launch choices) of the ceiling here, CUDA C or else Triton; arguments as `triton_ceiling`."""
    kernels = {"ceiling_cuda": cuda_ceiling, "ceiling_triton": triton_ceiling}
    kind = "ceiling_cuda" if cuda_compiles() else "ceiling_triton"
    return kind, [functools.partial(kernels[kind], **choice) for choice in variants(kind, quick)]
