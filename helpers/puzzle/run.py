"""`python -m helpers run`."""

from helpers.puzzle.notebook import run as main  # noqa: F401
