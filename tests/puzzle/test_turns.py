"""This function and others in turns: bits first, and a contender that fails is named."""

import pandas
import pytest
import torch
from matplotlib import pyplot

from helpers.puzzle import layers, protocol, turns
from nf4_triton.core import settings
from nf4_triton.core.launch import your_dequantize_nf4
from nf4_triton.core.reference import dequantize_in_pytorch as exact

pytest.importorskip("bitsandbytes")


def test_functions_take_turns_and_a_failing_one_is_named(monkeypatch, capsys):
    """On small layers: Unsloth today is turned off, and Unsloth classic fails in the last turn."""
    known = {"bitsandbytes": exact, "unsloth_today": exact, "unsloth_classic": exact}
    monkeypatch.setattr(turns, "baselines", lambda: known)
    monkeypatch.setattr(turns, "needed", lambda name: "its launcher" if name == "unsloth_today" else "")
    monkeypatch.setattr(turns, "many_layers", lambda config: [config])
    monkeypatch.setattr(turns, "kernel_grid", exact)
    calls = []

    def times_of(fx, config):
        fx(layers.bnb_Linear4bit(64, 64))
        calls.append((settings.settings().asm, settings.settings().hints, config.hidden))
        assert len(calls) < 103, "out of memory"
        return 10.0, 5.0, 0.25

    monkeypatch.setattr(turns, "times_of", times_of)
    with settings.force(asm=True):
        times = turns.time_all(exact)
    assert calls[:3] == [(True, True, size) for size in sorted(config.hidden for config in layers.CONFIGS)]
    assert [call[:2] for call in calls[3:12:3]] == [(True, True), (False, True), (True, False)]
    ours = ["this kernel", "again", "no asm", "no hints", "this kernel, kernel[grid]"]
    assert [*times["function"][::3]] == 5 * [*ours, "bitsandbytes"]
    shown = capsys.readouterr().out
    assert "Unsloth today: not measured (AssertionError: needs its launcher)" in shown
    assert "Unsloth classic: not measured (AssertionError: out of memory" in shown
    assert shown.count("not measured") == 2
    with pytest.raises(TypeError):  # the candidate itself: no score without it
        turns.time_all(None)


def test_medians_and_each_turns_ratio_are_printed_and_drawn(capsys):
    turn = pandas.DataFrame({"function": ["this kernel"] * 3 + ["again"] * 3, "size": turns.SIZES * 2})
    turn[turns.COLUMNS] = [[10, 1, 1], [10, 2, 1], [10, 4, 1], [12, 3, 2], [12, 5, 2], [12, 8, 2]]
    times = pandas.concat([turn.assign(turn=1), turn.assign(turn=2)])
    turns.print_times(times)
    shown = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("again")]
    assert shown == [["12.0"] * 3, ["3.00", "5.00", "8.00"], ["2.00"] * 3, ["2.00x"] * 3]
    turns.draw_times(times)
    panels = pyplot.gcf().axes
    widths = [[bar.get_width() for bar in panel.patches] for panel in panels]
    assert widths == [[10, 12]] * 3 + [[1, 3], [2, 5], [4, 8]]
    assert [text.get_text() for text in panels[5].texts] == [" 4", " 8"]
    turns.draw_times(None)
    assert capsys.readouterr().out.startswith("no picture (needs")


def from_eager(layer, eager={}):  # noqa: B006
    """Return what a call outside of a capture computed."""
    if not torch.cuda.is_current_stream_capturing():
        eager[layer] = exact(layer)
    return eager[layer]


def test_a_replay_changes_what_it_must_dequantize(monkeypatch):
    """A made-up replay, which runs once. On a GPU: below."""
    capturing = [False]

    def replayed(call):
        for capturing[0] in (False, True):
            call()
        capturing[0] = False
        return 1.0

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(turns.triton.testing, "do_bench_cudagraph", replayed)
    work = [layers.bnb_Linear4bit(64, 64)], layers.MLP(64, 64), None
    assert turns.times_of(exact, *work)[1] == 1000
    with pytest.raises(AssertionError, match="wrong bits"):
        turns.times_of(from_eager, *work)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [your_dequantize_nf4, protocol.kernel_grid])
def test_bits_are_compared_before_the_clock(function):
    config = layers.CONFIGS[1]
    us, gpu_us, ms = turns.times_of(function, *layers.many_layers(config))
    assert us > 0 and 1 < gpu_us < 1000 and ms > 0
    with pytest.raises(AssertionError, match="wrong bits"):
        turns.times_of(lambda layer: torch.zeros_like(exact(layer)), *layers.many_layers(config))


@pytest.mark.gpu
def test_what_no_replay_repeats_is_not_timed():
    """A function that launches on another stream in a capture, and one that launches nothing."""
    other = torch.cuda.Stream()

    def beside(layer):
        weight = from_eager(layer)
        result = torch.empty_like(weight)
        with torch.cuda.stream(other if torch.cuda.is_current_stream_capturing() else None):
            return torch.mul(weight, 1, out=result)

    for function in (from_eager, beside):
        with pytest.raises(AssertionError, match="wrong bits"):
            turns.times_of(function, *layers.many_layers(layers.CONFIGS[1]))
