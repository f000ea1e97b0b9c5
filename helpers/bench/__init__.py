"""Benchmarks: clocks, contenders, the memory-bound reference, `python -m helpers bench`, training."""
