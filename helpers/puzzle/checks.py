"""What is examined beside speed: its sections are cells of the notebook."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import dataclasses
import functools
import os

import torch

from helpers.puzzle.protocol import (
    DEVICE, LEFT_BEHIND, NEEDS_GPU, ON_GPU, baselines, different, expected, must, name_of, same_bits,
    synchronize, uncounted,
)  # fmt: skip

# %% [markdown] id="evidence-threats"
# Each check examines the functions of the notebook it runs in, on layers of its own, and returns a
# sentence; what it raises is a failure. **What such checks cannot exclude:** code in the same process
# can replace torch, the profiler or the checks themselves, or recognise that it is watched and behave
# for as long. Against that stands only that the candidate's cells, all of them above, can be read.

# %% Tools of the checks id="evidence-tools" folded=true
import contextlib
import itertools
import json
import logging
import math
import pathlib
import re
import tempfile
import traceback
import warnings
from unittest import mock

KERNEL = "_your_dequantize_nf4_kernel"
HALF = (torch.float16, torch.bfloat16)
LARGE = {torch.float16: (2048, 8192), torch.bfloat16: (4096, 14336)}  # (in, out), of the protocol
HUGE = (8192, 14336)  # more than any L2 holds
CALLS = 3  # in a row under the profiler: what only some calls launch is seen


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was seen about one criterion; `passed` is None where only what it `needs` could tell."""

    criterion: str
    passed: bool | None
    text: str = ""
    needs: str = ""
    details: dict = dataclasses.field(default_factory=dict)  # the traceback of a failure

    def __str__(self):
        missing = f"not measured (needs {self.needs})" if self.passed is None else ""
        return "; ".join(filter(None, (missing, self.text)))


def check(criterion, needs_gpu=False):
    """Decorator: the sentence that a check returns becomes Evidence, and so does what it raises."""

    def wrap(function):
        @functools.wraps(function)
        def run(candidate) -> Evidence:
            library = baselines()["bitsandbytes"]
            if needs_gpu and not ON_GPU or library.fn is None:
                needs = NEEDS_GPU if library.fn else f"bitsandbytes ({library.reason})"
                return Evidence(criterion, None, needs=needs)
            try:
                text = function(candidate)
            except Exception as error:
                kind = "" if type(error) is AssertionError else f"{type(error).__name__}: "
                details = {"traceback": traceback.format_exc()[-3000:]}
                text = kind + (str(error).strip().splitlines() or [""])[0][:300]
                return Evidence(criterion, False, text, details=details)
            return text if isinstance(text, Evidence) else Evidence(criterion, True, text)

        return run

    return wrap


def quantized_layer(
    in_features, out_features, dtype, nested=True, quant_type="nf4", blocksize=64, device=DEVICE, seed=3407
):
    """A Linear4bit in training mode: its (out, in) weight standard normal from `seed`, `dtype` out."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    how = dict(compress_statistics=nested, quant_type=quant_type)
    layer = Linear4bit(in_features, out_features, False, dtype, device="meta", **how)
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, device=device)
    layer.weight = Params4bit(weight, requires_grad=False, blocksize=blocksize, **how)
    layer.to(device).weight.quant_state.dtype = dtype
    return layer


def every_code(dtype, device=DEVICE):
    """A layer of all 256 bytes under each of the 256 absmax codes: 131072 elements."""
    layer = quantized_layer(64, 2048, dtype, device=device)
    layer.weight.data.copy_(torch.arange(256, device=device).repeat(256).view(-1, 1))
    layer.weight.quant_state.absmax.copy_(torch.arange(2048, device=device) // 8)
    return layer


@contextlib.contextmanager
def launched(candidate):
    """Inside the block no launch is a repetition; collects the candidate's own kernel's: the PTX of
    each machine code, or in Triton's interpreter its name."""
    cells, ran = candidate.__globals__, []
    must(KERNEL in cells, f"no {KERNEL} beside {candidate!r}: pass your_dequantize_nf4 itself")
    with cells["force"](**vars(cells["settings"]())):  # the same settings, but plans are of earlier ones
        if ON_GPU:
            cache = cells[KERNEL].device_caches[torch.cuda.current_device()][0]
            known = dict(cache)
            cache.clear()  # Triton asks here first; what it then finds or compiles is put here
            try:
                yield ran
                ran += [compiled.asm["ptx"] for compiled in cache.values()]
            finally:
                cache.update(known)
            return
        from triton.runtime.interpreter import GridExecutor

        def execute(self, *args, original=GridExecutor.__call__, **kwargs):
            ran.extend([KERNEL] * (self.fn.__name__ == KERNEL and self.fn.__globals__ is cells))
            return original(self, *args, **kwargs)

        with mock.patch.object(GridExecutor, "__call__", execute):
            yield ran


def gpu_events(call, count=CALLS):
    """(name, seconds, threads) of everything that `count` calls run on the GPU, after one call more."""
    call()
    synchronize()
    activities = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text("utf-8"))["traceEvents"]
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    sizes = [math.prod(e["args"].get("grid", [0]) + e["args"].get("block", [0])) for e in on_gpu]
    return [(e["name"], e["dur"] * 1e-6, size) for e, size in zip(on_gpu, sizes, strict=True)]


@contextlib.contextmanager
def complaints():
    """Collects the warnings that a user would see, raised or logged by torch."""
    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    loggers = [logging.getLogger(f"torch{name}") for name in ("", "._dynamo", "._inductor", "._logging")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", category)
            yield texts
    finally:
        texts += [str(warning.message) for warning in caught]
        texts[:] = [text for text in texts if "TensorFloat32" not in text]  # said of any function
        for logger in loggers:
            logger.removeHandler(handler)


# %% id="evidence-kernel"
@check("one fused kernel", needs_gpu=True)
def single_kernel(candidate):
    """Profiler: the named kernel and nothing else, over the whole tensor, no faster than its bytes."""
    from triton.testing import get_dram_gbps

    must(gpu_events(lambda: torch.ones(8, device="cuda")), "the profiler does not see the GPU")
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    peak = 1e9 * get_dram_gbps() or math.inf  # 0 where the driver does not tell
    for dtype in HALF:
        for shape in ((1024, 2048), LARGE[dtype], HUGE):
            layer, n = quantized_layer(*shape, dtype), math.prod(shape)
            what = f"{name_of(dtype)} {shape[1]}x{shape[0]}"
            events = gpu_events(lambda layer=layer: candidate(layer))
            names = [name for name, _, _ in events]
            per_call = f"{len(names) / CALLS:g} per call: {', '.join(sorted(set(names)))[:200]}"
            must(names == [KERNEL] * CALLS, f"{what}: {per_call}")
            # What does not fit in the L2 must cross DRAM, and a thread has registers for 256 elements.
            least = (n * (0.5 + 1 / 64 + 4 / 16384 + dtype.itemsize) - l2) / peak
            for _, seconds, threads in events:
                must(threads * 256 >= n, f"{what}: {threads} threads cannot decode {n} elements")
                took = f"{what}: took {seconds * 1e6:.1f} us, its bytes take {least * 1e6:.1f} us"
                must(seconds >= least, took)
    return f"profiler: {KERNEL} once per call and nothing else, in fp16 and bf16, small and large"


@check("fp16 and bf16")
def exact(candidate):
    """Every byte with every scale, and sizes that end inside a byte, a block, a tile: the same bits.

    Three calls, the last of which repeats a launch, each into memory that held NaN.
    """
    shapes = [(1, 1), (65, 1), (4097, 1), (192, 321)] + [(4096, 1024), (11008, 4096)] * ON_GPU
    cases = [None, *itertools.product(shapes, (True, False))]
    for case in cases:
        layer = quantized_layer(*case[0], HALF[0], case[1]) if case else every_code(HALF[0])
        for dtype in (*HALF, torch.float32):
            layer.weight.quant_state.dtype = dtype
            wanted = expected(layer)
            for call in (1, 2, 3) if ON_GPU else (1, 2):
                what = f"{name_of(dtype)} {tuple(wanted.shape)}, call {call}"
                torch.full_like(wanted, math.nan)  # freed at once: the result will lie here
                with launched(candidate) if call == 1 else contextlib.nullcontext([KERNEL]) as ran:
                    wrong = different(candidate(layer), wanted)
                must(not wrong, f"{what}: {wrong} elements differ from bitsandbytes")
                must(ran, f"{what}: {KERNEL} did not run")
    where = "" if ON_GPU else " (Triton's interpreter)"
    return f"{len(cases)} layers, one of all bytes under all scales: bitsandbytes' bits{where}"


# %% id="evidence-ptx"
ASSEMBLY = ("shfl.sync.idx", "prmt", "mul.rn.ftz")  # what the kernel's own assembly is made of
HINTS = {
    "evict_first loads": r"\bld\.global\S*evict_first",
    "streaming loads": r"\bld\.global\S*\.cs\b",
    "evict_first stores": r"\bst\.global\S*evict_first",
    "streaming stores": r"\bst\.global\S*\.cs\b",
}


def assembly_in(ptx):
    """Which of ASSEMBLY stand in inline assembly; Triton's own loads are inline assembly, too."""
    blocks = "".join(re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.S))
    return [mnemonic for mnemonic in ASSEMBLY if mnemonic in blocks]


def hints_in(ptx):
    """Which of HINTS the global loads and stores carry."""
    return [name for name, pattern in HINTS.items() if re.search(pattern, ptx)]


def on_and_off(candidate, field, find, least):
    """Run with a setting on and off: the same bits, and `least` or more finds in the PTX, or none."""
    cells, texts = candidate.__globals__, {}
    chosen = vars(cells["settings"]())
    must(chosen[field], f"switched off: {chosen['reason']}")
    for dtype in HALF:
        for layer in (every_code(dtype), quantized_layer(*LARGE[torch.float16], dtype)):
            elements = f"{layer.weight.quant_state.shape.numel():,}"
            for on in (True, False):
                with cells["force"](**chosen | {field: on}), launched(candidate) as ran:
                    wrong = different(candidate(layer), expected(layer))
                what = f"{name_of(dtype)}, {elements} elements, {field}={on}"
                must(not wrong, f"{what}: {wrong} elements differ from bitsandbytes")
                must(ran, f"{what}: {KERNEL} did not run")
                for ptx in ran:
                    text = ", ".join(find(ptx))
                    good = len(find(ptx)) >= least if on else not text
                    must(good, f"{what}: {text or 'nothing'} in the PTX that ran")
                    if on:
                        texts.setdefault(text, []).append(elements)
    where = (f"{text} at {' and '.join(dict.fromkeys(at))} elements" for text, at in texts.items())
    return f"identical output with and without; absent when disabled; in the PTX: {'; '.join(where)}"


@check("custom assembly", needs_gpu=True)
def custom_asm(candidate):
    """Its instructions are in the PTX that ran, and gone with the assembly off."""
    return on_and_off(candidate, "asm", assembly_in, len(ASSEMBLY))


@check("cache eviction", needs_gpu=True)
def cache_eviction(candidate):
    """Hints are in the PTX that ran, which ones depends on the size, and gone with them off."""
    return on_and_off(candidate, "hints", hints_in, 1)


# %% id="evidence-compile"
# Inductor on a card without native bf16: its warning, and what torch raises with fullgraph=True.
NO_BF16 = "bfloat16 compilation"
REFUSALS = ("BF16 is not supported", "fullgraph=True found no compiled frames")


def compiled(candidate, layer, fullgraph):
    """Compile a function of the layer, with no graph of another run at hand, and call it.

    Returns its error, its warnings, what is wrong with its graph and what with its result."""
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
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    graph = [f"{graphs} graphs"] * (graphs != 1) + [f"graph breaks: {breaks}"] * bool(breaks)
    result = [f"{wrong} elements differ from bitsandbytes"] * bool(wrong)
    with launched(candidate) as ran:
        function(layer)
    result += ["another kernel ran than the one beside it"] * (not ran)
    if ON_GPU:
        names = [name for name, _, _ in gpu_events(lambda: function(layer))]
        result += [f"{CALLS} calls ran {names}"] * (names != [KERNEL] * CALLS)
    return "", warned, graph, result


@check("torch.compile")
def torch_compile(candidate):
    """fullgraph=True in fp16 and bf16: one graph, no break, no warning, exact, the kernel alone."""
    text = "one graph, no break, no warning, exact"
    for dtype in HALF:
        layer = quantized_layer(*(LARGE[dtype] if ON_GPU else (128, 64)), dtype)
        error, warned, graph, result = compiled(candidate, layer, fullgraph=True)
        faults = [error] * bool(error) + warned + graph + result
        no_bf16 = ON_GPU and not torch.cuda.is_bf16_supported(including_emulation=False)
        if faults and no_bf16 and dtype == torch.bfloat16:
            # With its warning Inductor refuses, and the function must run as it is, and be right.
            plain_error, plain_warned, _, plain_result = compiled(candidate, layer, fullgraph=False)
            refused = not error or any(text in error for text in REFUSALS)
            said = all(any(NO_BF16 in text for text in texts) for texts in (warned, plain_warned))
            right = not (result or plain_error or plain_result)
            must(refused and said and right, f"bf16, which this card lacks: {'; '.join(faults)}")
            text += "; bf16, which this card lacks, is not compiled (Inductor's warning): exact, the "
            text += f"kernel alone; fullgraph=True {'raises its error' if error else 'does the same'}"
        else:
            must(not faults, f"{name_of(dtype)}: {'; '.join(faults)}")
    if not ON_GPU:
        return Evidence("torch.compile", None, f"traced, not compiled: {text}", NEEDS_GPU)
    return f"fullgraph=True: {text}; {KERNEL} once per call and nothing else"


# %% id="evidence-memory"
@check("no large buffers", needs_gpu=True)
def no_large_buffers(candidate):
    """Three new layers, 70 calls each: nothing but the output is allocated, and nothing is kept.

    A first call may keep small tables; what torch does not count shows in what the device has left.
    """
    past_torch = []
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
            text = f"call {call + 1}: allocates {peak:,} bytes for {size:,} and keeps {kept:,}"
            must(peak <= size + tables and kept <= tables, text)
        past_torch.append(uncounted() - before)
    must(min(past_torch) <= LEFT_BEHIND, f"keeps {min(past_torch) >> 20} MiB of each layer past torch")
    return "3 layers, 70 calls each: the output alone, and nothing kept, in torch's memory and past it"


@check("no synchronization", needs_gpu=True)
def no_sync(candidate):
    """Neither a layer's first call nor the next waits for the GPU, as far as torch can see."""
    layer = quantized_layer(1024, 1024, torch.float16)
    candidate(quantized_layer(1024, 1024, torch.float16))  # compiled
    synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        candidate(layer), candidate(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no wait that torch can see, in a layer's first call and the next"


@check("new output")
def fresh_output(candidate):
    """Each call gives a tensor of its own: writing into some changes no other and no later one."""
    layer = quantized_layer(128, 64, torch.float16)
    wanted, results = expected(layer), [candidate(layer) for _ in range(8)]
    wrong = sum(not same_bits(result, wanted) for result in results)
    must(not wrong, f"{wrong} of 8 results differ from bitsandbytes")
    storages = len({result.untyped_storage().data_ptr() for result in results})
    must(storages == 8, f"results share memory: {storages} storages for 8 results")
    for result in results[:7]:
        result.fill_(math.nan)
    after = same_bits(results[7], wanted) and same_bits(candidate(layer), wanted)
    must(after, "overwriting 7 of 8 results changes the last or the next")
    return "8 results in 8 storages; overwriting 7 changes neither the last nor the next"


CHECKS = (single_kernel, torch_compile, custom_asm, cache_eviction, exact)  # with points
CHECKS += (no_large_buffers, no_sync, fresh_output)


def examine(candidate, checks=CHECKS, tick=print) -> dict[str, Evidence]:
    """Run checks and say a line each; {name of the check: Evidence}."""
    evidence = {}
    for one in checks:
        evidence[one.__name__] = seen = one(candidate)
        tick(f"{({True: 'yes', False: 'NO'}).get(seen.passed, '-'):4}{seen.criterion}: {seen}")
    return evidence
