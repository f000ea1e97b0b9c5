"""`python -m helpers sync`."""

from helpers.puzzle.notebook import NOTEBOOK  # noqa: F401
from helpers.puzzle.notebook import write as main  # noqa: F401
