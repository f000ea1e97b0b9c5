"""The exact reference in plain torch, and real layers to compare with it."""
