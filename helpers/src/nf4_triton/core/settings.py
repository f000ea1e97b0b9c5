"""What depends on the GPU: tile, inline assembly, cache hints. The section is a notebook cell."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
import os

import torch

from .supported import TILES, VERSION, interpreted

INTERPRETED = interpreted()

# %% Settings for each GPU id="settings" folded=true
import contextlib
import dataclasses
import functools
import logging

KERNEL_DEVICE = "cpu" if INTERPRETED else "cuda"


class UnsupportedState(ValueError):
    """A weight or quant_state that cannot be dequantized. The message says what is wrong, what was
    expected, and what to do."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What depends on the GPU."""

    asm: bool  # inline PTX; False: the same bits in plain Triton
    hints: bool  # cache eviction hints on data read or written once
    int_bf16: bool  # sm_75: bf16 is rounded in integers
    rows: int  # of 64 elements, per program
    num_warps: int


when_forced: list = []  # functions that force() calls: launches that were kept have other settings
_forced: dict = {}
_cache_key = ""


@functools.cache
def default_settings(index):
    """Return the Settings of a GPU by its index, ignoring force()."""
    if INTERPRETED or not torch.cuda.is_available():
        # Few large programs: the interpreter's time depends on their number, not on their size.
        return Settings(asm=False, hints=True, int_bf16=True, rows=512, num_warps=4)
    card = torch.cuda.get_device_properties(index)
    rows, num_warps = TILES.get((card.major, card.minor), TILES[9, 0] if card.major >= 8 else TILES[7, 5])
    return Settings(asm=True, hints=True, int_bf16=card.major < 8, rows=rows, num_warps=num_warps)


def settings(device=None):
    """Return the Settings of a CUDA device: an index, a torch.device, or None for the current."""
    index = getattr(device, "index", device)
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() and not INTERPRETED else 0
    chosen = default_settings(index)
    return dataclasses.replace(chosen, **_forced) if _forced else chosen


def cache_key():
    """Return the version, the tiles, and what force() set, as text. The operators take it as an argument, so
    that torch.compile reuses no code from its cache on disk that it compiled for other settings."""
    return _cache_key


@torch.compiler.assume_constant_result
def has_no_bf16(device):
    """Return whether Inductor compiles no bf16 on a device: a GPU without bf16 arithmetic."""
    if device.type != "cuda" or not torch.cuda.is_available():  # a fake tensor needs no GPU
        return False
    with torch.cuda.device(device):
        return not torch.cuda.is_bf16_supported(including_emulation=False)


def _apply(fields):
    """Override these fields of Settings, and forget the launches that were kept under others."""
    global _forced, _cache_key
    _forced, _cache_key = fields, f"{VERSION} {TILES}, forced: {sorted(fields.items())}"
    for forget in when_forced:
        forget()


def force(card=None, **overrides):
    """Override fields of Settings from now on, or inside `with force(...)`.

    force(card="t4") takes every T4 setting; force() returns to the GPU's own. Launches that were
    kept are forgotten. Raises ValueError for another card, TypeError for an unknown field.
    """
    if card not in (None, "t4"):
        raise ValueError(f"card is {card!r}, expected 't4', the only card that can be forced")
    rows, num_warps = TILES[7, 5]
    t4 = dict(int_bf16=True, rows=rows, num_warps=num_warps)
    dataclasses.replace(Settings(asm=True, hints=True, **t4), **overrides)  # TypeError: an unknown field
    restore = contextlib.ExitStack()
    restore.callback(_apply, _forced)
    _apply(t4 | overrides if card else overrides)
    return restore


force()
if forced := os.environ.get("NF4_FORCE", "").strip().lower():
    try:
        force(card=forced)
    except ValueError as error:
        logging.getLogger("nf4_triton").warning("nf4_triton: NF4_FORCE has no effect: %s", error)


def of_card(s):
    """Return the kernels' last constexprs under Settings s (ROWS, ASM, SM75, LOAD_HINT, STORE_HINT), and
    Triton's launch options. No fp fusion: an FMA changes bits."""
    hints = ("evict_first", ".cs") if s.hints else ("", "")
    return (s.rows, s.asm, s.int_bf16, *hints), dict(num_warps=s.num_warps, enable_fp_fusion=False)
