"""The section `training` of the benchmark, and losses on several GPUs."""

import numpy as np
import pytest
import several  # beside this file
import torch
from driver import SMALLEST

from helpers import machine
from helpers.bench import training

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


@pytest.mark.skipif(machine.has_gpu(), reason="the section itself runs on a GPU")
def test_nested_and_flat_are_compared_and_timed(monkeypatch, capsys):
    models, trainer = [], training.Trainer
    monkeypatch.setattr(training, "Trainer", lambda model: models.append(model) or trainer(model))
    found = training.time_steps("peft", SMALLEST, tokens=[(1, 16)], seconds=0)
    shown = capsys.readouterr().out
    nested = [model.config.quantization_config.bnb_4bit_use_double_quant for model in models]
    assert nested == [True, False]
    for case in ("PEFT nested, 16 tokens", "PEFT flat, 16 tokens"):
        assert f"{case}: The kernel dequantized " in shown
        times, ratios = (values for of, _, values in found if of == case)
        assert [len(ms) for ms in times.values()] == [1, 1] and len(ratios["speedup"]) == 3


def test_other_results_are_not_timed():
    with pytest.raises(AssertionError, match="results differ with the kernel"):
        training.check("peft", iter("aab").__next__)
    with pytest.raises(AssertionError, match="from run to run without the kernel"):
        training.check("peft", iter("ab").__next__)
    with pytest.raises(AssertionError, match="dequantized nothing"):
        training.check("peft", lambda: "a")


def test_the_interval_pairs_rounds():
    drifting = np.geomspace(10, 40, 30)  # the clock drifts more than the kernel gains
    slower = drifting * np.linspace(1.05, 1.15, 30)
    low, median, high = training.speedup({"without": slower, "with": drifting})
    assert 1.05 < low < median < high < 1.15 and median == pytest.approx(1.1)


@pytest.mark.skipif(machine.has_gpu(), reason="accelerate takes the GPUs: see below")
def test_losses_of_one_process_on_the_cpu():
    pytest.importorskip("accelerate")
    several.compare(0)


@pytest.mark.gpu
@pytest.mark.parametrize("fsdp", several.ENGINES.values(), ids=list(several.ENGINES))
def test_losses_on_every_gpu_here(fsdp):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count, several.__file__]
    machine.python([*command, fsdp], variables=training.VARIABLES)
