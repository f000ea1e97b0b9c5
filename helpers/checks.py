"""One function a criterion of the marking table: the candidate in, evidence out.

The candidate is the live `your_dequantize_nf4`; the kernel, `settings`, `force` and `compile_spec` come from
the namespace in which it was defined: the notebook's own cells are what is examined. A check that cannot run
on this machine returns `passed=None` and what it needs; a check that raises has failed.
"""

import contextlib
import copy
import functools
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

from helpers import baselines, environment, harness, reference, timing
from helpers.layers import quantized_layer

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
    """Exactly one thing runs on the GPU a call, and it is the kernel that the puzzle names."""
    details = {}
    for dtype in HALF:
        layer = quantized_layer(1024, 2048, dtype, device="cuda")
        details[_name(dtype)] = _on_device(lambda layer=layer: candidate(layer), CALLS)
    if all(_only_the_kernel(names) for names in details.values()):
        return True, f"profiler: {KERNEL} and nothing else, once a call, in fp16 and bf16", details
    seen = {name for names in details.values() for name in names}
    most = max(len(names) for names in details.values()) / CALLS
    return (
        False,
        f"profiler: {most:g} a call: {', '.join(sorted(seen))[:200] or 'nothing on the GPU'}",
        details,
    )


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
        layer = quantized_layer(1024, 2048, dtype, device="cuda")
        found = _compiled(candidate, layer, fullgraph=True)
        if dtype == torch.bfloat16 and not environment.native_bf16() and not found["good"]:
            found = _stepped_aside(found, _compiled(candidate, layer, fullgraph=False))
            texts.append(f"{_name(dtype)} {found['text']}")
        elif found["good"]:
            texts.append(f"{_name(dtype)} with fullgraph=True exact, one graph, {KERNEL} once, nothing else")
        else:
            texts.append(f"{_name(dtype)} with fullgraph=True: {found['why']}")
        details[_name(dtype)] = found
    return all(found["good"] for found in details.values()), "; ".join(texts), details


def _stepped_aside(strict, plain):
    """What became of a bf16 function on a card without native bf16: `good`, and `text` for the table.

    strict, plain: what `_compiled` found with and without `fullgraph`. Asked for fullgraph, torch 2.11 runs
    the function uncompiled all the same, 2.13 raises an error of its own.
    """
    facts = {"fullgraph": strict, "plain": plain}
    for found in (plain, strict):
        if "error" not in found and not (found["exact"] and _only_the_kernel(found["kernels"])):
            return facts | {"good": False, "text": f"on a card without native bf16: {found['why']}"}
    if "error" in plain:
        return facts | {"good": False, "text": f"on a card without native bf16: {plain['why']}"}
    if any("bfloat16 compilation" in text for text in plain["warnings"]):
        how = "not compiled, Inductor steps aside with a warning (no native bf16)"
    else:
        how = f"not in one graph ({strict['why']})"
    same = "raises torch's own error" if "error" in strict else "does the same"
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
        return {"good": False, "why": why, "exact": False, "error": str(error)[-2000:]}
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
        found += [str(warning.message) for warning in caught]
        found[:] = [text for text in found if not any(known in text for known in UNRELATED_WARNINGS)]
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@_check("custom assembly", needs_gpu=False)
def custom_asm(candidate: Callable):
    """The assembly path ran, gave bitsandbytes' bits, and its mnemonics are in the PTX only when it is on."""
    return _switch("custom assembly", candidate, "asm", HALF, _assembly)


@_check("cache eviction", needs_gpu=False)
def cache_eviction(candidate: Callable):
    """Eviction hints are in the PTX of the kernel that ran, and absent with the hints off."""
    return _switch("cache eviction", candidate, "hints", HALF[:1], _eviction)


def _switch(criterion, candidate, switch, dtypes, find):
    """Run, compare and read the PTX with one setting of the kernel on and off; `find` lists the mnemonics."""
    if not environment.has_gpu():
        return Evidence(criterion, None, needs=GPU, text=_in_ptx_for_t4(switch, find))
    module = _namespace(candidate)
    settings = module["settings"]()
    details, faults = {"settings": {name: str(value) for name, value in vars(settings).items()}}, []
    if not getattr(settings, switch):
        return False, f"switched off: {settings.reason}", details
    for dtype in dtypes:
        layers = [every_code(dtype, "cuda"), quantized_layer(4096, 1024, dtype, device="cuda")]
        for on in (True, False):
            with module["force"](**asdict(settings) | {switch: on}), _launched(module[KERNEL]) as ran:
                wrong = sum(reference.different(candidate(layer), expected(layer)) for layer in layers)
            each = [find(ptx) for ptx in ran]
            found = sorted({mnemonic for some in each for mnemonic in some})
            key = f"{_name(dtype)}, {'on' if on else 'off'}"
            details[key] = {"found": found, "wrong elements": wrong, "kernels that ran": len(ran)}
            if wrong:
                faults.append(f"{key}: {wrong} elements differ from bitsandbytes")
            if not ran:
                faults.append(f"{key}: {KERNEL} did not run")
            if any(bool(some) != on for some in each):
                faults.append(f"{key}: {', '.join(found) or 'nothing'} in the PTX of a kernel that ran")
    found = details[f"{_name(dtypes[0])}, on"]["found"]
    return (
        not faults,
        "; ".join(faults) or f"ran, exact; {', '.join(found)} in its PTX, none when off",
        details,
    )


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
    """Bit equality with bitsandbytes: every code with every scale, random layers, odd and partial sizes."""
    device = "cuda" if environment.has_gpu() else "cpu"
    sizes = [(1, 1), (3, 1), (63, 1), (65, 1), (4097, 1), (128, 96), (192, 321)]
    sizes += [(4096, 1024), (2048, 8192), (11008, 4096)] if device == "cuda" else []
    count, faults = 0, []
    for dtype in reference.DTYPES:
        layers = {"every code": every_code(dtype, device)}
        for inner, outer in sizes:
            for nested in (True, False):
                key = f"{outer}x{inner} {'nested' if nested else 'flat'}"
                layers[key] = quantized_layer(inner, outer, dtype, nested=nested, device=device)
        for key, layer in layers.items():
            wrong = reference.different(candidate(layer), expected(layer))
            count += 1
            if wrong:
                faults.append(f"{key} {_name(dtype)}: {wrong} elements differ")
        del layers
    text = "; ".join(faults)[:300] or f"{count} layers in fp16, bf16 and fp32, every bit as bitsandbytes'"
    return not faults, text, {"layers": count, "faults": faults}


@_check("no synchronization")
def no_sync(candidate: Callable):
    """torch's sync debug mode raises nothing, for a layer seen before and for one never seen."""
    old, new = (quantized_layer(1024, 1024, torch.float16, device="cuda", seed=seed) for seed in (1, 2))
    candidate(old)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        candidate(old)
        candidate(new)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True, "a seen and an unseen layer under torch.cuda.set_sync_debug_mode('error')", {}


@_check("no large buffers")
def no_large_buffers(candidate: Callable):
    """The peak allocation of a call is the output's, rounded as torch's allocator rounds it."""
    details = {}
    for dtype in HALF:
        layer = quantized_layer(4096, 4096, dtype, device="cuda")
        state = layer.weight.quant_state
        candidate(layer)
        plain = _peak(lambda state=state: torch.empty(state.shape, dtype=state.dtype, device="cuda"))
        details[_name(dtype)] = {"peak": _peak(lambda layer=layer: candidate(layer)), "output": plain}
    passed = all(found["peak"] == found["output"] for found in details.values())
    return (
        passed,
        "; ".join(f"{k}: peak {v['peak']} B, output {v['output']} B" for k, v in details.items()),
        details,
    )


@_check("new output", needs_gpu=False)
def fresh_output(candidate: Callable):
    """Every call gives a tensor of its own: writing into some changes no other, and no later one."""
    device = "cuda" if environment.has_gpu() else "cpu"
    layer = quantized_layer(128, 64, torch.float16, device=device)
    wanted = expected(layer)
    *results, last = [candidate(layer) for _ in range(8)]
    storages = len({result.untyped_storage().data_ptr() for result in (*results, last)})
    for result in results:
        result.fill_(float("nan"))
    right = reference.same_bits(last, wanted) and reference.same_bits(candidate(layer), wanted)
    passed = right and storages == 8
    text = "8 results kept, 8 storages; overwriting 7 changes neither the last nor the next"
    return passed, text if passed else f"results share memory: {storages} storages for 8 results", {}


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
    names = [name for name, _ in timing.device_events(lambda _: call(), count)]
    if not names and not timing.device_events(lambda _: torch.ones(8, device="cuda").add_(1)):
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


def _peak(call):
    """Bytes that one call allocates at most, from an allocator without cached blocks."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


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
    missing = [name for name in (KERNEL, "settings", "force", "compile_spec") if name not in names]
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
    return f"its PTX for sm_75 holds {', '.join(on) or 'nothing'} (switched off: {', '.join(off) or 'none'})"


@functools.cache
def _cross_compiled():
    """PTX of the notebook's fp16 kernel for a T4: as it is there, and with one setting off."""
    from helpers import cross_compile

    request = {"source": "ours", "arch": 75, "out_dtype": "float16", "nested": True}
    forced = {"default": {}, "asm": {"asm": False}, "hints": {"hints": False}}
    built = cross_compile.build([request | {"force": overrides} for overrides in forced.values()])
    for found in built:
        if found.error:
            raise cross_compile.CompileError(found.error)
    return {name: found.ptx for name, found in zip(forced, built, strict=True)}


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _first_line(text):
    return (text.strip().splitlines() or [""])[0][:200]
