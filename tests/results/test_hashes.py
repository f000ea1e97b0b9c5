"""What makes a stored figure stale, and what does not."""

import dataclasses

import msgspec
import pytest

from helpers.results import hashes, old_store as results

MODULE = '''
import torch  # both parts may import

# %% id="a" part="device"
def compiled(x):
    """What it does."""
    if x < 0:
        raise ValueError(f"x is {x}, expected 0 or more")
    return x + 1

# %% id="b" part="host"
class Plan:
    """A plan."""
    def check(self, x):
        _require(x > 0, "x is wrong: " "do this")
        _require_tensor("weight", x, 3)
        return x
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("What it does.", "What it does, in other words."),
        ("return x + 1", "return (x\n            + 1)  # next"),
        ("x is {x}, expected 0 or more", "{x} is negative"),
        ('"x is wrong: " "do this"', 'f"{x}: " + "do that"'),
        ('"weight", x, 3', '"the weight", x, 3'),
        ('    """A plan."""\n', ""),
    ],
)
def test_comments_layout_docstrings_and_error_texts_change_nothing(old, new):
    assert old in MODULE
    assert hashes.split(MODULE) == hashes.split(MODULE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("x + 1", "x + 2", 0),
        ("x < 0", "x <= 0", 0),
        ("raise ValueError", "raise TypeError", 0),
        ("_require(x > 0", "_require(x >= 0", 1),
        ("x, 3)", "x, 4)", 1),
        ("        return x\n", "        return -x\n", 1),
    ],
)
def test_code_changes_the_hash_of_its_part_alone(old, new, part):
    before, after = hashes.split(MODULE), hashes.split(MODULE.replace(old, new))
    assert [a == b for a, b in zip(before, after, strict=True)] == [i != part for i in (0, 1)]


def test_what_decides_for_cards_is_in_neither_part():
    card = '\n# %% id="c" part="card"\nTILE = 8\n'
    assert hashes.split(MODULE) == hashes.split(MODULE + card)
    compiled = '\n# %% id="d" part="host"\ndef _constexprs(): return {}\n'
    changed = [a != b for a, b in zip(hashes.split(MODULE), hashes.split(MODULE + compiled), strict=True)]
    assert changed == [True, False]


def test_the_kernel_has_all_parts():
    text = hashes.KERNEL.read_text(encoding="utf-8")
    parts = hashes.sections(text)
    assert len(parts) == text.count("\n# %%") >= 5, "one without a part would count as of the one before"
    assert hashes.device() != hashes.host()
    assert {part for part, _ in parts} == {"device", "host", "card"}


@pytest.fixture
def on_an_h200(kernel):
    """A result of the kernel as it is, as it would have been stored on an H200."""
    result = results.now(results.Benchmark(quick=True))
    result.environment.gpu, result.environment.capability = "NVIDIA H200", (9, 0)
    result.environment.triton = "3.6.0"
    result.kernel.settings = hashes.decisions(result.environment, 132) | {"sms": 132, "capability": [9, 0]}
    return msgspec.json.decode(msgspec.json.encode(result), type=type(result))


def test_a_result_of_this_kernel_is_not_stale(on_an_h200):
    here = results.now(results.Benchmark(quick=True))
    for result in (here, on_an_h200):
        assert not results.stale(result, "gpu") and not results.stale(result, "call")
        assert results.EARLIER not in results.caption(result)


def test_a_changed_host_part_leaves_gpu_times_fresh(on_an_h200, monkeypatch):
    monkeypatch.setattr(hashes, "host", lambda: "another")
    assert not results.stale(on_an_h200, "gpu") and results.stale(on_an_h200, "call")
    assert results.EARLIER in results.caption(on_an_h200)
    assert results.EARLIER not in results.caption(on_an_h200, "gpu")


def test_a_changed_device_part_makes_both_stale(on_an_h200, monkeypatch):
    monkeypatch.setattr(hashes, "device", lambda: "another")
    assert results.stale(on_an_h200, "gpu") and results.stale(on_an_h200, "call")


def test_another_choice_for_a_card_makes_its_results_stale_and_no_others(on_an_h200, kernel, monkeypatch):
    on_a_t4 = msgspec.json.decode(msgspec.json.encode(on_an_h200), type=type(on_an_h200))
    on_a_t4.environment.gpu, on_a_t4.environment.capability = "Tesla T4", (7, 5)
    on_a_t4.kernel.settings = hashes.decisions(on_a_t4.environment, 40) | {"sms": 40}
    assert not results.stale(on_a_t4, "gpu")
    chosen = kernel.settings

    def another_for_hopper(device=None):
        settings = chosen(device)
        return dataclasses.replace(settings, words=4) if settings.capability == (9, 0) else settings

    monkeypatch.setattr(kernel, "settings", another_for_hopper)
    assert results.stale(on_an_h200, "gpu") and not results.stale(on_a_t4, "gpu")


def test_forced_decisions_of_now_are_not_taken_for_the_cards(on_an_h200, kernel):
    with kernel.force(card="t4"):
        assert not results.stale(on_an_h200)


def test_a_result_without_hashes_is_of_an_earlier_kernel(on_an_h200):
    on_an_h200.kernel = results.Kernel(label="8898263178c50c11")
    assert results.stale(on_an_h200, "gpu")
    assert "kernel 8898263178c50c11" in results.caption(on_an_h200)


def test_only_two_kinds_of_figures_exist(on_an_h200):
    with pytest.raises(ValueError, match="'gpu' or 'call'"):
        results.stale(on_an_h200, "host")
