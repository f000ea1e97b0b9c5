"""Training with the kernel and without, on real libraries: every bit of it must be the same."""

import importlib.util

import pytest
import sameness  # beside this file
from sameness import Record, Setup, differences

from helpers import machine
from helpers.training import runs, tiny_models

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

FAMILIES = ("llama", "qwen2", "qwen3")
SMALLEST = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
# Two workers of some minutes each; the plugin may be absent on a GPU machine.
patient = pytest.mark.timeout(900) if importlib.util.find_spec("pytest_timeout") else pytest.mark.gpu
# What is tried on the GPU, by library: name -> fields of a Setup. `family` is the model's.
PEFT = {
    "llama": dict(family="llama"),
    "qwen": dict(family="qwen2"),
    "long": dict(family="llama", steps=10, rows=8, length=256),  # above 1536 tokens nothing is fused
    "checkpointing": dict(family="llama", steps=10, checkpointing=True),
    "autocast fp16": dict(family="llama", steps=10, dtype="float16", autocast="float16"),
    "autocast bf16": dict(family="llama", steps=10, autocast="bfloat16"),
    "dora": dict(family="qwen2", steps=10, dora=True),
    "compiled": dict(family="llama", steps=5, compiled=True),
}
UNSLOTH = {
    "llama": dict(family="llama"),
    "qwen": dict(family="qwen2"),
    "checkpointing": dict(family="llama", steps=10, checkpointing=True),
    "fp16": dict(family="llama", steps=10, dtype="float16", autocast="float16"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders by family; without a GPU of the smallest size."""
    root = tmp_path_factory.mktemp("models")
    sizes = {} if machine.has_gpu() else SMALLEST
    return {family: str(tiny_models.make(root / family, family, **sizes)) for family in FAMILIES}


def in_a_process(library, wanted, folders):
    """Runs by name, all made by one new process (Unsloth changes the other libraries for good)."""
    setups = []
    for fields in wanted.values():
        rest = {name: value for name, value in fields.items() if name != "family"}
        setups.append(Setup(folders[fields["family"]], library, **rest))
    return dict(zip(wanted, sameness.in_new_process(setups), strict=True))


@pytest.fixture(scope="module")
def peft_runs(folders):
    return in_a_process("peft", PEFT, folders)


@pytest.fixture(scope="module")
def unsloth_runs(folders):
    if importlib.util.find_spec("unsloth") is None:  # not imported here: it would change this process
        pytest.skip("Unsloth is not installed")
    return in_a_process("unsloth", UNSLOTH, folders)


def check(records):
    assert "failed" not in records, records["failed"].error
    on, off = records["with"], records["without"]
    if "again" in records:
        assert not differences(off, records["again"]), (
            "the library does not repeat itself: nothing to compare"
        )
    assert not differences(on, off)
    assert len(set(on.losses)) > 1 and len(set(on.gradients)) == len(on.gradients)
    left = {site: tally for site, tally in on.counts.items() if tally["library"]}
    assert not left, left
    return on, off


def check_launches(on, off):
    """Every dequantization of a step is the kernel's, and there are as many as the library had. For a nested
    state bitsandbytes launches one kernel for the scales and one for the weight."""
    theirs = off.launches["bitsandbytes"] // 2 + off.launches["unsloth"]
    assert on.launches == {"ours": theirs, "bitsandbytes": 0, "unsloth": 0} and theirs > 0
    assert off.launches["ours"] == 0


@pytest.mark.gpu
@patient
@pytest.mark.parametrize("name", PEFT)
def test_peft(peft_runs, name):
    on, off = check(peft_runs[name])
    check_launches(on, off)
    if name != "compiled":
        assert on.peak_bytes <= off.peak_bytes
        assert sum(tally["kernel"] for tally in on.counts.values()) > 0
    assert on.merged and on.dequantized and len(on.tokens) > 7
    if len(on.losses) == 50:
        assert on.losses_as_floats()[-1] < on.losses_as_floats()[0]


@pytest.mark.gpu
@patient
@pytest.mark.parametrize("name", UNSLOTH)
def test_unsloth(unsloth_runs, name):
    on, off = check(unsloth_runs[name])
    check_launches(on, off)
    assert on.peak_bytes <= off.peak_bytes
    assert on.counts["unsloth.kernels.utils.fast_dequantize"]["kernel"] > 0
    assert len(on.tokens) > 7
    if len(on.losses) == 50:
        assert on.losses_as_floats()[-1] < on.losses_as_floats()[0]


@pytest.mark.skipif(machine.has_gpu(), reason="the GPU tests above do more")
@pytest.mark.parametrize(
    "family, fields",
    [
        ("llama", dict(steps=3, new_tokens=2)),
        ("qwen2", dict(steps=2, new_tokens=0, checkpointing=True)),
        ("qwen3", dict(steps=2, new_tokens=0, autocast="bfloat16", merge=False)),
    ],
    ids=["llama", "qwen2 checkpointing", "qwen3 autocast"],
)
def test_smallest_form_in_the_interpreter(folders, family, fields):
    """PEFT + bitsandbytes on the CPU. Unsloth needs a GPU; 50 steps would take minutes in the interpreter."""
    setup = Setup(folders[family], rows=2, length=16, rank=4, **fields)
    on, _ = check(sameness.compare(setup))
    assert sum(tally["kernel"] for tally in on.counts.values()) >= 12 * setup.steps - 3
    if setup.merge:
        assert on.merged and on.dequantized


def test_differences_are_found():
    a = Record(losses=["00", "01"], gradients=["x", "y"], adapters="z", tokens=[1])
    assert not differences(a, Record(**vars(a)))
    assert differences(a, Record(**vars(a) | {"losses": ["00", "02"]})) == ["losses from step 1"]
    assert differences(a, Record(**vars(a) | {"losses": ["00"], "merged": "m"})) == ["losses", "merged"]


def test_digests():
    import torch

    x = torch.tensor([0.0, 1.0])
    assert runs.digest([x]) == runs.digest([x.clone()])
    assert runs.digest([x]) != runs.digest([torch.tensor([-0.0, 1.0])])
    assert runs.digest([x.bfloat16().t()]) != runs.digest([x])
