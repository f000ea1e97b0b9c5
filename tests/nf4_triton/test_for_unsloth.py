"""What Unsloth could take: docs/for_unsloth.py runs in a child, because Unsloth changes its process."""

import pytest

from helpers.machine import ROOT, python

DOCS = ROOT / "docs"


def test_the_patch_only_adds_lines_at_the_end_of_the_file():
    _, _, place, *lines = (DOCS / "for_unsloth.patch").read_text().splitlines()
    assert place == f"@@ -446,0 +447,{len(lines)} @@"
    assert all(line.startswith("+") for line in lines)
    compile("\n".join(line[1:] for line in lines), "for_unsloth.patch", "exec")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_unsloth_with_the_patch_gives_the_same_bits():
    """The times are printed: pytest -s."""
    done = python([DOCS / "for_unsloth.py"], timeout=540, check=False)
    if "Not tried" in done.err:
        pytest.skip(done.err.strip())
    assert "The same bits" in done.out, done.err
    print(done.out)
