"""Settings that depend on the GPU: tile, inline assembly, cache hints. The section is a notebook cell."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

from .supported import TILES, VERSION, UnsupportedState as UnsupportedState, forced_card, interpreted

INTERPRETED = interpreted()

# %% Settings for each GPU id="settings" folded=true
import contextlib
import dataclasses
import functools

KERNEL_DEVICE = "cpu" if INTERPRETED else "cuda"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that depend on the GPU."""

    asm: bool  # inline PTX; False: plain Triton, bit-identical
    hints: bool  # cache eviction hints on data read or written once
    sm75: bool  # no bf16 arithmetic: bf16 is rounded in integers
    tile_rows: int  # rows of 64 elements per program
    num_warps: int


T4 = dict(sm75=True, tile_rows=TILES[7, 5][0], num_warps=TILES[7, 5][1])
launches: dict = {}  # {layout: its cached launches}, for the current settings
_forced: dict = {}
_cache_key = ""


@functools.cache
def settings(device=0):
    """Return the Settings of a GPU, or of Triton's interpreter, with what force() overrides."""
    if INTERPRETED or not torch.cuda.is_available():
        # Few large programs: the interpreter's time depends on the number of programs, not on their size.
        own = Settings(asm=False, hints=True, sm75=True, tile_rows=512, num_warps=4)
    else:
        own = of_capability(*torch.cuda.get_device_capability(getattr(device, "index", device)))
    return dataclasses.replace(own, **_forced)


def of_capability(major, minor):
    """Return the Settings of a GPU of this compute capability."""
    tile_rows, num_warps = TILES.get((major, minor), TILES[9, 0] if major >= 8 else TILES[7, 5])
    return Settings(asm=True, hints=True, sm75=major < 8, tile_rows=tile_rows, num_warps=num_warps)


def cache_key():
    """Return the version, the tiles, and the forced settings as text. The operators take it as an argument,
    so that torch.compile reuses no code from its cache on disk that was compiled for other settings."""
    return _cache_key


@torch.compiler.assume_constant_result
def has_no_bf16(device):
    """Return whether Inductor compiles no bf16 on a device: a GPU without bf16 arithmetic."""
    if device.type != "cuda" or not torch.cuda.is_available():  # a fake tensor needs no GPU
        return False
    with torch.cuda.device(device):
        return not torch.cuda.is_bf16_supported(including_emulation=False)


def force(**fields):
    """Override fields of Settings from now on, or inside `with force(...)`, and clear the cached launches.
    force(**T4) sets the settings of a T4, force() the GPU's own."""
    global _forced, _cache_key
    restore = contextlib.ExitStack()
    restore.callback(force, **_forced)
    _forced, _cache_key = fields, f"{VERSION} {TILES}, forced: {sorted(fields.items())}"
    settings.cache_clear()
    launches.clear()
    return restore


force(**(T4 if forced_card() == "t4" else {}))


def of_card(s):
    """Return the kernels' last constexprs under Settings s (TILE_ROWS, ASM, SM75, LOAD_HINT, STORE_HINT), and
    Triton's launch options. No fp fusion: an FMA changes bits."""
    hints = ("evict_first", ".cs") if s.hints else ("", "")
    return (s.tile_rows, s.asm, s.sm75, *hints), dict(num_warps=s.num_warps, enable_fp_fusion=False)


# %% tags=["module-only"]
if forced_card() not in ("", "t4"):
    raise ValueError(f"NF4_FORCE is {forced_card()!r}, expected t4, or nothing")
