"""What is made of the processes' findings; the runs themselves need two GPUs."""

import copy

import pytest

from helpers.training import several_gpus

TURNS, TURN = several_gpus.WARM_UP + 5, several_gpus.TURN
KERNEL = [turn % 2 == 1 for turn in range(TURNS) for _ in range(TURN)]


def found(device="cuda:0", factor=1.0):
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


def test_neighbouring_turns_of_the_slowest_process_are_compared_after_the_warm_up():
    row = several_gpus.summary([found(), found("cuda:1", 2.0)])
    assert row["step_ms"]["without"]["p50"] == pytest.approx(60.0) and row["pairs"] == 4
    assert row["step_ms"]["with"]["p50"] == pytest.approx(40.0)
    assert row["speedup"] == pytest.approx({"p20": 1.5, "p50": 1.5, "p80": 1.5}) and row["same_losses"]
    assert row["devices"] == ["cuda:0", "cuda:1"] and row["decoded_by_the_kernel"] == [12, 12]
    said = several_gpus.line("DDP", row)
    assert f"60.0 -> 40.0 ms a step (1.50x, 1.50 to 1.50), losses identical over {len(KERNEL)} steps" in said


def test_a_drift_favours_neither():
    """Every step takes 1 ms more than the one before, with the kernel or without."""
    one = found()
    one["in turns"]["seconds"] = [0.05 + 0.001 * step for step in range(len(KERNEL))]
    speed = several_gpus.summary([one])["speedup"]
    assert speed["p20"] < 1 < speed["p80"] and speed["p50"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("arm", ["with", "without", "in turns"])
def test_another_loss_in_any_process_is_said(arm):
    other = copy.deepcopy(found("cuda:1"))
    other[arm]["losses"] = [[2.0, 2.2]] * len(KERNEL)
    row = several_gpus.summary([found(), other])
    assert not row["same_losses"] and "DIFFER" in several_gpus.line("FSDP 1", row)


def test_a_failure_is_shown_as_one():
    assert several_gpus.line("FSDP 2", {"failed": "no port"}) == "FSDP 2: failed: no port"


@pytest.mark.parametrize("steps", ["15", "22"])
def test_turns_that_cannot_be_compared_are_refused(steps, capsys):
    with pytest.raises(SystemExit):
        several_gpus.main(["--steps", steps])
    assert f"--steps is {steps}, expected a multiple of 5 from 20 on" in capsys.readouterr().err


def test_without_two_gpus_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(several_gpus.environment, "has_gpu", lambda: False)
    assert several_gpus.main([]) == 2
    assert "needs two GPUs" in capsys.readouterr().out
