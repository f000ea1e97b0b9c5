"""NF4_TRITON=1: use the kernel in a script without changing a line of it. Also what the package logs.

bitsandbytes calls `load` during its own import (entry point nf4_triton.autoload:load), which fails if `load`
raises. The switch waits for the first Linear4bit: by then Unsloth, PEFT, and transformers are imported.
"""

import contextlib
import functools
import importlib
import logging
import os

ON = ("1", "true", "on", "yes")
OFF = ("", "0", "false", "off", "no")
log = logging.getLogger("nf4_triton")
waiting: list = []  # not empty until the switch is made; use_nf4_kernel and restore clear it


def load() -> None:
    """With NF4_TRITON=1 switch the kernel on when the first Linear4bit is created."""
    value = os.environ.get("NF4_TRITON", "").strip().lower()
    if value in OFF:
        return
    if value not in ON:
        say(f"NF4_TRITON={value} has no effect, expected one of {ON} or {OFF[1:]}", logging.WARNING)
        return
    try:
        layer = importlib.import_module("bitsandbytes.nn.modules").Linear4bit
        layer.__init__ = _switch_before(layer, layer.__init__)
        waiting[:] = [layer]
    except Exception as error:
        say(f"NF4_TRITON=1 has no effect: {type(error).__name__}: {error}", logging.WARNING)


def _switch_before(layer, original):
    @functools.wraps(original)
    def __init__(self, *arguments, **named):
        if layer.__init__ is __init__:
            layer.__init__ = original
        if waiting:
            waiting.clear()
            try:
                switch = importlib.import_module(f"{__package__}.libraries.switch")
                say(f"NF4_TRITON=1: {switch.use_nf4_kernel(quiet=True)}")
            except Exception as error:
                say(f"NF4_TRITON=1 has no effect: {error}", logging.WARNING)
        original(self, *arguments, **named)

    return __init__


def say(text: str, level: int = logging.INFO) -> None:
    """Log on one process per host (LOCAL_RANK 0), by the program's handlers; without any, to stderr with the
    logger's name in front. Never raises."""
    if local_rank() > 0:
        return
    with contextlib.suppress(Exception):  # stderr may be closed, or a broken pipe
        if log.hasHandlers():
            log.log(level, "%s", text)
        elif level >= max(log.level or logging.INFO, log.manager.disable + 1):
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            handler.handle(log.makeRecord(log.name, level, "", 0, text, (), None))


def local_rank() -> int:
    """Return LOCAL_RANK, the number of this process on its host; 0 if it is missing or no such number."""
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() and len(rank) < 10 else 0
