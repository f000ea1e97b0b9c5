"""Training with the kernel and without, on real libraries: every bit of it must be the same."""

import functools
import importlib.util

import pytest
import sameness  # beside this file

from helpers import machine
from helpers.bench import training

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

# Two workers of some minutes each; the plugin may be absent on a GPU machine.
patient = pytest.mark.timeout(900) if importlib.util.find_spec("pytest_timeout") else pytest.mark.gpu
# What is tried on the GPU: (library, name) -> arguments of sameness.train; `family` is the model's.
RUNS = {
    ("peft", "llama"): dict(family="llama"),
    ("peft", "qwen"): dict(family="qwen2"),
    ("peft", "2048 tokens"): dict(family="llama", steps=10, rows=8, length=256),  # > 1536: nothing is fused
    ("peft", "checkpointing"): dict(family="llama", steps=10, checkpointing=True),
    ("peft", "autocast fp16"): dict(family="llama", steps=10, dtype="float16", autocast="float16"),
    ("peft", "autocast bf16"): dict(family="llama", steps=10, autocast="bfloat16"),
    ("peft", "dora"): dict(family="qwen2", steps=10, use_dora=True),
    ("peft", "compiled"): dict(family="llama", steps=5, compiled=True),
    ("unsloth", "llama"): dict(family="llama"),
    ("unsloth", "qwen"): dict(family="qwen2"),
    ("unsloth", "checkpointing"): dict(family="llama", steps=10, checkpointing=True),
    ("unsloth", "fp16"): dict(family="llama", steps=10, dtype="float16", autocast="float16"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes the folder of a family's model; without a GPU of the smallest size."""
    root, sizes = (
        tmp_path_factory.mktemp("models"),
        sameness.SIZES if machine.has_gpu() else sameness.SMALLEST,
    )
    return lambda family: str(training.make_model(root / family, family, **sizes))


@pytest.fixture(scope="module")
def records(model):
    """records(library): all runs of it by name, made by one new process."""

    @functools.cache
    def of(library):
        if importlib.util.find_spec(library) is None:  # not imported here: Unsloth would change this process
            pytest.skip(f"{library} is not installed")
        wanted = {name: dict(fields) for (of, name), fields in RUNS.items() if of == library}
        setups = [dict(folder=model(f.pop("family")), library=library, **f) for f in wanted.values()]
        return dict(zip(wanted, sameness.in_new_process(setups), strict=True))

    return of


def check(records):
    assert "failed" not in records, records["failed"]
    on, off = records["with"], records["without"]
    assert records.get("again", off)["same"] == off["same"], "the library does not repeat itself"
    assert on["same"] == off["same"]
    losses, gradients = on["same"]["losses"], on["same"]["gradients"]
    assert len(set(losses)) > 1 and len(set(gradients)) == len(gradients)
    left = {site: tally for site, tally in on["counts"].items() if tally["library"]}
    assert not left, left
    return on, off


@pytest.mark.gpu
@patient
@pytest.mark.parametrize(("library", "name"), RUNS)
def test_every_bit_is_the_same(records, library, name):
    on, off = check(records(library)[name])
    # As many dequantizations as the library had, all by the kernel. For a nested state bitsandbytes launches
    # one kernel for the scales and one for the weight.
    theirs = off["launches"]["bitsandbytes"] // 2 + off["launches"]["unsloth"]
    assert on["launches"] == {"ours": theirs, "bitsandbytes": 0, "unsloth": 0} and theirs > 0
    assert off["launches"]["ours"] == 0 and len(on["same"]["tokens"]) > 7
    if name != "compiled":
        assert on["peak_bytes"] <= off["peak_bytes"]
        assert sum(tally["kernel"] for tally in on["counts"].values()) > 0
    if library == "peft":
        assert on["same"]["merged"] and on["same"]["dequantized"]
    losses = on["same"]["losses"]
    assert len(losses) < 50 or losses[-1] < losses[0]


@pytest.mark.skipif(machine.has_gpu(), reason="the GPU test above does more")
@pytest.mark.parametrize(
    "family, fields",
    [
        pytest.param("llama", dict(new_tokens=2), id="llama"),
        pytest.param("qwen2", dict(new_tokens=0, checkpointing=True), marks=pytest.mark.long),
        pytest.param("qwen3", dict(new_tokens=0, autocast="bfloat16"), marks=pytest.mark.long),
    ],
)
def test_smallest_form_in_the_interpreter(model, family, fields):
    """PEFT + bitsandbytes on the CPU. Unsloth needs a GPU; 50 steps would take minutes in the interpreter."""
    on, _ = check(sameness.compare(dict(folder=model(family), rows=2, length=16, steps=2, **fields)))
    assert sum(tally["kernel"] for tally in on["counts"].values()) >= 12 * 2 - 3
    assert on["same"]["merged"] and on["same"]["dequantized"]
