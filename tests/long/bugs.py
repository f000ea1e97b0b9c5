"""Plausible bugs, each of another mechanism: what test_seeded_bugs.py seeds."""
# ruff: noqa: E501

from typing import NamedTuple

KERNEL = "helpers/src/nf4_triton/kernel.py"
LAUNCH = "helpers/src/nf4_triton/launch.py"
BITS = ("nf4_triton/test_kernel_bits.py", "nf4_triton/test_layouts.py")
CALLS = ("nf4_triton/test_launch.py", "nf4_triton/test_callers.py", "nf4_triton/test_faults.py")
CHECKS = ("nf4_triton/test_bad_input.py", "nf4_triton/test_faults.py", "nf4_triton/test_launch.py")
COMPILED = ("nf4_triton/test_compiled.py",)
ORACLE = ("nf4_triton/test_reference.py",)
BACKEND = ("nf4_triton/test_backend.py",)
SWITCH = ("nf4_triton/test_switch.py", "nf4_triton/test_switch_calls.py")
MACHINE_CODE = ("cross/test_sass.py",)


class Bug(NamedTuple):
    """`old` becomes `new` in a function or class of a file, anywhere in it if that is ""."""

    file: str
    tests: tuple[str, ...]
    function: str
    old: str
    new: str


def rows(prefix, file, tests, table):
    return {f"{prefix} {name}": Bug(file, tests, *fields) for name, fields in table.items()}


PORTABLE = {
    "low nibble first": ("_elements", "4 - 4 * (e & 1)", "4 * (e & 1)"),
    "blocks one element early": ("_elements", "block = e >> LOG2_BLOCK", "block = (e + 1) >> LOG2_BLOCK"),
    "absmax sign-extended": ("_elements", "q.to(tl.int32)", "q.to(tl.int8).to(tl.int32)"),
    "bf16 rounded half up": ("_elements", "bits + 0x7FFF + ((bits >> 16) & 1)", "bits + 0x8000"),
    "NaN rounded like a number": ("_elements", "value != value", "value < value"),
    "offset added before the product": ("_scale", "absmax2, FLUSH) + offset", "absmax2 + offset, FLUSH)"),
    "mask one too far": ("_your_dequantize_nf4_kernel", "mask = e <", "mask = e <="),
    "odd tail forgotten": ("_your_dequantize_nf4_kernel", "* 8 + n_tail", "* 8"),
    "fp4's code 8 without its sign": ("", "tuple(-value", "tuple(0.0 - value"),
    "settings stay forced": ("force", "apply(before)", "pass"),
    "subnormals flushed on a CPU": ("kernel_constexprs", "not INTERPRETED", "True"),
}
FORCED_LAUNCHES = {
    "launches outlive their settings": ("force", ".clear()", ""),
}
HINTED = {
    "stores without a cache hint": ("_store_row", ", cache_modifier=STORE_HINT", ""),
}
LAUNCHED = {
    "last program missing": ("kernel_arguments", "-(-n //", "max(1, n //"),
    "state2.blocksize ignored": ("check", "return n, log2_block, log2_block2", "return n, log2_block, 8"),
    "W.t() not transposed": ("", "result.t() if", "result if"),
}
CHECKED = {
    "blocks rounded down": ("check", "-(-n // blocksize)", "n // blocksize"),
    "weight not packed": ("check_weight", "or unpacked", ""),
    "dtypes unchecked": ("check_tensor", "tensor.dtype not in dtypes or", ""),
    "strides unchecked": ("check_tensor", "not tensor.is_contiguous()", "False"),
    "freed tensors accepted": ("check_memory", "is_freed(tensor)", "False"),
    "offset added in fp64": ("check", "or (offset.dim() and offset.dtype == torch.float64)", ""),
    "a CPU accepted": ("check_weight", 'weight.device.type != "cuda" and not on_cpu', "False"),
    "out unchecked": ("check_out", "given != expected", "False"),
    "out over the weight": ("check_overlap", "start < first", "False and start < first"),
}
REPLAYED = {
    "another layout replayed": ("matches", "not self.guards(*tensors)", "False"),
    "freed weight read": ("matches", "and not freed", ""),
    "another spec replayed": ("_your_dequantize_nf4", "launches.get(spec, ())", "sum(launches.values(), [])"),
    "dispatch modes ignored": ("is_observed", "_modes() or", ""),
    "enter hook ignored": ("is_observed", 'getattr(enter, "calls", enter) or', ""),
    "one result for all calls": (
        "replay",
        "_empty_cuda(*launch.layout)",
        "globals().setdefault(launch.layout, _empty_cuda(*launch.layout))",
    ),
    "transposed results forgotten": ("make_launch", "result.stride()", "launched.result.stride()"),
    "one launch for each spec": ("check_and_launch", "[launch, *launches.get(spec, ())]", "[launch]"),
    "specs without end": ("check_and_launch", "len(launches) >= 1024", "False"),
    "writes into out not counted": ("launch_ordinary", "torch.autograd.graph.increment_version(out)", "pass"),
}
TRACED = {
    "torch.jit.trace ignored": ("is_traced", "or torch.jit.is_tracing()", ""),
    "torch.func ignored": ("is_traced", "or _transforms() is not None", ""),
    "fake tensors launched": ("is_traced", "or _is_fake(weight)", ""),
}
OPERATOR = {
    "graph without out": ("call_operator", "out.copy_(result)", "result"),
    "graph with unchecked states": ("call_operator", "check(tensors, spec)", "pass"),
}
REFERRED = {
    "low nibble first in the oracle": ("dequantize", "[high, low]", "[low, high]"),
    "GPU flushing on a CPU": ("dequantize", "flush_subnormal = weight.is_cuda", "flush_subnormal = True"),
    "flushed before rounding": ("multiply_flushing", "(a * 2.0**64 * b)", "(a * b * 2.0**64)"),
    "-0.0 equals 0.0": ("different", "x_bits != y_bits", "x != y"),
}
CHOSEN = {
    "wrong bits accepted": (
        "why_not_triton",
        "not reference.same_bits(result, reference.dequantize(*state))",
        "False",
    ),
    "out of memory remembered": (
        "why_not_triton",
        "except torch.OutOfMemoryError",
        "except ZeroDivisionError",
    ),
    "fallback without checks": (
        "dequantize_in_torch",
        "launch.check(tensors, spec, any_device=True)",
        "pass",
    ),
}
SWITCHED = {
    "another switch's library ended": ("off", "and not library.holders", ""),
    "originals not put back": ("_remove", "setattr(module, attribute, originals[id(value)])", "pass"),
    "half a switch stays": ("_switch_on", "        _remove(library)\n", ""),
    "self-test cannot fail": ("self_test", "if not same", "if False"),
    "parameters unchecked": ("require_parameters", "optional and", "True or"),
    "unsupported states raise": ("_dequantize", "launch.UnsupportedState", "ZeroDivisionError"),
    "newer arguments ignored": ("_replace", "if known and library.on", "if library.on"),
    "copies dequantize when off": ("_replace", "if known and library.on", "if known"),
    "product in the state's dtype": ("product", "quant_state.dtype is not A.dtype", "False"),
    "product without a gradient": ("matmul_4bit", "A.requires_grad and torch.is_grad_enabled()", "False"),
    "backward in another dtype": ("backward", "grad, weight.to(grad.dtype)", "grad.to(weight.dtype), weight"),
}
TRAINED = {
    "on after training": ("on_train_end", "self._off()", "pass"),
}
LOADED = {
    "every layer switches": ("_switch_before", "waiting.clear()", "pass"),
    "a failed switch fails the layer": ("_switch_before", "except Exception", "except ZeroDivisionError"),
}
MEASURED = {
    "timed weights unchecked": ("test_dequantize", "assert_same(x, y, config.dtype)", "pass"),
    "a failed contender keeps its times": ("in_turns", "seconds.pop(name, None)", "pass"),
    "ratios rounded up": ("shown", "math.floor(round(100 * ratio, 6))", "math.ceil(100 * ratio)"),
}
JUDGED = {
    "a second kernel passes": ("single_kernel", "== [KERNEL] * 3", ".count(KERNEL) == 3"),
    "kept memory passes": ("memory", "and kept == 0", ""),
    "wrong bits pass": ("exact", "and not any(counts)", ""),
}
MARKED = {
    "points for what was not measured": ("points_of", "None: None", "None: won"),
}
ASSEMBLY = {
    "low nibble first": ("", 'f"shr.u32 x, $4, {8 * byte + 4}; "', 'f"shr.u32 x, $4, {8 * byte}; "'),
    "nibbles of fp32 in order": ("", "4 * (k ^ 1)", "4 * k"),
    "FMA for the scale": (
        "",
        "mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3;",
        "fma.rn.ftz.f32 $0, $1, $2, $3;",
    ),
    "subnormal scales kept": ("", "mul.rn.ftz.f32 m", "mul.rn.f32 m"),
    "subnormal products kept": ("", "mul.rn.ftz.f32 a, a, $6", "mul.rn.f32 a, a, $6"),
    "fp16 rounded to zero": ("", "cvt.rn.f16.f32 lo, a", "cvt.rz.f16.f32 lo, a"),
    "integer bf16 rounded half up": ("", "bfe.u32 bit, table, 16, 1;", "mov.b32 bit, 1;"),
    "integer bf16 changes NaN": ("", "setp.nan.f32 isnan, b, b", "setp.ne.f32 isnan, b, b"),
    "halves of a register swapped": ("_store_row", "0x5410, 0x7632", "0x7632, 0x5410"),
    "results in the order of registers": (
        "_store_row",
        "tl.join(tl.join(a, c), tl.join(b, d))",
        "tl.join(tl.join(a, b), tl.join(c, d))",
    ),
    "one scale for both blocks": ("", '"add.u32 row, row, 1; "', '""'),
    "scales of another row": (
        "_your_dequantize_nf4_kernel",
        "* (THREADS // 8) + (thread",
        "* (THREADS // 4) + (thread",
    ),
    "blocks of 64 always": ("_your_dequantize_nf4_kernel", ">> (LOG2_BLOCK - 6)", ">> 0"),
    "blocks of 32": ("kernel_constexprs", "s.asm and log2_block >= 6", "s.asm"),
    "last block's scale not read": (
        "_your_dequantize_nf4_kernel",
        "block * 8 < left",
        "block * 8 + 7 < left",
    ),
    "words written past the end": (
        "_your_dequantize_nf4_kernel",
        "mine > r * THREADS, MODE",
        "mine >= r * THREADS, MODE",
    ),
    "tail forgotten": ("_your_dequantize_nf4_kernel", "tl.arange(0, 8) < n_tail", "tl.arange(0, 8) < 0"),
    "half of code2": (
        "_your_dequantize_nf4_kernel",
        "tl.gather(book2, q, 0)",
        "tl.gather(book2, q & 127, 0)",
    ),
    "32-bit offsets": (
        "_your_dequantize_nf4_kernel",
        "first = pid.to(tl.int64) * TILE",
        "first = pid * TILE",
    ),
}
ALIGNED = {
    "assembly on any alignment": (
        "launch_ordinary",
        "weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0",
        "True",
    ),
}
ON_GPU = {
    "alignment of a replay ignored": ("matches", "address % 4 == 0 and", ""),
    "stream 0": ("replay", "_stream(launch.device)", "0"),
    "codebook uploaded in a capture": ("codebook", 'device.type == "cuda" and', "False and"),
}
CPU = (
    rows("cpu", KERNEL, BITS, PORTABLE)
    | rows("cpu", KERNEL, CALLS, FORCED_LAUNCHES)
    | rows("cpu", KERNEL, MACHINE_CODE, HINTED)
    | rows("cpu", LAUNCH, BITS, LAUNCHED)
    | rows("cpu", LAUNCH, CHECKS, CHECKED)
    | rows("cpu", LAUNCH, CALLS, REPLAYED | TRACED)
    | rows("cpu", LAUNCH, COMPILED, OPERATOR)
    | rows("cpu", "helpers/src/nf4_triton/reference.py", ORACLE, REFERRED)
    | rows("cpu", "helpers/src/nf4_triton/backend.py", BACKEND, CHOSEN)
    | rows("cpu", "helpers/src/nf4_triton/switch.py", SWITCH, SWITCHED)
    | rows("cpu", "helpers/src/nf4_triton/callback.py", SWITCH, TRAINED)
    | rows("cpu", "helpers/src/nf4_triton/autoload.py", SWITCH, LOADED)
    | rows("cpu", "helpers/puzzle/protocol.py", ("puzzle/test_protocol.py",), MEASURED)
    | rows("cpu", "helpers/puzzle/checks.py", ("puzzle/test_checks.py",), JUDGED)
    | rows("cpu", "helpers/puzzle/marking.py", ("puzzle/test_marking.py",), MARKED)
)
GPU = (
    rows("gpu", KERNEL, BITS[:1], ASSEMBLY)
    | rows("gpu", LAUNCH, BITS[:1], ALIGNED)
    | rows("gpu", LAUNCH, CALLS[:2], ON_GPU)
)
BUGS = CPU | GPU
