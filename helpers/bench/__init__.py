"""Benchmarks: clocks, contenders, `python -m helpers bench`, training."""
