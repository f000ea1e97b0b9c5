"""Families of models in folders: bitsandbytes' bits, PEFT's merge, and the weights that training saw."""

import functools
import json
import shutil
import types

import pytest
import torch

from helpers.puzzle.layers import DEVICE
from nf4_triton.core.reference import same_bits

functional = pytest.importorskip("bitsandbytes.functional")
files = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft", "0.20", "export needs PEFT 0.20 or newer")
transformers = pytest.importorskip("transformers", "5.15", "export needs transformers 5.15 or newer")

from nf4_triton import export_checkpoint  # noqa: E402
from nf4_triton.export.model import build, untied  # noqa: E402
from nf4_triton.export.plan import Plan  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(save_embedding_layers|fan_in_fan_out|eva|tie|tying|pattern)"
)
ATTENTION = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)
HOW = ATTENTION | dict(num_hidden_layers=2, num_key_value_heads=2, vocab_size=160)
FAMILIES = {  # class, config
    "Llama": ("LlamaForCausalLM", HOW | dict(vocab_size=9000, tie_word_embeddings=True, attention_bias=True)),
    "GPT-2": ("GPT2LMHeadModel", dict(n_embd=64, n_layer=2, n_head=2, vocab_size=160)),
    "T5": (
        "T5ForConditionalGeneration",
        dict(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=160),
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        dict(
            text_config=HOW | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            vision_config=ATTENTION | dict(depth=1, num_heads=4, out_hidden_size=64),
        ),
    ),
    "Qwen3": ("Qwen3ForCausalLM", HOW | dict(head_dim=16)),
    "Gemma 3": (
        "Gemma3ForConditionalGeneration",
        dict(
            text_config=HOW | dict(head_dim=16),
            vision_config=ATTENTION | dict(num_hidden_layers=1, image_size=28, patch_size=14),
        ),
    ),
    "Phi-3": ("Phi3ForCausalLM", HOW | dict(pad_token_id=0)),
    "GPT-NeoX": ("GPTNeoXForCausalLM", ATTENTION | dict(num_hidden_layers=2, vocab_size=160)),
    "Granite hybrid": (
        "GraniteMoeHybridForCausalLM",
        HOW | dict(mamba_n_heads=4, mamba_d_head=32, num_local_experts=4, layer_types=["mamba", "attention"]),
    ),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", HOW | dict(num_experts=4, moe_intermediate_size=64)),
    "Mixtral": ("MixtralForCausalLM", HOW | dict(num_local_experts=4, head_dim=16)),
    "CLIP": (
        "CLIPModel",
        dict.fromkeys(("text_config", "vision_config"), ATTENTION | dict(num_hidden_layers=1, image_size=28)),
    ),
    "SD3": (
        "SD3Transformer2DModel",
        dict(num_layers=1, sample_size=8, attention_head_dim=16, num_attention_heads=4)
        | dict(joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64),
    ),
}
BY_HAND = {
    "Qwen3-MoE": "experts",
    "Mixtral": "self_attn",
    "SD3": "attn",
}  # the 4-bit weights, which no library makes here
FLAT = "GPT-2", "Qwen3", "T5"  # fp4, not double
LOADED = {True: torch.float16, False: torch.bfloat16}


MERGES = [  # family, fields of its adapter_config.json and arguments of check_merge()
    ("Llama", '{"use_rslora": true, "alpha_pattern": {"v_proj": 9}, "init_lora_weights": "orthogonal"}'),
    ("Llama", '{"target_modules": ["q_proj"], "layers_to_transform": [1], "init_lora_weights": "eva"}'),
    ("Llama", '{"target_modules": ["q_proj", "embed_tokens"]}'),
    ("Llama", '{"target_modules": ["embed_tokens", "lm_head"], "use_dora": true}'),
    ("Llama", '{"modules_to_save": ["head", "norm"], "target_modules": ["embed_tokens"]}'),
    ("Llama", '{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": true}'),
    ("Llama", '{"modules_to_save": ["mlp"], "target_modules": ["q_proj"]}'),
    ("Llama", '{"modules_to_save": ["o_proj"], "target_modules": ["q_proj"], "bias": "all"}'),
    ("Qwen3-MoE", "{}"),
    ("Qwen3-MoE", '{"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}'),
    ("Qwen3-MoE", '{"modules_to_save": ["mlp"], "target_modules": ["q_proj"]}'),
    ("CLIP", '{"target_modules": ["q_proj"]}'),  # of no token embeddings that PEFT would find
    ("Mixtral", '{"target_modules": ["w1", "w2", "w3"]}'),
    ("T5", '{"target_modules": ["wo"]}'),  # which transformers keeps in float32
    ("Llama", '{"trainable_token_indices": [3, 8999]}'),
    ("Llama", '{"rows": 9007}'),
    ("Llama", '{"rows": 8000, "target_modules": ["embed_tokens", "lm_head"]}'),
    ("Llama", '{"rows": 9007, "trainable_token_indices": [3, 9006]}'),
    ("Qwen3", '{"rows": 150, "modules_to_save": ["embed_tokens", "lm_head"], "use_dora": true}'),
    ("Qwen3", '{"rows": 167, "trainable_token_indices": {"embed_tokens": [166], "lm_head": [0]}}'),
    ("Llama", '{"auto": "AutoModelForSequenceClassification", "labels": 1, "task_type": "SEQ_CLS"}'),
    (
        "Qwen3",
        '{"auto": "AutoModelForTokenClassification", "task_type": "TOKEN_CLS", "target_modules": ["q_proj"]}',
    ),
    ("Qwen3", '{"auto": "AutoModel"}'),
    ("T5", '{"auto": "AutoModel", "task_type": "FEATURE_EXTRACTION"}'),
]
GATE = ["Llama", "GPT-2"]
LONG = [pytest.param(family, marks=pytest.mark.long) for family in list(FAMILIES)[2:]]


def kind_of(family):
    library = pytest.importorskip("diffusers") if family == "SD3" else transformers
    return getattr(library, FAMILIES[family][0])


def load(kind, folder, whole=True, **how):
    """Return the model in a folder. Fail unless the folder has the whole of it and nothing else."""
    dtype = {"torch_dtype": torch.bfloat16} if "SD3" in kind.__name__ else {"dtype": "auto"}
    model, found = kind.from_pretrained(folder, output_loading_info=True, **dtype, **how)
    assert not (whole and any(found.values())), found
    return model.to(DEVICE)


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= files.load_file(file, DEVICE)
    return found


def dequantized(folder, transposed=False, dtype=None):
    """Return the tensors of a folder, of the 4-bit weights bitsandbytes' own results."""
    tensors, result = tensors_of(folder), {}
    for name in [key.partition(".quant_state")[0] for key in tensors if ".quant_state" in key]:
        parts = {key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(parts, DEVICE)
        state.dtype = dtype or state.dtype
        weight = functional.dequantize_4bit(tensors.pop(name), state)
        result[name] = weight.t().contiguous() if transposed else weight
    return result | tensors


def quantize_by_hand(folder, part):
    """Replace each matrix with `part` in its name by the tensors of a 4-bit weight."""
    (file,) = folder.glob("*.safetensors")
    tensors = files.load_file(file)
    for name in [name for name in tensors if part in name and tensors[name].dim() == 2]:
        codes, state = functional.quantize_4bit(tensors[name], quant_type="nf4", compress_statistics=True)
        tensors |= {name: codes} | {f"{name}.{key}": x for key, x in state.as_dict(packed=True).items()}
    files.save_file(tensors, file)


@pytest.fixture(scope="module")
def make(own_bitsandbytes, tmp_path_factory):
    """make(family): a folder with a random model in 16 bits (full), in 4 (model), and its export (out)."""

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp("made")
        model, kind, config = folder / "model", kind_of(family), FAMILIES[family][1]
        torch.manual_seed(0)
        whole = kind(**config) if family == "SD3" else kind(kind.config_class(**config))
        dtype = torch.float16 if family in FLAT else torch.float32
        whole.to(torch.bfloat16 if family in BY_HAND else dtype).save_pretrained(folder / "full")
        if family in BY_HAND:
            shutil.copytree(folder / "full", model)
            quantize_by_hand(model, BY_HAND[family])
        else:
            flat = family in FLAT
            how = transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="fp4" if flat else "nf4",
                bnb_4bit_use_double_quant=not flat,
                llm_int8_skip_modules=["lm_head", "o_proj"],
            )
            quantized = kind.from_pretrained(
                folder / "full", quantization_config=how, dtype=LOADED[flat], device_map={"": DEVICE}
            )
            quantized.save_pretrained(model, max_shard_size="40KB" if family == "Llama" else "5GB")
        export_checkpoint(model, folder / "out", shard_size=1e6 if family == "Llama" else "5GB")
        return folder

    return make


@pytest.mark.parametrize("family", [*GATE, *LONG])
def test_each_tensor_is_that_of_bitsandbytes(make, family):
    """nf4 and fp4, nested and flat, in one file and in several. transformers and diffusers load it."""
    model, out = make(family) / "model", make(family) / "out"
    expected, got = dequantized(model, transposed=family == "GPT-2"), tensors_of(out)
    assert got.keys() == expected.keys()
    assert all(same_bits(got[name] + 0, expected[name] + 0) for name in got)  # fp4's zeros have any sign
    load(kind_of(family), out)
    config = json.loads((model / "config.json").read_text())
    config.pop("quantization_config", None)
    assert json.loads((out / "config.json").read_text()) == config
    assert len(list(out.glob("*.safetensors"))) == (2 if family == "Llama" else 1)


@pytest.mark.parametrize("family", [*GATE, *LONG])
def test_dora_and_what_training_saw(make, tmp_path, family):
    target = r".*(to_q|q_proj)" if family in BY_HAND else "all-linear"
    check_merge(make(family), tmp_path, family, use_dora=True, target_modules=target)


@pytest.mark.parametrize("family, how", MERGES)
def test_a_merge_is_that_of_peft(make, tmp_path, family, how):
    check_merge(make(family), tmp_path, family, **json.loads(how))


def check_merge(folder, tmp_path, family, rows=None, auto=None, labels=2, **how):
    """On a base in 4 bits and in 16. Training quantized the latter on loading, or its 4 bits were saved."""

    def trained(name):
        kind, fields = (
            (getattr(transformers, auto), {"num_labels": labels}) if auto else (kind_of(family), {})
        )
        model = load(kind, folder / name, not auto, **fields)
        if rows:
            model.resize_token_embeddings(rows, mean_resizing=False)
        return model

    config = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear"} | how)
    tuned = peft.get_peft_model(trained("out"), config)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    adapter = tmp_path / "adapter"
    tuned.save_pretrained(adapter)
    for base, name in (("full", "full"), ("model", "out")):  # the base, and what PEFT merges into
        model = peft.PeftModel.from_pretrained(trained(name), adapter).merge_and_unload()
        out, expected = tmp_path / base, model.state_dict()
        counts = export_checkpoint(adapter, out, base=folder / base, shard_size="1 MiB")
        got, written = load(type(model), out).state_dict(), tensors_of(out)
        assert got.keys() == expected.keys() and all(same_bits(got[key], expected[key]) for key in got)
        unchanged = trained(name).state_dict() | tensors_of(folder / name)
        changed = [key for key in written if not same_bits(written[key], unchanged[key])]
        assert counts.merged == len(changed) > 0 and counts.written == len(written)
    config = json.loads((out / "config.json").read_text())
    if family == "Llama":
        assert config["tie_word_embeddings"] is ("lm_head.weight" not in written)
    if family not in BY_HAND:
        flat = family in FLAT
        training = {"trained_in": "fp4" if flat else "nf4+double", "load_dtype": LOADED[flat]}
        training |= {"base": folder / "full", "skip_modules": ["lm_head", "o_proj"]}
        assert export_checkpoint(adapter, tmp_path / "again", **training) == counts
        got = tensors_of(tmp_path / "again")
        assert got.keys() == written.keys() and all(same_bits(got[key], written[key]) for key in got)


def test_another_dtype_holds_what_training_saw(make, tmp_path):
    how = {"trained_in": "nf4+double", "load_dtype": "bf16"}
    for name, dtype in (("one", None), ("two", "float32")):
        export_checkpoint(make("Llama") / "full", tmp_path / name, dtype=dtype, **how)
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert all(same_bits(two[name], one[name].float()) for name in one)


def test_a_model_that_transformers_does_not_know(make, tmp_path):
    """Unchecked, each tensor is as bitsandbytes returns it, here in another dtype."""
    model = shutil.copytree(make("Llama") / "model", tmp_path / "model")
    (model / "config.json").write_text('{"architectures": ["Mine"], "dtype": "bfloat16"}')
    export_checkpoint(model, tmp_path / "out", unchecked=True, dtype=torch.float16)
    expected, got = dequantized(model, dtype=torch.float16), tensors_of(tmp_path / "out")
    assert all(same_bits(got[name], expected[name].half()) for name in expected)
    assert '"dtype": "float16"' in (tmp_path / "out" / "config.json").read_text()


def test_new_tokens_where_the_config_has_its_classs_default():
    file = types.SimpleNamespace(get_tensor=lambda name: torch.empty(32009, 64))
    adapter = types.SimpleNamespace(config={}, tensors={"base_model.model.model.embed_tokens.weight": file})
    config = build(ATTENTION | {"architectures": ["LlamaForCausalLM"]}, adapter)[1]
    assert config["vocab_size"] == 32009


def test_integers_of_the_model_keep_their_dtype():
    model, file = torch.nn.Module(), types.SimpleNamespace(get_tensor=lambda name: torch.tensor([7]))
    model.register_buffer("steps", torch.tensor([7], device="meta"))
    plan = Plan({"steps": file}, model, dtype=torch.float16)
    assert plan.make("steps").dtype == plan.made["steps"].like.dtype == torch.int64


def test_the_config_of_untied_embeddings():
    """T5 would take the scale from the key."""
    model = types.SimpleNamespace(config=types.SimpleNamespace(scale_decoder_outputs=True))
    got = untied({"text_config": {"tie_word_embeddings": True}}, model)
    assert got.pop("scale_decoder_outputs") and not got.pop("tie_word_embeddings")
    assert got == {"text_config": {"tie_word_embeddings": False}}
