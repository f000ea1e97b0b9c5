"""The checks: what they accept, what they reject, and what they say where they cannot tell."""

import contextlib
import dataclasses
import logging
import os
import types
import warnings

import pytest
import torch

from helpers.nf4 import kernel as nf4_kernel
from helpers.nf4 import launch, reference
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


def planted(function):
    return types.FunctionType(function.__code__, vars(launch), None, None, function.__closure__)


def test_what_a_check_cannot_tell_is_no_verdict(monkeypatch, candidate):
    known = {"bitsandbytes": protocol.Baseline("b", None, "bitsandbytes: pip could not install it")}
    with monkeypatch.context() as patch:
        patch.setattr(checks, "baselines", lambda: known)
        missing = "not measured (needs bitsandbytes: pip could not install it)"
        assert all(check(candidate)[1:] == (None, missing) for check in checks.CHECKS)
    for name in NEED_A_GPU if not protocol.ON_GPU else ():
        seen = getattr(checks, name)(candidate)
        assert seen.passed is None and seen.text.startswith("not measured (needs an NVIDIA GPU)")
        assert name != "torch_compile" or "one graph, no break, no warning, exact" in seen.text
    seen = checks.exact(oracle)
    assert seen.passed is None and "needs a Triton kernel among the globals" in seen.text


def test_examine_says_a_line_each(candidate, capsys):
    def broken(layer):
        raise RuntimeError("no kernel image\nmore lines")

    seen = checks.examine(candidate, (checks.fresh_output, checks.single_kernel))
    assert list(seen) == ["fresh_output", "single_kernel"] and seen["fresh_output"].passed
    assert checks.examine(planted(broken), (checks.exact,))["exact"].passed is False
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("yes New output: 8 calls return 8 storages")
    assert lines[1].startswith("yes One fused" if protocol.ON_GPU else "-   One fused kernel: not measured")
    assert lines[2:] == ["NO  Tested in fp16 and bf16: RuntimeError: no kernel image"]


# --- exact, and which kernel ran ---


def test_exact_says_how_many_elements_of_which_size_differ():
    def wrong(layer):
        weight = _your_dequantize_nf4(layer.weight, layer.weight.quant_state)  # noqa: F821
        if weight.numel() == 4097:
            weight.view(-1)[-1] *= 1 + 2**-7
        return weight

    seen = checks.exact(planted(wrong))
    assert seen.passed is False and "fp16 (1, 4097), call 1: 1 elements differ" in seen.text


def test_the_kernel_is_seen_where_it_ran_and_behind_autotuners(candidate, make_layer):
    import triton

    layer = make_layer(64, 64, FP16)
    candidate(layer), candidate(layer)
    for function, count in ((candidate, 1), (candidate, 1), (oracle, 0)):
        with checks.launched(candidate) as ran:
            function(layer)
        assert len(ran) == count, "also where a launch could be replayed"
    jit = nf4_kernel._your_dequantize_nf4_kernel
    tuned = triton.autotune([triton.Config({})], key=[])(jit)
    assert checks.kernels(types.FunctionType(oracle.__code__, {"f": tuned})) == [jit]


@pytest.mark.gpu
def test_exact_poisons_the_memory_of_the_results():
    """What a result's memory holds; and one that is not written by the last call, the replayed one."""
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

    assert checks.exact(planted(looking)).passed and all(looked)
    wrong = checks.exact(planted(lazy))
    assert wrong.passed is False and "call 3" in wrong.text


# --- the PTX ---


def inline(text):
    return f"// begin inline asm\n\t{text}\n// end inline asm\n"


SCALE = inline("{ .reg .f32 m; mul.rn.ftz.f32 m, a, b; @%p1 add.rn.f32 c, m, d; mov.b32 x, {lo, hi}; }")
LOOKUP = inline("{ shfl.sync.idx.b32 x, t, x, 31, -1; prmt.b32 x, x, y, z; }")
TRITONS = inline("ld.global.b32 { %r1 }, [ %rd1 + 0 ];")  # its own loads are inline assembly too


@pytest.mark.parametrize(
    "find, ptx, found",
    [
        ("assembly_in", LOOKUP + SCALE, {"shfl.sync.idx", "prmt", "mul.rn.ftz", "add.rn"}),
        ("assembly_in", TRITONS + "prmt.b32 %r1, %r2, %r3, 0x5410;\n" + TRITONS, set()),
        ("hints_in", "ld.global.L1::evict_first.b32 {%r1}, [%rd1];", {"evict_first loads"}),
        ("hints_in", "@%p1 ld.global.L1::evict_last.L2::cache_hint.b32 {%r1}, [%rd1], %rd2;",
         {"evict_last loads"}),
        ("hints_in", "st.global.cs.v4.b32 [%rd1], {%r1};", {"streaming stores"}),
        ("hints_in", "st.global.L1::evict_first.v4.b32 [%rd1], {%r1};", {"evict_first stores"}),
        ("hints_in", "ld.global.b32 {%r1}, [%rd1];", set()),
        ("hints_in", "createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;", set()),
        ("hints_in", "st.global.v4.b32 [%rd1], {%r1}; // .cs", set()),
    ],
)  # fmt: skip
def test_what_is_found_in_the_ptx(find, ptx, found):
    assert getattr(checks, find)(ptx) == found


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The logic of the GPU's checks without one: small layers on the CPU, a scripted profiler."""
    made = reference.quantized_layer
    named = types.SimpleNamespace(fn=types.SimpleNamespace(__name__=KERNEL))
    for name, stand_in in {
        "ON_GPU": True,
        "quantized_layer": lambda i, o, dtype: made(64, 64, dtype),
        "every_code": lambda dtype: made(64, 32, dtype),
        "launched": lambda candidate: contextlib.nullcontext([KERNEL]),
        "gpu_events": lambda call, count=3: [(KERNEL, 1.0, 1 << 40)] * count,
        "assert_whole": lambda events, layers, what: None,
        "kernels": lambda candidate: [named],
        "hints_pay": lambda candidate: "no effect",
        "faults_seen": lambda candidate: "a fault shows",
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(checks, name, stand_in)
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
        ("custom_asm", lambda s: [SCALE], oracle, False,
         "fp16, 2,048 elements: asm=True adds nothing to the PTX"),
        ("custom_asm", lambda s: [SCALE] * s.asm, oracle, False, "asm=False: the kernel did not run"),
        ("custom_asm", lambda s: [SCALE if s.asm else ""], inexact, False, "elements differ from bits"),
        ("cache_eviction", lambda s: [STREAMING * s.hints], oracle, True, "streaming stores at 2,048"),
        ("cache_eviction", lambda s: [STREAMING], oracle, False, "hints=True adds nothing to the PTX"),
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

    monkeypatch.setattr(checks, "launched", lambda candidate: contextlib.nullcontext(ptx(now[0])))
    names = {"settings": lambda: now[0], "force": force, "decode": dequantize}
    candidate = types.FunctionType((lambda layer: decode(layer)).__code__, names)  # noqa: F821
    seen = getattr(checks, check)(candidate)
    assert seen.passed is passed and text in seen.text, seen
    now[0] = FakeSettings(asm=False, hints=False)
    assert getattr(checks, check)(candidate).text == "switched off: tried without"
    del names["force"]
    assert "not measured (needs force(" in getattr(checks, check)(candidate).text


def test_hints_are_timed_or_have_no_effect(monkeypatch):
    times, forced = {}, []

    @contextlib.contextmanager
    def force(hints):
        forced[:] = [hints]
        yield

    monkeypatch.setattr(checks, "quantized_layer", lambda *arguments: None)
    monkeypatch.setattr(checks, "gpu_events", lambda call, count: [("k", times[forced[0]].pop(0), 1)] * 12)
    candidate = types.FunctionType(oracle.__code__, {"force": force})
    for last, text in ((1.15, "1.20x faster with them (4.2M elements, bf16)"), (1.05, "no effect on the")):
        times |= {True: [1.0, 1.1, 1.0], False: [1.2, 1.2, last]}
        assert checks.hints_pay(candidate).startswith(text)


GOOD = (KERNEL, 1e-3, 1 << 25)


@pytest.mark.parametrize(
    "events, text",
    [
        ([GOOD], ""),
        ([("absmax", *GOOD[1:]), GOOD], f"2 per call: {KERNEL}, absmax"),
        ([(f"{KERNEL}_for_show", *GOOD[1:])], "1 per call"),
        ([], "the profiler does not see the GPU"),
    ],
)
def test_single_kernel_reads_the_profile(pretend_gpu, monkeypatch, events, text):
    monkeypatch.setattr(checks, "gpu_events", lambda call, count=3: events * count)
    seen = checks.single_kernel(oracle)
    assert seen.passed is (events == [GOOD]) and text in seen.text


# --- torch.compile ---


def breaks_the_graph(layer):
    torch._dynamo.graph_break()
    return oracle(layer)


def warns(layer):
    logging.getLogger("torch._dynamo").warning("this function is odd")
    return oracle(layer)


@pytest.fixture
def uncompiled(monkeypatch):
    """uncompiled(graphs): torch.compile returns the function itself, and counts so many graphs."""
    from torch._dynamo.utils import counters

    def start(graphs=1):
        def compile_(function, fullgraph, backend):
            counters["stats"]["unique_graphs"] = graphs
            return function

        monkeypatch.setattr(torch, "compile", compile_)

    return start


COPIED = {"gpu_events": lambda call, count: [(KERNEL, 1, 1), ("Memcpy DtoD", 1, 1)] * 3}
UNSEEN = {"launched": lambda candidate: contextlib.nullcontext([])}


@pytest.mark.parametrize(
    "function, graphs, changes, text",
    [
        (breaks_the_graph, None, {}, "Unsupported"),
        (oracle, 2, {}, "2 graphs"),
        (inexact, 1, {}, " elements differ"),
        (warns, 1, {}, "this function is odd"),
        (oracle, 1, COPIED, "Memcpy DtoD"),
        (oracle, 1, UNSEEN, "own kernel did not run"),
    ],
)
def test_torch_compile_rejects(pretend_gpu, monkeypatch, uncompiled, function, graphs, changes, text):
    if graphs:
        uncompiled(graphs)
    for name, change in changes.items():
        monkeypatch.setattr(checks, name, change)
    seen = checks.torch_compile(function)
    assert seen.passed is False and text in seen.text


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
)
def test_bf16_on_a_card_without_it(pretend_gpu, monkeypatch, function, warning, raises, passed, text):
    """Inductor refuses with its warning: what runs instead must be exact and the kernel alone."""
    from torch._dynamo.utils import counters

    def compile_(function, fullgraph, backend):
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

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch, "compile", compile_)
    seen = checks.torch_compile(function)
    assert seen.passed is passed and text in seen.text, seen


def test_no_graph_of_another_run_is_served(pretend_gpu, monkeypatch, uncompiled):
    """Inductor's disk cache is new; the usual one serves graphs and does not ask the card."""
    folders = []

    def looking(layer):
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return oracle(layer)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "shared")
    uncompiled()
    assert checks.torch_compile(looking).passed
    assert len({*folders} - {"shared"}) == 2 and os.environ["TORCHINDUCTOR_CACHE_DIR"] == "shared"


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
    "first, peaks, kept, outside, text",
    [
        (0, [0, 0], [0, 0], 0, ""),
        (256 * MIB, [512, 0], [512, 0], 0, ""),  # tuned, once per dtype
        (0, [16 * MIB, 0], [0, 0], 0, "call 1: allocates"),
        (0, [0, 0], [2048, 0], 0, "call 1: allocates"),
        (0, [0, MIB], [0, 0], 0, "call 2: allocates"),
        (0, [0, 0], [0, 512], 0, "call 2: allocates"),
        (0, [0, 0], [0, 0], 100 * MIB, "keeps 100 MiB of each layer outside torch's memory"),
    ],
)
def test_no_large_buffers_reads_the_allocator(pretend_gpu, monkeypatch, first, peaks, kept, outside, text):
    """Bytes beyond the output: first, in a dtype's first call; peaks and kept, in a layer's first two."""
    size, now = 64 * 64 * 2, types.SimpleNamespace(call=0, base=0, outside=0, asked=0)

    def extra(values):
        return values[now.call % 70] if now.call % 70 < 2 else 0

    def candidate(layer):
        now.outside += outside * (now.call % 70 == 0)
        return torch.empty(1)

    def allocated():
        now.asked += 1
        if now.asked % 2 == 0:  # after the call
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
    assert seen.passed is (not text) and text in seen.text, seen


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("card", [None, "t4"])
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_passes_on_the_gpu(check, card, candidate, kernel):
    with kernel.force(card=card):
        seen = check(candidate)
    assert seen.passed, seen.text
    if check is checks.custom_asm:
        assert "a fault in shfl.sync.idx, prmt.b32, mul.rn changes the result" in seen.text
    assert torch.cuda.get_sync_debug_mode() == 0
