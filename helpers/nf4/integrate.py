"""The old name of what nf4/switch.py holds; goes when its importers have moved."""

from .switch import LIBRARIES, Switch, UnknownInternals, restore, use_nf4_kernel  # noqa: F401
