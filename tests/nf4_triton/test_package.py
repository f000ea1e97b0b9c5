"""The wheel, and the examples copied to an empty folder: used as a user does, away from the checkout."""

import re
import shutil
import sys
import types

import pytest
import transformers
from packaging.version import Version

import nf4_triton as package
import processes
from helpers import machine
from nf4_triton import __main__ as command_line
from nf4_triton import doctor, environment
from nf4_triton.core import launch_general

for needed in ("bitsandbytes", "peft", "hatchling"):
    pytest.importorskip(needed)

TINY = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
import torch
vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained("tiny")
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                             num_attention_heads=1, num_key_value_heads=1)).save_pretrained("tiny")
"""
SCRIPT = """
import importlib.util, runpy, sys
assert importlib.util.find_spec("helpers") is None, "the checkout is on the path"
for arguments in {commands}:
    sys.argv = arguments.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(*commands, code="", **variables): run scripts in one process; what it printed. The wheel is on
    its path, and it starts in a folder with copies of the examples, a text and a model."""
    folder = tmp_path_factory.mktemp("alone")
    install = "-m pip install -q --no-deps --no-index --no-build-isolation --target".split()
    processes.python([*install, folder / "site", machine.ROOT])
    for example in machine.ROOT.joinpath("examples").glob("*.py"):
        shutil.copy(example, folder)
    (folder / "text.txt").write_text("What is 4 plus 4?")

    def run(*commands, code="", **variables):
        variables = {"PYTHONPATH": str(folder / "site"), "NF4_TRITON": None} | variables
        code += SCRIPT.format(commands=list(commands))
        done = processes.python(["-c", code], variables=variables, folder=folder, timeout=280)
        return done.out + done.err

    run.folder = folder
    return run


ONE = "finetune_one_gpu.py tiny text.txt"
MERGES = Version(transformers.__version__) >= Version("5.15")  # with older ones it trains: noxfile.py
DOCTOR = "site/bin/nf4_triton doctor"


@pytest.fixture(scope="module")
def printed(alone):
    """What the examples print where the kernel runs (on a GPU or in Triton's interpreter), and the doctor."""
    many = "finetune_many_gpus.py tiny text.txt many 2"
    one = f"{ONE} one 2{'' if MERGES else ' --adapter-only'}"
    return alone(one, "moe_active_experts.py --size 64", many, DOCTOR, code=TINY)


def test_examples_train_with_the_kernel(alone, printed):
    assert re.search(r"The kernel dequantized ([1-9]\d*) of \1\.\n", printed), printed
    for folder in ("one", "many"):
        assert (alone.folder / folder / "adapter_model.safetensors").exists()
    assert "dequantized; the same output as with all: True" in printed
    assert (alone.folder / "one-16bit" / "model.safetensors").exists() == MERGES
    assert ("What is 4 plus 4?" in printed) == MERGES


def test_examples_print_help_and_what_is_wrong_without_importing_anything(alone):
    examples = [f"{path.name} --help" for path in machine.ROOT.glob("examples/*.py")]
    (alone.folder / "old-16bit").mkdir()
    wrong = f"{ONE} old", "finetune_one_gpu.py tiny no.txt one"
    text = alone(*examples, *wrong, code="import sys; sys.modules['torch'] = None")
    assert text.count('pip install ".[') == text.count("status 0") == len(examples) == 3
    assert text.count("status 2") == 2 and "old-16bit exists: delete it" in text and "no.txt does not" in text


def test_the_doctor_says_what_is_here_and_what_works(alone, printed):
    text = printed[printed.index("nf4_triton 2.") :].partition("status 0")[0]
    works = (
        "The kernel works: bit-identical",
        "The switch works: it switches bitsandbytes",
        "The export works: on",
    )
    for part in ("torch ", "trl ", "GPU: ", "CPU: ", *works):
        assert part in text
    assert "None" not in text
    assert (alone.folder / "site" / "bin" / "nf4-triton").exists()


@pytest.fixture
def ask(capsys, monkeypatch):
    """ask(*arguments, interpreter="0"): the doctor's exit status, and what it prints."""

    def run(*arguments, interpreter="0"):
        monkeypatch.setenv("TRITON_INTERPRET", interpreter)
        return command_line.main(["doctor", *arguments]), capsys.readouterr().out

    return run


@pytest.mark.skipif(machine.has_gpu(), reason="this machine has a GPU")
def test_all_that_is_missing_is_named_at_once(ask, monkeypatch):
    """The export works where the kernel does not."""
    monkeypatch.setitem(sys.modules, "triton", None)
    status, text = ask()
    assert status == 1 and text.endswith("own code.\nThe export works: on the CPU.\n")
    assert "The kernel does not work here: No CUDA GPU" in text
    assert "triton." not in text  # the export needs none
    assert ask("export")[0] == 0
    for name in ("bitsandbytes", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    text = ask()[1]
    assert "The switch does not work here: Missing packages: pip install bitsandbytes." in text
    assert text.endswith("The export does not work here: Missing packages: pip install peft bitsandbytes.\n")
    assert ask("export")[0] == 1


def test_variables_without_effect_are_named(ask, monkeypatch):
    monkeypatch.setattr(doctor, "PROJECT", "not installed")
    for name in environment.WORDS:
        monkeypatch.setenv(name, "ture")
    status, text = ask("export")
    unknown = "is unknown, expected one of"
    assert f"NF4_TRITON='ture' {unknown} 0, false, off, no, 1, true, on, yes\nNF4_BACKEND=" in text
    assert status == 1 and "NF4_TRITON has no effect, because the package is not installed" in text
    assert text.endswith(f"NF4_BACKEND='ture' {unknown} auto, triton, torch\n")


def test_libraries_that_are_too_old_to_export_are_named(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft.utils.transformers_weight_conversion", None)
    assert ask("export")[1].endswith("pip install -U transformers peft.\n")


def test_the_doctor_says_what_is_broken(ask, monkeypatch):
    def broken(*_):
        raise SystemExit("libcudart.so.12 not found")

    monkeypatch.setattr(environment, "describe", broken)
    monkeypatch.setattr(environment, "cannot_run", broken)
    status, text = ask()
    assert status == 1 and text.count("SystemExit: libcudart.so.12 not found\n") == 2


def test_other_bits_are_named(ask, monkeypatch):
    monkeypatch.setattr(launch_general, "dequantize_weight", lambda weight, state: weight)
    status, text = ask(interpreter="1")
    assert status == 1 and "does not work here: its bits differ from plain PyTorch's in ('nf4', " in text


def test_a_library_that_cannot_be_imported_is_named(ask, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    (tmp_path / "unsloth.py").write_text("raise NotImplementedError('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    text = ask(interpreter="1")[1]
    assert "Left to the library: unsloth.kernels.utils.fast_dequantize: no GPU\n" in text
    assert "The switch works: it switches bitsandbytes." in text


@pytest.mark.gpu
def test_the_doctor_times_unsloth_where_it_is_imported(monkeypatch, capsys):
    unsloth = types.SimpleNamespace(fast_dequantize=lambda *state, use_global_buffer: None)
    monkeypatch.setitem(sys.modules, doctor.FAST, unsloth)
    doctor.compare()
    us = r"\d+ us \(\d+.\d\dx\)"
    text = capsys.readouterr().out
    assert re.search(rf"this kernel \d+ us \(1.00x\), bitsandbytes {us}, Unsloth {us}$", text)


@pytest.mark.long  # 20 s
@pytest.mark.skipif(machine.has_gpu(), reason="the kernel can run here")
def test_where_the_kernel_cannot_run_an_example_says_so_and_trains_alike(alone, printed):
    """Also with NF4_TRITON=1, which the wheel's entry point in bitsandbytes reads."""
    text = alone(f"{ONE} without 2 --adapter-only", DOCTOR, TRITON_INTERPRET="0", NF4_TRITON="1")
    assert "nf4_triton: The NF4 kernel is not used.\nLeft" in text and "Traceback" not in text
    adapters = [alone.folder / out / "adapter_model.safetensors" for out in ("one", "without")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert "The kernel does not work here: No CUDA GPU" in text and "status 1" in text


def test_the_command_line_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from nf4_triton.__main__ import main; sys.exit(main())"
    assert "--trained-in" in processes.python(["-c", code, "help", "export"]).out
    assert processes.python(["-c", code, "version"]).out == f"nf4_triton {package.__version__}\n"


LOOKS_AROUND = """
import pydoc, sys
sys.modules[sys.argv[1]] = None
import nf4_triton
from nf4_triton.__main__ import main
main(["doctor", "export"])
print(pydoc.plaintext.document(nf4_triton))
before = {*dir()}
from nf4_triton import *
print("imported:", *sorted({*dir()} - before - {"before"}))
nf4_triton.export_checkpoint
"""
PUBLIC = """Switch UnknownInternals UnsupportedState dequantize export_checkpoint read_checkpoint restore
use_nf4_kernel"""


@pytest.mark.parametrize("absent", ["nothing", "transformers"])
def test_help_and_a_star_know_every_public_name_that_can_be_imported(absent):
    """Nor does the doctor show what bitsandbytes logs without a GPU."""
    done = processes.python(["-c", LOOKS_AROUND, absent], check=False)
    names = {*PUBLIC.split()}
    if absent == "transformers" or not MERGES:
        names.remove("export_checkpoint")
        assert "export_checkpoint cannot be imported: " in done.err
    assert {*re.findall(r"^    (?:class )?([a-zA-Z]\w+)\(", done.out, re.M)} == names
    assert f"imported: {' '.join(sorted(names))}\n" in done.out and "gemm_4bit" not in done.err
