"""The checks themselves: what they must accept, and the cheats they must catch."""

import contextlib
import dataclasses
import logging
import os
import sys
import types
import warnings

import pytest
import torch

from helpers.machine import environment
from helpers.oracle import reference
from helpers.submission import checks
from helpers.t4 import sass
from helpers.submission.checks import KERNEL
from helpers.oracle.layers import quantized_layer as small_layer

pytest.importorskip("bitsandbytes")
HERE = "cuda" if environment.has_gpu() else "cpu"


@pytest.fixture
def candidate(kernel):
    return kernel.your_dequantize_nf4


def oracle(layer):
    """Exact, but not the kernel: what a silent fallback would do."""
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def test_a_layer_with_every_code_and_scale():
    layer = checks.every_code(torch.float16, HERE)
    packed = layer.weight.data.view(-1).cpu().long()
    scales = layer.weight.quant_state.absmax.cpu().long().repeat_interleave(32)
    assert len({*zip(packed.tolist(), scales.tolist(), strict=True)}) == 256 * 256
    assert len(layer.weight.quant_state.state2.absmax.unique()) > 1


@pytest.mark.parametrize("size", [(128, 64), (70, 33), (129, 1), (1, 1), (2, 1)])
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_expected_is_bitsandbytes_for_all_sizes(make_layer, size, dtype):
    """Also where its CPU code would take wrong blocks (rows of 70): the oracle agrees."""
    layer = make_layer(*size, dtype)
    assert reference.same_bits(checks.expected(layer), oracle(layer))


def test_exact_accepts_the_kernel(candidate):
    found = checks.exact(candidate)
    assert found.passed, found.text
    assert found.details["layers"] >= 15


def test_exact_catches_one_wrong_bit_in_an_odd_size():
    def wrong(layer):
        weight = oracle(layer)
        if weight.numel() % 2:
            weight.view(-1)[-1] *= 1 + 2**-7
        return weight

    found = checks.exact(wrong)
    assert found.passed is False and "1 elements differ" in found.text


@pytest.mark.gpu
def test_exact_poisons_the_memory_of_the_results(candidate):
    """What a result's memory holds; and one that is not written by the second call, the planned one."""
    found, seen = [], {}

    def empty(layer):
        state = layer.weight.quant_state
        return torch.empty(state.shape, dtype=state.dtype, device="cuda")

    def looking(layer):
        found.append(bool(empty(layer).isnan().all()))
        return oracle(layer)

    def lazy(layer):
        state = layer.weight.quant_state
        known = (id(state), state.dtype) in seen
        seen[id(state), state.dtype] = state  # kept, so that no other gets its id
        return empty(layer) if known else candidate(layer)

    assert checks.exact(looking).passed and all(found)
    wrong = checks.exact(lazy)
    assert wrong.passed is False and all("call 2" in fault for fault in wrong.details["faults"])


def test_dtypes_accepts_the_kernel(candidate):
    found = checks.dtypes(candidate)
    assert found.passed, found.text
    assert set(found.details) == {"float16", "bfloat16"}
    assert all(any(KERNEL in name for name in entry["ran"]) for entry in found.details.values())


def test_dtypes_does_not_count_a_fallback():
    found = checks.dtypes(oracle)
    assert found.passed is False and f"{KERNEL} did not run" in found.text


def test_dtypes_catches_wrong_bits(candidate):
    found = checks.dtypes(lambda layer: candidate(layer) * 1.01)
    assert found.passed is False and "differ from bitsandbytes" in found.text


def test_dtypes_needs_both(candidate):
    """fp16 returned for everything, as some submissions do for the T4."""
    found = checks.dtypes(lambda layer: candidate(layer).to(torch.float16))
    assert found.passed is False and "bfloat16" in found.text


def test_fresh_output(candidate):
    assert checks.fresh_output(candidate).passed


def test_fresh_output_catches_shared_memory():
    buffers, calls = {}, []

    def one_buffer(layer):
        return buffers.setdefault("only", oracle(layer)).copy_(oracle(layer))

    def two_buffers_in_turn(layer):
        calls.append(layer)
        return buffers.setdefault(len(calls) % 2, oracle(layer)).copy_(oracle(layer))

    def decoded_once(layer):
        return buffers.setdefault("decoded", oracle(layer))

    for cheat in (one_buffer, two_buffers_in_turn, decoded_once):
        found = checks.fresh_output(cheat)
        assert found.passed is False and "share memory" in found.text, cheat.__name__


def test_fresh_output_says_that_bits_are_wrong():
    found = checks.fresh_output(inexact)
    assert found.passed is False and found.text == "8 of 8 results kept differ from bitsandbytes"


def test_a_candidate_that_raises_has_failed():
    def broken(layer):
        raise RuntimeError("no kernel image\nmore lines")

    for check in (checks.exact, checks.dtypes, checks.fresh_output):
        found = check(broken)
        assert found.passed is False and found.text == "RuntimeError: no kernel image"
        assert "broken" in found.details["traceback"]


def test_without_bitsandbytes_nothing_is_claimed(monkeypatch, candidate):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    found = checks.exact(candidate)
    assert found.passed is None and found.needs == "bitsandbytes"


GPU_CHECKS = ["single_kernel", "torch_compile", "custom_asm", "cache_eviction", "no_sync", "no_large_buffers"]


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_without_a_gpu_there_is_no_verdict(name, candidate, monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(checks, "_cross_compiled", lambda: {"default": "", "asm": "", "hints": ""})
    found = getattr(checks, name)(candidate)
    assert found.passed is None and found.needs == "an NVIDIA GPU"


def test_a_failed_cross_compile_is_said(monkeypatch, candidate):
    def failing():
        raise RuntimeError("ptxas is missing")

    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(checks, "_cross_compiled", failing)
    found = checks.custom_asm(candidate)
    assert found.passed is None and "ptxas is missing" in found.text


def inline(text):
    return f"// begin inline asm\n\t{text}\n// end inline asm\n"


SCALE = inline("mul.rn.ftz.f32 a, a, b;")
OWN = inline("{ shfl.sync.idx.b32 x, t, x, 31, -1; prmt.b32 x, x, y, z; }") + SCALE
TRITONS = "// begin inline asm\n\tld.global.b32 { %r1 }, [ %rd1 + 0 ];\n\t// end inline asm\n"


def test_assembly_is_found_only_between_its_markers():
    assert checks._assembly(OWN) == ["shfl.sync.idx", "prmt", "mul.rn.ftz"]
    assert checks._assembly(SCALE) == ["mul.rn.ftz"]
    assert checks._assembly(TRITONS) == [], "Triton's own loads are inline assembly too"
    assert checks._assembly(TRITONS + "prmt.b32 %r1, %r2, %r3, 0x5410;\n" + TRITONS) == []
    assert checks._assembly("") == []


@pytest.mark.parametrize(
    "line, expected",
    [
        ("ld.global.L1::evict_first.b32 {%r1}, [%rd1];", ["evict_first load"]),
        ("@%p1 ld.global.L1::evict_first.L2::cache_hint.b32 {%r1}, [%rd1], %rd2;", ["evict_first load"]),
        ("st.global.cs.v4.b32 [%rd1], {%r1};", ["streaming store"]),
        ("st.global.L1::evict_first.v4.b32 [%rd1], {%r1};", ["evict_first store"]),
        ("ld.global.b32 {%r1}, [%rd1];", []),
        ("createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;", []),
        ("st.global.v4.b32 [%rd1], {%r1}; // .cs", []),
    ],
)
def test_eviction_is_read_from_loads_and_stores(line, expected):
    assert checks._eviction(line) == expected


def test_every_variant_of_the_kernel_has_all_of_the_assembly():
    """What custom_asm demands of whatever ran: either tile, and bf16 rounded by the card or in integers."""
    kinds = [
        (dtype, True, arch, {"small": small})
        for arch in (75, 90)
        for dtype in checks.HALF
        for small in (False, True)
    ]
    sass.compile_kernels(kinds)  # in one process
    for dtype, _, arch, overrides in kinds:
        ptx = sass.ptx(dtype, arch=arch, **overrides)
        assert checks._assembly(ptx) == list(checks.ASSEMBLY), (dtype, arch, overrides)


def test_cross_compiled_evidence_for_a_t4(candidate, monkeypatch):
    """The real kernel: its mnemonics are there by default and gone when switched off."""
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    ptx = checks._cross_compiled()
    assert checks._assembly(ptx["default"]) == list(checks.ASSEMBLY)
    assert checks._assembly(ptx["asm"]) == []
    assert checks._eviction(ptx["default"]) and checks._eviction(ptx["hints"]) == []
    assert "shfl.sync.idx" in checks.custom_asm(candidate).text
    assert "streaming store" in checks.cache_eviction(candidate).text


def test_interpreted_launches_are_named(candidate, make_layer):
    if HERE == "cuda":
        pytest.skip("the interpreter is not in use where there is a GPU")
    layer = make_layer(64, 64, torch.float16)
    assert checks.launches(lambda: candidate(layer)) == [KERNEL]
    assert checks.launches(lambda: oracle(layer)) == []


def test_only_the_kernel():
    good = [f"{KERNEL}_0d1d", KERNEL, KERNEL]
    assert checks._only_the_kernel(good)
    for bad in ([], good[:2], [*good, "Memcpy DtoD"], [*good[:2], "void at::native::copy"], ["other"] * 3):
        assert not checks._only_the_kernel(bad)


@pytest.fixture
def pretend_gpu(monkeypatch):
    """The logic of the GPU checks without a GPU: layers stay on the CPU, the profiler is scripted."""
    made = checks.quantized_layer
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(environment, "native_bf16", lambda: True)
    monkeypatch.setattr(
        checks, "quantized_layer", lambda i, o, dtype, device: made(64, 64, dtype, device="cpu")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(checks, "_on_device", lambda call, count: [KERNEL] * count)


def test_single_kernel_reads_the_profile(pretend_gpu, monkeypatch):
    found = checks.single_kernel(oracle)
    assert found.passed and "float16 2048x1024, float16 8192x2048, bfloat16 2048x1024" in found.text
    monkeypatch.setattr(checks, "_on_device", lambda call, count: ["absmax", KERNEL] * count)
    found = checks.single_kernel(oracle)
    assert found.passed is False and "2 per call" in found.text and "absmax" in found.text
    monkeypatch.setattr(checks, "_on_device", lambda call, count: [])
    assert "nothing on the GPU" in checks.single_kernel(oracle).text
    profiles = iter([[KERNEL] * 3, [KERNEL, "copy"] * 3, [KERNEL] * 3, [KERNEL] * 3])
    monkeypatch.setattr(checks, "_on_device", lambda call, count: next(profiles))
    found = checks.single_kernel(oracle)
    assert found.passed is False and f"float16 8192x2048: 2 per call: {KERNEL}, copy" in found.text


MIB = 2**20


@pytest.mark.parametrize(
    "first, second, passed, text",
    [
        ((32 * MIB, 0), (32 * MIB, 0), True, "float16: 32.0 MiB, the output alone, at the first call"),
        ((32 * MIB + 512, 512), (32 * MIB, 0), True, "the output alone"),
        (
            (48 * MIB, 16 * MIB),
            (32 * MIB, 0),
            False,
            "first call: peak 48.0 MiB, keeps 16.0 MiB; second: 32.0",
        ),
        ((32 * MIB, 2048), (32 * MIB, 0), False, "keeps"),
        ((32 * MIB, 0), (33 * MIB, 0), False, "second: 33.0 MiB, keeps 0.0 MiB"),
        ((32 * MIB, 0), (32 * MIB, 512), False, "keeps"),
    ],
)
def test_no_large_buffers_reads_the_allocator(pretend_gpu, monkeypatch, first, second, passed, text):
    measured = iter([(32 * MIB, 0), first, second] * 2)
    monkeypatch.setattr(checks, "_memory", lambda call: next(measured))
    found = checks.no_large_buffers(oracle)
    assert found.passed is passed and text in found.text, found
    assert found.details["bfloat16"]["first peak"] == first[0]


def test_torch_compile_accepts_the_kernel(pretend_gpu, candidate):
    if sys.platform == "win32" or HERE == "cuda":
        pytest.skip("the interpreter's way; the GPU has its own test")
    found = checks.torch_compile(candidate)
    assert found.passed, found.details
    assert "one graph" in found.text


def breaks_the_graph(layer):
    torch._dynamo.graph_break()
    return oracle(layer)


def warns(layer):
    logging.getLogger("torch._dynamo").warning("this function is odd")
    return oracle(layer)


def falls_back(layer):
    return oracle(layer) if torch.compiler.is_compiling() else oracle(layer).clone()


def inexact(layer):
    return oracle(layer) * 1.01


def run_uncompiled(monkeypatch):
    """torch.compile as the identity: `_compiled` then judges what the function itself does."""
    from torch._dynamo.utils import counters

    def compile_(function, fullgraph):
        counters["stats"]["unique_graphs"] = 1
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    return counters


def test_torch_compile_rejects(pretend_gpu, monkeypatch):
    found = checks.torch_compile(breaks_the_graph)
    assert found.passed is False and "Unsupported" in found.text

    counters = run_uncompiled(monkeypatch)
    assert checks.torch_compile(oracle).passed
    assert "the result is not exact" in checks.torch_compile(inexact).text
    assert "this function is odd" in checks.torch_compile(warns).text
    monkeypatch.setattr(checks, "_on_device", lambda call, count: ["triton_poi_fused_add_0"] * count)
    assert "triton_poi_fused_add_0" in checks.torch_compile(falls_back).text
    monkeypatch.setattr(checks, "_on_device", lambda call, count: [KERNEL, "Memcpy DtoD"] * count)
    assert "Memcpy DtoD" in checks.torch_compile(oracle).text

    def two_graphs(function, fullgraph):
        counters["stats"]["unique_graphs"] = 2
        counters["graph_break"]["why not"] = 1
        return function

    monkeypatch.setattr(torch, "compile", two_graphs)
    assert "graph breaks: {'why not': 1}; 2 graphs" in checks.torch_compile(oracle).text


def test_bf16_under_torch_compile_on_a_card_without_it(pretend_gpu, monkeypatch):
    """Inductor refuses as torch 2.13 does: the text says so, and what runs instead must be exact."""
    monkeypatch.setattr(environment, "native_bf16", lambda: False)
    counters = run_uncompiled(monkeypatch)

    def refusing(function, fullgraph, raises="InductorError: SkipFrame: BF16 is not supported"):
        def call(layer):
            bf16 = layer.weight.quant_state.dtype == torch.bfloat16
            counters["stats"]["unique_graphs"] = 0 if bf16 else 1
            if bf16:
                warnings.warn("Some Card does not support bfloat16 compilation natively, skipping")  # noqa: B028
            if bf16 and fullgraph and raises:
                raise RuntimeError(raises)
            return function(layer)

        return call

    monkeypatch.setattr(torch, "compile", refusing)
    found = checks.torch_compile(oracle)
    assert found.passed and "float16 8192x2048 with fullgraph=True exact, one graph" in found.text
    assert "Inductor steps aside" in found.text and "fullgraph=True raises" in found.text
    assert checks.torch_compile(inexact).passed is False
    monkeypatch.setattr(torch, "compile", lambda f, fullgraph: refusing(f, fullgraph, "cannot bf16"))
    found = checks.torch_compile(oracle)
    assert found.passed is False and "RuntimeError: cannot bf16" in found.text, "not torch's refusal"
    monkeypatch.setattr(torch, "compile", lambda f, fullgraph: refusing(f, fullgraph, ""))
    assert "fullgraph=True does the same" in checks.torch_compile(oracle).text
    launched = {torch.float16: [KERNEL], torch.bfloat16: [KERNEL, "copy"]}
    names = iter([launched[torch.float16], launched[torch.bfloat16], launched[torch.bfloat16]])
    monkeypatch.setattr(checks, "_on_device", lambda call, count: next(names) * count)
    assert checks.torch_compile(oracle).passed is False


def test_bf16_left_uncompiled_for_another_reason_is_a_fault(pretend_gpu, monkeypatch):
    """A break of the candidate's own, or an error, is not Inductor's refusal: that comes with a warning."""
    monkeypatch.setattr(environment, "native_bf16", lambda: False)
    counters = run_uncompiled(monkeypatch)

    def only_fp16(what):
        def compile_(function, fullgraph):
            def call(layer):
                bf16 = layer.weight.quant_state.dtype == torch.bfloat16
                counters["stats"]["unique_graphs"] = 1
                if bf16 and what == "breaks":
                    counters["graph_break"]["its own"] = 1
                if bf16 and what == "raises" and fullgraph:
                    raise RuntimeError("torch.compile with fullgraph=True found no compiled frames.")
                return function(layer)

            return call

        return compile_

    for what, why in {"breaks": "graph breaks: {'its own': 1}", "raises": "found no compiled frames"}.items():
        monkeypatch.setattr(torch, "compile", only_fp16(what))
        found = checks.torch_compile(oracle)
        assert found.passed is False and "without native bf16: " in found.text and why in found.text


def test_inductor_refuses_bf16_where_a_t4_is_forced(pretend_gpu, candidate, monkeypatch):
    """What Dynamo makes of Inductor's refusal, with the installed torch: no exception, the same bits."""
    from torch._dynamo.exc import SkipFrame

    monkeypatch.setattr(environment, "native_bf16", lambda: False)

    def backend(graph, inputs):
        if any("torch.bfloat16" in node.args for node in graph.graph.nodes):
            warnings.warn("Some Card does not support bfloat16 compilation natively, skipping")  # noqa: B028
            raise SkipFrame("BF16 is not supported")
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, fullgraph: compile_(f, fullgraph=fullgraph, backend=backend)
    )
    found = checks.torch_compile(candidate)
    assert found.passed, found.details
    assert "float16 8192x2048 with fullgraph=True exact" in found.text
    assert "bfloat16 14336x4096 not compiled, Inductor" in found.text


def test_no_graph_of_another_run_is_served(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "shared")
    with checks._no_older_graphs():
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert folder != "shared" and os.listdir(folder) == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "shared" and not os.path.exists(folder)


def test_complaints_are_collected_and_unrelated_ones_are_not():
    with checks._complaints() as found:
        warnings.warn("mutated inputs", UserWarning, stacklevel=1)
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
        warnings.warn("TensorFloat32 tensor cores for float32 are available", UserWarning, stacklevel=1)
        logging.getLogger("torch._inductor.utils").warning("fallback")
        logging.getLogger("torch._dynamo").info("fine")
    assert sorted(found) == ["fallback", "mutated inputs"]
    logging.getLogger("torch._dynamo").warning("after")
    assert "after" not in found
    with contextlib.suppress(RuntimeError), checks._complaints() as found:
        warnings.warn("before the error", UserWarning, stacklevel=1)
        raise RuntimeError
    assert found == ["before the error"]


def test_a_function_from_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    found = checks.custom_asm(oracle)
    assert found.passed is False and "pass your_dequantize_nf4 itself" in found.text


def test_switched_off_earns_nothing(monkeypatch, kernel, candidate):
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    with kernel.force(asm=False, hints=False, reason="tried without"):
        for check in (checks.custom_asm, checks.cache_eviction):
            found = check(candidate)
            assert found.passed is False and found.text == "switched off: tried without"


@dataclasses.dataclass(frozen=True)
class FakeSettings:
    asm: bool = True
    hints: bool = True
    reason: str = "as the card decides"


class FakeCells:
    """A namespace like the notebook's, whose PTX and results a test dictates."""

    def __init__(self, dequantize, ptx):
        self.function, self.ptx, self.now, self.cache = dequantize, ptx, FakeSettings(), {"before": None}
        kernel = types.SimpleNamespace(device_caches={0: (self.cache, "binder")})
        names = {"cells": self, KERNEL: kernel, "settings": lambda: self.now}
        names |= {"force": self.force, "compile_spec": None}
        self.candidate = types.FunctionType((lambda layer: cells.dequantize(layer)).__code__, names)  # noqa: F821

    def dequantize(self, layer):
        if self.ptx is not None:
            small = layer.weight.quant_state.shape.numel() < 64 * 64
            self.cache[len(self.cache)] = types.SimpleNamespace(asm={"ptx": self.ptx(self.now, small)})
        return self.function(layer)

    @contextlib.contextmanager
    def force(self, **overrides):
        before, self.now = self.now, dataclasses.replace(self.now, **overrides)
        yield
        self.now = before


def good_asm(settings, small):
    return OWN if settings.asm else TRITONS


def good_hints(settings, small):
    load = "ld.global.L1::evict_first.b32;" if small else ""
    return f"{load} st.global.cs.b32" if settings.hints else ""


ALL = "shfl.sync.idx, prmt, mul.rn.ftz"
BOTH = "(float16 and bfloat16, 2,048 and 4,096 elements)"
BY_SIZE = (
    "evict_first load, streaming store (float16 and bfloat16, 2,048 elements); "
    "streaming store (float16 and bfloat16, 4,096 elements)"
)


@pytest.mark.parametrize(
    "switch, ptx, dequantize, passed, text",
    [
        ("asm", good_asm, oracle, True, f"ran, exact; in its PTX, and gone when off: {ALL} {BOTH}"),
        ("asm", lambda s, small: TRITONS, oracle, False, "elements, on: nothing in the PTX of a kernel"),
        (
            "asm",
            lambda s, small: SCALE if s.asm else "",
            oracle,
            False,
            "on: mul.rn.ftz in the PTX of a kernel",
        ),
        (
            "asm",
            lambda s, small: OWN if s.asm and small else "",
            oracle,
            False,
            "4,096 elements, on: nothing in",
        ),
        ("asm", lambda s, small: OWN, oracle, False, f"float16, 2,048 elements, off: {ALL} in the PTX of a"),
        ("asm", good_asm, inexact, False, "differ from bitsandbytes"),
        ("asm", None, oracle, False, "did not run"),
        ("hints", good_hints, oracle, True, BY_SIZE),
        ("hints", lambda s, small: "ld.global.b32", oracle, False, "on: nothing in the PTX of a kernel that"),
        ("hints", lambda s, small: "st.global.cs.b32", oracle, False, "off: streaming store in the PTX of a"),
    ],
)
def test_switched_evidence(pretend_gpu, monkeypatch, switch, ptx, dequantize, passed, text):
    fake = FakeCells(dequantize, ptx)
    monkeypatch.setattr(checks, "every_code", lambda dtype, device: small_layer(64, 32, dtype))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check = {"asm": checks.custom_asm, "hints": checks.cache_eviction}[switch]
    found = check(fake.candidate)
    assert found.passed is passed and text in found.text, found
    assert fake.cache["before"] is None, "what Triton had compiled before is there again"


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CHECKS + ["dtypes", "exact", "fresh_output"])
def test_the_kernel_passes_on_the_gpu(name, candidate):
    found = getattr(checks, name)(candidate)
    assert found.passed, (found.text, found.details)


@pytest.mark.gpu
def test_cheats_fail_on_the_gpu(candidate):
    """The oracle: many kernels, large buffers. A synchronizing one. One more copy under torch.compile."""
    for check in (checks.single_kernel, checks.no_large_buffers, checks.dtypes, checks.torch_compile):
        assert check(oracle).passed is False, check.__name__

    def synchronizing(layer):
        layer.weight.quant_state.offset.item()
        return candidate(layer)

    assert checks.no_sync(synchronizing).passed is False
    assert torch.cuda.get_sync_debug_mode() == 0, "the mode is restored"

    def copying(layer):
        layer.weight.clone()
        return candidate(layer)

    assert checks.single_kernel(copying).passed is False

    def falling_back(layer):
        return oracle(layer) if torch.compiler.is_compiling() else candidate(layer)

    assert checks.torch_compile(falling_back).passed is False


@pytest.mark.gpu
def test_kept_buffers_fail_on_the_gpu(candidate):
    """One allocated at the first call of all and kept, one that grows with the layers."""
    kept = {}

    def at_the_first_call(layer):
        if not kept:
            kept["buffer"] = torch.empty(2**24, dtype=torch.uint8, device="cuda")
        return candidate(layer)

    def growing(layer):
        n = layer.weight.quant_state.shape.numel()
        if "buffer" not in kept or kept["buffer"].numel() < n:
            kept["buffer"] = torch.empty(n, dtype=torch.uint8, device="cuda")
        return candidate(layer)

    for cheat, good in ((at_the_first_call, [False, True]), (growing, [False, False])):
        kept.clear()
        found = checks.no_large_buffers(cheat)
        assert found.passed is False and "keeps" in found.text, cheat.__name__
        assert [entry["good"] for entry in found.details.values()] == good, found.details


@pytest.mark.gpu
def test_a_copy_for_large_tensors_alone_fails_on_the_gpu(candidate):
    def copying(layer):
        if layer.weight.quant_state.shape.numel() > 2**21:
            layer.weight.clone()
        return candidate(layer)

    found = checks.single_kernel(copying)
    assert found.passed is False and "8192x2048: 2 per call" in found.text


@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["asm", "hints"])
def test_live_evidence_names_the_kernel_that_ran(kernel, candidate, switch):
    check = {"asm": checks.custom_asm, "hints": checks.cache_eviction}[switch]
    details = check(candidate).details
    cases = {key: found for key, found in details.items() if key != "settings"}
    assert len(cases) == 8 and all(found["kernels that ran"] == 1 for found in cases.values())
    assert all(bool(found["found"]) == key.endswith("on") for key, found in cases.items())
    with kernel.force(**{switch: False}):
        assert check(candidate).passed is False


def test_the_notebooks_lines_say_what_was_found_and_what_is_missing(kernel, device, capsys):
    from helpers.show import notebook

    found = notebook.examine(kernel.your_dequantize_nf4, "fresh_output", "single_kernel")
    assert list(found) == ["fresh_output", "single_kernel"] and found["fresh_output"].passed
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("yes new output: 8 results kept")
    assert second.startswith(
        "yes single kernel" if device == "cuda" else "-   single kernel: not measured (needs"
    )
