"""Seeded bugs are caught: a few of them here in CI, all of them by `python -m helpers mutants [--gpu]`."""

import pytest

from helpers.record import hashes
from helpers.stress import mutants

TESTS = [
    "tests/nf4/test_layouts.py::test_accepted[nf4, nested, bf16]",
    "tests/nf4/test_plans.py::test_a_tensor_is_replaced",
]


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_every_mutant_still_applies(name):
    """Its tokens occur in the kernel, and the changed text is Python."""
    text = mutants.mutate(mutants.MUTANTS[name])
    assert text != hashes.KERNEL.read_text()
    compile(text, name, "exec")


def test_there_are_enough_of_each_kind():
    every = mutants.MUTANTS.values()
    assert len(every) == sum(map(len, (mutants.PORTABLE, mutants.CHECKS, mutants.PLANS, mutants.ASSEMBLY)))
    assert sum(mutant.gpu for mutant in every) >= 20 and sum(not mutant.gpu for mutant in every) >= 20


@pytest.mark.parametrize(
    "text",
    [
        "y = f(a, b) + g[1]",
        "y = f(\n    a,  # a comment\n    b,\n) + g[1]",
        "if x:\n    y = (\n        f(a, b)\n        + g[1]\n    )",
    ],
)
def test_layout_does_not_matter(text):
    [(first, last)] = mutants.occurrences(text, "f(a, b) + g")
    assert text[first] == "f" and text[last - 1] == "g"
    [(first, last)] = mutants.occurrences(text, "(a, b)  ")
    assert text[last - 1] == ")"


def test_words_and_strings_are_not_mixed_up():
    text = 'z = ab + f"{a + 1} mul x, y;" + "mul x, y;" + a + 1'
    assert [text[slice(*place)] for place in mutants.occurrences(text, "a + 1")] == ["a + 1"]
    assert mutants.occurrences(text, "a + 1")[0][1] == len(text)
    assert len(mutants.occurrences(text, "mul x,")) == 2
    assert mutants.occurrences(text, "b + f") == mutants.occurrences("# a + 1", "a + 1") == []


def test_a_mutant_that_no_longer_applies_is_an_error():
    with pytest.raises(LookupError, match="occurs 0 times"):
        mutants.mutate(mutants.Mutant("gone", "no such text in the kernel", ""))


@pytest.mark.parametrize(
    "name, verdict",
    [
        (mutants.CONTROL, mutants.SURVIVED),
        ("low nibble first", mutants.CAUGHT),
        ("plan: code2's address ignored", mutants.CAUGHT),
    ],
)
def test_a_few_mutants(name, verdict):
    row = mutants.examine(name, TESTS)
    assert row["verdict"] == verdict, row
