"""export_checkpoint and its command: the bits of bitsandbytes and PEFT, whole or nothing, small in memory."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from helpers import machine
from helpers.puzzle.layers import DEVICE
from nf4_triton import __main__ as command_line
from nf4_triton.core.reference import same_bits

functional = pytest.importorskip("bitsandbytes.functional")
files = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft", "0.20", "export needs PEFT 0.20 or newer")
transformers = pytest.importorskip("transformers", "5.15", "export needs transformers 5.15 or newer")

from nf4_triton import export_checkpoint  # noqa: E402
from nf4_triton.export import export  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(save_embedding_layers|fan_in_fan_out|eva|tied|tie_word|did not match)"
)
ATTENTION = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)
HOW = ATTENTION | dict(num_hidden_layers=2, num_key_value_heads=2, vocab_size=160)
FAMILIES = {  # class, config
    "Llama": ("LlamaForCausalLM", HOW | dict(tie_word_embeddings=True, attention_bias=True)),
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
    "SD3": (
        "SD3Transformer2DModel",
        dict(num_layers=1, sample_size=8, attention_head_dim=16, num_attention_heads=4)
        | dict(joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64),
    ),
}
SMALL = ("tokenizer.json", "templates/tool.jinja")
BY_HAND = {"Qwen3-MoE": "experts", "SD3": "attn"}  # the 4-bit weights, which no library makes here
LONG = [pytest.param(family, marks=pytest.mark.long) for family in list(FAMILIES)[2:]]


def kind_of(family):
    library = pytest.importorskip("diffusers") if family == "SD3" else transformers
    return getattr(library, FAMILIES[family][0])


def load(family, folder):
    """Return the model in a folder. Fail unless the folder has all that it expects and nothing else."""
    dtype = {"torch_dtype": torch.bfloat16} if family == "SD3" else {"dtype": "auto"}
    model, found = kind_of(family).from_pretrained(folder, output_loading_info=True, **dtype)
    assert not any(found.values()), found
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
    """make(family): the folders of a random model in 4 bits and of its export."""

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp("made")
        model, kind, config = folder / "model", kind_of(family), FAMILIES[family][1]
        torch.manual_seed(0)
        whole = kind(**config) if family == "SD3" else kind(kind.config_class(**config))
        whole.to(torch.bfloat16).save_pretrained(model)
        if family in BY_HAND:
            quantize_by_hand(model, BY_HAND[family])
        else:
            flat = family in ("GPT-2", "Qwen3")
            how = transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="fp4" if flat else "nf4",
                bnb_4bit_use_double_quant=not flat,
                llm_int8_skip_modules=["lm_head", "o_proj"],
            )
            quantized = kind.from_pretrained(
                model, quantization_config=how, dtype="auto", device_map={"": DEVICE}
            )
            shutil.rmtree(model)
            quantized.save_pretrained(model, max_shard_size="40KB" if family == "Llama" else "5GB")
        (model / "templates").mkdir()
        for name in SMALL:
            (model / name).write_text("{}")
        export_checkpoint(model, folder / "out", shard_size="60KB" if family == "Llama" else "5GB")
        return model, folder / "out"

    return make


@pytest.mark.parametrize("family", ["Llama", "GPT-2", *LONG])
def test_each_tensor_is_that_of_bitsandbytes(make, family):
    """nf4 and fp4, nested and flat, in one file and in several. transformers and diffusers load it."""
    model, out = make(family)
    expected, got = dequantized(model, transposed=family == "GPT-2"), tensors_of(out)
    assert got.keys() == expected.keys()
    assert all(same_bits(got[name] + 0, expected[name] + 0) for name in got)  # fp4's zeros have any sign
    load(family, out)
    config = json.loads((model / "config.json").read_text())
    config.pop("quantization_config", None)
    assert json.loads((out / "config.json").read_text()) == config
    assert all((out / name).exists() for name in SMALL)
    assert len(list(out.glob("*.safetensors"))) == (3 if family == "Llama" else 1)


ADAPTERS = {
    "rsLoRA": {"use_rslora": True, "init_lora_weights": "orthogonal"},
    "DoRA": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp.up_proj": 16},
        "alpha_pattern": {"v_proj": 64},
    },
    "a regex": {"target_modules": r".*layers\.0.*(q_proj|up_proj)"},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "init_lora_weights": "eva"},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both ends": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "saved head": {"modules_to_save": ["head", "norm"], "target_modules": ["embed_tokens"]},  # ends of names
    "bias": {"bias": "all", "modules_to_save": ["o_proj"], "target_modules": ["q_proj"]},
}


def add_adapter(family, make, folder, how):
    """Save a random adapter. Return the tensors of the model into which PEFT merged it."""
    targets = r".*(to_q|q_proj)" if family in BY_HAND else "all-linear"
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": targets} | how)
    model = peft.get_peft_model(load(family, make(family)[1]), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    model = peft.PeftModel.from_pretrained(load(family, make(family)[1]), folder)
    return model.merge_and_unload().state_dict()


MERGES = [("Llama", name) for name in ADAPTERS] + [("GPT-2", "DoRA")]
MERGES += [pytest.param(family, "DoRA", marks=pytest.mark.long) for family in list(FAMILIES)[2:]]


@pytest.mark.parametrize("family, name", MERGES)
def test_a_merge_is_that_of_peft(make, tmp_path, family, name):
    """On weights in 4 bits and in 16 (o_proj). Llama's embeddings are tied, until a copy of one is saved."""
    expected = add_adapter(family, make, tmp_path / "adapter", ADAPTERS[name])
    *_, merged = export_checkpoint(
        tmp_path / "adapter", tmp_path / "out", base=make(family)[0], shard_size="100KB"
    )
    got = load(family, tmp_path / "out").state_dict()
    untied = '"tie_word_embeddings": false' in (tmp_path / "out" / "config.json").read_text()
    assert family != "Llama" or untied == ("saved" in name)
    assert merged and got.keys() == expected.keys()
    assert all(same_bits(got[key], expected[key]) for key in got)


def test_t5_untied_scales_its_output_as_before(make, tmp_path):
    """An older config has neither key: transformers takes the scale from the other."""
    model = shutil.copytree(make("T5")[0], tmp_path / "model")
    file = model / "config.json"
    config = json.loads(file.read_text())
    del config["tie_word_embeddings"], config["scale_decoder_outputs"]
    file.write_text(json.dumps(config))
    add_adapter("T5", make, tmp_path / "adapter", {"modules_to_save": ["lm_head"]})
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", base=model)
    assert load("T5", tmp_path / "out").config.scale_decoder_outputs


@pytest.fixture
def given(make, tmp_path):
    """A folder with a copy of GPT-2 in 4 bits, in one file."""
    given = tmp_path / "given"
    shutil.copytree(make("GPT-2")[0], given / "model")
    return given


@pytest.fixture
def refused(given, capsys, monkeypatch):
    """refused(text, *options): check that the command says so in one line, and leaves nothing behind."""
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)

    def check(text, *options, out="out", model="model"):
        arguments = ["export", str(given.parent / out), str(given / model), *options]
        assert command_line.main(arguments) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("Nothing was written: ") and text in said
        assert list(given.parent.iterdir()) == [given]

    return check


def test_equal_tensors_stay_tied(make, given):
    """transformers ties them on loading if the config says so: the adapter of one changes both."""
    file = given / "model" / "model.safetensors"
    tensors = files.load_file(file)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    files.save_file(tensors, file)
    expected = add_adapter("GPT-2", make, given / "adapter", {"target_modules": ["lm_head"]})
    export_checkpoint(given / "adapter", given / "out", base=given / "model")
    got = load("GPT-2", given / "out").state_dict()
    assert all(same_bits(got[key], expected[key]) for key in expected)


C_ATTN, BIAS = "transformer.h.0.attn.c_attn.weight", "transformer.ln_f.bias"


def without_state(tensors):
    for key in [key for key in tensors if key.startswith(f"{C_ATTN}.")]:
        del tensors[key]


def with_a_newline(tensors):
    for key in [key for key in tensors if key.startswith(C_ATTN)]:
        tensors[key.replace(".attn", "\n")] = tensors.pop(key)


TENSORS = {  # what the error says: how the tensors are changed
    f"{C_ATTN} is torch.uint8, expected a floating-point tensor": without_state,
    f"{BIAS} is torch.int8, expected": lambda x: x.update({BIAS: x[BIAS].char(), "SCB": x[BIAS].float()}),
    f"{C_ATTN}: the weight holds": lambda x: x.update({C_ATTN: x[C_ATTN][:-1]}),
    "unexpected transformer.h.0 .c_attn": with_a_newline,
    f"missing {BIAS}": lambda x: x.pop(BIAS),
    f"mismatched ('{BIAS}', torch.Size([2]), torch.Size([64]))": lambda x: x.update({BIAS: torch.zeros(2)}),
}


@pytest.mark.parametrize("text", TENSORS)
def test_what_the_model_does_not_expect_is_named(given, refused, text):
    file = given / "model" / "model.safetensors"
    tensors = files.load_file(file)
    TENSORS[text](tensors)
    files.save_file(tensors, file)
    refused(text)


INDEX = "model.safetensors.index.json"
WRITTEN = {  # what the error says: a file, and what it holds then; it is deleted if that is None
    "config.json is missing": ("config.json", None),
    "no attribute Unknown": ("config.json", '{"architectures": ["Unknown"]}'),
    "expected a JSON object": ("config.json", "[" * 100_000),
    "('weight_map')": (INDEX, "{}"),
    "other.safetensors is missing": (INDEX, '{"weight_map": {"a": "other.safetensors"}}'),
    "passwd leads out of its folder": (INDEX, '{"weight_map": {"a": "/etc/passwd"}}'),
    "header too large": ("model.safetensors", "x" * 99),
    "has no model.safetensors": ("model.safetensors", None),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_a_file_that_is_missing_or_damaged_is_named(given, refused, text):
    name, content = WRITTEN[text]
    if name == INDEX:
        (given / "model" / "model.safetensors").unlink()
    (given / "model" / name).unlink(missing_ok=True)
    if content:
        (given / "model" / name).write_text(content)
    refused(text)


def test_options_and_places_are_checked(make, given, refused):
    for size in ("abc", "-5GB", "0GB"):
        refused("expected a size such as 5GB", f"--shard-size={size}")
    with pytest.raises(ValueError, match="dtype is bf16, expected float16"):
        export_checkpoint("out", given, dtype="bf16")
    (given / "link").symlink_to("nowhere")
    for out in ("given", "given/link"):
        refused("exists", out=out)
    refused("its parent does not", out="nowhere/out")
    refused("is no folder, no file, and not on the hub", model="typo")
    refused("has no weights that bitsandbytes saved in 4 bits", model=make("GPT-2")[1])
    refused("has no adapter_model.safetensors", f"--adapter={given / 'model'}")


def test_a_link_may_lead_to_its_repository_in_the_hubs_cache_alone(make, given, refused):
    snapshot, blobs = given / "models--a--b" / "snapshots" / "1", given / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.move(given / "model", blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    export_checkpoint(given / "out", snapshot)
    assert tensors_of(given / "out").keys() == tensors_of(make("GPT-2")[1]).keys()
    for name in ("tokenizer.json", "model.safetensors"):
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(make("GPT-2")[0] / name)
        refused(f"{name} leads out of its folder", model=snapshot)
        shutil.copy(make("GPT-2")[0] / name, blobs / "copy")
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(blobs / "copy")


def test_one_file_comes_before_an_index_and_may_be_given_itself(make, given):
    """Saved in shards, then in one file: transformers loads the file."""
    (given / "model" / INDEX).write_text('{"weight_map": {"older": "older.safetensors"}}')
    for number, place in enumerate(("model", "model/model.safetensors")):
        export_checkpoint(given / str(number), given / place)
        written = (given / str(number) / "model.safetensors").read_bytes()
        assert written == (make("GPT-2")[1] / "model.safetensors").read_bytes()


def test_a_model_that_transformers_does_not_know(given, refused):
    """Unchecked, each tensor is as bitsandbytes returns it, here in another dtype."""
    (given / "model" / "config.json").write_text('{"architectures": ["Unknown"], "dtype": "bfloat16"}')
    file = given / "model" / "model.safetensors"
    files.save_file(files.load_file(file) | {"empty": torch.zeros(0)}, file)
    refused("no library builds the model", "--adapter=x", "--unchecked")
    export_checkpoint(given / "out", given / "model", unchecked=True, dtype=torch.float16)
    expected, got = dequantized(given / "model", dtype=torch.float16), tensors_of(given / "out")
    assert '"dtype": "float16"' in (given / "out" / "config.json").read_text()
    assert all(same_bits(got[name] + 0, expected[name].half() + 0) for name in expected)


CONFIGS = {  # what the error says: a change of adapter_config.json
    "lora_bias=True": {"lora_bias": True},
    "init_lora_weights=pissa": {"init_lora_weights": "pissa"},
    "peft_type=LOHA": {"peft_type": "LOHA"},
    "new_in_peft_9=1": {"new_in_peft_9": 1},
    "lora_alpha=None": {"lora_alpha": None},
    "lora_alpha=nan": {"lora_alpha": float("nan")},
    "size mismatch": {"r": 2},
}
A = f"base_model.model.{C_ATTN.removesuffix('weight')}lora_A.weight"
KEYS = {  # a tensor that is added: the error names it; one of the same name is deleted
    A: "(1): transformer.h.0.attn.c_attn.lora_A.weight;",
    A.replace(".weight", ".default.weight"): "(1): transformer.h.0.attn.c_attn.lora_A.default.weight;",
    A.removeprefix("base_model.model."): "here (1): transformer.h.0.attn.c_attn.lora_A.weight;",
    f"base_model.model.{BIAS}": "becomes (4, 64), expected (64,): if the adapter has new tokens",
    A.replace("c_attn", "other"): "here (1): base_model.model.transformer.h.0.attn.other.lora_A.weight;",
}


def test_an_adapter_that_does_not_fit_is_refused_by_name(make, given, refused, capsys):
    adapter = given / "adapter"
    add_adapter("GPT-2", make, adapter, {})
    command = ["export", str(given / "out"), str(given / "model"), f"--adapter={adapter}"]
    assert command_line.main(command) == 0
    assert capsys.readouterr().out == f"{given / 'out'}: 8 of 28 tensors dequantized, 8 merged\n"
    config, file = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    before, tensors = json.loads(config.read_text()), files.load_file(file)
    for text, change in CONFIGS.items():
        config.write_text(json.dumps(before | change))
        refused(text, f"--adapter={adapter}")
    config.write_text(json.dumps(before))
    for key, text in KEYS.items():
        changed = tensors | {key: tensors[A].clone()}
        if key == A:
            del changed[key]
        files.save_file(changed, file)
        refused(text, f"--adapter={adapter}")
    files.save_file(tensors | {A: tensors[A] / 0}, file)
    refused(f"{C_ATTN} is not finite in torch.bfloat16", f"--adapter={adapter}")


def test_a_full_disk(given, refused, full_disk):
    refused("File too large")


def test_an_interrupt_in_the_last_file_leaves_nothing(make, tmp_path, monkeypatch):
    write_file = export.write_file

    def interrupted(path, *arguments):
        write_file(path, *arguments)
        if "3-of-00003" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(export, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(tmp_path / "out", make("Llama")[0], shard_size="60KB")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Twelve weights that become 96 MB."""
    weight, state = functional.quantize_4bit(torch.randn(1024, 4096, dtype=torch.bfloat16), quant_type="nf4")
    parts = {f".{key}": tensor for key, tensor in state.as_dict(packed=True).items()} | {"": weight}
    tensors = {name + part: parts[part].clone() for name in "abcdefghijkl" for part in parts}
    folder = tmp_path_factory.mktemp("large")
    files.save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_memory_without_bitsandbytes_and_triton(large, tmp_path):
    """In files of two weights of 8 MB: two weights, and what PyTorch needs for a third."""
    code = f"""
import pathlib, sys, threading
sys.modules["bitsandbytes"] = sys.modules["triton"] = None
from nf4_triton import export_checkpoint
def held():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1000
def watch():
    while not ended.wait(0.001):
        peak[0] = max(peak[0], held())
peak, ended = [held()], threading.Event()
before = held()
watching = threading.Thread(target=watch)
watching.start()
export_checkpoint("out", {large!r}, shard_size="20MB", unchecked=True)
ended.set()
watching.join()
print(peak[0] - before)
"""
    variables = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}  # CUDA takes memory of its own
    said = machine.python(["-c", code], variables=variables, folder=tmp_path).out
    assert len(list(tmp_path.glob("out/model-*.safetensors"))) == 6
    assert 8 < float(said) < 50


def test_sigterm_leaves_nothing(large, tmp_path):
    command = [sys.executable, "-m", "nf4_triton", "export", "out", large, "--unchecked"]
    path = os.environ | {"PYTHONPATH": str(machine.SRC)}
    process = subprocess.Popen(command, cwd=tmp_path, env=path, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("*/*/*.safetensors")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 143 and not list(tmp_path.iterdir())
