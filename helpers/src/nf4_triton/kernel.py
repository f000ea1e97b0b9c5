"""Dequantize bitsandbytes' NF4 and FP4 weights in one Triton kernel. `# %%`: notebook cells."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
# %% id="kernel-scale" part="device" tags=["kernel"]
import triton
import triton.language as tl

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
if TRITON < (3, 4):
    raise ImportError(f"Triton {triton.__version__} cannot compile tl.gather for this kernel, "
                      "expected 3.4 or newer: update torch to 2.8 or newer, which brings it")
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: no GPU in use
FLUSH = tl.constexpr(not INTERPRETED)  # subnormals to zero, as bitsandbytes does on a GPU

# bitsandbytes, too, dequantizes with built-in tables and ignores quant_state.code.
NF4 = tl.constexpr((
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0))
FP4 = tl.constexpr(2 * (  # codes from 8 on are negative, 8 itself is -0.0
    0.0, 0.005208333488553762, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
    0.1666666716337204, 0.25))

# scale = code2[absmax] * absmax2 + offset, rounded twice: .rn is never fused into an FMA, which
# would change a few weights in a million. is_pure below: torch.compile assumes that other assembly
# changes every input of the kernel.
SCALE = tl.constexpr("{ .reg .f32 m; mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3; }")
# Two results in one register: $0 = {value $1 * scale $3, value $2 * scale $4}.
PRODUCTS = ("{ .reg .f32 a, b; .reg .b16 lo, hi; .reg .b32 bit, x, y; .reg .pred nan; "
            "mul.rn.ftz.f32 a, $1, $3; mul.rn.ftz.f32 b, $2, $4; ")
FP16_PAIR = tl.constexpr(PRODUCTS + "cvt.rn.f16x2.f32 $0, b, a; }")
BF16_PAIR = tl.constexpr(PRODUCTS + "cvt.rn.bf16x2.f32 $0, b, a; }")
# sm_75 has no packed conversion and no bf16.
FP16_PAIR_SM75 = tl.constexpr(
    PRODUCTS + "cvt.rn.f16.f32 lo, a; cvt.rn.f16.f32 hi, b; mov.b32 $0, {lo, hi}; }")
BF16_PAIR_SM75 = tl.constexpr(  # to nearest even: add 0x7fff and the lowest bit kept
    PRODUCTS +
    "mov.b32 x, a; bfe.u32 bit, x, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 x, x, bit; "
    "setp.nan.f32 nan, a, a; selp.b32 x, 0x7fff0000, x, nan; "
    "mov.b32 y, b; bfe.u32 bit, y, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 y, y, bit; "
    "setp.nan.f32 nan, b, b; selp.b32 y, 0x7fff0000, y, nan; "
    "prmt.b32 $0, x, y, 0x7632; }")


@triton.jit
def _codebook(code, FOUR: tl.constexpr):
    """Return the value of each code by a tree of selects: each bit halves the candidates."""
    VALUES: tl.constexpr = FP4 if FOUR else NF4
    values = ()
    for i in tl.static_range(8):
        values = values + (tl.where((code & 1) != 0, VALUES[2 * i + 1], VALUES[2 * i]),)
    for bit in tl.static_range(1, 4):
        half = ()
        for i in tl.static_range(8 >> bit):
            half = half + (tl.where(((code >> bit) & 1) != 0, values[2 * i + 1], values[2 * i]),)
        values = half
    if FOUR:  # set the sign bit: tl.where would take -0.0 for 0.0
        sign = (code & 8) << 28
        return (values[0].to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return values[0]


@triton.jit
def _scale(code2, absmax2, offset, ASM: tl.constexpr):
    """Return the fp32 scale of each row."""
    if ASM:
        return tl.inline_asm_elementwise(SCALE, "=f,f,f,f", [code2, absmax2, offset],
                                         dtype=tl.float32, is_pure=True, pack=1)
    return _multiply(code2, absmax2) + offset


@triton.jit
def _product(value, scale, dtype: tl.constexpr, ASM: tl.constexpr, SM75: tl.constexpr):
    """Return value * scale rounded to dtype, subnormals flushed, two elements at a time."""
    if not ASM or dtype == tl.float32:
        return _plain_product(value, scale, dtype, ASM, SM75)
    if dtype == tl.float16:
        PAIR: tl.constexpr = FP16_PAIR_SM75 if SM75 else FP16_PAIR
    else:
        PAIR: tl.constexpr = BF16_PAIR_SM75 if SM75 else BF16_PAIR
    return tl.inline_asm_elementwise(PAIR, "=r,f,f,f,f", [value, scale], dtype=dtype.value,
                                     is_pure=True, pack=2)


# %% The same bits in plain Triton id="kernel-portable" part="device" folded=true tags=["kernel"]
@triton.jit
def _flush(x, tiny):
    zero = (x.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
    return tl.where(tiny, zero, x)


@triton.jit
def _multiply(a, b):
    """Return a * b for |a| <= 1, as all codes are. With FLUSH as mul.ftz: subnormal operands and
    results become zeros of their sign, as in bitsandbytes' CUDA build (its CPU build keeps them).
    A result counts as subnormal after rounding to 24 bits, so the test multiplies by 2**64 first,
    where no result is subnormal. 1.17...e-38 is the smallest normal number, 2.16...e-19 is 2**64
    times that."""
    if FLUSH:
        a = _flush(a, tl.abs(a) < 1.1754943508222875e-38)
        b = _flush(b, tl.abs(b) < 1.1754943508222875e-38)
        # A select stands between this product and the sum, so no FMA can take both.
        return _flush(a * b, tl.abs(a * 18446744073709551616.0 * b) < 2.168404344971009e-19)
    return a * b


@triton.jit
def _plain_product(value, scale, dtype: tl.constexpr, ASM: tl.constexpr, SM75: tl.constexpr):
    if ASM:  # fp32
        return tl.inline_asm_elementwise("mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [value, scale],
                                         dtype=tl.float32, is_pure=True, pack=1)
    value = _multiply(value, scale)
    if SM75 and dtype == tl.bfloat16:  # to nearest even in integers
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value != value, 0x7FFF0000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


# %% id="kernel-kernel" part="device" tags=["kernel"]
@triton.jit(
    do_not_specialize=["n"],  # one binary for all sizes and addresses
    do_not_specialize_on_alignment=[
        "weight_ptr", "out_ptr", "absmax_ptr", "code2_ptr", "absmax2_ptr", "offset_ptr",
    ],
)
def _your_dequantize_nf4_kernel(
    weight_ptr,  # packed codes, two per byte, high nibble first: ceil(n / 2) bytes
    out_ptr,  # (n,) fp16, bf16 or fp32
    absmax_ptr,  # one per block: uint8 index into code2 (nested), or the fp32 scale itself (flat)
    code2_ptr,  # (256,) fp32: the value of each absmax index
    absmax2_ptr,  # fp32, one for every 2**LOG2_BLOCK2 blocks
    offset_ptr,  # () fp32; bf16, fp16 or fp64 where that was torch's default dtype on loading
    n,  # elements
    NESTED: tl.constexpr,  # absmax is quantized too
    FOUR: tl.constexpr,  # fp4 codes, else nf4
    LOG2_BLOCK: tl.constexpr,  # blocksize 64 -> 6
    LOG2_BLOCK2: tl.constexpr,  # state2.blocksize 256 -> 8
    BYTES: tl.constexpr,  # load bytes: the address is no multiple of 16, or n none of 8
    UNIT: tl.constexpr,  # masks are alike for so many elements: a row, 8, or 1
    ROWS: tl.constexpr,  # rows of 64 elements per program
    ASM: tl.constexpr,  # inline PTX; else the same bits in plain Triton
    SM75: tl.constexpr,  # no packed conversions, no bf16
    LOAD_HINT: tl.constexpr,  # eviction policy of loads read once
    STORE_HINT: tl.constexpr,  # cache modifier of the stores
):
    """Dequantize ROWS rows of 64 elements. A row lies in one block, so it has one scale."""
    LOG2_ROW: tl.constexpr = 6 if LOG2_BLOCK > 6 else LOG2_BLOCK  # shorter rows for small blocks
    ROW: tl.constexpr = 1 << LOG2_ROW
    TILE: tl.constexpr = ROWS * 64
    start = tl.program_id(0).to(tl.int64) * TILE  # 64 bits: the tensor may have 2**31 elements or more
    left = tl.minimum(tl.cast(n, tl.int64) - start, TILE).to(tl.int32)
    left = tl.multiple_of(left, UNIT)  # masks are then alike for UNIT elements: wide accesses
    row = tl.arange(0, TILE // ROW)
    exists = row * ROW < left
    table = _codebook(tl.arange(0, 16), FOUR)

    # Load one absmax per row, its absmax2, and the codes: eight in a word, two in a byte. Loading
    # all before using any is 3% faster at 4.2M elements (H200).
    block = (start >> LOG2_BLOCK).to(tl.int32) + (row >> (LOG2_BLOCK - LOG2_ROW))
    absmax = tl.load(absmax_ptr + block, mask=exists, other=0, eviction_policy=LOAD_HINT)
    if NESTED:
        absmax2 = tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=exists, other=0.0)
        offset = tl.load(offset_ptr).to(tl.float32)
    CODES: tl.constexpr = 2 if BYTES else 8
    data_ptr = weight_ptr + (start >> 1)
    if not BYTES:
        data_ptr = tl.multiple_of(data_ptr.to(tl.pointer_type(tl.uint32), bitcast=True), 16)
    at = row[:, None] * (ROW // CODES) + tl.arange(0, ROW // CODES)[None, :]
    count = tl.multiple_of((left + (CODES - 1)) // CODES, (UNIT + CODES - 1) // CODES)
    data = tl.load(data_ptr + at, mask=at < count, other=0, eviction_policy=LOAD_HINT)

    # Dequantize the scales.
    if NESTED:
        scale = _scale(tl.load(code2_ptr + absmax.to(tl.int32)), absmax2, offset, ASM)
    else:
        scale = absmax

    # Look each code up, multiply, round, store.
    shift = (tl.arange(0, CODES) ^ 1) * 4  # high nibble first
    code = (data[:, :, None].to(tl.uint32) >> shift.to(tl.uint32)[None, None, :]) & 15
    value = tl.gather(table, tl.reshape(code, (TILE,)).to(tl.int32), 0)
    value = tl.reshape(value, (TILE // ROW, ROW))
    result = _product(value, scale[:, None], out_ptr.dtype.element_ty, ASM, SM75)
    to = out_ptr + start
    if UNIT > 1:
        to = tl.multiple_of(to, 16)
    element = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    tl.store(to + element, result, mask=element < left, cache_modifier=STORE_HINT)
