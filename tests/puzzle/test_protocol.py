"""The puzzle's test: what it checks and times, how contenders alternate, and what a missing library says."""

import collections
import inspect
import types

import pytest
import torch

from helpers.puzzle import layers, protocol
from nf4_triton import reference
from nf4_triton.launch import your_dequantize_nf4
from nf4_triton.state import read_state

functional = pytest.importorskip("bitsandbytes.functional")
FP16, BF16 = torch.float16, torch.bfloat16


def exact(layer):
    return reference.exact_weight(*read_state(layer.weight, layer.weight.quant_state))


def last_element_off(layer):
    weight = exact(layer)
    weight.view(-1)[-1] += 0.25
    return weight


class Keeps:
    """Compute the first calls of each layer, then return the old result, of which only a part is redone."""

    def __init__(self, calls, redone=0):
        self.left, self.kept, self.redone = collections.defaultdict(lambda: calls), {}, redone

    def __call__(self, layer):
        weight = exact(layer)
        if self.left[layer]:
            self.left[layer] -= 1
            self.kept[layer] = weight
        weight.view(-1)[self.redone :] = self.kept[layer].view(-1)[self.redone :]
        return weight


class Lazy(torch.Tensor):
    """Could dequantize when it is first used, after the clock."""


def in_one_buffer(layer, buffers={}):  # noqa: B006
    return buffers.setdefault(layer, exact(layer)).copy_(exact(layer))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (last_element_off, "not close"),
        (lambda layer: exact(layer).double(), "dtype"),
        (lambda layer: exact(layer).t().contiguous().t(), "stride"),
        (Keeps(12), "not close"),
        (Keeps(12, redone=2048), "not close"),
        (lambda layer: exact(layer).as_subclass(Lazy), "expected a plain tensor"),
        (in_one_buffer, "same address"),
    ],
)
def test_a_wrong_implementation_fails_the_test(wrong, message, monkeypatch):
    monkeypatch.setattr(protocol, "ROUNDS", 30)
    monkeypatch.setattr(protocol.secrets, "randbelow", lambda number: number - 1)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        protocol.test_dequantize(wrong)


def test_a_state_that_is_no_double_quantized_nf4_fails_the_test(make_layer):
    layers.assert_correct_bnb(make_layer(64, 64, FP16), FP16)
    for layer in (make_layer(64, 64, FP16, blocksize=128), make_layer(64, 64, BF16)):
        with pytest.raises(AssertionError):
            layers.assert_correct_bnb(layer, FP16)


def test_every_mlp_is_checked_and_then_timed_for_all_rounds(monkeypatch):
    rounds, mlp_dequantize = [], protocol.mlp_dequantize

    def record(X, mlp, fx):
        rounds.append(fx)
        return mlp_dequantize(X, mlp, fx)

    monkeypatch.setattr(protocol, "ROUNDS", 7)
    monkeypatch.setattr(protocol, "CONFIGS", layers.SMALL)
    monkeypatch.setattr(protocol, "mlp_dequantize", record)
    assert protocol.test_dequantize(exact) > 0
    assert rounds == 3 * ([exact, protocol.reference] * 2 + [exact] * 7 + [protocol.reference])


@pytest.mark.parametrize("at_import, now, timed", [(True, True, 5), (False, False, 5), (True, False, 0)])
def test_the_puzzles_line_five_times(at_import, now, timed, monkeypatch, capsys):
    """Without Unsloth today if its launcher went off on the way, which would flatter this kernel."""
    known = {f"unsloth_{name}": protocol.Baseline(name, "") for name in ("today", "classic")}
    monkeypatch.setattr(protocol, "baselines", lambda: known)
    monkeypatch.setattr(protocol, "launcher_at_import", lambda: (at_import, 0))
    monkeypatch.setattr(protocol, "test_dequantize", {"ours": 2.0, "today": 2.998, "classic": 4.0}.get)
    nf4 = types.SimpleNamespace(_nf4_dequant_kernel=exact)
    launcher = types.SimpleNamespace(_ENABLED=now, _CACHE={(exact, 0): 1, (None, 0): 2})
    for name, module in {"nf4": nf4, "triton_launch": launcher}.items():
        monkeypatch.setitem(protocol.sys.modules, f"unsloth.kernels.{name}", module)
    ratios = protocol.puzzles_line("ours")
    assert ratios == {"unsloth_today": [1.499] * timed, "unsloth_classic": [2.0] * 5}
    shown = capsys.readouterr().out
    today = "median 1.49x of 1.49x" if timed else "not measured (needs Unsloth's launcher"  # rounded down
    assert f"vs Unsloth today: {today}" in shown
    assert shown.endswith("it keeps: 1\n")


@pytest.mark.parametrize("variable", protocol.SLOWS_UNSLOTH)
def test_unsloth_that_a_variable_slows_is_not_measured(variable, monkeypatch):
    monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(protocol, "ON_GPU", True)
    known = protocol.baselines.__wrapped__()
    needs = [known[name].reason for name in ("unsloth_today", "unsloth_buffered")]
    assert needs == [f"{variable} unset: it slows Unsloth"] * 2


def test_contenders_alternate_on_the_same_layers_and_a_failing_one_gets_no_time(monkeypatch, capsys):
    monkeypatch.setattr(protocol, "CONFIGS", layers.SMALL[1:2])  # one tiny MLP instead of three
    monkeypatch.setattr(protocol, "ROUNDS", 2)
    monkeypatch.setattr(protocol, "launcher_at_import", lambda: (True, 0))
    monkeypatch.setattr(protocol, "unsloths_launcher", lambda: (exact not in ran, 0))
    ran = []

    def recorded(function):
        def call(layer):
            ran.append(layer)
            return function(layer)

        return call

    def switches_off(layer):
        ran.append(exact)
        return exact(layer)

    contenders = {"ours": recorded(exact), "ordinary": recorded(in_one_buffer), "peft": last_element_off}
    contenders |= {"bitsandbytes": Keeps(1), "unsloth_today": switches_off}
    seconds = protocol.in_turns(contenders, turns=2)
    assert {name: len(values) for name, values in seconds.items()} == {"ours": 2, "ordinary": 2}
    shown = capsys.readouterr().out
    for label in ("PEFT", "bitsandbytes"):
        assert f"{label}: not measured (AssertionError: Tensor-likes are not close" in shown
    assert not protocol.in_turns({"peft": Keeps(1)}, turns=1), "a round's results are checked, too"
    assert "Unsloth today: not measured (AssertionError: needs Unsloth's launcher" in shown
    assert len({*ran} - {exact}) == 3, "other layers"


def test_the_chart_is_drawn(monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(protocol, "in_turns", lambda contenders: {"ours": [1, 2.0, 3], "peft": [4.5] * 3})
    protocol.chart(exact)
    assert [text.get_text() for text in pyplot.gca().texts] == ["2.000 s", "4.500 s"]
    assert "this kernel 2.0000 s 1.0000 s 3.0000 s" in " ".join(capsys.readouterr().out.split())
    pyplot.close("all")


def needs_a_module(candidate):
    import a_module_that_nobody_has  # noqa: F401


@pytest.mark.parametrize(
    "check, verdict, said",
    [
        (lambda candidate: candidate is exact, True, "passed"),
        (lambda candidate: 1 / 0, False, "ZeroDivisionError: division by zero\nFAILED"),
        (needs_a_module, None, "not measured (No module named 'a_module_that_nobody_has'): restart"),
    ],
)
def test_an_error_fails_and_a_missing_module_does_not(check, verdict, said, capsys):
    assert protocol.attempt(check, exact, gpu=False) is verdict
    assert capsys.readouterr().out.startswith(said)


def test_bitsandbytes_own_function_is_found_behind_unsloths_wrapper(monkeypatch):
    own = inspect.unwrap(functional.dequantize_4bit)  # on a GPU Unsloth may have been imported

    def wrapper(*arguments):
        return own(*arguments)

    wrapper.__wrapped__ = own
    monkeypatch.setattr(functional, "dequantize_4bit", wrapper)
    assert protocol.own_dequantize_4bit() is own
    timed = []
    monkeypatch.setattr(protocol, "CONFIGS", layers.SMALL[1:2])
    monkeypatch.setattr(protocol, "checked_seconds", lambda *_: timed.append(functional.dequantize_4bit) or 1)
    protocol.in_turns({"peft": exact}, turns=1)
    assert timed == [own] and functional.dequantize_4bit is wrapper
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="replaced"):
        protocol.own_dequantize_4bit()


def test_a_library_loads_without_its_banner_or_says_what_is_missing(capsys):
    def loud():
        print("banner")
        return exact

    def broken():
        raise OSError("no libcudart")

    assert protocol.load("peft", loud).fn is exact and capsys.readouterr().out == ""
    assert protocol.load("peft", broken).reason == "a working PEFT: OSError: no libcudart"


def test_the_launch_forms_are_exact(make_layer, monkeypatch):
    monkeypatch.setattr(protocol, "ON_GPU", True)
    forms = protocol.launch_forms(your_dequantize_nf4)
    assert list(forms) == ["ours", "ordinary"]
    for fx in forms.values():
        for layer in (make_layer(64, 128, BF16), make_layer(64, 128, BF16, seed=1)):
            assert reference.same_bits(fx(layer), exact(layer))
