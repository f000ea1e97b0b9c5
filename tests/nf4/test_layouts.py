"""Every layout that bitsandbytes, FSDP, checkpoints and views produce: exact, or refused with the reason.

The list of layouts is the one that the comparison with the other libraries runs (helpers.stress.libraries).
"""

import copy
import io
import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from helpers.nf4 import reference
from helpers.stress import libraries
from helpers.puzzle import protocol

bitsandbytes = pytest.importorskip("bitsandbytes")
LAYOUTS = libraries.LAYOUTS
GOOD = [name for name, layout in LAYOUTS.items() if not (layout.broken or layout.then or layout.gpu)]
REFUSED = {"weight not contiguous", "absmax not contiguous"}
ON_GPU = pytest.mark.gpu
WAYS = [
    pytest.param({}, id="own"),
    pytest.param({"asm": False}, id="portable", marks=ON_GPU),
    pytest.param({"card": "t4"}, id="t4", marks=ON_GPU),
    pytest.param({"small_up_to": 0}, id="large tile", marks=ON_GPU),
]


@pytest.fixture(params=WAYS)
def way(request, kernel):
    with kernel.force(**request.param):
        yield request.param


def exact(result, layer):
    return reference.same_bits(result, reference.dequantize(layer.weight, layer.weight.quant_state))


@pytest.mark.parametrize("name", [name for name in GOOD if name not in REFUSED])
def test_accepted(kernel, device, name):
    layer = LAYOUTS[name].make(device)
    state = layer.weight.quant_state
    for _ in range(2):
        assert exact(kernel.your_dequantize_nf4(layer), layer)
    out = torch.full(state.shape, float("nan"), dtype=state.dtype, device=device)
    assert exact(kernel.your_fast_dequantize(layer.weight, state, out=out), layer)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].then])
def test_changed_between_two_calls(kernel, device, name):
    layer = LAYOUTS[name].make(device)
    kernel.your_dequantize_nf4(layer)
    LAYOUTS[name].then(layer)
    assert exact(kernel.your_dequantize_nf4(layer), layer)


@pytest.mark.parametrize(
    "name", [n for n, layout in LAYOUTS.items() if layout.broken and not layout.gpu] + sorted(REFUSED)
)
def test_refused(kernel, device, name):
    """Errors are of one type, name what is wrong and say what to do."""
    layer = LAYOUTS[name].make(device)
    with pytest.raises(kernel.UnsupportedState) as caught:
        kernel.your_dequantize_nf4(layer)
    word = {"weight half": "weight", "offset": "offset", "repacked": "CPU matmul"}
    expected = next((text for start, text in word.items() if name.startswith(start)), name.split()[0])
    assert expected in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize("storage", [torch.uint8, *reference.DTYPES])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_quant_storage_as_bitsandbytes_makes_it(kernel, device, storage, nested):
    for dtype in reference.DTYPES:
        layer = bitsandbytes.nn.Linear4bit(
            64,
            96,
            bias=False,
            compute_dtype=dtype,
            compress_statistics=nested,
            quant_type="nf4",
            quant_storage=storage,
        ).to(device)
        layer.weight.quant_state.dtype = dtype
        assert layer.weight.dtype == storage
        assert exact(kernel.your_dequantize_nf4(layer), layer)


@pytest.mark.parametrize("skip", [1, 2, 3, 5])
def test_every_tensor_from_the_middle_of_another(kernel, device, make_layer, way, skip):
    """absmax, both second-level tensors and the offset as views that start anywhere."""

    def moved(x):
        memory = torch.cat([x.view(-1)[:1].repeat(skip), x.view(-1), x.view(-1)[:1]])
        return memory[skip : skip + x.numel()].view(x.shape)

    layer = make_layer(64, 640, torch.float16)
    expected, state = protocol.expected(layer), layer.weight.quant_state
    state.absmax, state.offset = moved(state.absmax), moved(state.offset)
    state.state2.absmax, state.state2.code = moved(state.state2.absmax), moved(state.state2.code)
    assert reference.same_bits(kernel.your_dequantize_nf4(layer), expected)


def test_experts_of_a_stack(kernel, device, way):
    """Fused experts, dequantized all at once and one by one as slices of the packed stack."""
    layer = libraries.Layout(before=libraries.set_elements(4 * 128 * 128, torch.float16)).make(device)
    weight, state = layer.weight.data, layer.weight.quant_state
    state.shape = torch.Size([4, 128, 128])
    whole = kernel._your_dequantize_nf4(weight, state)
    assert exact(whole, layer)
    for i in range(4):
        part = copy.copy(state)
        part.shape, part.state2 = torch.Size([128, 128]), copy.copy(state.state2)
        part.absmax = state.absmax[256 * i : 256 * i + 256]
        part.state2.absmax = state.state2.absmax[i:]
        expert = kernel._your_dequantize_nf4(weight[8192 * i : 8192 * i + 8192], part)
        assert reference.same_bits(expert, whole[i])


@pytest.mark.parametrize("blocksize2", [2**20, 2**31, 2**40])
def test_huge_second_level_blocks(kernel, device, make_layer, blocksize2):
    """Any power of two; one second-level scale then serves all."""
    layer = make_layer(512, 64, torch.bfloat16, blocksize=512)
    state = layer.weight.quant_state
    expected = copy.copy(state)
    expected.state2 = copy.copy(state.state2)
    expected.state2.absmax = state.state2.absmax[:1]
    state.state2.blocksize = blocksize2
    result = kernel.your_dequantize_nf4(layer)
    assert reference.same_bits(result, reference.dequantize(layer.weight, expected))


@pytest.mark.parametrize("blocksize", [8192, 2**20, 2**40])
def test_huge_blocks(kernel, device, make_layer, blocksize):
    layer = make_layer(4096, 4, torch.bfloat16, nested=False, blocksize=4096)
    state = layer.weight.quant_state
    expected = copy.copy(state)
    expected.blocksize = min(blocksize, 4096 * 4)
    state.blocksize = blocksize
    result = kernel.your_dequantize_nf4(layer)
    assert reference.same_bits(result, reference.dequantize(layer.weight, expected))


@ON_GPU
@pytest.mark.parametrize("forced", [{}, {"asm": False}], ids=["own", "portable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_2_to_the_31_elements(kernel, dtype, forced):
    """At the start, around 2^30 and 2^31 elements and at the end, which is no whole block."""
    n = libraries.HUGE
    need = n * (dtype.itemsize + 1)
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free GPU memory")
    layer = libraries.Layout(before=libraries.set_elements(n, dtype)).make("cuda")
    with kernel.force(**forced):
        for _ in range(2):
            result = kernel.your_dequantize_nf4(layer)
            assert libraries.wrong_elements(result, layer) == 0
            del result
    torch.cuda.empty_cache()


# The form of a checkpoint since bitsandbytes 0.41: tensors beside the packed weight, the rest as JSON bytes.
def old_checkpoint(layer):
    state = layer.weight.quant_state
    rest = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float16",
        "shape": list(state.shape),
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": state.offset.item(),
    }
    return {
        "weight": layer.weight.data,
        "weight.absmax": state.absmax,
        "weight.quant_map": state.code,
        "weight.nested_absmax": state.state2.absmax,
        "weight.nested_quant_map": state.state2.code,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(rest).encode()), dtype=torch.uint8
        ),
    }


def loaded(checkpoint, device):
    """As transformers loads a quantized checkpoint."""
    layer = bitsandbytes.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.float16, quant_type="nf4")
    stats = {
        name.removeprefix("weight."): value for name, value in checkpoint.items() if name.count(".") >= 1
    }
    layer.weight = bitsandbytes.nn.Params4bit.from_prequantized(
        data=checkpoint["weight"], quantized_stats=stats, requires_grad=False, device=device
    )
    return layer


def through_state_dict(layer, device):
    return loaded({name: value.clone() for name, value in layer.state_dict().items()}, device)


def through_safetensors(layer, device):
    safetensors = pytest.importorskip("safetensors.torch")
    data = safetensors.save({name: value.contiguous() for name, value in layer.state_dict().items()})
    return loaded(safetensors.load(data), device)


def through_torch_save(layer, device):
    memory = io.BytesIO()
    torch.save(layer, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def through_the_cpu(layer, device):
    return layer.to("cpu").to(device)


JOURNEYS = {
    "written by bitsandbytes 0.45": lambda layer, device: loaded(old_checkpoint(layer), device),
    "state_dict": through_state_dict,
    "safetensors": through_safetensors,
    "pickle": lambda layer, device: pickle.loads(pickle.dumps(layer)),
    "torch.save": through_torch_save,
    "deepcopy": lambda layer, device: copy.deepcopy(layer),
    "to the CPU and back": through_the_cpu,
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_after_a_journey(kernel, device, make_layer, name):
    """Saved, loaded, copied or moved, before and after a first use."""
    layer = make_layer(64, 96, torch.float16)
    expected = kernel.your_dequantize_nf4(layer).clone()
    assert reference.same_bits(expected, protocol.expected(layer))
    arrived = JOURNEYS[name](layer, device)
    assert arrived.weight.quant_state.nested
    for _ in range(2):
        assert reference.same_bits(kernel.your_dequantize_nf4(arrived), expected)


def test_from_pretrained(kernel, device, tmp_path):
    """transformers quantizes on loading, saves the quantized model and loads that again."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float16,
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(
        tmp_path / "plain", quantization_config=quantized, device_map={"": device}, dtype=torch.float16
    )
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized", device_map={"": device})
    names = [name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(names) == 7
    for name in names:
        first, second = model.get_submodule(name), again.get_submodule(name)
        assert first.weight.quant_state.nested and second.weight.quant_state.nested
        assert exact(kernel.your_dequantize_nf4(first), first)
        assert reference.same_bits(kernel.your_dequantize_nf4(second), kernel.your_dequantize_nf4(first))


def test_repacked_by_bitsandbytes_for_the_cpu(kernel, make_layer):
    """What evaluation mode does on a CPU with AVX512-BF16, by bitsandbytes' own function."""
    repack = pytest.importorskip("bitsandbytes.functional")
    if not hasattr(repack, "_convert_weight_packed_for_cpu"):
        pytest.skip("this bitsandbytes does not repack")
    layer = make_layer(64, 96, torch.bfloat16, device="cpu")
    layer.weight.data, layer.weight.quant_state = repack._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    with pytest.raises(kernel.UnsupportedState, match="repacked this layer for its CPU matmul"):
        kernel.your_dequantize_nf4(layer)


@ON_GPU
def test_repacked_for_the_cpu_then_moved_to_the_gpu(kernel, make_layer):
    """bitsandbytes unpacks on the way, with statistics in half precision: exact or refused, never wrong."""
    layer = make_layer(64, 96, torch.bfloat16, device="cpu")
    repack = bitsandbytes.functional
    layer.weight.data, layer.weight.quant_state = repack._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    layer = layer.to("cuda")
    try:
        result = kernel.your_dequantize_nf4(layer)
    except kernel.UnsupportedState as error:
        assert "expected" in str(error)
    else:
        assert reference.same_bits(result, protocol.expected(layer))


def test_a_state_that_is_no_quant_state(kernel, make_layer):
    """Anything with the attributes serves, even with slots and no room for a plan."""

    class Slots:
        __slots__ = (
            "absmax",
            "shape",
            "dtype",
            "quant_type",
            "blocksize",
            "nested",
            "state2",
            "offset",
        )

    layer = make_layer(64, 96, torch.bfloat16)
    state, slots = layer.weight.quant_state, Slots()
    for name in Slots.__slots__:
        setattr(slots, name, getattr(state, name))
    loose = SimpleNamespace(**{name: getattr(state, name) for name in Slots.__slots__})
    for other in (loose, slots):
        for _ in range(2):
            assert exact(kernel._your_dequantize_nf4(layer.weight, other), layer)
