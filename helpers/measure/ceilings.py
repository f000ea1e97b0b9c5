"""The ceiling: kernels that move exactly the bytes a dequantization must move and compute nothing.

Each thread loads packed 32-bit words (8 codes each) and writes every word four times, 16 bytes: the traffic
of a 16-bit output. Scales are loaded too and mixed in with XOR, so that no load can be optimized away and a
test can prove by the output that every byte was read. Two versions: Triton (for every user) and CUDA C (to
see what Triton itself costs; needs a torch that can compile CUDA source at run time).
"""

import functools
import itertools

import torch
import triton
import triton.language as tl

WORDS_PER_ABSMAX2 = 2048  # one fp32 second-level scale serves 256 blocks


@triton.jit
def _ceiling_kernel(
    weight_ptr,  # uint8 packed codes, 4 * n_words bytes
    absmax_ptr,  # uint8, one per 8 words
    absmax2_ptr,  # fp32, one per 2048 words
    out_ptr,  # any 16-bit dtype, 8 * n_words elements
    n_words,
    WORDS: tl.constexpr,  # words per thread
    THREADS: tl.constexpr,
    STORE: tl.constexpr,  # ".cs" streams the output, "" stores plainly
):
    thread = tl.arange(0, THREADS)
    first = tl.program_id(0) * (THREADS * WORDS)
    words = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    out = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    scales: tl.constexpr = THREADS * WORDS // 8
    block = tl.program_id(0) * scales + thread
    used = (thread < scales) & (block * 8 < n_words)
    mix = tl.load(absmax_ptr + block, mask=used, other=0, eviction_policy="evict_first").to(tl.int32)
    mix = mix ^ tl.load(absmax2_ptr + first // 2048).to(tl.int32, bitcast=True)
    loaded = ()
    for row in tl.static_range(WORDS):
        # One word per thread: without this hint Triton widens the load, and the stores need a layout change.
        index = first + row * THREADS + tl.max_contiguous(thread, 1)
        word = tl.load(words + index, mask=index < n_words, other=0, eviction_policy="evict_first")
        loaded = loaded + (word,)
    for row in tl.static_range(WORDS):
        value = loaded[row] ^ mix
        quad = tl.reshape(tl.join(tl.join(value, value), tl.join(value, value)), (THREADS, 4))
        index = first + row * THREADS + tl.max_contiguous(thread, 1)
        target = index[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(out + target, quad, mask=(index < n_words)[:, None], cache_modifier=STORE)


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
  const int block = blockIdx.x * scales + threadIdx.x;
  unsigned mix = absmax2[first / 2048];
  if (threadIdx.x < scales && block * 8 < n_words) mix ^= __ldcs(absmax + block);
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


def _check(weight, absmax, absmax2, out):
    """Words in `weight`; raises ValueError when the buffers do not belong together."""
    numel = out.numel()
    blocks = -(-numel // 64)
    if numel == 0 or numel % 8 or numel >= 2**31 or out.element_size() != 2 or not out.is_contiguous():
        raise ValueError(
            "a ceiling needs a contiguous 16-bit output whose size is a multiple of 8 below 2**31"
        )
    sizes = {"weight": weight.nbytes, "absmax": absmax.nbytes, "absmax2": absmax2.nbytes}
    needed = {"weight": numel // 2, "absmax": blocks, "absmax2": 4 * -(-blocks // 256)}
    for name, need in needed.items():
        if sizes[name] < need:
            raise ValueError(
                f"a ceiling needs {need} bytes of {name} for {numel} elements, got {sizes[name]}"
            )
    return numel // 8


def triton_ceiling(weight, absmax, absmax2, out, words=1, threads=128, store=".cs"):
    """The no-arithmetic kernel in Triton.

    weight: uint8, numel / 2 bytes; absmax: uint8, one per 64 elements; absmax2: fp32, one per 16384;
    out: fp16 or bf16, contiguous, numel elements, overwritten and returned.
    Raises ValueError for buffers that are too short.
    """
    n_words = _check(weight, absmax, absmax2, out)
    grid = (-(-n_words // (words * threads)),)
    _ceiling_kernel[grid](
        weight,
        absmax,
        absmax2,
        out,
        n_words,
        WORDS=words,
        THREADS=threads,
        STORE=store,
        num_warps=threads // 32,
    )
    return out


@functools.cache
def _cuda_kernel(words: int, threads: int, store: str):
    name = f"ceiling_{words}_{threads}_{'stream' if store else 'plain'}"
    source = _CUDA_SOURCE % {"name": name, "words": words, "threads": threads, "store": _CUDA_STORES[store]}
    return torch.cuda._compile_kernel(source, name)


def cuda_ceiling(weight, absmax, absmax2, out, words=1, threads=128, store=".cs"):
    """The same kernel in CUDA C, compiled at run time; arguments and errors as `triton_ceiling`."""
    n_words = _check(weight, absmax, absmax2, out)
    grid = (-(-n_words // (words * threads)), 1, 1)
    _cuda_kernel(words, threads, store)(
        grid=grid, block=(threads, 1, 1), args=[weight, absmax, absmax2, out, n_words]
    )
    return out


def oracle(weight, absmax, absmax2, numel, words, threads):
    """What both kernels must write, in plain torch: int32 (numel / 8, 4). It depends on every byte read."""
    packed = weight.reshape(-1).view(torch.uint8)[: numel // 2].view(torch.int32)
    word = torch.arange(packed.numel(), device=packed.device)
    program, thread = word // (words * threads), word % threads
    scales = words * threads // 8
    block = program * scales + thread
    used = (thread < scales) & (block * 8 < packed.numel())
    mix = torch.where(used, absmax.reshape(-1)[block.clamp(max=absmax.numel() - 1)].int(), 0)
    second = absmax2.reshape(-1).view(torch.int32)[program * (words * threads) // WORDS_PER_ABSMAX2]
    return (packed ^ mix ^ second)[:, None].expand(-1, 4)


def variants(kind: str, quick: bool = False) -> list[dict]:
    """Launch choices tried for a ceiling: the fastest one is the ceiling. kind: a key of `kinds()`; `quick`
    tries those alone that have been the fastest at some size."""
    threads = {"ceiling_cuda": (128, 256), "ceiling_triton": (128,)}[kind]
    choices = ((1, 4), threads, (".cs",)) if quick else ((1, 2, 4, 8), threads, (".cs", ""))
    return [
        {"words": words, "threads": count, "store": store}
        for words, count, store in itertools.product(*choices)
    ]


@functools.cache
def cuda_missing() -> str:
    """Why the CUDA C version cannot run here; empty when it can."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} cannot compile CUDA source at run time"
    try:
        _cuda_kernel(1, 128, ".cs")
    except Exception as error:
        return f"CUDA source does not compile here: {str(error).splitlines()[0][:200]}"
    return ""


def kinds() -> dict:
    """{name: kernel} of the ceilings that can run here."""
    here = {} if cuda_missing() else {"ceiling_cuda": cuda_ceiling}
    return here | {"ceiling_triton": triton_ceiling}


def works(device: str) -> bool:
    """Whether a tiny kernel (40 words and a part of a tile) writes what its oracle says, and nothing else."""
    numel, choice = 8 * 40, {"words": 1, "threads": 128, "store": ""}
    weight = torch.randint(0, 256, (numel // 2,), dtype=torch.uint8, device=device)
    absmax = torch.randint(0, 256, (numel // 64,), dtype=torch.uint8, device=device)
    absmax2 = torch.rand(1, device=device)
    out = torch.full((numel + 8,), -7, dtype=torch.int16, device=device)
    triton_ceiling(weight, absmax, absmax2, out[:numel], **choice)
    expected = oracle(weight, absmax, absmax2, numel, choice["words"], choice["threads"])
    right = torch.equal(out[:numel].view(torch.int32).view(-1, 4), expected)
    return right and bool((out[numel:] == -7).all())
