"""Limit what a stranger's configs cost: compare counts with the files, bound time and memory."""

import contextlib
import json
import re
import signal
import sys
import time

from huggingface_hub import constants

from .problems import UnsupportedState, command

# In a config: how many modules or entries the model makes. A number "per" one of them is a width.
COUNTS = re.compile(
    r'"((?!\w*per_)\w*(labels|experts|layers?|blocks?|depths?|stages?|groups|codebooks|quantizers|attention_types))'
    r'": ([^:{}]*)'
)


def check_counts(config, files):
    """Raise if a config counts more than its files can hold, before so large a model is built.

    files: {name of a tensor: the open file that holds it}.
    """
    shapes = [file.get_slice(name).get_shape() for name, file in files.items()]
    rows = [shape[0] for shape in shapes if min(shape, default=0) > 1]  # neither empty nor packed codes
    limits = {"labels": [100_000, *rows], "experts": [1_000, len(files), *rows]}
    for key, kind, counts in COUNTS.findall(json.dumps(config)):
        count = max(map(int, re.findall(r"\d{1,99}", counts)), default=0)
        if count > (most := max(limits.get(kind, [1_000, len(files)]))):
            raise UnsupportedState(
                f"{key} of config.json is {count}, expected at most {most:,} with these files: check it"
            )


@contextlib.contextmanager
def bounded(tensors):
    """In the command, raise if what runs takes too long or makes too many objects; ask no hub.

    tensors: how many are stored. Only a signal interrupts a search for a pattern, so Windows has no bound.
    """
    end = time.monotonic() + 60 + 0.003 * tensors
    most = sys.getallocatedblocks() + 20e6 + 100 * tensors  # 2 GB, 10 kB

    def look(*_):
        if time.monotonic() > end or sys.getallocatedblocks() > most:
            raise UnsupportedState(
                "the model takes too long or too much memory to build: check numbers and patterns in"
                " config.json and adapter_config.json, or call export_checkpoint(), which has no such limit"
            )

    with contextlib.ExitStack() as after:
        if command.get():
            constants.HF_HUB_OFFLINE = True
            if hasattr(signal, "setitimer"):
                signal.signal(signal.SIGALRM, look)
                signal.setitimer(signal.ITIMER_REAL, 1, 1)
                after.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        yield
