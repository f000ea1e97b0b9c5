"""Dequantize double-quantized NF4 weights in one Triton kernel: the puzzle's layers. `# %%`: notebook cells.

kernel_general.py has every other layout.
"""
# ruff: noqa: E402, I001
# %% id="kernel"
import triton
import triton.language as tl


@triton.jit
def _scale(code2, absmax2, offset, ASM: tl.constexpr):
    """Return the fp32 scale of each row: code2[absmax] * absmax2 + offset, rounded twice. An FMA, which
    rounds once, would change a few weights in a million, and .rn is never fused into one."""
    if ASM:  # is_pure: torch.compile assumes that other assembly changes every input of the kernel
        return tl.inline_asm_elementwise(
            "{ .reg .f32 m; mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3; }", "=f,f,f,f",
            [code2, absmax2, offset], dtype=tl.float32, is_pure=True, pack=1)
    return _multiply(code2, absmax2) + offset


# One binary for all sizes and addresses.
@triton.jit(do_not_specialize=["weight_ptr", "out_ptr", "absmax_ptr", "code2_ptr", "absmax2_ptr",
                               "offset_ptr", "n"])
def _your_dequantize_nf4_kernel(
    weight_ptr,  # (n / 2,) uint8: two codes a byte, high nibble first; 16-byte aligned, as is out
    out_ptr,  # (n,) fp16 or bf16
    absmax_ptr,  # (n >> LOG2_BLOCK,) uint8: one per block, an index into code2
    code2_ptr,  # (256,) fp32
    absmax2_ptr,  # fp32: one for every 2**LOG2_BLOCK2 blocks
    offset_ptr,  # () fp32
    n: tl.int64,  # elements, a multiple of 64
    LOG2_BLOCK: tl.constexpr,  # blocksize 64 -> 6
    LOG2_BLOCK2: tl.constexpr,  # state2.blocksize 256 -> 8
    TILE_ROWS: tl.constexpr,  # rows of 64 elements per program
    ASM: tl.constexpr,  # inline PTX; else the same bits in plain Triton
    SM75: tl.constexpr,  # no bf16
    LOAD_HINT: tl.constexpr,  # eviction policy of loads read once
    STORE_HINT: tl.constexpr,  # cache modifier of the stores
):
    """Dequantize TILE_ROWS rows of 64 elements. A row lies in one block, so it has one scale."""
    TILE: tl.constexpr = TILE_ROWS * 64
    start = tl.program_id(0).to(tl.int64) * TILE
    left = tl.multiple_of(tl.minimum(n - start, TILE).to(tl.int32), 64)  # elements of this tile
    rows = tl.arange(0, TILE_ROWS)

    # Load codes and scales. Rows past the end of the weight load the last row's scale and no codes.
    row = tl.minimum(rows, left // 64 - 1)
    block = ((start >> 6).to(tl.int32) + row) >> (LOG2_BLOCK - 6)
    absmax = tl.load(absmax_ptr + block, eviction_policy=LOAD_HINT)
    absmax2 = tl.load(absmax2_ptr + (block >> LOG2_BLOCK2))
    offset = tl.load(offset_ptr)
    word = rows[:, None] * 8 + tl.arange(0, 8)  # 8 codes each
    words_ptr = (weight_ptr + start // 2).to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(tl.multiple_of(words_ptr, 16) + word, word < tl.multiple_of(left // 8, 8),
                    eviction_policy=LOAD_HINT)
    scale = _scale(tl.load(code2_ptr + absmax), absmax2, offset, ASM)

    # Look each code up, multiply, round, store. tl.gather puts the 16 values into shared memory, in
    # 16 different banks, so lookups never conflict.
    shift = (tl.arange(0, 8) ^ 1) * 4  # high nibble first
    code = (words[:, :, None] >> shift) & 15
    value = tl.gather(_codebook(NF4), code.reshape(TILE), 0).reshape(TILE_ROWS, 64)
    result = _product(value, scale[:, None], out_ptr, ASM, SM75)
    element = rows[:, None] * 64 + tl.arange(0, 64)
    tl.store(tl.multiple_of(out_ptr + start, 16) + element, result, element < left,
             cache_modifier=STORE_HINT)


# %% Codebook and rounding id="kernel-parts" folded=true
from triton.language.extra import libdevice

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: no GPU in use
LIBDEVICE = tl.constexpr(not INTERPRETED)

# bitsandbytes, too, dequantizes with a built-in table and ignores quant_state.code.
NF4 = tl.constexpr((
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0))
# Two bf16 in one register, $0 = {$1 * $3, $2 * $4}, for sm_75, which has no bf16. Adding 0x7fff and
# the lowest kept bit rounds to nearest even.
BF16_PAIR_SM75 = tl.constexpr(
    "{ .reg .f32 a, b; .reg .b32 bit, x, y; .reg .pred nan; "
    "mul.rn.ftz.f32 a, $1, $3; mul.rn.ftz.f32 b, $2, $4; "
    "mov.b32 x, a; bfe.u32 bit, x, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 x, x, bit; "
    "setp.nan.f32 nan, a, a; selp.b32 x, 0x7fff0000, x, nan; "
    "mov.b32 y, b; bfe.u32 bit, y, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 y, y, bit; "
    "setp.nan.f32 nan, b, b; selp.b32 y, 0x7fff0000, y, nan; "
    "prmt.b32 $0, x, y, 0x7632; }")


@triton.jit
def _codebook(VALUES: tl.constexpr):
    """Return the value of each code by a tree of selects: each bit halves the candidates."""
    code = tl.arange(0, 16)
    values = ()
    for i in tl.static_range(8):
        values = values + (tl.where((code & 1) != 0, VALUES[2 * i + 1], VALUES[2 * i]),)
    for bit in tl.static_range(1, 4):
        half = ()
        for i in tl.static_range(8 >> bit):
            half = half + (tl.where(((code >> bit) & 1) != 0, values[2 * i + 1], values[2 * i]),)
        values = half
    return values[0]


@triton.jit
def _multiply(a, b):
    """Return a * b, rounded before any sum. mul_rn is mul.rn.ftz: subnormals become zeros, as in
    bitsandbytes' CUDA build. The interpreter has no libdevice and keeps subnormals, as the CPU build does."""
    if LIBDEVICE:
        return libdevice.mul_rn(a, b)
    return a * b


@triton.jit
def _product(value, scale, out_ptr, ASM: tl.constexpr, SM75: tl.constexpr):
    """Return value * scale, rounded to nearest even, in the dtype of the result."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if not SM75 or DTYPE != tl.bfloat16:
        result = _multiply(value, scale).to(DTYPE)
    elif ASM:
        result = tl.inline_asm_elementwise(BF16_PAIR_SM75, "=r,f,f,f,f", [value, scale],
                                           dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        value = _multiply(value, scale)
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value != value, 0x7FFF0000, bits + 0x7FFF + ((bits >> 16) & 1))
        result = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return result
