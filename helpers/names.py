"""Names of contenders and criteria, and how a ratio is shown: in a notebook cell, pages and pictures."""

# ruff: noqa: E402
# %% tags=["module-only"]
import math

# %% Names of contenders, and the puzzle's criteria id="names" folded=true
LABELS = {
    "ours": "this kernel",
    "bitsandbytes": "bitsandbytes",
    "unsloth_today": "Unsloth today",
    "unsloth_buffered": "Unsloth, one buffer",
    "unsloth_classic": "Unsloth classic",
}
CRITERIA = (  # criterion, points if met, points if not, the cell that shows it, the least speedup
    ("One fused kernel", 3, 0, "single_kernel", None),
    ("Penalty: speedup at most 1.00", 0, -3, "puzzles_line", math.nextafter(1, 2)),
    ("Speedup at least 1.05", 1, 0, "puzzles_line", 1.05),
    ("Speedup at least 1.10", 2, 0, "puzzles_line", 1.10),
    ("Speedup at least 1.15", 2, 0, "puzzles_line", 1.15),
    ("Works under torch.compile", 1, -1, "torch_compile", None),
    ("Custom assembly works", 3, 0, "custom_asm", None),
    ("Uses cache eviction", 1, 0, "cache_eviction", None),
    ("Tested in fp16 and bf16", 1, -1, "exact", None),
)


def shown(ratio):
    """Return a ratio as text, rounded down to two decimals; a dash for None."""
    return "-" if ratio is None else f"{math.floor(round(100 * ratio, 6)) / 100:.2f}x"
