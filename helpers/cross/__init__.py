"""Machine code for GPUs that this machine may lack: compiled and checked. PTX for older ones runs here, too."""
