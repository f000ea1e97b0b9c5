"""Seeded bugs are caught: a few of them here in CI, all of them by `python -m helpers mutants [--gpu]`."""

import ast

import pytest

from helpers import machine
from helpers.results import hashes, store as results
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


def test_a_mutant_that_no_longer_applies_is_named_and_fails_the_run(monkeypatch, tmp_path, capsys):
    gone = mutants.Mutant("gone", "no such text in the kernel", "")
    with pytest.raises(LookupError, match="occurs 0 times"):
        mutants.mutate(gone)
    monkeypatch.setattr(mutants, "MUTANTS", {"gone": gone})
    monkeypatch.setattr(mutants, "run_tests", lambda *a: (mutants.SURVIVED, ""))
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    assert mutants.main(["--only", "gone"]) == 1 and not any(tmp_path.rglob("*.json"))
    text = " ".join(capsys.readouterr().out.split())
    assert "gone no longer applies 'no such text in the kernel' occurs 0 times" in text


def test_some_that_run_again_replace_their_rows_of_the_whole_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NF4_RESULTS", str(tmp_path))
    names = ["low nibble first", "any blocksize"]
    monkeypatch.setattr(mutants, "MUTANTS", {name: mutants.MUTANTS[name] for name in names})

    def run(verdict, *arguments, control=mutants.SURVIVED):
        def examine(name, *_):
            return dict(
                mutant=name,
                by="",
                seconds=1.0,
                verdict=control if name == mutants.CONTROL else verdict,
            )

        monkeypatch.setattr(mutants, "examine", examine)
        mutants.main(list(arguments))
        capsys.readouterr()
        stored = results.find("mutants", machine.result_folder())
        return stored and [stored.data.caught, *(row["verdict"] for row in stored.data.mutants)]

    gpu = mutants.Mutant("on a GPU alone", "old", "new", gpu=True)
    assert run(mutants.CAUGHT, "--only", names[0]) is None, "there is no whole run yet"
    assert run(mutants.CAUGHT, control=mutants.CAUGHT) is None, "the tests fail without a bug"
    assert run(mutants.SURVIVED) == [0, mutants.SURVIVED, mutants.SURVIVED]
    assert run(mutants.CAUGHT, "--only", names[0]) == [1, mutants.CAUGHT, mutants.SURVIVED]
    whole = [1, mutants.CAUGHT, mutants.SURVIVED]  # which nothing below may change
    assert run(mutants.CAUGHT, "--only", names[1], control=mutants.CAUGHT) == whole
    assert run(mutants.CAUGHT, "a test of one's own", "--only", names[1]) == whole
    monkeypatch.setitem(mutants.MUTANTS, gpu.name, gpu)
    assert run(mutants.CAUGHT, "--only", gpu.name) == whole
    monkeypatch.setattr(results, "stale", lambda result: True)
    assert run(mutants.CAUGHT, "--only", names[1]) == whole


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
