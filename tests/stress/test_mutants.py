"""Seeded bugs are caught: a few of them here in CI, all of them by `python -m helpers mutants [--gpu]`."""

import ast

import pytest

from helpers.record import hashes
from helpers.stress import mutants

TESTS = [
    "tests/nf4/test_plans.py::test_a_tensor_is_replaced",
]


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_every_mutant_still_applies(name):
    """Its fragment occurs in the kernel, and what comes of it is Python, and other code."""
    kernel, mutant = (
        ast.dump(ast.parse(text))
        for text in (hashes.KERNEL.read_text(), mutants.mutate(mutants.MUTANTS[name]))
    )
    assert kernel != mutant


def test_there_are_enough_of_each_kind():
    every = mutants.MUTANTS.values()
    kinds = mutants.PORTABLE, mutants.CHECKS, mutants.PLANS, mutants.COMPILED, mutants.ASSEMBLY
    assert len(every) == sum(map(len, kinds)), "no name twice"
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


def test_words_match_as_a_whole():
    text = 'z = ab + f"{a + 1} mul x, y;" + "mul x, y;" + a + 1'
    assert [text[slice(*place)] for place in mutants.occurrences(text, "a + 1")] == ["a + 1"] * 2
    assert len(mutants.occurrences(text, "mul x,")) == 2
    assert mutants.occurrences(text, "b + f") == mutants.occurrences(text, "a + 1 a") == []


def test_a_mutant_that_no_longer_applies_is_named_and_fails_the_run(monkeypatch, capsys):
    gone = mutants.Mutant("gone", "no such text in the kernel", "")
    with pytest.raises(LookupError, match="occurs 0 times"):
        mutants.mutate(gone)
    monkeypatch.setattr(mutants, "MUTANTS", {"gone": gone})
    monkeypatch.setattr(mutants, "run_tests", lambda *a: (mutants.SURVIVED, ""))
    assert mutants.main(["--only", "gone"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "gone no longer applies 'no such text in the kernel' occurs 0 times" in text


@pytest.mark.parametrize(
    "name, verdict",
    [
        (mutants.CONTROL, mutants.SURVIVED),
        ("plan: code2's address ignored", mutants.CAUGHT),
    ],
)
def test_a_few_mutants(name, verdict):
    row = mutants.examine(name, TESTS)
    assert row["verdict"] == verdict, row
