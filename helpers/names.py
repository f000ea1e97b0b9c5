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
CRITERIA = (  # criterion, points if met, points if not, its cell or the least speedup
    ("One fused kernel", 3, 0, "single_kernel"),
    ("Penalty: speedup at most 1.00", 0, -3, 1.00),
    ("Speedup at least 1.05", 1, 0, 1.05),
    ("Speedup at least 1.10", 2, 0, 1.10),
    ("Speedup at least 1.15", 2, 0, 1.15),
    ("Works under torch.compile", 1, -1, "torch_compile"),
    ("Custom assembly works", 3, 0, "custom_asm"),
    ("Uses cache eviction", 1, 0, "cache_eviction"),
    ("Tested in fp16 and bf16", 1, -1, "exact"),
)


def shown(ratio):
    """Return a ratio as text, rounded down to two decimals; a dash for None."""
    return "-" if ratio is None else f"{math.floor(round(100 * ratio, 6)) / 100:.2f}x"
