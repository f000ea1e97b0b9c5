"""The example for several GPUs in two processes, and what is made of their reports."""

import copy

import pytest

from helpers import machine
from helpers.results import store as results
from helpers.training import several_gpus

TURNS, TURN = several_gpus.WARM_UP + 5, several_gpus.TURN
KERNEL = [turn % 2 == 1 for turn in range(TURNS) for _ in range(TURN)]


def report(device="cuda:0", factor=1.0):
    """Steps of 30 ms without the kernel, 20 ms with it; 9 s in the first turns and at the start of each."""
    base = {"losses": [[2.0, 2.1]] * len(KERNEL), "device": device, "decoded": 0}
    seconds = [
        9.0
        if step // TURN < several_gpus.WARM_UP or step % TURN < several_gpus.SETTLE
        else factor * (0.02 if kernel else 0.03)
        for step, kernel in enumerate(KERNEL)
    ]
    return {
        "without": base | {"kernel": [False] * len(KERNEL), "seconds": [1.0] * len(KERNEL)},
        "with": base | {"kernel": [True] * len(KERNEL), "seconds": [5.0] * len(KERNEL), "decoded": 12},
        "in turns": base | {"kernel": KERNEL, "seconds": seconds, "decoded": 6},
    }


def table(row):
    return several_gpus.table(results.SeveralGpus(model={}, engines={"DDP": row}))


def test_neighbouring_turns_of_the_slowest_process_are_compared_after_the_warm_up():
    row = several_gpus.summary([report(), report("cuda:1", 2.0)])
    assert row.step_ms["without"].p50 == pytest.approx(60.0)
    assert row.step_ms["with"].p50 == pytest.approx(40.0)
    speed = row.speedup
    assert (speed.p20, speed.p50, speed.p80) == pytest.approx((1.5, 1.5, 1.5)) and row.same_losses
    assert row.decoded_by_the_kernel == [12, 12]
    cells = ["DDP", "2", "60.0", "40.0", "1.50 (1.50 to 1.50)", f"identical, {len(KERNEL)} steps"]
    assert table(row)[1] == cells


def test_a_drift_favours_neither():
    """Every step takes 1 ms more than the one before, with the kernel or without."""
    one = report()
    one["in turns"]["seconds"] = [0.05 + 0.001 * step for step in range(len(KERNEL))]
    speed = several_gpus.summary([one]).speedup
    assert speed.p20 < 1 < speed.p80 and speed.p50 == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("arm", ["with", "without", "in turns"])
def test_another_loss_in_any_process_is_said(arm):
    other = copy.deepcopy(report("cuda:1"))
    other[arm]["losses"] = [[2.0, 2.2]] * len(KERNEL)
    row = several_gpus.summary([report(), other])
    assert not row.same_losses and "DIFFER" in table(row)[1][-1]


def test_a_failure_is_shown_as_one():
    failed = table(results.Engine(failed="python -m ... ended with 1:\nTraceback\nRuntimeError: no port"))[1]
    assert failed[:2] == ["DDP", "failed"] and failed[-1] == "RuntimeError: no port"


@pytest.mark.parametrize("steps", ["15", "22"])
def test_turns_that_cannot_be_compared_are_refused(steps, capsys):
    with pytest.raises(SystemExit):
        several_gpus.main(["--steps", steps])
    assert f"--steps is {steps}, expected a multiple of 5 from 20 on" in capsys.readouterr().err


def test_another_kernel_is_not_measured_in_this_ones_stead(capsys, monkeypatch, tmp_path):
    (tmp_path / "nf4_triton.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit):
        several_gpus.main([])
    assert "uninstall it first" in capsys.readouterr().err


def test_without_two_gpus_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(several_gpus.environment, "has_gpu", lambda: False)
    assert several_gpus.main([]) == 2
    assert "needs two GPUs" in capsys.readouterr().out


def trained(processes, *options):
    """Reports of two tiny steps in each of the three runs; all processes agree and decode with the kernel."""
    pytest.importorskip("accelerate")
    reports = several_gpus.launch(processes, *options, *"--steps 2 --rows 1 --length 16 --turn 1".split())
    for one in reports:
        losses = [run["losses"] for run in one.values()]
        assert losses == [reports[0]["without"]["losses"]] * 3 and len(losses[0][0]) == processes
        assert one["with"]["decoded"] > one["in turns"]["decoded"] > one["without"]["decoded"] == 0
        assert one["in turns"]["kernel"] == [False, True]
    return reports


@pytest.mark.skipif(machine.has_gpu(), reason="on a GPU machine accelerate takes the GPUs: see below")
def test_two_processes_on_the_cpu():
    """DDP in the interpreter; accelerate runs FSDP on GPUs only."""
    trained(2)


@pytest.mark.gpu
@pytest.mark.parametrize("options", several_gpus.ENGINES.values(), ids=list(several_gpus.ENGINES))
def test_every_gpu_here(options):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    reports = trained(torch.cuda.device_count(), *options)
    assert [one["with"]["device"] for one in reports] == [f"cuda:{rank}" for rank in range(len(reports))]
