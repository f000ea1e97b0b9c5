"""What depends on the GPU: the tile, the assembly, the cache hints. The section is a notebook cell."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
from .kernel import INTERPRETED

# %% Settings for each GPU id="settings" part="settings" folded=true tags=["kernel"]
import contextlib
import dataclasses
import functools
import os

import torch

MAX_ELEMENTS = 1 << 34  # of one tensor: the kernel counts blocks of 8 elements in 31 bits


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that depends on the GPU. `settings()` chooses; nothing else looks at the card."""

    asm: bool  # inline PTX; False: the same bits in plain Triton
    hints: bool  # cache eviction hints on data read or written once
    int_bf16: bool  # sm_75: no packed conversions, bf16 is rounded in integers
    rows: int  # of 64 elements, per program
    num_warps: int
    capability: tuple | None
    reason: str


T4 = dict(int_bf16=True, rows=128, num_warps=4, capability=(7, 5), reason="T4 settings forced")
_forced: dict = {}
forces = [object()]  # replaced by every force(); part of the launch cache's key


@functools.cache
def default_settings(index):
    """Return the Settings of a GPU by its index, ignoring force()."""
    tile = dict(hints=True, rows=32, num_warps=2)
    if INTERPRETED or not torch.cuda.is_available():
        tile["rows"] = 512  # the interpreter needs 15 ms a program, whatever its size
        return Settings(asm=False, int_bf16=True, capability=None,
                        reason="no GPU in use: plain Triton", **tile)
    if torch.version.hip:
        return Settings(asm=False, int_bf16=False, capability=None,
                        reason="AMD: plain Triton, never run there", **tile)
    card = torch.cuda.get_device_properties(index)
    old = card.major < 8
    if old:
        tile.update(rows=T4["rows"], num_warps=T4["num_warps"])
    return Settings(asm=True, int_bf16=old, capability=(card.major, card.minor),
                    reason=f"{card.name}, sm_{card.major}{card.minor}", **tile)


def settings(device=None):
    """Return the Settings of a CUDA device: an index, a torch.device, or None for the current."""
    index = getattr(device, "index", device)
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() and not INTERPRETED else 0
    chosen = default_settings(index)
    return dataclasses.replace(chosen, **_forced) if _forced else chosen


def force(card=None, **overrides):
    """Override fields of Settings from now on, or inside `with force(...)`.

    force(card="t4") takes every T4 setting; force() returns to the GPU's own. Raises ValueError for
    another card, TypeError for an unknown field.
    """
    if card not in (None, "t4"):
        raise ValueError(f"card is {card!r} (NF4_FORCE or force), expected 't4', the only card that "
                         "can be forced: set NF4_FORCE=t4 or unset it")
    before, chosen = _forced, {**(T4 if card else {}), **overrides}
    unknown = chosen.keys() - {field.name for field in dataclasses.fields(Settings)}
    if unknown:
        raise TypeError(f"unknown settings {sorted(unknown)}, expected fields of Settings")

    def apply(fields):
        global _forced
        _forced = fields
        forces[0] = object()

    @contextlib.contextmanager
    def restore():
        try:
            yield
        finally:
            apply(before)

    apply(chosen)
    return restore()


if os.environ.get("NF4_FORCE"):
    force(card=os.environ["NF4_FORCE"])


def kernel_constexprs(packed, sizes, aligned, out_aligned, s):
    """Return the kernel's constexprs, in its order, under Settings s.

    sizes: of check(packed). aligned, out_aligned: the addresses of weight and result are multiples
    of 16.
    """
    n, log2_block, log2_block2 = sizes
    row = min(64, 1 << log2_block)
    unit = row if n % row == 0 else 8 if n % 8 == 0 else 1
    return dict(
        NESTED=packed.nested,
        FOUR=packed.quant_type == "fp4",
        LOG2_BLOCK=log2_block,
        LOG2_BLOCK2=log2_block2,
        BYTES=not aligned or n % 8 != 0,
        UNIT=unit if out_aligned else 1,
        ROWS=s.rows,
        ASM=s.asm,
        SM75=s.int_bf16,
        LOAD_HINT="evict_first" if s.hints else "",
        STORE_HINT=".cs" if s.hints else "",
    )


def launch_options(s):
    """Return Triton's launch options under Settings s. No fp fusion: an FMA changes bits."""
    return dict(num_warps=s.num_warps, enable_fp_fusion=False)
