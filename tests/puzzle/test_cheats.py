"""Every cheat fails by the notebook's own cells, and the honest kernel passes the same judges in any form."""

import functools

import pytest
import torch

from helpers.nf4 import launch
from helpers.puzzle import checks, protocol

from .cheats import CHEATS, cells, planted

pytest.importorskip("bitsandbytes")
CONFIGS = protocol.OFFICIAL[1:2] if protocol.ON_GPU else protocol.SMALL[1:2]
EVERYWHERE = [(name, judge) for name, (_, judges, _) in CHEATS.items() for judge in judges]
ON_A_GPU = [(name, judge) for name, (_, _, judges) in CHEATS.items() for judge in judges]
NO_GPU_NEEDED = ("protocol", "exact", "fresh_output")
KERNEL = "_your_dequantize_nf4_kernel"


def judged(candidate, judge) -> tuple[bool | None, str]:
    """(whether the candidate passed, what was said)."""
    if judge == "protocol":
        failure = protocol.compare({"it": candidate}, 100, 1, CONFIGS, {}).entries["it"].failure
        return not failure, failure
    return getattr(checks, judge)(candidate)[1:]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """One cheat replaces torch's comparison."""
    monkeypatch.setattr(torch.testing, "assert_close", torch.testing.assert_close)


@pytest.mark.parametrize("name, judge", EVERYWHERE)
def test_a_cheat_fails(name, judge):
    passed, text = judged(planted(CHEATS[name][0]), judge)
    assert passed is False, (name, judge, text)
    assert "while timed" not in text, "no clock runs on a CPU"


@pytest.mark.gpu
@pytest.mark.parametrize("name, judge", ON_A_GPU)
def test_a_cheat_fails_on_the_gpu(name, judge):
    passed, text = judged(planted(CHEATS[name][0]), judge)
    assert passed is False, (name, judge, text)


TAIL = "        if TAIL:  # the last program"
OVERWRITTEN = """        tl.debug_barrier()
        e2 = pid.to(tl.int64) * (TILE * 8) + tl.arange(0, TILE * 8)
        _elements(weight_ptr, out_ptr, absmax_ptr, table_ptr, code2_ptr, absmax2_ptr, offset_ptr, e2,
                  e2 < n_words.to(tl.int64) * 8, NESTED, LOG2_BLOCK, LOG2_BLOCK2, MODE, FLUSH)
"""


@pytest.mark.gpu
def test_assembly_that_decides_nothing_fails_on_the_gpu():
    """Its instructions run, then the portable path overwrites what they stored."""
    seen = checks.custom_asm(cells((TAIL, OVERWRITTEN + TAIL)).your_dequantize_nf4)
    assert seen.passed is False and "the assembly has no effect" in seen.text, seen


def judged_in_form(form):
    """your_dequantize_nf4 of an honest kernel in a form that is not ours."""
    if form == "another name":
        return cells((KERNEL, "my_own_kernel")).your_dequantize_nf4
    if form == "evict_last":
        return cells(('"evict_first" if s.hints', '"evict_last" if s.hints')).your_dequantize_nf4
    if form == "other assembly":
        odd = ('ROW_FP16 = tl.constexpr("{ "', 'ROW_FP16 = tl.constexpr("{ .reg .b32 odd; not.b32 odd, $4; "')
        return cells(odd).your_dequantize_nf4
    copy = cells()
    if form == "without force":
        del copy.force
    if form == "a partial":
        return functools.partial(copy.your_dequantize_nf4)
    return copy.your_dequantize_nf4


FORMS = {  # the judges that say "not measured" on a GPU, elsewhere too if they need none
    "ours": "",
    "another name": "",
    "evict_last": "",
    "other assembly": "",
    "without force": "custom_asm cache_eviction",
    "a partial": "single_kernel torch_compile custom_asm cache_eviction exact",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("judge", ["protocol", *(check.__name__ for check in checks.CHECKS)])
def test_an_honest_kernel_is_never_refused_for_its_form(judge, form):
    if not protocol.ON_GPU and judge not in (*NO_GPU_NEEDED, "torch_compile"):
        pytest.skip("needs a GPU whatever the form")
    if not protocol.ON_GPU and form in ("evict_last", "other assembly"):
        pytest.skip("the interpreter runs neither hints nor assembly")
    passed, text = judged(judged_in_form(form), judge)
    skipped = judge in FORMS[form].split() or not (protocol.ON_GPU or judge in NO_GPU_NEEDED)
    assert passed is (None if skipped else True), text
    assert not skipped or "not measured (needs" in text


def test_a_compiled_call_of_another_copys_operator_fails():
    copy = cells(_operator=launch._operator)
    seen = checks.torch_compile(copy.your_dequantize_nf4)
    assert seen.passed is False and "own kernel did not run" in seen.text


def test_an_edited_kernel_in_the_notebook_is_what_is_judged():
    """A copy whose own kernel is wrong fails, while the module's stays right."""
    wrong = cells()
    original = getattr(wrong, KERNEL)

    class Wrong:
        def __getitem__(self, grid):
            def run(weight, out, *args, **options):
                result = original[grid](weight, out, *args, **options)
                out.view(-1)[:1] = 7.0
                return result

            return run

    setattr(wrong, KERNEL, Wrong())
    passed, text = judged(wrong.your_dequantize_nf4, "protocol")
    assert passed is False and "MLP output" in text
    assert judged(launch.your_dequantize_nf4, "protocol")[0]
