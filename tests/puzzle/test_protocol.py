"""The puzzle's test: what it checks and times, and what a missing library says."""

import collections
import types

import pytest
import torch

from helpers.puzzle import layers, protocol
from nf4_triton.core import reference
from nf4_triton.core.launch import read_nested, your_dequantize_nf4
from nf4_triton.core.state import read_state

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16


def exact(layer):
    return reference.exact_weight(*read_state(layer.weight, layer.weight.quant_state))


def last_element_off(layer):
    weight = exact(layer)
    weight.view(-1)[-1] += 0.25
    return weight


def keeps_the_twelfth(layer, kept={}):  # noqa: B006
    """Compute the first calls of each layer, then return the old result."""
    calls, weight = kept.get(layer, (0, None))
    if calls < 12:
        weight = exact(layer)
    kept[layer] = calls + 1, weight
    return weight.clone()


class Lazy(torch.Tensor):
    """Could dequantize when it is first used, after the clock."""


def in_one_buffer(layer, buffers={}):  # noqa: B006
    return buffers.setdefault(layer, exact(layer)).copy_(exact(layer))


def deferred(layer, calls=collections.Counter(), owed={}):  # noqa: B006, B008
    """After the first calls, fill a result at the layer's next call, unless the weight has changed."""
    weight, same = exact(layer), torch.equal
    changed = layer in owed and not same(exact(layer), owed[layer][1])
    if layer in owed:
        owed[layer][0].copy_(owed[layer][1])
    calls[layer] += 1
    result = weight.clone() if calls[layer] < 5 or changed else torch.full_like(weight, float("nan"))
    owed[layer] = result, weight
    return result


def look_ahead(layer, order=[], ready={}):  # noqa: B006
    """Compute a whole round's weights at its first call."""
    if layer not in order:
        order.append(layer)
    elif order.index(layer) % 3 == 0:
        ready.update({other: exact(other) for other in order[order.index(layer) + 1 :]})
    return ready.pop(layer) if layer in ready else exact(layer)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (last_element_off, "not close"),
        (deferred, "not close"),
        (look_ahead, "not close"),
        (lambda layer: exact(layer).double(), "dtype"),
        (lambda layer: exact(layer).t().contiguous().t(), "stride"),
        (keeps_the_twelfth, "not close|are kept between calls"),
        (lambda layer: exact(layer).as_subclass(Lazy), "expected a plain tensor"),
        (in_one_buffer, "same address"),
    ],
)
def test_a_wrong_implementation_fails_the_test(wrong, message, monkeypatch):
    monkeypatch.setattr(protocol, "ROUNDS", 30)
    last_two = types.SimpleNamespace(sample=lambda rounds, count: rounds[-count:])
    monkeypatch.setattr(protocol.secrets, "SystemRandom", lambda: last_two)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        protocol.test_dequantize(wrong)


def test_a_state_that_is_no_double_quantized_nf4_fails_the_test(make_layer):
    layers.assert_correct_bnb(make_layer(64, 64, FP16), FP16)
    for layer in (make_layer(64, 64, FP16, blocksize=128), make_layer(64, 64, BF16)):
        with pytest.raises(AssertionError):
            layers.assert_correct_bnb(layer, FP16)


def test_every_call_is_timed_and_nothing_beside_it(monkeypatch):
    now = [0]

    def taking(step):
        def call(layer):
            now[0] += step
            return exact(layer)

        return call

    monkeypatch.setattr(protocol, "ROUNDS", 7)
    monkeypatch.setattr(protocol, "reference", taking(1000))
    monkeypatch.setattr(protocol.timeit, "default_timer", lambda: now[0])
    assert protocol.test_dequantize(taking(1)) == 3 * 3 * 7


def test_a_flip_changes_one_byte_that_can_be_any(make_layer, monkeypatch):
    layer = make_layer(64, 64, FP16)
    before = layer.weight.data.clone()
    monkeypatch.setattr(protocol.secrets, "randbelow", lambda number: number - 1)
    protocol.flip(layer)
    assert (before ^ layer.weight.data).flatten().nonzero().tolist() == [[64 * 32 - 1]]


def test_bytes_that_stay_between_calls_fail_the_test(monkeypatch):
    """The results that the test itself holds do not count. The readings are made up; on a GPU: below."""
    config = layers.CONFIGS[1]
    size = 2 * config.hidden * config.intermediate
    readings = [1000 + (6 + i) * size + 512 * (i == 4) for i in range(6)]
    readings = iter([1000, *readings])
    monkeypatch.setattr(protocol, "allocated", lambda: next(readings))
    with pytest.raises(AssertionError, match="^512 bytes of GPU memory are kept"):
        protocol.check_and_time(config, exact)


def keeps_results(layer, kept={}):  # noqa: B006
    """Return one of two kept results, which are computed again when a tensor has changed."""
    tensors = read_nested(layer.weight.data, layer.weight.quant_state)[0]
    copies, *results = kept.get(layer, [()])
    if not copies or not all(map(torch.equal, tensors, copies)):
        copies = [tensor.clone() for tensor in tensors]
        results = [your_dequantize_nf4(layer) for _ in range(2)]
    kept[layer] = copies, *reversed(results)
    return results[0]


@pytest.mark.gpu
def test_kept_results_fail_the_test_and_honest_functions_pass(monkeypatch):
    monkeypatch.setattr(protocol, "ROUNDS", 30)
    for name, function in protocol.baselines().items():
        if name != "unsloth_buffered":
            assert protocol.test_dequantize(function) > 0, name
    assert protocol.test_dequantize(your_dequantize_nf4) > 0
    with pytest.raises(AssertionError, match="bytes of GPU memory are kept"):
        protocol.test_dequantize(keeps_results)


@pytest.mark.parametrize("off", ["", "utils._USE_NF4_KERNELS", "triton_launch._ENABLED"])
def test_the_puzzles_line_five_times(off, monkeypatch, capsys):
    """Without Unsloth today if its kernel or launcher is off, which would flatter this kernel."""
    known = {f"unsloth_{name}": name for name in ("today", "classic")}
    monkeypatch.setattr(protocol, "baselines", lambda: known)
    monkeypatch.setattr(protocol, "test_dequantize", {"ours": 2.0, "today": 2.998, "classic": 4.0}.get)
    module, _, switch = off.partition(".")
    monkeypatch.setitem(
        protocol.sys.modules, f"unsloth.kernels.{module}", types.SimpleNamespace(**{switch: False})
    )
    ratios = protocol.puzzles_line("ours")
    assert ratios == {"unsloth_today": [] if off else [1.499] * 5, "unsloth_classic": [2.0] * 5}
    today = f"not measured (needs Unsloth's {off}" if off else "median 1.49x of 1.49x"  # rounded down
    assert f"vs Unsloth today: {today}" in capsys.readouterr().out


def needs_a_module(candidate):
    import a_module_that_nobody_has  # noqa: F401


def test_an_error_fails_also_if_a_module_is_missing(capsys):
    assert protocol.attempt(needs_a_module, exact) is False
    assert capsys.readouterr().out.endswith("No module named 'a_module_that_nobody_has'\nFAILED\n")
    assert protocol.attempt(needs_a_module, exact, "a tool") is None
    assert capsys.readouterr().out == "not measured (needs a tool)\n"


def test_libraries_load_without_banners_or_say_what_is_missing(monkeypatch, capsys):
    def imported(name):
        print("banner")
        if name != "bitsandbytes":
            raise OSError("no libcudart")
        return exact

    monkeypatch.setattr(protocol, "ON_GPU", True)
    monkeypatch.setattr(protocol, "imported", imported)
    assert protocol.baselines.__wrapped__() == {"bitsandbytes": exact}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Unsloth today: OSError: no libcudart" and len(lines) == 3
