"""Training with the kernel and without, on real libraries, must be bit-identical."""

import functools
import importlib.util

import pytest
import torch

import driver
import processes
import several
from helpers.bench import training
from nf4_triton.libraries.site import COMPILED

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

patient = pytest.mark.timeout(900)  # some minutes on a GPU
WAYS = ("with", "without")
# Runs on the GPU, by library: arguments of driver.train.
RUNS = {
    "peft": {
        "llama": {},
        "flat": dict(steps=10, flat=True),
        "2048 tokens": dict(steps=10, rows=8, length=256),  # > 1536: nothing is fused
        "fp16": dict(steps=10, autocast="float16"),
        "dora": dict(steps=10, use_dora=True),
        "compiled": dict(steps=5, compiled=True),
    },
    "unsloth": {
        "llama": {},
        "fp16": dict(steps=10, autocast="float16"),
    },
}


@functools.cache
def records(library):
    """Return all runs of a library by name, from one new process."""
    if importlib.util.find_spec(library) is None:  # not imported here: Unsloth would change this process
        pytest.skip(f"{library} is not installed")
    setups = [dict(library=library, way=way) | run for run in RUNS[library].values() for way in WAYS]
    done = iter(training.in_new_process(driver.train_all, setups))
    return {name: (next(done), next(done)) for name in RUNS[library]}


def check(on, off):
    assert on["same"] == off["same"]
    losses, gradients = on["same"]["losses"], on["same"]["gradients"]
    assert len(set(losses)) > 1 and len(set(gradients)) == len(gradients)
    by_whom = {how for tally in on["counts"].values() for how in tally}
    assert by_whom <= {"by the kernel", COMPILED}, on["counts"]


@pytest.mark.gpu
@patient
@pytest.mark.parametrize(("library", "name"), [(library, name) for library in RUNS for name in RUNS[library]])
def test_every_bit_is_the_same(library, name):
    on, off = records(library)[name]
    check(on, off)
    # The kernel handles as many dequantizations as the library did. For a nested state, bitsandbytes launches
    # one kernel for the scales and one for the weight.
    each = 1 if name == "flat" else 2
    theirs = off["launches"]["bitsandbytes"] // each + off["launches"]["unsloth"]
    assert on["launches"] == {"ours": theirs, "bitsandbytes": 0, "unsloth": 0} and theirs > 0
    assert off["launches"]["ours"] == 0
    if name != "compiled":
        assert sum(tally.get("by the kernel", 0) for tally in on["counts"].values()) > 0


@patient
def test_switched_by_the_variable():
    """NF4_TRITON=1 runs the self-test while the model is loaded. Two steps: 50 take minutes in the
    interpreter."""
    setup = dict(library="peft", rows=2, length=16, steps=2)
    setups = [setup | {"way": way} for way in ("without", "NF4_TRITON=1")]  # which stays on
    off, on = training.in_new_process(driver.train_all, setups)
    check(on, off)
    assert sum(tally.get("by the kernel", 0) for tally in on["counts"].values()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("fsdp", several.ENGINES.values(), ids=list(several.ENGINES))
def test_losses_on_every_gpu_here(fsdp):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count, several.__file__]
    processes.python([*command, fsdp], variables=training.VARIABLES)
