"""Every cheat fails by the notebook's own cells, and the honest kernel passes the same judges."""

import pytest
import torch

from helpers.nf4 import kernel
from helpers.puzzle import checks as evidence, protocol

from .cheats import CHEATS, cells, planted

pytest.importorskip("bitsandbytes")
CONFIGS = protocol.OFFICIAL[1:2] if protocol.ON_GPU else protocol.SMALL[1:2]
EVERYWHERE = [(name, judge) for name, (_, judges, _) in CHEATS.items() for judge in judges]
ON_A_GPU = [(name, judge) for name, (_, _, judges) in CHEATS.items() for judge in judges]


def judged(candidate, judge) -> tuple[bool | None, str]:
    """(whether the candidate passed, what was said)."""
    if judge == "protocol":
        failure = protocol.compare({"it": candidate}, 100, 1, CONFIGS, {}).entries["it"].failure
        return not failure, failure
    seen = getattr(evidence, judge)(candidate)
    return seen.passed, seen.text


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """One cheat replaces torch's comparison."""
    monkeypatch.setattr(torch.testing, "assert_close", torch.testing.assert_close)


@pytest.mark.parametrize("name, judge", EVERYWHERE)
def test_a_cheat_fails(name, judge):
    passed, text = judged(planted(CHEATS[name][0]), judge)
    assert passed is False, (name, judge, text)


@pytest.mark.gpu
@pytest.mark.parametrize("name, judge", ON_A_GPU)
def test_a_cheat_fails_on_the_gpu(name, judge):
    passed, text = judged(planted(CHEATS[name][0]), judge)
    assert passed is False, (name, judge, text)


@pytest.mark.parametrize("judge", ["protocol", *(check.__name__ for check in evidence.CHECKS)])
def test_the_honest_kernel_passes_the_same_judges(judge):
    passed, text = judged(planted(lambda honest: lambda layer: honest(layer)), judge)
    without_a_gpu = judge not in ("protocol", "exact", "fresh_output") and not protocol.ON_GPU
    assert passed is (None if without_a_gpu else True), text


def test_a_compiled_call_of_another_copys_operator_fails():
    """Item 11: a wrong live kernel passed because the module's operator had the same name."""
    copy = cells(_operator=kernel._operator)
    seen = evidence.torch_compile(copy.your_dequantize_nf4)
    assert seen.passed is False and "another kernel ran" in seen.text


def test_an_edited_kernel_in_the_notebook_is_what_is_judged():
    """A copy whose own kernel is wrong fails, while the module's stays right."""
    wrong = cells()
    original = wrong._your_dequantize_nf4_kernel

    class Wrong:
        def __getitem__(self, grid):
            def run(weight, out, *args, **options):
                result = original[grid](weight, out, *args, **options)
                out.view(-1)[:1] = 7.0
                return result

            return run

    wrong._your_dequantize_nf4_kernel = Wrong()
    passed, text = judged(wrong.your_dequantize_nf4, "protocol")
    assert passed is False and "MLP output" in text
    assert judged(kernel.your_dequantize_nf4, "protocol")[0]


def test_a_function_from_elsewhere_is_refused():
    seen = evidence.exact(lambda layer: protocol.expected(layer))
    assert seen.passed is False and "pass your_dequantize_nf4 itself" in seen.text
