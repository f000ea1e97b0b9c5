"""Clocks, workloads, ceilings, GPU time, host time, the benchmark."""
