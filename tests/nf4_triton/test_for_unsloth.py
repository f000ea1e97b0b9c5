"""What Unsloth could take: docs/for_unsloth.py runs in a child, because Unsloth changes its process."""

import pytest

import processes
from helpers.machine import ROOT

DOCS = ROOT / "docs"


def test_patches_only_add_lines():
    """They have none of Unsloth's lines, not even as context."""
    patches = [*DOCS.glob("for_unsloth_*.patch")]
    assert len(patches) == 3
    for patch in patches:
        lines = patch.read_text().splitlines()
        assert all(line.startswith(("+", "@@ -", "--- a/")) for line in lines)
        assert all(",0 +" in line for line in lines if line.startswith("@@ -"))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_patches_give_the_same_bits_and_pass_their_own_tests(tmp_path):
    """The times are printed: pytest -s."""
    variables = {"NF4_RESULTS": str(tmp_path)}
    done = processes.python([DOCS / "for_unsloth.py"], variables=variables, timeout=540, check=False)
    if "Not tried" in done.err:
        pytest.skip(done.err.strip())
    assert "the same bits" in done.out, done.out + done.err
    print(done.out)
