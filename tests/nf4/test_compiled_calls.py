"""A compiled call is exact, direct and as careful as an eager one, whatever changes between two of them.

The code that Inductor writes calls the kernel's `_run` past the dispatcher. Plans are in use, on the CPU with
the interpreter in place of the repeated launch (see conftest.py).
"""

import gc
import weakref

import pytest
import torch
from layer_tensors import TENSORS  # beside this file

from helpers.nf4 import reference

pytest.importorskip("bitsandbytes")
inductor = pytest.importorskip("torch._inductor.config")
REFUSED = ValueError, torch._dynamo.exc.Unsupported  # UnsupportedState at the call, or while it is traced
STATIC = dict(fullgraph=True, dynamic=False)


@pytest.fixture(autouse=True)
def everything_is_compiled():
    """From no cache, which may hold code of an earlier kernel, and as often as a test likes."""
    with torch._dynamo.config.patch(cache_size_limit=200), inductor.patch(force_disable_caches=True):
        yield


@pytest.fixture(scope="module")
def compiled(kernel):
    """One compiled function for most tests: compiled(weight, state)."""
    yield torch.compile(lambda weight, state: kernel._your_dequantize_nf4(weight, state), **STATIC)
    torch._dynamo.reset()


@pytest.fixture
def layer(make_layer):
    """320 x 64 in fp16: 320 blocks of scales, 2 of the second level."""
    return make_layer(64, 320, torch.float16)


def exact(result, weight, state):
    return reference.same_bits(result, reference.dequantize(weight, state))


def right(result, layer):
    return exact(result, layer.weight, layer.weight.quant_state)


def by_plan(planned, call, *arguments):
    """(result, whether no call in it went past a plan)"""
    before = planned.unplanned
    result = call(*arguments)
    return result, planned.unplanned == before


def warm(planned, compiled, layer):
    """Call until the plan is in use, and prove that it is."""
    for _ in range(2):
        result, repeated = by_plan(planned, compiled, layer.weight, layer.weight.quant_state)
        assert right(result, layer)
    assert repeated
    return layer.weight, layer.weight.quant_state


def code_of(function, *arguments):
    """(result, the code that Inductor wrote)"""
    from torch._inductor.utils import run_and_get_code

    result, codes = run_and_get_code(function, *arguments)
    return result, "\n".join(codes)


def noise(x):
    return torch.randint_like(x, 256) if x.dtype == torch.uint8 else torch.rand_like(x) + 0.25


def test_inductors_code_calls_the_kernel_directly_once_a_layer(planned, kernel, make_layer):
    layers = [make_layer(64, 96, torch.float16, seed=seed) for seed in range(3)]
    compiled = torch.compile(lambda layers: [kernel.your_dequantize_nf4(x) for x in layers], **STATIC)
    results, code = code_of(compiled, layers)
    assert code.count("torch.ops.nf4_triton.dequantize.default.run(arg") == 3  # no view, no copy of a weight
    assert "dequantize.default(" not in code
    for _ in range(2):
        assert all(map(right, results, layers))
        results, repeated = by_plan(planned, compiled, layers)
        assert repeated


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_every_kind_of_state(planned, compiled, make_layer, quant_type, nested):
    for dtype in (torch.float16, torch.float32):
        for sizes in ((64, 320), (3, 7), (320, 1)):
            layer = make_layer(*sizes, dtype, nested=nested, quant_type=quant_type)
            warm(planned, compiled, layer)
            eager, _ = planned(layer.weight, layer.weight.quant_state)
            assert right(eager, layer), "an eager call has a plan of its own"


def swap(x):
    x.data = noise(x)


def refill(x):
    """As FSDP does with a storage that it frees."""
    values, storage = noise(x), x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    keep = torch.empty(size + 4096, dtype=torch.uint8, device=x.device)  # so that the memory is another
    storage.resize_(size)
    x.data.copy_(values)
    del keep


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_changes_between_calls_is_followed(planned, compiled, layer, name):
    weight, state = warm(planned, compiled, layer)
    for change in (lambda x: x.data.copy_(noise(x)), swap, refill):
        before = TENSORS[name](layer).detach().clone()
        change(TENSORS[name](layer))
        assert not torch.equal(TENSORS[name](layer), before)
        for _ in range(2):
            assert exact(compiled(weight, state), weight, state)


def free(x):
    x.untyped_storage().resize_(0)


def shrink(x):
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)


def shorten(x):
    x.data = x.data[: len(x) // 2]


def stride(x):
    """In place of all its elements, the first again and again."""
    x.data = x.data.as_strided(x.shape, (0,) * x.dim())


def retype(x):
    x.data = x.data.view(torch.int8 if x.dtype == torch.uint8 else torch.int32)


@pytest.mark.parametrize("change", [free, shrink, shorten, stride, retype])
@pytest.mark.parametrize("name", list(TENSORS)[:4])
def test_a_tensor_that_became_unfit_is_refused(planned, compiled, layer, name, change):
    """Its address is the same, and the plan of the graph that was compiled for it before is at hand."""
    weight, state = warm(planned, compiled, layer)
    tensor = TENSORS[name](layer)
    good = tensor.data
    size, kept = good.untyped_storage().nbytes(), good.clone()
    change(tensor)
    for _ in range(2):
        with pytest.raises(REFUSED):
            compiled(weight, state)
    good.untyped_storage().resize_(size)
    good.copy_(kept)
    tensor.data = good
    assert exact(compiled(weight, state), weight, state)


def test_a_freed_offset_is_refused_and_one_retyped_in_place_followed(planned, compiled, layer):
    weight, state = warm(planned, compiled, layer)
    address = state.offset.data_ptr()
    state.offset.data = state.offset.data.view(1).view(torch.bfloat16)[0]
    assert state.offset.data_ptr() == address
    assert exact(compiled(weight, state), weight, state)
    free(state.offset)
    with pytest.raises(REFUSED):
        compiled(weight, state)


FIELDS = {
    "dtype": lambda state: setattr(state, "dtype", torch.float32),
    "quant_type": lambda state: setattr(state, "quant_type", "fp4"),
    "shape": lambda state: setattr(state, "shape", torch.Size([320, 64])),
    "blocksize": lambda state: setattr(state, "blocksize", 128),
    "state2.blocksize": lambda state: setattr(state.state2, "blocksize", 512),
    "absmax": lambda state: setattr(state, "absmax", noise(state.absmax)),
    "state2.absmax": lambda state: setattr(state.state2, "absmax", noise(state.state2.absmax)),
    "state2.code": lambda state: setattr(state.state2, "code", noise(state.state2.code)),
    "offset": lambda state: setattr(state, "offset", state.offset.to(torch.bfloat16)),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_changes_is_followed(planned, compiled, layer, name):
    weight, state = warm(planned, compiled, layer)
    before = compiled(weight, state)
    FIELDS[name](state)
    for _ in range(2):
        result = compiled(weight, state)
        assert exact(result, weight, state)
        assert name in ("offset", "shape") or not torch.equal(result, before)


def repack(state):
    """All that bitsandbytes changes for its CPU matmul: no guard looks for the flag alone."""
    state.absmax = torch.ones(len(state.absmax), 1, dtype=torch.bfloat16, device=state.absmax.device)
    state.nested, state.dtype, state.packing_format_for_cpu = False, torch.bfloat16, True
    del state.state2


BAD_FIELDS = {
    "state2.dtype": lambda state: setattr(state.state2, "dtype", torch.float16),
    "state2": lambda state: setattr(state, "state2", None),
    "nested": lambda state: setattr(state, "nested", None),
    "packing_format_for_cpu": lambda state: repack(state),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_field_that_became_wrong_is_refused(planned, compiled, layer, name):
    weight, state = warm(planned, compiled, layer)
    BAD_FIELDS[name](state)
    for _ in range(2):
        with pytest.raises(REFUSED):
            compiled(weight, state)


@pytest.mark.parametrize("dynamic", [None, True])
def test_states_of_other_blocksizes_and_shapes_as_arguments(planned, kernel, make_layer, dynamic):
    """Dynamo then makes a symbol of what differs."""
    compiled = torch.compile(
        lambda weight, state: kernel._your_dequantize_nf4(weight, state), fullgraph=True, dynamic=dynamic
    )
    for sizes, blocksize in (((64, 320), 64), ((64, 640), 128), ((96, 128), 256)):
        layer = make_layer(*sizes, torch.float16, blocksize=blocksize)
        for _ in range(2):
            assert right(compiled(layer.weight, layer.weight.quant_state), layer)


def test_a_weight_of_a_dynamic_length(planned, kernel, layer):
    compiled = torch.compile(lambda w, s: kernel._your_dequantize_nf4(w, s), fullgraph=True)
    weight, state = layer.weight.data, layer.weight.quant_state
    torch._dynamo.mark_dynamic(weight, 0)
    for given in (weight, torch.cat([weight, weight])):
        for _ in range(2):
            assert exact(compiled(given, state), weight, state)
    with pytest.raises(REFUSED, match="holds 5000 bytes"):
        compiled(weight[:5000], state)


def test_a_state_that_the_graph_changes_is_seen_by_its_next_decode(planned, kernel, layer):
    weight, state = layer.weight, layer.weight.quant_state
    absmax, offset, packed = noise(state.absmax), noise(state.offset), noise(weight.data)

    def step(weight, state):
        results = [kernel._your_dequantize_nf4(weight, state)]
        state.absmax.copy_(absmax)
        state.offset.copy_(offset)
        results.append(kernel._your_dequantize_nf4(weight, state))
        weight.copy_(packed)
        results.append(kernel._your_dequantize_nf4(weight, state))
        return results

    compiled = torch.compile(step, **STATIC)
    with torch.no_grad():
        for _ in range(3):
            expected = [reference.dequantize(weight, state)]
            before = [x.detach().clone() for x in (state.absmax, state.offset, weight)]
            state.absmax.copy_(absmax)
            state.offset.copy_(offset)
            expected.append(reference.dequantize(weight, state))
            weight.copy_(packed)
            expected.append(reference.dequantize(weight, state))
            for x, value in zip((state.absmax, state.offset, weight), before, strict=True):
                x.copy_(value)
            assert all(map(reference.same_bits, compiled(weight, state), expected))
            assert exact(compiled(weight, state)[-1], weight, state)


SEEN = {
    "reshaped": lambda w: w.view(64, 160),
    "of one row": lambda w: w.t(),
    "from the middle of its storage": lambda w: torch.cat([w[:8], w])[8:],
    "transposed twice": lambda w: w.t(),
}
UNFIT = {
    "too short": lambda w: w[:5],
    "every second byte": lambda w: w[::2],
    "one byte again and again": lambda w: w[:1].expand(w.shape),
    "transposed": lambda w: w.view(64, 160).t(),
    "as_strided": lambda w: w.as_strided((len(w),), (0,)),
}


@pytest.mark.parametrize("view", SEEN)
def test_a_view_made_in_the_graph(planned, kernel, layer, view):
    state, packed = layer.weight.quant_state, layer.weight.data
    if view == "transposed twice":
        packed = packed.view(64, 160).t()
    compiled = torch.compile(lambda w, s: kernel._your_dequantize_nf4(SEEN[view](w), s), **STATIC)
    for _ in range(2):
        result = compiled(packed, state)
        assert result.shape == (state.shape[::-1] if view == "of one row" else state.shape)
        assert exact(result, SEEN[view](packed), state)


@pytest.mark.parametrize("view", UNFIT)
def test_a_view_made_in_the_graph_that_is_unfit_is_refused(planned, compiled, kernel, layer, view):
    """The tensor it is a view of would decode well, to other weights than were asked for."""
    state, packed = layer.weight.quant_state, layer.weight.data
    strided = torch.compile(lambda w, s: kernel._your_dequantize_nf4(UNFIT[view](w), s), **STATIC)
    with pytest.raises(REFUSED):
        kernel._your_dequantize_nf4(UNFIT[view](packed), state)
    for _ in range(2):
        with pytest.raises(REFUSED):
            strided(packed, state)
        warm(planned, compiled, layer)


def test_weights_from_the_middle_of_a_storage(planned, compiled, layer):
    state, packed = layer.weight.quant_state, layer.weight.data
    memory = torch.cat([packed, packed.flip(0)])
    for start in (0, 1, 4, 7, len(packed)):
        weight = memory[start:][: len(packed)]
        for _ in range(2):
            result, repeated = by_plan(planned, compiled, weight, state)
            assert exact(result, weight, state)
        assert repeated
    free(memory)
    with pytest.raises(REFUSED):
        compiled(weight, state)


def test_layers_that_share_an_absmax(planned, kernel, make_layer):
    layers = [make_layer(64, 96, torch.float16, seed=seed) for seed in range(3)]
    for other in layers[1:]:
        other.weight.quant_state.absmax = layers[0].weight.quant_state.absmax
    compiled = torch.compile(lambda layers: [kernel.your_dequantize_nf4(x) for x in layers], **STATIC)
    for order in (layers, layers[::-1], layers):
        assert all(map(right, compiled(order), order))


def test_in_every_mode_and_of_every_type(planned, compiled, layer):
    weight, state = warm(planned, compiled, layer)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast(weight.device.type)):
        with context:
            for given in (weight, weight.data, torch.nn.Parameter(weight.data, requires_grad=False)):
                for _ in range(2):
                    assert exact(compiled(given, state), weight, state)


def test_a_backward_pass_that_decodes_again(planned, kernel, layer):
    weight, state = layer.weight, layer.weight.quant_state

    def product(x):
        return x @ kernel._your_dequantize_nf4(weight, state)

    compiled = torch.compile(
        lambda x: torch.utils.checkpoint.checkpoint(product, x, use_reentrant=False), fullgraph=True
    )
    decoded = reference.dequantize(weight, state)
    for repeated in (False, True, True):
        x = torch.ones(4, 320, dtype=torch.float16, device=weight.device, requires_grad=True)
        before = planned.unplanned
        compiled(x).sum().backward()
        assert repeated <= (planned.unplanned == before)
        assert torch.equal(x.grad, torch.ones(4, 64, dtype=x.dtype, device=x.device) @ decoded.t())


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_plans_of_compiled_calls_go_with_their_absmax(planned, compiled, kernel, make_layer, nested):
    """Without the garbage collector; and so do the weight and what the plan had kept of the second level."""
    layer = make_layer(64, 320, torch.float16, nested=nested)
    weight, state = warm(planned, compiled, layer)
    gc.collect()
    gc.disable()
    try:
        absmax, packed = weakref.ref(state.absmax), weakref.ref(weight)
        name = kernel._identity(absmax())
        assert name in kernel._plans
        state.absmax = noise(state.absmax)
        assert absmax() is None and name not in kernel._plans
        assert exact(compiled(weight, state), weight, state)
        del layer, weight, state
        assert packed() is None and not kernel._plans
    finally:
        gc.enable()


def test_a_plan_is_not_shared_between_eager_and_compiled_calls(planned, kernel, compiled, layer):
    """An eager call transposes what a weight of one row gives, the operator's caller does it itself."""
    weight, state = layer.weight.data.t(), layer.weight.quant_state
    for call in (planned.kernel._your_dequantize_nf4, compiled) * 2:
        result = call(weight, state)
        assert result.shape == (64, 320) and exact(result, weight, state)


def test_where_inductors_names_are_missing_the_operator_is_called(planned, kernel, layer, monkeypatch):
    from torch._inductor import lowering

    monkeypatch.delattr(lowering.ir, "ExternKernelAlloc")
    compiled = torch.compile(lambda layer: kernel.your_dequantize_nf4(layer), **STATIC)
    result, code = code_of(compiled, layer)
    assert "torch.ops.nf4_triton.dequantize.default(" in code and ".run(" not in code
    assert right(result, layer) and right(compiled(layer), layer)


def test_where_inductor_writes_cpp_the_operator_is_called(planned, kernel, layer):
    compiled = torch.compile(
        lambda layer: kernel.your_dequantize_nf4(layer), options={"cpp_wrapper": True}, **STATIC
    )
    result, code = code_of(compiled, layer)
    assert "nf4_triton::dequantize" in code and "dequantize.default.run" not in code
    assert right(result, layer) and right(compiled(layer), layer)
