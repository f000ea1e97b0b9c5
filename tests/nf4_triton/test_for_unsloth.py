"""What Unsloth could take: docs/for_unsloth.py runs in a child, because Unsloth changes its process."""

import pytest

import processes
from helpers.machine import ROOT

DOCS = ROOT / "docs"


def test_the_patch_only_adds_lines():
    """Unsloth's lines stand there only so that `patch` finds the place."""
    lines = (DOCS / "for_unsloth.patch").read_text().splitlines()
    assert sum(line.startswith(" ") for line in lines) == 6
    assert all(line.startswith((" ", "+", "@@ ", "--- a/")) for line in lines)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_unsloth_with_the_patch_gives_the_same_bits():
    """The times are printed: pytest -s."""
    done = processes.python([DOCS / "for_unsloth.py"], timeout=540, check=False)
    if "Not tried" in done.err:
        pytest.skip(done.err.strip())
    assert "the same bits" in done.out, done.err
    print(done.out)
