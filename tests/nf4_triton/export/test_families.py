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
pytest.importorskip("oracles")  # or skip: it names what the export needs

from nf4_triton import export_checkpoint  # noqa: E402
from nf4_triton.export.model import build, untied  # noqa: E402
from nf4_triton.export.plan import Plan  # noqa: E402
from oracles import check_answer, check_merge, files, load, peft, same, tensors_of, train, transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(save_embedding_layers|fan_in_fan_out|eva|tie|tying|pattern)"
)
ATTENTION = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)
HOW = ATTENTION | dict(num_hidden_layers=2, num_key_value_heads=2, vocab_size=160)
FAMILIES = {  # class, config
    "Llama": ("LlamaForCausalLM", HOW | dict(vocab_size=9000, tie_word_embeddings=True, attention_bias=True)),
    "Llama bf16": ("LlamaForCausalLM", HOW | dict(vocab_size=500, tie_word_embeddings=True)),
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
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        HOW | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    ),
    "Mixtral": ("MixtralForCausalLM", HOW | dict(num_local_experts=4, head_dim=16)),
    "CLIP": (
        "CLIPModel",
        dict.fromkeys(
            ("text_config", "vision_config"),
            ATTENTION | dict(num_hidden_layers=1, image_size=28, patch_size=14),
        ),
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
SKIPPED = ["lm_head", "score", "classifier", "o_proj"]  # by quantization


MERGES = [  # family, fields of its adapter_config.json and arguments of check()
    ("Llama", '{"use_rslora": true, "alpha_pattern": {"v_proj": 9}, "init_lora_weights": "gaussian"}'),
    (
        "Llama",
        '{"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "init_lora_weights": "eva"}',
    ),
    ("Llama", '{"target_modules": ["q_proj", "embed_tokens"]}'),
    ("Llama", '{"modules_to_save": ["head", "norm"], "target_modules": ["embed_tokens"]}'),
    ("Llama", '{"modules_to_save": ["mlp"], "target_modules": ["q_proj"], "on_4_bits": false}'),
    ("Llama", '{"modules_to_save": ["o_proj"], "target_modules": ["q_proj"], "bias": "all"}'),
    ("Qwen3-MoE", "{}"),
    ("Qwen3-MoE", '{"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}'),
    ("Qwen3-MoE", '{"modules_to_save": ["mlp"], "target_modules": ["q_proj"]}'),
    ("CLIP", '{"target_modules": ["q_proj", "v_proj", "out_proj"]}'),  # without token embeddings
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
    ("Qwen3-MoE", '{"auto": "AutoModel", "target_parameters": ["mlp.experts.down_proj"]}'),
]
TIED = """
{"target_modules": ["lm_head"]}
{"target_modules": ["embed_tokens", "lm_head"]}
{"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": true}
{"target_modules": ["lm_head"], "trainable_token_indices": [3, 9]}
{"target_modules": ["embed_tokens"], "trainable_token_indices": {"lm_head": [3]}}
{"trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [7]}}
{"modules_to_save": ["embed_tokens"], "target_modules": ["lm_head"]}
{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": true}
{"target_modules": ["embed_tokens"]}
{"target_modules": ["lm_head"], "ensure_weight_tying": true}
{"target_modules": ["embed_tokens"], "ensure_weight_tying": true}
{"target_modules": ["embed_tokens"], "use_dora": true}
{"target_modules": ["lm_head"], "use_dora": true}
{"target_modules": ["embed_tokens", "lm_head"], "use_dora": true}
{"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": true, "use_dora": true}
{"trainable_token_indices": {"embed_tokens": [3, 9]}}
{"trainable_token_indices": {"lm_head": [3, 9]}}
{"trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [3, 9]}}
{"modules_to_save": ["embed_tokens"]}
{"modules_to_save": ["lm_head"]}
{"modules_to_save": ["embed_tokens", "lm_head"]}
{"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens"]}
{"modules_to_save": ["embed_tokens"], "trainable_token_indices": {"lm_head": [3]}}
{"modules_to_save": ["lm_head"], "ensure_weight_tying": true}
{"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": true}
""".strip().splitlines()
CASES = [("Llama bf16", how) for how in TIED[:8]]
MORE = [("Llama bf16", how) for how in TIED[8:]] + [("Llama", how) for how in TIED]
MORE += [("GPT-2", how.replace("embed_tokens", "wte")) for how in TIED[:2]]
MORE += [("T5", how.replace("embed_tokens", "shared")) for how in TIED[:2]]
MORE += [("Gemma 3", how) for how in TIED[:4]]


def families(*often):
    """Return parameters: all families, of which the others are run by hand."""
    return [pytest.param(name, marks=[] if name in often else pytest.mark.long) for name in FAMILIES]


def kind_of(family):
    library = pytest.importorskip("diffusers") if family == "SD3" else transformers
    return getattr(library, FAMILIES[family][0])


def in_4_bits(flat):
    """Return how training quantizes: fp4, or nf4 with double quantization."""
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="fp4" if flat else "nf4",
        bnb_4bit_use_double_quant=not flat,
        llm_int8_skip_modules=SKIPPED,
    )


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
        whole.to(torch.bfloat16 if family in (*BY_HAND, "Llama bf16") else dtype).save_pretrained(
            folder / "full"
        )
        if family in BY_HAND:
            shutil.copytree(folder / "full", model)
            quantize_by_hand(model, BY_HAND[family])
        else:
            flat = family in FLAT
            how = {"quantization_config": in_4_bits(flat), "dtype": LOADED[flat], "device_map": {"": DEVICE}}
            quantized = kind.from_pretrained(folder / "full", **how)
            quantized.save_pretrained(model, max_shard_size="40KB" if family == "Llama" else "5GB")
        export_checkpoint(model, folder / "out", shard_size=1e6 if family == "Llama" else "5GB")
        return folder

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":  # Triton's interpreter would take a third of the time
            patch.setenv("NF4_BACKEND", "torch")
        yield make


@pytest.mark.parametrize("family", families("GPT-2", *dict(MERGES + CASES)))
def test_each_tensor_is_that_of_bitsandbytes(make, tmp_path, family):
    """nf4 and fp4, nested and flat, in one file and in several. transformers and diffusers load it."""
    model, out = make(family) / "model", make(family) / "out"
    expected, got = dequantized(model, transposed=family == "GPT-2"), tensors_of(out)
    assert got.keys() == expected.keys()
    assert all(same(got[name], expected[name]) for name in got)
    load(kind_of(family), out)
    config = json.loads((model / "config.json").read_text())
    config.pop("quantization_config", None)
    assert json.loads((out / "config.json").read_text()) == config
    assert len(list(out.glob("*.safetensors"))) == (2 if family == "Llama" else 1)
    export_checkpoint(model, tmp_path / "out", unchecked=True, dtype=torch.float16)
    expected, got = dequantized(model, dtype=torch.float16), tensors_of(tmp_path / "out")
    assert all(same(got[name], expected[name].half()) for name in expected)


@pytest.mark.parametrize("family", families("Llama", "GPT-2"))
def test_dora_and_what_training_saw(make, tmp_path, family):
    target = r".*(to_q|q_proj)" if family in BY_HAND else "all-linear"
    check(make(family), tmp_path, family, use_dora=True, target_modules=target)


@pytest.mark.parametrize(
    "family, how", [*MERGES, *CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_a_merge_is_that_of_peft(make, tmp_path, family, how):
    check(make(family), tmp_path, family, **json.loads(how))


def check(folder, tmp_path, family, rows=None, auto=None, labels=2, on_4_bits=True, **how):
    """On a base in 16 bits, in 4, and quantized on loading, as transformers and bitsandbytes load it.

    on_4_bits: whether PEFT can train it on 4 bits; if not, on what bitsandbytes dequantizes.
    """

    def base(name, loading):
        kind, fields = kind_of(family), {}
        if auto:
            kind, fields = getattr(transformers, auto), {"num_labels": labels}
        model = load(kind, folder / name, not auto, **fields, **loading)
        if rows:
            model.resize_token_embeddings(rows, mean_resizing=False)
        return model

    flat = family in FLAT
    quantizing = {"dtype": LOADED[flat], "quantization_config": in_4_bits(flat)}
    options = {"trained_in": "fp4" if flat else "nf4+double", "load_dtype": LOADED[flat]}
    options["skip_modules"] = SKIPPED
    runs = [("full", "full", {}, {}), ("model", "out", {}, {}), ("full", "out", options, quantizing)]
    for number, (name, merged, options, loading) in enumerate(runs[:2] if family in BY_HAND else runs):
        trained = (merged, {}) if family in BY_HAND or not on_4_bits else (name, loading)
        check_merge(
            functools.partial(base, *trained),
            functools.partial(base, merged, {}),
            folder / name,
            folder / merged,
            tmp_path / str(number),
            how,
            shard_size="1 MiB",
            **options,
        )
        out = tmp_path / str(number) / "out"
        if family == "Llama":
            config = json.loads((out / "config.json").read_text())
            assert config["tie_word_embeddings"] is ("lm_head.weight" not in tensors_of(out))


def test_names_of_an_older_transformers(make, tmp_path):
    """4.51 put language_model first in vision-language models."""
    base, adapter = make("Gemma 3") / "full", tmp_path / "adapter"
    tuned = train(load(kind_of("Gemma 3"), base), adapter, target_modules=["q_proj", "lm_head"])
    (file,), new, old = adapter.glob("*.safetensors"), tensors_of(adapter), {}
    start = "base_model.model."
    for key in new:
        name = key.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision")
        old[name.replace(f"{start}lm_head", f"{start}language_model.lm_head")] = new[key]
    assert not old.keys() & new.keys()
    files.save_file(old, file)
    export_checkpoint(adapter, tmp_path / "out", base=base)
    exported = load(kind_of("Gemma 3"), tmp_path / "out")
    check_answer(exported, tuned, load(kind_of("Gemma 3"), base))


@pytest.mark.parametrize("rows", [7, 9])
def test_biases_of_a_resized_vocabulary(tmp_path, rows):
    config = transformers.BartConfig(vocab_size=8, d_model=64, encoder_layers=1, decoder_layers=1)
    model = transformers.BartForConditionalGeneration(config)
    model.final_logits_bias += 1
    model.save_pretrained(tmp_path / "base")
    model = load(type(model), tmp_path / "base")
    model.resize_token_embeddings(rows, mean_resizing=False)
    expected = model.final_logits_bias.clone()
    train(model, tmp_path / "adapter")
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert same_bits(tensors_of(tmp_path / "out")["final_logits_bias"], expected.to(DEVICE))


def test_a_base_that_was_saved_as_a_classifier(make, tmp_path):
    classifier = transformers.LlamaForSequenceClassification.from_pretrained(make("Llama bf16") / "full")
    classifier.save_pretrained(tmp_path / "base")
    base = load(kind_of("Llama"), tmp_path / "base", whole=False)
    tuned = train(base, tmp_path / "adapter", task_type="CAUSAL_LM")
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    exported, base = (
        load(kind_of("Llama"), path) for path in (tmp_path / "out", make("Llama bf16") / "full")
    )
    check_answer(exported, tuned, base)


def test_the_loss_of_training_is_that_of_the_export(make, tmp_path):
    """LoRA on a tied head, from 4 bits."""
    folder, ids = make("Llama bf16"), torch.arange(48, device=DEVICE).view(2, 24)
    config = peft.LoraConfig(r=16, target_modules=["lm_head"])
    tuned = peft.get_peft_model(load(kind_of("Llama"), folder / "model"), config)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=0.1)
    first = tuned(input_ids=ids, labels=ids).loss
    for _ in range(10):
        optimizer.zero_grad()
        tuned(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    tuned.save_pretrained(tmp_path / "adapter")
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", base=folder / "model")
    exported = load(kind_of("Llama"), tmp_path / "out")
    trained, got = (model(input_ids=ids, labels=ids).loss for model in (tuned, exported))
    assert trained < first - 1 and abs(got - trained) < 0.05


def test_another_dtype_holds_what_training_saw(make, tmp_path):
    how = {"trained_in": "nf4+double", "load_dtype": "bf16", "skip_modules": SKIPPED}
    export_checkpoint(make("Llama") / "full", tmp_path / "out", dtype="float32", **how)
    expected, got = tensors_of(make("Llama") / "out"), tensors_of(tmp_path / "out")
    assert all(same_bits(got[name], expected[name].float()) for name in expected)


def test_training_in_float32_is_rounded_once(make, tmp_path):
    """To the dtype of the base; --dtype float32 has the same bits, not rounded."""
    folder, adapter = make("Llama bf16") / "full", tmp_path / "adapter"
    loading = {"dtype": torch.float32, "quantization_config": in_4_bits(flat=False)}
    tuned, base = (load(kind_of("Llama"), folder, **loading) for _ in range(2))
    tuned = train(tuned, adapter, target_modules=["q_proj", "lm_head"])
    how = {"trained_in": "nf4+double", "load_dtype": "float32", "skip_modules": SKIPPED, "base": folder}
    export_checkpoint(adapter, tmp_path / "rounded", **how)
    export_checkpoint(adapter, tmp_path / "exact", dtype="float32", **how)
    rounded, exact = tensors_of(tmp_path / "rounded"), tensors_of(tmp_path / "exact")
    assert all(same_bits(rounded[name], exact[name].bfloat16()) for name in exact)
    assert '"dtype": "bfloat16"' in (tmp_path / "rounded" / "config.json").read_text()
    check_answer(load(kind_of("Llama"), tmp_path / "exact"), tuned, base)


def test_new_tokens_where_the_config_has_its_classs_default():
    file = types.SimpleNamespace(get_tensor=lambda name: torch.empty(32009, 64))
    adapter = types.SimpleNamespace(config={}, tensors={"base_model.model.model.embed_tokens.weight": file})
    config = build(ATTENTION | {"architectures": ["LlamaForCausalLM"]}, adapter)[1]
    assert config["vocab_size"] == 32009


def test_integers_of_the_model_keep_their_dtype():
    model, file = torch.nn.Module(), types.SimpleNamespace(get_tensor=lambda name: torch.tensor([7]))
    model.register_buffer("steps", torch.tensor([7], device="meta"))
    source = types.SimpleNamespace(tensors={"steps": file}, kind="bitsandbytes")
    plan = Plan(source, model, dtype=torch.float16)
    assert plan.make("steps").dtype == plan.made["steps"].like.dtype == torch.int64


def test_the_config_of_untied_embeddings():
    """T5 would take the scale from the key."""
    model = types.SimpleNamespace(config=types.SimpleNamespace(scale_decoder_outputs=True))
    got = untied({"text_config": {"tie_word_embeddings": True}}, model)
    assert got.pop("scale_decoder_outputs") and not got.pop("tie_word_embeddings")
    assert got == {"text_config": {"tie_word_embeddings": False}}
