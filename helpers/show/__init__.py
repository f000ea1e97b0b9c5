"""Pictures, the notebook's appendix, README and docs. Imported by `__main__` alone."""
