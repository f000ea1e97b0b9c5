"""`nf4_triton.dequantize`: its arguments, its errors, and NF4_BACKEND=triton|torch|auto."""

import subprocess

import pytest
import torch
import triton

from helpers import machine
from nf4_triton import backend, environment, launch_general
from nf4_triton.backend import choose, dequantize
from nf4_triton.reference import same_bits
from nf4_triton.settings import UnsupportedState
from states import freed, odd_states, oracle, random_state

ODD = odd_states("cpu")
BOTH = ["triton", "torch"]


class Own(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No answer remembered from another test."""
    monkeypatch.delenv("NF4_BACKEND", raising=False)
    backend.why_torch.cache_clear()


@pytest.mark.parametrize("name", ["triton", "torch", "auto", " Torch "])
def test_every_backend_gives_the_same_bits(monkeypatch, make_layer, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    layer = make_layer(64, 32, torch.bfloat16)
    weight, state = layer.weight, layer.weight.quant_state
    expected = oracle(weight, state)
    out = torch.full_like(expected, torch.nan)
    for arguments in ((layer,), (weight,), (weight.data, state), (weight.data, state, out)):
        assert same_bits(dequantize(*arguments), expected)
    assert same_bits(out, expected)
    compiled = torch.compile(lambda w: dequantize(w, state), backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(weight.data), expected)


@pytest.mark.parametrize("name", BOTH)
def test_another_dtype_is_rounded_once(monkeypatch, make_layer, name):
    """So it differs from the library's result, converted. The state is not changed."""
    monkeypatch.setenv("NF4_BACKEND", name)
    layer = make_layer(64, 32, torch.float16)
    exact = dequantize(layer, dtype=torch.float32)
    assert layer.weight.quant_state.dtype == torch.float16
    assert same_bits(dequantize(layer), exact.half())
    for dtype in (torch.float32, torch.bfloat16):
        result = dequantize(layer, dtype=dtype)
        assert same_bits(result, exact.to(dtype)) and not same_bits(result, dequantize(layer).to(dtype))


@pytest.mark.parametrize("name", BOTH)
def test_ids_of_any_number_of_dimensions(monkeypatch, name, device):
    """As an embedding is looked up."""
    nn = pytest.importorskip("bitsandbytes.nn")
    monkeypatch.setenv("NF4_BACKEND", name)
    embedding = nn.EmbeddingNF4(50, 64, dtype=torch.float16).to(device)
    whole = dequantize(embedding)
    drawn = torch.randint(50, (4, 3), device=device)
    for ids in (drawn[0, 0], drawn.t(), drawn[:, None], drawn[:0]):
        out = torch.full((*ids.shape, 64), torch.nan, dtype=torch.float16, device=device)
        assert same_bits(dequantize(embedding, rows=ids), whole[ids])
        assert dequantize(embedding, out=out, rows=ids) is out and same_bits(out, whole[ids])
    out = whole.new_empty(4, 3, 128)
    for given in (out[..., :64], out.view(12, 128)[:, :64], out.view(8, 3, 64)[:4].float()):
        with pytest.raises(UnsupportedState, match=r"out has .* expected \(\(4, 3, 64\)"):
            dequantize(embedding, out=given, rows=drawn)


@pytest.mark.parametrize("name", BOTH)
def test_inference_tensors_and_subclasses(monkeypatch, name):
    """They can be given, and `out` is returned; without it the result is a plain tensor."""
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((8, 64), torch.float16)
    expected, ids = oracle(weight, state), torch.tensor([3, 1], device=weight.device)
    with torch.inference_mode():
        inference = torch.full_like(expected, torch.nan)
    own = torch.full_like(expected, torch.nan).as_subclass(Own)
    for out in (inference, own):
        assert dequantize(weight, state, out) is out and torch.equal(out, expected)
    assert own._version  # autograd sees that it was written
    for rows, wanted in ((None, expected), (ids.as_subclass(Own), expected[ids])):
        result = dequantize(weight.as_subclass(Own), state, rows=rows)
        assert type(result) is torch.Tensor and same_bits(result, wanted)


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
    monkeypatch.setenv("NF4_BACKEND", "cuda")
    with pytest.raises(ValueError, match="'cuda'.*triton, torch, auto"):
        choose(torch.device("cpu"))


def test_compiled_on_a_cpu_without_the_interpreter():
    """The kernel cannot run there: PyTorch is traced."""
    code = """
import torch
from nf4_triton import dequantize
import sys; sys.path.append("tests/nf4_triton")
import states
weight, state = states.random_state((64, 64), torch.float16, device="cpu")
compiled = torch.compile(lambda w: dequantize(w, state), backend="aot_eager", fullgraph=True)
print(states.exact(compiled(weight), weight, state))
"""
    said = machine.python(["-c", code], variables={"TRITON_INTERPRET": None, "NF4_BACKEND": None}).out
    assert said.endswith("True\n"), said


def test_without_triton():
    """Importing and calling works, in PyTorch; the kernel by name says what is missing."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from nf4_triton import dequantize
sys.path.append("tests/nf4_triton")
from types import SimpleNamespace as Namespace
second = Namespace(absmax=torch.ones(1), code=torch.linspace(-1, 1, 256), blocksize=256, dtype=torch.float32)
state = Namespace(shape=(8, 64), dtype=torch.bfloat16, quant_type="nf4", blocksize=64, nested=True,
                  absmax=torch.arange(8).byte(), state2=second, offset=torch.tensor(0.5))
weight = torch.arange(256).byte().view(-1, 1)
whole, part = dequantize(weight, state), dequantize(weight, state, rows=[1])
print(whole.shape, part.shape, "nf4_triton.kernel" in sys.modules)
"""
    said = machine.python(["-c", code], variables={"TRITON_INTERPRET": None, "NF4_BACKEND": None}).out
    assert said.endswith("torch.Size([8, 64]) torch.Size([1, 64]) False\n"), said


CANNOT = [OSError("no space"), ImportError("no file")]
CANNOT += [subprocess.SubprocessError("ptxas"), triton.TritonError("IR")]


@pytest.mark.parametrize("error", CANNOT, ids=repr)
def test_a_kernel_that_cannot_be_launched_names_the_way_out(monkeypatch, device, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(launch_general, "dequantize_packed", broken)
    with pytest.raises(RuntimeError, match=f"{error}.: set NF4_BACKEND=torch"):
        dequantize(*random_state((8, 64), torch.float16))


@pytest.mark.parametrize("name", ODD)
def test_the_fallback_accepts_and_refuses_what_the_kernel_does(monkeypatch, name):
    weight, state = ODD[name]
    monkeypatch.setenv("NF4_BACKEND", "torch")
    if "not contiguous" in name:
        with pytest.raises(UnsupportedState, match="is not contiguous.*expected"):
            dequantize(weight, state)
        return
    expected = oracle(weight, state)
    out = torch.full(tuple(state.shape), torch.nan, dtype=state.dtype)
    assert same_bits(dequantize(weight, state, out), expected)
    assert same_bits(out, expected.t() if name == "W.t()" else expected)


@pytest.mark.parametrize("name", ["triton", "torch", "auto"])
def test_malformed_input_is_named_without_a_log_line(monkeypatch, make_layer, caplog, name):
    monkeypatch.setenv("NF4_BACKEND", name)
    weight, state = random_state((32, 64), torch.bfloat16)
    array, layer = weight.cpu().numpy(), make_layer(64, 64, torch.bfloat16)
    eight_bit = torch.nn.Module()
    eight_bit.weight = torch.zeros(4, 4, dtype=torch.int8)
    for arguments, text in (
        ((torch.nn.Linear(4, 4),), "Linear has .*not quantized but torch.float32; use it as it is"),
        ((torch.nn.Embedding(4, 4),), "Embedding has .*not quantized but torch.float32"),
        ((eight_bit,), "Module has no quant_state.*other formats"),
        ((torch.nn.Sequential(layer),), "Sequential has .*one layer at a time.*get_submodule.'0'"),
        ((layer.weight.data.clone(),), "Tensor has no quant_state.*packed codes and their quant_state"),
        ((layer, torch.bfloat16), "quant_state is a dtype.*the order is dequantize.weight, quant_state, out"),
        ((state, weight), "quant_state is a Tensor.*the order is dequantize.weight, quant_state, out"),
        ((state, layer), "quant_state is a Linear4bit.*the order"),
        (((layer, "weight", 1),), "tuple has no quant_state.*pass the layer, .module, 'name'.,"),
        (((weight, state),), "tuple has no quant_state.*the packed codes and their quant_state"),
        ((array, state), "the weight is ndarray"),
        ((weight.to("meta"), state), "the weight is on meta.*offloads.*cpu_offload_with_hook"),
        ((freed(weight), state), "weight has no memory"),  # torch's own operators would read it
        ((weight, state, None, torch.float64), "^dtype is torch.float64, expected one of"),
    ):
        with pytest.raises(UnsupportedState, match=text):
            dequantize(*arguments)
    with pytest.raises(TypeError, match=r"^dequantize\(\) missing"):
        dequantize()
    assert not caplog.text


def test_the_advice_for_offloaded_layers(make_layer, device):
    """accelerate's other offload loses the state. Whole models move with a hook, layers with to()."""
    accelerate = pytest.importorskip("accelerate")
    layer = make_layer(64, 64, torch.bfloat16)
    expected = dequantize(layer)
    model, hook = accelerate.cpu_offload_with_hook(torch.nn.Sequential(layer), device)
    assert same_bits(dequantize(layer).to(device), expected)
    model(torch.ones(1, 64, dtype=torch.bfloat16, device=device))
    assert same_bits(dequantize(layer), expected) and layer.weight.device.type == device
    hook.offload()
    assert layer.weight.device.type == "cpu" and same_bits(dequantize(layer.to(device)), expected)
    accelerate.hooks.remove_hook_from_module(model)
    accelerate.cpu_offload(model, device)
    with pytest.raises(UnsupportedState, match="accelerate loses"):
        dequantize(layer)
