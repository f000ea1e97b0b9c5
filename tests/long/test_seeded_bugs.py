"""Plausible bugs seeded into the code, one at a time, each of which the tests must catch.

By hand: pytest -m long tests/long/test_seeded_bugs.py -n 2; those that only a GPU shows: -k gpu -n 8 on one.
Each bug is seeded in a copy of the repository, where the tests of its row run until one fails. Controls run
the same tests without a bug. That every row still applies is checked in the gate.
"""
# ruff: noqa: E501  (one bug per line)

import ast
import os
import re
import shutil
from typing import NamedTuple

import pytest

from helpers import machine

KERNEL, LAUNCH, REFERENCE = (f"helpers/nf4/{name}.py" for name in ("kernel", "launch", "reference"))
BITS = ("nf4/test_kernel_bits.py", "nf4/test_layouts.py", "long/test_fuzz.py")
CHECKS = (
    "nf4/test_bad_input.py",
    "nf4/test_faults.py",
    "nf4/test_kernel_bits.py",
    "nf4/test_hostile_calls.py",
)
CALLS = (
    "nf4/test_plans.py",
    "nf4/test_hostile_calls.py",
    "nf4/test_kinds.py",
    "nf4/test_callers.py",
    "nf4/test_faults.py",
)
COMPILED = ("nf4/test_callers.py", "nf4/test_compiled_calls.py")
ORACLE = ("nf4/test_reference.py", "nf4/test_backend.py")
GPU = (
    "nf4/test_kernel_bits.py",
    "nf4/test_faults.py",
    "nf4/test_plans.py",
    "nf4/test_kinds.py",
    "nf4/test_callers.py",
    "long/test_fuzz.py",
)
LIMIT = 1800  # seconds; tests that do not end have caught the bug


class Bug(NamedTuple):
    """`old` becomes `new` in `file`: fragments of text, whose layout and comments do not count."""

    file: str
    tests: tuple[str, ...]
    old: str
    new: str
    gpu: bool = False  # only a GPU shows it


def bugs(file, tests, rows, gpu=False):
    return {
        f"{'gpu' if gpu else 'cpu'} {name}": Bug(file, tests, old, new, gpu)
        for name, (old, new) in rows.items()
    }


SCALE = "return _multiply(code2, absmax2, FLUSH) + offset"
MASK = "mask = e < n_words.to(tl.int64) * 8 + n_tail"
ROUND = "bits + 0x7FFF + ((bits >> 16) & 1)"
STORE = "tl.store(out_ptr + e, value.to(out_ptr.dtype.element_ty), mask=mask)"
PORTABLE = {
    "low nibble first": ("(4 - 4 * (e & 1))", "(4 * (e & 1))"),
    "block index off by one": ("block = e >> LOG2_BLOCK", "block = (e + 1) >> LOG2_BLOCK"),
    "scale of the second level by element": ("(block >> LOG2_BLOCK2), mask=mask", "(block >> 7), mask=mask"),
    "absmax index sign-extended": ("_scale(tl.load(code2_ptr + q.to(tl.int32)), absmax2,", "_scale(tl.load(code2_ptr + q.to(tl.int8).to(tl.int32)), absmax2,"),
    "offset dropped": (SCALE, "return _multiply(code2, absmax2, FLUSH)"),
    "FMA": (SCALE, "return (code2.to(tl.float64) * absmax2.to(tl.float64) + offset.to(tl.float64)).to(tl.float32)"),
    "offset before the product": (SCALE, "return _multiply(code2, absmax2 + offset, FLUSH)"),
    "bf16 truncated": (f"{ROUND})", "bits)"),
    "bf16 rounded half up": (f"{ROUND})", "bits + 0x8000)"),
    "NaN rounded like a number": (f"tl.where(value != value, 0x7FFF0000, {ROUND})", ROUND),
    "store without a mask": (STORE, STORE.replace(", mask=mask", "")),
    "mask one too far": (MASK, MASK.replace("e <", "e <=")),
    "odd tail forgotten": (MASK, MASK.replace(" + n_tail", "")),
    "one codebook value a digit short": ("0.7229568362236023, 1.0)", "0.7229568, 1.0)"),
    "fp4's code 8 without its sign": ("FP4 += tuple(-value for value in FP4)", "FP4 += tuple(0.0 - value for value in FP4)"),
    "flushed on the CPU too": ("FLUSH=not INTERPRETED", "FLUSH=True"),
    "settings forced for good": ("finally: apply(before)", "finally: pass"),
    "another card forced": ('if card not in (None, "t4"):', "if False:"),
}  # fmt: skip
LAUNCHED = {
    "last program missing": ("grid = -(-n // (", "grid = max(1, n // ("),
    "nf4's codebook for fp4": ('table[16:] if values[2] == "fp4" else table', "table"),
    "a constant for state2.blocksize": ("log2_block, log2_block2, n % 8 != 0", "log2_block, 8, n % 8 != 0"),
    "W.t() not transposed": ("launches[key] = (new, *known)[:32] return result.t() if weight.shape[0] == 1 else result", "launches[key] = (new, *known)[:32]\n    return result"),
    "empty weights launched": ("**_options(s)) if grid else None", "**_options(s))"),
}  # fmt: skip
CHECKED = {
    "absmax length unchecked": ("second else fp32, weight.device, blocks)", "second else fp32, weight.device, 0)"),
    "blocks rounded down": ("blocks = -(-sizes[0] // values[3])", "blocks = sizes[0] // values[3]"),
    "second level rounded down": ("-(-blocks // values[5])", "blocks // values[5]"),
    "code2 length unchecked": ("code2, fp32, weight.device, 256", "code2, fp32, weight.device, 0"),
    "weight length unchecked": ("if weight.nbytes * 2 < sizes[0]:", "if weight.nbytes * 2 < sizes[0] - 2:"),
    "weight without a dimension accepted": ("if not weight.dim() or", "if"),
    "weight that is not packed accepted": ("not in STORAGES or unpacked:", "not in STORAGES:"),
    "weight of any dtype": ("or weight.dtype not in STORAGES", ""),
    "dtypes unchecked": ("if tensor.dtype not in dtypes or tensor", "if tensor"),
    "devices unchecked": ("if tensor.device != device:", "if False:"),
    "strides unchecked": ("if not tensor.is_contiguous() or tensor.is_neg():", "if tensor.is_neg():"),
    "negated views accepted": ("or tensor.is_neg():", ":"),
    "freed tensors accepted": ("if not _in_memory(tensor):", "if False:"),
    "offset of many elements accepted": ("if offset.numel() != 1 or offset.dim()", "if offset.dim()"),
    "offset of one dimension in fp64 accepted": ("or offset.dim() and offset.dtype == torch.float64:", ":"),
    "partitioned weights unnamed": ('if hasattr(weight, "ds_id") and', "if False and"),
    "any blocksize": ("size & (size - 1) == 0", "True"),
    "too many elements": ("if n >= ALL or -(-n", "if -(-n"),
    "too many blocks": ("or -(-n // blocksize) >= 1 << 31:", ":"),
    "repacked layers accepted": ('"packing_format_for_cpu"', '"no_such_field"'),
    "nested without a second level": ("or nested and state2 is None:", ":"),
    "second level of another dtype accepted": ("if dtype2 != torch.float32:", "if False:"),
    "quant_type unchecked": ('if quant_type not in ("nf4", "fp4"):', "if False:"),
    "a CPU accepted": ("not (any_device or INTERPRETED):", "False:"),
    "out unchecked": ("if given != expected:", "if False:"),
    "out over the weight": ("if shared or not _in_memory(out):", "if not _in_memory(out):"),
    "out without memory": ("if shared or not _in_memory(out):", "if shared:"),
    "out of a dispatch unchecked": ("if out is not None and (problem := _out_problem(out, weight, shape, dtype, True)):", "if False:"),
}  # fmt: skip
# What a call compares before it replays a launch: one comparison at a time is left out.
KEY = 'launches.get((q["shape"], q["dtype"], q["quant_type"], q["blocksize"], dtype2, blocksize2, _current_device()), ())'
CACHED = {
    "replay: layouts ignored": ("if (launch.fits(*tensors) and", "if ("),
    "replay: another kernel ignored": ("launch.fits(*tensors) and launch.kernel is _your_dequantize_nf4_kernel and not", "launch.fits(*tensors) and not"),
    "replay: modes ignored": ("not (_modes() or _enter_calls or", "not (_enter_calls or"),
    "replay: hooks in the chain ignored": ("and not (_modes() or _enter_calls or _exit_calls)", "and not _modes()"),
    "replay: an enter hook ignored": ("_exit_calls) and _hooks.launch_enter_hook is _enter and _hooks.launch_exit_hook is _exit and (out", "_exit_calls) and _hooks.launch_exit_hook is _exit and (out"),
    "replay: an exit hook ignored": ("and _hooks.launch_exit_hook is _exit and (out", "and (out"),
    "replay: out unchecked": ("or not _out_problem(out, weight, launch.size, launch.dtype) and", "or"),
    "replay: freed weights accepted": ("or address == weight.storage_offset() * launch.itemsize:", ":"),
    "replay: the storage's offset forgotten": ("address == weight.storage_offset() * launch.itemsize", "address == 0"),
    "replay: writes into out not counted": ("_count_write(result := out)", "result = out"),
    "replay: one output for all calls": ("result = _empty_cuda(launch.size, launch.stride, launch.dtype) else", 'result = globals().setdefault("_kept", {}).setdefault(launch, _empty_cuda(launch.size, launch.stride, launch.dtype))\n                else'),
    "replay: transposed results forgotten": ("return result.t() if launch.transposed else result", "return result"),
    "replay: strides of the first out kept": ('torch.empty(out.shape, device="meta").stride()', "out.stride()"),
    **{f"key: {name} ignored": (KEY, f"next((known for key, known in launches.items() if key[:{i}] + key[{i + 1}:] == (lambda key: key[:{i}] + key[{i + 1}:])((" + KEY[len("launches.get(("):-len("), ())")] + "))), ())")
       for i, name in enumerate(("shape", "dtype", "quant_type", "blocksize", "state2.dtype", "state2.blocksize")) if i != 4},
    "cache: without end": ("if len(launches) >= 1024:", "if False:"),
    "cache: one launch per key": ("(new, *known)[:32]", "(new,)"),
    "cache: launches per key without end": ("(new, *known)[:32]", "(new, *known)"),
    "first call: traced calls ignored": ("if traced or weight.is_meta or", "if weight.is_meta or"),
    "first call: dispatch modes ignored": ("traced = _modes() or torch", "traced = torch"),
    "first call: torch.jit.trace ignored": ("or torch.jit.is_tracing() or", "or"),
    "first call: torch.func ignored": ("torch.jit.is_tracing() or _transforms() is not None", "torch.jit.is_tracing()"),
    "first call: meta tensors launched": ("if traced or weight.is_meta or", "if traced or"),
    "first call: fake tensors launched": ("if traced or weight.is_meta or isinstance(weight, FakeTensor):", "if traced or weight.is_meta:"),
    "first call: writes into out not counted": ("else: _count_write(out)", "else: pass"),
    "fake tensors have memory": ("or fake or", "or"),
}  # fmt: skip
OPERATOR = {
    "operator: fake of the wrong dtype": ("return torch.empty(shape, dtype=dtype, device=weight.device)", "return torch.empty(shape, dtype=torch.float64, device=weight.device)"),
    "operator: always nested": ("nested=blocksize2 is not None", "nested=True"),
    "operator: a single byte stays transposed": ("offset=offset, state2=state2)) return result.t() if weight.shape[0] == 1 else result", "offset=offset, state2=state2))\n    return result"),
    "operator: out not filled": ("result if out is None else out.copy_(result)", "result"),
    "operator: transposed results forgotten": ("out.copy_(result) return result.t() if weight.shape[0] == 1 else result", "out.copy_(result)\n    return result"),
    "operator: freed with its module": ("namespace.library = library", "pass"),
    "operator: one name for all copies": ("while hasattr(getattr(torch.ops, name)", "while False and hasattr(getattr(torch.ops, name)"),
    "Inductor: the operator called through the dispatcher": ("lowerings[_operator] = lower", "lowerings[_operator] = dispatched"),
    "Inductor: a part of a tensor taken for all of it": ("and whole.get_numel() == inputs[0].get_numel()", ""),
    "Inductor: a strided tensor taken for its contiguous view": ("and whole.get_layout().is_contiguous()", ""),
    "Inductor: layouts unchecked": ("isinstance(one, ir.FixedLayout) and one.is_contiguous()", "isinstance(one, ir.FixedLayout)"),
    "Inductor: states unchecked": ("_check([x.meta", "len([x.meta"),
    "Inductor: absmax in place of every tensor": ("tensors[1] if x is None else x", "tensors[1]"),
    "Inductor: Python called from C++": ("if fixed and not graph.cpp_wrapper:", "if fixed:"),
    "Inductor: needed in every version": ("except Exception:  # whatever is unusual in it, the operator takes\n pass", "except TypeError:\n            pass"),
    "compiled: another kernel ignored": ("if (launch and launch.kernel is _your_dequantize_nf4_kernel and address", "if (launch and address"),
    "compiled: freed weights accepted": ("and address and not address & 3", "and not address & 3"),
    "compiled: an enter hook ignored": ("_current_device() and _hooks.launch_enter_hook is _enter and", "_current_device() and"),
    "compiled: an exit hook ignored": ("and _hooks.launch_exit_hook is _exit): result = _empty_cuda", "):\n        result = _empty_cuda"),
    "compiled: hooks in the chain ignored": ("and not (_enter_calls or _exit_calls) and launch.device", "and launch.device"),
}  # fmt: skip
REFERRED = {
    "oracle: low nibble first": ("table.repeat_interleave(16), table.repeat(16)", "table.repeat(16), table.repeat_interleave(16)"),
    "oracle: offset dropped": ("scale += state.offset", "pass"),
    "oracle: scales of bf16": ("scale += state.offset", "scale = (scale + state.offset).bfloat16()"),
    "oracle: nf4's codebook for fp4": ('FP4_VALUES if state.quant_type == "fp4" else NF4_VALUES', "NF4_VALUES"),
    "oracle: fp4's code 8 without its sign": ("tuple(-x for x in FP4_VALUES)", "tuple(0.0 - x for x in FP4_VALUES)"),
    "oracle: one codebook value a digit short": ("0.7229568362236023, 1.0,", "0.7229568, 1.0,"),
    "oracle: flushed on a CPU": ("weight.is_cuda if flush_subnormal is None", "True if flush_subnormal is None"),
    "oracle: subnormal before rounding": ("(a * 2.0**64 * b).abs() < smallest * 2.0**64", "(a * b).abs() < smallest"),
    "oracle: blocks of the second level by 256": ("absmax2, state.state2.blocksize)", "absmax2, 256)"),
    "oracle: too short accepted": ("if tensor.numel() < count:", "if False:"),
    "oracle: W.t() not transposed": ("return out.t() if weight.shape[0] == 1 else out\n\n\ndef first", "return out\n\n\ndef first"),
    "different: NaN differs": ("& ~(x.isnan() & y.isnan())", ""),
    "different: -0.0 equals 0.0": ("differ = x.contiguous().view(bits) != y.contiguous().view(bits)", "differ = x != y"),
    "auto: wrong bits accepted": ("return None if same_bits(triton, exact) else", "return None if True else"),
    "auto: out of memory remembered": ("except torch.OutOfMemoryError: raise", ""),
    "auto: tried for every call": ("@functools.cache  # a torch.OutOfMemoryError passes through and is not remembered", ""),
    "auto: the CPU without an interpreter": ('if device.type == "cpu" and not _launch().INTERPRETED:', "if False:"),
    "fallback: states unchecked": ("launch.check_state(weight, quant_state, any_device=True)", "pass"),
    "fallback: out unchecked": ("if problem := launch._out_problem(out, weight, quant_state.shape, quant_state.dtype):", "if problem := None:"),
    "fallback: out of W.t() transposed twice": ("out.copy_(result.t() if transposed else result)", "out.copy_(result.reshape(out.shape))"),
}  # fmt: skip
STORED = "mask=mask[:, None], cache_modifier=STORE_HINT)"
ASSEMBLY = {
    "low nibble first": ('f"shr.u32 x, $4, {8 * byte + 4}; "', 'f"shr.u32 x, $4, {8 * byte}; "'),
    "nibbles of fp32 in order": ("{4 * (k ^ 1)}", "{4 * k}"),
    "FMA for the scale": ("mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3;", "fma.rn.ftz.f32 $0, $1, $2, $3;"),
    "subnormals kept in the scale": ("mul.rn.ftz.f32 m, $1, $2;", "mul.rn.f32 m, $1, $2;"),
    "subnormals kept in the product": ("mul.rn.ftz.f32 a, a, $6;", "mul.rn.f32 a, a, $6;"),
    "rounded to zero": ("cvt.rn.f16.f32 lo, a;", "cvt.rz.f16.f32 lo, a;"),
    "bf16 rounded to zero": ('_ROUND_FP16.replace("f16.f32", "bf16.f32")', '_ROUND_FP16.replace("f16.f32", "bf16.f32").replace("cvt.rn", "cvt.rz")'),
    "integer bf16 half up": ('"mov.b32 table, a; " "bfe.u32 bit, table, 16, 1; "  # the lowest bit kept\n "add.u32 bit, bit, 0x7fff; "', '"mov.b32 table, a; mov.b32 bit, 0x8000; "'),
    "integer bf16 spoils NaN": ("setp.nan.f32 isnan, b, b;", "setp.ne.f32 isnan, b, b;"),
    "halves of a register swapped": ("tl.where(lane < 8, 0x5410, 0x7632)", "tl.where(lane < 8, 0x7632, 0x5410)"),
    "one block's scale for both": ('"add.u32 row, row, 1; "', '""'),
    "scales of another row": ("* (THREADS // 8) + (thread >> 4) * 2", "* (THREADS // 4) + (thread >> 4) * 2"),
    "blocks of 64 whatever the blocksize": (">> (LOG2_BLOCK - 6)", ">> 0"),
    "second level of 256 whatever it is": ("(block >> LOG2_BLOCK2), mask=exists", "(block >> 8), mask=exists"),
    "last block's scale not read": ("exists = block * 8 < left", "exists = block * 8 + 7 < left"),
    "words written past the end": ("table, lane, r, mine > r * THREADS, MODE", "table, lane, r, mine >= r * THREADS, MODE"),
    "tail forgotten": ("tl.arange(0, 8) < n_tail", "tl.arange(0, 8) < 0"),
    "results in the order of the registers": ("tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))"),
    "half of the staged code2": ("tl.gather(book2, q, 0)", "tl.gather(book2, q & 127, 0)"),
    "offset dropped": ("add.rn.f32 $0, m, $3;", "mov.f32 $0, m;"),
    "hint on what all programs share": ("(block >> LOG2_BLOCK2), mask=exists, other=0.0)", "(block >> LOG2_BLOCK2), mask=exists, other=0.0, eviction_policy=LOAD_HINT)"),
    "no hint on the packed words": ("mask=mine > r * THREADS, eviction_policy=LOAD_HINT)", "mask=mine > r * THREADS)"),
    "no hint on the stores": (STORED, "mask=mask[:, None])"),
    "32-bit offsets": ("first = pid.to(tl.int64) * TILE", "first = pid * TILE * 8 // 8"),
    "launches of other settings kept": ("launches.clear() compiled_launches.clear()", "pass"),
}  # fmt: skip
ON_GPU = {
    "assembly used for any alignment": ("weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0 second", "True\n    second"),
    "replay: weight's alignment ignored": ("if address & 3 or address ==", "if address =="),
    "replay: out's alignment ignored": ("launch.dtype) and out.data_ptr() % 16 == 0)", "launch.dtype))"),
    "cache: unaligned launches kept": ("aligned = weight.data_ptr() % 4 == 0 and result.data_ptr() % 16 == 0", "aligned = True"),
    "replay: a stream chosen once": ("launch.run(launch.grid, 1, 1, _stream(launch.device), *launch.before, address, result.data_ptr(), absmax.data_ptr(), launch.table, code2.data_ptr(), absmax2.data_ptr(), offset.data_ptr(), *launch.after) return result.t()", "launch.run(launch.grid, 1, 1, 0, *launch.before, address, result.data_ptr(), absmax.data_ptr(), launch.table, code2.data_ptr(), absmax2.data_ptr(), offset.data_ptr(), *launch.after)\n                return result.t()"),
    "codebook not kept alive": ("keep=(compiled, table)", "keep=compiled"),
}  # fmt: skip
BUGS = {
    **bugs(KERNEL, BITS, PORTABLE),
    **bugs(LAUNCH, BITS, LAUNCHED),
    **bugs(LAUNCH, CHECKS, CHECKED),
    **bugs(LAUNCH, CALLS, CACHED),
    **bugs(LAUNCH, COMPILED, OPERATOR),
    **bugs(REFERENCE, ORACLE, REFERRED),
    **bugs(KERNEL, GPU, ASSEMBLY, gpu=True),
    **bugs(LAUNCH, GPU, ON_GPU, gpu=True),
}
GAP = r"(?:\s|(?<=\s)#.*)*"  # layout and comments


def occurrences(text, old):
    """Where the words and signs of `old` follow each other in `text`, however it is laid out."""
    parts = []
    for part in re.findall(r"\w+|[^\w\s]", re.sub(r"\s#.*", "", old)):
        word = rf"\b{part}\b" if part[0].isalnum() or part[0] == "_" else re.escape(part)
        parts.append(rf"(?:,{GAP})?{word}" if part in (")", "]", "}") else word)  # a trailing comma is layout
    return [match.span() for match in re.finditer(GAP.join(parts), text)]


def seeded(bug):
    """The text of the bug's file with the bug in it."""
    text = (machine.ROOT / bug.file).read_text(encoding="utf-8")
    places = occurrences(text, bug.old)
    assert len(places) == 1, f"occurs {len(places)} times in {bug.file}, expected once: {bug.old}"
    ((first, last),) = places
    return text[:first] + bug.new + text[last:]


@pytest.mark.parametrize("name", BUGS)
def test_every_row_still_applies(name):
    """Its fragment occurs once, and what comes of it is Python, and other code."""
    bug = BUGS[name]
    before, after = (machine.ROOT / bug.file).read_text(encoding="utf-8"), seeded(bug)
    assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))


@pytest.mark.parametrize("text", ["y = f(a, b) + g[1]", "y = f(\n    a,  # a comment\n    b,\n) + g[1]"])
def test_layout_does_not_matter(text):
    assert [text[first:last][-1] for first, last in occurrences(text, "f(a, b) + g")] == ["g"]
    assert not occurrences(text, "b + g") and not occurrences(text, "f(a, b) + g[1] g")


def run_tests(tests, gpu, folder, bug=None):
    """(exit status, output) of tests in a copy of the repository with a bug; the status is None if they do not
    end. Bugs of the CPU are run in the interpreter on a GPU machine, too."""
    for part in ("helpers", "tests"):
        shutil.copytree(machine.ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in machine.ROOT.iterdir():
        if part.is_file():
            shutil.copy(part, folder)
    if bug:
        (folder / bug.file).write_text(seeded(bug), encoding="utf-8")
    variables = {
        "PYTHONPATH": str(folder),
        "TRITON_CACHE_DIR": str(machine.ROOT / "build" / "cache" / "triton"),
    }
    if not gpu:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    variables |= {name: None for name in os.environ if name.startswith("PYTEST_")}
    command = ["-m", "pytest", "-x", "-q", "-n0", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in tests]
    done = machine.python(command, folder=folder, variables=variables, timeout=LIMIT, check=False)
    return done.status, done.out + done.err[-2000:]


def by_hand(parameters):
    """Test parameters of long tests, marked gpu where only a GPU shows the bug."""
    return [pytest.param(*each, id=name, marks=[pytest.mark.gpu] * gpu) for name, gpu, *each in parameters]


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "gpu, tests",
    by_hand(
        sorted(
            {
                (f"{'gpu' if bug.gpu else 'cpu'} {bug.tests[0]}", bug.gpu, bug.gpu, bug.tests)
                for bug in BUGS.values()
            }
        )
    ),
)
def test_control(gpu, tests, tmp_path):
    """Without a bug the tests pass."""
    status, text = run_tests(tests, gpu, tmp_path)
    assert status == 0, text[-4000:]


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", by_hand((name, bug.gpu, name) for name, bug in BUGS.items()))
def test_caught(name, tmp_path, record_property):
    """A test fails, or the process dies or does not end."""
    bug = BUGS[name]
    record_property("seeded", [name[:3], sum(other.gpu == bug.gpu for other in BUGS.values())])
    status, text = run_tests(bug.tests, bug.gpu, tmp_path, bug)
    assert status != 0, f"survived: {bug.old} -> {bug.new}"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    assert status is None or status < 0 or status in (1, 2) and failed, text[-3000:]
    print(f"{name}: {failed[:1] or status}")
