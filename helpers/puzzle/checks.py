"""Check what the puzzle asks for beside speed: the sections are cells of the notebook."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import functools
import itertools
import math
import os
import statistics
import tempfile
import types
from unittest import mock

import torch

from helpers.nf4.reference import different, every_code, quantized_layer, same_bits
from helpers.puzzle.protocol import (
    NEEDS_GPU, ON_GPU, SHORT, assert_whole, baselines, expected, gpu_events, must,
    synchronize,
)  # fmt: skip

# %% One fused kernel; fp16 and bf16; custom assembly; cache eviction id="checks-kernel" folded=true
import contextlib
import re
import typing
import unittest

HALF = (torch.float16, torch.bfloat16)
LARGE = {torch.float16: (2048, 8192), torch.bfloat16: (4096, 14336)}  # (in, out), of the protocol
HUGE = (8192, 14336)  # larger than any L2
CALLS = 3  # profiled in a row: sees what only some calls launch


class Evidence(typing.NamedTuple):
    """What a check found; `passed` is None where it could not tell."""

    criterion: str
    passed: bool | None
    text: str


def need(true, what, note=""):
    if not true:
        raise unittest.SkipTest(f"not measured (needs {what}){note}")


def check(criterion, needs_gpu=False):
    """Decorate a check. It returns evidence, raises to fail, or raises SkipTest if something is missing."""

    def wrap(function):
        @functools.wraps(function)
        def run(candidate) -> Evidence:
            try:
                need(baselines()["bitsandbytes"].fn, baselines()["bitsandbytes"].reason)
                need(ON_GPU or not needs_gpu, NEEDS_GPU)
                return Evidence(criterion, True, function(candidate))
            except unittest.SkipTest as missing:
                return Evidence(criterion, None, str(missing))
            except Exception as error:
                kind = "" if type(error) is AssertionError else f"{type(error).__name__}: "
                return Evidence(criterion, False, kind + str(error).strip().partition("\n")[0][:300])

        return run

    return wrap


def kernels(candidate):
    """Return the Triton functions among the candidate's globals, without their autotuners."""
    found = []
    for value in list(getattr(candidate, "__globals__", {}).values()):
        while type(value).__module__.startswith("triton.") and hasattr(value, "fn"):
            if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
                found.append(value)
                break
            value = value.fn
    need(found, f"a Triton kernel among the globals of {candidate!r}, to see that it ran")
    return found


@contextlib.contextmanager
def launched(candidate):
    """Collect the PTX of every kernel of the candidate's that the block launches (its name, if interpreted).

    `force` empties the launch cache. Without one a launch cannot be seen, and counts as one.
    """
    ours, cells, ran = kernels(candidate), candidate.__globals__, []
    if not ON_GPU:
        from triton.runtime.interpreter import GridExecutor

        def execute(self, *args, original=GridExecutor.__call__, **kwargs):
            name, names = self.fn.__name__, self.fn.__globals__
            if any(kernel.fn.__name__ == name and kernel.fn.__globals__ is names for kernel in ours):
                ran.append(name)
            return original(self, *args, **kwargs)

        with mock.patch.object(GridExecutor, "__call__", execute):
            yield ran
        return
    if "force" not in cells:
        yield ["unseen"]
        return
    with cells["force"](**vars(cells["settings"]())), contextlib.ExitStack() as stack:
        caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in ours]
        for cache in caches:
            stack.callback(cache.update, dict(cache))
            cache.clear()  # Triton looks here first, and puts what it compiles or finds on disk here
        yield ran
        ran += [compiled.asm["ptx"] for cache in caches for compiled in cache.values()]


def differs(candidate, layer, wanted=None):
    """Return how many elements of the candidate's result differ from bitsandbytes'."""
    result = candidate(layer)
    must(type(result) is torch.Tensor, f"the result is a {type(result).__name__}, not a Tensor")
    return different(result, expected(layer) if wanted is None else wanted)


@check("One fused kernel", needs_gpu=True)
def single_kernel(candidate):
    """Profile small and large layers: one kernel per call, enough threads, no faster than its bytes."""
    known = {kernel.fn.__name__ for kernel in kernels(candidate)}
    must(gpu_events(lambda: torch.ones(8, device="cuda")), "the profiler does not see the GPU")
    for dtype in HALF:
        for shape in ((1024, 2048), LARGE[dtype], HUGE):
            layer, what = quantized_layer(*shape, dtype), f"{SHORT[dtype]} {shape[1]}x{shape[0]}"
            events = gpu_events(lambda layer=layer: candidate(layer), CALLS)
            names = [name for name, _, _ in events]
            alone = len(names) == CALLS and len(set(names)) == 1 and known.issuperset(names)
            must(alone, f"{what}: {len(names) / CALLS:g} per call: {', '.join(sorted(set(names)))[:200]}")
            for event in events:
                assert_whole([event], [layer], what)
    return f"{names[0]} once per call and nothing else, in fp16 and bf16, 2M to 117M elements (profiler)"


@check("Tested in fp16 and bf16")
def exact(candidate):
    """Compare every byte under every scale, and sizes that end inside a byte, a block, a tile.

    Three calls, the last of which replays a launch, each into memory that held NaN.
    """
    shapes = [(1, 1), (65, 1), (4097, 1), (192, 321)] + [(4096, 1024), (11008, 4096)] * ON_GPU
    cases = [None, *itertools.product(shapes, (True, False))]
    for case in cases:
        layer = quantized_layer(*case[0], HALF[0], case[1]) if case else every_code(HALF[0])
        for dtype in (*HALF, torch.float32):
            layer.weight.quant_state.dtype = dtype
            wanted = expected(layer)
            for call in (1, 2, 3) if ON_GPU else (1, 2):
                what = f"{SHORT[dtype]} {tuple(wanted.shape)}, call {call}"
                torch.full_like(wanted, math.nan)  # freed at once: the result gets this memory
                with launched(candidate) if call == 1 else contextlib.nullcontext(["seen"]) as ran:
                    wrong = differs(candidate, layer, wanted)
                must(not wrong, f"{what}: {wrong} elements differ from bitsandbytes")
                must(ran, f"{what}: the kernel did not run")
    return (
        f"0 elements differ from bitsandbytes in {len(cases)} layers, each in fp16, bf16 and fp32; one layer "
        "has every byte under every scale"
    )


INSTRUCTION = r"(?:^\s*\{?|;)\s*(?:@!?\S+\s+)?([a-z]+(?:\.[a-z]+(?![a-z0-9]))*)"
FAULTS = {"shfl.sync.idx": "shfl.sync.bfly", "prmt.b32 ": "prmt.b32.f4e ", "mul.rn": "add.rn"}


def assembly_in(ptx):
    """Return the instructions in inline assembly but moves, loads and stores, which Triton writes so too."""
    blocks = "\n".join(re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.S))
    found = re.findall(INSTRUCTION, blocks, re.M)
    return {text for text in found if text.split(".")[0] not in ("ld", "st", "mov", "createpolicy")}


def hints_in(ptx):
    """Return the eviction hints that global loads and stores carry."""
    found = re.findall(r"\b(ld|st)\.global(?:\S*(evict_\w+)|\S*\.(cs))", ptx)
    words = {"ld": "loads", "st": "stores", "cs": "streaming"}
    return {f"{words.get(evict or cs, evict)} {words[kind]}" for kind, evict, cs in found}


def on_and_off(candidate, field, find):
    """Run with a setting on and off: exact both times. Return what only the PTX with it on has, by size."""
    cells, texts = getattr(candidate, "__globals__", {}), {}
    settings_of = cells.get("settings", dict)
    need("force" in cells and hasattr(settings_of(), field), f"force({field}=False) beside the candidate")
    chosen = vars(settings_of())
    must(chosen[field], f"switched off: {chosen['reason']}")
    for dtype in HALF:
        for layer in (every_code(dtype), quantized_layer(*LARGE[torch.float16], dtype)):
            elements, found = f"{layer.weight.quant_state.shape.numel():,}", {}
            size = f"{SHORT[dtype]}, {elements} elements"
            for on in (True, False):
                with cells["force"](**chosen | {field: on}), launched(candidate) as ran:
                    wrong = differs(candidate, layer)
                must(not wrong, f"{size}, {field}={on}: {wrong} elements differ from bitsandbytes")
                must(ran, f"{size}, {field}={on}: the kernel did not run")
                found[on] = [find(ptx) for ptx in ran]
            for instructions in found[True]:
                only = ", ".join(sorted(instructions.difference(*found[False])))
                must(only, f"{size}: {field}=True adds nothing to the PTX")
                texts.setdefault(only, {})[elements] = None
    where = (f"{text} at {' and '.join(at)} elements" for text, at in texts.items())
    return f"in the PTX that ran, and absent when disabled: {'; '.join(where)}"


def with_fault(kernel, old, new):
    """Return a copy of a kernel with `new` for `old` in the constants it uses; None if none has it."""
    import triton

    names = dict(kernel.fn.__globals__)
    texts = {name: x.value for name, x in names.items() if isinstance(x, triton.language.constexpr)}
    faulty = {name: text.replace(old, new) for name, text in texts.items() if old in str(text)}
    names |= {name: triton.language.constexpr(text) for name, text in faulty.items()}
    for name, value in kernel.fn.__globals__.items():
        if isinstance(value, triton.JITFunction):
            function = types.FunctionType(value.fn.__code__, names, None, value.fn.__defaults__)
            function.__annotations__ = value.fn.__annotations__
            kept = ("do_not_specialize", "do_not_specialize_on_alignment")
            names[name] = triton.jit(function, **{name: getattr(value, name) for name in kept})
    return names[kernel.fn.__name__] if faulty else None


def faults_seen(candidate, kernel="_your_dequantize_nf4_kernel"):
    """Seed a fault into each kind of instruction of the assembly: other bits must come out."""
    layer, cells, seen, reason = every_code(HALF[0]), candidate.__globals__, [], "no constant holds it"
    for old, new in FAULTS.items():
        try:
            wrong = with_fault(cells[kernel], old, new)
            if wrong is None:
                continue
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                variables = mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder)
                with variables, mock.patch.dict(cells, {kernel: wrong}), launched(candidate) as ran:
                    differ = differs(candidate, layer)
            must(any(new in ptx for ptx in ran), "the PTX that ran does not have it")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            continue
        must(differ, f"replacing {old} by {new} changes no bit: the assembly has no effect")
        seen.append(old.strip())
    return f"a fault in {', '.join(seen)} changes the result" if seen else f"no fault seeded ({reason})"


@check("Custom assembly works", needs_gpu=True)
def custom_asm(candidate):
    """Find its instructions in the PTX that ran, only with the assembly on; a fault in them must show."""
    return f"{on_and_off(candidate, 'asm', assembly_in)}; {faults_seen(candidate)}"


def hints_pay(candidate):
    """Time the kernel with cache hints and without, in turns, over more layers than the L2 holds."""
    layers, turns = [quantized_layer(1024, 4096, HALF[1]) for _ in range(12)], {True: [], False: []}
    for _, on in itertools.product(range(3), turns):
        with candidate.__globals__["force"](hints=on):
            events = gpu_events(lambda: [candidate(layer) for layer in layers], 1)
        turns[on].append(statistics.median(seconds for _, seconds, _ in events))
    if max(turns[True]) >= min(turns[False]):
        return "no effect on the time measured"
    ratio = statistics.median(turns[False]) / statistics.median(turns[True])
    return f"{ratio:.2f}x faster with them (4.2M elements, bf16)"


@check("Uses cache eviction", needs_gpu=True)
def cache_eviction(candidate):
    """Find hints in the PTX that ran (which ones depends on the size), only with them on, and time them."""
    return f"{on_and_off(candidate, 'hints', hints_in)}; {hints_pay(candidate)}"


# %% torch.compile; no large buffers; no synchronization; new output id="checks-use" folded=true
import logging
import textwrap
import warnings

# Inductor on a card without native bf16: its warning, and what torch raises with fullgraph=True.
NO_BF16 = "bfloat16 compilation"
REFUSALS = ("BF16 is not supported", "fullgraph=True found no compiled frames")


@contextlib.contextmanager
def complaints():
    """Collect the warnings that a user would see, raised or logged by torch."""
    texts, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    loggers = [logging.getLogger(f"torch{name}") for name in ("", "._dynamo", "._inductor", "._logging")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)  # Unsloth silences them
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", category)
            yield texts
    finally:
        texts += [str(warning.message) for warning in caught]
        texts[:] = [text for text in texts if "TensorFloat32" not in text]  # given for any function
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def compiled(candidate, layer, fullgraph):
    """Compile a function of the layer, with empty caches, and call it.

    Returns its error, its warnings, what is wrong with its graph and what with its result.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = "inductor" if ON_GPU else "aot_eager"
    function = torch.compile(lambda layer: candidate(layer), fullgraph=fullgraph, backend=backend)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, complaints() as warned:
        try:
            with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
                wrong = different(function(layer), expected(layer))
        except Exception as error:
            return f"{type(error).__name__}: {error}", warned, [], []
    graphs = counters["stats"]["unique_graphs"]
    graph = [f"{graphs} graphs"] * (graphs != 1)
    result = [f"{wrong} elements differ from bitsandbytes"] * bool(wrong)
    with launched(candidate) as ran:
        function(layer)
    result += ["the candidate's own kernel did not run"] * (not ran)
    if ON_GPU:
        names = [name for name, _, _ in gpu_events(lambda: function(layer), CALLS)]
        known = {kernel.fn.__name__ for kernel in kernels(candidate)}
        alone = len(names) == CALLS and known.issuperset(names)
        result += [f"{CALLS} calls ran {names}"] * (not alone)
    return "", warned, graph, result


@check("Works under torch.compile")
def torch_compile(candidate):
    """Compile with fullgraph=True in fp16 and bf16: one graph, no break, no warning, exact, one kernel."""
    text = "fullgraph=True in fp16 and bf16: one graph, no break, no warning, exact"
    for dtype in HALF:
        layer = quantized_layer(*(LARGE[dtype] if ON_GPU else (128, 64)), dtype)
        error, warned, graph, result = compiled(candidate, layer, fullgraph=True)
        faults = [error] * bool(error) + warned + graph + result
        no_bf16 = ON_GPU and not torch.cuda.is_bf16_supported(including_emulation=False)
        if faults and no_bf16 and dtype == torch.bfloat16:
            # Inductor warns and refuses: the function must then run eagerly, and be exact.
            plain_error, plain_warned, _, plain_result = compiled(candidate, layer, fullgraph=False)
            refused = not error or any(text in error for text in REFUSALS)
            said = all(any(NO_BF16 in text for text in texts) for texts in (warned, plain_warned))
            right = not (result or plain_error or plain_result)
            must(refused and said and right, f"bf16, which this card lacks: {'; '.join(faults)}")
            text += "; Inductor does not compile bf16 on this card (its warning): "
            text += "the call runs eagerly, exact"
            text += ", and fullgraph=True raises Inductor's error" * bool(error)
        else:
            must(not faults, f"{SHORT[dtype]}: {'; '.join(faults)}")
    need(ON_GPU, NEEDS_GPU, f"; traced, not compiled: {text}")
    return f"{text}; one kernel per call"


def uncounted() -> int:
    """Return the bytes in use on the GPU that torch's allocator does not know of."""
    synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@check("No large buffers", needs_gpu=True)
def no_large_buffers(candidate):
    """Call three new layers 70 times each: only the output is allocated, and nothing is kept.

    A first call may keep small tables, and the first of all may compile or tune.
    """
    outside = []
    for dtype in (*HALF, HALF[0]):
        layer = quantized_layer(*HUGE, dtype)
        size, before = layer.weight.quant_state.shape.numel() * 2, uncounted()
        for call in range(70):
            torch.cuda.reset_peak_memory_stats()
            start, tables = torch.cuda.memory_allocated(), 1024 if call == 0 else 0
            result = candidate(layer)
            peak = torch.cuda.max_memory_allocated() - start
            del result
            kept = torch.cuda.memory_allocated() - start
            text = f"call {call + 1}: allocates {peak:,} bytes for an output of {size:,} and keeps {kept:,}"
            tuning = call == 0 and len(outside) < len(HALF)
            must((tuning or peak <= size + tables) and kept <= tables, text)
        outside.append(uncounted() - before)
    must(min(outside) <= 8 << 20, f"keeps {min(outside) >> 20} MiB of each layer outside torch's memory")
    return "only the output is allocated and nothing is kept, in 70 calls of each of 3 layers"


@check("No synchronization", needs_gpu=True)
def no_sync(candidate):
    """Run a layer's first call and the next in torch's mode that reports a wait for the GPU."""
    layer = quantized_layer(1024, 1024, torch.float16)
    candidate(quantized_layer(1024, 1024, torch.float16))  # compiled
    synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        candidate(layer), candidate(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "torch sees no wait for the GPU in a layer's first call and the next"


@check("New output")
def fresh_output(candidate):
    """Check that each call returns memory of its own: writing into some changes no other and no later one."""
    layer = quantized_layer(128, 64, torch.float16)
    wanted, results = expected(layer), [candidate(layer) for _ in range(8)]
    wrong = sum(type(x) is not torch.Tensor or not same_bits(x, wanted) for x in results)
    must(not wrong, f"{wrong} of 8 results differ from bitsandbytes")
    storages = len({result.untyped_storage().data_ptr() for result in results})
    must(storages == 8, f"results share memory: {storages} storages for 8 results")
    for result in results[:7]:
        result.fill_(math.nan)
    after = same_bits(results[7], wanted) and same_bits(candidate(layer), wanted)
    must(after, "overwriting 7 of 8 results changes the last or the next")
    return "8 calls return 8 storages; overwriting 7 changes neither the last nor the next"


CHECKS = (single_kernel, torch_compile, custom_asm, cache_eviction, exact)  # with points
CHECKS += (no_large_buffers, no_sync, fresh_output)


def examine(candidate, checks=CHECKS) -> dict[str, Evidence]:
    """Run checks and print one line each: verdict, criterion, evidence. Returns {check's name: Evidence}."""
    evidence = {}
    for one in checks:
        evidence[one.__name__] = seen = one(candidate)
        verdict = {True: "yes", False: "NO", None: "-"}[seen.passed]
        print(textwrap.fill(f"{verdict:4}{seen.criterion}: {seen.text}", 105, subsequent_indent=" " * 8))
    return evidence
