"""What code a stored result was measured with."""

import functools
import hashlib

from helpers.machine.environment import ROOT

NOTEBOOK = ROOT / "Unsloth_Puzzles_A.ipynb"
KERNEL = ROOT / "helpers" / "nf4" / "kernel.py"


@functools.cache
def source() -> str:
    """The kernel module's text."""
    return KERNEL.read_text(encoding="utf-8")


def kernel_hash() -> str:
    """First 16 hex digits of the SHA-256 of source(): what every stored result is stamped with."""
    return hashlib.sha256(source().encode()).hexdigest()[:16]
