"""Everything around the kernel: oracle, protocol, baselines, measurements, diagnostics. The kernel itself
lives in the notebook's cells tagged `kernel` and is loaded by `helpers.cells`."""
