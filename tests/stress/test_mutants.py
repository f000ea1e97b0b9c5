"""Seeded bugs are caught: a few of them here in CI, all of them by `python -m helpers.stress.mutants [--gpu]`."""

import pytest

from helpers.record import hashes
from helpers.stress import mutants

TESTS = [
    "tests/nf4/test_layouts.py::test_accepted[nf4, nested, bf16]",
    "tests/nf4/test_plans.py::test_a_tensor_is_replaced",
]


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_every_mutant_still_applies(name):
    """Its text occurs in the kernel cells, and the changed text is Python."""
    text = mutants.mutate(mutants.MUTANTS[name])
    assert text != hashes.source()
    compile(text, name, "exec")


def test_there_are_enough_of_each_kind():
    found = mutants.MUTANTS.values()
    assert len(found) == sum(map(len, (mutants.PORTABLE, mutants.CHECKS, mutants.PLANS, mutants.ASSEMBLY)))
    assert sum(mutant.gpu for mutant in found) >= 20 and sum(not mutant.gpu for mutant in found) >= 20


def test_a_mutant_that_no_longer_applies_is_an_error():
    with pytest.raises(LookupError, match="occurs 0 times"):
        mutants.mutate(mutants.Mutant("gone", "no such text in the kernel", ""))


@pytest.mark.parametrize(
    "name, verdict",
    [
        (mutants.CONTROL, mutants.SURVIVED),
        ("low nibble first", mutants.CAUGHT),
        ("plan: state2 ignored", mutants.CAUGHT),
    ],
)
def test_a_few_mutants(name, verdict):
    found = mutants.examine(name, TESTS)
    assert found["verdict"] == verdict, found


def test_a_module_beside_the_real_one(kernel):
    """It has its own operator; the real one's stays as it is."""
    import torch

    before = torch.ops.nf4_triton.dequantize.default
    other = mutants.load(hashes.source(), "a_second_kernel")
    assert other is not kernel and other._operator is not kernel._operator
    assert torch.ops.nf4_triton.dequantize.default is before
    assert torch.ops.nf4_triton_a_second_kernel.dequantize.default is not before
