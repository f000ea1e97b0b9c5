"""NF4_TRITON=1: use the kernel in a script without changing a line of it.

bitsandbytes calls `load` during its own import (entry point nf4_triton.autoload:load), which fails if `load`
raises. The switch waits for the first Linear4bit: by then Unsloth, PEFT, and transformers are imported.
"""

import functools
import importlib
import logging
import os

from .log import say

ON = ("1", "true", "on", "yes")
OFF = ("", "0", "false", "off", "no")
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
                importlib.import_module(f"{__package__}.libraries.switch").use_nf4_kernel()
            except Exception as error:
                say(f"NF4_TRITON=1 has no effect: {error}", logging.WARNING)
        original(self, *arguments, **named)

    return __init__
