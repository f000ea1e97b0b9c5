"""Our machine code for GPUs that need not be here: compiled, checked, its PTX run on this GPU."""
