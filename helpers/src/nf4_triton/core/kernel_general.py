"""Dequantize every layout that kernel.py does not: FP4, flat scales, fp32, odd sizes and addresses, small
blocks, selected slices. Codebook, scale, and rounding are kernel.py's."""

import triton
import triton.language as tl

from .kernel import NF4, _codebook, _product, _scale

FP4 = tl.constexpr(2 * (  # codes 8 and above are negative; 8 is -0.0
    0.0, 0.005208333488553762, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
    0.1666666716337204, 0.25))  # fmt: skip


@triton.jit
def _values(QUANT_TYPE: tl.constexpr):
    """Return the values of the 16 codes."""
    tl.static_assert(QUANT_TYPE == "nf4" or QUANT_TYPE == "fp4")
    if QUANT_TYPE == "fp4":  # sets the sign bit: tl.where would turn -0.0 into 0.0
        sign = (tl.arange(0, 16) & 8) << 28
        values = (_codebook(FP4).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        values = _codebook(NF4)
    return values


@triton.jit
def _slice_to_write(n, SELECT: tl.constexpr, TILE: tl.constexpr):
    """Return the slice of the result that this program writes, and where its tile begins in it."""
    pid = tl.program_id(0).to(tl.int64)
    if SELECT:
        tiles = (n + TILE - 1) // TILE
        return pid // tiles, (pid % tiles) * TILE
    return pid * 0, pid * TILE


@triton.jit
def _slice_to_read(ids_ptr, which, n, skip, slices, SELECT: tl.constexpr):
    """Return where a slice begins in the weight, and whether it exists: slice 0 stands in for an id out of
    range. Separate from _slice_to_write: torch.compile treats whatever leads to a store as written."""
    if SELECT:
        id = tl.load(ids_ptr + which).to(tl.int64)
        exists = (id >= 0) & (id < slices)
        return tl.where(exists, id, 0) * n, exists
    return which + skip, which == 0


@triton.jit
def _store(
    out_ptr, start, offsets, result, left, UNIT: tl.constexpr, ALIGNED: tl.constexpr, HINT: tl.constexpr
):
    """Store the elements below `left`, 128 bits at a time where the address allows it."""
    out_ptr += start  # here: tl.multiple_of has no effect on an argument
    if ALIGNED:
        out_ptr = tl.multiple_of(out_ptr, 16)
        if UNIT < 8:  # the last elements one by one
            wide = tl.multiple_of(left // 8 * 8, 8)
            if wide < left:
                tl.store(out_ptr + offsets, result, mask=(offsets >= wide) & (offsets < left))
            left = wide
    tl.store(out_ptr + offsets, result, mask=offsets < left, cache_modifier=HINT)


@triton.jit(
    do_not_specialize=["n", "skip", "slices"],  # one binary for all sizes and addresses
    do_not_specialize_on_alignment=[
        "weight_ptr", "out_ptr", "absmax_ptr", "code2_ptr", "absmax2_ptr", "offset_ptr", "ids_ptr"
    ],
)  # fmt: skip
def _dequantize_general_kernel(
    weight_ptr,  # packed codes, two per byte, high nibble first: ceil(n / 2) bytes
    out_ptr,  # (n,) fp16, bf16 or fp32
    absmax_ptr,  # one per block: uint8 index into code2 (nested), or the fp32 scale itself (flat)
    code2_ptr,  # (256,) fp32: the value of each absmax index
    absmax2_ptr,  # fp32, one for every 2**LOG2_BLOCK2 blocks
    offset_ptr,  # () fp32; bf16, fp16 or fp64 where that was torch's default dtype on loading
    ids_ptr,  # with SELECT: the ids of the slices to dequantize
    n: tl.int64,  # elements of the result; with SELECT, of a slice
    skip: tl.int64,  # elements before these in the weight
    slices: tl.int64,  # with SELECT: slices in the weight
    NESTED: tl.constexpr,  # absmax is quantized, too
    QUANT_TYPE: tl.constexpr,  # "nf4" or "fp4"
    LOG2_BLOCK: tl.constexpr,  # blocksize 64 -> 6
    LOG2_BLOCK2: tl.constexpr,  # state2.blocksize 256 -> 8
    SELECT: tl.constexpr,  # dequantize slices by their ids
    BYTES: tl.constexpr,  # load single bytes: the address is not 16-byte aligned, or n % 8 != 0
    LOG2_ROW: tl.constexpr,  # a row of 64 elements or fewer lies in one block
    UNIT: tl.constexpr,  # divides n: masks are constant over UNIT elements, a row or fewer
    ALIGNED: tl.constexpr,  # the result's address is a multiple of 16
    TILE_ROWS: tl.constexpr,  # rows of 64 elements per program
    ASM: tl.constexpr,  # inline PTX; else the same bits in plain Triton
    SM75: tl.constexpr,  # no bf16
    LOAD_HINT: tl.constexpr,  # eviction policy of loads read once
    STORE_HINT: tl.constexpr,  # cache modifier of the stores
):
    """Dequantize TILE_ROWS rows of 64 elements. A row lies in one block, so it has one scale."""
    ROW: tl.constexpr = 1 << LOG2_ROW
    TILE: tl.constexpr = TILE_ROWS * 64
    n = tl.cast(n, tl.int64)  # torch.compile may pass a Python int
    which, start = _slice_to_write(n, SELECT, TILE)
    source, exists = _slice_to_read(ids_ptr, which, n, skip, slices, SELECT)
    source += start
    left = tl.minimum(n - start, TILE).to(tl.int32)
    left = tl.multiple_of(left, UNIT)  # wide accesses need masks that are constant over them
    row = tl.arange(0, TILE // ROW)
    table = _values(QUANT_TYPE)

    # Load scales and codes.
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
    offsets = row[:, None] * (ROW // CODES) + tl.arange(0, ROW // CODES)[None, :]
    count = tl.multiple_of((left + (CODES - 1)) // CODES, (UNIT + CODES - 1) // CODES)
    data = tl.load(data_ptr + offsets, mask=offsets < count, other=0, eviction_policy=LOAD_HINT)

    scale = absmax
    if NESTED:
        scale = _scale(tl.load(code2_ptr + absmax), absmax2, offset, ASM)

    # Look each code up, multiply, round, store.
    shift = (tl.arange(0, CODES) ^ 1) * 4  # high nibble first
    code = (data[:, :, None].to(tl.uint32) >> shift.to(tl.uint32)[None, None, :]) & 15
    value = tl.gather(table, tl.reshape(code, (TILE,)).to(tl.int32), 0)
    value = tl.reshape(value, (TILE // ROW, ROW))
    result = _product(value, scale[:, None], out_ptr, ASM, SM75)
    offsets = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    if SELECT:
        nan = tl.full((), float("nan"), tl.float32)  # Triton 3.6's interpreter has no bf16 constants
        result = tl.where(exists, result, nan.to(result.dtype))  # an error would have to wait for the GPU
    _store(out_ptr, which * n + start, offsets, result, left, UNIT, ALIGNED, STORE_HINT)
