"""The old name of what nf4/reference.py holds; goes when its importers have moved."""

from .reference import cannot_run  # noqa: F401
from .reference import dequantize_layer as dequantize  # noqa: F401
