"""Start processes from tests."""

import os
import subprocess
import sys
from typing import NamedTuple

from helpers import machine


class Done(NamedTuple):
    """A process's output."""

    out: str
    err: str


def python(arguments, *, variables=None, folder=machine.ROOT, timeout=300, check=True):
    """Run this Python with `arguments` ("-m", "helpers.x", ... or "-c", code) in `folder`.

    It can import what this process can. variables: added to the environment; None removes one. check: raise
    RuntimeError, with what it printed, unless its status is 0.
    """
    path = os.pathsep.join([str(machine.ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check and done.returncode:
        raise RuntimeError(f"python {arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return Done(done.stdout, done.stderr)
