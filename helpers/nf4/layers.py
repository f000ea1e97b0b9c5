"""The old name of what nf4/reference.py holds; goes when its importers have moved."""

from .reference import every_code, quantized_layer  # noqa: F401
