"""The checks: what they accept, what they reject, and what they say where they cannot tell."""

import contextlib
import dataclasses
import logging
import os
import types
import warnings

import pytest
import torch

from helpers.nf4 import reference
from helpers.puzzle import checks, protocol

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16
KERNEL = "_your_dequantize_nf4_kernel"
NEED_A_GPU = ["single_kernel", "custom_asm", "cache_eviction", "no_large_buffers", "no_sync", "torch_compile"]
MIB = 1 << 20


def oracle(layer):
    """Exact, but not the kernel."""
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def inexact(layer):
    return oracle(layer) * 1.01


def planted(function, module):
    return types.FunctionType(function.__code__, vars(module), None, None, function.__closure__)


def test_what_a_check_cannot_tell_is_no_verdict(monkeypatch, candidate):
    known = {"bitsandbytes": protocol.Baseline("b", "b", None, "bitsandbytes: pip could not install it")}
    with monkeypatch.context() as patch:
        patch.setattr(checks, "baselines", lambda: known)
        for check in checks.CHECKS:
            seen = check(candidate)
            assert seen.passed is None
            assert str(seen) == "not measured (needs bitsandbytes: pip could not install it)"
    if not protocol.ON_GPU:
        for name in NEED_A_GPU:
            seen = getattr(checks, name)(candidate)
            assert seen.passed is None and str(seen).startswith("not measured (needs an NVIDIA GPU)")
            assert name != "torch_compile" or "one graph, no break, no warning, exact" in seen.text
    seen = checks.exact(oracle)
    assert seen.passed is None and "a Triton kernel among the globals" in seen.needs


def test_examine_says_a_line_each(candidate):
    from helpers.nf4 import launch

    lines = []

    def broken(layer):
        raise RuntimeError("no kernel image\nmore lines")

    seen = checks.examine(candidate, (checks.fresh_output, checks.single_kernel), lines.append)
    assert list(seen) == ["fresh_output", "single_kernel"] and seen["fresh_output"].passed
    assert lines[0].startswith("yes New output: 8 calls return 8 storages")
    assert lines[1].startswith("yes One fused" if protocol.ON_GPU else "-   One fused kernel: not measured")
    failed = checks.examine(planted(broken, launch), (checks.exact,), lines.append)["exact"]
    assert lines[2] == "NO  Tested in fp16 and bf16: RuntimeError: no kernel image"
    assert failed.passed is False and "broken" in failed.details["traceback"]


# --- exact, new output ---


def test_exact_says_how_many_elements_of_which_size_differ():
    from helpers.nf4 import launch

    def wrong(layer):
        weight = _your_dequantize_nf4(layer.weight, layer.weight.quant_state)  # noqa: F821
        if weight.numel() == 4097:
            weight.view(-1)[-1] *= 1 + 2**-7
        return weight

    seen = checks.exact(planted(wrong, launch))
    assert seen.passed is False and "fp16 (1, 4097), call 1: 1 elements differ" in seen.text


def test_the_kernel_is_seen_where_it_ran(candidate, make_layer):
    layer = make_layer(64, 64, FP16)
    candidate(layer), candidate(layer)
    for function, count in ((candidate, 1), (candidate, 1), (oracle, 0)):
        with checks.launched(candidate) as ran:
            function(layer)
        assert len(ran) == count, "also where a launch could be replayed"


def test_kernels_are_found_behind_autotuners():
    import triton

    from helpers.nf4 import kernel

    jit = kernel._your_dequantize_nf4_kernel
    tuned = triton.autotune([triton.Config({})], key=[])(jit)
    assert checks.kernels(types.FunctionType(oracle.__code__, {"f": tuned})) == [jit]


@pytest.mark.gpu
def test_exact_poisons_the_memory_of_the_results(candidate):
    """What a result's memory holds; and one that is not written by the last call, the replayed one."""
    from helpers.nf4 import launch

    looked, seen, empty = [], {}, torch.empty

    def looking(layer):
        state = layer.weight.quant_state
        looked.append(bool(empty(state.shape, dtype=state.dtype, device="cuda").isnan().all()))
        return _your_dequantize_nf4(layer.weight, state)  # noqa: F821

    def lazy(layer):
        state = layer.weight.quant_state
        seen[layer, state.dtype] = seen.get((layer, state.dtype), 0) + 1
        if seen[layer, state.dtype] == 3:
            return empty(state.shape, dtype=state.dtype, device="cuda")
        return _your_dequantize_nf4(layer.weight, state)  # noqa: F821

    assert checks.exact(planted(looking, launch)).passed and all(looked)
    wrong = checks.exact(planted(lazy, launch))
    assert wrong.passed is False and "call 3" in wrong.text


# --- the PTX ---


def inline(text):
    return f"// begin inline asm\n\t{text}\n// end inline asm\n"


SCALE = inline("{ .reg .f32 m; mul.rn.ftz.f32 m, a, b; @%p1 add.rn.f32 c, m, d; mov.b32 x, {lo, hi}; }")
TRITONS = "// begin inline asm\n\tld.global.b32 { %r1 }, [ %rd1 + 0 ];\n\t// end inline asm\n"


def test_assembly_is_found_only_between_its_markers():
    own = inline("{ shfl.sync.idx.b32 x, t, x, 31, -1; prmt.b32 x, x, y, z; }")
    assert checks.assembly_in(own + SCALE) == {"shfl.sync.idx", "prmt", "mul.rn.ftz", "add.rn"}
    assert checks.assembly_in(TRITONS) == set(), "Triton's own loads are inline assembly too"
    assert checks.assembly_in(TRITONS + "prmt.b32 %r1, %r2, %r3, 0x5410;\n" + TRITONS) == set()


@pytest.mark.parametrize(
    "line, hints",
    [
        ("ld.global.L1::evict_first.b32 {%r1}, [%rd1];", {"evict_first loads"}),
        ("@%p1 ld.global.L1::evict_last.L2::cache_hint.b32 {%r1}, [%rd1], %rd2;", {"evict_last loads"}),
        ("st.global.cs.v4.b32 [%rd1], {%r1};", {"streaming stores"}),
        ("st.global.L1::evict_first.v4.b32 [%rd1], {%r1};", {"evict_first stores"}),
        ("ld.global.b32 {%r1}, [%rd1];", set()),
        ("createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;", set()),
        ("st.global.v4.b32 [%rd1], {%r1}; // .cs", set()),
    ],
)
def test_hints_are_read_from_loads_and_stores(line, hints):
    assert checks.hints_in(line) == hints


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The logic of the GPU's checks without one: small layers on the CPU, a scripted profiler."""
    made = reference.quantized_layer
    monkeypatch.setattr(checks, "ON_GPU", True)
    monkeypatch.setattr(checks, "quantized_layer", lambda i, o, dtype: made(64, 64, dtype))
    monkeypatch.setattr(checks, "every_code", lambda dtype: made(64, 32, dtype))
    monkeypatch.setattr(checks, "launched", lambda candidate: contextlib.nullcontext([KERNEL]))
    monkeypatch.setattr(checks, "gpu_events", lambda call, count=3: [(KERNEL, 1.0, 1 << 40)] * count)
    monkeypatch.setattr(checks, "assert_whole", lambda events, layers, what: None)
    named = types.SimpleNamespace(fn=types.SimpleNamespace(__name__=KERNEL))
    monkeypatch.setattr(checks, "kernels", lambda candidate: [named])
    monkeypatch.setattr(checks, "hints_pay", lambda candidate: "no effect")
    monkeypatch.setattr(checks, "faults_seen", lambda candidate: "a fault shows")
    monkeypatch.setattr(checks, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)


@dataclasses.dataclass(frozen=True)
class FakeSettings:
    asm: bool = True
    hints: bool = True
    reason: str = "tried without"


STREAMING = "st.global.cs.b32"


@pytest.mark.parametrize(
    "check, ptx, dequantize, passed, text",
    [
        ("custom_asm", lambda s: [SCALE if s.asm else TRITONS], oracle, True,
         "absent when disabled: add.rn, mul.rn.ftz at 2,048 and 4,096 elements; a fault shows"),
        ("custom_asm", lambda s: [TRITONS], oracle, False, "nothing in the PTX that asm=False lacks"),
        ("custom_asm", lambda s: [SCALE] * s.asm, oracle, False, "asm=False: the kernel did not run"),
        ("custom_asm", lambda s: [SCALE], oracle, False, "fp16, 2,048 elements: nothing in the PTX"),
        ("custom_asm", lambda s: [SCALE if s.asm else ""], inexact, False, "elements differ from bits"),
        ("cache_eviction", lambda s: [STREAMING * s.hints], oracle, True, "streaming stores at 2,048"),
        ("cache_eviction", lambda s: [STREAMING], oracle, False, "nothing in the PTX that hints=False lacks"),
    ],
)  # fmt: skip
def test_on_and_off(pretend_gpu, monkeypatch, check, ptx, dequantize, passed, text):
    """A candidate in a namespace whose PTX and results the test dictates."""
    now = [FakeSettings()]

    @contextlib.contextmanager
    def force(**overrides):
        before, now[0] = now[0], dataclasses.replace(now[0], **overrides)
        yield
        now[0] = before

    @contextlib.contextmanager
    def launched(candidate):
        ran = []
        yield ran
        ran += ptx(now[0])

    monkeypatch.setattr(checks, "launched", launched)
    names = {"settings": lambda: now[0], "force": force, "decode": dequantize}
    candidate = types.FunctionType((lambda layer: decode(layer)).__code__, names)  # noqa: F821
    seen = getattr(checks, check)(candidate)
    assert seen.passed is passed and text in seen.text, seen
    now[0] = FakeSettings(asm=False, hints=False)
    assert getattr(checks, check)(candidate).text == "switched off: tried without"
    del names["force"]
    assert "not measured (needs force(" in str(getattr(checks, check)(candidate))


def test_hints_are_timed_or_have_no_effect(monkeypatch):
    times, forced = {}, []

    @contextlib.contextmanager
    def force(hints):
        forced[:] = [hints]
        yield

    monkeypatch.setattr(checks, "quantized_layer", lambda *arguments: None)
    monkeypatch.setattr(checks, "gpu_events", lambda call, count: [("k", times[forced[0]].pop(0), 1)] * 12)
    candidate = types.FunctionType(oracle.__code__, {"force": force})
    times |= {True: [1.0, 1.1, 1.0], False: [1.2, 1.2, 1.15]}
    assert checks.hints_pay(candidate) == "1.20x faster with them (4.2M elements, bf16)"
    times |= {True: [1.0, 1.1, 1.0], False: [1.2, 1.2, 1.05]}
    assert checks.hints_pay(candidate) == "no effect on the time measured"


# --- the profiler ---


def test_single_kernel_reads_the_profile(pretend_gpu, monkeypatch):
    def profile(*events):
        monkeypatch.setattr(checks, "gpu_events", lambda call, count=3: list(events) * count)
        return checks.single_kernel(oracle)

    good = (KERNEL, 1e-3, 1 << 25)
    assert profile(good).passed
    seen = profile(("absmax", 1e-3, 1 << 25), good)
    assert seen.passed is False and f"2 per call: {KERNEL}, absmax" in seen.text
    assert profile((f"{KERNEL}_for_show", *good[1:])).passed is False
    assert "the profiler does not see the GPU" in profile().text


# --- torch.compile ---


def breaks_the_graph(layer):
    torch._dynamo.graph_break()
    return oracle(layer)


def warns(layer):
    logging.getLogger("torch._dynamo").warning("this function is odd")
    return oracle(layer)


def run_uncompiled(monkeypatch, graphs=1):
    """torch.compile as the identity: the function itself is judged."""
    from torch._dynamo.utils import counters

    def compile_(function, fullgraph, backend):
        counters["stats"]["unique_graphs"] = graphs
        return function

    monkeypatch.setattr(torch, "compile", compile_)


def test_torch_compile_rejects(pretend_gpu, monkeypatch):
    seen = checks.torch_compile(breaks_the_graph)
    assert seen.passed is False and "Unsupported" in seen.text
    run_uncompiled(monkeypatch, graphs=2)
    assert "2 graphs" in checks.torch_compile(oracle).text
    run_uncompiled(monkeypatch)
    assert checks.torch_compile(oracle).passed
    assert " elements differ" in checks.torch_compile(inexact).text
    assert "this function is odd" in checks.torch_compile(warns).text
    monkeypatch.setattr(checks, "gpu_events", lambda call, count: [(KERNEL, 1, 1), ("Memcpy DtoD", 1, 1)] * 3)
    assert "Memcpy DtoD" in checks.torch_compile(oracle).text
    monkeypatch.setattr(checks, "launched", lambda candidate: contextlib.nullcontext([]))
    assert "another kernel ran" in checks.torch_compile(oracle).text


REFUSAL = "InductorError: BF16 is not supported"


@pytest.mark.parametrize(
    "function, warning, raises, passed, text",
    [
        (oracle, True, REFUSAL, True, "exact, and fullgraph=True raises Inductor's error"),
        (oracle, True, "", True, "Inductor does not compile bf16 on this card (its warning)"),
        (inexact, True, REFUSAL, False, "elements differ"),
        (oracle, True, "cannot bf16", False, "RuntimeError: cannot bf16"),
        (oracle, False, "fullgraph=True found no compiled frames", False, "no compiled frames"),
    ],
)  # fmt: skip
def test_bf16_on_a_card_without_it(pretend_gpu, monkeypatch, function, warning, raises, passed, text):
    """Inductor refuses with its warning: what runs instead must be exact and the kernel alone."""
    run_uncompiled(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)

    def compile_(function, fullgraph, backend):
        from torch._dynamo.utils import counters

        def call(layer):
            bf16 = layer.weight.quant_state.dtype == BF16
            counters["stats"]["unique_graphs"] = 0 if bf16 else 1
            if bf16 and warning:
                message = "Some Card does not support bfloat16 compilation natively, skipping"
                warnings.warn(message, stacklevel=1)
            if bf16 and fullgraph and raises:
                raise RuntimeError(raises)
            return function(layer)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    seen = checks.torch_compile(function)
    assert seen.passed is passed and text in seen.text, seen


def test_no_graph_of_another_run_is_served(pretend_gpu, monkeypatch):
    """Inductor's disk cache is new and empty; the usual one serves graphs and does not ask the card."""
    found = []

    def looking(layer):
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if os.path.exists(folder):
            found.append((folder, os.listdir(folder)))
        return oracle(layer)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "shared")
    run_uncompiled(monkeypatch)
    assert checks.torch_compile(looking).passed
    assert len({folder for folder, _ in found}) == 2 and all(not files for _, files in found)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "shared"


def test_complaints_are_collected_and_unrelated_ones_are_not():
    with contextlib.suppress(RuntimeError), checks.complaints() as texts:
        warnings.warn("mutated inputs", UserWarning, stacklevel=1)
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
        warnings.warn("TensorFloat32 tensor cores for float32 are available", UserWarning, stacklevel=1)
        logging.getLogger("torch._inductor.utils").warning("fallback")
        logging.getLogger("torch._dynamo").info("fine")
        raise RuntimeError
    logging.getLogger("torch._dynamo").warning("after")
    assert sorted(texts) == ["fallback", "mutated inputs"]


# --- memory ---


@pytest.mark.parametrize(
    "first, peaks, kept, outside, passed, text",
    [
        (0, [0, 0], [0, 0], 0, True, "only the output is allocated"),
        (256 * MIB, [512, 0], [512, 0], 0, True, "only the output is allocated"),  # tuned, once per dtype
        (0, [16 * MIB, 0], [0, 0], 0, False, "call 1: allocates"),
        (0, [0, 0], [2048, 0], 0, False, "call 1: allocates"),
        (0, [0, MIB], [0, 0], 0, False, "call 2: allocates"),
        (0, [0, 0], [0, 512], 0, False, "call 2: allocates"),
        (0, [0, 0], [0, 0], 100 * MIB, False, "keeps 100 MiB of each layer outside torch's memory"),
    ],
)
def test_no_large_buffers_reads_the_allocator(
    pretend_gpu, monkeypatch, first, peaks, kept, outside, passed, text
):
    """Bytes beyond the output: first, in a dtype's first call; peaks and kept, in a layer's first two."""
    size, now = 64 * 64 * 2, types.SimpleNamespace(call=0, base=0, outside=0, asked=0)

    def extra(values):
        return values[now.call % 70] if now.call % 70 < 2 else 0

    def candidate(layer):
        now.outside += outside * (now.call % 70 == 0)
        return torch.empty(1)

    def allocated():
        now.asked += 1
        if now.asked % 2:  # before the call
            return now.base
        now.base += extra(kept)
        now.call += 1
        return now.base

    def peak():
        return now.base + size + extra(peaks) + first * (now.call in (0, 70))

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(checks, "uncounted", lambda: now.outside)
    seen = checks.no_large_buffers(candidate)
    assert seen.passed is passed and text in seen.text, seen


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("card", [None, "t4"])
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_passes_on_the_gpu(check, card, candidate, kernel):
    with kernel.force(card=card):
        seen = check(candidate)
    assert seen.passed, (seen.text, seen.details)
    if check is checks.custom_asm:
        assert "a fault in shfl.sync.idx, prmt.b32, mul.rn changes the result" in seen.text
    assert torch.cuda.get_sync_debug_mode() == 0
