"""Plan and Adapter: each new tensor is that of PEFT's merge_and_unload(), or it is refused by name."""

import functools
import json
import re

import pytest
import torch

from nf4_triton import UnsupportedState
from nf4_triton.core.reference import same_bits

functional = pytest.importorskip("bitsandbytes.functional")
peft = pytest.importorskip("peft", "0.20", "export needs PEFT 0.20 or newer")
transformers = pytest.importorskip("transformers", "5.15", "export needs transformers 5.15 or newer")

from nf4_triton.export.adapter import Adapter  # noqa: E402
from nf4_triton.export.export import to_bytes, to_dtype  # noqa: E402
from nf4_triton.export.model import build, compare, split, untied  # noqa: E402
from nf4_triton.export.plan import Plan, Training  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(save_embedding_layers|fan_in_fan_out|eva|tie|weight tying)"
)
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=96
)
HOW = SIZES | dict(num_hidden_layers=2, head_dim=16, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
KINDS = {  # config, which of its matrices are in 4 bits
    "llama": (HOW | dict(tie_word_embeddings=True, attention_bias=True), "mlp"),
    "gpt2": (dict(n_embd=64, n_layer=2, n_head=2, vocab_size=96), "c_fc"),
    "qwen3_moe": (HOW | EXPERTS, "self_attn"),
    "mixtral": (HOW | dict(num_local_experts=4, num_experts_per_tok=2), "experts"),
    "olmoe": (HOW | EXPERTS, "down_proj"),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(kind): a function that makes a model with dequantized weights, it on meta, its tensors."""

    @functools.cache
    def make(kind):
        config, packed = KINDS[kind]
        settings = transformers.AutoConfig.for_model(kind, **config)
        new = functools.partial(transformers.AutoModelForCausalLM.from_config, settings, dtype=torch.bfloat16)
        torch.manual_seed(0)
        model = new()
        own = model.state_dict()
        tensors = split(model, {name: own[name] for name in own if name not in model.all_tied_weights_keys})
        whole = dict(tensors)
        for name in [name for name in tensors if packed in name and tensors[name].dim() == 2]:
            turn = (lambda x: x.t().contiguous()) if kind == "gpt2" else lambda x: x
            codes, state = functional.quantize_4bit(turn(tensors[name]), quant_type="nf4")
            whole[name] = turn(functional.dequantize_4bit(codes, state))
            tensors |= {name: codes} | {f"{name}.{key}": x for key, x in state.as_dict(packed=True).items()}
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder, state_dict=own)
        on_meta = build(folder, json.loads((folder / "config.json").read_text()))

        def loaded():
            copied = {name: x.clone() for name, x in whole.items()}  # PEFT merges in place
            return type(model).from_pretrained(None, config=settings, state_dict=copied, dtype=torch.bfloat16)

        return loaded, on_meta, tensors

    return make


def adapter_of(model, **how):
    """Add a random adapter to a model. Return (the fields of its config, its tensors, the merged tensors)."""
    torch.manual_seed(1)
    how = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | how
    tuned = peft.get_peft_model(model, peft.LoraConfig(**how))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    tuned.peft_config["default"].base_model_name_or_path = None  # PEFT would look for it on the hub
    tensors = {name: x.clone() for name, x in peft.get_peft_model_state_dict(tuned).items()}
    fields = json.loads(json.dumps(tuned.peft_config["default"].to_dict(), default=list))
    return fields, tensors, tuned.merge_and_unload()


def exported(make, kind, fields=None, tensors=(), changes=(), **how):
    """Return the tensors of an export in memory, and its plan."""
    _, model, base = make(kind)
    base = base | dict(changes)
    adapter = Adapter("A", fields, dict(tensors), model) if fields else None
    plan = Plan(base, model, adapter, **how)
    compare(model, {name: made.like for name, made in plan.made.items()})
    return {name: plan.make(name) for name in plan.made}, plan


MERGES = [  # model, adapter, how many of the new tensors it changes
    ("llama", {"use_rslora": True, "init_lora_weights": "orthogonal"}, 14),
    ("llama", {"use_dora": True}, 14),
    (
        "llama",
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp.up_proj": 16}, "alpha_pattern": {"v_proj": 9}},
        14,
    ),
    ("llama", {"target_modules": r".*layers\.0.*(q_proj|up_proj)"}, 2),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1], "init_lora_weights": "eva"}, 1),
    ("llama", {"exclude_modules": r".*layers\.0\..*"}, 7),
    ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, 3),
    ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}, 1),
    ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}, 16),
    ("llama", {"modules_to_save": ["head", "norm"], "target_modules": ["embed_tokens"]}, 7),
    ("llama", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, 16),
    ("llama", {"modules_to_save": ["mlp"], "target_modules": ["q_proj"]}, 8),
    ("llama", {"bias": "all", "modules_to_save": ["o_proj"], "target_modules": ["q_proj"]}, 12),
    ("gpt2", {"use_dora": True}, 8),
    ("gpt2", {"target_modules": ["lm_head"]}, 1),
    ("qwen3_moe", {}, 34),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, 10),
    ("mixtral", {}, 34),
    ("mixtral", {"target_modules": ["w1", "w2", "w3"]}, 24),
    ("olmoe", {}, 34),
]


@pytest.mark.parametrize("kind, how, merged", MERGES)
def test_a_merge_is_that_of_peft(make, kind, how, merged):
    """On weights in 4 and in 16 bits; GPT-2's Conv1D square, and transposed."""
    fields, tensors, expected = adapter_of(make(kind)[0](), **how)
    got, plan = exported(make, kind, fields, tensors)
    same = expected.state_dict()
    alone = split(expected, {name: x for name, x in same.items() if name in plan.model.state_dict()})
    for name, first in plan.model.all_tied_weights_keys.items():
        if not plan.untied:
            assert same_bits(same[name], same[first]) and alone.pop(name) is not None
    assert got.keys() == alone.keys() and all(same_bits(got[name], alone[name]) for name in got)
    assert sum(plan.changed(name) for name in got) == merged


Q, PATH = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "base_model.model.model."
ADAPTERS = {  # what the error says: changed fields, changed tensors (None: without it, or an empty file)
    f"missing {Q}": ({}, {Q: None}),
    "(28): missing": ({}, None),
    f"surplus {PATH}layers.0.mlp.down_proj": ({"target_modules": ["q_proj"]}, {}),
    "(24): surplus": ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]}, {}),
    f"surplus {PATH}layers.0.self_attn.o_proj": ({"exclude_modules": ".*o_proj"}, {}),
    "surplus base_model.model.layers.0": ({}, {Q: None, Q.replace("model.model.model", "model.model"): Q}),
    f"surplus {Q.replace('.weight', '.default.weight')}": ({}, {Q.replace(".weight", ".default.weight"): Q}),
    f"surplus {PATH}norm.weight": ({}, {f"{PATH}norm.weight": Q}),
    "LlamaForCausalLM, the class of the base's config (1): surplus": ({}, {f"{PATH}score.weight": Q}),
    "peft_type=None": ({"peft_type": None}, {}),
    "peft_type=LOHA": ({"peft_type": "LOHA"}, {}),
    "PEFT cannot put A": ({"target_modules": "nothing"}, {}),
    "modules_to_save": ({"modules_to_save": "lm_head"}, {}),
    "lora_bias=True": ({"lora_bias": True}, {}),
    "init_lora_weights=pissa": ({"init_lora_weights": "pissa"}, {}),
    "layer_replication=[[0, 1]]": ({"layer_replication": [[0, 1]]}, {}),
    "trainable_token_indices=[3]": ({"trainable_token_indices": [3]}, {}),
    "NoneType": ({"lora_alpha": None}, {}),
    "q_proj.weight is not finite in torch.bfloat16": ({"lora_alpha": float("nan")}, {}),
    "size mismatch": ({"r": 2}, {}),
    "is not finite in torch.bfloat16, expected numbers": ({}, {Q: torch.full((4, 64), torch.nan)}),
}


@pytest.fixture(scope="module")
def trained(make):
    """The fields and tensors of an adapter, and what it merges into."""
    return adapter_of(make("llama")[0]())[:2]


@pytest.mark.parametrize("text", ADAPTERS)
def test_an_adapter_that_does_not_fit_is_refused_by_name(make, trained, text):
    (fields, tensors), (other, changed) = trained, ADAPTERS[text]
    own = {} if changed is None else dict(tensors)
    for key, value in (changed or {}).items():
        own[key] = tensors[value] if isinstance(value, str) else value
    held = {key: x for key, x in own.items() if x is not None}
    with pytest.raises(UnsupportedState) as error:
        exported(make, "llama", fields | other, held)
    assert text in str(error.value)


def test_fields_that_merging_does_not_read_are_no_reason(make, trained):
    fields, tensors = trained
    others = {
        "ensure_weight_tying": True,
        "unsloth_version": "1",
        "new_in_peft_9": 1,
        "runtime_config": {"ephemeral_gpu_offload": False},
    }
    got, _ = exported(make, "llama", fields | others, tensors)
    expected, _ = exported(make, "llama", *trained)
    assert all(same_bits(got[name], expected[name]) for name in expected)


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
BASES = {  # what the error says: changed tensors of the base, arguments of the plan
    f"{NORM} is torch.float8_e4m3fn": (
        {NORM: torch.ones(64).to(torch.float8_e4m3fn)},
        {"dtype": torch.bfloat16},
    ),
    f"{NORM} is torch.int8": ({NORM: torch.ones(64, dtype=torch.int8)}, {}),
    f"mismatched ('{NORM}'": ({NORM: torch.ones(2)}, {}),
    "unexpected SCB": ({"SCB": torch.ones(2)}, {}),
    f"{NORM} is not finite in torch.float16": ({NORM: torch.full((64,), 1e30)}, {"dtype": torch.float16}),
}


@pytest.mark.parametrize("text", BASES)
def test_what_the_model_does_not_expect_is_named(make, text):
    changes, how = BASES[text]
    with pytest.raises(UnsupportedState) as error:
        exported(make, "llama", changes=changes, **how)
    assert text in str(error.value)


def test_saved_modules_of_another_size_or_not_finite(make):
    fields, tensors, _ = adapter_of(make("llama")[0](), modules_to_save=["embed_tokens"])
    key = f"{PATH}embed_tokens.weight"
    for value, text in (
        (torch.zeros(99, 64), "becomes (99, 64), expected (96, 64): if"),
        (tensors[key] / 0, "finite"),
    ):
        with pytest.raises(UnsupportedState, match=re.escape(text)):
            exported(make, "llama", fields, tensors | {key: value})


def test_stored_tensors_that_are_equal_stay_tied(make):
    """transformers ties them on loading: the adapter of one changes both, unless they differ."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    own = make("llama")[2][embedding]
    fields, tensors, expected = adapter_of(make("llama")[0](), target_modules=["lm_head"])
    got, _ = exported(make, "llama", fields, tensors, {head: own.clone()})
    assert all(same_bits(got[name], expected.state_dict()[head]) for name in (head, embedding))
    got, _ = exported(make, "llama", fields, tensors, {head: own + 1})
    assert same_bits(got[embedding], own) and not same_bits(got[head], own + 1)


def test_integers_of_the_model_keep_their_dtype(make):
    model = torch.nn.Module()
    model.register_buffer("steps", torch.tensor([7], device="meta"))
    plan = Plan({"steps": torch.tensor([7])}, model, dtype=torch.float16)
    with pytest.raises(UnsupportedState, match="cannot load the tensors"):
        compare(model, {})
    assert plan.make("steps").dtype == torch.int64 and plan.made["steps"].like.dtype == torch.int64


def test_sizes_and_dtypes_as_people_write_them():
    sizes = {"5GB": 5 * 10**9, "5 GB": 5 * 10**9, "1.5kb": 1500, "5GiB": 5 * 2**30, "2M": 2 * 10**6, 700: 700}
    assert {size: to_bytes(size) for size in sizes} == sizes
    dtypes = {"bf16": torch.bfloat16, "float16": torch.float16, torch.float32: torch.float32, None: None}
    assert {dtype: to_dtype(dtype) for dtype in dtypes} == dtypes


def test_what_training_loaded_is_cast_before_it_is_quantized():
    weight, how = torch.randn(64, 64), {"quant_type": "nf4", "compress_statistics": False}
    training = Training(torch.bfloat16, re.compile("(?!)"), {"weight"}, how)
    plan = Plan({"weight": weight}, torch.nn.Linear(64, 64, bias=False, device="meta"), training=training)
    expected = functional.dequantize_4bit(*functional.quantize_4bit(weight.bfloat16(), **how))
    assert same_bits(plan.make("weight"), expected)


def test_the_config_of_untied_embeddings(make):
    config = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}
    expected = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}
    assert (
        untied(config, make("llama")[1])
        == untied({"text_config": config["text_config"]}, make("llama")[1])
        == expected
    )
