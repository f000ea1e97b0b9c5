"""The export's errors: what is wrong, what was expected, and what to do."""

import contextlib
import contextvars
import re
import threading

from .. import log
from ..core import supported

LOCK = threading.RLock()  # around what transformers and PEFT do: their lazy imports race
command = contextvars.ContextVar("command", default=False)  # whether this process is the command's own


class UnsupportedState(supported.UnsupportedState):
    """An UnsupportedState whose text is safe to print in a terminal."""

    def __str__(self):
        return spoken(super().__str__())


def spoken(text) -> str:
    """Return a text in one line. Control characters, which names in files can hold, are escaped.

    Texts name options of the command; from Python, --load-dtype becomes load_dtype.
    """
    if not command.get():
        text = re.sub(r"(?<!\S)--([a-z-]+)", lambda option: option[1].replace("-", "_"), text)
    return repr(" ".join(text.split())[:2000])[1:-1].replace("\\'", "'")


def say(text):
    """Log a text."""
    log.say(spoken(text))


@contextlib.contextmanager
def library(problem):
    """Hold the lock, and raise what a library raises as an UnsupportedState."""
    with LOCK:
        try:
            yield
        except supported.UnsupportedState:
            raise
        except Exception as error:  # a traceback would show its own text, which is not escaped
            raise UnsupportedState(f"{problem} ({type(error).__name__}: {error!s:.300})") from None


def refuse(what, problems, do):
    """Raise if there are problems. Name the first ones, and what to do."""
    if problems:
        raise UnsupportedState(f"{what} ({len(problems)}): {', '.join(problems[:5])}; {do}")
