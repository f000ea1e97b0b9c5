"""In a checkout what `nf4_triton` is once installed: `from helpers.integrate import use_nf4_kernel`."""

from helpers.nf4 import (
    Switch,
    UnknownInternals,
    UnsupportedState,
    dequantize,
    restore,
    trainer_callback,
    use_nf4_kernel,
)

__all__ = [
    "Switch",
    "UnknownInternals",
    "UnsupportedState",
    "dequantize",
    "restore",
    "trainer_callback",
    "use_nf4_kernel",
]
