"""What notebook, pages and pictures call the contenders, and how they show a ratio; a notebook cell."""

# %% What contenders are called, and how a ratio is shown id="names" folded=true
import math

LABELS = {
    "ours": "this kernel",
    "unsloth_today": "Unsloth today",
    "unsloth_buffered": "Unsloth, one buffer",
    "ordinary": "this kernel, kernel[grid]",
    "unsloth_classic": "Unsloth classic",
    "bitsandbytes": "bitsandbytes",
    "peft": "PEFT",
    "plain": "plain PyTorch",
}


def shown(ratio):
    """Return a ratio as text, rounded down to two decimals; a dash for None."""
    return "-" if ratio is None else f"{math.floor(round(100 * ratio, 6)) / 100:.2f}x"
