"""Two kernels by three launches, and whole functions in turns."""

import inspect
import sys
import types

import pytest
import torch

from helpers.puzzle import layers, protocol, turns
from nf4_triton.core.reference import dequantize_in_pytorch as exact

functional = pytest.importorskip("bitsandbytes.functional")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel_of", [turns.our_kernel, turns.unsloths_kernel])
@pytest.mark.parametrize("launch_of", [turns.kept_launch, turns.unsloths_launch, turns.kernel_grid])
def test_the_six_are_exact(kernel_of, launch_of):
    """Also again, on another layer of the layout, and with another layout in between."""
    fx = turns.dequantize_by(kernel_of, launch_of)
    for size, dtype in [((1024, 4096), torch.bfloat16), ((64, 4097), torch.float16)] * 2:
        layer = layers.bnb_Linear4bit(*size, dtype)
        assert [protocol.wrong_elements(fx, layer) for _ in range(3)] == [0] * 3


def test_an_unsloth_without_this_launch_says_so(monkeypatch):
    for name, nf4 in {"unsloth": None, "unsloth.kernels": types.SimpleNamespace(launch=None)}.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(nf4=nf4))
    monkeypatch.setattr(turns, "baselines", lambda: {"unsloth_today": protocol.Baseline(exact, "")})
    with pytest.raises(AssertionError, match="Unsloth calls no launch"):
        turns.unsloths_kernel(layers.bnb_Linear4bit(64, 64))


def test_contenders_alternate_on_the_same_layers_and_a_failing_one_gets_no_time(monkeypatch, capsys):
    monkeypatch.setattr(turns, "needed", lambda name: "its launcher" if name == "unsloth_today" else "")
    monkeypatch.setattr(turns, "time_rounds", lambda X, mlp, fx, rounds: [0.1 * rounds])
    monkeypatch.setattr(
        turns, "empty_cuda", lambda size, stride, dtype: torch.empty(size, dtype=dtype, device=layers.DEVICE)
    )
    contenders = {"ours": exact, "peft": lambda layer: exact(layer) + 0.25, "unsloth_today": exact}
    contenders["this kernel, kernel[grid]"] = turns.dequantize_by(turns.our_kernel, turns.kernel_grid)
    times = turns.in_turns(contenders, [protocol.build(config) for config in layers.SMALL[1:]], turns=2)
    assert list(times) == ["ours", "this kernel, kernel[grid]"]
    assert [seconds for us, seconds in times["ours"] if us > 0] == [20, 20]
    shown = capsys.readouterr().out
    assert "PEFT: not measured (AssertionError: wrong bits)" in shown
    assert "Unsloth today: not measured (AssertionError: needs its launcher)" in shown


def test_the_table_and_the_chart(monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    times = {"ours": [(9, 0.03), (10, 0.02), (11, 0.04)], "this kernel, kernel[grid]": [(33, 0.05)]}
    monkeypatch.setattr(turns, "in_turns", lambda contenders, mlps: times)
    monkeypatch.setattr(turns, "CONFIGS", ())
    assert turns.time_all(exact) is times
    shown = " ".join(capsys.readouterr().out.split())
    assert "this kernel not measured not measured 33.0 us, 0.0500 s Unsloth's" in shown
    axes = pyplot.gca()
    assert [text.get_text() for text in axes.texts] == ["33.0 us, 0.0500 s", "10.0 us, 0.0300 s"]
    axes.figure.canvas.draw()
    assert all(text.get_window_extent().x1 < axes.bbox.x1 for text in axes.texts), "crosses the frame"
    pyplot.close("all")


def test_bitsandbytes_own_function_is_timed_behind_unsloths_wrapper(monkeypatch):
    own = inspect.unwrap(functional.dequantize_4bit)  # on a GPU Unsloth may have been imported

    def wrapper(*arguments):
        return own(*arguments)

    def in_turns(contenders, mlps):
        assert functional.dequantize_4bit is own
        return {"ours": [(10, 0.02)]}

    wrapper.__wrapped__ = own
    monkeypatch.setattr(functional, "dequantize_4bit", wrapper)
    monkeypatch.setattr(turns, "in_turns", in_turns)
    assert turns.time_all(exact) and functional.dequantize_4bit is wrapper
