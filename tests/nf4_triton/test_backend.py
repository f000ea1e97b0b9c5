"""`nf4_triton.dequantize`: its arguments, its errors, and NF4_BACKEND=triton|torch|auto."""

import os
import shutil
import types

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

import processes
from nf4_triton import backend, environment
from nf4_triton.backend import choose, dequantize
from nf4_triton.core import launch, launch_general
from nf4_triton.core.reference import same_bits
from nf4_triton.core.supported import UnsupportedState
from states import oracle, random_state

BOTH = ["triton", "torch"]


class Own(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget answers that other tests cached."""
    monkeypatch.delenv("NF4_BACKEND", raising=False)
    backend.why_torch.cache_clear()


@pytest.mark.parametrize("name", [*BOTH, "auto"])
def test_every_backend_gives_the_same_bits(monkeypatch, make_layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    layer = make_layer(64, 32, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    expected = oracle(weight, state)
    with torch.device("meta"):  # as where a model is built
        for arguments in ((layer,), (weight,), (weight.data, state)):
            assert same_bits(dequantize(*arguments), expected)
        assert same_bits(dequantize(layer, rows=[1]), expected[[1]])


@pytest.mark.parametrize("name", BOTH)
def test_ids_of_any_number_of_dimensions(monkeypatch, name, device):
    """As for an embedding; also strided ids on the CPU."""
    nn = pytest.importorskip("bitsandbytes.nn")
    monkeypatch.setenv("NF4_BACKEND", name)
    embedding = nn.EmbeddingNF4(50, 64, dtype=torch.float16).to(device)
    whole = dequantize(embedding)
    drawn = torch.randint(50, (4, 3), device=device)
    for ids in (drawn[0, 0], drawn.t(), drawn[:, 0].cpu(), drawn[:0]):
        out = torch.full((*ids.shape, 64), torch.nan, dtype=torch.float16, device=device)
        assert same_bits(dequantize(embedding, rows=ids), whole[ids])
        assert dequantize(embedding, out=out, rows=ids) is out and same_bits(out, whole[ids])
    with pytest.raises(UnsupportedState, match=r"out has .* expected \(\(4, 3, 64\)"):
        dequantize(embedding, out=whole.new_empty(12, 64), rows=drawn)


@pytest.mark.parametrize("name", BOTH)
def test_subclasses(monkeypatch, name):
    """They can be given, and `out` is returned; without it the result is a plain tensor."""
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((8, 64), torch.float16)
    expected, ids = oracle(weight, state), torch.tensor([3, 1], device=weight.device)
    out = torch.full_like(expected, torch.nan).as_subclass(Own)
    assert dequantize(weight, state, out) is out and torch.equal(out, expected)
    assert out._version  # autograd sees that it was written
    result = dequantize(weight.as_subclass(Own), state, rows=ids.as_subclass(Own))
    assert type(result) is torch.Tensor and same_bits(result, expected[ids])


def test_the_rule(monkeypatch, device):
    """The kernel where it can run, else PyTorch; a name overrides it."""
    assert choose(torch.device(device)) == "triton"
    if device == "cpu":  # without the interpreter a CPU takes PyTorch
        monkeypatch.setattr(environment, "interpreted", lambda: False)
        backend.why_torch.cache_clear()
        assert choose(torch.device("cpu")) == "torch"
    for name in ("triton", "torch"):
        monkeypatch.setenv("NF4_BACKEND", name)
        assert choose(torch.device("cpu")) == name
    weight, state = random_state((8, 64), torch.float16)
    with monkeypatch.context() as patched:
        patched.setattr(launch, "relaunch", None)  # a cached launch is not even looked for
        assert same_bits(dequantize(weight, state), oracle(weight, state))
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*auto, triton, torch"):
        choose(torch.device("cpu"))


COMPILERS = [os.environ.get("CXX", "g++"), "g++", "clang++"]


def test_compiled_on_a_cpu_without_the_interpreter():
    """The kernel cannot run there. Inductor would leave out the rounding that .float() follows; its C++
    compiler takes no path with a space."""
    can_build = any(map(shutil.which, COMPILERS)) and " " not in torch.__file__
    compiler = "inductor" if can_build else "aot_eager"
    code = f"""
import torch
from nf4_triton import dequantize
import sys; sys.path.append("tests/nf4_triton")
import states
weight, state = states.random_state((64, 64), torch.bfloat16, device="cpu")
def call(w):
    return dequantize(w, state).float()
print(torch.equal(torch.compile(call, backend="{compiler}", fullgraph=True)(weight), call(weight)))
"""
    quick = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    variables = {"TRITON_INTERPRET": None, "NF4_BACKEND": None} | quick
    said = processes.python(["-c", code], variables=variables).out
    assert said.endswith("True\n"), said


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.filterwarnings("error:.*autograd")
def test_what_requires_grad(monkeypatch, name):
    """Scales where bitsandbytes quantizes a parameter; codes stored in a float dtype."""
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((64, 64), torch.float16)
    expected = oracle(weight, state)
    weight = weight.view(-1).view(torch.bfloat16)
    for tensor in (state.state2.absmax, state.offset, weight):
        tensor.requires_grad_()
    x = torch.ones(64, dtype=torch.float16, device=weight.device, requires_grad=True)
    for call in (dequantize, torch.compile(dequantize, backend="aot_eager", fullgraph=True)):
        result = call(weight, state)
        assert same_bits(result, expected) and not result.requires_grad
        (call(weight, state) @ x).sum().backward()
        assert weight.grad is None
        assert same_bits(dequantize(weight, state, rows=[1, 0]), expected[[1, 0]])


def test_scales_with_more_dimensions(monkeypatch):
    """PyTorch would multiply a column of code values with a row of scales."""
    monkeypatch.setenv("NF4_BACKEND", "torch")
    weight, state = random_state((64, 64), torch.float16)
    expected = oracle(weight, state)
    state.absmax, state.offset = state.absmax.view(-1, 1), state.offset.view(1, 1)
    state.state2.code, state.state2.absmax = state.state2.code.view(-1, 1), state.state2.absmax.view(1, -1)
    assert same_bits(dequantize(weight, state), expected)


@pytest.mark.parametrize("name", BOTH)
def test_vmap_over_the_scales(monkeypatch, name):
    """The codes are shared."""
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((16, 64), torch.float16)

    def call(absmax):
        return dequantize(weight, types.SimpleNamespace(**vars(state) | {"absmax": absmax}))

    several = torch.stack([state.absmax, state.absmax.flip(0)])
    assert all(map(same_bits, torch.vmap(call)(several), map(call, several)))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", BOTH)
def test_fake_tensors_beside_a_real_weight(monkeypatch, name, device):
    """Without their mode no operator takes both; a kernel would get the address 0."""
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((8, 64), torch.float16)
    fake = FakeTensorMode().from_tensor
    ids, out = torch.arange(8, device=device), torch.empty(8, 64, dtype=torch.float16, device=device)
    for options in ({"rows": fake(ids)}, {"out": fake(out)}):
        with pytest.raises(UnsupportedState, match=f"{[*options][0]} has no memory.*fake"):
            dequantize(weight, state, **options)
    state.absmax = fake(state.absmax)
    with pytest.raises(UnsupportedState, match="absmax has no memory.*fake"):
        dequantize(weight, state)


@pytest.mark.parametrize("name", BOTH)
def test_traced_ids_of_a_real_weight(monkeypatch, name):
    """An exported module whose weight is no parameter."""
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((16, 96), torch.bfloat16)
    whole, ids = oracle(weight, state), torch.arange(0, 16, 3, device=weight.device)

    class Lookup(torch.nn.Module):
        def forward(self, ids):
            return dequantize(weight, state, rows=ids)

    few = {"ids": {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(Lookup(), (ids,), dynamic_shapes=few, strict=False).module()
    for count in (4, 2, 0):
        assert same_bits(exported(ids[:count]), whole[ids[:count]])


@pytest.mark.parametrize("error", [OSError("no space"), triton.TritonError("IR")], ids=repr)
def test_a_kernel_that_cannot_be_launched_names_the_way_out(monkeypatch, device, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(launch_general, "dequantize_tensors", broken)
    with pytest.raises(RuntimeError, match=f"{error}.: set NF4_BACKEND=torch"):
        dequantize(*random_state((8, 64), torch.float16))


@pytest.mark.parametrize("name", BOTH)
def test_malformed_input_is_named_without_a_log_line(monkeypatch, make_layer, caplog, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((32, 64), torch.bfloat16)
    array, layer = weight.cpu().numpy(), make_layer(64, 64, torch.bfloat16)
    as_lightning_makes_it = type(layer)(64, 64, device="meta")  # layer.to('cuda') cannot work yet
    for arguments, text in (
        (
            (torch.nn.Linear(4, 4),),
            "torch.nn.* .its weight is a Parameter on c.* no quant_state.*own library",
        ),
        ((as_lightning_makes_it,), "Params4bit on meta.* with its values, moved to the GPU"),
        ((torch.nn.Sequential(layer),), "Sequential has no quant_state, expected one bitsandbytes layer"),
        (
            (state, weight),
            "quant_state is a Tensor.*the order of arguments is dequantize.weight, quant_state, out",
        ),
        ((weight, vars(state)), "quant_state is a dict, expected a QuantState"),
        (((layer, "weight", 1),), "tuple has no quant_state.*.module, 'name'. of"),
        ((array, state), "the weight is ndarray"),
        ((weight, state, None, torch.float64), "^dtype is torch.float64, expected one of"),
    ):
        with pytest.raises(UnsupportedState, match=text):
            dequantize(*arguments)
    with pytest.raises(TypeError, match=r"^dequantize\(\) missing"):
        dequantize()
    assert not caplog.text


def test_the_advice_for_a_layer_that_torch_exports(make_layer):
    """This layer has no state beside its weight's, as where a library assigns the Params4bit."""

    class Whole(torch.nn.Sequential):
        def forward(self):
            return dequantize(self[0])

    layer = make_layer(64, 64, torch.bfloat16)
    module = Whole(layer)
    with pytest.raises(UnsupportedState, match="first set layer.quant_state = layer.weight"):
        torch.export.export(module, (), strict=False)
    layer.quant_state = layer.weight.quant_state
    assert same_bits(torch.export.export(module, (), strict=False).module()(), dequantize(layer))
