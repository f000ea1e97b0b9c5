"""The command and its folders: what is refused in one line, what is copied, whole or nothing."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time

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
from nf4_triton.export import sources, write  # noqa: E402

HOW = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
EDITED = {  # a copy of a folder: in which file of it the fields are others
    "gptq": ("full", "config.json", {"quantization_config": {"quant_method": "gptq"}}),
    "eight": ("full", "config.json", {"quantization_config": {"load_in_8bit": True}}),
    "code": ("full", "config.json", {"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}}),
    "kernels": ("four", "config.json", {"attn_implementation": "kernels-community/flash-attn"}),
    "elsewhere": ("adapter", "adapter_config.json", {"base_model_name_or_path": "/content/drive/base"}),
    "nameless": ("adapter", "adapter_config.json", {"base_model_name_or_path": None}),
    "hub": ("adapter", "adapter_config.json", {"base_model_name_or_path": "a/b", "revision": "abc"}),
}
WRITTEN = {  # a folder: a file in it, and what it holds
    "bin": ("pytorch_model.bin", ""),
    "gguf": ("a.gguf", ""),
    "empty": ("config.json", "{}"),
    "runs": ("checkpoint-500/adapter_config.json", "{}"),
    "deep": ("model.safetensors.index.json", "[" * 100_000),
    "indexed": ("model.safetensors.index.json", "{}"),
    "lost": ("model.safetensors.index.json", '{"weight_map": {"a": "other.safetensors"}}'),
    "leads": ("model.safetensors.index.json", '{"weight_map": {"a": "/etc/passwd"}}'),
    "damaged": ("model.safetensors", "x" * 99),
    "killed.partial": ("config.json", "{}"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a random model in 16 bits (full) and in 4 (four), an adapter, and what is refused."""
    home = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**HOW)).to(torch.bfloat16)
    model.save_pretrained(home / "full")
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    four = type(model).from_pretrained(home / "full", quantization_config=how, device_map="cpu", dtype="auto")
    four.save_pretrained(home / "four")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(four, config)
    tuned.peft_config["default"].base_model_name_or_path = "four"
    tuned.save_pretrained(home / "adapter")
    for name, (source, file, fields) in EDITED.items():
        path = shutil.copytree(home / source, home / name) / file
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    for name, (file, content) in WRITTEN.items():
        path = home / name / file
        path.parent.mkdir(parents=True)
        path.write_text(content)
    shutil.copytree(home / "four", home / "lacks")
    (home / "lacks" / "model.safetensors").rename(home / "lacks" / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "more": "a.safetensors"}}
    (home / "lacks" / sources.WEIGHTS[1]).write_text(json.dumps(index))
    (home / "link").symlink_to("nowhere")
    return home


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    """The current folder: a copy of home."""
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    monkeypatch.chdir(shutil.copytree(home, tmp_path / "here", symlinks=True))
    return tmp_path / "here"


TYPE = "SOURCE comes first. Type: nf4_triton export"
COMMANDS = {  # arguments: what the error says
    "out four --adapter adapter": f"{TYPE} adapter out --base four",
    "four out --adapter adapter": f"{TYPE} adapter out --base four",
    "my_out org/model --adapter adapter": f"{TYPE} adapter my_out --base org/model",
    "out four": f"{TYPE} four out",
    "adapter out --base four --base full": "--base is given twice",
    "adapter full": "full exists",
    "four link": "link exists",
    "four no/where": "its parent does not",
    "four four/out": "is inside four",
    "four out --shard-size 0GB": "expected a size such as 5GB",
    "four out --shard-size=-5GB": "expected a size such as 5GB",
    "four out --shard-size many": "expected a size such as 5GB",
    "four out --dtype int8": "dtype is int8, expected float16",
    "four out --device nonsense": "device is nonsense",
    "four out --device cuda:99": "device is cuda:99",
    "four out --base full": "four is not an adapter",
    "full out": "full is in 16 bit and has no adapter: there is nothing to do",
    "four out --trained-in fp4": "four is in 4 bit (nf4) and used as it is",
    "four out --trained-in nf4 --load-dtype fp16": "four is in 4 bit (nf4)",
    "full out --trained-in int4": "trained_in is int4, expected one of nf4, nf4+double",
    "four out --load-dtype fp16": "load_dtype and skip_modules need it",
    "adapter out --base adapter": "adapter is an adapter",
    "typo out": "typo is no folder, no file, and not on the hub",
    "gptq out": "gptq is quantized with gptq",
    "eight out": "eight is quantized with 8-bit bitsandbytes",
    "code out": "config.json names code that comes with the checkpoint, which is not run",
    "elsewhere out": "was trained on /content/drive/base, a folder that is not here: pass --base",
    "nameless out": "does not say what it was trained on: pass --base",
    "hub out": "a/b@abc is no folder",
    "bin out": "bin holds .bin files",
    "gguf out": "gguf holds GGUF",
    "empty out": "empty has no model.safetensors",
    "runs out": "runs holds several (checkpoint-500)",
    "runs/checkpoint-500 out": "has no adapter_model.safetensors",
    "deep out": "expected a JSON object",
    "indexed out": "('weight_map')",
    "lost out": "other.safetensors is missing",
    "leads out": "passwd leads out of its folder",
    "damaged out": "header too large",
    "lacks out --unchecked": "lacks lacks tensors that its index lists (1): more",
    "four killed": "killed.partial is left from an export that was killed",
}


@pytest.mark.parametrize("arguments", COMMANDS)
def test_what_is_refused_is_said_in_one_line(here, capsys, arguments):
    before = sorted(here.rglob("*"))
    try:
        assert command_line.main(["export", *arguments.split()]) == 1
        start = "Nothing was written: "
    except SystemExit as error:
        assert error.code == 2
        start = "nf4_triton export: error: "
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(start) and COMMANDS[arguments] in said
    assert sorted(here.rglob("*")) == before


EXPORTS = {  # arguments: what is said
    "adapter out": "Base: four/7 of 12 tensors dequantized, 1 merged",
    "adapter out --base full": "trained on four/pass --trained-in nf4+double/0 of 12 tensors dequantized",
    "adapter out --base full --trained-in nf4+double": "loaded in torch.bfloat16/layers to nf4+double on cpu",
    "four out --trained-in nf4": "7 of 12 tensors dequantized, 0 merged",
    "full out --trained-in fp4 --load-dtype fp16 --skip-modules q_proj,lm_head": "quantizes 6 layers/6 of 12",
    "kernels out --dtype bf16": "7 of 12 tensors dequantized",
    "four/model.safetensors out --device cpu": "7 of 12 tensors dequantized",
}


@pytest.mark.parametrize("arguments", EXPORTS)
def test_what_is_used_is_said(here, capsys, caplog, arguments):
    caplog.set_level(logging.INFO, "nf4_triton")
    assert command_line.main(["export", *arguments.split()]) == 0
    said = caplog.text + capsys.readouterr().out
    assert all(text in said for text in EXPORTS[arguments].split("/"))


def test_small_files(here):
    """The adapter's tokenizer, whole; licenses, and what modules.json names; nothing of a training run."""
    names = "tokenizer.json tokenizer_config.json added_tokens.json LICENSE USE_POLICY.md trainer_state.json"
    names += " train_results.json README.md 1_Pooling/config.json other/config.json modules.json"
    names += " chat_template.jinja"
    for name in names.split():
        path = here / "four" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("base")
    (here / "four" / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    export_checkpoint("four", "one")
    for name in ("tokenizer.json", "tokenizer_config.json", "trainer_state.json"):
        (here / "adapter" / name).write_text("adapter")
    export_checkpoint("adapter", "two")
    got = [{str(path.relative_to(out)) for path in out.rglob("*.*")} for out in (here / "one", here / "two")]
    kept = {"LICENSE", "USE_POLICY.md", "1_Pooling/config.json", "modules.json"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    weights = {"config.json", "generation_config.json", "model.safetensors"}
    expected = kept - {"LICENSE"} | tokenizer | weights
    assert got == [expected | {"added_tokens.json", "chat_template.jinja"}, expected]
    assert (here / "two" / "LICENSE").read_text() == (here / "one" / "tokenizer.json").read_text() == "base"
    assert (here / "two" / "tokenizer.json").read_text() == "adapter"


def test_one_file_comes_before_an_index(here):
    """Saved in shards, then in one file: transformers loads the file."""
    (here / "four" / sources.WEIGHTS[1]).write_text('{"weight_map": {"older": "older.safetensors"}}')
    export_checkpoint("four", "out")
    assert "lm_head.weight" in files.load_file("out/model.safetensors")


def test_a_second_adapter_is_merged_into_the_first_export(here):
    export_checkpoint("adapter", "one")
    counts = export_checkpoint("adapter", "two", base="one")
    first = transformers.LlamaForCausalLM.from_pretrained("one", dtype="auto")
    tuned = peft.PeftModel.from_pretrained(first, "adapter")
    expected, got = tuned.merge_and_unload().state_dict(), files.load_file("two/model.safetensors")
    assert counts == (12, 0, 1) and all(same_bits(got[name], expected[name]) for name in got)


def test_a_name_on_the_hub(here, monkeypatch, caplog):
    """The base of an adapter at its revision: links to blobs of the same repository."""
    caplog.set_level(logging.INFO, "nf4_triton")
    snapshot, blobs, asked = (
        here / "models--a--b" / "snapshots" / "c0ffee",
        here / "models--a--b" / "blobs",
        [],
    )
    snapshot.mkdir(parents=True)
    shutil.move(here / "four", blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)

    def download(name, revision, allow_patterns):
        asked.append((name, revision))
        return snapshot

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert export_checkpoint("hub", "out") == (12, 7, 1)
    assert set(asked) == {("a/b", "abc")} and "Base: a/b@abc, commit c0ffee" in caplog.text
    for name in ("generation_config.json", "model.safetensors"):
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(here / "full" / name)
        with pytest.raises(ValueError, match=f"{name} leads out of its folder"):
            export_checkpoint("hub", "other")


def test_a_model_that_transformers_does_not_know(here):
    """Unchecked, each tensor is as bitsandbytes returns it, here in another dtype."""
    (here / "four" / "config.json").write_text('{"architectures": ["Mine"], "dtype": "bfloat16"}')
    file = here / "four" / "model.safetensors"
    tensors = files.load_file(file) | {"empty": torch.zeros(0)}
    files.save_file(tensors, file)
    assert export_checkpoint("four", "out", unchecked=True, dtype=torch.float16).dequantized == 7
    got, name = files.load_file("out/model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    parts = {key: x for key, x in tensors.items() if key.startswith(f"{name}.")}
    state = functional.QuantState.from_dict(parts, "cpu")
    state.dtype = torch.float16
    assert same_bits(got[name], functional.dequantize_4bit(tensors[name], state))
    assert '"dtype": "float16"' in (here / "out" / "config.json").read_text()
    assert {x.dtype for x in got.values()} == {torch.float16} and "empty" in got


def fill_disk(monkeypatch):
    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))


def change_base(monkeypatch):
    save = write.save_file
    monkeypatch.setattr(write, "save_file", lambda *x: (save(*x), os.utime("four/model.safetensors", (1, 1))))


def interrupt(monkeypatch):
    def interrupted(tensors, path, *_):
        raise KeyboardInterrupt(path.write_bytes(b"x"))

    monkeypatch.setattr(write, "save_file", interrupted)


def exhaust(monkeypatch):
    def raised(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(write, "save_file", raised)


FAILURES = {  # what the error says: how writing fails
    "9 are free: choose another disk": fill_disk,
    "four changed during the export": change_base,
    "interrupted": interrupt,
    "cpu has too little memory (CUDA out of memory): pass --device cpu": exhaust,
}


@pytest.mark.parametrize("text", FAILURES)
def test_a_failure_leaves_nothing(here, capsys, monkeypatch, text):
    before = sorted(here.rglob("*"))
    FAILURES[text](monkeypatch)
    assert command_line.main(["export", "four", "out"]) in (1, 130)
    assert text in capsys.readouterr().err and sorted(here.rglob("*")) == before


def test_a_full_disk_leaves_nothing(here, capsys, full_disk):
    before = sorted(here.rglob("*"))
    assert command_line.main(["export", "four", "out"]) == 1
    assert "too large" in capsys.readouterr().err and sorted(here.rglob("*")) == before


def test_nothing_of_the_process_changes(here, caplog, monkeypatch):
    """Four exports at once, with another default dtype, beside a thread that logs as transformers does."""
    logger, ended, results = logging.getLogger("transformers.modeling_utils"), threading.Event(), []
    before, count = (sys.stderr, logging.root.manager.disable, torch.get_num_threads()), [0]

    monkeypatch.setenv("NF4_BACKEND", "torch")  # Triton's interpreter is not safe in threads

    def log():
        while not ended.wait(0.001):
            logger.warning("mine")
            count[0] += 1

    def run(number):
        results.append(export_checkpoint("adapter", f"out{number}", base="full", trained_in="nf4"))

    torch.set_default_dtype(torch.float64)
    try:
        threads = [threading.Thread(target=run, args=[number]) for number in range(4)]
        for thread in [logging_thread := threading.Thread(target=log), *threads]:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        ended.set()
        logging_thread.join()
    assert results == [(12, 7, 1)] * 4 and not logger.filters
    assert before == (sys.stderr, logging.root.manager.disable, torch.get_num_threads())
    assert sum(record.getMessage() == "mine" for record in caplog.records) == count[0] > 0
    export_checkpoint("adapter", "out", base="full", trained_in="nf4")
    contents = {(here / f"out{number}" / "model.safetensors").read_bytes() for number in ("", 0, 1, 2, 3)}
    assert len(contents) == 1


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
    path = os.environ | {"PYTHONPATH": str(machine.SRC), "NF4_BACKEND": "torch"}
    process = subprocess.Popen(command, cwd=tmp_path, env=path, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("out.partial/*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 143 and not list(tmp_path.iterdir())
