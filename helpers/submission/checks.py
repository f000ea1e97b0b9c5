"""One function a criterion of the marking table: the candidate in, evidence out.

The candidate is the live `your_dequantize_nf4`; the kernel, `settings`, `force` and `compile_spec` come from
the namespace in which it was defined: the notebook's own cells are what is examined. A check that cannot run
on this machine returns `passed=None` and what it needs; a check that raises has failed.
"""

import contextlib
import copy
import functools
import gc
import importlib.util
import logging
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch

from helpers.machine import environment
from helpers.measure import clocks
from helpers.oracle import baselines, reference
from helpers.submission import harness
from helpers.oracle.layers import quantized_layer

KERNEL = "_your_dequantize_nf4_kernel"
ASSEMBLY = ("shfl.sync.idx", "prmt", "mul.rn.ftz")  # what the kernel's own assembly is made of
EVICTION = {
    "evict_first load": r"\bld\.global\S*evict_first",
    "streaming load": r"\bld\.global\S*\.cs\b",
    "evict_first store": r"\bst\.global\S*evict_first",
    "streaming store": r"\bst\.global\S*\.cs\b",
}
GPU = "an NVIDIA GPU"
HALF = (torch.float16, torch.bfloat16)
CALLS = 3  # profiled in a row: what only some of the calls launch is seen
SMALL = (1024, 2048)  # (in_features, out_features) of the kernel's tile for small tensors
LARGE = {torch.float16: (2048, 8192), torch.bfloat16: (4096, 14336)}  # of the other; the protocol's shapes
TABLES = 1024  # bytes that a first call may keep: the codebooks, rounded up by the allocator
# Inductor on a card without native bf16: its warning, and what torch then raises under fullgraph=True.
NO_BF16 = "bfloat16 compilation"
REFUSALS = ("BF16 is not supported", "fullgraph=True found no compiled frames")
# Shown by torch for any compiled function; they say nothing about this one.
UNRELATED_WARNINGS = ("TensorFloat32 tensor cores",)
QUIET_CATEGORIES = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


@dataclass(frozen=True)
class Evidence:
    """What was found about one criterion.

    `passed` is None where this machine cannot tell, and `needs` says what could. `text` is one sentence for
    the marking table, `details` holds the facts behind it (JSON types).
    """

    criterion: str
    passed: bool | None
    details: dict = field(default_factory=dict)
    needs: str = ""
    text: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def _check(criterion: str, needs_gpu: bool = True):
    """Decorator: the function returns (passed, text, details) or Evidence; what it raises is a failure."""

    def wrap(function):
        @functools.wraps(function)
        def run(*args, **kwargs) -> Evidence:
            if needs_gpu and not environment.has_gpu():
                return Evidence(criterion, None, needs=GPU)
            if importlib.util.find_spec("bitsandbytes") is None:
                return Evidence(criterion, None, needs="bitsandbytes")
            try:
                found = function(*args, **kwargs)
            except Exception as error:
                details = {"traceback": traceback.format_exc()[-3000:]}
                text = f"{type(error).__name__}: {_first_line(str(error))}"
                return Evidence(criterion, False, details, text=text)
            if isinstance(found, Evidence):
                return found
            passed, text, details = found
            return Evidence(criterion, passed, details, text=text)

        return run

    return wrap


@_check("single kernel")
def single_kernel(candidate: Callable):
    """Exactly one thing runs on the GPU per call, and it is the kernel that the puzzle names."""
    details = {}
    for dtype in HALF:
        for shape in (SMALL, LARGE[dtype]):
            layer = quantized_layer(*shape, dtype, device="cuda")
            key = f"{_name(dtype)} {_rows_by_columns(shape)}"
            details[key] = _on_device(lambda layer=layer: candidate(layer), CALLS)
    if all(_only_the_kernel(names) for names in details.values()):
        return True, f"profiler: {KERNEL} and nothing else, once per call: {', '.join(details)}", details
    bad = {key: names for key, names in details.items() if not _only_the_kernel(names)}
    key = max(bad, key=lambda key: len(bad[key]))
    seen = ", ".join(sorted(set(bad[key])))[:200] or "nothing on the GPU"
    return False, f"profiler: {key}: {len(bad[key]) / CALLS:g} per call: {seen}", details


def speed(comparison: harness.Comparison, name: str, baseline: str) -> Evidence:
    """How many times as fast as `baseline` the candidate `name` ran the protocol: details["ratio"]."""
    criterion = f"speed against {baseline}"
    mine, theirs = comparison.entries[name], comparison.entries.get(baseline)
    if mine.failure:
        return Evidence(
            criterion, False, {"failure": mine.failure}, text=f"no time: {_first_line(mine.failure)}"
        )
    if not mine.seconds:
        return Evidence(criterion, None, needs=GPU)
    if theirs is None:
        return Evidence(criterion, None, needs=f"{baseline} in the comparison")
    if not theirs.seconds:
        why = theirs.reason or f"a {theirs.label} that passes: {_first_line(theirs.failure)}"
        return Evidence(criterion, None, needs=f"{theirs.label} ({why})" if theirs.reason else why)
    ratio = comparison.speedup(name, baseline)
    details = {"ratio": ratio, "candidate": mine.spread, "baseline": theirs.spread}
    details |= {"rounds": comparison.rounds, "repeats": comparison.repeats, "configs": comparison.configs}
    details |= {"version": theirs.version, "note": theirs.note}
    text = f"{ratio:.3f}x: {mine.spread['p50']:.4f} s against {theirs.spread['p50']:.4f} s ({theirs.label})"
    return Evidence(criterion, ratio > 1.0, details, text=text)


@_check("official checks", needs_gpu=False)
def official_checks(comparison: harness.Comparison, name: str):
    """The candidate passed every check of the protocol in every configuration, at the default tolerances."""
    entry = comparison.entries[name]
    details = {"configs": comparison.configs, "checked against": comparison.checked_against}
    if entry.failure:
        return False, _first_line(entry.failure), details | {"failure": entry.failure}
    bits = "every bit equal" if entry.identical else "close, not bit-equal"
    where = "" if comparison.repeats else ", small sizes in Triton's interpreter"
    text = f"{len(comparison.configs)} configurations against {comparison.checked_against}: {bits}{where}"
    return True, text, details | {"identical": entry.identical}


@_check("torch.compile")
def torch_compile(candidate: Callable):
    """`fullgraph=True` without a break or a warning, exact, one kernel and no copy inside the compiled call.

    On a card without native bf16, Inductor refuses bf16 graphs: there bf16 must come out exact, from the
    kernel alone and without an exception, when torch.compile is asked without `fullgraph`. The text says
    which of the two happened.
    """
    details, texts = {}, []
    for dtype in HALF:
        layer = quantized_layer(*LARGE[dtype], dtype, device="cuda")
        what = f"{_name(dtype)} {_rows_by_columns(LARGE[dtype])}"
        found = _compiled(candidate, layer, fullgraph=True)
        if dtype == torch.bfloat16 and not environment.native_bf16() and not found["good"]:
            found = _stepped_aside(found, _compiled(candidate, layer, fullgraph=False))
            texts.append(f"{what} {found['text']}")
        elif found["good"]:
            texts.append(f"{what} with fullgraph=True exact, one graph, {KERNEL} once per call, nothing else")
        else:
            texts.append(f"{what} with fullgraph=True: {found['why']}")
        details[_name(dtype)] = found
    return all(found["good"] for found in details.values()), "; ".join(texts), details


def _stepped_aside(strict, plain):
    """What became of a bf16 function on a card without native bf16: `good`, and `text` for the table.

    strict, plain: what `_compiled` found with and without `fullgraph`. Inductor must have complained about
    bf16 in both. Asked for fullgraph, torch 2.11 runs the function uncompiled all the same (with Inductor's
    cache it does, without it raises), 2.13 raises. Any other error, or reason not to compile, is a fault.
    """
    facts = {"fullgraph": strict, "plain": plain}
    for found in (strict, plain):
        complained = any(NO_BF16 in text for text in found["warnings"])
        if "error" in found:
            fine = found is strict and any(text in found["error"] for text in REFUSALS)
        else:
            fine = found["exact"] and _only_the_kernel(found["kernels"])
        if not (complained and fine):
            why = found["why"] or "compiled, but only without fullgraph=True"
            return facts | {"good": False, "text": f"on a card without native bf16: {why}"}
    same = "raises torch's own error" if "error" in strict else "does the same"
    how = "not compiled, Inductor steps aside with a warning (no native bf16)"
    return facts | {"good": True, "text": f"{how}: exact, the kernel alone; fullgraph=True {same}"}


def _compiled(candidate, layer, fullgraph):
    """What happens when a function of `layer` is compiled and called: facts, and `good` with `why` not."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda layer: candidate(layer), fullgraph=fullgraph)
    try:
        with _complaints() as complaints, _no_older_graphs():
            result = compiled(layer)
            torch.cuda.synchronize()
    except Exception as error:
        why = f"{type(error).__name__}: {_first_line(str(error))}"
        facts = {"warnings": complaints, "error": str(error)[-2000:]}
        return {"good": False, "why": why, "exact": False} | facts
    exact = reference.same_bits(result, expected(layer))
    kernels = _on_device(lambda: compiled(layer), CALLS)
    breaks = dict(counters["graph_break"])
    graphs = counters["stats"]["unique_graphs"]
    faults = {
        f"graph breaks: {breaks}": breaks,
        f"{graphs} graphs instead of one": graphs != 1,
        f"warnings: {'; '.join(complaints)[:300]}": complaints,
        "the result is not exact": not exact,
        f"ran on the GPU in {CALLS} calls: {kernels}": not _only_the_kernel(kernels),
    }
    why = "; ".join(text for text, fault in faults.items() if fault)
    facts = {"graph_breaks": breaks, "graphs": graphs, "warnings": complaints, "kernels": kernels}
    return {"good": not why, "why": why, "exact": exact} | facts


@contextlib.contextmanager
def _no_older_graphs():
    """Inductor's disk cache is new and empty inside the block. The usual one serves graphs and does not ask
    what the card can do: a run with a T4's decisions forced would get the bf16 graph of one without."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
            yield


@contextlib.contextmanager
def _complaints():
    """Collects the warnings and the log records of torch (WARNING and above) that a user would see."""
    found = []

    class Collect(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    handler = Collect(logging.WARNING)
    loggers = [
        logging.getLogger(name) for name in ("torch", "torch._dynamo", "torch._inductor", "torch._logging")
    ]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for category in QUIET_CATEGORIES:
                warnings.simplefilter("ignore", category)
            yield found
    finally:  # what an error came with, too
        found += [str(warning.message) for warning in caught]
        found[:] = [text for text in found if not any(known in text for known in UNRELATED_WARNINGS)]
        for logger in loggers:
            logger.removeHandler(handler)


@_check("custom assembly", needs_gpu=False)
def custom_asm(candidate: Callable):
    """The assembly path ran with bitsandbytes' bits; all of ASSEMBLY is in its PTX, and none with it off.

    In fp16 and bf16 every variant of the kernel holds all three: either tile, bf16 rounded either way.
    """
    return _switch("custom assembly", candidate, "asm", _assembly, lambda found: found == list(ASSEMBLY))


@_check("cache eviction", needs_gpu=False)
def cache_eviction(candidate: Callable):
    """Eviction hints are in the PTX of each kernel that ran, and absent with the hints off.

    Which of EVICTION depends on the tile, hence on the size: the text says what was seen where.
    """
    return _switch("cache eviction", candidate, "hints", _eviction, bool)


def _switch(criterion, candidate, switch, find, enough):
    """Run, compare and read the PTX with one setting of the kernel on and off.

    find(ptx) lists what belongs to the setting, and enough(list) says whether that will do with it on.
    """
    if not environment.has_gpu():
        return Evidence(criterion, None, needs=GPU, text=_in_ptx_for_t4(switch, find))
    module = _namespace(candidate)
    settings = module["settings"]()
    details, faults, seen = {"settings": {name: str(value) for name, value in vars(settings).items()}}, [], {}
    if not getattr(settings, switch):
        return False, f"switched off: {settings.reason}", details
    for dtype in HALF:
        for layer in (every_code(dtype, "cuda"), quantized_layer(2048, 8192, dtype, device="cuda")):
            size = f"{layer.weight.quant_state.shape.numel():,}"
            for on in (True, False):
                with module["force"](**asdict(settings) | {switch: on}), _launched(module[KERNEL]) as ran:
                    wrong = reference.different(candidate(layer), expected(layer))
                each = [find(ptx) for ptx in ran]
                found = list(dict.fromkeys(mnemonic for some in each for mnemonic in some))
                key = f"{_name(dtype)}, {size} elements, {'on' if on else 'off'}"
                details[key] = {"found": found, "wrong elements": wrong, "kernels that ran": len(ran)}
                if wrong:
                    faults.append(f"{key}: {wrong} elements differ from bitsandbytes")
                if not ran:
                    faults.append(f"{key}: {KERNEL} did not run")
                if any(not enough(some) if on else some for some in each):
                    faults.append(f"{key}: {', '.join(found) or 'nothing'} in the PTX of a kernel that ran")
                if on:
                    seen[_name(dtype), size] = ", ".join(found)
    text = f"ran, exact; in its PTX, and gone when off: {_where_seen(seen)}"
    return not faults, "; ".join(faults) or text, details


def _where_seen(seen):
    """{(dtype, size): text} in words, each text once for the dtypes and sizes that share it."""
    dtypes, sizes = {}, {}
    for (dtype, size), text in seen.items():
        dtypes.setdefault((text, size), []).append(dtype)
    for (text, size), names in dtypes.items():
        sizes.setdefault((text, " and ".join(names)), []).append(size)
    return "; ".join(f"{text} ({names}, {' and '.join(n)} elements)" for (text, names), n in sizes.items())


@_check("fp16 and bf16", needs_gpu=False)
def dtypes(candidate: Callable):
    """The kernel itself ran in fp16 and in bf16, with bitsandbytes' bits for every code with every scale."""
    device = "cuda" if environment.has_gpu() else "cpu"
    details, faults = {}, []
    for dtype in HALF:
        layer = every_code(dtype, device)
        results = []
        ran = launches(lambda layer=layer, results=results: results.append(candidate(layer)))
        wrong = sum(reference.different(result, expected(layer)) for result in results)
        details[_name(dtype)] = {"wrong elements": wrong, "elements": results[0].numel(), "ran": ran}
        if wrong:
            faults.append(f"{_name(dtype)}: {wrong} elements differ from bitsandbytes")
        if not any(KERNEL in name for name in ran):
            faults.append(f"{_name(dtype)}: {KERNEL} did not run (ran: {', '.join(ran) or 'nothing'})")
    if faults:
        return False, "; ".join(faults), details
    where = "" if device == "cuda" else " (in Triton's interpreter)"
    return True, f"both exact: 256 bytes x 256 scales against bitsandbytes{where}", details


@_check("exact", needs_gpu=False)
def exact(candidate: Callable):
    """Bit equality with bitsandbytes: every code with every scale, random layers, odd and partial sizes.

    On a GPU the first call of a layer and the next, both into memory full of NaN.
    """
    device = "cuda" if environment.has_gpu() else "cpu"
    sizes = [(1, 1), (3, 1), (63, 1), (65, 1), (4097, 1), (128, 96), (192, 321)]
    sizes += [(4096, 1024), (2048, 8192), (11008, 4096)] if device == "cuda" else []

    def layers():
        yield "every code", every_code(torch.float16, device)
        for inner, outer in sizes:
            for nested in (True, False):
                layer = quantized_layer(inner, outer, torch.float16, nested=nested, device=device)
                yield f"{outer}x{inner} {'nested' if nested else 'flat'}", layer

    count, faults = 0, []
    for key, layer in layers():
        count += 1
        for dtype in reference.DTYPES:
            layer.weight.quant_state.dtype = dtype  # quantized once for all three
            wanted = expected(layer)
            for call in range(2 if device == "cuda" else 1):
                wrong = reference.different(_poisoned(candidate, layer), wanted)
                if wrong:
                    faults.append(f"{key} {_name(dtype)}, call {call + 1}: {wrong} elements differ")
    text = f"{count} layers, each in fp16, bf16 and fp32: every bit equal to bitsandbytes"
    return not faults, "; ".join(faults)[:300] or text, {"layers": count, "faults": faults}


def _poisoned(candidate, layer):
    """candidate(layer), after the memory that torch's allocator will hand out for it was filled with NaN.

    On a GPU: the same size is served from the same place. The CPU's allocator promises nothing.
    """
    state = layer.weight.quant_state
    if layer.weight.is_cuda:
        torch.full(state.shape, float("nan"), dtype=state.dtype, device="cuda")
    return candidate(layer)


@_check("no synchronization")
def no_sync(candidate: Callable):
    """Nothing that torch's sync debug mode can see waits, for a layer seen before and for one never seen."""
    old, new = (quantized_layer(1024, 1024, torch.float16, device="cuda", seed=seed) for seed in (1, 2))
    candidate(old)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        candidate(old)
        candidate(new)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    text = "no wait that torch.cuda.set_sync_debug_mode('error') can see, for a seen and an unseen layer"
    return True, text, {}


@_check("no large buffers")
def no_large_buffers(candidate: Callable):
    """At a layer's first call and the next the peak allocation is the output's, and nothing is kept.

    The first call may add small tables (TABLES).
    """
    details, texts = {}, []
    for dtype, rows in zip(HALF, (12288, 14336), strict=True):  # more bytes than any layer before
        layer = quantized_layer(8192, rows, dtype, device="cuda")
        state = layer.weight.quant_state
        output, _ = _memory(lambda state=state: torch.empty(state.shape, dtype=state.dtype, device="cuda"))
        first, kept = _memory(lambda layer=layer: candidate(layer))
        peak, kept_later = _memory(lambda layer=layer: candidate(layer))
        good = first <= output + TABLES and kept <= TABLES and peak == output and kept_later <= 0
        details[_name(dtype)] = found = {"output": output, "first peak": first, "first kept": kept}
        found |= {"peak": peak, "kept": kept_later, "good": good}
        what = "the output alone, at the first call and the second"
        if not good:
            what = f"the output; first call: peak {_mib(first)}, keeps {_mib(kept)}"
            what += f"; second: {_mib(peak)}, keeps {_mib(kept_later)}"
        texts.append(f"{_name(dtype)}: {_mib(output)}, {what}")
    return all(found["good"] for found in details.values()), "; ".join(texts), details


@_check("new output", needs_gpu=False)
def fresh_output(candidate: Callable):
    """Every call gives a tensor of its own: writing into some changes no other, and no later one."""
    device = "cuda" if environment.has_gpu() else "cpu"
    layer = quantized_layer(128, 64, torch.float16, device=device)
    wanted = expected(layer)
    *results, last = [candidate(layer) for _ in range(8)]
    wrong = sum(not reference.same_bits(result, wanted) for result in (*results, last))
    if wrong:
        return False, f"{wrong} of 8 results kept differ from bitsandbytes", {}
    storages = len({result.untyped_storage().data_ptr() for result in (*results, last)})
    for result in results:
        result.fill_(float("nan"))
    unchanged = reference.same_bits(last, wanted) and reference.same_bits(candidate(layer), wanted)
    if storages < 8 or not unchanged:
        changed = "" if unchanged else ", and overwriting 7 changes the last or the next"
        return False, f"results share memory: {storages} storages for 8 results{changed}", {}
    return True, "8 results kept, 8 storages; overwriting 7 changes neither the last nor the next", {}


def every_code(dtype: torch.dtype, device: str):
    """A real Linear4bit holding all 256 bytes under each of the 256 absmax codes (131072 elements)."""
    layer = quantized_layer(64, 2048, dtype, device=device)
    state = layer.weight.quant_state
    layer.weight.data.copy_(torch.arange(256, device=device).repeat(256).view(-1, 1))
    state.absmax.copy_(torch.arange(2048, device=device) // 8)
    return layer


def expected(layer) -> torch.Tensor:
    """bitsandbytes' own weight of a layer.

    On the CPU it decodes one row of even length: with AVX512 it takes wrong blocks in rows that are not whole
    blocks (0.50.2), and odd rows go through a torch.compile of their own.
    """
    dequantize, weight = baselines.available()["bitsandbytes"].fn, layer.weight
    if weight.is_cuda:
        return dequantize(layer)
    state = copy.copy(weight.quant_state)
    shape, n = state.shape, state.shape.numel()
    state.shape = torch.Size([1, n + n % 2])
    row = dequantize(SimpleNamespace(weight=SimpleNamespace(data=weight.data.view(-1, 1), quant_state=state)))
    result = row.flatten()[:n].view(shape)
    return result.t() if weight.shape[0] == 1 else result


def launches(call: Callable) -> list[str]:
    """Names of what one `call` ran: all GPU activity (profiler), or the kernels interpreted on the CPU.

    On the GPU `call` runs twice, once to warm up.
    """
    return _on_device(call, 1) if environment.has_gpu() else _interpreted(call)


def _on_device(call, count):
    """Names of everything that ran on the GPU during `count` calls, after one more to warm up."""
    names = [name for name, _ in clocks.device_events(lambda _: call(), count)]
    if not names and not clocks.device_events(lambda _: torch.ones(8, device="cuda").add_(1)):
        raise RuntimeError("the profiler records no GPU activity here: CUPTI is missing or in use")
    return names


def _interpreted(call):
    """Names of the kernels that Triton's interpreter launched during one call."""
    from triton.runtime import interpreter

    original, names = interpreter.GridExecutor.__call__, []

    def counted(self, *args, **kwargs):
        names.append(self.fn.__name__)
        return original(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted
    try:
        call()
    finally:
        interpreter.GridExecutor.__call__ = original
    return names


def _only_the_kernel(names):
    return len(names) == CALLS and all(KERNEL in name for name in names)


def _memory(call):
    """(bytes that one call allocates at most, bytes still there without its result)."""
    gc.collect()  # nothing older is freed meanwhile
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak, torch.cuda.memory_allocated() - before


def _assembly(ptx):
    """Which of the kernel's own mnemonics stand between inline assembly markers.

    Triton writes its loads and stores as inline assembly too: the markers alone prove nothing.
    """
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.S)
    return [mnemonic for mnemonic in ASSEMBLY if any(mnemonic in block for block in blocks)]


def _eviction(ptx):
    """Which eviction hints the global loads and stores of a PTX text carry."""
    return [name for name, pattern in EVICTION.items() if re.search(pattern, ptx)]


def _namespace(candidate):
    """The globals in which the candidate was defined, with the kernel and its companions."""
    names = getattr(candidate, "__globals__", {})
    missing = [name for name in (KERNEL, "settings", "force", ) if name not in names]
    if missing:
        raise LookupError(f"no {', '.join(missing)} beside {candidate!r}: pass your_dequantize_nf4 itself")
    return names


@contextlib.contextmanager
def _launched(kernel):
    """Collects the PTX of each machine code that a Triton kernel is launched as inside the block."""
    cache = kernel.device_caches[torch.cuda.current_device()][0]
    known, ptx = dict(cache), []
    cache.clear()  # Triton asks here first; what it then finds or compiles is put here
    try:
        yield ptx
        ptx += [compiled.asm["ptx"] for compiled in cache.values()]
    finally:
        cache.update(known)


def _in_ptx_for_t4(switch, find):
    """Without a GPU: what the kernel's PTX for a T4 says, in a sentence. It ran nowhere: no verdict."""
    try:
        ptx = _cross_compiled()
    except Exception as error:
        return f"cross-compiling for sm_75 failed: {_first_line(str(error))}"
    on, off = find(ptx["default"]), find(ptx[switch])
    found = f"{', '.join(on) or 'nothing'} (switched off: {', '.join(off) or 'none'})"
    return f"its fp16 PTX for large tensors on sm_75 holds {found}"


@functools.cache
def _cross_compiled():
    """PTX of the notebook's fp16 kernel for a T4: as it is there, and with one setting off."""
    from helpers.t4 import cross_compile

    request = {"source": "ours", "arch": 75, "out_dtype": "float16", "nested": True}
    forced = {"default": {}, "asm": {"asm": False}, "hints": {"hints": False}}
    built = cross_compile.build([request | {"force": overrides} for overrides in forced.values()])
    for found in built:
        if found.error:
            raise cross_compile.CompileError(found.error)
    return {name: found.ptx for name, found in zip(forced, built, strict=True)}


def _rows_by_columns(shape):
    return f"{shape[1]}x{shape[0]}"


def _mib(size):
    return f"{size / 2**20:.1f} MiB"


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _first_line(text):
    return (text.strip().splitlines() or [""])[0][:200]
