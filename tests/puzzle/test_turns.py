"""This function and others in turns: bits first, and a contender that fails is named."""

import contextlib

import pytest
import torch
from matplotlib import pyplot

from helpers.puzzle import layers, protocol, turns
from nf4_triton.core import settings
from nf4_triton.core.launch import your_dequantize_nf4
from nf4_triton.core.reference import dequantize_in_pytorch as exact

pytest.importorskip("bitsandbytes")
OURS = ["this kernel", "again", "no asm", "no hints"]


@pytest.fixture
def times(monkeypatch, capsys):
    """Times on small layers: kernel[grid] fails, Unsloth today is turned off, classic fails in the end."""
    known = {"bitsandbytes": exact, "unsloth_today": exact, "unsloth_classic": exact}
    monkeypatch.setattr(turns, "baselines", lambda: known)
    monkeypatch.setattr(turns, "needed", lambda name: "its launcher" if name == "unsloth_today" else "")
    monkeypatch.setattr(turns, "many_layers", lambda config: [config])
    monkeypatch.setattr(turns, "kernel_grid", None)
    calls = []

    def times_of(fx, config):
        fx(layers.bnb_Linear4bit(64, 64))
        calls.append((settings.settings().asm, settings.settings().hints))
        if len(calls) > 87:  # in the last turn
            raise ValueError("out of memory")
        return 10.0 + len(calls) % 18, config.hidden / 64, 0.25

    monkeypatch.setattr(turns, "times_of", times_of)
    with settings.force(asm=True):
        found = turns.time_all(exact)
    assert calls[:3] == calls[3:6] == [(True, True)] * 3
    assert calls[6:12] == [(False, True)] * 3 + [(True, False)] * 3
    with pytest.raises(TypeError):  # the candidate itself: no score without it
        turns.time_all(None)
    return found


def test_functions_take_turns_and_a_failing_one_is_named(times, capsys):
    assert list(dict.fromkeys(times["function"])) == [*OURS, "bitsandbytes"]
    assert list(times["turn"]) == sorted(times["turn"]) and len(times) == 5 * 5 * 3
    assert list(times["us on the GPU"][:3]) == [1, 2, 4], "the sizes ascend"
    shown = capsys.readouterr().out
    assert "this kernel, kernel[grid]: not measured (TypeError: 'NoneType' object is not callable)" in shown
    assert "Unsloth today: not measured (AssertionError: needs its launcher)" in shown
    assert "Unsloth classic: not measured (ValueError: out of memory)" in shown
    assert shown.count("not measured") == 3


def test_medians_and_each_turns_ratio_are_printed_and_drawn(times, capsys):
    capsys.readouterr()
    times.loc[times["function"] == "again", "ms for 100 rounds"] = [0.5] * 3 + [0.75] * 6 + [1.0] * 6
    turns.print_times(times)
    lines = capsys.readouterr().out.splitlines()
    again = [line.split()[1:] for line in lines if line.startswith("again")]
    assert again[1:] == [
        ["1.00", "2.00", "4.00"],
        ["0.750"] * 3,
        "3.00x 2.00x 3.00x 3.00x 4.00x 4.00x".split(),
    ]
    turns.draw_times(times)
    figure = pyplot.gcf()
    for number, panel in enumerate(figure.axes):
        bars = panel.patches
        assert [bar.get_facecolor() == bars[0].get_facecolor() for bar in bars] == [True] + 4 * [False]
        if number > 2:
            assert [bar.get_width() for bar in bars] == 5 * [[1, 2, 4][number - 3]]
            assert panel.texts[0].get_text() == f" {bars[0].get_width():.3g}"
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [*OURS, "bitsandbytes"]
    pyplot.close(figure)


@pytest.mark.parametrize("times", [None, False])
def test_a_line_stands_for_a_picture_without_times(times, capsys):
    turns.draw_times(times)
    assert capsys.readouterr().out.startswith("no picture (needs")


def from_eager(layer, eager={}):  # noqa: B006
    """Return what a call outside of a capture computed."""
    if not torch.cuda.is_current_stream_capturing():
        eager[layer] = exact(layer)
    return eager[layer]


@pytest.mark.parametrize("function, passes", [(exact, True), (from_eager, False)])
def test_a_replay_changes_what_it_must_dequantize(function, passes, monkeypatch):
    """A made-up replay, which runs once. On a GPU: below."""
    capturing = [False]

    def replayed(call):
        for capturing[0] in (False, True):
            call()
        capturing[0] = False
        return 1.0

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(turns.triton.testing, "do_bench_cudagraph", replayed)
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="wrong bits"):
        _, gpu_us, _ = turns.times_of(function, [layers.bnb_Linear4bit(64, 64)], layers.MLP(64, 64), None)
        assert gpu_us == 1000


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
