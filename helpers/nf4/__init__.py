"""The product: the kernel and what switches it on. Imports nothing of ours; installs as `nf4_triton`."""
