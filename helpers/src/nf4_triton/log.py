"""The package's log lines, from one process per host: the logger "nf4_triton"."""

import contextlib
import logging
import os
import sys

log = logging.getLogger("nf4_triton")


def say(text: str, level: int = logging.INFO) -> None:
    """Log on one process per host (LOCAL_RANK 0), through the program's handlers, or to stderr with the
    logger's name in front if there are none. Never raises."""
    if local_rank() > 0:
        return
    with contextlib.suppress(Exception):  # stderr may be closed, or a broken pipe
        if log.hasHandlers():
            log.log(level, text)
        elif level >= max(log.level or logging.INFO, log.manager.disable + 1):
            print(f"{log.name}: {text}", file=sys.stderr)


def local_rank() -> int:
    """Return LOCAL_RANK, the number of this process on its host, or 0 if it is missing or not a number."""
    with contextlib.suppress(ValueError):
        return int(os.environ.get("LOCAL_RANK", "0"))
    return 0
