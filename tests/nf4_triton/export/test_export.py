"""The command and its folders: what is refused in one line, what is copied, whole or nothing."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from concurrent import futures
from pathlib import Path
from unittest import mock

import pytest
import torch

import processes
from helpers import machine
from nf4_triton import __main__ as command_line
from nf4_triton.core.reference import same_bits

functional = pytest.importorskip("bitsandbytes.functional")
files = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft", "0.20", "export needs PEFT 0.20 or newer")
transformers = pytest.importorskip("transformers", "5.15", "export needs transformers 5.15 or newer")

from nf4_triton import export_checkpoint  # noqa: E402
from nf4_triton.export import sources  # noqa: E402

HOW = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LORA, LORA_CONFIG = "adapter_model.safetensors", "adapter_config.json"
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
Q, SAVED = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", f"base_model.model.{NORM}"
EDITED = {  # a copy of a folder: in which file of it the fields or tensors are others; None: without it
    "gptq": ("full", CONFIG, {"quantization_config": {"quant_method": "gptq"}}),
    "code": ("full", CONFIG, {"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}}),
    "kernels": ("four", CONFIG, {"attn_implementation": "kernels-community/flash-attn"}),
    "fp8": ("four", WEIGHTS, {NORM: torch.ones(64).to(torch.float8_e4m3fn)}),
    "huge": ("four", WEIGHTS, {NORM: torch.full((64,), 1e30)}),
    "short": ("four", WEIGHTS, {NORM: torch.ones(2)}),
    "empty": ("four", WEIGHTS, {"empty": torch.ones(0)}),
    "twice": ("full", WEIGHTS, {HEAD: EMBEDDING}),
    "apart": ("full", WEIGHTS, {HEAD: torch.ones(64, 64)}),
    "elsewhere": ("adapter", LORA_CONFIG, {"base_model_name_or_path": "/content/drive/base"}),
    "nameless": ("adapter", LORA_CONFIG, {"base_model_name_or_path": None}),
    "hub": ("adapter", LORA_CONFIG, {"base_model_name_or_path": "a/b", "revision": "abc"}),
    "loha": ("adapter", LORA_CONFIG, {"peft_type": "LOHA"}),
    "nowhere": ("adapter", LORA_CONFIG, {"target_modules": "nothing"}),
    "biased": ("adapter", LORA_CONFIG, {"lora_bias": True}),
    "pissa": ("adapter", LORA_CONFIG, {"init_lora_weights": "pissa"}),
    "newer": ("adapter", LORA_CONFIG, {"new": 1, "runtime_config": {"a": 1}}),
    "cut": ("adapter", LORA, {Q: None}),
    "surplus": ("adapter", LORA, {Q.replace("q_proj", "k_proj"): Q}),
    "infinite": ("adapter", LORA, {Q: torch.full((2, 64), torch.inf)}),
    "tokens": ("adapter", LORA, {SAVED: torch.ones(99)}),
}
WRITTEN = {  # a folder: a file in it, and what it holds
    "gguf": ("a.gguf", ""),
    "runs": (f"checkpoint-500/{LORA_CONFIG}", "{}"),
    "deep": (INDEX, "[" * 100_000),
    "lost": (INDEX, '{"weight_map": {"a": "other.safetensors"}}'),
    "leads": (INDEX, '{"weight_map": {"a": "/etc/passwd"}}'),
    "damaged": (WEIGHTS, "x" * 99),
    "killed.partial": (CONFIG, "{}"),
}


def edit(path, changes):
    """Change the fields of a JSON file, or the tensors of another. None: without it. A text: the other's."""
    old = json.loads(path.read_text()) if path.suffix == ".json" else files.load_file(path)
    new = old | {
        key: old.get(value, value) if isinstance(value, str) else value for key, value in changes.items()
    }
    if path.suffix == ".json":
        path.write_text(json.dumps(new))
    else:
        files.save_file({key: x.clone() for key, x in new.items() if x is not None}, path)


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
            parameter.data += 0.1
    tuned.save_pretrained(home / "adapter")
    for name, (source, file, changes) in EDITED.items():
        edit(shutil.copytree(home / source, home / name) / file, changes)
    for name, (file, content) in WRITTEN.items():
        path = home / name / file
        path.parent.mkdir(parents=True)
        path.write_text(content)
    shutil.copytree(home / "four", home / "lacks")
    (home / "lacks" / WEIGHTS).rename(home / "lacks" / "a.safetensors")
    (home / "lacks" / INDEX).write_text('{"weight_map": {"more": "a.safetensors"}}')
    (home / "link").symlink_to("nowhere")
    return home


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    """The current folder: a copy of home."""
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    monkeypatch.chdir(shutil.copytree(home, tmp_path / "here", symlinks=True))
    return tmp_path / "here"


@pytest.fixture
def refused(here, capsys):
    """refused(arguments, text): run the command, which must end with that text and leave nothing behind."""

    def refused(arguments, text):
        before = sorted(here.rglob("*"))
        try:
            status = command_line.main(["export", *arguments.split()])
        except SystemExit as error:
            status = error.code
        said = capsys.readouterr().err.splitlines()[-1]
        assert status in (1, 2, 130) and text in said
        assert said.startswith(("Nothing was written: ", "nf4_triton export: error: ", "interrupted"))
        assert sorted(here.rglob("*")) == before

    return refused


TYPE = "SOURCE comes first. Type: nf4_triton export"
COMMANDS = {  # arguments: what the error says
    "out four --adapter adapter": f"{TYPE} adapter out --base four",
    "four out --adapter adapter": f"{TYPE} adapter out --base four",
    "my_out org/model --adapter adapter": f"{TYPE} adapter my_out --base org/model",
    "out four": f"{TYPE} four out",
    "adapter out --base four --base full": "--base is given twice",
    "four link": "link exists",
    "four no/where": "its parent does not",
    "four out --shard-size many": "Supported units are TB, GB, MB, KB",
    "four out --dtype int8": "dtype is int8, expected float16",
    "four out --device cuda:99": "device is cuda:99",
    "four out --base full": "four is not an adapter",
    "full out": "full is in 16 bit and has no adapter: there is nothing to do",
    "four out --trained-in fp4": "four is in 4 bit (nf4) and used as it is: omit trained_in",
    "four four/out": "four/out is inside four",
    "full out --trained-in int4": "trained_in is int4, expected one of nf4, nf4+double",
    "four out --load-dtype fp16": "load_dtype and skip_modules need it",
    "adapter out --base adapter": "adapter has no model.safetensors",
    "gptq out": "gptq is quantized with gptq",
    "code out": "code that comes with it is not run",
    "elsewhere out": "/content/drive/base is no folder or file here",
    "nameless out": "does not say what it was trained on: pass --base",
    "gguf out": "it holds a.gguf",
    "runs out": "it holds checkpoint-500",
    "deep out": "expected a JSON object",
    "lost out": "other.safetensors cannot be read",
    "leads out": "passwd leads out of its folder",
    "damaged out": "cannot be read: download it again (SafetensorError",
    "lacks out --unchecked": "lacks lacks tensors that its index lists (1): more",
    "four killed": "killed.partial is left from an export that was killed",
    "fp8 out --dtype bf16": f"{NORM} is torch.float8_e4m3fn",
    "huge out --dtype fp16": f"{NORM} is not finite in torch.float16",
    "short out": f"mismatched ('{NORM}'",
    "adapter out --base apart": f"{EMBEDDING} and {HEAD} differ",
    "loha out": "peft_type=LOHA",
    "nowhere out": "PEFT cannot put nowhere into LlamaForCausalLM",
    "biased out": "lora_bias=True",
    "pissa out": "init_lora_weights=pissa",
    "cut out": f"LlamaForCausalLM, the class of the base's config (1): missing {Q}",
    "surplus out": f"surplus {Q.replace('q_proj', 'k_proj')}",
    "infinite out": "q_proj.weight is not finite in torch.bfloat16, expected numbers",
    "tokens out": "becomes (99,), expected (64,): if",
}


@pytest.mark.parametrize("arguments", COMMANDS)
def test_what_is_refused_is_said_in_one_line(refused, arguments):
    refused(arguments, COMMANDS[arguments])


FAILURES = {  # what the error says: what writing calls, and what it does
    "9 are free: choose another disk": ("shutil.disk_usage", lambda _: types.SimpleNamespace(free=9)),
    "four changed during the export": ("save_file", lambda *_: os.utime("four/model.safetensors", (1, 1))),
    "interrupted": ("save_file", mock.Mock(side_effect=KeyboardInterrupt)),
    "has too little memory": ("save_file", mock.Mock(side_effect=torch.OutOfMemoryError)),
}


@pytest.mark.parametrize("text", FAILURES)
def test_a_failure_leaves_nothing(refused, monkeypatch, text):
    name, function = FAILURES[text]
    monkeypatch.setattr(f"nf4_triton.export.write.{name}", function)
    refused("four out", text)


def test_a_full_disk_leaves_nothing(refused, full_disk):
    refused("four out", "too large")


EXPORTS = {  # arguments: what is said
    "adapter out": "Base: four/7 of 11 tensors dequantized, 5 merged",
    "newer out --shard-size 5GB": "7 of 11 tensors dequantized, 5 merged",
    "adapter out --base full": "trained on four/pass --trained-in nf4+double/0 of 11 tensors dequantized",
    "adapter out --base full --trained-in nf4+double": "loaded in torch.bfloat16/layers to nf4+double on c",
    "adapter out --base twice": "of 12 tensors dequantized, 6 merged",
    "full out --trained-in fp4 --load-dtype fp16 --skip-modules q_proj,lm_head": "quantizes 6 layers/6 of 11",
    "kernels out --dtype bf16": "7 of 11 tensors dequantized",
    "four/model.safetensors out --device cpu": "7 of 11 tensors dequantized",
    "empty out --unchecked --dtype fp16": "7 of 12 tensors dequantized",
}


@pytest.mark.parametrize("arguments", EXPORTS)
def test_what_is_used_is_said(here, capsys, caplog, arguments):
    caplog.set_level(logging.INFO, "nf4_triton")
    assert command_line.main(["export", *arguments.split()]) == 0
    said = caplog.text + capsys.readouterr().out
    assert all(text in said for text in EXPORTS[arguments].split("/"))


def test_small_files(here):
    """The adapter's tokenizer, whole; licenses, and modules; nothing of a training run."""
    base = "tokenizer.json tokenizer_config.json added_tokens.json chat_template.jinja LICENSE USE_POLICY.md"
    left = "trainer_state.json train_results.json README.md other/config.json"
    for name in f"{base} {left} 1_Pooling/config.json".split():
        path = here / "four" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("base")
    export_checkpoint("four", "one")
    for name in ("tokenizer.json", "tokenizer_config.json", "trainer_state.json"):
        (here / "adapter" / name).write_text("adapter")
    export_checkpoint("adapter", "two")
    one, two = ({path.name for path in Path(out).rglob("*") if path.is_file()} for out in ("one", "two"))
    assert one == {*base.split(), CONFIG, "generation_config.json", WEIGHTS}
    assert one - two == {"added_tokens.json", "chat_template.jinja"} and not two - one
    assert Path("one/1_Pooling/config.json").exists() and not Path("one/other").exists()
    assert Path("one/tokenizer.json").read_text() == Path("two/LICENSE").read_text() == "base"
    assert Path("two/tokenizer.json").read_text() == "adapter"


def test_one_file_comes_before_an_index(here):
    """Saved in shards, then in one file: transformers loads the file."""
    (here / "four" / INDEX).write_text('{"weight_map": {"older": "older.safetensors"}}')
    export_checkpoint("four", "out")
    assert EMBEDDING in files.load_file("out/model.safetensors")


def test_a_second_adapter_is_merged_into_the_first_export(here):
    export_checkpoint("adapter", "one")
    counts = export_checkpoint("adapter", "two", base="one")
    first = transformers.LlamaForCausalLM.from_pretrained("one", dtype="auto")
    tuned = peft.PeftModel.from_pretrained(first, "adapter")
    expected, got = tuned.merge_and_unload().state_dict(), files.load_file("two/model.safetensors")
    assert counts == (11, 0, 5) and all(same_bits(got[name], expected[name]) for name in got)


def test_a_name_on_the_hub(here, monkeypatch, caplog):
    """The base of an adapter at its revision: links to blobs of the same repository."""
    caplog.set_level(logging.INFO, "nf4_triton")
    snapshot, blobs = here / "models--a--b" / "snapshots" / "c0ffee", here / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.move(here / "four", blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    download = mock.Mock(return_value=snapshot)
    monkeypatch.setattr(sources, "snapshot_download", download)
    assert export_checkpoint("hub", "out") == (11, 7, 5)
    download.assert_called_with("a/b", revision="abc", allow_patterns=sorted([*sources.WEIGHTS, LORA]))
    assert "Base: a/b@abc, commit c0ffee" in caplog.text
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to(here / "full" / CONFIG)
    with pytest.raises(ValueError, match="generation_config.json leads out of its folder"):
        export_checkpoint("hub", "other")


def test_nothing_of_the_process_changes(here, caplog, monkeypatch):
    """Four exports at once, with another default dtype, beside a thread that logs as transformers does."""
    monkeypatch.setenv("NF4_BACKEND", "torch")  # Triton's interpreter is not safe in threads
    logger, ended, count = logging.getLogger("transformers.modeling_utils"), threading.Event(), [0]

    def log():
        while not ended.wait(0.001):
            logger.warning("mine")
            count[0] += 1

    def run(number):
        return export_checkpoint("adapter", f"out{number}", base="full", trained_in="nf4")

    filters = [*logger.filters]  # Unsloth adds some
    torch.set_default_dtype(torch.float64)
    try:
        with futures.ThreadPoolExecutor() as pool:
            pool.submit(log)
            results = [*pool.map(run, range(4))]
            ended.set()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert results == [(11, 7, 5)] * 4 and logger.filters == filters
    assert sum(record.getMessage() == "mine" for record in caplog.records) == count[0] > 0
    run(4)
    assert len({Path(f"out{number}", WEIGHTS).read_bytes() for number in range(5)}) == 1


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
export_checkpoint({large!r}, "out", shard_size="20MB", unchecked=True)
ended.set()
watching.join()
print(peak[0] - before)
"""
    variables = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}  # CUDA takes memory of its own
    said = processes.python(["-c", code], variables=variables, folder=tmp_path).out
    assert len(list(tmp_path.glob("out/model-*.safetensors"))) == 6
    assert 8 < float(said) < 50


def test_sigterm_leaves_nothing(large, tmp_path):
    command = [sys.executable, "-m", "nf4_triton", "export", large, "out", "--unchecked", "--shard-size=9MB"]
    path = os.environ | {"PYTHONPATH": os.pathsep.join([str(machine.SRC), *sys.path]), "NF4_BACKEND": "torch"}
    process = subprocess.Popen(command, cwd=tmp_path, env=path, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("out.partial/*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 143 and not list(tmp_path.iterdir())
