"""Other formats than 4 bits: equal to what their libraries dequantize, and to PEFT's merge into that."""

import copy
import functools
import json
import sys

import pytest
import torch

import processes
from helpers.puzzle.layers import DEVICE
from nf4_triton.core.reference import same_bits

pytest.importorskip("oracles")  # or skip: it names what the export needs

from nf4_triton import UnsupportedState, export_checkpoint  # noqa: E402
from nf4_triton.export.formats import loading  # noqa: E402
from nf4_triton.export.sources import find  # noqa: E402
from nf4_triton.export.verify import verify  # noqa: E402
from oracles import check_merge, files, load, same, transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*(save_embedding_layers|tie_word_embeddings)")
SIZES = dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64)
SIZES |= dict(hidden_size=64, intermediate_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES |= dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
DEEPSEEK = dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=0, num_key_value_heads=4)
DEEPSEEK |= dict(kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
HOW = {
    "mxfp4": {"quant_method": "mxfp4"},
    "float32": BLOCKS,
    "bfloat16": BLOCKS,
    "float8_e8m0fnu": BLOCKS | {"scale_fmt": "ue8m0"},
    "tensor": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
}
UP = "model.layers.0.mlp.up_proj.weight"
LORA = {"target_modules": ["o_proj", "lm_head"]}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES = [
    ("mxfp4", "gpt_oss", LORA, {}),
    ("mxfp4", "gpt_oss", EXPERTS, {}),
    ("float32", "qwen3", LORA, {"tie_word_embeddings": True}),
    ("float32", "qwen3_moe", EXPERTS, {}),
    ("bfloat16", "qwen3_moe", LORA, {}),
    ("float8_e8m0fnu", "qwen3", LORA, {}),
    ("float32", "deepseek_v3", LORA | EXPERTS, DEEPSEEK | {"head_dim": 32}),
    ("tensor", "mistral", LORA, {}),
]


def quantized(kind, name, tensor) -> dict:
    """Return the tensors of a weight with random codes and scales, or itself."""
    if kind == "mxfp4" and name.endswith("_proj"):
        shape = tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": torch.randint(110, 124, shape, dtype=torch.uint8)}
    if kind == "mxfp4" or not name.endswith(("proj.weight", "mqa.weight")):
        return {name: tensor}
    codes = torch.randn(tensor.shape).mul(99).clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind == "tensor":
        scale = torch.rand(()) / 1000
        return {
            name: codes,
            f"{name}_scale_inv": scale,
            name.replace("weight", "activation_scale"): scale + 1,
        }
    scales = torch.rand([-(-size // 32) for size in tensor.shape]) / 1000
    return {name: codes, f"{name}_scale_inv": scales.to(getattr(torch, kind))}


def saved(folder, kind, family, **sizes) -> dict:
    """Write a model in another format into a folder, its scales in another file. Return its tensors."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **SIZES | sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors: dict = {}
    for name, tensor in files.load_file(folder / "model.safetensors").items():
        tensors |= quantized(kind, name, tensor)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"{'scale' in name}.safetensors" for name in tensors}
    for file in weight_map.values():
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        files.save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    set_how(folder, HOW[kind])
    return tensors


def set_how(folder, how):
    """Write the quantization_config of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": how}))


def load_base(folder, **how):
    """Load a base as training did."""
    return load(transformers.AutoModelForCausalLM, folder, whole=False, **loading(find(folder)[0]), **how)


def check_both(folder, model, how, limit=0.05, **options):
    """Export a base alone, and with an adapter. model: of the base, as its library dequantizes it."""
    base, alone = folder / "base", folder / "alone"
    assert export_checkpoint(base, alone, **options).dequantized
    assert "quantization_config" not in (alone / "config.json").read_text()
    expected, got = model.state_dict(), load(type(model), alone).state_dict()
    assert not [key for key in got if not same(got[key], expected[key])]
    fresh, how = functools.partial(copy.deepcopy, model), {"target_modules": ["o_proj"]} | how
    check_merge(fresh, fresh, base, alone, folder / "merged", how, limit, **options)


@pytest.mark.parametrize("kind, family, how, sizes", CASES)
def test_equal_to_transformers_and_to_pefts_merge(tmp_path, caplog, kind, family, how, sizes):
    """verify dequantizes the base, too."""
    caplog.set_level("INFO", "nf4_triton")
    saved(tmp_path / "base", kind, family, **sizes)
    check_both(tmp_path, load_base(tmp_path / "base"), how)
    ((divergence, same),) = verify(tmp_path / "base", tmp_path / "alone", *[None] * 6).values()
    assert divergence < 1e-6 and same == 1 and "base, dequantized from " in caplog.text


def test_another_dtype(tmp_path):
    saved(tmp_path / "base", "float32", "qwen3")
    check_both(tmp_path, load_base(tmp_path / "base", dtype=torch.float32), LORA, dtype="float32")


def test_blocks_that_an_edge_cuts(tmp_path):
    """transformers takes 40 rows in blocks of 32 for two blocks of 20, and refuses 72."""
    tensors = saved(tmp_path / "base", "float32", "qwen3", intermediate_size=40)
    export_checkpoint(tmp_path / "base", tmp_path / "out")
    blocks_down, blocks_across = torch.arange(40) // 32, torch.arange(64) // 32
    expected = tensors[UP].float() * tensors[f"{UP}_scale_inv"][blocks_down][:, blocks_across]
    got = files.load_file(tmp_path / "out/model.safetensors")[UP]
    assert same_bits(got, expected.bfloat16())


def test_int8(tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).half().save_pretrained(tmp_path / "full")
    how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = load(transformers.LlamaForCausalLM, tmp_path / "full", quantization_config=how)
    model.save_pretrained(tmp_path / "base")
    check_both(tmp_path, model.dequantize(torch.float16), LORA)


def in_unsloths_layout(base):
    """Write gpt-oss as Unsloth saves it in 4 bits. Return the model of what bitsandbytes dequantizes."""
    functional = pytest.importorskip("bitsandbytes.functional")
    config = transformers.GptOssConfig(**SIZES | {"num_experts": 11, "intermediate_size": 64})
    model, tensors = transformers.GptOssForCausalLM(config).bfloat16().to(DEVICE), {}
    model.save_pretrained(base)
    for name, parameter in model.named_parameters():
        parts = {name.replace("router.", "router.linear."): parameter.data}
        if ".experts." in name:
            own, end = (name.replace("_bias", "s"), "bias") if "bias" in name else (f"{name}s", "weight")
            parts = {f"{own}.{number}.{end}": part.t() for number, part in enumerate(parameter.data)}
        for key in parts:
            tensors[key] = parts[key].contiguous()
            if "_proj" in key and key.endswith("weight"):
                tensors[key], state = functional.quantize_4bit(tensors[key], quant_type="nf4")
                parts[key] = functional.dequantize_4bit(tensors[key], state)
                tensors |= {f"{key}.{end}": part for end, part in state.as_dict(packed=True).items()}
        new = [part.t() for part in parts.values()]
        parameter.data = torch.stack(new) if ".experts." in name else new[0].t()
    files.save_file(tensors, base / "model.safetensors")
    set_how(base, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    return model


def test_unsloths_gpt_oss(tmp_path):
    """Experts one by one, in 4 bits, transposed; another name for the router."""
    model = in_unsloths_layout(tmp_path / "base")
    check_both(tmp_path, model, LORA | EXPERTS)
    with pytest.raises(UnsupportedState, match="transformers cannot load .*base, expected"):
        verify(tmp_path / "base", tmp_path / "alone", *[None] * 6)


INT8 = {UP: torch.ones(96, 64).char(), UP.replace("weight", "SCB"): torch.ones(96)}
INT8[UP.replace("weight", "weight_format")] = torch.tensor(2)
REFUSED = [  # tensors of a model in FP8 that are others, its quantization_config, what the error says
    ({f"{UP}_scale_inv": torch.ones(9, 9)}, BLOCKS, "expanded size of the tensor"),
    ({f"{UP}_scale_inv": None}, BLOCKS, "up_proj.weight is torch.float8_e4m3fn"),
    (
        {f"{UP}_scale_inv": torch.ones(3, 2).byte()},
        BLOCKS,
        r"weight_scale_inv torch.uint8 \[3, 2\], expected",
    ),
    ({UP: torch.ones(96, 32).char()}, BLOCKS, r"torch.int8 .* expected in fp8 .*; MXFP8, packed FP4"),
    ({UP: torch.ones(2, 96, 64).to(torch.float8_e4m3fn)}, BLOCKS, "experts in one tensor cannot be checked"),
    ({}, {"quant_method": "mxfp8"}, "quantized with mxfp8, .*: pass a/original"),
    (INT8, {"load_in_8bit": True}, "weight_format 0"),
    (
        {f"{UP}_scale": torch.ones(1)},
        {"quant_method": "compressed-tensors"},
        "pip install -U compressed-tensors",
    ),
    ({}, BLOCKS, "stored in fp8 and used as it is: omit trained_in"),
]


@pytest.mark.parametrize("changes, how, text", REFUSED)
def test_what_is_refused(tmp_path, monkeypatch, changes, how, text):
    tensors = saved(tmp_path / "base", "float32", "qwen3")
    if how is not BLOCKS:
        tensors = {name: tensors[name] for name in tensors if UP in name or "_proj" not in name}
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    files.save_file(tensors, tmp_path / "base/model.safetensors")
    (tmp_path / "base/README.md").write_text("---\nbase_model: a/original\n---\n")
    set_how(tmp_path / "base", how)
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(UnsupportedState, match=text):
        export_checkpoint(tmp_path / "base", tmp_path / "out", trained_in=None if changes else "nf4")
    assert [*tmp_path.iterdir()] == [tmp_path / "base"]


SCHEMES = "W4A16 W4A16_ASYM W8A16 W8A8 FP8 FP8_DYNAMIC FP8_BLOCK NVFP4A16 NVFP4 MXFP4".split()
FAMILIES = [*((scheme, "llama", LORA) for scheme in SCHEMES), ("W4A16", "qwen3_moe", EXPERTS)]


@pytest.mark.parametrize("scheme, family, how", FAMILIES)
def test_compressed_tensors(tmp_path, scheme, family, how):
    """As llm-compressor writes them, with random scales."""
    pytest.importorskip("compressed_tensors", "0.20")
    from compressed_tensors import quantization
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.compressors.model_compressors import ModelCompressor

    sizes = SIZES | dict(hidden_size=128, intermediate_size=256, moe_intermediate_size=128, head_dim=32)
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    group = quantization.preset_name_to_scheme(scheme, ["Linear"])
    group.format = infer_module_format(torch.nn.Linear, group).value
    fields = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "format": group.format}
    start, end = (
        quantization.QuantizationConfig(**fields, quantization_status=status)
        for status in ("initialized", "compressed")
    )
    quantization.apply_quantization_config(model, start)
    for name, parameter in model.named_parameters():
        if name.endswith("weight_scale"):
            parameter.data.copy_((10 if "NVFP4" in scheme else 2**-9) * (1 + torch.rand(parameter.shape)))
        elif name.endswith("scale"):
            parameter.data.fill_(600 if "global" in name else 2**-6)
    ModelCompressor(end).compress_model(model)
    files.save_file(model.state_dict(), tmp_path / "base/model.safetensors", {"format": "pt"})
    set_how(tmp_path / "base", json.loads(end.model_dump_json()))
    limit = 0.3 if group.input_activations else 0.05  # transformers still quantizes them, NVFP4's to 4 bits
    check_both(tmp_path, load_base(tmp_path / "base"), how, limit)
    set_how(tmp_path / "base", json.loads(end.model_dump_json()) | {"ignore": ["re:.*"]})
    with pytest.raises(UnsupportedState, match="expected in compressed-tensors what config.json describes"):
        export_checkpoint(tmp_path / "base", tmp_path / "other")


@pytest.mark.parametrize("base, low, high", [("nf4", 8, 50), ("mxfp4", 34, 140)])
def test_memory(tmp_path, base, low, high):
    """In MB, without bitsandbytes and Triton, in files of 20 MB.

    nf4: two weights of 8 MB, and what PyTorch needs for a third; all: 96. mxfp4: a file of 34 MB with one
    weight, that weight again, transposed, and pieces of its indices; all: 157.
    """
    saved(tmp_path / "small", "mxfp4", "gpt_oss")
    if base == "mxfp4":
        sizes = dict(hidden_size=1024, intermediate_size=1024, num_local_experts=8, num_hidden_layers=3)
        saved(tmp_path / base, base, "gpt_oss", **sizes)
    else:
        functional = pytest.importorskip("bitsandbytes.functional")
        weight, state = functional.quantize_4bit(torch.randn(1024, 4096).bfloat16(), quant_type=base)
        parts = {f".{key}": tensor for key, tensor in state.as_dict(packed=True).items()} | {"": weight}
        tensors = {name + part: parts[part].clone() for name in "abcdefghijkl" for part in parts}
        (tmp_path / base).mkdir()
        files.save_file(tensors, tmp_path / base / "model.safetensors")
    code = f"""
import sys, threading
from pathlib import Path
sys.modules["bitsandbytes"] = sys.modules["triton"] = None
from nf4_triton import export_checkpoint
export_checkpoint("small", "first")  # imports
def held():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1000
def watch():
    while not ended.wait(0.001):
        peak[0] = max(peak[0], held())
before = held()
peak, ended = [before], threading.Event()
watching = threading.Thread(target=watch)
watching.start()
export_checkpoint({base!r}, "out", shard_size="20MB", unchecked=True)
ended.set()
watching.join()
print(peak[0] - before)
"""
    variables = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}  # CUDA takes memory of its own
    said = processes.python(["-c", code], variables=variables, folder=tmp_path).out
    assert low < float(said) < high and len(list(tmp_path.glob("out/model-*.safetensors"))) == 6
