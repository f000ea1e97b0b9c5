"""The one way in which this project runs Python in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from helpers.machine.environment import ROOT


class ChildFailed(RuntimeError):
    """The process failed or did not end in time; the text holds the end of what it printed."""


class Done(NamedTuple):
    """How a process ended: `status` is None where it was ended after its time, negative after a signal."""

    status: int | None
    out: str
    err: str


def python(
    arguments: Sequence[str],
    *,
    variables: Mapping[str, str | None] | None = None,
    folder: Path | str = ROOT,
    stdin: str = "",
    timeout: float = 300,
    check: bool = True,
) -> Done:
    """Run this Python with `arguments` ("-m", "helpers.x", ... or "-c", code) in `folder`.

    The repository is on its path wherever it runs. variables: added to the environment; None removes one.
    After `timeout` seconds it is ended with all processes it started. check: raise ChildFailed unless its
    status is 0.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, timeout)
        done = Done(process.returncode, out, err)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started: they share a session
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        done = Done(None, *process.communicate())
    if check and done.status != 0:
        how = f"did not end within {timeout:g} s" if done.status is None else f"ended with {done.status}"
        text = f"{done.out.strip()[-2000:]}\n{done.err.strip()[-6000:]}".strip()
        raise ChildFailed(f"python {' '.join(map(str, arguments))[:300]} {how}:\n{text}")
    return done
