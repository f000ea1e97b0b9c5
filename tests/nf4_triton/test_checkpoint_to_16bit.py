"""examples/checkpoint_to_16bit.py: equal to transformers and PEFT, small in memory, whole or not at all."""

import json
import runpy
import shutil

import pytest
import torch

from helpers import machine
from helpers.puzzle.layers import DEVICE
from nf4_triton.reference import same_bits

functional = pytest.importorskip("bitsandbytes.functional")
files = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
EXAMPLE = str(machine.ROOT / "examples" / "checkpoint_to_16bit.py")
HOW = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_hidden_layers=2)


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(EXAMPLE)["main"]


def load(folder, **how):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map={"": DEVICE}, **how)


def lora(folder, model, **how):
    """Save a random adapter, of two kinds of layers if nothing else is said."""
    usual = dict(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    config = peft.LoraConfig(**usual | how)
    peft.get_peft_model(load(model), config).save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(own_bitsandbytes, tmp_path_factory):
    """A folder with 4-bit models: one in shards, a mixture of experts with tied embeddings; LoRA of each."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(**HOW)
    moe = transformers.MixtralConfig(**HOW, num_local_experts=4, tie_word_embeddings=True)
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    for name, config, size in (("llama", llama, "100KB"), ("moe", moe, "5GB")):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / "whole")
        model = load(folder / "whole", quantization_config=transformers.BitsAndBytesConfig(**nf4))
        model.save_pretrained(folder / name, max_shard_size=size)
        lora(folder / f"{name}-lora", folder / name, use_rslora=name == "moe")
    (folder / "llama" / "tokenizer.json").write_text("{}")
    return folder


def same(folder, model):
    """Return whether a model loaded from a folder has every bit of another."""
    loaded, expected = load(folder).state_dict(), model.state_dict()
    assert loaded.keys() == expected.keys()
    return all(same_bits(loaded[key], expected[key]) for key in loaded)


@pytest.mark.parametrize("name, size, shards", [("llama", "60KB", 5), ("moe", "5GB", 0)])
def test_equal_to_transformers_and_to_peft(main, saved, tmp_path, name, size, shards):
    """Shards and one file; what is not quantized is copied, such as the experts here."""
    model, adapter, out, merged = saved / name, saved / f"{name}-lora", tmp_path / "out", tmp_path / "merged"
    expected = load(model).dequantize()
    main(out, model, shard_size=size)
    assert same(out, expected)
    assert len(list(out.glob("model-*.safetensors"))) == shards
    assert (out / "model.safetensors.index.json").exists() == (shards > 0)
    config = json.loads((model / "config.json").read_text())
    assert config.pop("quantization_config")
    assert json.loads((out / "config.json").read_text()) == config
    assert (out / "tokenizer.json").exists() == (name == "llama")
    main(merged, model, adapter)
    expected = peft.PeftModel.from_pretrained(expected, adapter).merge_and_unload()
    assert same(merged, expected) and not same(out, expected)


REFUSED = {
    "has use_dora, model.layers.0.self_attn": {"use_dora": True},
    "has bias, ": {"bias": "all"},
    "has modules_to_save, lm_head.weight, ": {"modules_to_save": ["lm_head"]},
    "has rank_pattern, ": {"rank_pattern": {"q_proj": 2}},
    "has model.embed_tokens, ": {"target_modules": ["embed_tokens"]},
    "has lm_head, ": {"target_modules": ["lm_head"]},
    "has init_lora_weights=pissa, ": {"target_modules": ["lm_head"], "init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("text", REFUSED)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_name(main, saved, tmp_path, text):
    lora(tmp_path / "adapter", saved / "llama", **REFUSED[text])
    with pytest.raises(SystemExit, match=f"{text}.*expected LoRA on 4-bit weights alone"):
        main(tmp_path / "out", saved / "llama", tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_rank_or_without_tensors_is_refused(main, saved, tmp_path):
    """Its scale would be wrong, or the model would be called merged."""
    shutil.copytree(saved / "llama-lora", tmp_path / "adapter")
    config, tensors = tmp_path / "adapter" / "adapter_config.json", "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 2}))
    with pytest.raises(SystemExit, match="q_proj of another shape or rank.*expected LoRA on 4-bit"):
        main(tmp_path / "out", saved / "llama", tmp_path / "adapter")
    files.save_file({}, tmp_path / "adapter" / tensors)
    with pytest.raises(SystemExit, match="has no tensors, expected LoRA on 4-bit"):
        main(tmp_path / "out", saved / "llama", tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


def test_nothing_is_half_written(main, saved, tmp_path, monkeypatch):
    """Ctrl-C after the second shard; a folder that exists; a model that is not in 4 bits."""
    save_file = files.save_file

    def interrupted(tensors, file, metadata):
        save_file(tensors, file, metadata)
        if "00002" in file.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(tmp_path / "out", saved / "llama", shard_size="60KB")
    with pytest.raises(SystemExit, match="whole has no weights that bitsandbytes saved in 4 bits"):
        main(tmp_path / "out", saved / "whole")
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="llama exists"):
        main(saved / "llama", saved / "llama")


def test_memory_and_bits_without_bitsandbytes_and_triton(main, saved, tmp_path):
    """Twelve weights become 96 MB, in shards of two: 16 MB and one weight, at most 50 MB in all."""
    weight, state = functional.quantize_4bit(torch.randn(1024, 4096, dtype=torch.bfloat16), quant_type="nf4")
    parts = {f".{key}": tensor for key, tensor in state.as_dict(packed=True).items()} | {"": weight}
    tensors = {name + part: parts[part].clone() for name in "abcdefghijkl" for part in parts}
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text("{}")
    files.save_file(tensors, large / "model.safetensors")
    code = f"""
import pathlib, runpy, sys, threading
sys.modules["bitsandbytes"] = sys.modules["triton"] = None
def held():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1000
def watch():
    while not ended.wait(0.001):
        peak[0] = max(peak[0], held())
main = runpy.run_path({EXAMPLE!r})["main"]
main(pathlib.Path("alone"), {str(saved / "moe")!r}, {str(saved / "moe-lora")!r})
peak, ended = [held()], threading.Event()
before = held()
watching = threading.Thread(target=watch)
watching.start()
main(pathlib.Path("out"), "large", shard_size="20MB")
ended.set()
watching.join()
print(peak[0] - before)
"""
    said = machine.python(["-c", code], variables={"TRITON_INTERPRET": None}, folder=tmp_path).out
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 6
    assert 16 < float(said.split()[-1]) < 50, said
    expected = peft.PeftModel.from_pretrained(load(saved / "moe").dequantize(), saved / "moe-lora")
    assert same(tmp_path / "alone", expected.merge_and_unload())
