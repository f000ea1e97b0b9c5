"""The scripts a user copies, run as the user would run them (for several GPUs: test_several_gpus.py)."""

import ast
import json

import pytest

from helpers import machine

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*command, timeout=280):
    """Run a module from the repository's root; the text it printed."""
    return machine.python(["-m", *map(str, command)], variables=VARIABLES, timeout=timeout).out


def test_examples_import_public_names_only():
    files = sorted((machine.ROOT / "examples").glob("*.py"))
    assert len(files) >= 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "helpers":
                assert node.module == "helpers.integrate", file
            if isinstance(node, ast.Import):
                assert not [one.name for one in node.names if one.name.split(".")[0] == "helpers"], file


def test_one_gpu(tmp_path):
    """SFTTrainer: losses fall and are those without the kernel; the adapter and the merged model load."""
    for package in ("trl", "datasets"):
        pytest.importorskip(package, reason=f"{package} is in the group gpu of requirements.txt")
    small = [] if machine.has_gpu() else ["--steps", 2, "--rows", 2]
    printed = run("examples.finetune_one_gpu", "--out", tmp_path / "with", *small)
    assert "bitsandbytes.functional.dequantize_4bit" in printed
    assert "dequantizations went through the library" in printed and "merged in" in printed
    run("examples.finetune_one_gpu", "--out", tmp_path / "without", "--without", *small)
    losses, expected = (
        json.loads((tmp_path / arm / "losses.json").read_text()) for arm in ("with", "without")
    )
    assert losses == expected and losses[-1] < losses[0]
    assert (tmp_path / "with" / "adapter" / "adapter_config.json").exists()
    files = ["model.safetensors", "adapter_model.safetensors"]
    for folder, file in zip(("merged", "adapter"), files, strict=True):
        a, b = ((tmp_path / arm / folder / file).read_bytes() for arm in ("with", "without"))
        assert a == b, file


def test_where_it_pays_gives_the_same_results(tmp_path):
    """Prefill, generation, loading to 16 bit and merging: the same bits, on a CPU with one round of toys."""
    small = [] if machine.has_gpu() else ["--tasks", "prefill", "dequantize", "--rounds", 1, "--rows", 1]
    printed = run("examples.where_it_pays", "--json", tmp_path / "records.json", *small)
    records = json.loads((tmp_path / "records.json").read_text())
    assert printed.count("results the same") == len(records) == (4 if machine.has_gpu() else 2)
    for record in records.values():
        assert record["same"] and record["decoded"].startswith("0 of ") and len(record["with"]) > 0


@pytest.mark.gpu
def test_single_tokens_stay_with_the_librarys_own_kernel(tmp_path):
    """Of a prompt's pass every layer is decoded by the kernel, once; of the tokens after it none is."""
    run(
        "examples.where_it_pays", "--tasks", "prefill", "generate", "--rows", 1, "--json", tmp_path / "r.json"
    )
    records = json.loads((tmp_path / "r.json").read_text())
    decodes = [int(records[task]["decoded"].split()[2]) for task in ("prefill", "generate")]
    assert decodes[0] == decodes[1] > 0 and records["prefill"]["fused"] == 0
    assert records["generate"]["fused"] == 15 * decodes[0]  # 16 tokens, the first from the prompt's pass
