"""The section `training` of the benchmark, and losses on several GPUs."""

import pytest
import several  # beside this file
import torch
from driver import SMALLEST

from helpers import machine
from helpers.bench import training

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
on_cpu = pytest.mark.skipif(machine.has_gpu(), reason="accelerate takes the GPUs: see below")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return training.make_model(tmp_path_factory.mktemp("toy"), **SMALLEST)


@pytest.mark.skipif(machine.has_gpu(), reason="the section itself runs on a GPU")
def test_one_library_is_compared_and_timed(toy, monkeypatch):
    monkeypatch.setattr(training, "ROUNDS", 1)
    found = training.steps("peft", toy, sizes=((1, 16, 1),))
    assert [len(ms) for ms in found["PEFT, 16 tokens"].values()] == [1, 1]


def test_other_results_are_not_timed():
    with pytest.raises(AssertionError, match="results differ with the kernel"):
        training.check("peft", iter("ab").__next__)
    with pytest.raises(AssertionError, match="dequantized nothing"):
        training.check("peft", lambda: "a")


def test_the_interval_pairs_rounds():
    drifting = [float(ms) for ms in range(10, 40)]  # the clock drifts more than the kernel gains
    slower = [1.1 * ms for ms in drifting]
    assert training.speedup({"without": slower, "with": drifting}) == pytest.approx([1.1, 1.1, 1.1])
    low, median, high = training.speedup({"without": [10.0, 11.0, 9.0] * 10, "with": [10.0] * 30})
    assert low < high and median == 1.0


@on_cpu
def test_losses_of_one_process_on_the_cpu(toy):
    pytest.importorskip("accelerate")
    several.compare(toy, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("fsdp", several.ENGINES.values(), ids=list(several.ENGINES))
def test_losses_on_every_gpu_here(toy, fsdp):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count, several.__file__]
    machine.python([*command, toy, fsdp], variables=training.VARIABLES)
