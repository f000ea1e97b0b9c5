"""The puzzle's test: what it checks and times, how contenders alternate, and what a missing library says."""

import contextlib
import sys
import types

import pytest
import torch

from helpers.puzzle import protocol
from nf4_triton import reference
from nf4_triton.state import read_state

functional = pytest.importorskip("bitsandbytes.functional")
FP16, BF16 = torch.float16, torch.bfloat16


def exact(layer):
    return reference.dequantize(read_state(layer.weight, layer.weight.quant_state))


def test_official_configurations():
    assert [tuple(config) for config in protocol.OFFICIAL] == [
        (2, 3333, 2048, 8192, 3407, FP16),
        (5, 777, 1024, 4096, 3409, BF16),
        (3, 2048, 4096, 14336, 3408, BF16),
    ]
    assert protocol.ROUNDS == (1000 if protocol.ON_GPU else 1)


def last_element_off(layer):
    weight = exact(layer)
    weight.view(-1)[-1] += 0.25
    return weight


class Keeps:
    """Return the kept result from the call of this number on, for each layer. It passes the puzzle's test."""

    def __init__(self, call):
        self.call, self.calls, self.kept = call, {}, {}

    def __call__(self, layer):
        count = self.calls[layer] = self.calls.get(layer, 0) + 1
        if count < self.call or layer not in self.kept:
            self.kept[layer] = exact(layer)
        return self.kept[layer]


class OneBuffer:
    """Return right results, but all of a layer in the same memory."""

    def __init__(self):
        self.buffers = {}

    def __call__(self, layer):
        return self.buffers.setdefault(layer, exact(layer)).copy_(exact(layer))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda layer: exact(layer) * 1.01, "not close"),
        (last_element_off, "not close"),
        (lambda layer: exact(layer).double(), "dtype"),
        (lambda layer: exact(layer).t().contiguous().t(), "stride"),
        (Keeps(1), "not close"),
        (Keeps(11), "not close"),
        (OneBuffer(), "same address"),
    ],
)
def test_a_wrong_implementation_fails_the_test(wrong, message, monkeypatch):
    monkeypatch.setattr(protocol, "ROUNDS", 10)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        protocol.test_dequantize(wrong)


def fused_scale(layer):
    """Return the weight with each scale rounded once, as by an FMA; fp64 holds the exact product."""
    packed = read_state(layer.weight.data, layer.weight.quant_state)
    absmax2 = packed.absmax2.double().repeat_interleave(256)[: packed.absmax.numel()]
    scale = packed.code2.double()[packed.absmax.int()] * absmax2 + packed.offset.double()
    flat = packed._replace(absmax=scale.float(), code2=None, absmax2=None, offset=None, nested=False)
    return reference.dequantize(flat)


@pytest.mark.gpu
def test_an_fma_fails_the_test():
    """At the official sizes: 4 of 16,777,216 fp16 weights change, and 20 elements of the MLP's output."""
    with pytest.raises(AssertionError, match="not close"):
        protocol.test_dequantize(fused_scale)


def test_a_state_that_is_no_double_quantized_nf4_fails_the_test(make_layer):
    protocol.assert_correct_bnb(make_layer(64, 64, FP16), FP16)
    for layer in (make_layer(64, 64, FP16, blocksize=128), make_layer(64, 64, BF16)):
        with pytest.raises(AssertionError):
            protocol.assert_correct_bnb(layer, FP16)


def test_every_mlp_is_checked_and_then_timed_for_all_rounds(monkeypatch):
    rounds = []
    mlp_dequantize = protocol.mlp_dequantize
    monkeypatch.setattr(protocol, "ROUNDS", 7)
    monkeypatch.setattr(protocol, "CONFIGS", protocol.SMALL)
    monkeypatch.setattr(
        protocol, "mlp_dequantize", lambda X, mlp, fx: (rounds.append(fx), mlp_dequantize(X, mlp, fx))[1]
    )
    assert protocol.test_dequantize(exact) > 0
    expected = [exact, protocol.reference] * 2 + [exact] * 7 + [exact, exact, protocol.reference]
    assert rounds == expected * 3


@pytest.fixture
def baselines(monkeypatch):
    """baselines(name=function): use these in place of the libraries."""

    def use(**functions):
        known = {name: protocol.Baseline(name, fn, "" if fn else "a thing") for name, fn in functions.items()}
        monkeypatch.setattr(protocol, "baselines", lambda: known)

    return use


def test_the_puzzles_line_five_times(baselines, monkeypatch, capsys):
    seconds = {"ours": 2.0, "today": 2.998, "classic": 4.0}
    calls = []
    monkeypatch.setattr(protocol, "test_dequantize", lambda fx: calls.append(fx) or seconds[fx])
    baselines(unsloth_today="today", unsloth_classic="classic")
    ratios = protocol.puzzles_line("ours")
    assert ratios == {"today": [1.499] * 5, "classic": [2.0] * 5}
    assert calls == ["today", "ours", "classic", "ours"] * 5
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "vs Unsloth today: median 1.49x of 1.49x, 1.49x, 1.49x, 1.49x, 1.49x"
    assert shown[1].startswith("vs Unsloth classic: median 2.00x of ")
    baselines(unsloth_today="today", unsloth_classic=None)
    assert protocol.puzzles_line("ours")["classic"] == []
    baselines(unsloth_today=None)
    assert protocol.puzzles_line("ours") is None and "not timed (needs a thing)" in capsys.readouterr().out


def test_contenders_alternate_on_the_same_layers_and_a_failing_one_gets_no_time(monkeypatch):
    monkeypatch.setattr(protocol, "CONFIGS", protocol.SMALL[1:2])  # one tiny MLP instead of three
    monkeypatch.setattr(protocol, "own_libraries", contextlib.nullcontext)
    ran = []

    def contender(name, function):
        return lambda layer: (ran.append((name, layer)), function(layer))[1]

    functions = {"good": exact, "wrong": lambda layer: exact(layer) * 1.1}
    functions |= {"buffer": OneBuffer(), "keeps": Keeps(2)}
    contenders = {name: contender(name, function) for name, function in functions.items()}
    seconds, errors = protocol.in_turns(contenders, turns=2)
    assert {name: len(values) for name, values in seconds.items()} == {"good": 2, "buffer": 2}
    assert set(errors) == {"wrong", "keeps"} and all("not close" in text for text in errors.values())
    assert len({layer for name, layer in ran}) == 3, "both turns get the same layers"
    # before the clock, one round, after it
    turn = ["good"] * 9 + ["buffer"] * 9
    assert [name for name, layer in ran if name in seconds] == turn * 2


def test_a_turn_leaves_the_weights_as_they_were():
    config = protocol.SMALL[1]
    mlp, X = protocol.build(config)
    before = [layer.weight.data.clone() for layer in protocol.layers_of(mlp)]
    after = [layer.weight.data for layer in protocol.layers_of(mlp)]
    protocol.timed(config, mlp, X, exact)
    assert all(map(torch.equal, before, after))
    with pytest.raises(AssertionError):
        protocol.timed(config, mlp, X, Keeps(1))
    assert all(map(torch.equal, before, after))


def test_the_ladder(baselines, monkeypatch, capsys):
    seconds = {"unsloth_today": [2.1936, 2.0, 2.2], "ours": [2.0]}
    monkeypatch.setattr(protocol, "in_turns", lambda contenders: (seconds, {"unsloth_classic": "broken"}))
    baselines(peft=None)
    assert protocol.ladder(exact) == seconds
    shown = capsys.readouterr().out
    assert "1.09x" in shown and "1.10x" not in shown, "ratios are rounded down"
    assert protocol.shown(1.15) == "1.15x"
    assert "not measured (broken)" in shown and "not measured (needs a thing)" in shown


@pytest.mark.parametrize(
    "function, wrong", [(exact, 0), (protocol.dequantize_in_pytorch, 0), (last_element_off, 1)]
)
def test_compare_counts_the_wrong_elements(function, wrong, make_layer, capsys):
    layer = make_layer(64, 256, BF16)
    assert protocol.compare(function, layer) is (wrong == 0)
    assert capsys.readouterr().out.startswith(f"{wrong} of 16,384 elements differ from bitsandbytes; ")


def test_attempt_never_raises(monkeypatch, capsys):
    monkeypatch.setattr(protocol, "ON_GPU", False)
    assert protocol.attempt(lambda candidate: True, exact) is None
    assert protocol.attempt(lambda candidate: candidate is exact, exact, needs_gpu=False) is True
    assert protocol.attempt(lambda candidate: 1 / 0, exact, needs_gpu=False) is False
    shown = capsys.readouterr().out
    assert (
        shown == "not measured (needs an NVIDIA GPU)\npassed\nZeroDivisionError: division by zero\nFAILED\n"
    )
    absent = protocol.Baseline("bitsandbytes", None, "bitsandbytes, which is not installed")
    monkeypatch.setattr(protocol, "bitsandbytes_baseline", lambda: absent)
    assert protocol.attempt(lambda candidate: True, exact, needs_gpu=False) is None
    assert capsys.readouterr().out == "not measured (needs bitsandbytes, which is not installed)\n"


# --- the libraries ---


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
    def absent():
        raise ModuleNotFoundError("No module named 'gone'", name="gone")

    def broken():
        raise OSError("no libcudart")

    def loud():
        print("banner")
        return exact

    found = [protocol.load("Library", loader) for loader in (loud, absent, broken)]
    assert found[0].fn is exact and capsys.readouterr().out == ""
    assert found[1].reason == "gone, which is not installed"
    assert found[2].reason == "a working Library: OSError: no libcudart"


def test_the_printed_versions_are_of_what_was_imported(monkeypatch, capsys):
    """An older copy later on the path has metadata, too."""
    monkeypatch.setitem(sys.modules, "peft", types.SimpleNamespace(__version__="9.9.9"))
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    versions = protocol.imported_versions()
    assert versions["peft"] == "9.9.9" and "bitsandbytes" in versions and "unsloth" not in versions
    assert "peft 9.9.9" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_public_launch_forms_are_exact(candidate, make_layer):
    forms = protocol.launch_forms(candidate)
    assert list(forms) == ["ordinary", "compiled_grid", "ours"]
    for fx in forms.values():
        for layer in (make_layer(64, 128, BF16), make_layer(64, 128, BF16, seed=1)):
            assert reference.same_bits(fx(layer), exact(layer))


@pytest.mark.parametrize("capability, turns", [((7, 5), 3), ((9, 0), 5)])
def test_fewer_turns_on_a_t4(monkeypatch, capability, turns):
    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(protocol, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace()))
    protocol.torch.cuda.get_device_capability = lambda: capability
    monkeypatch.delenv("NF4_FORCE", raising=False)
    assert protocol.turns_here() == turns
    monkeypatch.setenv("NF4_FORCE", "t4")
    assert protocol.turns_here() == 3
