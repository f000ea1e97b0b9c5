"""The command and its folders: what is refused in one line, what is copied, whole or nothing."""

import itertools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
import warnings
from concurrent import futures
from pathlib import Path
from unittest import mock

import pytest
import torch

import processes
from helpers import machine
from nf4_triton import __main__ as command_line

functional = pytest.importorskip("bitsandbytes.functional")
pytest.importorskip("oracles")  # or skip: it names what the export needs
hub = pytest.importorskip("huggingface_hub")
tokenizers = pytest.importorskip("tokenizers")

from nf4_triton import UnsupportedState, export_checkpoint  # noqa: E402
from nf4_triton.export import bounds, model, plan, problems, sources  # noqa: E402
from oracles import files, peft, train, transformers  # noqa: E402

HOW = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LORA, LORA_CONFIG = "adapter_model.safetensors", "adapter_config.json"
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FIELDS = {  # a copy of a folder: in which JSON file of it fields are others
    "gptq": 'full/config.json {"quantization_config": {"quant_method": "gptq"}}',
    "text": 'full/config.json {"quantization_config": "nf4"}',
    "code": 'full/config.json {"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}}',
    "unknown": 'full/config.json {"architectures": ["Mine"]}',
    "dtypeless": 'full/config.json {"dtype": null}',
    "endless": 'full/config.json {"num_hidden_layers": 1099511627776}',
    "depths": 'full/config.json {"text_config": {"depths": [2, 200000]}}',
    "labels": 'full/config.json {"architectures": ["LlamaForSequenceClassification"]}',
    "labeled": 'full/config.json {"num_labels": 100001}',
    "backbone": 'four/config.json {"architectures": ["DetrForObjectDetection"], "model_type": "detr",'
    ' "backbone": "evil/repo", "use_timm_backbone": false}',
    "kernels": 'four/config.json {"attn_implementation": "kernels-community/flash-attn"}',
    "nameless": 'adapter/adapter_config.json {"base_model_name_or_path": null}',
    "hub": 'adapter/adapter_config.json {"base_model_name_or_path": "a/b", "revision": "abc"}',
    "local": 'adapter/adapter_config.json {"base_model_name_or_path": "~/four", "revision": "abc"}',
    "control": 'adapter/adapter_config.json {"base_model_name_or_path": "/\\u001b[2J\\u202eb\\nc"}',
    "longest": f'adapter/adapter_config.json {{"base_model_name_or_path": "{"x" * 6000}"}}',
    "saves": 'adapter/adapter_config.json {"modules_to_save": ["norm", "embed_tokens"]}',
    "loha": 'adapter/adapter_config.json {"peft_type": "LOHA"}',
    "nowhere": 'adapter/adapter_config.json {"target_modules": "nothing"}',
    "backtracking": 'adapter/adapter_config.json {"target_modules": "(.+)+(.+)+(.+)+(.+)+!"}',
    "pissa": 'adapter/adapter_config.json {"init_lora_weights": "pissa"}',
    "newer": 'adapter/adapter_config.json {"new": null}',
    "newest": 'adapter/adapter_config.json {"use_new": true}',
}
TENSORS = {  # a copy of a folder: which tensors of its file are others; None: none; a name: that one
    "fp8": ("four", {NORM: torch.ones(64).to(torch.float8_e4m3fn)}),
    "huge": ("four", {NORM: torch.full((64,), 1e30)}),
    "short": ("four", {NORM: torch.ones(2)}),
    "empty": ("four", {"empty": torch.ones(0)}),
    "older": ("four", {"position_ids": torch.arange(3), "rotary_emb.inv_freq": torch.ones(3)}),
    "twice": ("full", {HEAD: EMBEDDING}),
    "apart": ("full", {HEAD: torch.ones(64, 64)}),
    "cut": ("adapter", {Q: None}),
    "default": ("adapter", {Q.replace(".weight", ".default.weight"): Q}),
    "mlx": ("adapter", {Q.replace("A.weight", "a"): Q}),
    "surplus": ("adapter", {Q.replace("q_proj", "k_proj"): Q}),
    "infinite": ("adapter", {Q: torch.full((2, 64), torch.inf)}),
    "int8": ("adapter", {Q: torch.ones(2, 64).char()}),
    "sized": ("saves", {f"base_model.model.{EMBEDDING}": torch.ones(99, 0)}),
    "single": ("adapter", {Q.replace("self_attn.q_proj", "mlp.experts.gate_up_projs.0"): Q}),
}
WRITTEN = {  # a folder: a file in it, and what it holds
    "adapter": (f"second/{LORA_CONFIG}", "{}"),
    "gguf": ("a.gguf", ""),
    "runs/checkpoint-9": (LORA, ""),
    "runs/checkpoint-10": (LORA, ""),
    "adapters/a": (LORA, ""),
    "adapters/b": (LORA, ""),
    "older runs": ("pytorch_model-00001-of-00002.bin", ""),
    "diffusers": ("pytorch_lora_weights.safetensors", ""),
    "bare": (LORA, ""),
    "pointer": (WEIGHTS, "version https://git-lfs.github.com/spec/v1"),
    "deep": (INDEX, "[" * 100_000),
    "listed": (INDEX, '{"weight_map": ["a"]}'),
    "lost": (INDEX, '{"weight_map": {"a": "other.safetensors"}}'),
    "zero": (INDEX, json.dumps({"weight_map": {"a": "a\0b"}})),
    "long": (INDEX, json.dumps({"weight_map": {"a": "x" * 5000}})),
    "values": (INDEX, "{" + 5_000_001 * ","),
    "leads": (INDEX, '{"weight_map": {"a": "/etc/passwd"}}'),
    "older": (INDEX, '{"weight_map": {"more": "model.safetensors"}}'),  # transformers loads the one file
    "killed.partial": (CONFIG, "{}"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a random model in 16 bits (full) and in 4 (four), an adapter, and what is refused."""
    home = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**HOW, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(home / "full")
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    four = type(model).from_pretrained(home / "full", quantization_config=how, device_map="cpu", dtype="auto")
    four.save_pretrained(home / "four")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], modules_to_save=["norm"])
    tuned = peft.get_peft_model(four, config)
    tuned.peft_config["default"].base_model_name_or_path = "four"
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            parameter.data += torch.randn_like(parameter)
    tuned.save_pretrained(home / "adapter")
    for name, text in FIELDS.items():
        source, file, fields = re.fullmatch("(.*?)/(.*?) (.*)", text).groups()
        path = shutil.copytree(home / source, home / name) / file
        path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(fields)))
    for name, (source, changes) in TENSORS.items():
        (path,) = shutil.copytree(home / source, home / name).glob("*.safetensors")
        old = files.load_file(path)
        new = old | {key: old[x] if isinstance(x, str) else x for key, x in changes.items()}
        files.save_file({key: x.clone() for key, x in new.items() if x is not None}, path)
    for name, (file, content) in WRITTEN.items():
        path = home / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (home / "link").symlink_to("nowhere")
    (home / "taken").mkdir(0o700)
    return home


@pytest.fixture
def here(home, tmp_path, monkeypatch, caplog):
    """The current folder, and the user's: a copy of home. The command changes nothing of this process."""
    caplog.set_level(logging.INFO, "nf4_triton")
    for module in (command_line, bounds):
        monkeypatch.setattr(module, "signal", mock.Mock())
    monkeypatch.setattr(bounds.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(command_line, "prepare", lambda **_: None)
    monkeypatch.setattr(command_line.os, "_exit", sys.exit)
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.chdir(shutil.copytree(home, tmp_path / "here", symlinks=True))
    return tmp_path / "here"


@pytest.fixture
def refused(here, capsys):
    """refused(arguments, text): run the command, which must end with that text and leave nothing behind."""

    def refused(arguments, text):
        before = sorted(here.rglob("*"))
        with pytest.raises(SystemExit) as end:
            sys.exit(command_line.main(["export", *shlex.split(arguments)]))
        starts = {1: "Nothing was written: ", 2: "nf4_triton export: error: ", 130: "interrupted", 143: ""}
        *_, said = capsys.readouterr().err.splitlines()
        assert said.startswith(starts[end.value.code]) and text in f"{said}\n"
        assert sorted(here.rglob("*")) == before

    return refused


COMMANDS = {  # arguments: what the error says
    "four out --adapter adapter": "unrecognized arguments: --adapter adapter",
    "four link": "link exists, expected a new or an empty folder",
    "four adapter": "adapter exists",
    "four no/where": "no does not exist",
    "four ~nobody_here/out": "~nobody_here does not exist",
    "~nobody_here/a out": "~nobody_here/a is no folder or file here: check its name",
    "lora out --base full": "lora is no folder or file here: check its name\n",
    "adapter out --base x/y/z": "x/y/z is no folder or file here: pass --base MODEL",
    "four out --shard-size abc": "--shard-size is abc, expected a size such as 5GB, at least 1MB",
    "four out --shard-size 5": "at least 1MB",
    "four out --dtype int8": "int8 is no dtype for a model, expected float16",
    "four out --device cuda:99": "device is cuda:99",
    "four out --base adapter": "omit --base, or if adapter is the adapter, swap the two",
    "full out": "full is in 16 bit and has no adapter: there is nothing to do",
    "four out --trained-in fp4": "four is stored in nf4 and used as it is: omit --trained-in",
    "four out --trained-in nf4 --load-dtype fp16": "used as it is",
    "full out --trained-in int4": "--trained-in is int4, expected one of nf4, nf4+double",
    "four out --load-dtype fp16": "--load-dtype and --skip-modules need --trained-in, expected one of nf4",
    "adapter out --base dtypeless --trained-in nf4": "names no dtype",
    "gptq out": "expected bitsandbytes, fp8, mxfp4, compressed-tensors, or 16 bit: pass the 16-bit model",
    "text out": "quantization_config of text/config.json is 'nf4', expected an object",
    "code out": "code that comes with it is not run: update transformers, or pass --unchecked",
    "unknown out": "is not run: update transformers (",
    "nameless out": "does not say what it was trained on: pass --base",
    "gguf out": "gguf has no model.safetensors: pass what the GGUF was made from\n",
    "gguf/a.gguf out": "a.gguf is no model.safetensors: pass what the GGUF was made from\n",
    "four/config.json out": "pass four\n",
    "runs out --base full": "pass runs/checkpoint-10\n",
    "adapters out": "pass adapters/a or adapters/b\n",
    "'older runs' out": "load it with from_pretrained(), write it with save_pretrained()",
    "diffusers out --base full": "merge it with diffusers: load_lora_weights()",
    "diffusers/pytorch_lora_weights.safetensors out --trained-in nf4": "merge it with diffusers",
    "taken out": "taken has no model.safetensors: pass a folder as save_pretrained() writes it",
    "bare out": "pass an adapter as SOURCE, with adapter_config.json beside it",
    "default out": "holds tensors that PEFT's save_pretrained() names otherwise (1): base_model",
    "mlx out": "if MLX trained it, fuse it there, with mlx_lm.fuse",
    "endless out": "num_hidden_layers of config.json is 1099511627776, expected at most 1,000",
    "depths out": "depths of config.json is 200000",
    "labeled out": "num_labels of config.json is 100001, expected at most 100,000",
    "control out": r"/\x1b[2J\u202eb c is no folder or file here",
    "longest out": f": {300 * 'x'} is not here, and the hub did not send it",
    "zero out": r"zero/a\x00b cannot be read: download it again",
    "long out": f"long/{200 * 'x'} cannot be read: download it again",
    "values out": "it is above 100 MB or 5 million values",
    "pointer out": "download it again (a git-lfs pointer: git lfs pull)",
    "deep out": "expected a JSON object",
    "listed out": f"weight_map of listed/{INDEX} is ['a'], expected an object",
    "lost out": "other.safetensors is no regular file",
    "leads out": "passwd leads out of its folder",
    f"older/{INDEX} out --unchecked": "lacks tensors that its index lists (1): more",
    "four killed": "killed.partial belongs to an export that is running or was killed: wait, or delete it",
    "fp8 out --dtype bf16": f"{NORM} is torch.float8_e4m3fn",
    "huge out --dtype fp16": f"{NORM} is not finite in torch.float16",
    "short out": "torch.Size([64])); download them again\n",
    "empty out": "(1): unexpected empty; download them again, or pass --unchecked\n",
    "adapter out --base empty": "unexpected empty; download them again. If training added tokens",
    "adapter out --base apart": f"{EMBEDDING} and {HEAD} differ",
    "loha out": "peft_type=LOHA",
    "nowhere out": "PEFT cannot put nowhere into LlamaForCausalLM",
    "newest out": "use_new=True; update PEFT",
    "pissa out": "init_lora_weights=pissa",
    "cut out": f"cut lacks what its config targets in LlamaForCausalLM (1): {Q}",
    "surplus out": f"does not target in LlamaForCausalLM (1): {Q.replace('q_proj', 'k_proj')}",
    "infinite out": "q_proj.weight is not finite in torch.bfloat16, expected numbers",
    "int8 out": "is torch.int8 of shape (2, 64), expected floating point of shape (2, 64)",
    "sized out": "of shape (99, 0), expected floating point of shape (64, 64)",
    "single out": "changes single experts (experts.gate_up_projs)",
}


@pytest.mark.parametrize("arguments", COMMANDS)
def test_what_is_refused_is_said_in_one_line(refused, arguments):
    refused(arguments, COMMANDS[arguments])


FAILURES = {  # what the error says: what writing calls, and what it does
    # Its tensors take 65,920 bytes, and the small files more.
    "65,920 are free: choose": ("shutil.disk_usage", lambda _: types.SimpleNamespace(free=65_920)),
    "four changed during the export": ("save_file", lambda *_: os.utime("four/model.safetensors", (1, 1))),
    "interrupted": ("save_file", mock.Mock(side_effect=KeyboardInterrupt)),
    "65.9k/65.9k": ("save_file", lambda *_: command_line.signal.signal.call_args.args[1]()),  # SIGTERM
    "has too little memory": ("save_file", mock.Mock(side_effect=torch.OutOfMemoryError)),
}


@pytest.mark.parametrize("text", FAILURES)
@pytest.mark.parametrize("out", ["out", "taken"])
def test_a_failure_leaves_nothing(refused, monkeypatch, text, out):
    name, function = FAILURES[text]
    monkeypatch.setattr(f"nf4_triton.export.write.{name}", function)
    refused(f"four {out}", text)


def test_a_large_json_is_not_read(refused):
    os.truncate("four/config.json", 100_000_001)
    refused("four out", "it is above 100 MB")


@pytest.mark.parametrize("module, name", [("time", "monotonic"), ("sys", "getallocatedblocks")])
def test_what_takes_long_is_refused(refused, monkeypatch, module, name):
    """A minute, or 2 GB of objects, pass between two looks."""
    monkeypatch.setattr(bounds, "signal", signal)
    looks = mock.Mock(**{f"{name}.side_effect": itertools.count(0, 21_000_000)})
    monkeypatch.setattr(bounds, module, looks)
    monkeypatch.setattr("nf4_triton.export.export.build", lambda *_: time.sleep(5))
    refused("four out", "takes too long or too much memory to build")


def test_no_hub_is_asked_while_a_model_is_built(refused, monkeypatch):
    asked = mock.Mock(side_effect=OSError)
    monkeypatch.setattr("socket.getaddrinfo", asked)
    refused("backbone out", "offline mode is enabled")
    assert not asked.mock_calls


def stored(count, rows):
    """Return tensors as sources.py opens them."""
    slices = types.SimpleNamespace(get_shape=lambda: [rows, 64])
    return dict.fromkeys(range(count), types.SimpleNamespace(get_slice=lambda _: slices))


LEGITIMATE = {  # a config, how many tensors its files have, and the rows of one
    "128 fused experts": (transformers.GptOssConfig(num_hidden_layers=1).to_dict(), 20, 128),
    "1,000 labels, no head": (transformers.ViTConfig(num_labels=1000).to_dict(), 198, 768),
    "16,384 experts": (transformers.DogeConfig().to_dict(), 483, 16_384),
    "many labels": ({"num_labels": 3_000_000}, 12, 3_000_000),
    "widths": ({"embed_dim_per_stage": [1152]}, 12, 64),
    "many layers": ({"num_hidden_layers": 1_001}, 1_001, 64),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_counts_that_the_files_hold(name):
    config, count, rows = LEGITIMATE[name]
    bounds.check_counts(config, stored(count, rows))


@pytest.mark.parametrize("dense, experts, count", [(3, 256, 270_436), (1, 384, 417_892)])
def test_the_largest_models_are_not_refused(tmp_path, monkeypatch, dense, experts, count):
    """DeepSeek V3 and Kimi K2 in 4 bits: the names in their indexes, and the model in the command's time."""
    names = [f"model.layers.60.mlp.experts.{n}.gate_proj.weight.nested_quant_map" for n in range(count)]
    weight_map = dict.fromkeys(names, "model-00001-of-00163.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert sources.read_json(tmp_path, INDEX, "weight_map") == weight_map
    config = transformers.DeepseekV3Config(n_routed_experts=experts, first_k_dense_replace=dense).to_dict()
    bounds.check_counts(config, stored(count, 64))
    monkeypatch.setattr(bounds, "command", mock.Mock())
    with bounds.bounded(count):
        model.build(config | {"architectures": ["DeepseekV3ForCausalLM"]})


def test_a_log_and_an_error_have_no_control_characters(here, caplog):
    text, shown = "a\x1b[2J\u202eb\nc é --load-dtype", r"a\x1b[2J\u202eb c é load_dtype"
    problems.say(text)
    assert caplog.messages == [shown] and str(problems.UnsupportedState(text)) == shown
    with pytest.raises(UnsupportedState) as error:
        export_checkpoint("nowhere", "out")  # PEFT's own text is not shown
    assert error.value.__suppress_context__


@pytest.mark.skipif(machine.has_gpu(), reason="this machine has a GPU")
def test_device_0_without_a_gpu(here):
    with pytest.raises(UnsupportedState, match="device is 0, expected one that is here"):
        export_checkpoint("four", "out", device=0)


@pytest.mark.parametrize("name", ["source", "out", "base", "shard_size", "device"])
def test_other_types_from_python(here, name):
    with pytest.raises(UnsupportedState, match=f"{name}.* is (no path|Linear)"):
        export_checkpoint(**{"source": "four", "out": "out", name: torch.nn.Linear(1, 1)})


def test_a_full_disk_leaves_nothing(refused, full_disk):
    refused("four out", "too large")


def test_a_pipe_is_not_read(refused):
    path = Path("four", CONFIG)
    path.unlink()
    os.mkfifo(path)
    refused("four out", f"{path} is no regular file, expected one")


EXPORTS = {  # arguments: what is said
    "adapter out": "Base: four/adapter, not merged: second/brings no tokenizer/7 dequantized, 2 merged",
    "local taken": "Base: ~/four, in /taken: 12 tensors in torch.bfloat16, 0.1 MB; 7 dequantized, 2 merged",
    "newer out --shard-size '5 gib' --unchecked": "7 dequantized, 2 merged",
    "adapter out --base full": "trained on four/with your bnb_4bit_quant_type, and +double if/; 0 deq",
    "adapter out --base full --trained-in nf4+double": "loaded in torch.bfloat16/layers to nf4+double on c",
    "adapter out --base twice": "12 tensors/2 merged",
    "full out --Trained_In FP4 --load_dtype=FP16 --skip-modules 'q_proj, lm_head,'": "6 layers/6 deq",
    "full out --trained-in nf4 --skip-modules q_prj": "has q_prj, which/the closest: q_proj",
    "kernels out --dtype bf16": "7 dequantized",
    "older older/out": "LlamaForCausalLM has none: position_ids, rotary_emb.inv_freq./11 tensors",
    "four/model.safetensors out --device CPU": "7 dequantized",
    "four '\x1b[2J'": r"\x1b[2J needs/\x1b[2J: 11 tensors",
    "full out --trained-in nf4 --dtype float32": "; in float32: --dtype bfloat16 for 16 bit",
    "empty out --unchecked --dtype fp16": "12 tensors in torch.float16",
}


@pytest.mark.parametrize("arguments", EXPORTS)
def test_what_is_used_is_said(here, capsys, caplog, arguments):
    assert command_line.main(["export", *shlex.split(arguments)]) == 0
    said = caplog.text + capsys.readouterr().out
    assert "\x1b" not in said and all(text in said for text in EXPORTS[arguments].split("/"))
    assert Path("taken").stat().st_mode & 0o777 == 0o700


def test_without_a_config(refused, here, capsys):
    (here / "four" / CONFIG).unlink()
    refused(
        "four out", "config.json is missing, expected beside the weights: copy it there, or pass --unchecked"
    )
    refused("adapter out", "config.json is missing, expected beside the weights: copy it there\n")
    assert command_line.main("export four out --unchecked".split()) == 0
    assert capsys.readouterr().out.endswith("7 dequantized, 0 merged; without config.json\n")


def test_a_tokenizer_with_more_ids_than_rows(refused, here, caplog):
    """Of the base it is said, of the adapter's special tokens it is refused."""
    text = "the tokenizer has ids up to 64, and the model 64 rows"
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<new>": 64}))
    for folder in ("four", "adapter"):
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<new>").save_pretrained(
            folder
        )
        if folder == "four":
            export_checkpoint("four", "out")
            assert text in caplog.text
    refused("adapter other", text)


def test_small_files(here, caplog):
    """The adapter's tokenizer, whole; licenses, and modules; nothing of a training run."""
    base = "tokenizer.json added_tokens.json chat_template.jinja LICENSE 1_Pooling/config.json".split()
    for folder in ("1_Pooling", "other"):
        Path("four", folder).mkdir()
    for name in (*base, "trainer_state.json", "train_results.json", "other/config.json", "large.txt"):
        Path("four", name).write_text("base")
    os.truncate("four/large.txt", 100_000_001)
    for name in ("tokenizer.json", "tokenizer_config.json", "trainer_state.json", "value_head.safetensors"):
        Path("adapter", name).write_text("adapter")
    found = []
    for source in ("four", "adapter"):
        export_checkpoint(source, f"{source}_out")
        paths = [path for path in Path(f"{source}_out").rglob("*") if path.is_file()]
        found.append({str(path.relative_to(f"{source}_out")) for path in paths})
    assert found[0] == {*base, CONFIG, "README.md", "generation_config.json", WEIGHTS}
    assert found[0] - found[1] == {"added_tokens.json", "chat_template.jinja"}
    assert found[1] - found[0] == {"tokenizer_config.json", "value_head.safetensors"}
    assert Path("adapter_out/tokenizer.json").read_text() == "adapter"
    assert "four/large.txt is above 100 MB" in caplog.text


def test_a_name_on_the_hub(here, monkeypatch, caplog):
    """The base of an adapter at its revision: links to blobs of the same repository."""
    snapshot, blobs = here / "models--a--b" / "snapshots" / "c0ffee", here / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.move(here / "four", blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    download = mock.Mock(return_value=snapshot)
    monkeypatch.setattr(sources, "snapshot_download", download)
    (snapshot / "README.md").write_text("---\nlicense: mit\n---\n")
    assert export_checkpoint("hub", "out")[:3] == (12, 7, 2)
    fields = {"base_model": "a/b", "library_name": "transformers", "license": "mit", "tags": ["transformers"]}
    assert hub.ModelCard.load("out/README.md").data.to_dict() == fields
    Path("hub/README.md").write_text("---\nlibrary_name: mine\ntags: [peft, good]\n---\nIt works.")
    export_checkpoint("hub", "own")
    card = hub.ModelCard.load("own/README.md")
    assert card.text == "It works." and card.data.to_dict() == fields | {"tags": ["good"]}
    assert download.call_args.kwargs["revision"] == "abc" and "Base: a/b, in " in caplog.text
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to(here / "full" / CONFIG)
    with pytest.raises(ValueError, match="generation_config.json leads out of its folder"):
        export_checkpoint("hub", "other")


VERIFIED = {  # arguments: exit status, what is said
    "adapter out --base full --trained-in nf4+double --dtype bf16": (0, "out answers as/the base alone: KL"),
    "adapter full --base full --trained-in nf4+double": (1, "full does not answer as what was trained"),
    "full out --text full/config.json": (1, "out does not answer"),
    "adapter taken": (2, "taken has no config.json"),
    "adapter labels": (2, "LlamaForSequenceClassification predicts no next tokens"),
    "cut out": (2, "cannot be loaded as LlamaForCausalLM (UserWarning: Found missing adapter keys"),
}


def test_verify(here, capsys, caplog):
    export = "export adapter out --base full --trained-in nf4+double"
    assert command_line.main(export.split()) == 0
    for arguments, (status, text) in VERIFIED.items():
        assert command_line.main(["verify", *arguments.split()]) == status
        output = "".join(capsys.readouterr()) + caplog.text
        assert all(part in output for part in text.split("/"))
    assert "64 random tokens" in caplog.text


def state():
    """Return what a library call could leave changed in a process."""
    loggers = [log for log in logging.root.manager.loggerDict.values() if isinstance(log, logging.Logger)]
    held = {log.name: (log.level, log.disabled, *log.handlers, *log.filters) for log in loggers}
    bars = transformers.utils.logging.is_progress_bar_enabled(), hub.utils.are_progress_bars_disabled()
    return held, [*warnings.filters], bars, torch.get_default_dtype(), signal.getsignal(signal.SIGTERM)


def test_nothing_of_the_process_changes(here, monkeypatch):
    """Four exports at once, with another default dtype. A thread has no bounds but those of counts."""
    monkeypatch.setenv("NF4_BACKEND", "torch")  # Triton's interpreter is not safe in threads

    def run(number):
        return export_checkpoint("adapter", f"out{number}", base="full", trained_in="nf4")

    run(4)
    torch.set_default_dtype(torch.float64)
    before = state()
    try:
        with futures.ThreadPoolExecutor() as pool:
            results = [*pool.map(run, range(4))]
            error = pool.submit(export_checkpoint, "endless", "other").exception()
        assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert [result[:3] for result in results] == [(12, 7, 2)] * 4
    assert not bounds.signal.mock_calls and not bounds.constants.HF_HUB_OFFLINE
    assert "num_hidden_layers" in str(error)
    assert len({Path(f"out{number}", WEIGHTS).read_bytes() for number in range(5)}) == 1


def test_the_command_without_triton_and_sighup(here):
    """Windows has neither. The command prints its own lines and one bar."""
    code = """
import signal, sys
import torch
sys.modules["triton"] = None
del signal.SIGHUP
torch.version.cuda = torch.version.cuda or "13.0"  # then torch logs that it misses Triton
from nf4_triton.__main__ import main
main("export adapter out --base full --trained-in nf4".split())
"""
    variables = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}
    done = processes.python(["-c", code], variables=variables, folder=here)
    counts, advice = done.out.splitlines()
    assert counts == "out: 12 tensors in torch.bfloat16, 0.1 MB; 7 dequantized, 2 merged"
    assert advice.endswith(": nf4_triton verify adapter out --base full --trained-in nf4")
    assert not re.sub(r"(nf4_triton|out): [^\r\n]*\s*", "", done.err)


def test_experts_take_linear_time(tmp_path, monkeypatch):
    """A file alternates between the groups of experts that become one tensor."""
    reads, base = [], plan.Plan.base
    monkeypatch.setattr(plan.Plan, "base", lambda *arguments: reads.append(1) or base(*arguments))
    how = {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
    config = transformers.Qwen3MoeConfig(**HOW, num_experts=8, moe_intermediate_size=64)
    whole = transformers.Qwen3MoeForCausalLM(config)
    whole.save_pretrained(tmp_path)
    train(whole, tmp_path / "adapter", **how)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", base=tmp_path)
    assert len(reads) == 3 * 8 + 12


def test_layers_that_training_quantized():
    """transformers asks before it ties: of Gemma 3n's last linear layers, one stays in 16 bit when tied."""
    sizes = dict(num_hidden_layers=5, num_kv_shared_layers=0, vocab_size=64, vocab_size_per_layer_input=64)
    config = transformers.Gemma3nTextConfig(**HOW | sizes | {"tie_word_embeddings": True})
    with torch.device("meta"):
        tied = transformers.Gemma3nForCausalLM(config)
    layers = model.quantized_layers(tied, transformers.BitsAndBytesConfig(load_in_4bit=True))
    assert "model.altup_unembed_projections.2.weight" in layers and HEAD not in layers


def test_sigterm_after_out_is_complete(here):
    assert command_line.main("export four out".split()) == 0
    (_, end), _ = command_line.signal.signal.call_args
    end()
    shutil.rmtree("out")
    with pytest.raises(SystemExit, match="143"):
        end()


def test_a_signal_that_is_ignored_stays_ignored(here):
    command_line.signal.getsignal.return_value = command_line.signal.SIG_IGN
    assert command_line.main("export four out".split()) == 0
    assert not command_line.signal.signal.mock_calls


# Python itself takes seconds to end.
@pytest.mark.parametrize("number, status, seconds", [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 30)])
def test_a_signal_ends_what_takes_long(home, number, status, seconds):
    """A pattern of layers that backtracks for minutes."""
    before = sorted(home.rglob("*"))
    process = subprocess.Popen(
        [sys.executable, "-m", "nf4_triton", "export", "backtracking", "out"],
        cwd=home,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(machine.SRC), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while "trained on" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(1)
        process.send_signal(number)
        process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status and sorted(home.rglob("*")) == before
