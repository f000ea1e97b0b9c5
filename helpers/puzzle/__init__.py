"""The puzzle: protocol, evidence and marking (sections of the notebook), their sync, its run."""
