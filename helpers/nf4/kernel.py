"""The kernel: NF4 and FP4 weights of bitsandbytes to fp16, bf16 and fp32 in one Triton launch.

Each `# %%` section is a cell of the notebook, written there by `python -m helpers sync`.
"""
# %% id="kernel-imports" part="host" tags=["kernel"]
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import operator
import os
import sys
import weakref

import torch
import triton
import triton.language as tl

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
if TRITON < (3, 3):
    raise ImportError(f"Triton {triton.__version__} cannot compile bf16 kernels for a T4 (sm_75), "
                      "expected 3.3 or newer: pip install 'triton>=3.3'")
_knobs = getattr(triton, "knobs", None)  # Triton 3.4 and newer
INTERPRETED = _knobs.runtime.interpret if _knobs else os.environ.get("TRITON_INTERPRET") == "1"
# The assembly needs Triton to give each thread one tensor element, and a repeated launch goes past
# Triton's own code. Checked with these; with others, and on AMD, the portable path is launched
# publicly.
CHECKED = (3, 3) <= TRITON <= (3, 9) and torch.version.hip is None

# %% id="kernel-asm" part="device" tags=["kernel"]
# One row of 16 lanes: a 32-bit word (8 codes) a lane, so two blocks of 64. $4 word, $5 this lane's
# scale, $6 codebook[lane], $7 which half of a register holds this lane's block, $8 the row. 0x101f:
# segments of 16 lanes, in which shfl ignores all but 4 bits of the index: no nibble is masked.
_TABLE = (
    ".reg .b32 row, table, other, bit, x, y; .reg .f32 a, b; .reg .b16 lo, hi; .reg .pred isnan; "
    "bar.warp.sync 0xffffffff; "
    "shl.b32 row, $8, 1; shfl.sync.idx.b32 a, $5, row, 0x101f, 0xffffffff; "
    "add.u32 row, row, 1; shfl.sync.idx.b32 b, $5, row, 0x101f, 0xffffffff; "
    "mul.rn.ftz.f32 a, a, $6; mul.rn.ftz.f32 b, b, $6; "
)
_ROUND_FP16 = "cvt.rn.f16.f32 lo, a; cvt.rn.f16.f32 hi, b; mov.b32 table, {lo, hi}; "
_ROUND_BF16 = "cvt.rn.bf16.f32 lo, a; cvt.rn.bf16.f32 hi, b; mov.b32 table, {lo, hi}; "
# To nearest even by hand: add 0x7fff and the lowest bit that stays. NaN becomes 0x7fff, as in
# hardware.
_ROUND_BF16_INT = (
    "mov.b32 table, a; bfe.u32 bit, table, 16, 1; add.u32 bit, bit, 0x7fff; "
    "add.u32 table, table, bit; "
    "setp.nan.f32 isnan, a, a; selp.b32 table, 0x7fff0000, table, isnan; "
    "mov.b32 other, b; bfe.u32 bit, other, 16, 1; add.u32 bit, bit, 0x7fff; "
    "add.u32 other, other, bit; "
    "setp.nan.f32 isnan, b, b; selp.b32 other, 0x7fff0000, other, isnan; "
    "prmt.b32 table, table, other, 0x7632; "
)
_LOOKUP = "".join(
    f"shr.u32 x, $4, {8 * byte + 4}; shfl.sync.idx.b32 x, table, x, 0x101f, 0xffffffff; "
    f"shr.u32 y, $4, {8 * byte}; shfl.sync.idx.b32 y, table, y, 0x101f, 0xffffffff; "
    f"prmt.b32 ${byte}, x, y, $7; "
    for byte in range(4)
)
ROW_FP16 = tl.constexpr("{ " + _TABLE + _ROUND_FP16 + _LOOKUP + "}")
ROW_BF16 = tl.constexpr("{ " + _TABLE + _ROUND_BF16 + _LOOKUP + "}")
ROW_BF16_INT = tl.constexpr("{ " + _TABLE + _ROUND_BF16_INT + _LOOKUP + "}")

# An fp32 result fills its register: the codebook itself is looked up, and every element multiplied.
ROW_FP32 = tl.constexpr(
    "{ .reg .b32 row, x; .reg .f32 a; shl.b32 row, $12, 1; add.u32 row, row, $11; "
    "shfl.sync.idx.b32 a, $9, row, 0x101f, 0xffffffff; " + "".join(
        f"shr.u32 x, $8, {4 * (k ^ 1)}; shfl.sync.idx.b32 x, $10, x, 0x101f, 0xffffffff; "
        f"mul.rn.ftz.f32 ${k}, a, x; "
        for k in range(8)
    ) + "}"
)
# code2[absmax] * absmax2 + offset with both roundings: .rn instructions are never fused into an
# FMA.
SCALE = tl.constexpr("{ .reg .f32 m; mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3; }")

# %% id="kernel-row" part="device" tags=["kernel"]
@triton.jit
def _store_row(out_ptr, thread, word, scale, table, lane, row, mask,
               MODE: tl.constexpr, STORE_HINT: tl.constexpr):
    """Decode one word a thread and write its 8 elements: 128 contiguous bits (256 in fp32)."""
    first = tl.max_contiguous(thread, 1)[:, None]  # by 1: one word's results stay with their thread
    if MODE == FP32:
        v = tl.inline_asm_elementwise(
            ROW_FP32, "=f,=f,=f,=f,=f,=f,=f,=f,r,f,f,r,r", [word, scale, table, lane >> 3, row],
            dtype=(tl.float32,) * 8, is_pure=True, pack=1,
        )
        even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
        odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
        value = tl.reshape(tl.join(even, odd), (word.shape[0], 8))
        to = out_ptr + (first * 8 + tl.arange(0, 8)[None, :])
    else:
        ROW: tl.constexpr = ROW_FP16 if MODE == FP16 else ROW_BF16 if MODE == BF16 else ROW_BF16_INT
        half = tl.where(lane < 8, 0x5410, 0x7632)  # prmt: lower, or upper, halves of x and y
        a, b, c, d = tl.inline_asm_elementwise(
            ROW, "=r,=r,=r,=r,r,f,f,r,r", [word, scale, table, half, row],
            dtype=(tl.uint32,) * 4, is_pure=True, pack=1,
        )
        value = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (word.shape[0], 4))
        to = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        to += first * 4 + tl.arange(0, 4)[None, :]
    tl.store(to, value, mask=mask[:, None], cache_modifier=STORE_HINT)

# %% id="kernel-kernel" part="device" tags=["kernel"]
@triton.jit(
    do_not_specialize=["n_words", "n_tail"],
    do_not_specialize_on_alignment=[
        "weight_ptr", "absmax_ptr", "table_ptr", "code2_ptr", "absmax2_ptr", "offset_ptr",
    ],
)
def _your_dequantize_nf4_kernel(
    weight_ptr,  # packed codes, two a byte, high nibble first: ceil(n / 2) bytes
    out_ptr,  # (n,) fp16, bf16 or fp32
    absmax_ptr,  # one a block: uint8 index into code2 (nested), or the fp32 scale itself (flat)
    table_ptr,  # (16,) fp32: the NF4 or FP4 codebook
    code2_ptr,  # (256,) fp32: what an absmax index stands for
    absmax2_ptr,  # fp32, one for every 2**LOG2_BLOCK2 blocks
    offset_ptr,  # () fp32; bf16, fp16 or fp64 where torch's default dtype was that on loading
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
    STAGE: tl.constexpr,  # code2 goes through shared memory
    LOAD_HINT: tl.constexpr,
    STORE_HINT: tl.constexpr,
    FLUSH: tl.constexpr,
):
    TILE: tl.constexpr = THREADS * WORDS
    pid = tl.program_id(0)
    if not ASM:
        e = pid.to(tl.int64) * (TILE * 8) + tl.arange(0, TILE * 8)
        mask = e < n_words.to(tl.int64) * 8 + n_tail
        _elements(weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, e,
                  mask, NESTED, LOG2_BLOCK, LOG2_BLOCK2, MODE, FLUSH)
    else:
        thread = tl.arange(0, THREADS)  # one element a thread: a shuffle's lane is thread % 32
        lane = thread & 15
        left = n_words - pid * TILE  # words from this program on
        mine = left - thread  # row r of this thread exists if mine > r * THREADS
        # In row r, lanes 16 s .. 16 s + 15 hold blocks 2 s and 2 s + 1 of the row. Lane j decodes
        # the scale of block j % 2 in row j // 2: every scale is decoded once, not once a word.
        block = ((lane >> 1) & (WORDS - 1)) * (THREADS // 8) + (thread >> 4) * 2 + (lane & 1)
        exists = block * 8 < left
        block = (block + pid * (TILE // 8)) >> (LOG2_BLOCK - 6)
        # Every load of a nested state's program is under way before the first is waited for. That
        # takes STAGE: all of code2 is fetched beside absmax; looked up in memory instead,
        # code2[absmax] is a load that waits for one, and ptxas puts words' loads behind it.
        if NESTED:
            q = tl.load(absmax_ptr + block, mask=exists, other=0, eviction_policy=LOAD_HINT)
            absmax2 = tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=exists, other=0.0)
            offset = tl.load(offset_ptr).to(tl.float32)
            if STAGE:
                book2 = tl.load(code2_ptr + tl.arange(0, 256))
        else:
            scale = tl.load(absmax_ptr + block, mask=exists, other=0.0, eviction_policy=LOAD_HINT)
        first = pid.to(tl.int64) * TILE  # 64 bits: tensors may have more than 2**31 elements
        word_ptr = weight_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        word_ptr += first + tl.max_contiguous(thread, 1)
        words = ()
        for r in tl.static_range(WORDS):
            word = tl.load(word_ptr + r * THREADS, mask=mine > r * THREADS,
                           eviction_policy=LOAD_HINT)
            words = words + (word,)
        table = tl.load(table_ptr + lane)
        if NESTED:
            q = q.to(tl.int32)
            code2 = tl.gather(book2, q, 0) if STAGE else tl.load(code2_ptr + q)
            scale = _scale(code2, absmax2, offset, True, FLUSH)
        row_ptr = out_ptr + first * 8
        for r in tl.static_range(WORDS):
            _store_row(row_ptr + r * (THREADS * 8), thread, words[r], scale, table, lane, r,
                       mine > r * THREADS, MODE, STORE_HINT)
        if TAIL:
            if pid == tl.num_programs(0) - 1:
                e = tl.arange(0, 8) + n_words.to(tl.int64) * 8
                _elements(weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr,
                          offset_ptr, e, tl.arange(0, 8) < n_tail, NESTED, LOG2_BLOCK, LOG2_BLOCK2,
                          MODE, FLUSH)

# %% id="kernel-call" part="host" tags=["kernel"]
def your_dequantize_nf4(layer):
    """Dequantize a bitsandbytes Linear4bit: a new tensor of quant_state.shape and
    quant_state.dtype. Raises UnsupportedState: what is wrong, what was expected, what to do."""
    try:
        weight = layer._parameters["weight"]
        quant_state = weight.quant_state
    except (AttributeError, KeyError):
        weight, quant_state = getattr(layer, "weight", None), None
    if quant_state is None:  # torch.export lifts the weight out; its layer keeps the state too
        quant_state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    return _your_dequantize_nf4(weight, quant_state)


def _your_dequantize_nf4(weight, quant_state, out=None):
    """Dequantize packed 4-bit codes in one kernel launch.

    weight: packed codes, two a byte, in any storage dtype, at least ceil(n / 2) bytes, on CUDA.
    quant_state: bitsandbytes' QuantState, nf4 or fp4, nested or flat.
    out: optional contiguous tensor of quant_state.shape and quant_state.dtype there, to be filled.
    Returns a new tensor (or `out`), bit-identical to bitsandbytes; its transpose if weight.shape[0]
    is 1, as bitsandbytes and Unsloth do. Raises UnsupportedState on malformed input.
    """
    if _is_compiling() or _dynamo_watches() is not None:
        return _call_operator(weight, quant_state, out)
    try:  # each field is read once: what is compared with a plan is what is launched on
        one = quant_state.__dict__  # past QuantState's own __getattr__
        absmax = one["absmax"]
        if one["nested"]:
            two = one["state2"].__dict__
            code2, absmax2, offset = two["code"], two["absmax"], one["offset"]
            dtype2, blocksize2 = two["dtype"], two["blocksize"]
        else:
            code2, absmax2, offset, dtype2, blocksize2 = _FLAT
        values = (one["shape"], one["dtype"], one["quant_type"], one["blocksize"], dtype2,
                  blocksize2, True)
    except (AttributeError, KeyError):
        return _call_unplanned(weight, quant_state, out)
    with _plain_tensors():  # as in _call_planned, to call which would take longer
        for again in _plans.get(_identity(absmax), ()):
            result = again(weight, absmax, code2, absmax2, offset, values, out)
            if result is not None:
                return result
    return _call_unplanned(weight, quant_state, out)


def your_fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
    """Take the place of Unsloth's fast_dequantize. Without a quant_state W comes back as it is;
    `out` is filled and returned; the result is fresh whatever use_global_buffer says; dtype
    is for other formats and changes nothing."""
    return W if quant_state is None else _your_dequantize_nf4(W, quant_state, out)

# %% Decisions for the card id="kernel-card" part="card" folded=true tags=["kernel"]
@dataclasses.dataclass(frozen=True)
class Settings:
    """Every decision that depends on the card, made in this cell and nowhere else."""

    asm: bool  # inline PTX, else the portable path with the same bits
    hints: bool  # cache eviction hints on what is read or written once
    hint_loads_up_to: int  # ... on the loads of tensors of at most so many elements
    stage: bool  # code2 through shared memory, so that no load waits for another
    int_bf16: bool  # bf16 rounded in integers: no exact conversion on this card
    words: int  # 32-bit words a thread, 8 elements each
    words_small: int  # ... for tensors of at most small_up_to elements, which fill no card
    small_up_to: int
    num_warps: int
    programs_per_sm: int  # at most, if a tensor needs more than one wave; 0: no limit
    programs_per_sm_huge: int  # ... for tensors of more than huge_above elements
    huge_above: int
    sms: int
    capability: tuple | None
    reason: str


ALL = 1 << 34  # more elements than any tensor here has
T4 = dict(hint_loads_up_to=ALL, stage=TRITON >= (3, 4), int_bf16=True, programs_per_sm=0,
          programs_per_sm_huge=0, sms=40, capability=(7, 5), reason="T4's decisions")
_forced = {}


@functools.lru_cache(None)
def _card(index):
    tile = dict(hints=True, words=8, words_small=2, small_up_to=1 << 21, huge_above=1 << 26,
                num_warps=4)
    if INTERPRETED or not torch.cuda.is_available():
        return Settings(asm=False, hint_loads_up_to=ALL, stage=False, int_bf16=True,
                        programs_per_sm=0, programs_per_sm_huge=0, sms=1, capability=None,
                        reason="no GPU in use: portable path", **tile)
    card = torch.cuda.get_device_properties(index)
    old, hopper = card.major < 8, card.major == 9
    unchecked = f"; portable path: not checked with Triton {triton.__version__} here"
    return Settings(
        asm=CHECKED,
        # A hint is a field of sm_75's loads; from sm_80 on it takes a register and pays up to 8M.
        hint_loads_up_to=ALL if old else 1 << 23,
        stage=TRITON >= (3, 4),  # the first whose gather goes through shared memory
        int_bf16=old,
        programs_per_sm=6 if hopper else 0,
        programs_per_sm_huge=4 if hopper else 0,
        sms=card.multi_processor_count,
        capability=(card.major, card.minor),
        reason=f"{card.name}, sm_{card.major}{card.minor}" + unchecked * (not CHECKED),
        **tile,
    )


def settings(device=None):
    """The decisions for a CUDA device (an index, a torch.device, or None: the current one)."""
    index = getattr(device, "index", device)
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() and not INTERPRETED else 0
    return dataclasses.replace(_card(index), **_forced)


def force(card=None, **overrides):
    """Override fields of Settings from now on, or inside `with force(...)`. `force(card="t4")`
    takes all of a T4's decisions; `force()` returns to the card's own. Launches planned
    before are not repeated."""
    global _forced
    if card not in (None, "t4"):
        raise ValueError(f"force(card={card!r}): the only card that can be forced is 't4'")
    before, chosen = _forced, {**(T4 if card else {}), **overrides}
    dataclasses.replace(_card(0), **chosen)  # an unknown field fails here, before anything changes
    _forced = chosen

    @contextlib.contextmanager
    def restore():
        global _forced
        try:
            yield
        finally:
            _forced = before

    return restore()


if os.environ.get("NF4_FORCE"):
    force(card=os.environ["NF4_FORCE"])

# %% The portable path id="kernel-portable" part="device" folded=true tags=["kernel"]
FP32, FP16, BF16, BF16_INT = (tl.constexpr(mode) for mode in range(4))


@triton.jit
def _flush(x, tiny):
    zero = (x.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
    return tl.where(tiny, zero, x)


@triton.jit
def _multiply(a, b, FLUSH: tl.constexpr):
    """a * b for |a| <= 1. FLUSH as mul.ftz: subnormal operands and results become zeros of their
    sign; so multiplies bitsandbytes' CUDA build (not its CPU build). A result counts as
    rounded to 24 bits before."""
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
        return tl.inline_asm_elementwise(SCALE, "=f,f,f,f", [code2, absmax2, offset],
                                         dtype=tl.float32, is_pure=True, pack=1)
    return _multiply(code2, absmax2, FLUSH) + offset  # compiled without fp fusion: two roundings


@triton.jit
def _elements(weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, e,
              mask, NESTED: tl.constexpr, LOG2_BLOCK: tl.constexpr, LOG2_BLOCK2: tl.constexpr,
              MODE: tl.constexpr, FLUSH: tl.constexpr):
    """Elements `e` one by one in plain Triton: any alignment, any blocksize, any tail, any back
    end."""
    byte = tl.load(weight_ptr + (e >> 1), mask=mask, other=0).to(tl.int32)
    nibble = (byte >> (4 - 4 * (e & 1)).to(tl.int32)) & 0xF  # high nibble first
    block = e >> LOG2_BLOCK
    if NESTED:
        q = tl.load(absmax_ptr + block, mask=mask, other=0)
        absmax2 = tl.load(absmax2_ptr + (block >> LOG2_BLOCK2), mask=mask, other=0.0)
        offset = tl.load(offset_ptr).to(tl.float32)
        scale = _scale(tl.load(code2_ptr + q.to(tl.int32)), absmax2, offset, False, FLUSH)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    value = _multiply(tl.load(table_ptr + nibble), scale, FLUSH)
    if MODE == BF16_INT:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value != value, 0x7FFF0000, bits + 0x7FFF + ((bits >> 16) & 1))
        to = out_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + e
        tl.store(to, (bits >> 16).to(tl.uint16), mask=mask)
    else:
        tl.store(out_ptr + e, value.to(out_ptr.dtype.element_ty), mask=mask)

# %% States and their checks id="kernel-state" part="host" folded=true tags=["kernel"]
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)
FP4 = (0.0, 0.005208333488553762, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
       0.1666666716337204, 0.25)
FP4 += tuple(-value for value in FP4)  # code 8 is -0.0 in bitsandbytes' kernels, +0.0 in its `code`
STORAGES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)  # quant_storage
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# In place of code2, absmax2, offset, dtype2 and blocksize2: one rule compares both kinds of state.
_FLAT = *(torch.zeros(1, device="cpu") for _ in range(3)), None, None
OFFSETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the default on loading


@functools.lru_cache(None)
def codebooks(device):
    """NF4's 16 values, then FP4's, fp32. bitsandbytes, too, decodes with built-in tables and
    ignores quant_state.code. Uploaded once, by a thread of its own, in which no device, dtype,
    fake mode or CUDA graph's memory pool is set, and waited for: every stream may read it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first call on a GPU came inside a graph capture, expected one "
                           "before it: call once outside, then capture")

    def upload():
        table = torch.tensor(NF4 + FP4, dtype=torch.float32, device="cpu").to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return table

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(upload).result()


class UnsupportedState(ValueError):
    """A weight or quant_state that cannot be dequantized: what is wrong, what was expected, what
    to do."""


def _require(condition, text):
    if not condition:
        raise UnsupportedState(text)


def _snapshot(weight, q):
    """All of a weight and its state that a decode depends on, each field read once, or what it
    lacks: refused, or None for the checks to name. What a first call checks, launches from and
    keeps are these, whatever another thread assigns meanwhile.

    Returns (tensors, values). tensors: weight, absmax, code2, absmax2, offset. values: shape,
    dtype, quant_type, blocksize, dtype2 and blocksize2 of state2 (for a flat state, _FLAT in place
    of the second quantization), and whether a weight of shape[0] 1 gives the transpose: the
    operator does not, its caller does.
    """
    if not isinstance(weight, torch.Tensor):  # no _require: Dynamo would guard what the text says
        raise UnsupportedState(f"the weight is {type(weight).__name__}, expected the packed 4-bit "
                               "tensor: pass a bitsandbytes Linear4bit, or its weight and "
                               "weight.quant_state")
    _require(q is not None, "there is no quant_state, expected bitsandbytes' QuantState: a "
             "Linear4bit gets it when it moves to the GPU (layer.to('cuda')); a plain Linear "
             "needs no dequantization, and an 8-bit layer (Linear8bitLt, int8) has another")
    # A plain getattr would run QuantState's own __getattr__ in each guard of a compiled call.
    packed = getattr(q, "__dict__", {}).get("packing_format_for_cpu")
    _require(not packed, "bitsandbytes repacked this layer for its CPU matmul (eval mode, "
             "AVX512-BF16), expected its usual layout: move the layer to the GPU, or reload it")
    nested, state2 = getattr(q, "nested", None), getattr(q, "state2", None)
    _require(isinstance(nested, bool), f"quant_state.nested is {nested}, expected True or False: "
             "reload the layer")
    _require(not nested or state2 is not None, "quant_state.nested is True and state2 None, "
             "expected the state of the absmax: reload the layer")
    absmax, *values = (
        getattr(q, name, None) for name in ("absmax", "shape", "dtype", "quant_type", "blocksize"))
    if not nested:
        return (weight, absmax, *_FLAT[:3]), (*values, *_FLAT[3:], True)
    code2, absmax2, dtype2, blocksize2 = (
        getattr(state2, name, None) for name in ("code", "absmax", "dtype", "blocksize"))
    _require(dtype2 == torch.float32, f"state2.dtype is {dtype2}, expected torch.float32: quantize "
             "the layer again")
    tensors = weight, absmax, code2, absmax2, getattr(q, "offset", None)
    return tensors, (*values, dtype2, blocksize2, True)


def check_state(weight, quant_state):
    """Check everything the kernel relies on: (n elements, log2 blocksize, log2 state2.blocksize
    or 0). Raises UnsupportedState. Reads metadata only, never a value on the GPU."""
    return _check(*_snapshot(weight, quant_state))


def _check(tensors, values):
    sizes = _check_values(tensors, values)
    _check_weight(tensors[0], values[0], sizes[0])
    _check_scales(tensors, -(-sizes[0] // values[3]), values[5])
    return sizes


NAMES = "weight", "absmax", "state2.code", "state2.absmax", "offset"


def _check_values(tensors, values):
    """Everything but the tensors' own metadata, so that torch.compile can trace it."""
    shape, dtype, quant_type, blocksize, dtype2, blocksize2, _ = values
    _require(quant_type in ("nf4", "fp4"), f"quant_type is {quant_type!r}, expected 'nf4' or "
             "'fp4': 8-bit and other states have dequantizations of their own")
    _require(dtype in DTYPES, f"quant_state.dtype is {dtype}, expected one of {DTYPES}: set it")
    sizes = isinstance(shape, (tuple, list)) and all(isinstance(x, int) and x >= 0 for x in shape)
    _require(sizes, f"quant_state.shape is {shape}, expected the weight's shape: reload the layer")
    n = math.prod(shape)
    _require(n < ALL, f"the weight has {n} elements, expected fewer than 2**34: dequantize it in "
             "parts")
    log2_block, log2_block2 = _log2("quant_state.blocksize", blocksize, 37), 0
    blocks = -(-n // int(blocksize))
    _require(blocks < 1 << 31, f"the weight has {blocks} blocks, expected fewer than 2**31: "
             "quantize it again with a larger blocksize")
    if dtype2:
        log2_block2 = _log2("state2.blocksize", blocksize2, 31)
    weight = tensors[0]
    _require(weight.dim() > 0, "the weight has no dimension, expected packed codes such as (n / "
             "2, 1): use weight.view(1)")
    unpacked = weight.is_floating_point() and n > 3 and tuple(weight.shape) == tuple(shape)
    _require(weight.dtype in STORAGES and not unpacked, f"the weight is {weight.dtype} of shape "
             f"{tuple(weight.shape)}, expected packed 4-bit codes in one of {STORAGES}: the layer "
             "holds other values than its quant_state says; quantize it again")
    for name, tensor in zip(NAMES, tensors if dtype2 else tensors[:2], strict=False):
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedState(f"{name} is {type(tensor).__name__}, expected a tensor: the "
                                   "quant_state is incomplete; quantize the layer again or reload "
                                   "it")
    return n, log2_block, log2_block2


def _check_weight(weight, shape, n):
    """Is it packed codes, enough of them, where the kernel runs?"""
    _require(weight.device.type == "cuda" or INTERPRETED, f"the weight is on {weight.device}, "
             "expected CUDA: layer.to('cuda'); without a GPU, TRITON_INTERPRET=1 before Python "
             "starts runs Triton's interpreter")
    _require_tensor("weight", weight, (weight.dtype,), weight.device, 0)
    _require(weight.nbytes * 2 >= n, f"the weight holds {weight.nbytes} bytes, expected "
             f"{(n + 1) // 2} for the shape {tuple(shape)}: state and weight do not belong "
             "together; reload the layer")


def _check_scales(tensors, blocks, blocksize2):
    """Are absmax and the tensors it is decoded with all there?"""
    weight, absmax, code2, absmax2, offset = tensors
    device, float32 = weight.device, (torch.float32,)
    if not blocksize2:
        return _require_tensor("absmax", absmax, float32, device, blocks)
    _require_tensor("absmax", absmax, (torch.uint8,), device, blocks)
    _require_tensor("state2.absmax", absmax2, float32, device, -(-blocks // blocksize2))
    _require_tensor("state2.code", code2, float32, device, 256)
    _require_tensor("offset", offset, OFFSETS, device, 1)
    _require(offset.numel() == 1, f"offset has {offset.numel()} elements, expected one for the "
             "whole weight: reload the layer")


def _require_tensor(name, tensor, dtypes, device, least):
    _require(tensor.dtype in dtypes, f"{name} has dtype {tensor.dtype}, expected {dtypes[0]}: "
             "state and weight do not belong together; quantize the layer again")
    _require(tensor.device == device, f"{name} is on {tensor.device}, expected {device}, where the "
             "weight is: move the whole layer with layer.to(device), not single tensors")
    _require(tensor.numel() >= least, f"{name} has {tensor.numel()} elements, expected {least} or "
             "more for the weight's shape: state and weight do not belong together; reload the "
             "layer")
    _require(tensor.is_contiguous(), f"{name} is not contiguous, expected contiguous memory: use "
             f"{name}.contiguous()")
    _require(_in_memory(tensor), f"{name} has no memory, expected its values: its storage was "
             "freed (FSDP frees gathered weights after use; dequantize while it is there), or it "
             "is a DTensor (pass its local tensor)")


def _log2(name, size, most):
    """log2 of a power of two, or `most`, where one block holds all there can be: the kernel shifts
    32-bit integers."""
    if not (isinstance(size, int) and size > 0 and size & (size - 1) == 0):
        raise UnsupportedState(f"{name} is {size!r}, expected a power of two (bitsandbytes makes "
                               "32 to 4096): quantize the layer again")
    return min(int(size).bit_length() - 1, most)


def _in_memory(tensor):
    """Is all of it there? FSDP frees the storage of a gathered weight after use, and the tensor
    keeps its size; a DTensor or a fake tensor has a size and no memory of its own."""
    start = tensor.storage_offset() * tensor.itemsize
    there = tensor.data_ptr() > start and tensor.untyped_storage().nbytes() >= start + tensor.nbytes
    return there or not tensor.numel()


def _require_out(out, weight, shape, dtype):
    _require(isinstance(out, torch.Tensor), f"out is {type(out).__name__}, expected a tensor, or "
             "None for a new one")
    expected = (tuple(shape), dtype, weight.device, True)
    given = (tuple(out.shape), out.dtype, out.device, out.is_contiguous())
    _require(given == expected, f"out has (shape, dtype, device, contiguous) {given}, expected "
             f"{expected}: pass such a tensor, or None for a new one")


def _writable(out, weight):
    """Is there memory to write to, and none of it the weight's?"""
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    first, last = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    return _in_memory(out) and (end <= first or last <= start)

# %% Launching id="kernel-launch" part="host" folded=true tags=["kernel"]
def _private(root, path, public):
    """A private name of torch or Triton, or what public code does instead where it is absent."""
    try:
        return operator.attrgetter(path)(root)
    except AttributeError:
        return public


# What Inductor's generated code allocates with: half the time of torch.empty_strided.
_empty_cuda = _private(
    torch._C, "_dynamo.guards._empty_strided_cuda",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))
# bitsandbytes' Params4bit answers every method through a Python __torch_function__, not needed
# here.
_plain_tensors = _private(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
_TensorGuards = _private(torch._C, "_dynamo.guards.TensorGuards", None)
_stream = _private(torch._C, "_cuda_getCurrentRawStream",
                   lambda index: torch.cuda.current_stream(index).cuda_stream)
_current_device = _private(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_modes = _private(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_jit_trace = _private(torch._C, "_get_tracing_state", lambda: torch.jit.is_tracing() or None)
_transforms = _private(torch._C, "_functorch.peek_interpreter_stack", lambda: None)
# Not None inside a frame that Dynamo gave up (bf16 on a T4): it would trace what is called from
# there.
_dynamo_watches = _private(torch._C, "_dynamo.eval_frame.get_eval_frame_callback", lambda: None)
_undisturbed = _private(torch, "_disable_dynamo", lambda function: function)
_is_compiling = torch.compiler.is_dynamo_compiling
_count_write = torch.autograd.graph.increment_version  # autograd notices if it had saved `out`
_devices = torch.cuda.device_count()
DIRECT = CHECKED and not INTERPRETED  # CompiledKernel.run takes the same in all Tritons checked
IN_C = TRITON in ((3, 5), (3, 6))  # ... and is a Python wrapper that looks for scratch memory
_hooks = _knobs.runtime if _knobs else triton.compiler.CompiledKernel
_enter, _exit = _hooks.launch_enter_hook, _hooks.launch_exit_hook
_enter_calls, _exit_calls = getattr(_enter, "calls", ()), getattr(_exit, "calls", ())


def _traced():
    """Does someone follow torch's operators: a dispatch mode (make_fx, fake tensors),
    torch.jit.trace, torch.func? Then the call must be one."""
    return _modes() or _jit_trace() is not None or _transforms() is not None


def _on(tensor):
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _constexprs(dtype, nested, log2_block, log2_block2, tail, small, hint_loads, s):
    mode = {torch.float32: FP32, torch.float16: FP16}.get(dtype, BF16_INT if s.int_bf16 else BF16)
    return dict(
        ASM=s.asm and log2_block >= 6, NESTED=nested, LOG2_BLOCK=log2_block,
        LOG2_BLOCK2=log2_block2, MODE=mode.value, TAIL=tail,
        WORDS=s.words_small if small else s.words, THREADS=32 * s.num_warps, STAGE=s.stage,
        LOAD_HINT="evict_first" if s.hints and hint_loads else "",
        STORE_HINT=".cs" if s.hints else "", FLUSH=not INTERPRETED,
    )


def _options(s):
    return dict(num_warps=s.num_warps, enable_fp_fusion=False)


def _configure(tensors, values, sizes, out):
    """(grid, runtime arguments, constexprs, most programs an SM or 0) of one launch into `out`."""
    n, log2_block, log2_block2 = sizes
    (weight, absmax, *second), nested = tensors, values[4] is not None
    s, table = settings(weight.device), codebooks(weight.device)
    constexprs = _constexprs(out.dtype, nested, log2_block, log2_block2, n % 8 != 0,
                             n <= s.small_up_to, n <= s.hint_loads_up_to, s)
    grid = -(-n // (constexprs["THREADS"] * constexprs["WORDS"] * 8))
    constexprs["ASM"] &= weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0
    second = second if nested else (table,) * 3  # which nobody reads
    table = table[16:] if values[2] == "fp4" else table
    packed = weight.reshape(-1).view(torch.uint8)
    arguments = [packed, out, absmax, table, *second, n // 8, n % 8]
    limit = s.programs_per_sm_huge if n > s.huge_above else s.programs_per_sm
    crowded = grid > s.sms * (2048 // constexprs["THREADS"])  # more than one wave of programs
    return grid, arguments, constexprs, limit if crowded else 0


def _launch(kernel, grid, arguments, constexprs, s):
    """Launch once on Triton's public path; returns Triton's CompiledKernel."""
    try:
        return kernel[(grid,)](*arguments, **constexprs, **_options(s))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        where = f"{s.reason} with Triton {triton.__version__}, torch {torch.__version__}"
        text = f"the NF4 kernel failed to compile or launch on {where}: {error}"
        raise RuntimeError(text) from error


def _repeat(compiled, grid, arguments, constexprs, limit):
    """What launches `compiled` again: `launch(stream, weight, out, absmax, code2, absmax2, offset)`,
    all addresses, for tensors like those it was compiled for and of their alignment."""
    call, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if limit:  # shared memory that nobody uses keeps more programs off the SM: the same kernel
        card = torch.cuda.get_device_properties(arguments[0].device)
        shared = card.shared_memory_per_multiprocessor // limit - 1024
        metadata = (*metadata[:2], max(metadata[2], min(shared, 48 * 1024)), *metadata[3:])
    middle = (metadata, None, None, None)
    if IN_C and not (call.global_scratch_size or call.profile_scratch_size):
        call, middle = call.launch, (0, 0, None, None, *middle)
    table, rest = arguments[3].data_ptr(), (*arguments[7:], *constexprs.values())

    def launch(stream, weight, out, absmax, code2, absmax2, offset):
        call(grid, 1, 1, stream, function, *middle, weight, out, absmax, table, code2, absmax2,
             offset, *rest)

    launch.keep = compiled, arguments[3]  # numbers keep no module loaded and no codebook alive
    return launch

# %% What is kept of a launch id="kernel-plan" part="host" folded=true tags=["kernel"]
_plans = {}  # of an absmax, by _identity: what repeats its launches, dropped when it is freed
_kinds = {}  # by _name: what plans a launch for a layer like one that was checked
# Not id(): it tells every audit hook, and filelock, which huggingface_hub imports, has a slow one.
_identity = object.__hash__


def _layout(tensors):
    return [(type(x), x.dtype, x.device, x.shape, x.stride()) for x in tensors]


def _kind(tensors, values, out, launch, kernel, forced):
    """What a launch was checked and compiled for: `plan(tensors)` for any layer of that kind."""
    weight, layout = tensors[0], _layout(tensors)
    index, size, dtype = weight.get_device(), tuple(out.shape), out.dtype
    stride = torch.empty(size, device="meta").stride()  # `out` may have others
    transposed, low = values[-1] and weight.shape[0] == 1, weight.data_ptr() & 3
    like, guards = (layout, low, values), (_never, _never)

    def plan(tensors):
        """A launch for these tensors, ready to repeat; None where they are not of this kind, or not
        in memory. `again(...)` compares all it depends on and launches, or returns None. Contents
        need no look: every launch reads them. It is one function, since a call of a further one
        takes as long as two of its comparisons."""
        # Guards also compare what torch does with an operator in this thread: torch.jit.trace and
        # torch.func fit none, while autocast and no_grad, which change nothing here, each need one.
        # So there are two of them, and `learns` decides when neither fits.
        same, other = guards
        alike = same(*tensors) or other(*tensors) or _layout(tensors) == layout
        if not alike or tensors[0].data_ptr() & 3 != low:
            return None
        absmax_at, code2_at, absmax2_at, offset_at = (x.data_ptr() for x in tensors[1:])
        # A storage may shrink in place. To ask one that is kept takes a third of the time of asking
        # its tensor. The weight's is kept weakly: whoever offloads it wants its memory back.
        absmax_now, code2_now, absmax2_now = (x.untyped_storage().nbytes for x in tensors[1:4])
        absmax_bytes, code2_bytes, absmax2_bytes = absmax_now(), code2_now(), absmax2_now()
        if not all(map(_in_memory, tensors)):  # asked last: what shrinks from now on is noticed
            return None
        place = None, _never, 0, 0

        def learns(tensors):
            """Are these laid out as the kind's? Then one C++ call will tell so from now on."""
            nonlocal same, other, guards
            if _traced() or _layout(tensors[:1]) != layout[:1]:  # another view is of another kind
                return False
            aliases = tuple(map(_alias, tensors))  # which no other thread can change
            learnt = _layout(aliases) == layout
            if learnt:
                for alias, x in zip(aliases, tensors, strict=True):
                    alias.requires_grad_(x.requires_grad)
                same, other = guards = _guards(*aliases), same
            return learnt

        def moved(weight, address):
            """Is the weight, of a known layout, all there where it is now (FSDP gathers it anew)?"""
            nonlocal place
            storage = weight.untyped_storage()
            now = address, weakref.ref(storage), storage.nbytes(), storage.data_ptr()
            there = address & 3 == low and weight.data_ptr() == address and _in_memory(weight)
            if there:
                place = now
            return there

        def again(weight, absmax, code2, absmax2, offset, now, given):
            try:
                address = weight.data_ptr()
                at, storage, weight_bytes, base = place
                if not (
                    now == values
                    and absmax.data_ptr() == absmax_at
                    and code2.data_ptr() == code2_at
                    and absmax2.data_ptr() == absmax2_at
                    and offset.data_ptr() == offset_at
                    and absmax_now() == absmax_bytes
                    and code2_now() == code2_bytes
                    and absmax2_now() == absmax2_bytes
                    and not _modes()  # who traces torch's operators wants to see one
                    and (same(weight, absmax, code2, absmax2, offset)
                         or other(weight, absmax, code2, absmax2, offset)
                         or learns((weight, absmax, code2, absmax2, offset)))
                    and (address == at and (storage := storage()) is not None
                         and storage.nbytes() == weight_bytes and storage.data_ptr() == base
                         or moved(weight, address))
                    and kernel is _your_dequantize_nf4_kernel
                    and forced is _forced
                    and _hooks.launch_enter_hook is _enter  # a profiler follows launches: assigned
                    and _hooks.launch_exit_hook is _exit
                    and not (_enter_calls or _exit_calls)  # ... or in the chain of hooks
                ):
                    return None
                if given is not None and not _fits(given, weight, size, dtype):
                    return None
            except (AttributeError, RuntimeError, TypeError, ValueError):
                return None  # malformed: the checks of a first call say how
            if _devices > 1 and _current_device() != index:
                with torch.cuda.device(index):
                    return _call_planned(weight, absmax, code2, absmax2, offset, now, given)
            if given is None:
                result = _empty_cuda(size, stride, dtype)
            else:
                result = given
                _count_write(result)
            launch(_stream(index), address, result.data_ptr(), absmax_at, code2_at, absmax2_at,
                   offset_at)
            return result.t() if transposed else result

        again.like = like
        return again

    plan.like = like
    return plan


def _fits(out, weight, size, dtype):
    """May this launch write into a caller's tensor?"""
    return (out.dtype is dtype and out.shape == size and out.is_contiguous()
            and out.device == weight.device and out.data_ptr() % 16 == 0 and _writable(out, weight))


def _never(*tensors):
    return False


def _guards(*tensors):
    """One C++ call that compares type, dtype, device, sizes and strides of several tensors."""
    if _TensorGuards is None:
        return _never
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _alias(x):
    """The same memory, type and layout as x has now, whatever is done to x meanwhile."""
    try:
        return x.detach().as_subclass(type(x)) if x.data_ptr() else x
    except (AttributeError, RuntimeError):  # no tensor, or one without memory: the checks refuse it
        return x


def _call_planned(weight, absmax, code2, absmax2, offset, values, out=None):
    """Repeat the launch that was made for these tensors and values before; None if there is none
    or something it depends on has changed."""
    with _plain_tensors():
        for again in _plans.get(_identity(absmax), ()):
            result = again(weight, absmax, code2, absmax2, offset, values, out)
            if result is not None:
                return result


def _call_unplanned(weight, quant_state, out):
    """A call that no plan fits: from one snapshot of the state."""
    with _plain_tensors():
        tensors, values = _snapshot(weight, quant_state)
        if _traced() or _without_data(weight):
            return _operator_result(tensors, values, out)
        return _first_call(tensors, values, out)


def _first_call(tensors, values, out=None):
    """Launch from a snapshot, and keep that launch for its absmax: at once if the layer is like one
    that was checked before, else checked and on the public path."""
    forced, kernel, absmax = _forced, _your_dequantize_nf4_kernel, tensors[1]
    tensors = tuple(map(_alias, tensors))
    (shape, dtype, *_, transposes), weight = values, tensors[0]
    if again := _like_before(tensors, values):
        with _on(weight):
            result = again(*tensors, values, out)
        if result is not None:
            _keep_plan(again, absmax)
            return result
    sizes = _check(tensors, values)
    with _on(weight):
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=weight.device)
        else:
            _require_out(out, weight, shape, dtype)
            _require(_writable(out, weight), "out has no memory, or shares the weight's, expected "
                     "a tensor of its own: pass one, or None")
            _count_write(out)
        grid, arguments, constexprs, limit = _configure(tensors, values, sizes, out)
        if grid:
            compiled = _launch(kernel, grid, arguments, constexprs, settings(weight.device))
            if DIRECT and out.data_ptr() % 16 == 0 and isinstance(shape, tuple):
                launch = _repeat(compiled, grid, arguments, constexprs, limit)
                plan = _kind(tensors, values, out, launch, kernel, forced)
                if len(_kinds) >= 256:  # shapes of a model are few
                    _kinds.clear()
                _keep(_kinds, _name(values), plan, 16)
                if again := plan(tensors):
                    _keep_plan(again, absmax)
    return out.t() if transposes and weight.shape[0] == 1 else out


def _name(values):
    """Of a kind: 64 is not 64.0, and a notebook's cell that runs again makes functions anew."""
    return repr(values), codebooks, _configure, _constexprs


def _like_before(tensors, values):
    """A launch for these tensors, if they are like those of a layer that was checked before."""
    try:
        for plan in _kinds.get(_name(values), ()):
            if again := plan(tensors):
                return again
    except (AttributeError, RuntimeError, TypeError, ValueError):
        pass  # malformed: the checks say how


def _keep(table, key, one, most):
    """Put a plan before others of its key, in place of one like it: of the same layout."""
    others = [kept for kept in table.get(key, ()) if kept.like != one.like]
    table[key] = (one, *others[:most - 1])


def _keep_plan(again, absmax):
    """One absmax may have several: a transposed view of the weight, another type of it, another
    dtype of the result."""
    name = _identity(absmax)
    again.alive = weakref.ref(absmax, lambda _, drop=_plans.pop: drop(name, None))
    _keep(_plans, name, again, 4)

# %% The operator id="kernel-operator" part="host" folded=true tags=["kernel"]
def _without_data(weight):
    """Fake and meta tensors: only the operator can answer for them."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    kinds = (fake.FakeTensor,) if fake else ()
    return isinstance(weight, torch.Tensor) and (weight.is_meta or isinstance(weight, kinds))


def _call_operator(weight, quant_state, out):
    """The same call as an operator, which torch.compile leaves whole: no graph break, no copy of
    the weight, and every check of an eager call at every call."""
    return _operator_result(*_snapshot(weight, quant_state), out)


def _operator_result(tensors, values, out):
    operands, weight = _operands(tensors, values), tensors[0]
    if out is not None:
        _require_out(out, weight, *values[:2])
    result = _operator(*operands)
    result = result if out is None else out.copy_(result)
    return result.t() if weight.shape[0] == 1 else result


def _operands(tensors, values):
    """What the operator is given. All but the shape of the values is one number, since every
    argument makes a dispatch slower, and the weight a plain view: a Params4bit doubles its time."""
    _, log2_block, log2_block2 = _check_values(tensors, values)
    weight, absmax, *second = tensors
    nested = values[4] is not None
    kind = DTYPES.index(values[1]) | (values[2] == "fp4") << 2 | log2_block << 3
    kind |= (log2_block2 + 1) << 9 if nested else 0
    packed = weight.view(-1) if weight.is_contiguous() else weight
    return packed, absmax, *(second if nested else (None,) * 3), list(values[0]), kind


@functools.lru_cache(None)
def _values(shape, kind):
    """The values of a snapshot, of the operator's arguments."""
    second = kind >> 9
    _require(0 <= second <= 32 and kind & 3 < len(DTYPES), f"kind is {kind}, expected what "
             "_operands makes: pass a layer to your_dequantize_nf4")
    second = (torch.float32, 1 << second - 1) if second else _FLAT[3:]
    return (shape, DTYPES[kind & 3], "fp4" if kind & 4 else "nf4", 1 << (kind >> 3 & 63), *second,
            False)


def _run(weight, absmax, code2, absmax2, offset, shape, kind):
    values = _values(tuple(shape), kind)
    if values[4] is None:
        code2, absmax2, offset, *_ = _FLAT
    result = _call_planned(weight, absmax, code2, absmax2, offset, values)
    if result is None:
        result = _first_call((weight, absmax, code2, absmax2, offset), values)
    return result


def _fake(weight, absmax, code2, absmax2, offset, shape, kind):
    _lower()
    return torch.empty(shape, dtype=_values((), kind)[1], device=weight.device)


def _lower():
    """Let the code that Inductor writes call `_run` itself: the dispatcher takes three times as
    long. Where Inductor has other names, writes C++ or does not know the shape, it calls the
    operator."""
    lowering = sys.modules.get("torch._inductor.lowering")
    lowerings, fallback = (
        getattr(lowering, name, None) for name in ("lowerings", "fallback_handler"))
    if not (lowerings and fallback) or _operator in lowerings:
        return
    dispatched = fallback(_operator, add_to_fallback_set=False)

    def lower(*arguments):
        *tensors, shape, kind = arguments
        try:
            ir, shape = lowering.ir, tuple(map(int, shape))
            inputs = [ir.ExternKernel.realize_input(tensors[1] if x is None else x)
                      for x in tensors]
            layouts = [x.get_layout() for x in inputs]
            direct = all(isinstance(layout, ir.FixedLayout) for layout in layouts)
            if direct and not lowering.V.graph.cpp_wrapper:
                weight = inputs[0]
                if isinstance(weight, ir.ReinterpretView) and layouts[0].is_contiguous():
                    whole, layout = weight.data, weight.data.get_layout()
                    if whole.get_numel() == weight.get_numel() and layout.is_contiguous():
                        inputs[0] = whole  # to make a view takes a while
                made = ir.FixedLayout(layouts[0].device, _values(shape, kind)[1], list(shape))
                call = ir.ExternKernelAlloc(made, inputs, (shape, kind),
                                            python_kernel_name=f"torch.ops.{_operator}.run")
                call.codegen_size_asserts = lambda wrapper: None
                return ir.TensorBox.create(call)
        except (AssertionError, AttributeError, NotImplementedError, TypeError):
            pass
        return dispatched(*arguments)

    lowerings[_operator] = lower


def _register():
    """The operator nf4_triton::dequantize; a live notebook, or a second copy of this module,
    registers under a name of its own, so that a compiled call runs the kernel of the module
    it was written in."""
    name = first = "nf4_triton_live" if __name__ == "__main__" else "nf4_triton"
    copies = 1
    while hasattr(getattr(torch.ops, name), "dequantize"):
        copies += 1
        name = f"{first}_{copies}"
    library = torch.library.Library(name, "FRAGMENT")
    # Not torch.library.custom_op, whose wrappers take longer than the launch.
    library.define("dequantize(Tensor weight, Tensor absmax, Tensor? code2, Tensor? absmax2, "
                   "Tensor? offset, SymInt[] shape, int kind) -> "
                   "Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    # Dynamo stays out: where Inductor refused a graph, it goes on to trace what is called from it.
    library.impl("dequantize", _undisturbed(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{name}::dequantize", _fake, lib=library)
    return library, getattr(torch.ops, name).dequantize.default


_library, _operator = _register()
_operator.run = _run  # called by code that Inductor keeps on disk: it takes what the operator does
