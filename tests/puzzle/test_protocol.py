"""The puzzle's test: what it checks and times, how contenders alternate, and what a missing library says."""

import collections
import contextlib
import types

import pytest
import torch

from helpers.puzzle import protocol
from nf4_triton import reference
from nf4_triton.launch import your_dequantize_nf4
from nf4_triton.state import read_state

functional = pytest.importorskip("bitsandbytes.functional")
FP16, BF16 = torch.float16, torch.bfloat16


def exact(layer):
    return reference.dequantize(read_state(layer.weight, layer.weight.quant_state))


def last_element_off(layer):
    weight = exact(layer)
    weight.view(-1)[-1] += 0.25
    return weight


class Keeps:
    """Compute the first calls of each layer, then return the old result."""

    def __init__(self, calls):
        self.left, self.kept = collections.defaultdict(lambda: calls), {}

    def __call__(self, layer):
        if self.left[layer]:
            self.left[layer] -= 1
            self.kept[layer] = exact(layer)
        return self.kept[layer]


class Lazy(torch.Tensor):
    """A weight that is dequantized when it is first used, after the clock."""

    def t(self):
        return lazy(lambda: self.make().t())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [x.make() if isinstance(x, Lazy) else x for x in args]
        return function(*args, **(kwargs or {}))


def lazy(make):
    weight = torch.Tensor._make_subclass(Lazy, torch.empty(0))
    weight.make = make
    return weight


class OneBuffer:
    """Return right results, but all of a layer in the same memory."""

    def __init__(self):
        self.buffers = {}

    def __call__(self, layer):
        return self.buffers.setdefault(layer, exact(layer)).copy_(exact(layer))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (last_element_off, "not close"),
        (lambda layer: exact(layer).double(), "dtype"),
        (lambda layer: exact(layer).t().contiguous().t(), "stride"),
        (Keeps(12), "not close"),
        (lambda layer: lazy(lambda: exact(layer)), "expected a plain tensor"),
        (OneBuffer(), "same address"),
    ],
)
def test_a_wrong_implementation_fails_the_test(wrong, message, monkeypatch):
    monkeypatch.setattr(protocol, "ROUNDS", 30)
    monkeypatch.setattr(protocol.secrets, "randbelow", lambda rounds: rounds - 1)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        protocol.test_dequantize(wrong)


def test_a_state_that_is_no_double_quantized_nf4_fails_the_test(make_layer):
    protocol.assert_correct_bnb(make_layer(64, 64, FP16), FP16)
    for layer in (make_layer(64, 64, FP16, blocksize=128), make_layer(64, 64, BF16)):
        with pytest.raises(AssertionError):
            protocol.assert_correct_bnb(layer, FP16)


def test_every_mlp_is_checked_and_then_timed_for_all_rounds(monkeypatch):
    rounds, mlp_dequantize = [], protocol.mlp_dequantize

    def record(X, mlp, fx):
        rounds.append(fx)
        return mlp_dequantize(X, mlp, fx)

    monkeypatch.setattr(protocol, "ROUNDS", 7)
    monkeypatch.setattr(protocol, "CONFIGS", protocol.SMALL)
    monkeypatch.setattr(protocol, "mlp_dequantize", record)
    assert protocol.test_dequantize(exact) > 0
    assert rounds == 3 * ([exact, protocol.reference] * 2 + [exact] * 7 + [protocol.reference])


def test_the_puzzles_line_five_times(monkeypatch, capsys):
    known = {f"unsloth_{name}": protocol.Baseline(name, name) for name in ("today", "classic")}
    monkeypatch.setattr(protocol, "baselines", lambda: known)
    seconds = {"ours": 2.0, "today": 2.998, "classic": 4.0}
    monkeypatch.setattr(protocol, "test_dequantize", seconds.get)
    assert protocol.puzzles_line("ours") == {"today": [1.499] * 5, "classic": [2.0] * 5}
    assert "vs Unsloth today: median 1.49x of 1.49x, 1.49x" in capsys.readouterr().out, "rounded down"


def test_how_unsloth_launches_is_said(monkeypatch):
    """A silent fallback of Unsloth would flatter this kernel."""
    kernel = object()
    launches = types.SimpleNamespace(_ENABLED=True, _CACHE={(kernel, 0): 1, (None, 0): 2})
    monkeypatch.setitem(protocol.sys.modules, "unsloth.kernels.triton_launch", launches)
    nf4 = types.SimpleNamespace(_nf4_dequant_kernel=kernel)
    monkeypatch.setitem(protocol.sys.modules, "unsloth.kernels.nf4", nf4)
    assert protocol.unsloths_launches().startswith("Unsloth today replays its launches: 1 launches of")
    launches._ENABLED = False
    assert "does NOT replay" in protocol.unsloths_launches()


def test_contenders_alternate_on_the_same_layers_and_a_failing_one_gets_no_time(monkeypatch, capsys):
    monkeypatch.setattr(protocol, "CONFIGS", protocol.SMALL[1:2])  # one tiny MLP instead of three
    monkeypatch.setattr(protocol, "ROUNDS", 1)
    ran = []

    def recorded(function):
        def call(layer):
            ran.append(layer)
            return function(layer)

        return call

    contenders = {"ours": recorded(exact), "peft": last_element_off}
    contenders["unsloth_buffered"] = recorded(OneBuffer())
    seconds = protocol.in_turns(contenders, turns=2)
    assert {name: len(values) for name, values in seconds.items()} == {"ours": 2, "unsloth_buffered": 2}
    assert "PEFT: not measured (AssertionError: Tensor-likes are not close" in capsys.readouterr().out
    assert len(set(ran)) == 3 and len(ran) == 18, "checked and then timed twice, on the same three layers"


def test_the_ladder_is_drawn(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    protocol.draw_seconds({"this kernel": 2.0, "PEFT": 4.5})
    assert [text.get_text() for text in pyplot.gca().texts] == ["2.000 s", "4.500 s"]
    pyplot.close("all")


def needs_a_module(candidate):
    import a_module_that_nobody_has  # noqa: F401


@pytest.mark.parametrize(
    "check, verdict, said",
    [
        (lambda candidate: candidate is exact, True, "passed"),
        (lambda candidate: 1 / 0, False, "ZeroDivisionError: division by zero\nFAILED"),
        (needs_a_module, None, "not measured (No module named 'a_module_that_nobody_has')"),
    ],
)
def test_an_error_fails_and_a_missing_module_does_not(check, verdict, said, capsys):
    assert protocol.attempt(check, exact, needs_gpu=False) is verdict
    assert capsys.readouterr().out == f"{said}\n"


# --- the libraries ---


def imports_half(*candidate):
    import half  # noqa: F401


@pytest.mark.parametrize(
    "raised, cell",
    [
        (KeyboardInterrupt, lambda: protocol.load("Library", imports_half)),
        (KeyboardInterrupt, lambda: protocol.attempt(imports_half, exact, needs_gpu=False)),
        (AttributeError, lambda: protocol.attempt(imports_half, exact, needs_gpu=False)),
    ],
)
def test_after_half_an_import_nothing_is_measured_and_no_points_are_lost(
    raised, cell, monkeypatch, tmp_path, capsys
):
    (tmp_path / "half.py").write_text(f"raise {raised.__name__}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(protocol, "unfinished", [])
    stops = pytest.raises(KeyboardInterrupt) if raised is KeyboardInterrupt else contextlib.nullcontext()
    with stops:
        assert cell() is None
    assert protocol.attempt(lambda candidate: False, exact, needs_gpu=False) is None
    assert "restart the runtime and run all cells" in capsys.readouterr().out


def test_bitsandbytes_own_function_is_found_behind_unsloths_wrapper(monkeypatch):
    own = functional.dequantize_4bit

    def wrapper(*arguments):
        return own(*arguments)

    wrapper.__wrapped__ = own
    monkeypatch.setattr(functional, "dequantize_4bit", wrapper)
    assert protocol.own_dequantize_4bit() is own
    with protocol.own_libraries():
        assert functional.dequantize_4bit is own
    assert functional.dequantize_4bit is wrapper
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="replaced"):
        protocol.own_dequantize_4bit()


def test_a_library_loads_without_its_banner_or_says_what_is_missing(capsys):
    def loud():
        print("banner")
        return exact

    def broken():
        raise OSError("no libcudart")

    assert protocol.load("Library", loud).fn is exact and capsys.readouterr().out == ""
    assert protocol.load("Library", broken).reason == "a working Library: OSError: no libcudart"


def test_the_launch_forms_are_exact(make_layer, monkeypatch):
    monkeypatch.setattr(protocol, "ON_GPU", True)
    forms = protocol.launch_forms(your_dequantize_nf4)
    assert list(forms) == ["ours", "ordinary"]
    for fx in forms.values():
        for layer in (make_layer(64, 128, BF16), make_layer(64, 128, BF16, seed=1)):
            assert reference.same_bits(fx(layer), exact(layer))
