"""Old address of pages.py, until __main__ has moved."""

from helpers.results.pages import main  # noqa: F401
