"""How this room refuses: what is wrong, what was expected, and what to do."""

import contextlib
import logging
import threading

from ..core.state import UnsupportedState

LOCK = threading.RLock()  # around what transformers and PEFT do: their lazy imports race


@contextlib.contextmanager
def library(problem):
    """Hold the lock, and raise what a library raises as an UnsupportedState, without its table of names."""
    thread, report = threading.get_ident(), logging.getLogger("transformers.modeling_utils")

    def of_others(record):
        return record.thread != thread

    with LOCK:
        report.addFilter(of_others)
        try:
            yield
        except UnsupportedState:
            raise
        except Exception as error:
            raise UnsupportedState(f"{problem} ({type(error).__name__}: {error})") from error
        finally:
            report.removeFilter(of_others)


def refuse(what, problems, do):
    """Raise if there are problems. Name the first ones, and what to do."""
    if problems:
        raise UnsupportedState(f"{what} ({len(problems)}): {', '.join(problems[:5])}; {do}")
