"""Mutation testing of the tests: plausible bugs seeded into the kernel's code, each of which must be caught.

`python -m helpers mutants` replaces one fragment of helpers/nf4/kernel.py at a time, in a copy of the
repository, and runs the quick tests there until one fails. Without a GPU the bugs of the portable path, the
checks, the plans and the operator are tried in the interpreter; with one (`--gpu`) those of the assembly. A
mutant that survives is a hole in the tests; one whose fragment no longer occurs is named, and fails the run: so
the list cannot rot. A control, the kernel without a bug, must pass the same tests. It runs first: a mutant that
takes three times as long, an endless loop perhaps, counts as caught.
"""
# ruff: noqa: E501  (one mutant a line)

import argparse
import concurrent.futures
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from helpers import machine
from helpers.results import hashes, store as results

# From the quickest to the slowest; a run stops at the first failure.
QUICK = (
    "tests/nf4/test_kernel_bits.py::test_every_byte_with_every_scale_code",
    "tests/nf4/test_layouts.py::test_accepted",
    "tests/nf4/test_layouts.py::test_refused",
    "tests/nf4/test_callers.py::TestOperator",
    "tests/nf4/test_bad_input.py",
    "tests/nf4/test_plans.py",
    "tests/nf4/test_kinds.py",
    "tests/nf4/test_hostile_calls.py",
    "tests/nf4/test_compiled_calls.py",
    "tests/nf4/test_kernel_bits.py",
    "tests/nf4/test_faults.py",
    "tests/stress/test_fuzz.py::test_random_cases",
)
QUICK_GPU = (
    "tests/nf4/test_kernel_bits.py::test_every_byte_with_every_scale_code",
    "tests/nf4/test_kernel_bits.py::test_special_scales",
    "tests/nf4/test_kernel_bits.py::test_subnormal_nested_scales",
    "tests/nf4/test_kernel_bits.py::test_second_level_blocksizes",
    "tests/nf4/test_kernel_bits.py::test_blocksizes",
    "tests/nf4/test_faults.py::test_hints_are_on_what_is_read_or_written_once",
    "tests/nf4/test_kernel_bits.py::test_unaligned_weight_and_output",
    "tests/nf4/test_plans.py::test_every_call_returns_memory_of_its_own",
    "tests/nf4/test_plans.py::test_a_weight_that_moves_keeps_its_plan",
    "tests/nf4/test_plans.py::test_a_weight_that_moves_to_another_alignment",
    "tests/nf4/test_plans.py::test_a_weight_left_on_the_cpu_is_refused",
    "tests/nf4/test_kinds.py::test_every_alignment_is_a_kind_of_its_own",
    "tests/nf4/test_plans.py::test_a_plan_keeps_its_codebook",
    "tests/nf4/test_callers.py::TestOperator::test_repeated_launches_are_not_stale",
    "tests/nf4/test_callers.py::TestStreams::test_launched_on_the_current_stream",
    "tests/nf4/test_layouts.py::test_more_than_2_to_the_31_elements",
    "tests/stress/test_fuzz.py::test_random_cases_on_the_gpu",
    "tests/nf4/test_kernel_bits.py::test_random_layers_of_all_sizes",
)
CONTROL = "(control: no bug)"
SURVIVED, CAUGHT, BROKEN, GONE = "survived", "caught", "could not run", "no longer applies"
CONTROL_LIMIT = 1800  # seconds


@dataclass(frozen=True)
class Mutant:
    """`old` and `new`: fragments of the kernel's text; layout and comments between the words do not count."""

    name: str
    old: str
    new: str
    gpu: bool = False  # only a GPU shows it


PORTABLE = (
    Mutant("low nibble first", "(4 - 4 * (e & 1))", "(4 * (e & 1))"),
    Mutant("block index off by one", "block = e >> LOG2_BLOCK", "block = (e + 1) >> LOG2_BLOCK"),
    Mutant("scale of the second level by element", "(block >> LOG2_BLOCK2), mask=mask", "(block >> 7), mask=mask"),
    Mutant("byte offset sign-extended", "_scale(tl.load(code2_ptr + q.to(tl.int32)), absmax2,", "_scale(tl.load(code2_ptr + q.to(tl.int8).to(tl.int32)), absmax2,"),
    Mutant("offset dropped", "return _multiply(code2, absmax2, FLUSH) + offset", "return _multiply(code2, absmax2, FLUSH)"),
    Mutant("FMA", "return _multiply(code2, absmax2, FLUSH) + offset",
           "return (code2.to(tl.float64) * absmax2.to(tl.float64) + offset.to(tl.float64)).to(tl.float32)"),
    Mutant("offset before the product", "return _multiply(code2, absmax2, FLUSH) + offset", "return _multiply(code2, absmax2 + offset, FLUSH)"),
    Mutant("bf16 truncated", "bits + 0x7FFF + ((bits >> 16) & 1))", "bits)"),
    Mutant("bf16 rounded half up", "bits + 0x7FFF + ((bits >> 16) & 1))", "bits + 0x8000)"),
    Mutant("NaN rounded like a number", "tl.where(value != value, 0x7FFF0000, bits + 0x7FFF + ((bits >> 16) & 1))", "bits + 0x7FFF + ((bits >> 16) & 1)"),
    Mutant("store without a mask", "tl.store(out_ptr + e, value.to(out_ptr.dtype.element_ty), mask=mask)", "tl.store(out_ptr + e, value.to(out_ptr.dtype.element_ty))"),
    Mutant("mask one too far", "mask = e < n_words.to(tl.int64) * 8 + n_tail", "mask = e <= n_words.to(tl.int64) * 8 + n_tail"),
    Mutant("odd tail forgotten", "mask = e < n_words.to(tl.int64) * 8 + n_tail", "mask = e < n_words.to(tl.int64) * 8"),
    Mutant("last program missing", "grid = -(-n // (", "grid = max(1, n // ("),
    Mutant("one codebook value a digit short", "0.7229568362236023, 1.0)", "0.7229568, 1.0)"),
    Mutant("fp4's code 8 without its sign", "FP4 += tuple(-value for value in FP4)", "FP4 += tuple(0.0 - value for value in FP4)"),
    Mutant("nf4's codebook for fp4", 'table[16:] if values[2] == "fp4" else table', "table"),
    Mutant("flushed on the CPU too", "FLUSH=not INTERPRETED", "FLUSH=True"),
    Mutant("a constant for state2.blocksize", "log2_block, log2_block2, n % 8 != 0", "log2_block, 8, n % 8 != 0"),
    Mutant("W.t() not transposed", "and weight.shape[0] == 1 else out", "and False else out"),
)  # fmt: skip
CHECKS = (
    Mutant("absmax length unchecked", '_require_tensor("absmax", absmax, (torch.uint8,), device, blocks)', '_require_tensor("absmax", absmax, (torch.uint8,), device, 0)'),
    Mutant("blocks rounded down", "-(-sizes[0] // values[3])", "sizes[0] // values[3]"),
    Mutant("second level rounded down", "-(-blocks // blocksize2)", "blocks // blocksize2"),
    Mutant("code2 length unchecked", "code2, float32, device, 256", "code2, float32, device, 0"),
    Mutant("weight length unchecked", "_require(weight.nbytes * 2 >= n", "_require(weight.nbytes * 2 >= n - 2"),
    Mutant("weight without a dimension accepted", "_require(weight.dim() > 0", "_require(True"),
    Mutant("weight that is not packed accepted", "and not unpacked", ""),
    Mutant("dtypes unchecked", "_require(tensor.dtype in dtypes,", "_require(True,"),
    Mutant("devices unchecked", "_require(tensor.device == device,", "_require(True,"),
    Mutant("strides unchecked", "_require(tensor.is_contiguous(),", "_require(True,"),
    Mutant("freed tensors accepted", "_require(_in_memory(tensor),", "_require(True,"),
    Mutant("offset of many elements accepted", "_require(offset.numel() == 1,", "_require(True,"),
    Mutant("any blocksize", "size & (size - 1) == 0", "True"),
    Mutant("repacked layers accepted", '"packing_format_for_cpu"', '"no_such_field"'),
    Mutant("second level of another dtype accepted", "_require(dtype2 == torch.float32,", "_require(True,"),
    Mutant("out unchecked", "_require(given == expected,", "_require(True,"),
)  # fmt: skip
# What a plan compares before it is repeated: one comparison at a time is left out.
COMPARED = {
    "weight's storage": "storage.nbytes() == weight_bytes",
    "where the weight's storage is": "storage.data_ptr() == base",
    "absmax's address": "absmax.data_ptr() == absmax_at",
    "code2's address": "code2.data_ptr() == code2_at",
    "absmax2's address": "absmax2.data_ptr() == absmax2_at",
    "offset's address": "offset.data_ptr() == offset_at",
    "absmax's storage": "absmax_now() == absmax_bytes",
    "code2's storage": "code2_now() == code2_bytes",
    "absmax2's storage": "absmax2_now() == absmax2_bytes",
    "another kernel": "kernel is _your_dequantize_nf4_kernel",
    "forced settings": "forced is _forced",
    "a hook": "_hooks.launch_enter_hook is _enter",
    "hooks in the chain": "not (_enter_calls or _exit_calls)",
    "overlap of out and weight": "(end <= first or last <= start)",
    "size of out": "out.shape == size",
}
OPERANDS = "weight, absmax, code2, absmax2, offset"
PLANS = (
    *(Mutant(f"plan: {what} ignored", f"and {comparison}", "") for what, comparison in COMPARED.items()),
    *(
        Mutant(f"plan: {what} ignored", "now == values", f"now[:{i}] + now[{i + 1}:] == values[:{i}] + values[{i + 1}:]")
        for i, what in {0: "shape", 1: "dtype", 2: "quant_type", 3: "blocksize", 4: "state2.dtype", 5: "state2.blocksize"}.items()
    ),
    Mutant("plan: a weight that moved is taken as it is", "weight.data_ptr() == address and _in_memory(weight)", "True"),
    Mutant("plan: weight's alignment ignored", "there = address & 3 == low and", "there =", gpu=True),
    Mutant("kind: weight's alignment ignored", "or tensors[0].data_ptr() & 3 != low", "", gpu=True),
    Mutant("kind: layouts ignored", "if not alike or", "if"),
    Mutant("kind: freed tensors accepted", "if not all(map(_in_memory, tensors)):", "if False:"),
    Mutant("kind: values ignored", "_kinds.get(_name(values), ())", "next(iter(_kinds.values()), ())"),
    Mutant("kind: a codebook of before", "codebooks, _configure, _constexprs", "0"),
    Mutant("kind: never used", "if again := _like_before(tensors, values):", "if again := None:"),
    Mutant("kind: kept without end", "_kinds.clear()", "pass"),
    Mutant("plan: weight's first address kept", "*middle, weight, out, absmax,", "*middle, arguments[0].data_ptr(), out, absmax,", gpu=True),
    Mutant("plan: layouts ignored", f"same({OPERANDS}) or other({OPERANDS}) or learns(({OPERANDS}))", "True"),
    Mutant("plan: who traces is ignored when guards learn", "if _traced() or _layout(tensors[:1])", "if _layout(tensors[:1])"),
    Mutant("plan: layouts not compared when guards learn", "learnt = _layout(aliases) == layout", "learnt = True"),
    Mutant("plan: made from tensors that may change meanwhile", "tuple(map(_alias, tensors)) (shape, dtype", "tensors\n    (shape, dtype"),
    Mutant("plan: absmax kept alive", "weakref.ref(absmax, lambda", "(absmax, lambda"),
    Mutant("plan: kept when its absmax is freed", "weakref.ref(absmax, lambda", "weakref.ref(absmax) and (lambda"),
    Mutant("plan: codebook not kept alive", "launch.keep = compiled, arguments[3]", "launch.keep = compiled,", gpu=True),
    Mutant("plan: one output for all calls", "result = _empty_cuda(size, stride, dtype)", 'result = vars(again).setdefault("result", _empty_cuda(size, stride, dtype))'),
    Mutant("plan: a stream chosen once", "launch(_stream(index), address,", "launch(0, address,", gpu=True),
    Mutant("plan: transposed results forgotten", "result.t() if transposed else result", "result"),
    Mutant("plan: out without memory accepted", "return _in_memory(out) and (", "return ("),
    Mutant("plan: strides of the first out kept", 'torch.empty(size, device="meta").stride()', "out.stride()"),
    Mutant("plan: writes into out not counted", "result = given _count_write(result)", "result = given"),
    Mutant("first call: traced calls ignored", "_traced() or _without_data(weight)", "_without_data(weight)"),
    Mutant("fake tensors have memory", "tensor.data_ptr() > start and ", ""),
    Mutant("operator: fake of the wrong dtype", "torch.empty(shape, dtype=_values(", "torch.empty(shape, dtype=torch.float64 or _values("),
    Mutant("operator: fp4 taken for nf4", '"fp4" if kind & 4 else "nf4"', '"nf4"'),
)  # fmt: skip
COMPILED = (
    Mutant("Inductor: the operator called through the dispatcher", "lowerings[_operator] = lower", "lowerings[_operator] = dispatched"),
    Mutant("Inductor: a part of a tensor taken for all of it", "whole.get_numel() == weight.get_numel()", "True"),
    Mutant("Inductor: a strided tensor taken for its contiguous view", "and layout.is_contiguous()", ""),
    Mutant("Inductor: a strided view taken for its contiguous tensor", "and layouts[0].is_contiguous()", ""),
    Mutant("Inductor: absmax in place of every tensor", "tensors[1] if x is None else x", "tensors[1]"),
    Mutant("Inductor: Python called from C++", "direct and not lowering.V.graph.cpp_wrapper", "direct"),
    Mutant("Inductor: needed in every version", "except (AssertionError, AttributeError, NotImplementedError, TypeError): pass", "except TypeError:\n            pass"),
    Mutant("operator: checks of a first call only where it is the first", "result = _first_call((weight, absmax, code2, absmax2, offset), values)", "result = torch.empty(shape, dtype=values[1], device=weight.device)"),
)  # fmt: skip
ASSEMBLY = (
    Mutant("asm: low nibble first", "f\"shr.u32 x, $4, {8 * byte + 4}; ", "f\"shr.u32 x, $4, {8 * byte}; "),
    Mutant("asm: nibbles of fp32 in order", "{4 * (k ^ 1)}", "{4 * k}"),
    Mutant("asm: FMA for the scale", "mul.rn.ftz.f32 m, $1, $2; add.rn.f32 $0, m, $3;", "fma.rn.ftz.f32 $0, $1, $2, $3;"),
    Mutant("asm: subnormals kept in the scale", "mul.rn.ftz.f32 m, $1, $2;", "mul.rn.f32 m, $1, $2;"),
    Mutant("asm: subnormals kept in the product", "mul.rn.ftz.f32 a, a, $6;", "mul.rn.f32 a, a, $6;"),
    Mutant("asm: fp16 rounded to zero", "cvt.rn.f16.f32 lo, a;", "cvt.rz.f16.f32 lo, a;"),
    Mutant("asm: bf16 rounded to zero", "cvt.rn.bf16.f32 hi, b;", "cvt.rz.bf16.f32 hi, b;"),
    Mutant("asm: integer bf16 half up", "mov.b32 table, a; bfe.u32 bit, table, 16, 1; add.u32 bit, bit, 0x7fff;", "mov.b32 table, a; mov.b32 bit, 0x8000;"),
    Mutant("asm: integer bf16 spoils NaN", "setp.nan.f32 isnan, b, b;", "setp.ne.f32 isnan, b, b;"),
    Mutant("asm: halves of a register swapped", "tl.where(lane < 8, 0x5410, 0x7632)", "tl.where(lane < 8, 0x7632, 0x5410)"),
    Mutant("asm: one block's scale for both", "add.u32 row, row, 1; shfl.sync.idx.b32 b,", "shfl.sync.idx.b32 b,"),
    Mutant("asm: scales of another row", "* (THREADS // 8) + (thread >> 4) * 2", "* (THREADS // 4) + (thread >> 4) * 2"),
    Mutant("asm: blocks of 64 whatever the blocksize", ">> (LOG2_BLOCK - 6)\n", ">> 0\n"),
    Mutant("asm: second level of 256 whatever it is", "(block >> LOG2_BLOCK2), mask=exists", "(block >> 8), mask=exists"),
    Mutant("asm: last block's scale not read", "exists = block * 8 < left", "exists = block * 8 + 7 < left"),
    Mutant("asm: words written past the end", "scale, table, lane, r, mine > r * THREADS,", "scale, table, lane, r, mine >= r * THREADS,"),
    Mutant("asm: tail forgotten", "tl.arange(0, 8) < n_tail", "tl.arange(0, 8) < 0"),
    Mutant("asm: results in the order of the registers", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))"),
    Mutant("asm: half of the staged code2", "tl.gather(book2, q, 0)", "tl.gather(book2, q & 127, 0)"),
    Mutant("asm: offset dropped", "add.rn.f32 $0, m, $3;", "mov.f32 $0, m;"),
    Mutant("hint on what all programs share", "(block >> LOG2_BLOCK2), mask=exists, other=0.0)", "(block >> LOG2_BLOCK2), mask=exists, other=0.0, eviction_policy=LOAD_HINT)"),
    Mutant("no hint on the packed words", "mask=mine > r * THREADS, eviction_policy=LOAD_HINT)", "mask=mine > r * THREADS)"),
    Mutant("no hint on the stores", "mask=mask[:, None], cache_modifier=STORE_HINT)", "mask=mask[:, None])"),
    Mutant("asm: used for any alignment", "weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0", "True"),
    Mutant("asm: 32-bit offsets", "first = pid.to(tl.int64) * TILE", "first = pid * TILE * 8 // 8"),
)  # fmt: skip
ASSEMBLY = tuple(replace(mutant, gpu=True) for mutant in ASSEMBLY)
MUTANTS = {mutant.name: mutant for mutant in PORTABLE + CHECKS + PLANS + COMPILED + ASSEMBLY}
GAP = r"(?:\s|(?<=\s)#.*)*"  # layout and comments


def occurrences(text: str, old: str) -> list[tuple[int, int]]:
    """Where the words and signs of `old` follow each other in `text`, as positions.

    However the text is laid out: a comma before a closing bracket is layout, too.
    """
    parts = []
    for part in re.findall(r"\w+|[^\w\s]", old):
        word = rf"\b{part}\b" if part[0].isalnum() or part[0] == "_" else re.escape(part)
        parts.append(rf"(?:,{GAP})?{word}" if part in (")", "]", "}") else word)
    return [match.span() for match in re.finditer(GAP.join(parts), text)]


def mutate(mutant: Mutant) -> str:
    """The kernel's text with the bug in it. Raises LookupError unless `old` occurs once."""
    text = hashes.KERNEL.read_text(encoding="utf-8")
    places = occurrences(text, mutant.old)
    if len(places) != 1:
        where = f"occurs {len(places)} times in the kernel, expected once"
        raise LookupError(f"{mutant.old!r} {where}: adapt helpers/stress/mutants.py")
    ((first, last),) = places
    return text[:first] + mutant.new + text[last:]


def examine(name: str, tests=(), limit: float = CONTROL_LIMIT) -> dict:
    """Run tests on one mutant, in a copy of the repository. A crash, or no end within `limit` seconds, also
    catches it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("helpers", "tests"):
            shutil.copytree(machine.ROOT / part, Path(folder, part))
        for part in ("pyproject.toml", hashes.NOTEBOOK.name):
            shutil.copy(machine.ROOT / part, folder)
        try:
            if name != CONTROL:
                kernel = Path(folder, hashes.KERNEL.relative_to(machine.ROOT))
                kernel.write_text(mutate(MUTANTS[name]), encoding="utf-8")
            verdict, by = run_tests(folder, tests or (QUICK_GPU if machine.has_gpu() else QUICK), limit)
        except LookupError as error:
            verdict, by = GONE, str(error)
    return {"mutant": name, "verdict": verdict, "by": by, "seconds": round(time.perf_counter() - start, 1)}


def run_tests(folder: str, tests, limit: float) -> tuple[str, str]:
    """(verdict, the first failed test or what else happened) of pytest in a copy of the repository."""
    cache = {"TRITON_CACHE_DIR": str(machine.ROOT / "build" / "cache" / "triton")}
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = ["-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "--no-header", "-p", "no:cacheprovider", *tests]
    done = machine.python(
        command, folder=folder, variables={"PYTHONPATH": path} | cache, timeout=limit, check=False
    )
    if done.status is None:
        return CAUGHT, f"no end after {limit:.0f} s"
    if done.status < 0:
        return CAUGHT, f"the process died of signal {-done.status}"
    if done.status == 0:
        return SURVIVED, ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", done.out, re.M)
    if done.status in (1, 2) and failed:  # a failed test; an error while tests were collected
        return CAUGHT, failed[0]
    return BROKEN, (done.out + done.err).strip()[-500:]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpu", action="store_true", help="the mutants of the assembly, on a GPU")
    parser.add_argument("--jobs", type=int, help="processes at once (default: cores less two, at most 14)")
    parser.add_argument("--only", nargs="+", default=[], help="names of mutants", choices=list(MUTANTS))
    parser.add_argument("tests", nargs="*", help="tests to run (default: the quick ones)")
    arguments = parser.parse_args(argv)
    if arguments.gpu and not machine.has_gpu():
        print(machine.no_gpu())
        return 2
    names = arguments.only or [name for name, mutant in MUTANTS.items() if mutant.gpu == arguments.gpu]
    jobs = arguments.jobs or max(1, min(14, (os.cpu_count() or 1) - 2))
    control = examine(CONTROL, arguments.tests)
    limit = 60 + 3 * control["seconds"]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        rows = pool.map(lambda name: examine(name, arguments.tests, limit), names)
        rows = list(tqdm(rows, total=len(names), unit=" mutants", mininterval=5))
    width = max(map(len, [CONTROL, *names]))
    for row in (control, *rows):
        print(f"{row['mutant']:{width}}  {row['verdict']:8}  {row['by']}  ({row['seconds']} s)")
    caught = sum(row["verdict"] == CAUGHT for row in rows)
    print(f"{caught} of {len(rows)} mutants caught; the kernel itself: {control['verdict']}")
    ok = caught == len(rows) and control["verdict"] == SURVIVED
    name, kept = "mutants_gpu" if arguments.gpu else "mutants", []
    if arguments.only:  # their rows are replaced in a whole run of this kernel, of the same tests
        stored = results.find(name, machine.result_folder())
        same = not arguments.tests and all(MUTANTS[each].gpu == arguments.gpu for each in names)
        kept = stored.data.mutants if stored and same and not results.stale(stored) else None
    if kept is not None and control["verdict"] == SURVIVED:
        rows = list({row["mutant"]: row for row in (*kept, *rows)}.values())
        caught = sum(row["verdict"] == CAUGHT for row in rows)
        print(f"written: {results.write(name, {'caught': caught, 'mutants': rows})}")
    return int(not ok)
