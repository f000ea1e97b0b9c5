"""Clocks, contenders, ceilings, GPU time, host time, the benchmark."""
