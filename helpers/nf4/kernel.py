# %% id="kernel-decisions" tags=["kernel"]
import contextlib
import dataclasses
import functools
import math
import os
import sys
import types
import weakref

import torch
import triton
import triton.language as tl

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
if TRITON < (3, 3):
    raise ImportError(
        f"Triton {triton.__version__} cannot compile bf16 kernels for a T4 (sm_75): 3.3 or newer is "
        "needed. Fix: pip install 'triton>=3.3'"
    )

INTERPRETED = (
    triton.knobs.runtime.interpret if hasattr(triton, "knobs") else os.environ.get("TRITON_INTERPRET") == "1"
)
# The assembly needs Triton to give each thread one tensor element, and launching past Triton's own code its private
# interface. Checked with these; with others, and on AMD, the portable path runs on the public one.
CHECKED = (3, 3) <= TRITON <= (3, 9) and torch.version.hip is None


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every decision that depends on the card, made in this cell and nowhere else."""

    asm: bool  # inline PTX, else the portable path with the same bits
    hints: bool  # cache eviction hints on what is read or written once
    hint_loads: bool  # ... on the loads of large tensors too: a field of sm_75's loads, but a policy register on sm_80 and newer
    hinted: int  # ... and on the loads of tensors of at most so many elements everywhere
    stage: (
        bool  # code2 through shared memory: one memory latency less; a T4's kernel does without shared memory
    )
    int_bf16: bool  # bf16 rounded in integers: the card (or the interpreter) has no exact bf16 conversion
    words: int  # 32-bit words a thread, 8 elements each
    words_small: int  # ... for tensors of at most `small` elements, which would not fill the card
    small: int
    num_warps: int
    resident: int  # programs an SM may hold once a tensor needs more than one wave of programs; 0: no limit
    resident_huge: int  # ... for tensors of more than `huge` elements
    huge: int
    sms: int
    capability: tuple | None
    reason: str


T4 = dict(
    hint_loads=True,
    stage=False,
    int_bf16=True,
    resident=0,
    resident_huge=0,
    sms=40,
    capability=(7, 5),
    reason="T4's decisions",
)
_forced = {}
_epoch = object()  # launches planned under another epoch are not repeated


@functools.lru_cache(None)
def _card(index):
    tile = dict(hints=True, hinted=1 << 23, words=8, words_small=2, small=1 << 21, huge=1 << 26, num_warps=4)
    if INTERPRETED or not torch.cuda.is_available():
        return Settings(
            asm=False,
            hint_loads=True,
            stage=False,
            int_bf16=True,
            resident=0,
            resident_huge=0,
            sms=1,
            capability=None,
            reason="no GPU in use: portable path",
            **tile,
        )
    card = torch.cuda.get_device_properties(index)
    capability = (card.major, card.minor)
    old, hopper = capability < (8, 0), capability[0] == 9
    unchecked = "" if CHECKED else f"; portable path: not checked with Triton {triton.__version__} here"
    decisions = dict(
        hint_loads=old,
        stage=not old and TRITON >= (3, 4),
        int_bf16=old,
        resident=6 if hopper else 0,
        resident_huge=4 if hopper else 0,
        sms=card.multi_processor_count,
        capability=capability,
        reason=f"{card.name}, sm_{card.major}{card.minor}{unchecked}",
    )
    return Settings(asm=CHECKED, **decisions, **tile)


def settings(device=None):
    """The decisions for a CUDA device (an index, a torch.device, or None: the current one)."""
    index = getattr(device, "index", device)
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() and not INTERPRETED else 0
    return dataclasses.replace(_card(index), **_forced)


def force(card=None, **overrides):
    """Override fields of Settings from now on, or inside `with force(...)`. `force(card="t4")` takes all of
    a T4's decisions; `force()` returns to the card's own. Launch plans made before are not used again."""
    global _forced, _epoch
    if card not in (None, "t4"):
        raise ValueError(f"force(card={card!r}): the only card that can be forced is 't4'")
    before, chosen = _forced, {**(T4 if card else {}), **overrides}
    dataclasses.replace(_card(0), **chosen)  # an unknown field fails here, before anything changes
    _forced, _epoch = chosen, object()

    @contextlib.contextmanager
    def restore():
        global _forced, _epoch
        try:
            yield
        finally:
            _forced, _epoch = before, object()

    return restore()


if os.environ.get("NF4_FORCE"):
    force(card=os.environ["NF4_FORCE"])

# %% id="kernel-asm" tags=["kernel"]
# One row of 16 lanes: a 32-bit word (8 codes) a lane, so two blocks of 64. Inputs: $4 word, $5 this lane's scale,
# $6 codebook[lane], $7 which half of a register holds this lane's block, $8 the row.
# 0x101f: segments of 16 lanes, in which shfl ignores all but 4 bits of the index. So no nibble is masked.
_TABLE = """{
.reg .b32 row, table, other, bit, x, y; .reg .f32 a, b; .reg .b16 lo, hi; .reg .pred isnan;
bar.warp.sync 0xffffffff;
shl.b32 row, $8, 1;
shfl.sync.idx.b32 a, $5, row, 0x101f, 0xffffffff;
add.u32 row, row, 1;
shfl.sync.idx.b32 b, $5, row, 0x101f, 0xffffffff;
mul.rn.ftz.f32 a, a, $6;
mul.rn.ftz.f32 b, b, $6;
"""
_ROUND_FP16 = "cvt.rn.f16.f32 lo, a; cvt.rn.f16.f32 hi, b; mov.b32 table, {lo, hi};\n"
_ROUND_BF16 = "cvt.rn.bf16.f32 lo, a; cvt.rn.bf16.f32 hi, b; mov.b32 table, {lo, hi};\n"
# To nearest even by hand: add 0x7fff and the lowest bit that stays. NaN becomes 0x7fff, as in hardware.
_ROUND_BF16_INT = """
mov.b32 table, a; bfe.u32 bit, table, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 table, table, bit;
setp.nan.f32 isnan, a, a; selp.b32 table, 0x7fff0000, table, isnan;
mov.b32 other, b; bfe.u32 bit, other, 16, 1; add.u32 bit, bit, 0x7fff; add.u32 other, other, bit;
setp.nan.f32 isnan, b, b; selp.b32 other, 0x7fff0000, other, isnan;
prmt.b32 table, table, other, 0x7632;
"""
_LOOKUP = "".join(
    f"shr.u32 x, $4, {8 * byte + 4}; shfl.sync.idx.b32 x, table, x, 0x101f, 0xffffffff;\n"
    f"shr.u32 y, $4, {8 * byte}; shfl.sync.idx.b32 y, table, y, 0x101f, 0xffffffff;\n"
    f"prmt.b32 ${byte}, x, y, $7;\n"
    for byte in range(4)
)
ROW_FP16 = tl.constexpr(_TABLE + _ROUND_FP16 + _LOOKUP + "}")
ROW_BF16 = tl.constexpr(_TABLE + _ROUND_BF16 + _LOOKUP + "}")
ROW_BF16_INT = tl.constexpr(_TABLE + _ROUND_BF16_INT + _LOOKUP + "}")

# An fp32 result fills its register: the codebook itself is looked up, and every element multiplied.
_LOOKUP_FP32 = "".join(
    f"shr.u32 x, $8, {4 * (k ^ 1)}; shfl.sync.idx.b32 x, $10, x, 0x101f, 0xffffffff; mul.rn.ftz.f32 ${k}, a, x;\n"
    for k in range(8)
)
ROW_FP32 = tl.constexpr(
    """{
.reg .b32 row, x; .reg .f32 a;
shl.b32 row, $12, 1; add.u32 row, row, $11;
shfl.sync.idx.b32 a, $9, row, 0x101f, 0xffffffff;
"""
    + _LOOKUP_FP32
    + "}"
)

# code2[absmax] * absmax2 + offset with both roundings: .rn instructions are never fused into an FMA.
SCALE = tl.constexpr("{ .reg .f32 m; mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3; }")
_epoch = object()  # this cell was run again: nothing planned before is repeated

# %% id="kernel-portable" tags=["kernel"]
FP32, FP16, BF16, BF16_INT = (tl.constexpr(mode) for mode in range(4))


@triton.jit
def _flush(x, tiny):
    return tl.where(tiny, (x.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True), x)


@triton.jit
def _multiply(a, b, FLUSH: tl.constexpr):
    """a * b for |a| <= 1. FLUSH as mul.ftz: subnormal operands and results become zeros of their sign; so
    multiplies bitsandbytes' CUDA build (not its CPU build). A result counts as rounded to 24 bits before."""
    if FLUSH:
        a = _flush(a, tl.abs(a) < 1.1754943508222875e-38)
        b = _flush(b, tl.abs(b) < 1.1754943508222875e-38)
        return _flush(
            a * b, tl.abs(a * 18446744073709551616.0 * b) < 2.168404344971009e-19
        )  # both times 2**64
    return a * b


@triton.jit
def _scale(code2, absmax2, offset, ASM: tl.constexpr, FLUSH: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            SCALE, "=f,f,f,f", [code2, absmax2, offset], dtype=tl.float32, is_pure=True, pack=1
        )
    return _multiply(code2, absmax2, FLUSH) + offset  # compiled without fp fusion: two roundings


@triton.jit
def _elements(weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, e, mask,
              NESTED: tl.constexpr, LOG2_BLOCK: tl.constexpr, LOG2_BLOCK2: tl.constexpr,
              MODE: tl.constexpr, FLUSH: tl.constexpr):  # fmt: skip
    """Elements `e` one by one in plain Triton: any alignment, any blocksize, any tail, any back end."""
    byte = tl.load(weight_ptr + (e >> 1), mask=mask, other=0).to(tl.int32)
    nibble = (byte >> (4 - 4 * (e & 1)).to(tl.int32)) & 0xF  # high nibble first
    block = e >> LOG2_BLOCK
    if NESTED:
        q = tl.load(absmax_ptr + block, mask=mask, other=0)
        absmax2 = tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=mask, other=0.0)
        scale = _scale(tl.load(code2_ptr + q.to(tl.int32)), absmax2, tl.load(offset_ptr), False, FLUSH)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    value = _multiply(tl.load(table_ptr + nibble), scale, FLUSH)
    if MODE == BF16_INT:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value != value, 0x7FFF0000, bits + 0x7FFF + ((bits >> 16) & 1))
        tl.store(
            out_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + e, (bits >> 16).to(tl.uint16), mask=mask
        )
    else:
        tl.store(out_ptr + e, value.to(out_ptr.dtype.element_ty), mask=mask)


# %% id="kernel-row" tags=["kernel"]
@triton.jit
def _store_row(out_ptr, thread, word, scale, table, lane, row, mask,
               MODE: tl.constexpr, STORE_HINT: tl.constexpr):  # fmt: skip
    """Decode one word a thread and write its 8 elements: 128 contiguous bits (256 in fp32)."""
    first = tl.max_contiguous(thread, 1)[
        :, None
    ]  # contiguous by 1: one word's results stay with their thread
    if MODE == FP32:
        v = tl.inline_asm_elementwise(
            ROW_FP32, "=f,=f,=f,=f,=f,=f,=f,=f,r,f,f,r,r", [word, scale, table, lane >> 3, row],
            dtype=(tl.float32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
        odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
        value = tl.reshape(tl.join(even, odd), (word.shape[0], 8))
        to = out_ptr + (first * 8 + tl.arange(0, 8)[None, :])
    else:
        ROW: tl.constexpr = ROW_FP16 if MODE == FP16 else ROW_BF16 if MODE == BF16 else ROW_BF16_INT
        half = tl.where(
            lane < 8, 0x5410, 0x7632
        )  # prmt: join the lower, or the upper, halves of two registers
        a, b, c, d = tl.inline_asm_elementwise(
            ROW, "=r,=r,=r,=r,r,f,f,r,r", [word, scale, table, half, row],
            dtype=(tl.uint32,) * 4, is_pure=False, pack=1,
        )  # fmt: skip
        value = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (word.shape[0], 4))
        to = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + (first * 4 + tl.arange(0, 4)[None, :])
    tl.store(to, value, mask=mask[:, None], cache_modifier=STORE_HINT)


# %% id="kernel-kernel" tags=["kernel"]
@triton.jit(
    do_not_specialize=["n_words", "n_tail"],
    do_not_specialize_on_alignment=[
        "weight_ptr",
        "absmax_ptr",
        "table_ptr",
        "code2_ptr",
        "absmax2_ptr",
        "offset_ptr",
    ],  # fmt: skip
)
def _your_dequantize_nf4_kernel(
    weight_ptr,  # packed codes, two a byte, high nibble first: ceil(n / 2) bytes
    out_ptr,  # (n,) fp16, bf16 or fp32
    absmax_ptr,  # one a block: uint8 index into code2 (nested), or the fp32 scale itself (flat)
    table_ptr,  # (16,) fp32: the NF4 or FP4 codebook
    code2_ptr,  # (256,) fp32: what an absmax index stands for
    absmax2_ptr,  # fp32, one for every 2**LOG2_BLOCK2 blocks
    offset_ptr,  # () fp32
    n_words,  # whole 32-bit words: n // 8
    n_tail,  # elements after them: n % 8
    ASM: tl.constexpr,
    NESTED: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,  # blocksize 64 -> 6
    LOG2_BLOCK2: tl.constexpr,  # state2.blocksize 256 -> 8
    MODE: tl.constexpr,  # output dtype and how it is rounded
    TAIL: tl.constexpr,  # n is no multiple of 8
    WORDS: tl.constexpr,  # rows: words a thread
    THREADS: tl.constexpr,
    STAGE: tl.constexpr,
    LOAD_HINT: tl.constexpr,
    STORE_HINT: tl.constexpr,
    FLUSH: tl.constexpr,
):
    TILE: tl.constexpr = THREADS * WORDS
    pid = tl.program_id(0)
    if not ASM:
        e = pid.to(tl.int64) * (TILE * 8) + tl.arange(0, TILE * 8)
        mask = e < n_words.to(tl.int64) * 8 + n_tail
        _elements(weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, e, mask,
                  NESTED, LOG2_BLOCK, LOG2_BLOCK2, MODE, FLUSH)  # fmt: skip
    else:
        thread = tl.arange(
            0, THREADS
        )  # one tensor element a thread: what a shuffle calls lane is thread % 32
        lane = thread & 15
        left = n_words - pid * TILE  # words from this program on
        mine = left - thread  # row r of this thread exists if mine > r * THREADS
        # In row r, lanes 16 s .. 16 s + 15 hold blocks 2 s and 2 s + 1 of the row. Lane j decodes the scale of
        # block j % 2 in row j // 2: every scale is decoded once, not once a word.
        block = ((lane >> 1) & (WORDS - 1)) * (THREADS // 8) + (thread >> 4) * 2 + (lane & 1)
        exists = block * 8 < left
        block = (block + pid * (TILE // 8)) >> (LOG2_BLOCK - 6)
        if NESTED:
            q = tl.load(absmax_ptr + block, mask=exists, other=0, eviction_policy=LOAD_HINT)
            absmax2 = tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=exists, other=0.0)
            offset = tl.load(offset_ptr)
            if STAGE:  # all of code2 is fetched beside absmax, not after it
                book2 = tl.load(code2_ptr + tl.arange(0, 256))
        else:
            scale = tl.load(absmax_ptr + block, mask=exists, other=0.0, eviction_policy=LOAD_HINT)
        # All words are asked for before the first is used.
        first = pid.to(tl.int64) * TILE  # 64 bits: tensors may have more than 2**31 elements
        word_ptr = (
            weight_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + first + tl.max_contiguous(thread, 1)
        )
        words = ()
        for r in tl.static_range(WORDS):
            words = words + (
                tl.load(word_ptr + r * THREADS, mask=mine > r * THREADS, eviction_policy=LOAD_HINT),
            )
        table = tl.load(table_ptr + lane)
        if NESTED:
            code2 = tl.gather(book2, q.to(tl.int32), 0) if STAGE else tl.load(code2_ptr + q.to(tl.int32))
            scale = _scale(code2, absmax2, offset, True, FLUSH)
        # A row's assembly counts as volatile, so its store stays beside it; ptxas would gather the stores at the
        # end, and the memory would idle while the rows are decoded.
        row_ptr = out_ptr + first * 8
        for r in tl.static_range(WORDS):
            _store_row(row_ptr + r * (THREADS * 8), thread, words[r], scale, table, lane, r, mine > r * THREADS,
                       MODE, STORE_HINT)  # fmt: skip
        if TAIL:
            if pid == tl.num_programs(0) - 1:
                e = tl.arange(0, 8) + n_words.to(tl.int64) * 8
                _elements(weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, e,
                          tl.arange(0, 8) < n_tail, NESTED, LOG2_BLOCK, LOG2_BLOCK2, MODE, FLUSH)  # fmt: skip


_epoch = object()  # this cell was run again: nothing planned before is repeated

# %% id="kernel-state" tags=["kernel"]
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)  # fmt: skip
FP4 = (0.0, 0.005208333488553762, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
FP4 += tuple(-value for value in FP4)  # code 8 is -0.0 in bitsandbytes' kernels (its `code` tensor says +0.0)


@functools.lru_cache(None)
def codebooks(device):
    """NF4's 16 values, then FP4's, fp32. bitsandbytes, too, decodes with built-in tables and ignores
    quant_state.code. Uploaded once, on a stream of its own that alone is waited for: every stream may read it."""
    values = torch.tensor(NF4 + FP4, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    if device.type == "cpu":
        return values
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first call on a GPU came inside a graph capture, expected one before it: call once "
                           "outside, then capture")  # fmt: skip
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
        table = values.pin_memory().to(device, non_blocking=True)
        torch.cuda.current_stream().record_event().synchronize()
    return table


class UnsupportedState(ValueError):
    """A weight or quant_state that cannot be dequantized: what is wrong, what was expected, what to do."""


def _require(condition, text):
    if not condition:
        raise UnsupportedState(text)


def _require_state(quant_state):
    _require(quant_state is not None, "there is no quant_state, expected bitsandbytes' QuantState: a Linear4bit gets it "
             "when it moves to the GPU (layer.to('cuda')); a plain Linear needs no dequantization, and an 8-bit layer "
             "(Linear8bitLt, int8) has another")  # fmt: skip


def _require_unpacked(quant_state):
    _require(not getattr(quant_state, "packing_format_for_cpu", None), "bitsandbytes repacked this layer for its CPU "
             "matmul (eval mode, AVX512-BF16), expected its usual layout: move the layer to the GPU, or reload it")  # fmt: skip


def _require_out(out, weight, quant_state):
    _require(
        isinstance(out, torch.Tensor),
        f"out is {type(out).__name__}, expected a tensor, or None for a new one",
    )
    expected = (tuple(quant_state.shape), quant_state.dtype, weight.device, True)
    found = (tuple(out.shape), out.dtype, out.device, out.is_contiguous())
    _require(found == expected, f"out has (shape, dtype, device, contiguous) {found}, expected {expected}: pass such a "
             "tensor, or None for a new one")  # fmt: skip


def _in_memory(tensor):
    """Is all of it there? FSDP frees the storage of a gathered weight after use, and the tensor keeps its size; a
    DTensor or a fake tensor has a size and no memory of its own."""
    start = tensor.storage_offset() * tensor.itemsize
    there = tensor.data_ptr() > start and tensor.untyped_storage().nbytes() >= start + tensor.nbytes
    return there or not tensor.numel()


def _writable(out, weight):
    """Is there memory to write to, and none of it the weight's?"""
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    return _in_memory(out) and (end <= weight.data_ptr() or weight.data_ptr() + weight.nbytes <= start)


def _require_tensor(name, tensor, dtype, device, least):
    _require(isinstance(tensor, torch.Tensor), f"{name} is {type(tensor).__name__}, expected a {dtype} tensor: the "
             "quant_state is incomplete; quantize the layer again or reload it")  # fmt: skip
    _require(tensor.dtype == dtype, f"{name} has dtype {tensor.dtype}, expected {dtype}: bitsandbytes makes no such "
             "state; quantize the layer again")  # fmt: skip
    _require(tensor.device == device, f"{name} is on {tensor.device}, expected {device}, where the weight is: move the "
             "whole layer with layer.to(device), not single tensors")  # fmt: skip
    _require(tensor.numel() >= least, f"{name} has {tensor.numel()} elements, expected {least} or more for the weight's "
             "shape: state and weight do not belong together; reload the layer")  # fmt: skip
    _require(
        tensor.is_contiguous(),
        f"{name} is not contiguous, expected contiguous memory: use {name}.contiguous()",
    )
    _require(_in_memory(tensor), f"{name} has no memory, expected its values: its storage was freed "
             "(FSDP frees gathered weights after use; dequantize while it is there), or it is a DTensor (pass its local tensor)")  # fmt: skip


def _log2(name, size, most):
    """log2 of a power of two, or `most`, where one block holds all there can be: the kernel shifts 32-bit integers."""
    _require(isinstance(size, int) and size > 0 and size & (size - 1) == 0, f"{name} is {size!r}, expected a power of "
             "two (bitsandbytes makes 32 to 4096): quantize the layer again")  # fmt: skip
    return min(size.bit_length() - 1, most)


_epoch = object()  # this cell was run again: nothing planned before is repeated


# %% id="kernel-check" tags=["kernel"]
def check_state(weight, quant_state):
    """Everything the kernel relies on: (n elements, log2 blocksize, log2 state2.blocksize or 0).
    Raises UnsupportedState. Reads metadata only, never a value on the GPU."""

    def field(name, of=quant_state):
        return getattr(of, name, None)

    _require(isinstance(weight, torch.Tensor), f"the weight is {type(weight).__name__}, expected the packed 4-bit tensor: "
             "pass a bitsandbytes Linear4bit, or its weight and weight.quant_state")  # fmt: skip
    _require_state(quant_state)
    _require(field("quant_type") in ("nf4", "fp4"), f"quant_type is {field('quant_type')!r}, expected 'nf4' or 'fp4': "
             "8-bit and other states have dequantizations of their own")  # fmt: skip
    _require_unpacked(quant_state)
    device = weight.device
    _require(
        weight.dim() > 0,
        "the weight has no dimension, expected packed codes such as (n / 2, 1): use weight.view(1)",
    )
    _require(device.type == "cuda" or INTERPRETED, f"the weight is on {device}, expected CUDA: layer.to('cuda'); without "
             "a GPU, TRITON_INTERPRET=1 before Python starts runs Triton's interpreter")  # fmt: skip
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    _require(
        field("dtype") in dtypes, f"quant_state.dtype is {field('dtype')}, expected one of {dtypes}: set it"
    )
    sizes = field("shape")
    _require(isinstance(sizes, (tuple, list)) and all(isinstance(size, int) and size >= 0 for size in sizes),
             f"quant_state.shape is {sizes}, expected the weight's shape: reload the layer")  # fmt: skip
    n = math.prod(sizes)
    _require(n < 1 << 34, f"the weight has {n} elements, expected fewer than 2**34: dequantize it in parts")
    log2_block, log2_block2 = _log2("quant_state.blocksize", field("blocksize"), 37), 0
    blocks = -(-n // quant_state.blocksize)
    _require(blocks < 1 << 31, f"the weight has {blocks} blocks, expected fewer than 2**31: quantize it again with a "
             "larger blocksize")  # fmt: skip
    _require_tensor("weight", weight, weight.dtype, device, 0)
    storages = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
    unpacked = weight.is_floating_point() and n > 3 and tuple(weight.shape) == tuple(sizes)
    _require(weight.dtype in storages and not unpacked, f"the weight is {weight.dtype} of shape {tuple(weight.shape)}, "
             f"expected packed 4-bit codes in one of {storages}: the layer holds other values than its quant_state says; "
             "quantize it again")  # fmt: skip
    _require(weight.nbytes * 2 >= n, f"the weight holds {weight.nbytes} bytes, expected {(n + 1) // 2} for the shape "
             f"{tuple(sizes)}: state and weight do not belong together; reload the layer")  # fmt: skip
    _require(isinstance(field("nested"), bool), f"quant_state.nested is {field('nested')}, expected True or False: "
             "reload the layer")  # fmt: skip
    if quant_state.nested:
        state2 = field("state2")
        _require(state2 is not None, "quant_state.nested is True and state2 None, expected the state of the absmax: "
                 "reload the layer")  # fmt: skip
        log2_block2 = _log2("state2.blocksize", field("blocksize", state2), 31)
        _require(field("dtype", state2) == torch.float32, f"state2.dtype is {field('dtype', state2)}, expected "
                 "torch.float32: quantize the layer again")  # fmt: skip
        _require_tensor("absmax", field("absmax"), torch.uint8, device, blocks)
        _require_tensor(
            "state2.absmax", field("absmax", state2), torch.float32, device, -(-blocks // state2.blocksize)
        )
        _require_tensor("state2.code", field("code", state2), torch.float32, device, 256)
        _require_tensor("offset", field("offset"), torch.float32, device, 1)
        _require(quant_state.offset.numel() == 1, f"offset has {quant_state.offset.numel()} elements, expected one for "
                 "the whole weight: reload the layer")  # fmt: skip
    else:
        _require_tensor("absmax", field("absmax"), torch.float32, device, blocks)
    return n, log2_block, log2_block2


# %% id="kernel-configure" tags=["kernel"]
def _constexprs(dtype, nested, log2_block, log2_block2, tail, small, hinted, s):
    mode = {torch.float32: FP32, torch.float16: FP16}.get(dtype, BF16_INT if s.int_bf16 else BF16)
    return dict(
        ASM=s.asm and log2_block >= 6, NESTED=nested, LOG2_BLOCK=log2_block, LOG2_BLOCK2=log2_block2,
        MODE=mode.value, TAIL=tail, WORDS=s.words_small if small else s.words, THREADS=32 * s.num_warps,
        STAGE=s.stage, LOAD_HINT="evict_first" if s.hints and (s.hint_loads or hinted) else "",
        STORE_HINT=".cs" if s.hints else "",
        FLUSH=not INTERPRETED,
    )  # fmt: skip


def _options(s):
    return dict(num_warps=s.num_warps, enable_fp_fusion=False)


def _configure(weight, quant_state, out):
    """(grid, runtime arguments, constexprs, residency limit) of one launch into `out`."""
    n, log2_block, log2_block2 = check_state(weight, quant_state)
    s, nested, table = settings(weight.device), quant_state.nested, codebooks(weight.device)
    absmax2, code2, offset = table, table, table  # a flat state has none, and its kernel reads none
    if nested:
        absmax2, code2, offset = quant_state.state2.absmax, quant_state.state2.code, quant_state.offset
    constexprs = _constexprs(
        out.dtype, nested, log2_block, log2_block2, n % 8 != 0, n <= s.small, n <= s.hinted, s
    )
    grid = -(-n // (constexprs["THREADS"] * constexprs["WORDS"] * 8))
    constexprs["ASM"] &= weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0
    table = table[16:] if quant_state.quant_type == "fp4" else table
    arguments = [
        weight.reshape(-1).view(torch.uint8),
        out,
        quant_state.absmax,
        table,
        code2,
        absmax2,
        offset,
        n // 8,
        n % 8,
    ]
    resident = s.resident_huge if n > s.huge else s.resident
    crowded = grid > s.sms * (2048 // constexprs["THREADS"])  # more than one wave of programs
    return grid, arguments, constexprs, resident if crowded else 0


# %% id="kernel-launch" tags=["kernel"]
DIRECT = CHECKED and not INTERPRETED  # CompiledKernel.run takes the same arguments in all Tritons checked


def _on(tensor):
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _launch(weight, quant_state, out):
    """One launch on Triton's public path. Returns None, or what repeats it:
    `launch(stream, address of the weight, address of out)`, for addresses of the same alignment."""
    grid, arguments, constexprs, resident = _configure(weight, quant_state, out)
    if grid == 0:
        return None
    s = settings(weight.device)
    with _on(weight):
        try:
            kernel = _your_dequantize_nf4_kernel[(grid,)](*arguments, **constexprs, **_options(s))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            where = f"{s.reason} with Triton {triton.__version__}, torch {torch.__version__}"
            raise RuntimeError(f"the NF4 kernel failed to compile or launch on {where}: {error}") from error
    if not DIRECT:
        return None
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    if (
        resident
    ):  # shared memory that nobody uses keeps more programs off the SM: the same kernel, another residency
        shared = (
            torch.cuda.get_device_properties(weight.device).shared_memory_per_multiprocessor // resident
            - 1024
        )
        metadata = (*metadata[:2], max(metadata[2], min(shared, 48 * 1024)), *metadata[3:])
    rest = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments[2:]] + list(
        constexprs.values()
    )

    def launch(stream, address, out_address):
        run(grid, 1, 1, stream, function, metadata, None, None, None, address, out_address, *rest)

    def launch_in_c(stream, address, out_address):
        c_launcher(grid, 1, 1, stream, function, 0, 0, None, None, metadata, None, None, None, address, out_address,
                   *rest)  # fmt: skip

    launch.keep = launch_in_c.keep = (
        kernel,
        arguments[3],
    )  # addresses keep no module loaded and no codebook alive
    if TRITON not in ((3, 5), (3, 6)) or run.global_scratch_size or run.profile_scratch_size:
        return launch
    c_launcher = (
        run.launch
    )  # past a Python wrapper that only looks for scratch memory, which this kernel has none of
    return launch_in_c


_hooks = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
_enter, _exit = _hooks.launch_enter_hook, _hooks.launch_exit_hook
_enter_calls, _exit_calls = getattr(_enter, "calls", ()), getattr(_exit, "calls", ())
_modes, _jit_trace = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state


def _watched():
    """Does someone follow what is called: a profiler Triton's launches, a dispatch mode (make_fx, fake tensors) or
    torch.jit.trace torch's operators? A launch planned earlier would go past them."""
    replaced = _hooks.launch_enter_hook is not _enter or _hooks.launch_exit_hook is not _exit
    return replaced or _enter_calls or _exit_calls or _modes() or _jit_trace() is not None


# %% id="kernel-plan" tags=["kernel"]
_FLOAT32 = torch.float32


class _Plan:
    """A state's launch, ready to repeat, and everything that must still hold for it to be repeated."""

    __slots__ = ("epoch", "launch", "index", "address", "aligned", "nbytes", "shape", "size", "stride", "dtype", "quant_type",
                 "blocksize", "nested", "state2", "blocksize2", "absmax", "absmax_address", "absmax_nbytes", "absmax2",
                 "absmax2_address", "absmax2_nbytes", "code2", "code2_address", "offset", "offset_address")  # fmt: skip

    def __init__(self, weight, quant_state, out, launch):
        self.epoch, self.launch, self.index = _epoch, launch, weight.get_device()
        self.address, self.nbytes = weight.data_ptr(), weight.nbytes
        self.aligned = self.address % 4 == 0
        self.shape, self.size = quant_state.shape, tuple(out.shape)
        self.stride = torch.empty(
            self.size, device="meta"
        ).stride()  # a caller's `out` may have others in sizes of 1
        self.dtype, self.quant_type, self.blocksize = (
            quant_state.dtype,
            quant_state.quant_type,
            quant_state.blocksize,
        )
        self.nested, self.state2 = quant_state.nested, quant_state.state2
        self.absmax = weakref.ref(quant_state.absmax)  # the plan keeps no large tensor alive
        self.absmax_address, self.absmax_nbytes = quant_state.absmax.data_ptr(), quant_state.absmax.nbytes
        if self.nested:
            self.absmax2, self.code2, self.offset = self.state2.absmax, self.state2.code, quant_state.offset
            self.absmax2_address, self.absmax2_nbytes = self.absmax2.data_ptr(), self.absmax2.nbytes
            self.code2_address, self.offset_address = self.code2.data_ptr(), self.offset.data_ptr()
            self.blocksize2 = self.state2.blocksize

    def holds(self, address, weight, quant_state):
        """The same state, its tensors at the same addresses, and a weight like the plan's, wherever it is now (FSDP
        gathers it anew for each use)? Values need no look: every launch reads them."""
        absmax, state2 = quant_state.absmax, quant_state.state2
        return (
            weight.nbytes == self.nbytes
            and weight.is_contiguous()
            and absmax is self.absmax()
            and absmax.data_ptr() == self.absmax_address
            and absmax.nbytes == self.absmax_nbytes
            and quant_state.shape is self.shape
            and quant_state.dtype is self.dtype
            and quant_state.quant_type == self.quant_type
            and quant_state.blocksize == self.blocksize
            and quant_state.nested is self.nested
            and state2 is self.state2
            and (
                not self.nested
                or state2.absmax is self.absmax2
                and self.absmax2.data_ptr() == self.absmax2_address
                and self.absmax2.nbytes == self.absmax2_nbytes
                and state2.code is self.code2
                and self.code2.data_ptr() == self.code2_address
                and self.code2.nbytes >= 1024
                and quant_state.offset is self.offset
                and self.offset.data_ptr() == self.offset_address
                and state2.blocksize == self.blocksize2
                and state2.dtype is _FLOAT32
            )
            and (address == self.address or self._may_move(address, weight))
        )

    def _may_move(self, address, weight):
        may = weight.get_device() == self.index and (address % 4 == 0) is self.aligned and _in_memory(weight)
        if may:
            self.address = address  # where the next call will look first; all else has been found right
        return may

    def fits(self, out, weight):
        """May this launch write into a caller's tensor?"""
        return (
            out.dtype is self.dtype
            and out.shape == self.shape
            and out.is_contiguous()
            and out.get_device() == self.index
            and out.data_ptr() % 16 == 0
            and _writable(out, weight)
        )

    def __reduce__(self):
        return (type(None), ())  # copies and pickles of a model start without a plan


# %% id="kernel-call" tags=["kernel"]
try:  # what Inductor's generated code allocates with: half the time of torch.empty_strided
    _empty_cuda = torch._C._dynamo.guards._empty_strided_cuda
except AttributeError:
    _empty_cuda = functools.partial(torch.empty_strided, device="cuda")
# bitsandbytes' Params4bit answers every method through a Python __torch_function__, which nothing here needs.
_plain_tensors = torch._C.DisableTorchFunctionSubclass
_count_write = torch.autograd.graph.increment_version  # so that autograd notices if it had saved `out`
_is_compiling = torch.compiler.is_dynamo_compiling
# Not None inside a frame that Dynamo gave up (bf16 on a T4): it would go on to trace what is called from there.
_dynamo_watches = torch._C._dynamo.eval_frame.get_eval_frame_callback
_stream, _current_device = (
    getattr(torch._C, f"_cuda_{name}", None) for name in ("getCurrentRawStream", "getDevice")
)
_devices = torch.cuda.device_count()


def _your_dequantize_nf4(weight, quant_state, out=None):
    """Dequantize packed 4-bit codes in one kernel launch.

    weight: packed codes, two a byte, in any storage dtype, at least ceil(n / 2) bytes, on CUDA.
    quant_state: bitsandbytes' QuantState, nf4 or fp4, nested or flat.
    out: optional contiguous tensor of quant_state.shape and quant_state.dtype on the same device, to be filled.
    Returns a new tensor (or `out`) of quant_state.shape and quant_state.dtype, bit-identical to bitsandbytes; its
    transpose if weight.shape[0] == 1, as bitsandbytes and Unsloth do. Raises UnsupportedState on malformed input.
    """
    if _is_compiling() or _dynamo_watches() is not None:
        return _traced(weight, quant_state, out)
    with _plain_tensors():
        try:
            plan = quant_state._nf4_plan
            address = weight.data_ptr()
            holds = plan.epoch is _epoch and plan.holds(address, weight, quant_state) and not _watched()
            holds = holds and (out is None or plan.fits(out, weight))
            transposed = holds and weight.shape[0] == 1
        except (AttributeError, RuntimeError):  # no plan yet, an incomplete state, a tensor without memory
            holds = False
    if not holds:
        return _first_call(weight, quant_state, out)
    if _devices > 1 and _current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _your_dequantize_nf4(weight, quant_state, out)
    if out is None:
        out = _empty_cuda(plan.size, plan.stride, plan.dtype)
    else:
        _count_write(out)
    plan.launch(_stream(plan.index), address, out.data_ptr())
    return out.t() if transposed else out


def your_dequantize_nf4(layer):
    """The dequantized weight of a bitsandbytes Linear4bit: a new tensor of quant_state.shape and quant_state.dtype.
    Raises UnsupportedState: what is wrong, what was expected, what to do."""
    try:
        weight = layer._parameters["weight"]
        quant_state = weight.quant_state
    except (AttributeError, KeyError):
        weight = getattr(layer, "weight", None)
        # torch.export lifts the weight out of the layer without its attributes; bitsandbytes keeps the state twice.
        quant_state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    return _your_dequantize_nf4(weight, quant_state)


# %% id="kernel-first-call" tags=["kernel"]
def _first_call(weight, quant_state, out):
    """Check everything, launch on the public path, and leave a plan for the next call."""
    if _without_data(weight) or _transforms() is not None or _modes() or _jit_trace() is not None:
        return _traced(weight, quant_state, out)
    with _plain_tensors():
        check_state(weight, quant_state)
        if out is None:
            out = torch.empty(quant_state.shape, dtype=quant_state.dtype, device=weight.device)
        else:
            _require_out(out, weight, quant_state)
            _require(_writable(out, weight), "out has no memory, or shares the weight's, expected a tensor of its own: "
                     "pass one, or None")  # fmt: skip
            _count_write(out)
        launch = _launch(weight, quant_state, out)
        if launch is not None and out.data_ptr() % 16 == 0 and isinstance(quant_state.shape, tuple):
            with contextlib.suppress(AttributeError):  # a state of another make may have no room for it
                quant_state._nf4_plan = _Plan(weight, quant_state, out, launch)
        return out.t() if weight.shape[0] == 1 else out


def your_fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
    """Takes the place of Unsloth's fast_dequantize. Without a quant_state W comes back as it is; `out` is filled and
    returned; the result is fresh whatever use_global_buffer says; dtype is for other formats and changes nothing."""
    if quant_state is None:
        return W
    return _your_dequantize_nf4(W, quant_state, out)


# %% id="kernel-operator" tags=["kernel"]
def _without_data(weight):
    """Fake and meta tensors: only the operator can answer for them."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return isinstance(weight, torch.Tensor) and (
        weight.is_meta or bool(fake) and isinstance(weight, fake.FakeTensor)
    )


_transforms = (
    torch._C._functorch.peek_interpreter_stack
)  # torch.func's: under vmap or grad new tensors are wrapped


def _traced(weight, quant_state, out):
    """The same launch as an operator that torch.compile leaves whole: no graph break, no copy of the weight."""
    _require_state(quant_state)
    _require_unpacked(quant_state)
    nested = quant_state.nested
    state2 = quant_state.state2 if nested else None
    _require(not nested or getattr(state2, "dtype", None) == torch.float32, "quant_state.nested is True and state2 "
             "None or not of float32, expected the state of the absmax: reload the layer")  # fmt: skip
    if out is not None:
        _require_out(out, weight, quant_state)
    result = torch.ops.nf4_triton.dequantize(
        weight, quant_state.absmax, state2.code if nested else None, state2.absmax if nested else None,
        quant_state.offset if nested else None, list(quant_state.shape), str(quant_state.dtype), quant_state.quant_type,
        quant_state.blocksize, state2.blocksize if nested else 0)  # fmt: skip
    result = result if out is None else out.copy_(result)
    return result.t() if weight.shape[0] == 1 else result


_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


def _dtype(name):
    """By name: AOTInductor of torch 2.11 hands an operator another dtype than the one it was given."""
    _require(name in _DTYPES, f"quant_state.dtype is {name}, expected one of {tuple(_DTYPES)}: set it")
    return _DTYPES[name]


@torch.library.custom_op(
    "nf4_triton::dequantize", mutates_args=(),
    schema="(Tensor weight, Tensor absmax, Tensor? code2, Tensor? absmax2, Tensor? offset, SymInt[] shape, "
           "str dtype, str quant_type, int blocksize, int blocksize2) -> Tensor",
)  # fmt: skip
def _operator(weight, absmax, code2, absmax2, offset, shape, dtype, quant_type, blocksize, blocksize2):
    address, dtype = weight.data_ptr(), _dtype(dtype)
    # The key holds all that a launch depends on, so none kept here can be stale.
    key = (_epoch, tuple(shape), dtype, quant_type, blocksize, blocksize2, _in_memory(weight), address % 4 == 0,
           weight.nbytes, weight.dtype, weight.device, weight.is_contiguous(),
           *[x if x is None else (x.data_ptr(), x.nbytes, x.dtype, x.device, x.is_contiguous())
             for x in (absmax, code2, absmax2, offset)])  # fmt: skip
    launch = _operator_launches.get(key)
    with _on(weight):
        out = torch.empty(shape, dtype=dtype, device=weight.device)
        if launch is not None and not _watched():
            launch(_stream(weight.device.index), address, out.data_ptr())
            return out
        state2 = None
        if blocksize2:
            state2 = types.SimpleNamespace(
                absmax=absmax2, code=code2, blocksize=blocksize2, dtype=torch.float32
            )
        state = types.SimpleNamespace(
            absmax=absmax,
            shape=tuple(shape),
            dtype=dtype,
            quant_type=quant_type,
            blocksize=blocksize,
            offset=offset,
            state2=state2,
            nested=bool(state2),
        )
        launch = _launch(weight, state, out)
        if launch is not None:
            if len(_operator_launches) >= 4096:
                _operator_launches.clear()
            _operator_launches[key] = launch
    return out


@_operator.register_fake
def _(weight, absmax, code2, absmax2, offset, shape, dtype, quant_type, blocksize, blocksize2):
    return torch.empty(shape, dtype=_dtype(dtype), device=weight.device)


_operator_launches = {}
