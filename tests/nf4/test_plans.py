"""A launch plan is never stale: whatever changes between two calls is honoured by the next one.

The first call on a state leaves a plan, later calls compare identities and addresses, then repeat it.
Without a GPU the interpreter stands in for the repeated launch (see conftest.py).
"""

import copy
import gc
import io
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
from layer_tensors import TENSORS  # beside this file

from helpers.nf4 import reference

pytest.importorskip("bitsandbytes")


@pytest.fixture
def layer(make_layer):
    """64 x 320 in bf16: 320 blocks of scales, 2 of the second level."""
    return make_layer(64, 320, torch.bfloat16)


def exact(result, weight, state):
    return reference.same_bits(result, reference.dequantize(weight, state))


def warm(planned, layer):
    """Call until the plan is in use, and prove that it is."""
    weight, state = layer.weight, layer.weight.quant_state
    for expect_plan in (False, True, True):
        result, by_plan = planned(weight, state)
        assert by_plan == expect_plan
        assert exact(result, weight, state)
    return weight, state


def fresh(layer, seed=1, **options):
    """Another layer of the same shape, on the same device."""
    from helpers.nf4.layers import quantized_layer

    state = layer.weight.quant_state
    out_features, in_features = state.shape
    return quantized_layer(
        in_features, out_features, state.dtype, device=layer.weight.device.type, seed=seed, **options
    )


def noise(x):
    """Other contents of the same shape and dtype."""
    return torch.randint_like(x, 256) if x.dtype == torch.uint8 else torch.rand_like(x) + 0.25


def replace(owner, name, change):
    setattr(owner, name, change(getattr(owner, name)))


def swap_data(x):
    x.data = noise(x)


def swap_storage(x):
    with torch.no_grad():
        x.set_(noise(x))


def grow_and_fill(x):
    """resize_ to a larger size moves the memory."""
    with torch.no_grad():
        x.resize_(4 * x.numel()).copy_(noise(x))


def refill_storage(x):
    """FSDP frees a shard's storage and fills it again, the tensor object stays."""
    values, storage = noise(x), x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    keep = torch.empty(size + 4096, dtype=torch.uint8, device=x.device)  # so that the memory is another
    storage.resize_(size)
    x.data.copy_(values)
    del keep


def requantize(layer):
    layer.weight = fresh(layer).weight


def only_the_state(layer):
    state = fresh(layer).weight.quant_state
    layer.weight.quant_state = state


def contents_of_another(layer):
    """load_state_dict and copy_: same tensors, other bytes."""
    other = fresh(layer)
    state, source = layer.weight.quant_state, other.weight.quant_state
    layer.weight.data.copy_(other.weight.data)
    state.absmax.copy_(source.absmax)
    state.state2.absmax.copy_(source.state2.absmax)
    state.offset.copy_(source.offset)


def flatten(layer):
    """From nested to flat in place."""
    state = layer.weight.quant_state
    state.absmax = torch.rand(state.absmax.numel(), device=layer.weight.device)
    state.nested, state.state2 = False, None


IN_PLACE = {
    "edited in place": lambda x: x.data.copy_(noise(x)),
    ".data replaced": swap_data,
    "set_": swap_storage,
    "storage freed and filled": refill_storage,
}


@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_changes_in_place(planned, layer, name, how):
    warm(planned, layer)
    tensor = TENSORS[name](layer)
    before = tensor.detach().clone()
    IN_PLACE[how](tensor)
    assert not torch.equal(tensor, before)
    for _ in range(2):
        result, _ = planned(layer.weight, layer.weight.quant_state)
        assert exact(result, layer.weight, layer.weight.quant_state)


@pytest.mark.parametrize("name", ["absmax", "state2.absmax", "state2.code"])
def test_a_tensor_grows_in_place(planned, layer, name):
    warm(planned, layer)
    grow_and_fill(TENSORS[name](layer))
    if name == "state2.code":  # the oracle wants 256 values and the kernel reads 256
        state2 = layer.weight.quant_state.state2
        expected = copy.copy(layer.weight.quant_state)
        expected.state2 = copy.copy(state2)
        expected.state2.code = state2.code[:256]
    else:
        expected = layer.weight.quant_state
    result, _ = planned(layer.weight, layer.weight.quant_state)
    assert exact(result, layer.weight, expected)


@pytest.mark.parametrize("name", list(TENSORS)[1:])
def test_a_tensor_is_replaced(planned, layer, name):
    weight, state = warm(planned, layer)
    owner = state.state2 if name.startswith("state2") else state
    replace(owner, name.removeprefix("state2."), noise)
    result, by_plan = planned(weight, state)
    assert exact(result, weight, state) and not by_plan
    assert planned(weight, state)[1], "a new plan was made"


def test_the_freed_memory_of_a_replaced_tensor_is_not_read(planned, layer):
    """The new tensor may even get the old one's address: the plan must be made anew, not trusted."""
    weight, state = warm(planned, layer)
    for _ in range(5):
        size = state.absmax.numel()
        state.absmax = None
        gc.collect()
        state.absmax = torch.randint(256, (size,), dtype=torch.uint8, device=weight.device)
        result, _ = planned(weight, state)
        assert exact(result, weight, state)


SCALARS = {
    "dtype to fp16": lambda state: setattr(state, "dtype", torch.float16),
    "dtype to fp32": lambda state: setattr(state, "dtype", torch.float32),
    "quant_type": lambda state: setattr(state, "quant_type", "fp4"),
    "blocksize": lambda state: setattr(state, "blocksize", 128),
    "blocksize 32": lambda state: halve_blocks(state),
    "state2.blocksize": lambda state: setattr(state.state2, "blocksize", 512),
    "shape transposed": lambda state: setattr(state, "shape", torch.Size(reversed(state.shape))),
    "shape smaller": lambda state: setattr(state, "shape", torch.Size([63, 5])),
    "shape of rank 3": lambda state: setattr(state, "shape", torch.Size([5, 64, 64])),
    "nothing": lambda state: None,
}


def halve_blocks(state):
    state.blocksize = 32
    state.absmax = torch.cat([state.absmax, noise(state.absmax)])
    state.state2.absmax = torch.cat([state.state2.absmax, noise(state.state2.absmax)])


@pytest.mark.parametrize("name", SCALARS)
def test_a_field_changes(planned, layer, name):
    weight, state = warm(planned, layer)
    SCALARS[name](state)
    result, by_plan = planned(weight, state)
    assert exact(result, weight, state)
    assert by_plan == (name == "nothing")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_a_second_level_of_another_dtype_is_refused(planned, kernel, layer, dtype):
    """bitsandbytes decodes absmax in it, and rounds there."""
    weight, state = warm(planned, layer)
    state.state2.dtype = dtype
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match="state2.dtype is"):
            planned(weight, state)
    state.state2.dtype = torch.float32
    result, by_plan = planned(weight, state)
    assert by_plan and exact(result, weight, state)


@pytest.mark.parametrize("change", [requantize, only_the_state, contents_of_another, flatten])
def test_the_state_changes_as_a_whole(planned, layer, change):
    weight, state = warm(planned, layer)
    before = planned(weight, state)[0]
    change(layer)
    for _ in range(2):
        result, _ = planned(layer.weight, layer.weight.quant_state)
        assert exact(result, layer.weight, layer.weight.quant_state)
        assert not torch.equal(result, before)


def test_another_weight_with_the_same_state(planned, layer):
    """A weight of its own address, its transpose, and one that is longer, all with one state."""
    weight, state = warm(planned, layer)
    for other in (noise(weight.data), weight.data.t(), torch.cat([weight.data, weight.data]), weight.data):
        for _ in range(2):
            result, _ = planned(other, state)
            assert result.shape == (state.shape[::-1] if other.shape[0] == 1 else state.shape)
            assert exact(result, other, state)


def test_a_weight_that_moves_keeps_its_plan(planned, layer):
    """FSDP gathers a weight into other memory for each use; the state stays."""
    weight, state = warm(planned, layer)
    kept = []
    planned(noise(weight.data), state)  # a plain tensor, whose plan is another
    for _ in range(4):
        kept.append(noise(weight.data))
        result, by_plan = planned(kept[-1], state)
        assert by_plan and exact(result, kept[-1], state)
        weight.data = kept[-1].clone()
        result, by_plan = planned(weight, state)
        assert by_plan and exact(result, weight, state)


@pytest.mark.parametrize("start", [1, 2, 4, 8])
def test_a_weight_that_moves_to_another_alignment(planned, layer, start):
    weight, state = warm(planned, layer)
    memory = torch.cat([weight.data.view(-1)[:start], weight.data.view(-1)])
    for _ in range(2):
        moved = memory[start:].view(weight.shape)
        assert exact(planned(moved, state)[0], moved, state)
        assert exact(planned(weight, state)[0], weight, state)


@pytest.mark.gpu
def test_a_weight_left_on_the_cpu_is_refused(planned, kernel, layer):
    weight, state = warm(planned, layer)
    with pytest.raises(kernel.UnsupportedState, match="on cpu"):
        planned(weight.data.cpu(), state)
    assert exact(planned(weight, state)[0], weight, state)


def shorten(x):
    with torch.no_grad():
        x.resize_(x.numel() // 2)


@pytest.mark.parametrize(
    "name",
    [
        "weight",
        "absmax",
        "state2.absmax",
        "state2.code",
    ],
)
def test_a_tensor_that_became_too_short_is_refused(planned, kernel, layer, name):
    warm(planned, layer)
    shorten(TENSORS[name](layer))
    with pytest.raises(kernel.UnsupportedState, match=name):
        planned(layer.weight, layer.weight.quant_state)


@pytest.mark.parametrize("name", TENSORS)
def test_a_view_whose_storage_was_freed_is_refused(planned, kernel, layer, name):
    """The shard of a flat parameter: its address is then its offset, not 0."""
    weight, state = warm(planned, layer)
    tensor = TENSORS[name](layer)
    memory = torch.cat([torch.zeros(64, dtype=tensor.dtype, device=tensor.device), tensor.data.view(-1)])
    tensor.data = memory[64:].view(tensor.shape)
    for _ in range(2):
        assert exact(planned(weight, state)[0], weight, state)
    memory.untyped_storage().resize_(0)
    assert tensor.data_ptr() == 64 * tensor.itemsize
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match=name):
            planned(weight, state)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_whose_storage_was_freed_is_refused(planned, kernel, layer, name):
    """FSDP frees the storage of a gathered shard; size and dtype of the tensor stay."""
    weight, state = warm(planned, layer)
    tensor = TENSORS[name](layer)
    values, storage = tensor.detach().clone(), tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match=name):
            planned(weight, state)
    storage.resize_(size)
    tensor.data.copy_(values)
    assert exact(planned(weight, state)[0], weight, state)


def test_forced_settings_are_honoured_at_once(planned, kernel, layer):
    weight, state = warm(planned, layer)
    with kernel.force(hints=False):
        assert not planned(weight, state)[1]
        assert planned(weight, state)[1]
    assert not planned(weight, state)[1], "back to the card's own decisions"
    kernel.force(card="t4")
    try:
        result, by_plan = planned(weight, state)
        assert exact(result, weight, state) and not by_plan
    finally:
        kernel.force()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: torch.load(saved(x), weights_only=False),
}


def saved(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("how", COPIES)
def test_plans_do_not_travel_with_copies(planned, layer, how):
    """A copy of a layer, or of its state, is planned anew and decodes its own tensors; the original stays."""
    weight, state = warm(planned, layer)
    twin = COPIES[how](layer)
    for x in TENSORS:
        TENSORS[x](twin).data.copy_(noise(TENSORS[x](twin)))
    result, by_plan = planned(twin.weight, twin.weight.quant_state)
    assert not by_plan and exact(result, twin.weight, twin.weight.quant_state)
    result, by_plan = planned(weight, state)
    assert by_plan and exact(result, weight, state)
    assert planned(twin.weight, twin.weight.quant_state)[1]
    lone = COPIES[how](state)
    result, by_plan = planned(weight, lone)
    assert not by_plan and exact(result, weight, lone)


def test_a_shallow_copy_of_the_state(planned, layer):
    """copy.copy takes the plan along; it holds only as long as the copy is unchanged."""
    weight, state = warm(planned, layer)
    twin = copy.copy(state)
    twin.absmax = noise(state.absmax)
    for _ in range(2):
        assert exact(planned(weight, twin)[0], weight, twin)
        assert exact(planned(weight, state)[0], weight, state)


def test_a_plan_is_no_part_of_a_state_dict(planned, layer):
    warm(planned, layer)
    assert all(isinstance(value, torch.Tensor) for value in layer.state_dict().values())
    assert not any("plan" in key for key in layer.state_dict())


def test_every_call_returns_memory_of_its_own(planned, layer):
    weight, state = warm(planned, layer)
    results = [planned(weight, state)[0] for _ in range(4)]
    assert len({result.data_ptr() for result in results}) == 4
    expected = reference.dequantize(weight, state)
    results[0].fill_(float("nan"))
    assert all(reference.same_bits(result, expected) for result in results[1:])


def test_a_given_out_is_used_whatever_the_plan(planned, kernel, layer):
    weight, state = warm(planned, layer)
    out = torch.full(state.shape, float("nan"), dtype=state.dtype, device=weight.device)
    result = kernel._your_dequantize_nf4(weight, state, out=out)
    assert result.data_ptr() == out.data_ptr() and exact(out, weight, state)
    assert planned(weight, state)[1], "the plan is still good"


@pytest.mark.parametrize("before", [0, 1, 8], ids="out + {}".format)
def test_outs_of_every_alignment_after_a_plan(planned, kernel, layer, before):
    weight, state = warm(planned, layer)
    n, nan = state.shape.numel(), float("nan")
    for _ in range(2):
        memory = torch.full((n + before + 8,), nan, dtype=state.dtype, device=weight.device)
        out = memory[before : before + n].view(state.shape)
        assert kernel._your_dequantize_nf4(weight, state, out=out).data_ptr() == out.data_ptr()
        assert exact(out, weight, state)
        assert memory[:before].isnan().all() and memory[before + n :].isnan().all()


def test_an_out_that_does_not_fit_is_refused_after_a_plan(planned, kernel, device, layer):
    weight, state = warm(planned, layer)
    good = torch.zeros(state.shape, dtype=state.dtype, device=weight.device)
    for bad in (
        good.t(),
        good.half(),
        good[:-1],
        good.view(-1),
        good.to("meta" if device == "cuda" else torch.float64),  # the stand-in's index, -1, is meta's too
        good.new_empty(320, 128)[:, ::2],
    ):
        with pytest.raises(kernel.UnsupportedState, match="out has"):
            kernel._your_dequantize_nf4(weight, state, out=bad)
    assert not good.any() and exact(planned(weight, state)[0], weight, state)


def test_a_plan_keeps_no_large_tensor_alive(planned, layer):
    """The packed weight and its absmax are freed with the layer's last reference, plan or no plan."""
    weight, state = warm(planned, layer)
    packed, absmax = weakref.ref(weight), weakref.ref(state.absmax)
    state.absmax = noise(state.absmax)
    gc.collect()
    assert absmax() is None
    layer.weight = None
    del weight
    gc.collect()
    assert packed() is None


@pytest.mark.gpu
def test_moved_to_the_cpu_and_back(planned, kernel, layer):
    warm(planned, layer)
    layer.to("cpu")
    with pytest.raises(kernel.UnsupportedState, match="on cpu"):
        planned(layer.weight, layer.weight.quant_state)
    layer.to("cuda")
    for _ in range(2):
        result, _ = planned(layer.weight, layer.weight.quant_state)
        assert exact(result, layer.weight, layer.weight.quant_state)


def launch_hooks():
    return triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel


def test_a_profilers_hook_sends_calls_to_the_public_path(planned, kernel, layer, monkeypatch):
    """A hook set by assignment, as in older Triton, and taken away again."""
    weight, state = warm(planned, layer)
    monkeypatch.setattr(launch_hooks(), "launch_enter_hook", lambda metadata: None)
    result, by_plan = planned(weight, state)
    assert exact(result, weight, state) and not by_plan
    monkeypatch.undo()


@pytest.mark.skipif(
    not hasattr(launch_hooks().launch_enter_hook, "add"), reason="this Triton has no hook chains"
)
@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_in_the_chain_sees_every_launch(planned, kernel, device, layer, which):
    weight, state = warm(planned, layer)
    chain, seen = getattr(launch_hooks(), which), []

    def hook(metadata):
        seen.append(metadata.get()["name"])

    chain.add(hook)
    try:
        for _ in range(3):
            result, by_plan = planned(weight, state)
            assert exact(result, weight, state) and not by_plan
    finally:
        chain.remove(hook)
    if device == "cuda":  # the interpreter calls no hooks
        assert seen == ["_your_dequantize_nf4_kernel"] * 3
    assert planned(weight, state)[1], "with the hook gone the plan is used again"


def test_states_that_are_no_quant_state(planned, make_layer):
    """Anything with the attributes works, and one without room for a plan works without."""
    layer = make_layer(64, 320, torch.float16)
    state = layer.weight.quant_state
    loose = SimpleNamespace(**{name: value for name, value in vars(state).items() if name != "_nf4_plan"})
    for _ in range(3):
        assert exact(planned(layer.weight, loose)[0], layer.weight, loose)


class Wrapper(torch.Tensor):
    """A size, a device and no memory, like a DTensor."""

    @staticmethod
    def __new__(cls, like, device=None):
        device = device or like.device
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a wrapper")


@pytest.mark.parametrize("with_plan", [False, True])
def test_a_tensor_that_only_wraps_others_is_refused(planned, kernel, layer, with_plan):
    """FSDP2's sharded weight is a DTensor: it has the whole weight's size and no memory of its own."""
    weight, state = warm(planned, layer) if with_plan else (layer.weight, layer.weight.quant_state)
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match="DTensor"):
            planned(Wrapper(weight.data), state)
    assert exact(planned(weight, state)[0], weight, state)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_wrapper_that_claims_a_gpu_where_there_is_none_is_refused(planned, kernel, layer):
    weight, state = warm(planned, layer)
    with pytest.raises(kernel.UnsupportedState, match="no memory"):
        planned(Wrapper(weight.data, "cuda:0"), state)


@pytest.mark.parametrize("with_plan", [False, True])
def test_fake_tensors_get_fake_results(planned, layer, with_plan):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    weight, state = warm(planned, layer) if with_plan else (layer.weight, layer.weight.quant_state)
    mode, plain = FakeTensorMode(allow_non_fake_inputs=True), weight.data.as_subclass(torch.Tensor)
    fake = mode.from_tensor(plain)
    with mode:
        for given in (fake, plain):
            result = planned(given, state)[0]
            assert isinstance(result, FakeTensor)
            assert (result.shape, result.dtype) == (state.shape, state.dtype)
    for _ in range(2):
        assert exact(planned(weight, state)[0], weight, state)


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize("how", ["make_fx", "jit.trace"])
@pytest.mark.filterwarnings("ignore")
def test_a_traced_call_follows_its_weight(planned, layer, how, with_plan):
    """A launch repeated past the tracer would leave the traced weight, or no weight at all, in the graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    weight, state = warm(planned, layer) if with_plan else (layer.weight, layer.weight.quant_state)
    if with_plan:  # one for the plain tensor, which is what is traced
        assert [planned(weight.data, state)[1] for _ in range(2)] == [False, True]

    def call(w):
        return planned(w, state)[0]

    if how == "make_fx":
        graph = make_fx(call)(weight.data)
    else:
        graph = torch.jit.trace(call, (weight.data,), check_trace=False)
    other = noise(weight.data)
    assert exact(graph(other), other, state)
    assert exact(planned(weight, state)[0], weight, state)


def test_a_kernel_that_was_replaced_is_not_repeated(planned, kernel, layer, monkeypatch):
    """As when a notebook's cell runs again: a plan belongs to the kernel it was compiled from."""
    weight, state = warm(planned, layer)
    original, launched = kernel._your_dequantize_nf4_kernel, []

    class Another:
        def __getitem__(self, grid):
            launched.append(grid)
            return original[grid]

    monkeypatch.setattr(kernel, "_your_dequantize_nf4_kernel", Another())
    result, by_plan = planned(weight, state)
    assert not by_plan and launched and exact(result, weight, state)


def test_a_plan_goes_with_its_absmax(planned, kernel, layer):
    """Else plans would pile up, and another tensor could come by the same id."""
    _, state = warm(planned, layer)
    assert len(kernel._plans) == 1
    state.absmax = state.absmax.clone()
    gc.collect()
    assert not kernel._plans


def test_an_address_counts_only_where_all_else_is_right(planned, kernel, layer):
    """Of a weight whose storage shrank, a view that fits is too short, and the whole weight has no memory."""
    weight, state = warm(planned, layer)
    shrunk = noise(weight.data)
    shrunk.untyped_storage().resize_(64)
    for short in (shrunk, shrunk.as_strided((64, 1), (1, 1)), shrunk):
        with pytest.raises(kernel.UnsupportedState):
            planned(short, state)
    assert planned(weight, state)[1] and exact(planned(weight, state)[0], weight, state)


@pytest.mark.parametrize("with_plan", [False, True])
def test_an_out_without_memory_of_its_own_is_refused(planned, kernel, layer, with_plan):
    weight, state = warm(planned, layer) if with_plan else (layer.weight, layer.weight.quant_state)
    n = state.shape.numel()
    memory = torch.zeros(2 * n, dtype=torch.uint8, device=weight.device)
    freed, over = torch.zeros(state.shape, dtype=state.dtype, device=weight.device), memory.view(state.dtype)
    freed.untyped_storage().resize_(0)
    inside = memory[n:][: weight.numel()].view(weight.shape).copy_(weight.data)
    for given, out in ((weight, freed), (inside, over.view(state.shape))):
        for _ in range(2):
            with pytest.raises(kernel.UnsupportedState, match="of its own"):
                kernel._your_dequantize_nf4(given, state, out=out)
    assert torch.equal(inside, weight.data)
    assert exact(planned(weight, state)[0], weight, state)


def test_autograd_notices_that_out_was_overwritten(planned, kernel, layer):
    weight, state = warm(planned, layer)
    for _ in range(2):
        out = torch.empty(state.shape, dtype=state.dtype, device=weight.device)
        kernel._your_dequantize_nf4(weight, state, out=out)
        x = torch.ones_like(out, requires_grad=True)
        loss = (x * out).sum()
        kernel._your_dequantize_nf4(weight, state, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        kernel._plans.clear()  # and by a first call


def test_strides_of_a_given_out_are_not_kept(planned, kernel, make_layer):
    """In a dimension of one element any stride is contiguous; a new result has torch's own."""
    layer = make_layer(320, 1, torch.float16)
    weight, state = layer.weight, layer.weight.quant_state
    out = torch.empty_strided(state.shape, (0, 1), dtype=state.dtype, device=weight.device)
    for _ in range(2):
        kernel._your_dequantize_nf4(weight, state, out=out)
        result, _ = planned(weight, state)
        assert result.stride() == (320, 1) and exact(result, weight, state)


@pytest.mark.gpu
def test_a_plan_keeps_its_codebook(planned, kernel, layer):
    """The first calls of two threads may each upload one, of which only the last stays in the cache.

    The allocator gives freed memory back to the stream that had it, the default one here: it takes all the
    small blocks there are, and one of these was the codebook if nothing kept it.
    """
    weight, state = warm(planned, layer)
    codebook = kernel.codebooks(weight.device).data_ptr()
    kernel.codebooks.cache_clear()
    gc.collect()
    taken, reserved = [], torch.cuda.memory_reserved()
    while torch.cuda.memory_reserved() == reserved:
        taken.append(torch.full((128,), float("nan"), device=weight.device))
    assert codebook not in {tensor.data_ptr() for tensor in taken}
    result, by_plan = planned(weight, state)
    assert by_plan and exact(result, weight, state)
