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

from .environment import ON, word
from .log import say

waiting: list = []  # not empty from load() until the first layer or state
made: list = []  # the switch, once it is made


def load() -> None:
    """With NF4_TRITON=1 switch the kernel on when the first Linear4bit or QuantState is created."""
    try:
        if word("NF4_TRITON") not in ON:
            return
        _switch_before(importlib.import_module("bitsandbytes.nn.modules").Linear4bit)
        # Without a layer: replace_parameter_4bit, functional calls, vLLM, SGLang, Axolotl with FSDP2.
        _switch_before(importlib.import_module("bitsandbytes.functional").QuantState)
        waiting.append(True)
        atexit.register(_report, os.getpid())
    except Exception as error:
        say(f"NF4_TRITON has no effect: {error}", logging.WARNING)
        del os.environ["NF4_TRITON"]  # or each process that this one starts says so again


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
        from .libraries import switch

        if not switch.was_called:  # else the program decides
            made.append(switch.use_nf4_kernel())
    except Exception as error:
        say(f"NF4_TRITON has no effect: {error}", logging.WARNING)


def _report(process: int) -> None:
    """At the end of this process, log what was dequantized, and by whom, or that no 4-bit weight was made.

    A process that it forked, a data loader's worker, and a launcher, which uses no GPU, log nothing.
    """
    if os.getpid() != process or multiprocessing.parent_process():
        return
    for switch in made:
        if switch.calls:
            say(str(switch))
    if waiting and torch.cuda.is_initialized():
        say(
            "NF4_TRITON=1 had no effect: this process made no Linear4bit and no QuantState. After torch.load"
            " of a whole model, call use_nf4_kernel().",
            logging.WARNING,
        )
