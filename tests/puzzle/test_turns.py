"""This function and others in turns: bits first, and a contender that fails is named."""

import pytest
import torch

from helpers.puzzle import layers, protocol, turns
from nf4_triton.core.launch import your_dequantize_nf4
from nf4_triton.core.reference import dequantize_in_pytorch as exact

pytest.importorskip("bitsandbytes")


def test_functions_take_turns_and_a_failing_one_is_named(monkeypatch, capsys):
    """On small layers; the second function fails, the fourth is turned off."""
    known = {"bitsandbytes": exact, "unsloth_today": exact, "unsloth_classic": exact}
    monkeypatch.setattr(turns, "baselines", lambda: known)
    monkeypatch.setattr(turns, "needed", lambda name: "its launcher" if name == "unsloth_today" else "")
    monkeypatch.setattr(turns, "many_layers", lambda config: [config])
    monkeypatch.setattr(turns, "kernel_grid", None)
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
    ours = [line.split()[2:] for line in shown.splitlines() if line.startswith("this kernel  ")]
    assert ours[1:] == [["5.000"] * 3, ["0.2500"] * 3]
    with pytest.raises(TypeError):  # the candidate itself: no score without it
        turns.time_all(None)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [your_dequantize_nf4, protocol.kernel_grid, protocol.allocate_and_fill])
def test_bits_are_compared_before_the_clock(function):
    config = layers.CONFIGS[1]
    us, gpu_us, seconds = turns.times_of(function, *layers.many_layers(config))
    assert us > 0 and 1 < gpu_us < 1000 and seconds > 0
    with pytest.raises(AssertionError, match="wrong bits"):
        turns.times_of(lambda layer: torch.zeros_like(exact(layer)), *layers.many_layers(config))


@pytest.mark.gpu
def test_what_no_replay_repeats_is_not_timed():
    """A function that launches on another stream in a capture, and one that launches nothing."""
    eager, other = {}, torch.cuda.Stream()

    def from_eager(layer):
        if not torch.cuda.is_current_stream_capturing():
            eager[layer] = your_dequantize_nf4(layer)
        return eager[layer]

    def beside(layer):
        weight = from_eager(layer)
        result = torch.empty_like(weight)
        with torch.cuda.stream(other if torch.cuda.is_current_stream_capturing() else None):
            return torch.mul(weight, 1, out=result)

    for function in (from_eager, beside):
        with pytest.raises(AssertionError, match="wrong bits"):
            turns.times_of(function, *layers.many_layers(layers.CONFIGS[1]))
