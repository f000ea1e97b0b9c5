"""NF4_TRITON=1: use the kernel in a script without changing a line of it.

bitsandbytes calls `load` during its own import (entry point nf4_triton.autoload:load), which fails if `load`
raises. The switch waits for the first Linear4bit or QuantState: by then Unsloth, PEFT, and transformers are
imported, and nothing has been dequantized.
"""

import atexit
import functools
import importlib
import logging
import multiprocessing
import os

import torch

from .log import say

ON = ("1", "true", "on", "yes")
OFF = ("", "0", "false", "off", "no")
waiting: list = []  # not empty until the switch is made; use_nf4_kernel and restore clear it


def load() -> None:
    """With NF4_TRITON=1 switch the kernel on when the first Linear4bit or QuantState is created."""
    value = os.environ.get("NF4_TRITON", "").strip().lower()
    if value in OFF:
        return
    if value not in ON:
        say(f"NF4_TRITON={value} has no effect, expected one of {ON} or {OFF[1:]}", logging.WARNING)
        return
    try:
        _switch_before(importlib.import_module("bitsandbytes.nn.modules").Linear4bit)
        # Without a layer: replace_parameter_4bit, functional calls, vLLM, SGLang, Axolotl with FSDP2.
        _switch_before(importlib.import_module("bitsandbytes.functional").QuantState)
        waiting.append(True)
        atexit.register(_say_unused)
    except Exception as error:
        say(f"NF4_TRITON=1 has no effect: {type(error).__name__}: {error}", logging.WARNING)


def _switch_before(waits_for) -> None:
    original = waits_for.__init__

    @functools.wraps(original)
    def __init__(self, *arguments, **named):
        if waiting:
            _switch_on()
        original(self, *arguments, **named)

    waits_for.__init__ = __init__


@torch.compiler.disable  # a state may be made in compiled code; Dynamo must not trace the self-test
def _switch_on() -> None:
    waiting.clear()
    try:
        switch = importlib.import_module(f"{__package__}.libraries.switch").use_nf4_kernel()
        atexit.register(_report, switch)
    except Exception as error:
        say(f"NF4_TRITON=1 has no effect: {error}", logging.WARNING)


def _report(switch) -> None:
    """At the end of a process, but not of a data loader's worker, log what was dequantized, and by whom."""
    if switch.calls and multiprocessing.parent_process() is None:
        say(str(switch))


def _say_unused() -> None:
    """At the end of a process that used a GPU, say that no 4-bit weight was made. A launcher uses none."""
    if waiting and torch.cuda.is_initialized() and multiprocessing.parent_process() is None:
        say(
            "NF4_TRITON=1 had no effect: this process made no Linear4bit and no QuantState. After torch.load"
            " of a whole model, call use_nf4_kernel().",
            logging.WARNING,
        )
