"""The puzzle's test: what it checks and times, how contenders alternate, and what a missing library says."""

import importlib
import types

import pytest
import torch

from helpers.puzzle import protocol
from nf4_triton import reference

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16


def exact(layer):
    return reference.dequantize(layer.weight, layer.weight.quant_state)


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


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda layer: exact(layer) * 1.01, "not close"),
        (last_element_off, "not close"),
        (lambda layer: exact(layer).double(), "dtype"),
        (lambda layer: exact(layer).t().contiguous().t(), "stride"),
    ],
)
def test_a_wrong_weight_fails_the_test(wrong, message):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        protocol.test_dequantize(wrong)


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
    assert rounds == ([exact, protocol.reference] * 2 + [exact] * 7) * 3


@pytest.fixture
def baselines(monkeypatch):
    """baselines(name=function): use these in place of the libraries."""

    def use(**functions):
        known = {name: protocol.Baseline(name, fn, "" if fn else "a thing") for name, fn in functions.items()}
        monkeypatch.setattr(protocol, "baselines", lambda: known)

    return use


def test_the_puzzles_line_five_times(baselines, monkeypatch, capsys):
    seconds = {"ours": 2.0, "theirs": 3.0}
    calls = []
    monkeypatch.setattr(protocol, "test_dequantize", lambda fx: calls.append(fx) or seconds[fx])
    baselines(unsloth_today="theirs")
    assert protocol.puzzles_line("ours") == [1.5] * 5 and calls == ["theirs", "ours"] * 5
    assert capsys.readouterr().out.splitlines()[-1] == "median 1.500, range 1.500 to 1.500"
    baselines(unsloth_today=None)
    assert protocol.puzzles_line("ours") is None and "not timed (needs a thing)" in capsys.readouterr().out


def test_contenders_alternate_on_the_same_layers_and_a_failing_one_gets_no_time(monkeypatch):
    seen = []

    def timed(name, build):
        seen.append((name, id(build("config"))))
        if name == "bad" and len(seen) > 3:
            raise RuntimeError("out of memory")
        return 1.0

    monkeypatch.setattr(protocol, "test_dequantize", timed)
    monkeypatch.setattr(protocol, "build", lambda config: object())
    seconds, errors = protocol.in_turns({"good": "good", "bad": "bad"}, turns=3)
    assert seconds == {"good": [1.0] * 3} and errors == {"bad": "RuntimeError: out of memory"}
    assert [name for name, _ in seen] == ["good", "bad", "good", "bad", "good"]
    assert len({layers for _, layers in seen}) == 1


def test_the_table_of_turns(baselines, monkeypatch, capsys):
    seconds = {"ours": [2.0], "unsloth_today": [2.1936]}
    monkeypatch.setattr(protocol, "in_turns", lambda contenders: (seconds, {"unsloth_classic": "broken"}))
    baselines(peft=None)
    assert protocol.in_turns_table(exact) == seconds
    shown = capsys.readouterr().out
    assert "1.09x" in shown and "1.10x" not in shown, "ratios are rounded down"
    assert protocol.shown(1.15) == "1.15x"
    assert "not measured (broken)" in shown and "not measured (needs a thing)" in shown


def test_attempt_never_raises(baselines, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "ON_GPU", False)
    baselines(bitsandbytes=exact)
    assert protocol.attempt(lambda candidate: True, exact) is None
    assert protocol.attempt(lambda candidate: candidate is exact, exact, needs_gpu=False) is True
    assert protocol.attempt(lambda candidate: 1 / 0, exact, needs_gpu=False) is False
    shown = capsys.readouterr().out
    assert (
        shown == "not measured (needs an NVIDIA GPU)\npassed\nZeroDivisionError: division by zero\nFAILED\n"
    )
    baselines(bitsandbytes=None)
    assert protocol.attempt(lambda candidate: True, exact, needs_gpu=False) is None


# --- the libraries ---


@pytest.fixture
def functional():
    return importlib.import_module("bitsandbytes.functional")


def test_bitsandbytes_own_function_is_found_behind_unsloths_wrapper(functional, monkeypatch):
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


def test_every_library_that_runs_here_is_exact(make_layer):
    layer = make_layer(64, 128, FP16)
    for one in protocol.baselines().values():
        assert one.reason or reference.same_bits(one.fn(layer), exact(layer)), one.label


@pytest.mark.gpu
def test_the_public_launch_forms_are_exact(candidate, make_layer):
    forms = protocol.launch_forms(candidate)
    assert list(forms) == ["ours", "ordinary", "compiled_grid"]
    for fx in forms.values():
        for layer in (make_layer(64, 128, BF16), make_layer(64, 128, BF16, seed=1)):
            assert reference.same_bits(fx(layer), exact(layer))


def test_without_a_gpu_only_the_candidate_is_launched(monkeypatch, candidate):
    monkeypatch.setattr(protocol, "ON_GPU", False)
    assert protocol.launch_forms(candidate) == {"ours": candidate}


@pytest.mark.parametrize("capability, turns", [((7, 5), 3), ((9, 0), 5)])
def test_fewer_turns_on_a_t4(monkeypatch, capability, turns):
    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(protocol, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace()))
    protocol.torch.cuda.get_device_capability = lambda: capability
    monkeypatch.delenv("NF4_FORCE", raising=False)
    assert protocol.turns_here() == turns
    monkeypatch.setenv("NF4_FORCE", "t4")
    assert protocol.turns_here() == 3
