"""What is made of the processes' findings; the runs themselves need two GPUs."""

import copy

import pytest

from helpers import several_gpus


def found(device="cuda:0"):
    run = {"losses": [[2.0, 2.1]] * 8, "device": device, "decoded": 0}
    return {
        "without": run | {"seconds": [9.0] * 5 + [0.03, 0.02, 0.04]},
        "with": run | {"seconds": [9.0] * 5 + [0.02] * 3, "decoded": 12},
    }


def test_the_step_is_that_of_the_slowest_process_after_the_warm_up():
    slow = found("cuda:1")
    slow["without"]["seconds"][-3:] = [0.05, 0.06, 0.04]
    row = several_gpus.summary([found(), slow])
    assert row["step_ms"] == pytest.approx({"without": 50.0, "with": 20.0})
    assert row["speedup"] == pytest.approx(2.5) and row["same_losses"]
    assert row["devices"] == ["cuda:0", "cuda:1"] and row["decoded_by_the_kernel"] == [12, 12]
    assert "identical over 8 steps" in several_gpus.line("DDP", row)


@pytest.mark.parametrize("arm", ["with", "without"])
def test_another_loss_in_any_process_is_said(arm):
    other = copy.deepcopy(found("cuda:1"))
    other[arm]["losses"] = [[2.0, 2.2]] * 8
    row = several_gpus.summary([found(), other])
    assert not row["same_losses"] and "DIFFER" in several_gpus.line("FSDP 1", row)


def test_a_failure_is_shown_as_one():
    assert several_gpus.line("FSDP 2", {"failed": "no port"}) == "FSDP 2: failed: no port"


def test_without_two_gpus_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(several_gpus.environment, "has_gpu", lambda: False)
    assert several_gpus.main([]) == 2
    assert "needs two GPUs" in capsys.readouterr().out
