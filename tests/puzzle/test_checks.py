"""The checks: what they accept, what they reject, and what they say where they cannot tell."""

import contextlib
import dataclasses
import json
import logging
import os
import types
import warnings

import pytest
import torch

from helpers.nf4 import reference
from helpers.puzzle import checks as evidence, protocol
from helpers.puzzle.checks import KERNEL

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16
NEED_A_GPU = ["single_kernel", "custom_asm", "cache_eviction", "no_large_buffers", "no_sync"]


@pytest.fixture
def candidate(kernel):
    return kernel.your_dequantize_nf4


def oracle(layer):
    """Exact, but not the kernel."""
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def inexact(layer):
    return oracle(layer) * 1.01


def test_a_layer_with_every_code_and_scale():
    layer = evidence.every_code(FP16)
    packed = layer.weight.data.view(-1).cpu().long()
    scales = layer.weight.quant_state.absmax.cpu().long().repeat_interleave(32)
    assert len({*zip(packed.tolist(), scales.tolist(), strict=True)}) == 256 * 256
    assert len(layer.weight.quant_state.state2.absmax.unique()) > 1


def test_quantized_layers_are_reproducible_real_layers():
    from bitsandbytes.nn import Linear4bit

    layer = evidence.quantized_layer(128, 64, BF16)
    state = layer.weight.quant_state
    assert isinstance(layer, Linear4bit) and layer.training and layer.bias is None
    assert (state.shape, state.dtype, state.nested) == ((64, 128), BF16, True)
    assert torch.equal(layer.weight.data, evidence.quantized_layer(128, 64, BF16).weight.data)
    assert not torch.equal(layer.weight.data, evidence.quantized_layer(128, 64, BF16, seed=1).weight.data)
    flat = evidence.quantized_layer(128, 64, FP16, nested=False, quant_type="fp4", blocksize=128)
    state = flat.weight.quant_state
    assert (state.nested, state.quant_type, state.blocksize) == (False, "fp4", 128)


def test_a_candidate_that_raises_has_failed(kernel):
    def broken(layer):
        raise RuntimeError("no kernel image\nmore lines")

    for check in (evidence.exact, evidence.fresh_output):
        seen = check(types.FunctionType(broken.__code__, vars(kernel)))
        assert seen.passed is False and seen.text == "RuntimeError: no kernel image"
        assert "broken" in seen.details["traceback"]


def test_without_bitsandbytes_nothing_is_claimed(monkeypatch, candidate):
    absent = protocol.Baseline("bitsandbytes", "bitsandbytes", reason="not installed")
    monkeypatch.setattr(evidence, "baselines", lambda: {"bitsandbytes": absent})
    for check in evidence.CHECKS:
        seen = check(candidate)
        assert seen.passed is None and "bitsandbytes (not installed)" in seen.needs


@pytest.mark.parametrize("name", [*NEED_A_GPU, "torch_compile"])
def test_without_a_gpu_there_is_no_verdict(name, candidate, monkeypatch):
    monkeypatch.setattr(evidence, "ON_GPU", False)
    if protocol.ON_GPU and name == "torch_compile":
        pytest.skip("kernels are not interpreted here")
    seen = getattr(evidence, name)(candidate)
    assert seen.passed is None and str(seen).startswith("not measured (needs an NVIDIA GPU)")
    assert name != "torch_compile" or "one graph, no break, no warning, exact" in seen.text


def test_examine_says_a_line_each(candidate, capsys):
    lines = []
    seen = evidence.examine(candidate, (evidence.fresh_output, evidence.single_kernel), lines.append)
    assert list(seen) == ["fresh_output", "single_kernel"] and seen["fresh_output"].passed
    assert lines[0].startswith("yes new output: 8 results in 8 storages")
    assert lines[1].startswith("yes one fused" if protocol.ON_GPU else "-   one fused kernel: not measured")
    assert evidence.examine(lambda layer: 1, (evidence.exact,), lines.append)["exact"].passed is False
    assert lines[2].startswith("NO  fp16 and bf16: ")


# --- exact, new output ---


def test_exact_says_how_many_elements_of_which_size_differ(kernel):
    def wrong(layer):
        weight = _your_dequantize_nf4(layer.weight, layer.weight.quant_state)  # noqa: F821
        if weight.numel() == 4097:
            weight.view(-1)[-1] *= 1 + 2**-7
        return weight

    seen = evidence.exact(types.FunctionType(wrong.__code__, vars(kernel)))
    assert seen.passed is False and "(1, 4097), call 1: 1 elements differ" in seen.text


def test_the_kernel_is_named_where_it_ran(candidate, make_layer):
    layer = make_layer(64, 64, FP16)
    with evidence.launched(candidate) as ran:
        candidate(layer)
    assert len(ran) == 1
    with evidence.launched(candidate) as ran:
        oracle(layer)
    assert ran == []


def test_a_repeated_launch_is_not_repeated_where_launches_are_collected(candidate, make_layer):
    layer = make_layer(64, 64, FP16)
    candidate(layer), candidate(layer)
    for _ in range(2):
        with evidence.launched(candidate) as ran:
            candidate(layer)
        assert len(ran) == 1


@pytest.mark.gpu
def test_exact_poisons_the_memory_of_the_results(kernel, candidate):
    """What a result's memory holds; and one that is not written by the last call, the repeated one."""
    looked, seen = [], {}
    empty = torch.empty

    def looking(layer):
        state = layer.weight.quant_state
        looked.append(bool(empty(state.shape, dtype=state.dtype, device="cuda").isnan().all()))
        return _your_dequantize_nf4(layer.weight, state)  # noqa: F821

    def lazy(layer):
        state = layer.weight.quant_state
        key = (layer, state.dtype)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 3:
            return empty(state.shape, dtype=state.dtype, device="cuda")
        return _your_dequantize_nf4(layer.weight, state)  # noqa: F821

    def planted(function):
        return types.FunctionType(function.__code__, vars(kernel), None, None, function.__closure__)

    assert evidence.exact(planted(looking)).passed and all(looked)
    wrong = evidence.exact(planted(lazy))
    assert wrong.passed is False and "call 3" in wrong.text


def test_new_output_catches_shared_memory():
    buffers, calls = {}, []

    def one_buffer(layer):
        return buffers.setdefault("only", oracle(layer)).copy_(oracle(layer))

    def two_buffers_in_turn(layer):
        calls.append(layer)
        return buffers.setdefault(len(calls) % 2, oracle(layer)).copy_(oracle(layer))

    for cheat in (one_buffer, two_buffers_in_turn):
        seen = evidence.fresh_output(cheat)
        assert seen.passed is False and "share memory" in seen.text, cheat.__name__
    assert evidence.fresh_output(inexact).text == "8 of 8 results differ from bitsandbytes"


# --- the PTX ---


def inline(text):
    return f"// begin inline asm\n\t{text}\n// end inline asm\n"


SCALE = inline("mul.rn.ftz.f32 a, a, b;")
OWN = inline("{ shfl.sync.idx.b32 x, t, x, 31, -1; prmt.b32 x, x, y, z; }") + SCALE
TRITONS = "// begin inline asm\n\tld.global.b32 { %r1 }, [ %rd1 + 0 ];\n\t// end inline asm\n"


def test_assembly_is_found_only_between_its_markers():
    assert evidence.assembly_in(OWN) == ["shfl.sync.idx", "prmt", "mul.rn.ftz"]
    assert evidence.assembly_in(SCALE) == ["mul.rn.ftz"]
    assert evidence.assembly_in(TRITONS) == [], "Triton's own loads are inline assembly too"
    assert evidence.assembly_in(TRITONS + "prmt.b32 %r1, %r2, %r3, 0x5410;\n" + TRITONS) == []


@pytest.mark.parametrize(
    "line, hints",
    [
        ("ld.global.L1::evict_first.b32 {%r1}, [%rd1];", ["evict_first loads"]),
        ("@%p1 ld.global.L1::evict_first.L2::cache_hint.b32 {%r1}, [%rd1], %rd2;", ["evict_first loads"]),
        ("st.global.cs.v4.b32 [%rd1], {%r1};", ["streaming stores"]),
        ("st.global.L1::evict_first.v4.b32 [%rd1], {%r1};", ["evict_first stores"]),
        ("ld.global.b32 {%r1}, [%rd1];", []),
        ("createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;", []),
        ("st.global.v4.b32 [%rd1], {%r1}; // .cs", []),
    ],
)
def test_eviction_is_read_from_loads_and_stores(line, hints):
    assert evidence.hints_in(line) == hints


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The logic of the GPU's checks without one: small layers on the CPU, a scripted profiler."""
    made = evidence.quantized_layer
    monkeypatch.setattr(evidence, "ON_GPU", True)
    monkeypatch.setattr(evidence, "quantized_layer", lambda i, o, dtype: made(64, 64, dtype))
    monkeypatch.setattr(evidence, "every_code", lambda dtype: made(64, 32, dtype))
    monkeypatch.setattr(evidence, "launched", lambda candidate: contextlib.nullcontext([KERNEL]))
    monkeypatch.setattr(evidence, "gpu_events", lambda call: [(KERNEL, 1.0, 1 << 40)] * evidence.CALLS)
    monkeypatch.setattr(evidence, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    card = types.SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    import triton.testing

    monkeypatch.setattr(triton.testing, "get_dram_gbps", lambda: 4800.0)


@dataclasses.dataclass(frozen=True)
class FakeSettings:
    asm: bool = True
    hints: bool = True
    reason: str = "as the card decides"


def fake_cells(monkeypatch, dequantize, ptx):
    """A candidate in a namespace whose PTX and results a test dictates."""
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

    monkeypatch.setattr(evidence, "launched", launched)
    names = {"settings": lambda: now[0], "force": force, "decode": dequantize}
    return types.FunctionType((lambda layer: decode(layer)).__code__, names)  # noqa: F821


ALL = "shfl.sync.idx, prmt, mul.rn.ftz"


@pytest.mark.parametrize(
    "check, ptx, dequantize, passed, text",
    [
        ("custom_asm", lambda s: [OWN if s.asm else TRITONS], oracle, True,
         f"with and without; absent when disabled; in the PTX: {ALL} at 2,048 and 4,096 elements"),
        ("custom_asm", lambda s: [TRITONS], oracle, False, "asm=True: nothing in the PTX that ran"),
        ("custom_asm", lambda s: [SCALE], oracle, False, "asm=True: mul.rn.ftz in the PTX that ran"),
        ("custom_asm", lambda s: [OWN, SCALE], oracle, False, "asm=True: mul.rn.ftz in the PTX that ran"),
        ("custom_asm", lambda s: [OWN], oracle, False, f"float16, 2,048 elements, asm=False: {ALL}"),
        ("custom_asm", lambda s: [OWN if s.asm else ""], inexact, False, "elements differ from bitsandbytes"),
        ("custom_asm", lambda s: [], oracle, False, "did not run"),
        ("cache_eviction", lambda s: ["st.global.cs.b32" * s.hints], oracle, True, "streaming stores at"),
        ("cache_eviction", lambda s: ["ld.global.b32"], oracle, False, "hints=True: nothing in the PTX"),
        ("cache_eviction", lambda s: ["st.global.cs.b32"], oracle, False, "hints=False: streaming stores in"),
    ],
)  # fmt: skip
def test_on_and_off(pretend_gpu, monkeypatch, check, ptx, dequantize, passed, text):
    seen = getattr(evidence, check)(fake_cells(monkeypatch, dequantize, ptx))
    assert seen.passed is passed and text in seen.text, seen


def test_switched_off_earns_nothing(monkeypatch, kernel, candidate):
    monkeypatch.setattr(evidence, "ON_GPU", True)
    with kernel.force(asm=False, hints=False, reason="tried without"):
        for check in (evidence.custom_asm, evidence.cache_eviction):
            seen = check(candidate)
            assert seen.passed is False and seen.text == "switched off: tried without"


# --- the profiler ---


def test_single_kernel_reads_the_profile(pretend_gpu, monkeypatch):
    def profile(*events):
        monkeypatch.setattr(evidence, "gpu_events", lambda call: list(events) * evidence.CALLS)
        return evidence.single_kernel(oracle)

    good = (KERNEL, 1e-3, 1 << 25)
    assert profile(good).passed
    seen = profile(("absmax", 1e-3, 1 << 25), good)
    assert seen.passed is False and f"2 per call: {KERNEL}, absmax" in seen.text
    assert profile((f"{KERNEL}_for_show", *good[1:])).passed is False
    assert "the profiler does not see the GPU" in profile().text
    assert "128 threads cannot decode" in profile((KERNEL, 1e-3, 128)).text
    assert "its bytes take 48.4 us" in profile((KERNEL, 1e-5, 1 << 25)).text, "faster than DRAM"


@pytest.mark.gpu
def test_profiled_sizes_on_the_gpu(candidate):
    layer = evidence.quantized_layer(*evidence.HUGE, FP16)
    events = evidence.gpu_events(lambda: candidate(layer), 2)
    assert [name for name, _, _ in events] == [KERNEL] * 2
    elements = layer.weight.quant_state.shape.numel()
    assert all(elements / 128 <= threads <= elements / 8 and 0 < s < 1 for _, s, threads in events)
    assert len(evidence.gpu_events(lambda: layer.weight.data.clone(), 1)) == 1, "copies count, too"


# --- torch.compile ---


def breaks_the_graph(layer):
    torch._dynamo.graph_break()
    return oracle(layer)


def warns(layer):
    logging.getLogger("torch._dynamo").warning("this function is odd")
    return oracle(layer)


def run_uncompiled(monkeypatch):
    """torch.compile as the identity: the function itself is judged."""
    from torch._dynamo.utils import counters

    def compile_(function, fullgraph, backend):
        counters["stats"]["unique_graphs"] = 1
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    return counters


def test_torch_compile_rejects(pretend_gpu, monkeypatch):
    seen = evidence.torch_compile(breaks_the_graph)
    assert seen.passed is False and "Unsupported" in seen.text

    counters = run_uncompiled(monkeypatch)
    assert evidence.torch_compile(oracle).passed
    assert " elements differ" in evidence.torch_compile(inexact).text
    assert "this function is odd" in evidence.torch_compile(warns).text
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "gpu_events", lambda call: [("triton_poi_fused_add_0", 1, 1)] * 3)
        assert "triton_poi_fused_add_0" in evidence.torch_compile(oracle).text
        patch.setattr(evidence, "gpu_events", lambda call: [(KERNEL, 1, 1), ("Memcpy DtoD", 1, 1)] * 3)
        assert "Memcpy DtoD" in evidence.torch_compile(oracle).text
        patch.setattr(evidence, "launched", lambda candidate: contextlib.nullcontext([]))
        assert "another kernel ran" in evidence.torch_compile(oracle).text

    def two_graphs(function, fullgraph, backend):
        counters["stats"]["unique_graphs"] = 2
        counters["graph_break"]["why not"] = 1
        return function

    monkeypatch.setattr(torch, "compile", two_graphs)
    assert "2 graphs; graph breaks: {'why not': 1}" in evidence.torch_compile(oracle).text


def on_a_card_without_bf16(monkeypatch, warning=True, raises="InductorError: BF16 is not supported"):
    """torch.compile as it behaves there: a warning, and under fullgraph=True an error or none."""
    counters = run_uncompiled(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)

    def compile_(function, fullgraph, backend):
        def call(layer):
            bf16 = layer.weight.quant_state.dtype == BF16
            counters["stats"]["unique_graphs"] = 0 if bf16 else 1
            if bf16 and warning:
                text = "Some Card does not support bfloat16 compilation natively, skipping"
                warnings.warn(text, stacklevel=1)
            if bf16 and fullgraph and raises:
                raise RuntimeError(raises)
            return function(layer)

        return call

    monkeypatch.setattr(torch, "compile", compile_)


def test_bf16_under_torch_compile_on_a_card_without_it(pretend_gpu, monkeypatch):
    """Inductor refuses: the text says so, and what runs instead must be exact and the kernel alone."""
    on_a_card_without_bf16(monkeypatch)
    seen = evidence.torch_compile(oracle)
    assert seen.passed and "bf16, which this card lacks, is not compiled" in seen.text
    assert "fullgraph=True raises its error" in seen.text
    assert evidence.torch_compile(inexact).passed is False
    on_a_card_without_bf16(monkeypatch, raises="")
    assert "fullgraph=True does the same" in evidence.torch_compile(oracle).text
    on_a_card_without_bf16(monkeypatch, raises="cannot bf16")
    seen = evidence.torch_compile(oracle)
    assert seen.passed is False and "RuntimeError: cannot bf16" in seen.text, "not torch's refusal"
    on_a_card_without_bf16(monkeypatch, warning=False, raises="fullgraph=True found no compiled frames")
    assert evidence.torch_compile(oracle).passed is False, "left uncompiled for another reason"
    on_a_card_without_bf16(monkeypatch)
    monkeypatch.setattr(evidence, "gpu_events", lambda call: [(KERNEL, 1, 1), ("copy", 1, 1)] * 3)
    assert evidence.torch_compile(oracle).passed is False


def test_inductor_refuses_bf16_with_the_installed_torch(pretend_gpu, candidate, monkeypatch):
    """What Dynamo makes of Inductor's refusal: no exception, the same bits."""
    from torch._dynamo.exc import SkipFrame

    def backend(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        if any(getattr(value, "dtype", None) == BF16 for value in values):
            text = "Some Card does not support bfloat16 compilation natively, skipping"
            warnings.warn(text, stacklevel=1)
            raise SkipFrame("BF16 is not supported")
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, fullgraph, **_: compile_(f, fullgraph=fullgraph, backend=backend)
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    seen = evidence.torch_compile(candidate)
    assert seen.passed and "is not compiled (Inductor's warning)" in seen.text, seen


def test_no_graph_of_another_run_is_served(pretend_gpu, monkeypatch):
    """Inductor's disk cache is new and empty; the usual one serves graphs and does not ask the card."""
    folders = []

    def looking(layer):
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if os.path.exists(folder):
            folders.append((folder, os.listdir(folder)))
        return oracle(layer)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "shared")
    run_uncompiled(monkeypatch)
    assert evidence.torch_compile(looking).passed
    assert len({folder for folder, _ in folders}) == 2 and all(not files for _, files in folders)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "shared"
    assert not any(os.path.exists(folder) for folder, _ in folders)


def test_complaints_are_collected_and_unrelated_ones_are_not():
    with evidence.complaints() as texts:
        warnings.warn("mutated inputs", UserWarning, stacklevel=1)
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
        warnings.warn("TensorFloat32 tensor cores for float32 are available", UserWarning, stacklevel=1)
        logging.getLogger("torch._inductor.utils").warning("fallback")
        logging.getLogger("torch._dynamo").info("fine")
    assert sorted(texts) == ["fallback", "mutated inputs"]
    logging.getLogger("torch._dynamo").warning("after")
    assert "after" not in texts
    with contextlib.suppress(RuntimeError), evidence.complaints() as texts:
        warnings.warn("before the error", UserWarning, stacklevel=1)
        raise RuntimeError
    assert texts == ["before the error"]


# --- memory ---

MIB = 1 << 20


@pytest.mark.parametrize(
    "peaks, kept, past, passed, text",
    [
        ([0, 0], [0, 0], 0, True, "the output alone"),
        ([512, 0], [512, 0], 0, True, "the output alone"),
        ([16 * MIB, 0], [0, 0], 0, False, "call 1: allocates"),
        ([0, 0], [2048, 0], 0, False, "call 1: allocates"),
        ([0, MIB], [0, 0], 0, False, "call 2: allocates"),
        ([0, 0], [0, 512], 0, False, "call 2: allocates"),
        ([0, 0], [0, 0], 100 * MIB, False, "keeps 100 MiB of each layer past torch"),
    ],
)
def test_no_large_buffers_reads_the_allocator(pretend_gpu, monkeypatch, peaks, kept, past, passed, text):
    """peaks, kept: bytes beyond the output in a layer's first and second call; past: torch's allocator."""
    size, now = 64 * 64 * 2, types.SimpleNamespace(call=0, base=0, past=0)
    extra = lambda values: values[now.call % 70] if now.call % 70 < 2 else 0  # noqa: E731

    def candidate(layer):
        if now.call % 70 == 0:
            now.past += past
        return torch.empty(1)

    def allocated():
        value = now.base
        if now.asked % 2:  # after the call
            value = now.base = now.base + extra(kept)
            now.call += 1
        now.asked += 1
        return value

    now.asked = 0
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now.base + size + extra(peaks))
    monkeypatch.setattr(evidence, "uncounted", lambda: now.past)
    seen = evidence.no_large_buffers(candidate)
    assert seen.passed is passed and text in seen.text, seen


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("check", evidence.CHECKS, ids=lambda check: check.__name__)
def test_the_kernel_passes_on_the_gpu(check, candidate):
    seen = check(candidate)
    assert seen.passed, (seen.text, seen.details)
    json.dumps(dataclasses.asdict(seen))


@pytest.mark.gpu
def test_the_sync_debug_mode_is_restored(candidate):
    evidence.no_sync(lambda layer: layer.weight.quant_state.offset.item())
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_the_kernel_passes_with_a_t4s_decisions(kernel, candidate):
    with kernel.force(card="t4"):
        seen = evidence.examine(candidate)
    assert all(one.passed for one in seen.values()), seen
