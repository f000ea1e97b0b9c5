"""Plausible bugs, one per line: what test_seeded_bugs.py seeds."""
# ruff: noqa: E501

from typing import NamedTuple

KERNEL, LAUNCH, REFERENCE = (f"helpers/nf4/{name}.py" for name in ("kernel", "launch", "reference"))
BITS = ("nf4/test_kernel_bits.py", "nf4/test_layouts.py", "long/test_fuzz.py")
CHECKS = ("nf4/test_bad_input.py", "nf4/test_faults.py", "nf4/test_kernel_bits.py", "nf4/test_launch.py")
CALLS = ("nf4/test_launch.py", "nf4/test_faults.py", "nf4/test_callers.py")
COMPILED = ("nf4/test_compiled.py", "nf4/test_launch.py")
CPP = ("nf4/test_compiled.py::test_otherwise_the_operator_is_called[cpp_wrapper]",)  # long
SWITCHED = ("nf4/test_switch.py", "nf4/test_switch_calls.py")
ORACLE = ("nf4/test_reference.py", "nf4/test_backend.py")
GPU = ("nf4/test_kernel_bits.py", "nf4/test_faults.py", "nf4/test_launch.py", "long/test_fuzz.py")


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
}  # fmt: skip
FORCED = {
    "settings forced for good": ("finally: apply(before)", "finally: pass"),
    "another card forced": ('if card not in (None, "t4"):', "if False:"),
}  # fmt: skip
LAUNCHED = {
    "last program missing": ("grid = -(-n // (", "grid = max(1, n // ("),
    "nf4's codebook for fp4": ('table[16:] if values[2] == "fp4" else table', "table"),
    "a constant for state2.blocksize": ("log2_block, log2_block2, n % 8 != 0", "log2_block, 8, n % 8 != 0"),
    "W.t() not transposed": ("launches[key] = (new, *known)[:32] return result.t() if weight.shape[0] == 1 else result", "launches[key] = (new, *known)[:32]\n    return result"),
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
    "out over the weight": ("if overlap or out.is_neg() or", "if out.is_neg() or"),
    "out without memory": ("or out.is_neg() or not _in_memory(out):", "or out.is_neg():"),
    "out negated": ("if overlap or out.is_neg() or", "if overlap or"),
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
    "replay: freed weights accepted": ("or address == weight.storage_offset() * weight.itemsize:", ":"),
    "replay: the storage's offset forgotten": ("address == weight.storage_offset() * weight.itemsize", "address == 0"),
    "replay: writes into out not counted": ("_count_write(result := out)", "result = out"),
    "replay: one output for all calls": ("result = _empty_cuda(launch.size, launch.stride, launch.dtype) else", 'result = globals().setdefault("_kept", {}).setdefault(launch, _empty_cuda(launch.size, launch.stride, launch.dtype))\n                else'),
    "replay: transposed results forgotten": ("return result.t() if launch.transposed else result", "return result"),
    "replay: strides of the first out kept": ('torch.empty(out.shape, device="meta").stride()', "out.stride()"),
    **{f"key: {name} ignored": (KEY, f"next((known for key, known in launches.items() if key[:{i}] + key[{i + 1}:] == (lambda key: key[:{i}] + key[{i + 1}:])((" + KEY[len("launches.get(("):-len("), ())")] + "))), ())")
       for i, name in enumerate(("shape", "dtype", "quant_type", "blocksize", "state2.dtype", "state2.blocksize")) if i != 4},
    "cache: without end": ("if len(launches) >= 1024:", "if False:"),
    "cache: unaligned launches kept": ("aligned = weight.data_ptr() % 4 == 0 and result.data_ptr() % 16 == 0", "aligned = True"),
    "cache: one launch per key": ("(new, *known)[:32]", "(new,)"),
    "cache: launches per key without end": ("(new, *known)[:32]", "(new, *known)"),
    "first call: traced calls ignored": ("if (traced or isinstance(weight, FakeTensor)) and", "if isinstance(weight, FakeTensor) and"),
    "first call: dispatch modes ignored": ("traced = _modes() or torch", "traced = torch"),
    "first call: torch.jit.trace ignored": ("or torch.jit.is_tracing() or", "or"),
    "first call: torch.func ignored": ("or _transforms() is not None or", "or"),
    "first call: meta tensors launched": ("_transforms() is not None or weight.is_meta", "_transforms() is not None"),
    "first call: fake tensors launched": ("if (traced or isinstance(weight, FakeTensor)) and", "if traced and"),
    "first call: writes into out not counted": ("else: _count_write(out)", "else: pass"),
}  # fmt: skip
OPERATOR = {
    "fake tensors have memory": ("if isinstance(tensor, FakeTensor) or not tensor.numel():", "if not tensor.numel():"),
    "out of a dispatch unchecked": ("if out is not None and (problem := _out_problem(out, weight, shape, dtype, True)):", "if False:"),
    "operator: fake of the wrong dtype": ("return torch.empty(shape, dtype=dtype, device=weight.device)", "return torch.empty(shape, dtype=torch.float64, device=weight.device)"),
    "operator: always nested": ("nested=blocksize2 is not None", "nested=True"),
    "operator: a single byte stays transposed": ("offset=offset, state2=state2)) return result.t() if weight.shape[0] == 1 else result", "offset=offset, state2=state2))\n    return result"),
    "operator: out not filled": ("result if out is None else out.copy_(result)", "result"),
    "operator: transposed results forgotten": ("out.copy_(result) return result.t() if weight.shape[0] == 1 else result", "out.copy_(result)\n    return result"),
    "operator: freed with its module": ("operators.library = library", "pass"),
    "operator: one name for all copies": ("while hasattr(getattr(torch.ops, name)", "while False and hasattr(getattr(torch.ops, name)"),
    "Inductor: the operator called through the dispatcher": ("lowerings[_operator] = lower", "lowerings[_operator] = dispatched"),
    "Inductor: a part of a tensor taken for all of it": ("and whole.get_numel() == inputs[0].get_numel()", ""),
    "Inductor: a strided tensor taken for its contiguous view": ("and whole.get_layout().is_contiguous()", ""),
    "Inductor: states unchecked": ("_check([x.meta", "len([x.meta"),
    "Inductor: absmax in place of every tensor": ("tensors[1] if x is None else x", "tensors[1]"),
    "Inductor: size asserts switched off are ignored": ("fixed and lowering.config.size_asserts and not", "fixed and not"),
    "Inductor: needed in every version": ("except Exception:  # whatever is unusual in it, the operator takes\n pass", "except TypeError:\n            pass"),
    "compiled: another kernel ignored": ("if (launch and launch.kernel is _your_dequantize_nf4_kernel and not", "if (launch and not"),
    "compiled: freed weights accepted": ("and address != weight.storage_offset() * weight.itemsize", ""),
    "compiled: an enter hook ignored": ("_current_device() and _hooks.launch_enter_hook is _enter and", "_current_device() and"),
    "compiled: an exit hook ignored": ("and _hooks.launch_exit_hook is _exit): result = _empty_cuda", "):\n            result = _empty_cuda"),
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
    "32-bit offsets": ("first = pid.to(tl.int64) * TILE", "first = pid * TILE * 8 // 8"),
    "launches of other settings kept": ("launches.clear() compiled_launches.clear()", "pass"),
}  # fmt: skip
HINTS = {
    "hint on what all programs share": ("(block >> LOG2_BLOCK2), mask=exists, other=0.0)", "(block >> LOG2_BLOCK2), mask=exists, other=0.0, eviction_policy=LOAD_HINT)"),
    "no hint on the packed words": ("mask=mine > r * THREADS, eviction_policy=LOAD_HINT)", "mask=mine > r * THREADS)"),
    "no hint on the stores": (STORED, "mask=mask[:, None])"),
}  # fmt: skip
ON_GPU = {
    "assembly used for any alignment": ("weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0 second", "True\n    second"),
    "replay: weight's alignment ignored": ("if address & 3 or address ==", "if address =="),
    "replay: out's alignment ignored": ("launch.dtype) and out.data_ptr() % 16 == 0)", "launch.dtype))"),
    "replay: a stream chosen once": ("launch.run(launch.grid, 1, 1, _stream(launch.device), *launch.before, address, result.data_ptr(), absmax.data_ptr(), launch.table, code2.data_ptr(), absmax2.data_ptr(), offset.data_ptr(), *launch.after) return result.t()", "launch.run(launch.grid, 1, 1, 0, *launch.before, address, result.data_ptr(), absmax.data_ptr(), launch.table, code2.data_ptr(), absmax2.data_ptr(), offset.data_ptr(), *launch.after)\n                return result.t()"),
}  # fmt: skip
OPERATOR_IN_CPP = {
    "Inductor: Python called from C++": ("and not graph.cpp_wrapper:", ":"),
}  # fmt: skip
# What the switch replaces, counts and says.
SWITCH = {
    "switch: off does not end it": ("library.holders.discard(self)", "pass"),
    "switch: ends although another switch holds it": ("if library.on and not library.holders:", "if library.on:"),
    "switch: never taken out": ("if library.on and not library.holders:", "if False:"),
    "switch: a closed switch is entered again": ("if self.libraries and not self.on:", "if False:"),
    "switch: replacements stay on when a library is removed": ("library.on = False  # all replacements at once", "pass  # all"),
    "switch: replacements are not taken out of modules": ("setattr(module, attribute, site.original)", "pass"),
    "switch: restore forgets other copies": ("_put_back()", "[_put_back(one.sites) for one in _libraries.values()]"),
    "switch: modules imported since are not searched": ("try:  # also if it is on", "if library.on:\n        return\n    try:  # also if"),
    "switch: a user's own modules are changed": ("in _references(PACKAGES):", "in _references():"),
    "switch: half a switch stays": ("        library.holders.clear()\n        _remove(library)\n        raise", "        raise"),
    "switch: an error in the middle leaves the first library on": ("            switch.off()\n            raise", "            raise"),
    "switch: other replacements when switched on again": ("if not library.sites or any(", "if True or any("),
    "switch: strict never raises": ("if strict:", "if False:"),
    "switch: not strict raises": ("if strict:", "if True:"),
    "switch: no warning if a named library is not switched": ("elif names and switch.refused:", "elif False:"),
    "switch: a library that nobody named is warned about": ("elif names and switch.refused:", "elif switch.refused:"),
    "switch: no self-test": ("    if not library.on:\n        _self_test()\n", ""),
    "switch: a self-test that cannot fail": ("if not same:", "if False:"),
    "switch: a failed self-test is remembered": ("    for dtype in (torch.float16, torch.bfloat16):", "    _tested.add((library, ours))\n    for dtype in (torch.float16, torch.bfloat16):"),
    "switch: self-test on the meta device": ("with torch.device(device):", "with contextlib.nullcontext():"),
    "switch: no reason for other bits on a CPU": ('* (device == "cpu")', "* 0"),
    "switch: first parameters unchecked": ("fits = tuple(have)[: len(parameters)] == parameters", "fits = True"),
    "switch: needed further parameters accepted": ("rest.default is not rest.empty and", "True and"),
    "switch: any further parameter of Unsloth's accepted": ("(more is None or rest.name in more)", "True"),
    "switch: another copy's replacement is replaced": ("if site_of(function):\n        raise", "if False:\n        raise"),
    "switch: a wrapper is taken for a replacement": ("site if site and site.replacement is function else None", "site"),
    "switch: unknown code is replaced": ("if hashlib.sha256(text.encode()).hexdigest()[:12] != KNOWN[name]:", "if False:"),
    "switch: code that cannot be read is replaced": ('return f"the code of {name} cannot be read ({error})"', "continue"),
    "switch: the product's backward may be unknown": ("_unknown(PRODUCT, AUTOGRAD, *operator)", "_unknown(PRODUCT, *operator)"),
    "switch: old products are repeated": ('if not all(_calls(part, "dequantize_4bit") for part in parts):', "if True:"),
    "switch: what is left is not counted": ("_watch(site) if why else", "None if why else"),
    "switch: what is left is not named": ("left[PRODUCT] = why", "pass"),
    "switch: a reload is not seen": ("return RELOADED if alike", "return RELOADED if False"),
    "switch: a wrapper counts as a reload": ("return RELOADED if alike", "return RELOADED if True"),
    "switch: counts of before": ("n - before.get(kind, type(n)())", "n"),
    "switch: counts after a reload": ("if gone := [", "if gone := [] and ["),
    "switch: summary of a refused switch": ('if not self.libraries:\n            return "The kernel', 'if False:\n            return "The kernel'),
    "switch: off, but it says on": ("if not self.on and names:", "if False:"),
    "switch: still on for another switch is not said": ("still_on = any(", "still_on = all([]) is None or any([]) and any("),
    "switch: in part is not said": ("works here{' in part' * self.partial}", "works here"),
    "switch: all is in part": ("bool(self.libraries and (self.left or", "bool(self.libraries and (True or"),
    "switch: a function that changed while off is not looked at": ("else REPLACED if self.library_switch.on else OTHER", "else REPLACED"),
    "switch: names taken before are not listed": ('kept[f"{module.__name__}.{attribute}"] =', "_ ="),
    "switch: partials are not listed": ("value.func if type(value) is functools.partial else value", "value"),
    "switch: kernels of their own are not listed": ("for name in OWN_KERNELS if sites and current(name)", "for name in ()"),
    "switch: every rank speaks": ('if os.environ.get("LOCAL_RANK", "0") != "0":', "if False:"),
    "switch: no handler, so nothing is seen": ("log.addHandler(_Stderr())", "log.addHandler(logging.NullHandler())"),
    "switch: the user's handler is not alone": ("if not log.handlers:", "if True:"),
    "switch: the user's level is overridden": ("if log.level == logging.NOTSET:", "if True:"),
    "switch: a quiet switch speaks": ("    if not quiet:", "    if True:"),
    "switch: peft's way is not looked at": ('calls = _calls(current(ROUTES[name]), "functional", "dequantize_4bit")', "calls = True"),
    "switch: an unknown name passes": ("if unknown := [", "if unknown := [] and ["),
    "switch: Unsloth is imported by us": ('if not asked and name != "bitsandbytes":', "if False:"),
    "switch: the variable's wait outlives a call": ("    autoload.waiting.clear()\n    switch = Switch()", "    switch = Switch()"),
    "switch: the variable's wait outlives restore": ("        autoload.waiting.clear()\n        for library", "        for library"),
    "switch: threads switch unlocked": ("    switch = Switch()\n    with _lock:", "    switch = Switch()\n    with contextlib.nullcontext():"),
    "switch: a reload forgets what is on": ('globals().get("_libraries") or', "None or"),
    "switch: replacements pickle under their own name": ("functools.update_wrapper(function, self.original, updated=())", "pass"),
    "switch: calls counted twice": ("    site.kernel += 1\n    return result\n\n\ndef _fast", "    site.kernel += 2\n    return result\n\n\ndef _fast"),
    "switch: UnsupportedState reaches the user": ("    except launch.UnsupportedState as error:\n        return site.left(error)", "    except ZeroDivisionError as error:\n        return site.left(error)"),
    "switch: compiled code is not asked whether the kernel takes it": ("if _covered(weight, state) else None", "if True else None"),
    "switch: strided scales are covered": ("if tensor.numel() < count or not tensor.is_contiguous():", "if tensor.numel() < count:"),
    "switch: strided weights are covered": ("        or not weight.is_contiguous()\n", ""),
    "switch: fp64 offsets are covered": ("(torch.float32, torch.bfloat16, torch.float16), 1)", "(torch.float32, torch.bfloat16, torch.float16, torch.float64), 1)"),
    "switch: Unsloth's other formats": ("if type(quant_state) is QuantState and library.on:", "if library.on:"),
    "switch: Unsloth's out is forgotten": ("(result := _dequantize(site, W, quant_state, out))", "(result := _dequantize(site, W, quant_state))"),
    "switch: Unsloth's further arguments are dropped": ("return original(W, quant_state, out, *more, **named)", "return original(W, quant_state, out)"),
    "switch: bitsandbytes' out is forgotten": ("(result := _dequantize(site, A, quant_state, out))", "(result := _dequantize(site, A, quant_state))"),
    "switch: a newer argument is ignored": ("and quant_state is not None and not more and not named:", "and quant_state is not None:"),
    "switch: copies keep dequantizing when off": ("if library.on and quant_state is not None", "if quant_state is not None"),
    "switch: the operator's branch when off": ("        if library.on:\n            state = State", "        if True:\n            state = State"),
    "switch: the operator's scales exchanged": ("State(absmax=absmax, code=absmax_code,", "State(absmax=absmax_code, code=absmax,"),
    "switch: the operator's dtype is the state's": ("dtype=A.dtype, quant_type=quant_type, blocksize=blocksize)", "dtype=torch.float16, quant_type=quant_type, blocksize=blocksize)"),
    "switch: the operator's row is transposed": ("weight.t() if B.shape[0] == 1 else weight, bias)", "weight, bias)"),
    "switch: forward in the state's dtype": ("state = state if state.dtype is dtype else State", "state = state if True else State"),
    "switch: the state itself changes dtype": ('State(**vars(state) | {"dtype": dtype})', "vars(state).update(dtype=dtype) or state"),
    "switch: no bias": ("return linear(A, dequantized(B, quant_state, A.dtype), bias)", "return linear(A, dequantized(B, quant_state, A.dtype))"),
    "switch: backward keeps another dtype": ("torch.matmul(grad, weight.to(grad.dtype))", "torch.matmul(grad.to(weight.dtype), weight)"),
    "switch: torch.func is ignored": ("and not _functorch():", "and True:"),
    "switch: out of a product is ignored": ("if library.on and out is None and", "if library.on and"),
    "switch: a compiled product goes past the operator": ("and not _compiling() and type(A) is tensor", "and type(A) is tensor"),
    "switch: products when off": ("if library.on and out is None", "if out is None"),
    "switch: inputs of another size": ("                    A.shape[-1] == inputs\n", "                    True\n"),
    "switch: no rows": ("                    and elements\n", ""),
    "switch: bias that needs a gradient": ("and (bias is None or not bias.requires_grad)", ""),
    "switch: nested with another blocksize": ("and (not quant_state.nested or quant_state.state2.blocksize == 256)", ""),
    "switch: a row is read as transposed": ("if B.size(0) == 1:", "if False:"),
    "switch: no gradient": ("if A.requires_grad and torch.is_grad_enabled():", "if False:"),
    "switch: products are not counted": ("                    site.kernel += 1\n", ""),
    "switch: errors of a product are ours": ("except (AttributeError, IndexError, TypeError, ValueError) as error:", "except ZeroDivisionError as error:"),
    "switch: the watch counts nothing": ("            site.library += 1\n        return original(*arguments, **named)", "            pass\n        return original(*arguments, **named)"),
}  # fmt: skip
CALLBACK = {
    "callback: the switch of an interrupted training is lost": ("        self._off()\n        self.switch = use", "        self.switch = use"),
    "callback: stays on when it ends": ("            say(self.switch.summary())\n        self._off()", "            say(self.switch.summary())"),
    "callback: stays on when deleted": ("weakref.finalize(self, self.switch.off).atexit = False", "pass"),
    "callback: not picklable while on": ('return vars(self) | {"switch": None}', "return vars(self)"),
    "callback: always quiet": ("quiet=self.quiet", "quiet=True"),
    "callback: never strict": ("strict=self.strict", "strict=False"),
    "callback: speaks although quiet": ("if self.switch and not self.quiet:", "if self.switch:"),
}  # fmt: skip
AUTOLOAD = {
    "variable: ignored": ('("", "0", "false", "off", "no")', '("", "0", "1", "false", "off", "no")'),
    "variable: off is on": ('("", "0", "false", "off", "no")', '("",)'),
    "variable: every layer switches": ("            waiting.clear()\n", ""),
    "variable: fails the import": ('    except Exception as error:\n        log.warning("NF4_TRITON=1 has no effect: %s: %s"', '    except ZeroDivisionError as error:\n        log.warning("NF4_TRITON=1 has no effect: %s: %s"'),
    "variable: fails the first layer": ("            except Exception as error:\n                log", "            except ZeroDivisionError as error:\n                log"),
    "variable: the layer is not made": ("        original(self, *arguments, **named)", "        pass"),
}  # fmt: skip
BUGS = {
    **bugs(KERNEL, BITS, PORTABLE),
    **bugs(KERNEL, BITS[:1], FORCED),
    **bugs(LAUNCH, BITS, LAUNCHED),
    **bugs(LAUNCH, CHECKS, CHECKED),
    **bugs(LAUNCH, CALLS, CACHED),
    **bugs(LAUNCH, COMPILED, OPERATOR),
    **bugs(LAUNCH, CPP, OPERATOR_IN_CPP),
    **bugs(REFERENCE, ORACLE, REFERRED),
    **bugs("helpers/nf4/switch.py", SWITCHED, SWITCH),
    **bugs("helpers/nf4/callback.py", SWITCHED, CALLBACK),
    **bugs("helpers/nf4/autoload.py", SWITCHED, AUTOLOAD),
    **bugs(KERNEL, ("t4/test_sass.py",), HINTS),
    **bugs(KERNEL, GPU, ASSEMBLY, gpu=True),
    **bugs(LAUNCH, (CALLS[-1], *GPU), ON_GPU, gpu=True),
}
