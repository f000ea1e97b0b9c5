"""Measurements as rows, the pages that show them, and their pictures."""
