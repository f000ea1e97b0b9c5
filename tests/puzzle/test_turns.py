"""This function and others in turns: bits first, and a contender that fails is named."""

import pytest
import torch

from helpers.puzzle import layers, protocol, turns
from nf4_triton.core.launch import your_dequantize_nf4
from nf4_triton.core.reference import dequantize_in_pytorch as exact

pytest.importorskip("bitsandbytes")


@pytest.fixture
def functions(monkeypatch):
    """Functions that take turns, on small layers; the third one fails, the fourth is turned off."""
    known = {"bitsandbytes": exact, "unsloth_today": exact, "unsloth_classic": exact}
    monkeypatch.setattr(turns, "baselines", lambda: known)
    monkeypatch.setattr(turns, "needed", lambda name: "its launcher" if name == "unsloth_today" else "")
    monkeypatch.setattr(turns, "many_layers", lambda config: [config])
    monkeypatch.setattr(turns, "kernel_grid", None)


def test_functions_take_turns_and_a_failing_one_is_named(functions, monkeypatch, capsys):
    order = []

    def times_of(fx, config):
        order.append(fx)
        fx(layers.bnb_Linear4bit(64, 64))
        return 10.0 + len(order), 5.0, 0.25

    monkeypatch.setattr(turns, "times_of", times_of)
    times = turns.time_all(exact)
    assert list(times) == ["ours", "bitsandbytes", "unsloth_classic", "allocate and fill"]
    assert order[:3] == [exact] * 3 and order[-3:] == [protocol.allocate_and_fill] * 3
    assert [len(one) for one in times.values()] == [5] * 4
    shown = capsys.readouterr().out
    assert "this kernel, kernel[grid]: not measured (TypeError: 'NoneType' object is not callable)" in shown
    assert "Unsloth today: not measured (AssertionError: needs its launcher)" in shown
    assert shown.count("not measured") == 2
    (ours,) = (line for line in shown.splitlines() if line.startswith("your_dequantize_nf4 "))
    assert ours.split()[-1] == "0.7500" and ours.count(",   5.0") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("function", [your_dequantize_nf4, protocol.kernel_grid, protocol.allocate_and_fill])
def test_bits_are_compared_before_the_clock(function):
    config = layers.CONFIGS[1]
    us, gpu_us, seconds = turns.times_of(function, *layers.many_layers(config))
    assert us > 0 and 1 < gpu_us < 1000 and seconds > 0
    with pytest.raises(AssertionError, match="wrong bits"):
        turns.times_of(lambda layer: torch.zeros_like(exact(layer)), *layers.many_layers(config))
