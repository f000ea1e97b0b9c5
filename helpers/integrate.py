"""From a checkout: `from helpers.integrate import use_nf4_kernel`."""

from helpers.nf4.integrate import Switch, UnknownInternals, use_nf4_kernel

__all__ = ["Switch", "UnknownInternals", "use_nf4_kernel"]
