"""Tiny models, training runs with the kernel and without, their times."""
