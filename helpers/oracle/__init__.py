"""The exact reference, real layers and the baselines everything is compared with."""
