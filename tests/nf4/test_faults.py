"""When things go wrong: no memory, no compilation, broken values; and what ten thousand layers leave behind.

Malformed states by field are in test_bad_input.py, changes between calls in test_plans.py.
"""

import copy
import gc
import math
import os
import re
import resource
import weakref

import pytest
import torch

from helpers.nf4 import reference
from helpers.puzzle import protocol
from helpers.t4 import cross_compile

bitsandbytes = pytest.importorskip("bitsandbytes")
ON_GPU = pytest.mark.gpu


@pytest.fixture
def layer(make_layer):
    return make_layer(64, 320, torch.bfloat16)


def exact(result, layer):
    return reference.same_bits(result, reference.dequantize(layer.weight, layer.weight.quant_state))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter
class TestValues:
    """Values cannot be malformed: whatever is in the tensors gives bitsandbytes' bits."""

    SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -1.0)

    @pytest.mark.parametrize("value", SPECIAL, ids=str)
    @pytest.mark.parametrize("name", ["absmax", "state2.absmax", "state2.code", "offset"])
    def test_special_values_anywhere(self, kernel, make_layer, name, value):
        layer = make_layer(64, 64, torch.float16, nested=name != "absmax")
        state = layer.weight.quant_state
        owner = state.state2 if name.startswith("state2") else state
        tensor = getattr(owner, name.removeprefix("state2."))
        tensor.view(-1)[::2] = value
        for _ in range(2):
            assert exact(kernel.your_dequantize_nf4(layer), layer)

    @pytest.mark.parametrize("int_bf16", [True, False])
    @pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF])
    def test_every_nan_stays_one(self, kernel, make_layer, bits, int_bf16):
        """Rounding in integers must not carry a NaN's payload over into a number."""
        if not int_bf16 and kernel.settings().int_bf16:
            pytest.skip("no exact bf16 conversion here: always rounded in integers")
        layer = make_layer(64, 64, torch.bfloat16, nested=False)
        layer.weight.quant_state.absmax.view(torch.int32)[1::2] = bits
        with kernel.force(int_bf16=int_bf16):
            result = kernel.your_dequantize_nf4(layer)
        assert result[1::2].isnan().all() and not result[::2].isnan().any()

    def test_against_bitsandbytes(self, kernel, make_layer):
        """The same values through bitsandbytes itself."""
        layer = make_layer(64, 64, torch.float32, nested=False)
        values = [value for value in self.SPECIAL if not (value and abs(value) < 1e-38)]
        layer.weight.quant_state.absmax[: len(values)] = torch.tensor(values)
        assert reference.same_bits(kernel.your_dequantize_nf4(layer), protocol.expected(layer))

    @pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 256])
    def test_codebooks_of_any_length(self, kernel, layer, length):
        """quant_state.code is not what bitsandbytes decodes with; its length and contents change nothing."""
        expected = protocol.expected(layer)
        layer.weight.quant_state.code = torch.full((length,), math.nan, device=layer.weight.device)
        assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)
        layer.weight.quant_state.code = None
        assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)

    @pytest.mark.parametrize("length", [0, 1, 16, 128, 255])
    def test_second_codebooks_too_short(self, kernel, layer, length):
        state2 = layer.weight.quant_state.state2
        state2.code = state2.code[:length].clone()
        with pytest.raises(kernel.UnsupportedState, match=f"state2.code has {length} elements"):
            kernel.your_dequantize_nf4(layer)

    @pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
    def test_the_scale_of_a_last_partial_block_must_be_there(self, kernel, make_layer, nested):
        """65 elements are two blocks of 64."""
        layer = make_layer(65, 1, torch.float16, nested=nested)
        state = layer.weight.quant_state
        assert state.absmax.numel() == 2 and exact(kernel.your_dequantize_nf4(layer), layer)
        state.absmax = state.absmax[:1].clone()
        with pytest.raises(kernel.UnsupportedState, match="absmax has 1 elements, expected 2"):
            kernel.your_dequantize_nf4(layer)

    def test_an_offset_of_several_elements(self, kernel, layer):
        """bitsandbytes would add it block by block."""
        state = layer.weight.quant_state
        state.offset = torch.arange(320.0, device=layer.weight.device)
        with pytest.raises(kernel.UnsupportedState, match="offset"):
            kernel.your_dequantize_nf4(layer)

    def test_an_offset_of_shape_1(self, kernel, layer):
        expected = protocol.expected(layer)
        layer.weight.quant_state.offset = layer.weight.quant_state.offset.view(1)
        assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)

    @pytest.mark.parametrize(
        "shape",
        ["64x320", 20480, (-64, -320), (-1, 64), (64.0, 320.0), (None, 4)],
        ids=str,
    )
    def test_shapes_that_are_none(self, kernel, layer, shape):
        layer.weight.quant_state.shape = shape
        with pytest.raises(kernel.UnsupportedState, match="quant_state.shape"):
            kernel.your_dequantize_nf4(layer)


class TestMemory:
    def test_the_error_reaches_the_caller_and_the_next_call_works(self, kernel, layer, monkeypatch):
        """Every allocation of the call fails once: the first call's, then the repeated one's."""

        def full(*arguments, **options):
            raise torch.OutOfMemoryError("out of memory (as a test)")

        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(kernel, "_empty_cuda", full)
                patch.setattr(torch, "empty", full)
                with pytest.raises(torch.OutOfMemoryError, match="as a test"):
                    kernel.your_dequantize_nf4(layer)
            assert exact(kernel.your_dequantize_nf4(layer), layer)

    @ON_GPU
    @pytest.mark.parametrize("calls_before", [0, 2])
    def test_a_full_gpu(self, kernel, make_layer, calls_before):
        """Real exhaustion, for a call that is the first and for one that repeats a launch."""
        layer = make_layer(4096, 4096, torch.float16)
        for _ in range(calls_before):
            kernel.your_dequantize_nf4(layer)
        expected = reference.dequantize(layer.weight, layer.weight.quant_state)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
        hoard = []
        try:
            with pytest.raises(torch.OutOfMemoryError):  # what is free within the memory held already
                while True:
                    hoard.append(torch.empty(2**22, dtype=torch.uint8, device="cuda"))
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    kernel.your_dequantize_nf4(layer)
                with pytest.raises(torch.OutOfMemoryError):
                    torch.ops.nf4_triton.dequantize(*operator_arguments(kernel, layer))
        finally:
            hoard.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
        for _ in range(2):
            assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


def operator_arguments(kernel, layer):
    return kernel._operands(*kernel._snapshot(layer.weight.data, layer.weight.quant_state))


class TestCompilation:
    def test_a_failure_names_card_and_versions(self, kernel, layer, monkeypatch):
        """Whatever Triton raises comes back with where it happened, and as its cause."""
        import triton

        class Failing:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    raise ValueError("ptxas exited with 255")

                return launch

        with monkeypatch.context() as patch:
            patch.setattr(kernel, "_your_dequantize_nf4_kernel", Failing())
            with pytest.raises(RuntimeError) as caught:
                kernel.your_dequantize_nf4(layer)
        text = str(caught.value)
        for part in (
            "ptxas exited with 255",
            triton.__version__,
            torch.__version__,
            kernel.settings().reason,
        ):
            assert part in text
        assert isinstance(caught.value.__cause__, ValueError)
        assert exact(kernel.your_dequantize_nf4(layer), layer), "the next call works"

    @ON_GPU
    def test_assembly_that_ptxas_refuses(self, make_layer, changed_kernel):
        broken = changed_kernel("refused", "mul.rn.ftz.f32 a, a, $6;", "no.such.instruction a, a, $6;")
        layer = make_layer(64, 320, torch.float16)
        with broken.force(asm=True), pytest.raises(RuntimeError) as caught:
            broken.your_dequantize_nf4(layer)
        assert torch.cuda.get_device_name() in str(caught.value) and torch.__version__ in str(caught.value)
        with broken.force(asm=False):
            assert exact(broken.your_dequantize_nf4(layer), layer), "the process goes on"

    @ON_GPU
    def test_the_cache_serves_no_older_kernel(self, kernel, make_layer, changed_kernel):
        """After a change of the assembly the very next call runs the new one, compiled or not."""
        changed = changed_kernel("changed", "mul.rn.ftz.f32 a, a, $6;", "mul.rn.ftz.f32 a, a, 0f00000000;")
        layer = make_layer(64, 320, torch.float16)
        expected = kernel.your_dequantize_nf4(layer)
        for call in (changed.your_dequantize_nf4, torch.compile(changed.your_dequantize_nf4, fullgraph=True)):
            with changed.force(asm=True):
                result = call(layer)
            assert reference.different(result, expected) > result.numel() // 4
        layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.clone()
        assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


def test_hints_are_on_what_is_read_or_written_once(kernel):
    """Evicted first: the packed words, absmax and every store. What all programs share keeps its cache line:
    codebook, code2, absmax2 and offset."""
    (built,) = cross_compile.build([cross_compile.Request(75)])
    assert not built.error, built.error
    ptx = built.ptx
    loads, stores = re.findall(r"ld\.global\S*", ptx), re.findall(r"st\.global\S*", ptx)
    words = kernel.settings().words
    assert sum("evict_first" in load for load in loads) == words + 1
    with kernel.force(card="t4"):
        s = kernel.settings()
    code2 = 256 // (32 * s.num_warps) if s.stage else 1  # loads of it per thread
    assert sum("evict_first" not in load for load in loads) == 3 + code2
    assert len(stores) == words and all(".cs." in store for store in stores)


def resident_bytes():
    """Memory of this process now (peak where the system does not tell)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def lookalike(layer, seed):
    """A layer like another without quantizing anew: own tensors, own state."""
    old = layer.weight.quant_state
    state = copy.copy(old)
    vars(state).pop("_nf4_plan", None)
    state.absmax, state.offset, state.state2 = (
        old.absmax ^ (seed & 255),
        old.offset.clone(),
        copy.copy(old.state2),
    )
    state.state2.absmax = old.state2.absmax.clone()
    twin = torch.nn.Module()
    twin.weight = bitsandbytes.nn.Params4bit(
        layer.weight.data ^ (seed & 255), requires_grad=False, quant_state=state, bnb_quantized=True
    )
    return twin


class TestLeaks:
    def test_a_dropped_layer_takes_everything_along(self, kernel, make_layer):
        """No cache, plan or operator keeps a tensor of a layer that is gone."""
        layer = make_layer(64, 96, torch.float16)
        kernel.your_dequantize_nf4(layer), kernel.your_dequantize_nf4(layer)
        torch.ops.nf4_triton.dequantize(*operator_arguments(kernel, layer))
        state = layer.weight.quant_state
        parts = [layer.weight, state, state.absmax, state.offset, state.state2, state.state2.absmax]
        watched = [weakref.ref(part) for part in parts]
        del layer, state, parts
        gc.collect()
        assert [reference() for reference in watched] == [None] * len(watched)

    def test_results_are_not_kept(self, kernel, layer):
        for _ in range(3):
            result = weakref.ref(kernel.your_dequantize_nf4(layer))
            assert result() is None

    def test_layers_come_and_go_without_growth(self, kernel, make_layer, device):
        """10,000 layers on a GPU, 100 in the interpreter: loaded, used twice, dropped."""
        count = 10_000 if device == "cuda" else 100
        pattern = make_layer(64, 96, torch.float16)

        def use(first, last):
            for seed in range(first, last):
                layer = lookalike(pattern, seed)
                kernel.your_dequantize_nf4(layer)
                kernel.your_dequantize_nf4(layer)
                if seed % 10 == 0:
                    torch.ops.nf4_triton.dequantize(*operator_arguments(kernel, layer))

        def objects():
            gc.collect()
            return len(gc.get_objects())

        use(0, count // 10)
        before, host = objects(), resident_bytes()
        allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
        use(count // 10, count)
        after, host = objects(), resident_bytes() - host
        assert after - before < 40 * count // 10, "Python objects pile up"
        assert host < 64 * 2**20, f"the process grew by {host / 2**20:.0f} MiB"
        if device == "cuda":
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() == allocated
        assert not kernel._plans, "plans outlive the tensors that they were made from"
