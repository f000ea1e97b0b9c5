"""Supported versions, tiles, and the error for everything else. Imports neither torch nor Triton.

`# %%`: a notebook cell.
"""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
import os

# %% Versions, cards, and tiles id="supported" folded=true
VERSION = "2.2.0"  # of the package
NEWEST_TRITON = (3, 9)  # the newest that was tested; with newer ones, every launch goes through Triton
TILES = {  # by compute capability: rows of 64 elements, and warps, of a program
    (7, 5): (128, 4),  # 256 rows and 8 warps: within 1% over the puzzle's test (simulated)
    (9, 0): (32, 2),  # 16 or 64 rows: 6 to 7% slower; 1 or 4 warps: 1 to 2% (H200, 16.8M elements)
}


class UnsupportedState(ValueError):
    """A weight or quant_state that cannot be dequantized. The message says what is wrong, what was
    expected, and what to do."""


def forced_card():
    """Return what NF4_FORCE asks for: "t4", the settings of a T4, or "", the GPU's own."""
    return os.environ.get("NF4_FORCE", "").strip().lower()


# %% tags=["module-only"]


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernel: TRITON_INTERPRET, as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
