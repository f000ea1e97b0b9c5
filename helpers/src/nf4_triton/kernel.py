"""Dequantize bitsandbytes' NF4 and FP4 weights in one Triton kernel. `# %%`: notebook cells."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
# %% id="kernel-scale" part="device" tags=["kernel"]
import triton
import triton.language as tl
from triton.language.extra import libdevice

# scale = code2[absmax] * absmax2 + offset, rounded twice: .rn is never fused into an FMA, which
# would change a few weights in a million. is_pure below: torch.compile assumes that other assembly
# changes every input of the kernel.
SCALE = tl.constexpr("{ .reg .f32 m; mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3; }")


@triton.jit
def _scale(code2, absmax2, offset, ASM: tl.constexpr):
    """Return the fp32 scale of each row."""
    if ASM:
        return tl.inline_asm_elementwise(SCALE, "=f,f,f,f", [code2, absmax2, offset],
                                         dtype=tl.float32, is_pure=True, pack=1)
    return _multiply(code2, absmax2) + offset


# %% Codebooks, selected slices, rounding on sm_75 id="kernel-parts" part="device" folded=true tags=["kernel"]
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
if TRITON < (3, 4):
    raise ImportError(f"Triton {triton.__version__} cannot compile tl.gather for this kernel, "
                      "expected 3.4 or newer: update torch to 2.8 or newer, which brings it")
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: no GPU in use
LIBDEVICE = tl.constexpr(not INTERPRETED)

# bitsandbytes, too, dequantizes with a built-in table and ignores quant_state.code.
NF4 = tl.constexpr((
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0))
FP4 = tl.constexpr(2 * (  # codes from 8 on are negative, 8 itself is -0.0
    0.0, 0.005208333488553762, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
    0.1666666716337204, 0.25))
# Two bf16 in one register, $0 = {$1 * $3, $2 * $4}, for sm_75, which has no bf16: to nearest even
# by adding 0x7fff and the lowest bit kept. 744 instructions against 808 in plain Triton.
BF16_PAIR_SM75 = tl.constexpr(
    "{ .reg .f32 a, b; .reg .b32 bit, x, y; .reg .pred nan; "
    "mul.rn.ftz.f32 a, $1, $3; mul.rn.ftz.f32 b, $2, $4; "
    "mov.b32 x, a; bfe.u32 bit, x, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 x, x, bit; "
    "setp.nan.f32 nan, a, a; selp.b32 x, 0x7fff0000, x, nan; "
    "mov.b32 y, b; bfe.u32 bit, y, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 y, y, bit; "
    "setp.nan.f32 nan, b, b; selp.b32 y, 0x7fff0000, y, nan; "
    "prmt.b32 $0, x, y, 0x7632; }")


@triton.jit
def _multiply(a, b):
    """Return a * b, rounded before any sum. mul_rn is mul.rn.ftz: subnormals become zeros, as in
    bitsandbytes' CUDA build. The interpreter has no libdevice and keeps them, as its CPU build."""
    if LIBDEVICE:
        return libdevice.mul_rn(a, b)
    return a * b


@triton.jit
def _codebook(code, QUANT_TYPE: tl.constexpr):
    """Return the value of each code by a tree of selects: each bit halves the candidates."""
    VALUES: tl.constexpr = FP4 if QUANT_TYPE == "fp4" else NF4
    values = ()
    for i in tl.static_range(8):
        values = values + (tl.where((code & 1) != 0, VALUES[2 * i + 1], VALUES[2 * i]),)
    for bit in tl.static_range(1, 4):
        half = ()
        for i in tl.static_range(8 >> bit):
            half = half + (tl.where(((code >> bit) & 1) != 0, values[2 * i + 1], values[2 * i]),)
        values = half
    if QUANT_TYPE == "fp4":  # set the sign bit: tl.where would take -0.0 for 0.0
        sign = (code & 8) << 28
        return (values[0].to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return values[0]


@triton.jit
def _place(n, SELECT: tl.constexpr, TILE: tl.constexpr):
    """Return the slice of the result that this program writes, and where its tile begins in it."""
    tile = tl.program_id(0).to(tl.int64)
    if SELECT:
        tiles = (n + TILE - 1) // TILE
        return tile // tiles, (tile % tiles) * TILE
    return tile * 0, tile * TILE


@triton.jit
def _find(rows_ptr, which, n, first, slices, SELECT: tl.constexpr):
    """Return where a slice begins in the weight, and whether it exists: slice 0 stands in for an id
    out of range. Apart from _place: torch.compile takes what leads to a store for written."""
    if SELECT:
        id = tl.load(rows_ptr + which).to(tl.int64)
        exists = (id >= 0) & (id < slices)
        return tl.where(exists, id, 0) * n, exists
    return which + first, which == 0


@triton.jit
def _bf16_sm75(value, scale, ASM: tl.constexpr):
    """Return value * scale in bf16, rounded in integers."""
    if ASM:
        return tl.inline_asm_elementwise(BF16_PAIR_SM75, "=r,f,f,f,f", [value, scale],
                                         dtype=tl.bfloat16, is_pure=True, pack=2)
    value = _multiply(value, scale)
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(value != value, 0x7FFF0000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _store(out_ptr, to, element, result, left, UNIT: tl.constexpr, ALIGNED: tl.constexpr, HINT: tl.constexpr):
    """Store the elements below `left`, 128 bits at a time where the address allows it."""
    out_ptr += to  # here: tl.multiple_of has no effect on an argument
    if ALIGNED:
        out_ptr = tl.multiple_of(out_ptr, 16)
        if UNIT < 8:  # the last elements one by one
            wide = tl.multiple_of(left // 8 * 8, 8)
            if wide < left:
                tl.store(out_ptr + element, result, mask=(element >= wide) & (element < left))
            left = wide
    tl.store(out_ptr + element, result, mask=element < left, cache_modifier=HINT)


# %% id="kernel-kernel" part="device" tags=["kernel"]
@triton.jit(
    do_not_specialize=["n", "first", "slices"],  # one binary for all sizes and addresses
    do_not_specialize_on_alignment=["weight_ptr", "out_ptr", "absmax_ptr", "code2_ptr",
                                    "absmax2_ptr", "offset_ptr", "rows_ptr"],
)
def _your_dequantize_nf4_kernel(
    weight_ptr,  # packed codes, two per byte, high nibble first: ceil(n / 2) bytes
    out_ptr,  # (n,) fp16, bf16 or fp32
    absmax_ptr,  # one per block: uint8 index into code2 (nested), or the fp32 scale itself (flat)
    code2_ptr,  # (256,) fp32: the value of each absmax index
    absmax2_ptr,  # fp32, one for every 2**LOG2_BLOCK2 blocks
    offset_ptr,  # () fp32; bf16, fp16 or fp64 where that was torch's default dtype on loading
    rows_ptr,  # with SELECT: the ids of the slices to dequantize
    n: tl.int64,  # elements; with SELECT: of a slice
    first: tl.int64,  # elements before them in the weight
    slices: tl.int64,  # with SELECT: how many the weight has
    NESTED: tl.constexpr,  # absmax is quantized too
    QUANT_TYPE: tl.constexpr,  # "nf4" or "fp4"
    LOG2_BLOCK: tl.constexpr,  # blocksize 64 -> 6
    LOG2_BLOCK2: tl.constexpr,  # state2.blocksize 256 -> 8
    SELECT: tl.constexpr,  # dequantize slices by their ids
    BYTES: tl.constexpr,  # load single bytes: an address is not 16-byte aligned, or n % 8 != 0
    LOG2_ROW: tl.constexpr,  # a row of 64 elements or fewer lies in one block
    UNIT: tl.constexpr,  # divides n: masks are constant over UNIT elements, a row or fewer
    ALIGNED: tl.constexpr,  # the result's address is a multiple of 16
    ROWS: tl.constexpr,  # rows of 64 elements per program
    ASM: tl.constexpr,  # inline PTX; else the same bits in plain Triton
    SM75: tl.constexpr,  # no bf16
    LOAD_HINT: tl.constexpr,  # eviction policy of loads read once
    STORE_HINT: tl.constexpr,  # cache modifier of the stores
):
    """Dequantize ROWS rows of 64 elements. A row lies in one block, so it has one scale."""
    ROW: tl.constexpr = 1 << LOG2_ROW
    TILE: tl.constexpr = ROWS * 64
    n = tl.cast(n, tl.int64)  # torch.compile may pass a Python int
    which, start = _place(n, SELECT, TILE)
    source, exists = _find(rows_ptr, which, n, first, slices, SELECT)
    source += start
    left = tl.minimum(n - start, TILE).to(tl.int32)
    left = tl.multiple_of(left, UNIT)  # wide accesses need masks that are constant over them
    row = tl.arange(0, TILE // ROW)
    table = _codebook(tl.arange(0, 16), QUANT_TYPE)

    # Load everything before using any: 3% faster at 4.2M elements (H200).
    block = ((source >> LOG2_ROW).to(tl.int32) + row) >> (LOG2_BLOCK - LOG2_ROW)
    mask = row * ROW < left
    absmax = tl.load(absmax_ptr + block, mask=mask, other=0, eviction_policy=LOAD_HINT)
    if NESTED:
        absmax2 = tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=mask, other=0.0)
        offset = tl.load(offset_ptr).to(tl.float32)
    CODES: tl.constexpr = 2 if BYTES else 8  # in a byte, or in a word
    data_ptr = weight_ptr + (source >> 1)
    if not BYTES:
        data_ptr = tl.multiple_of(data_ptr.to(tl.pointer_type(tl.uint32), bitcast=True), 16)
    at = row[:, None] * (ROW // CODES) + tl.arange(0, ROW // CODES)[None, :]
    count = tl.multiple_of((left + (CODES - 1)) // CODES, (UNIT + CODES - 1) // CODES)
    data = tl.load(data_ptr + at, mask=at < count, other=0, eviction_policy=LOAD_HINT)

    scale = absmax
    if NESTED:
        scale = _scale(tl.load(code2_ptr + absmax.to(tl.int32)), absmax2, offset, ASM)

    # Look each code up, multiply, round, store. tl.gather puts the 16 values into shared memory, in
    # 16 different banks, so lookups never conflict.
    shift = (tl.arange(0, CODES) ^ 1) * 4  # high nibble first
    code = (data[:, :, None].to(tl.uint32) >> shift.to(tl.uint32)[None, None, :]) & 15
    value = tl.gather(table, tl.reshape(code, (TILE,)).to(tl.int32), 0)
    value = tl.reshape(value, (TILE // ROW, ROW))
    if SM75 and out_ptr.dtype.element_ty == tl.bfloat16:
        result = _bf16_sm75(value, scale[:, None], ASM)
    else:
        result = _multiply(value, scale[:, None]).to(out_ptr.dtype.element_ty)
    element = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    if SELECT:
        result = tl.where(exists, result, float("nan"))  # an id out of range: no wait, no error
    _store(out_ptr, which * n + start, element, result, left, UNIT, ALIGNED, STORE_HINT)
