"""What another thread, a user's script or a checkpoint does to a layer between and during calls.

Every result is the state's as it was when the call began, or a refusal; nothing is left behind.
"""

import contextlib
import copy
import gc
import io
import pickle
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
from layer_tensors import TENSORS  # beside this file

from helpers.nf4 import reference

pytest.importorskip("bitsandbytes")
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Params4bit

FUNCTION = "_your_dequantize_nf4_kernel"
AOT_EAGER = {"backend": "aot_eager"}
BACKENDS = [
    pytest.param(AOT_EAGER, id="aot_eager"),
    pytest.param({"mode": "default"}, id="default", marks=pytest.mark.gpu),
]


def eager(kernel, weight, state):
    return kernel._your_dequantize_nf4(weight, state)


def through_the_operator(kernel, weight, state):
    return kernel._call_operator(weight, state, None)


@pytest.fixture(params=[eager, through_the_operator], ids=["eager", "operator"])
def call(request, planned):
    """call(layer): the result, and whether a plan gave it."""

    def by(layer):
        before = planned.unplanned
        result = request.param(planned.kernel, layer.weight, layer.weight.quant_state)
        return result, planned.unplanned == before

    return by


@pytest.fixture
def layer(make_layer):
    """64 x 320 in bf16: 320 blocks of scales, 2 of the second level."""
    return make_layer(64, 320, torch.bfloat16)


def oracle(layer):
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def exact(result, layer):
    return reference.same_bits(result, oracle(layer))


def warm(call, layer):
    for expect_plan in (False, True):
        result, by_plan = call(layer)
        assert by_plan == expect_plan and exact(result, layer)


def noise(x):
    """Other contents of the same shape and dtype, in memory of its own."""
    return torch.randint_like(x, 256) if x.dtype == torch.uint8 else torch.rand_like(x) + 0.25


def in_a_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def owner(layer, name):
    """What has the tensor or field of this name, and its name there."""
    state = layer.weight.quant_state
    return (state.state2 if name.startswith("state2.") else state), name.removeprefix("state2.")


class Compiling:
    """The kernel's Triton function while it compiles: `meanwhile` runs once, in another thread."""

    def __init__(self, function, meanwhile):
        self.function, self.meanwhile = function, meanwhile

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            action, self.meanwhile = self.meanwhile, None
            if action:
                in_a_thread(action)
            return self.function[grid](*arguments, **options)

        return launch


FIELDS = {
    "dtype": [torch.float16, torch.float32],
    "quant_type": ["fp4"],
    "blocksize": [128],
    "state2.blocksize": [512],
    "shape": [torch.Size([64, 320]), torch.Size([20, 64])],
}
MEANWHILE = {
    **{f"{name} assigned": (name, noise) for name in list(TENSORS)[1:]},
    **{
        f"{name} = {value}": (name, lambda _, value=value: value)
        for name, values in FIELDS.items()
        for value in values
    },
}


@pytest.mark.parametrize("change", MEANWHILE)
def test_a_field_is_assigned_while_the_first_call_compiles(kernel, call, layer, monkeypatch, change):
    """The first call is of the state as it was, the later ones of the state as it is."""
    name, new = MEANWHILE[change]
    holder, field = owner(layer, name)
    before, value = oracle(layer), new(getattr(holder, field))

    def assign():
        setattr(holder, field, value)

    monkeypatch.setattr(kernel, FUNCTION, Compiling(getattr(kernel, FUNCTION), assign))
    assert reference.same_bits(call(layer)[0], before)
    assert getattr(holder, field) is value and not reference.same_bits(oracle(layer), before)
    for _ in range(3):
        assert exact(call(layer)[0], layer)


@pytest.mark.parametrize("name", TENSORS)
def test_memory_is_swapped_while_the_first_call_compiles(kernel, call, layer, monkeypatch, name):
    """`.data =`, as offloading does it: the call launches from the memory that it checked."""
    tensor, before = TENSORS[name](layer), oracle(layer)
    other = noise(tensor.data)

    def swap():
        tensor.data = other

    monkeypatch.setattr(kernel, FUNCTION, Compiling(getattr(kernel, FUNCTION), swap))
    assert reference.same_bits(call(layer)[0], before)
    assert tensor.data_ptr() == other.data_ptr() and not reference.same_bits(oracle(layer), before)
    for _ in range(3):
        assert exact(call(layer)[0], layer)


def test_a_call_holds_what_it_launches_on_until_the_launch_is_queued(
    planned, kernel, layer, make_layer, monkeypatch
):
    """Between check and launch another thread replaces every tensor and lets the old ones go."""
    for _ in range(2):
        kernel.your_dequantize_nf4(layer)
    expected, other = oracle(layer), make_layer(64, 320, torch.bfloat16, seed=1)
    watched, alive = [weakref.ref(find(layer)) for find in TENSORS.values()], []
    allocate, stream, unplanned = kernel._empty_cuda, kernel._stream, planned.unplanned

    def replace():
        state, new = layer.weight.quant_state, other.weight.quant_state
        state.absmax, state.offset, state.state2 = new.absmax, new.offset, new.state2
        other.weight.quant_state = state
        layer.weight = other.weight
        gc.collect()

    def allocate_late(*arguments):
        in_a_thread(replace)
        return allocate(*arguments)

    def at_the_launch(index):
        alive.extend(reference() is not None for reference in watched)
        return stream(index)

    with monkeypatch.context() as patched:
        patched.setattr(kernel, "_empty_cuda", allocate_late)
        patched.setattr(kernel, "_stream", at_the_launch)
        result = kernel.your_dequantize_nf4(layer)
    assert planned.unplanned == unplanned and alive == [True] * len(TENSORS)
    assert reference.same_bits(result, expected)
    assert exact(kernel.your_dequantize_nf4(layer), layer)
    gc.collect()
    assert not any(reference() for reference in watched), "and no longer than that"


def restride(x):
    """Other elements at the same address, as many as before."""
    with torch.no_grad():
        x.as_strided_((64, x.shape[0] // 64), (1, 64)) if x.dim() > 1 else x.as_strided_(x.shape, (0,))


def reinterpret(x):
    x.data = x.data.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def free(x):
    x.untyped_storage().resize_(0)


LARGE = 33 << 20  # bytes: such storages are mapped, so that memory given back is the next to be had


def shrink(x):
    """A storage one byte too short for the tensor, at the address that it had before."""
    address, storage = x.data_ptr(), x.untyped_storage()
    size = storage.nbytes()
    for less in range(1, 4):
        storage.resize_(size - less)
        if x.data_ptr() == address:
            return
    raise AssertionError("the storage did not come back to its address")


def at_the_end_of_large_memory(x):
    memory = torch.zeros(LARGE // x.itemsize, dtype=x.dtype, device=x.device)
    memory[-x.numel() :] = x.data.view(-1)
    x.data = memory[-x.numel() :].view(x.shape)


BROKEN = {
    **{f"{name} re-strided": (name, restride) for name in list(TENSORS)[:4]},
    **{f"{name} re-interpreted": (name, reinterpret) for name in TENSORS},
    **{f"{name} shrunk at its address": (name, shrink) for name in list(TENSORS)[:4]},
}


@pytest.mark.parametrize("before", ["this layer", "a layer like it"])
@pytest.mark.parametrize("what", BROKEN)
def test_what_a_first_call_refuses_a_later_call_refuses(kernel, call, layer, make_layer, what, before):
    name, spoil = BROKEN[what]
    tensor = TENSORS[name](layer)
    good = tensor.data.clone()
    if spoil is shrink:
        at_the_end_of_large_memory(tensor)
    warm(call, layer if before == "this layer" else make_layer(64, 320, torch.bfloat16, seed=1))
    spoil(tensor)
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match=name.split(".")[0]):
            call(layer)
    tensor.data = good
    for _ in range(2):
        assert exact(call(layer)[0], layer)


def test_a_weight_that_loses_its_dimensions_is_refused(kernel, call, make_layer):
    """One byte has the same size and address without them."""
    layer = make_layer(2, 1, torch.float16)
    warm(call, layer)
    layer.weight.data = layer.weight.data.view(())
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match="no dimension"):
            call(layer)
    layer.weight.data = layer.weight.data.view(1)  # as the refusal says
    for _ in range(2):
        assert exact(call(layer)[0], layer)


def test_a_weight_that_ends_past_a_storage_of_the_planned_size_is_refused(kernel, call, layer):
    """Planned at the start of 2 n bytes, then found at 2 n in a storage that shrank to 2 n."""
    tensor = layer.weight
    n = tensor.nbytes
    two, three = (torch.zeros(k * n, dtype=torch.uint8, device=tensor.device) for k in (2, 3))
    two[:n] = tensor.data.view(-1)
    tensor.data = two[:n].view(tensor.shape)
    warm(call, layer)
    tensor.data = three[2 * n :].view(tensor.shape)
    three.untyped_storage().resize_(2 * n)
    with pytest.raises(kernel.UnsupportedState, match="weight"):
        call(layer)


def test_a_shorter_view_does_not_vouch_for_a_weight_that_shrank(kernel, call, layer):
    warm(call, layer)
    weight, state = layer.weight, layer.weight.quant_state
    storage, n = weight.untyped_storage(), weight.nbytes
    storage.resize_(n // 2)
    short = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(storage, 0, (n // 2, 1))
    for given in (weight, short, weight, weight):
        with pytest.raises(kernel.UnsupportedState, match="weight"):
            kernel._your_dequantize_nf4(given, state)


def test_a_storage_that_left_does_not_vouch_for_another_at_its_address(kernel, call, layer):
    """FSDP frees its flat parameter and gathers it elsewhere; a storage that shrank lands in its place."""
    weight = layer.weight

    def at_the_end(size):
        memory = torch.zeros(size, dtype=torch.uint8, device=weight.device)
        return memory, memory[LARGE - weight.nbytes : LARGE].view(weight.shape).copy_(weight.data)

    flat, weight.data = at_the_end(LARGE)
    warm(call, layer)
    address, (other, view) = flat.data_ptr(), at_the_end(LARGE + (1 << 20))
    flat.untyped_storage().resize_(0)
    other.untyped_storage().resize_(LARGE - 1)
    flat.untyped_storage().resize_(LARGE)
    if not other.data_ptr() == address != flat.data_ptr():
        pytest.skip("the storage did not land at the address that the other had left")
    weight.data = view
    for _ in range(2):
        with pytest.raises(kernel.UnsupportedState, match="weight"):
            call(layer)


def test_a_layout_seen_only_while_guards_are_made_is_not_learnt(planned, kernel, layer, monkeypatch):
    """Another thread re-strides the weight for a moment: the strided weight is refused for good."""
    for _ in range(2):
        kernel.your_dequantize_nf4(layer)
    make, weight = kernel._guards, layer.weight
    shape, stride = weight.shape, weight.stride()

    def meanwhile(*tensors):
        restride(weight)
        guards = make(*tensors)
        with torch.no_grad():
            weight.as_strided_(shape, stride)
        return guards

    with monkeypatch.context() as patched:
        patched.setattr(kernel, "_guards", meanwhile)
        with torch.inference_mode():  # a state of torch in which guards are made anew
            kernel.your_dequantize_nf4(layer)
    restride(weight)
    with torch.inference_mode(), pytest.raises(kernel.UnsupportedState, match="not contiguous"):
        kernel.your_dequantize_nf4(layer)


def saved(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def loaded(data):
    """What comes back with weights_only=True and bitsandbytes' classes allowed, or why nothing does."""
    with torch.serialization.safe_globals([functional.QuantState, Params4bit, Linear4bit]):
        try:
            return str(torch.load(io.BytesIO(data), weights_only=True))
        except pickle.UnpicklingError as error:
            return re.sub(r"\d{6,}", "", str(error))


PARTS = {
    "state dict": lambda layer: layer.state_dict(),
    "packed state": lambda layer: layer.weight.quant_state.as_dict(packed=True),
    "QuantState": lambda layer: vars(layer.weight.quant_state),
    "Params4bit": lambda layer: layer.weight,
    "Linear4bit": lambda layer: layer,
}


@pytest.mark.parametrize("part", PARTS)
def test_what_is_saved_of_a_used_layer_is_what_is_saved_of_another(planned, layer, make_layer, part):
    unused = make_layer(64, 320, torch.bfloat16)
    for call in (eager, eager, through_the_operator, through_the_operator):
        call(planned.kernel, layer.weight, layer.weight.quant_state)
    mine, theirs = (saved(PARTS[part](x)) for x in (layer, unused))
    assert len(mine) == len(theirs)
    assert address_free(loaded(mine)) == address_free(loaded(theirs))
    if part in ("state dict", "packed state"):
        assert "Unsupported" not in loaded(mine) and "tensor(" in loaded(mine)


def address_free(text):
    return re.sub(r"0x[0-9a-f]+", "", text)


def attributes(layer):
    """Every attribute of a layer, its weight, its states and their tensors: names and objects."""
    state = layer.weight.quant_state
    tensors = [find(layer) for find in TENSORS.values()]
    return [dict(vars(x)) for x in (layer, layer.weight, state, state.state2, *tensors)]


def test_use_adds_no_attribute(planned, layer):
    before = attributes(layer)
    for call in (eager, eager, through_the_operator, through_the_operator):
        call(planned.kernel, layer.weight, layer.weight.quant_state)
    after = attributes(layer)
    assert [list(x) for x in after] == [list(x) for x in before]
    for mine, theirs in zip(after, before, strict=True):
        assert all(mine[name] is theirs[name] for name in mine)
    names = [list(x) for x in before]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert [list(x) for x in attributes(twin)] == names


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("card", [None, "t4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_an_offset_of_the_default_dtype(kernel, call, layer, card, dtype):
    """A model that is loaded under another default dtype is decoded as bitsandbytes decodes it."""
    packed = layer.weight.quant_state.as_dict(packed=True)
    with default_dtype(dtype):
        state = functional.QuantState.from_dict(packed, layer.weight.device)
    assert state.offset.dtype == dtype
    layer.weight.quant_state = state
    expected = functional.dequantize_4bit(layer.weight.data, state)
    assert exact(expected, layer)
    with kernel.force(card=card):
        for expect_plan in (False, True):
            result, by_plan = call(layer)
            assert by_plan == expect_plan and reference.same_bits(result, expected)


def test_a_layer_keeps_the_state_that_its_weight_lost(kernel, layer):
    """As after FSDP or a `weight` rebuilt without its attributes."""
    expected = oracle(layer)
    layer.quant_state, layer.weight.quant_state = layer.weight.quant_state, None
    for _ in range(2):
        assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("name", list(TENSORS)[:4])
def test_a_refusal_of_strides_says_what_helps(kernel, layer, name):
    expected = oracle(layer)

    def change(new):
        if name == "weight":
            layer.weight.data = new(layer.weight.data)
        else:
            holder, field = owner(layer, name)
            setattr(holder, field, new(getattr(holder, field)))

    change(strided)
    with pytest.raises(kernel.UnsupportedState, match=rf"use {name}\.contiguous\(\)") as caught:
        kernel.your_dequantize_nf4(layer)
    assert "bitsandbytes" not in str(caught.value), "which decodes it"
    change(torch.Tensor.contiguous)
    assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


def test_the_refusal_of_a_blocksize_is_true_of_bitsandbytes(kernel, layer):
    layer.weight.quant_state.blocksize = 96
    with pytest.raises(kernel.UnsupportedState) as caught:
        kernel.your_dequantize_nf4(layer)
    least, most = map(int, re.search(r"bitsandbytes makes (\d+) to (\d+)", str(caught.value)).groups())
    values = torch.randn(8192, device=layer.weight.device)

    def makes(blocksize):
        try:
            functional.quantize_4bit(values, blocksize=blocksize, quant_type="nf4")
        except (ValueError, RuntimeError, AssertionError):
            return False
        return True

    sizes = [size for size in (2**k for k in range(3, 14)) if makes(size)]
    assert (sizes[0], sizes[-1]) == (least, most)


def test_plans_die_with_their_absmax(planned, kernel, layer, monkeypatch):
    """1,000 states come and go; the launch itself is left out, plans are made all the same."""
    monkeypatch.setattr(kernel, "_launch", lambda *arguments: None)
    monkeypatch.setattr(kernel, "_repeat", lambda *arguments: lambda *addresses: None)
    for i in range(1000):
        state = copy.copy(layer.weight.quant_state)
        state.absmax = state.absmax.clone()
        planned(layer.weight, state)
        assert len(kernel._plans) == 1 and planned.unplanned == i + 1
    del state
    gc.collect()
    assert not kernel._plans


def ways_of_one_absmax(layer):
    """Four calls with one absmax: the weight, plain, transposed, and to another dtype."""
    weight, state = layer.weight, layer.weight.quant_state
    half = copy.copy(state)
    half.dtype = torch.float16
    return [(weight, state), (weight.data, state), (weight.data.t(), state), (weight, half)]


def test_several_plans_of_one_absmax_are_all_used(planned, layer):
    ways = ways_of_one_absmax(layer)
    for turn in range(4):
        for weight, state in ways:
            result, by_plan = planned(weight, state)
            assert by_plan == (turn > 0)
            assert reference.same_bits(result, reference.dequantize(weight, state))


class OneAtATime(Compiling):
    """The interpreter runs one kernel at a time."""

    def __init__(self, function):
        self.function, self.lock = function, threading.Lock()

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            with self.lock:
                return self.function[grid](*arguments, **options)

        return launch


def test_threads_share_the_plans_of_one_absmax(planned, kernel, layer, monkeypatch):
    monkeypatch.setattr(kernel, FUNCTION, OneAtATime(getattr(kernel, FUNCTION)))
    ways = ways_of_one_absmax(layer) * 2
    expected = [reference.dequantize(*way) for way in ways]
    wrong, start = [], threading.Barrier(len(ways))

    def use(way, right):
        try:
            start.wait()
            results = [planned.kernel._your_dequantize_nf4(*way) for _ in range(5)]
            wrong.extend(way for result in results if not reference.same_bits(result, right))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=pair) for pair in zip(ways, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for weight, state in ways:
        planned(weight, state)  # of plans made at the same time one may be lost
    assert all(planned(weight, state)[1] for weight, state in ways)


def test_a_plan_is_used_in_every_state_of_torch(planned, layer, device):
    """autocast, no_grad and inference_mode change what guards compare; no call is a first call again."""
    modes = {
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "none": contextlib.nullcontext,
    }
    planned(layer.weight, layer.weight.quant_state)
    for _ in range(3):
        for name, mode in modes.items():
            with mode():
                result, by_plan = planned(layer.weight, layer.weight.quant_state)
            assert by_plan and exact(result, layer), name
            assert result.is_inference() == (name == "inference_mode")


def private_names():
    """(object, attribute) of each private name of torch that the kernel asks for."""
    text = Path(__file__).parents[2].joinpath("helpers", "nf4", "kernel.py").read_text()
    pairs = re.findall(r'_private\(([\w.]+), "([\w.]+)"', text)
    assert len(pairs) >= 8
    return [f"{root}.{path}" for root, path in pairs]


@pytest.mark.parametrize("name", private_names())
def test_without_a_private_name_the_public_path_is_exact(
    planned_kernel, changed_kernel, make_layer, monkeypatch, name
):
    parent, _, attribute = name.removeprefix("torch.").rpartition(".")
    holder = torch
    for part in filter(None, parent.split(".")):
        holder = getattr(holder, part)
    with monkeypatch.context() as patched:
        patched.delattr(holder, attribute, raising=False)
        module = changed_kernel(f"without_{attribute}")
    planned = planned_kernel(module)
    layer = make_layer(64, 80, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    for expect_plan in (False, True, True):
        result, by_plan = planned(weight, state)
        assert by_plan == expect_plan and exact(result, layer)
    out = torch.full_like(result, float("nan"))
    assert exact(module.your_fast_dequantize(weight, state, out=out), layer)
    assert exact(through_the_operator(module, weight, state), layer)
    state.absmax = noise(state.absmax)
    assert exact(planned(weight, state)[0], layer)
    state.absmax = strided(state.absmax)
    with pytest.raises(module.UnsupportedState, match="not contiguous"):
        planned(weight, state)


def test_the_public_allocator_takes_what_the_private_one_takes(changed_kernel, device, monkeypatch):
    """Also where there is no GPU to allocate on: the call is torch's own but for the device."""
    allocate = torch.empty_strided
    with monkeypatch.context() as patched:
        patched.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
        patched.setattr(torch, "empty_strided", lambda *a, **k: allocate(*a, **{**k, "device": device}))
        out = changed_kernel("allocating")._empty_cuda((2, 3), (3, 1), torch.float16)
    assert (out.shape, out.stride(), out.dtype) == ((2, 3), (3, 1), torch.float16)


def move(x):
    x.data = x.data.clone()


@pytest.mark.parametrize("options", BACKENDS)
@pytest.mark.parametrize("spoil", [restride, reinterpret, free, move])
def test_compiled_calls_see_what_happened_to_a_tensor(kernel, layer, spoil, options):
    """Refused with the reason, at the call or while Dynamo traces it; moved memory is followed."""
    torch._dynamo.reset()
    compiled = torch.compile(kernel.your_dequantize_nf4, fullgraph=True, **options)
    for name, find in TENSORS.items():
        if spoil is restride and name == "offset":
            continue  # one element has no strides
        for _ in range(2):
            assert exact(compiled(layer), layer)
        tensor = find(layer)
        good = tensor.data.clone()
        spoil(tensor)
        if spoil is move:
            tensor.data.copy_(noise(tensor.data))
            assert exact(compiled(layer), layer)
            continue
        for _ in range(2):
            with pytest.raises(Exception, match=rf"{name.split('.')[0]}.*expected"):
                compiled(layer)
        tensor.data = good
    assert exact(compiled(layer), layer)


KINDS = {
    "fp4": dict(quant_type="fp4"),
    "flat": dict(nested=False),
    "fp32": dict(dtype=torch.float32),
    "blocksize 32": dict(blocksize=32),
    "tail": dict(in_features=63, out_features=5),
    "unaligned": {},
}


@pytest.mark.parametrize("options", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_compiles_whole(kernel, make_layer, kind, options):
    torch._dynamo.reset()
    made = {"in_features": 64, "out_features": 80, "dtype": torch.float16, **KINDS[kind]}
    layer = make_layer(**made)
    if kind == "unaligned":
        memory = torch.cat([layer.weight.data.view(-1)[:1], layer.weight.data.view(-1)])
        layer.weight.data = memory[1:].view(layer.weight.shape)
        assert layer.weight.data_ptr() % 4
    compiled = torch.compile(kernel.your_dequantize_nf4, fullgraph=True, **options)
    for _ in range(2):
        assert exact(compiled(layer), layer)
    layer.weight.data.bitwise_xor_(255)
    assert exact(compiled(layer), layer)
