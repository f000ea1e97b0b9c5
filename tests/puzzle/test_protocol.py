"""The puzzle's test: what it checks and times, and what a missing library says."""

import contextlib
import types

import pytest
import torch

from helpers.puzzle import layers, protocol
from nf4_triton.core.launch import your_dequantize_nf4
from nf4_triton.core.reference import dequantize_in_pytorch as exact

pytest.importorskip("bitsandbytes")
FP16, BF16 = torch.float16, torch.bfloat16


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


def other_strides(layer, seen=set()):  # noqa: B006
    """From the second call on, when no multiplication comes before the comparison."""
    weight = exact(layer)
    if layer in seen:
        return weight.t().contiguous().t()
    seen.add(layer)
    return weight


def in_one_buffer(layer, buffers={}):  # noqa: B006
    return buffers.setdefault(layer, exact(layer)).copy_(exact(layer))


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
        (look_ahead, "not close"),
        (lambda layer: exact(layer).double(), "dtype"),
        (other_strides, "stride"),
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
    assert protocol.test_dequantize(taking(1)) == protocol.official(taking(1)) == 3 * 3 * 7
    with pytest.raises(AssertionError, match="not close"):
        protocol.official(last_element_off)


def test_a_flip_changes_one_byte_that_can_be_any(make_layer, monkeypatch):
    layer = make_layer(64, 64, FP16)
    before = layer.weight.data.clone()
    monkeypatch.setattr(protocol.secrets, "randbelow", lambda number: number - 1)
    protocol.flip(layer)
    assert (before ^ layer.weight.data).flatten().nonzero().tolist() == [[64 * 32 - 1]]


@pytest.fixture
def memory(make_layer, monkeypatch):
    """(layer, MLP of it, the memory of all results: the candidate's, and those to compare them with)."""
    layer, memory = make_layer(64, 64, FP16), torch.zeros(64, 64, dtype=FP16, device=layers.DEVICE)
    monkeypatch.setattr(protocol, "baselines", lambda: {"bitsandbytes": lambda x: memory.copy_(exact(x))})
    return layer, types.SimpleNamespace(up_proj=layer, gate_proj=layer, down_proj=layer), memory


@pytest.mark.parametrize("change", [protocol.flip, protocol.change_all, lambda layer: None])
def test_nothing_marks_the_memory_of_a_watched_call(change, memory):
    """It holds the weight of before the change, as in timed rounds, with one NaN."""
    layer, mlp, memory = memory
    before, found = exact(layer), []

    def call(layer):
        found.append(memory.clone())
        return memory.copy_(exact(layer))

    assert protocol.wrong_elements(call, layer, change) == 0
    between = exact(layer)
    with pytest.raises(AssertionError, match="same address"):
        protocol.watch(mlp, call, change, [], [])
    assert (found[0] != before).sum() == (found[1] != between).sum() == 1
    assert [one.isnan().sum() for one in found] == [1] * 4


@pytest.mark.parametrize("rows", [63, 0])
def test_what_a_call_does_not_write_is_wrong_though_its_memory_held_the_weight(rows, memory):
    """The result is copied before the one to compare is made, here in the same memory."""
    layer, mlp, memory = memory

    def call(layer):
        memory[:rows] = exact(layer)[:rows]
        return memory

    assert protocol.wrong_elements(call, layer) > 30 * (64 - rows)
    with pytest.raises(AssertionError, match="not close"):
        protocol.watch(mlp, call, protocol.change_all, [], [])


@pytest.mark.parametrize("kept, passes", [(0, True), (65_536, True), (65_537, False)])
def test_a_small_table_may_stay_between_calls(kept, passes, monkeypatch):
    """The results that the test itself holds do not count. The readings are made up; on a GPU: below."""
    config = layers.CONFIGS[1]
    size = 2 * config.hidden * config.intermediate
    readings = iter([1000, *(1000 + (3 + i % 3) * size + kept * (i == 4) for i in range(6))])
    monkeypatch.setattr(protocol, "allocated", lambda: next(readings))
    message = "^65,537 bytes of GPU memory are kept between calls, expected at most 65,536"
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match=message):
        protocol.time_watched(config, exact)


def keeps_one_absmax(layer, kept=[]):  # noqa: B006
    """Keep the decoded absmax of a layer, the first of the puzzle's smallest ones."""
    if not kept and layer.weight.numel() == 4096 * 1024 // 2:
        kept.append(torch.empty(4096 * 1024 // 64, device="cuda"))
    return your_dequantize_nf4(layer)


@pytest.mark.gpu
def test_a_kept_absmax_fails_the_test_and_honest_functions_pass(monkeypatch):
    monkeypatch.setattr(protocol, "ROUNDS", 30)
    for name, function in protocol.baselines().items():
        if name != "unsloth_buffered":
            assert protocol.test_dequantize(function) > 0, name
    assert protocol.test_dequantize(your_dequantize_nf4) > 0
    with pytest.raises(AssertionError, match="at most 65,536 bytes"):
        protocol.test_dequantize(keeps_one_absmax)


@pytest.mark.parametrize("off", ["", "utils._USE_NF4_KERNELS", "triton_launch._ENABLED", "an error"])
def test_the_puzzles_line_plain_and_five_times(off, monkeypatch, capsys):
    """Without Unsloth today if it fails, or if its kernel or launcher is off: that would flatter ours."""
    known = {f"unsloth_{name}": name for name in ("today", "classic")} | {"bitsandbytes": exact}
    monkeypatch.setattr(protocol, "baselines", lambda: known)
    seconds = {"ours": 2.0, "classic": 4.0} | ({} if off == "an error" else {"today": 2.998})
    monkeypatch.setattr(protocol, "test_dequantize", seconds.__getitem__)
    monkeypatch.setattr(protocol, "official", lambda function: 1.0)
    module, _, switch = off.partition(".")
    monkeypatch.setitem(
        protocol.sys.modules, f"unsloth.kernels.{module}", types.SimpleNamespace(**{switch: False})
    )
    ratios = protocol.puzzles_line("ours")
    assert ratios == {"unsloth_today": [] if off else [1.499] * 5, "unsloth_classic": [2.0] * 5}
    shown = capsys.readouterr().out
    today = "not measured (needs " if off else "1.49x, median of 1.49x"  # rounded down
    assert f"vs Unsloth today: {today}" in shown and "vs Unsloth classic, the plain test: 1.00x" in shown


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
