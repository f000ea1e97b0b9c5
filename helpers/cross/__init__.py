"""Machine code for GPUs that this machine may lack: compiled and checked. Older ones' PTX runs here, too."""
