"""How this room refuses: what is wrong, what was expected, and what to do."""

import contextlib
import threading

from ..core.supported import UnsupportedState

LOCK = threading.RLock()  # around what transformers and PEFT do: their lazy imports race


@contextlib.contextmanager
def library(problem):
    """Hold the lock, and raise what a library raises as an UnsupportedState."""
    with LOCK:
        try:
            yield
        except UnsupportedState:
            raise
        except Exception as error:
            raise UnsupportedState(f"{problem} ({type(error).__name__}: {error})") from error


def refuse(what, problems, do):
    """Raise if there are problems. Name the first ones, and what to do."""
    if problems:
        raise UnsupportedState(f"{what} ({len(problems)}): {', '.join(problems[:5])}; {do}")
