"""NF4_TRITON=1: the kernel in a script of which no line is changed.

bitsandbytes loads the entry point (`nf4_triton.autoload:load` in the group `bitsandbytes.backends`) in
the middle of its own import, before it has a version, and turns any exception into a failed import. So
this module imports nothing but the standard library, `load` reads the variable first and lets nothing
out, and the switch itself waits for bitsandbytes' first use: a quantization, a decode or a product.
"""

import functools
import importlib
import os
import pkgutil
import sys
import threading
import types

VARIABLE = "NF4_TRITON"
FUNCTIONS = (
    "bitsandbytes.functional:quantize_4bit",
    "bitsandbytes.functional:dequantize_4bit",
    "bitsandbytes.autograd._functions:matmul_4bit",
)
_lock = threading.RLock()


def load() -> None:
    """What bitsandbytes calls. Without the variable (or with 0) it does nothing at all."""
    if os.environ.get(VARIABLE, "0").strip().lower() in ("", "0", "false", "off", "no"):
        return
    try:
        waiting = {id(original): _wait(original) for original in map(pkgutil.resolve_name, FUNCTIONS)}
        for module, attribute, value in references(("bitsandbytes",)):
            if id(value) in waiting:
                setattr(module, attribute, waiting[id(value)])
    except Exception as error:
        _say(f"has no effect: {type(error).__name__}: {error}")


def forget() -> bool:
    """Put bitsandbytes' functions back that still wait for their first use; were there any?"""
    held = [row for row in references(("bitsandbytes",)) if type(row[2]) is types.FunctionType]
    waiting = [row for row in held if getattr(row[2], "nf4_waits", None) is row[2]]
    for module, attribute, value in waiting:
        setattr(module, attribute, value.__wrapped__)
    return bool(waiting)


def _wait(original):
    @functools.wraps(original, updated=())
    def function(*arguments, **named):
        if sys.modules["torch"].compiler.is_compiling():  # an eager call makes the switch
            return original(*arguments, **named)
        with _lock:
            if forget():
                try:
                    _say(str(importlib.import_module(__package__).use_nf4_kernel(quiet=True)))
                except Exception as error:
                    _say(f"has no effect: {error}")
        integrate = sys.modules.get(f"{__package__}.integrate")
        return (integrate.stand_in_of(original) if integrate else original)(*arguments, **named)

    function.nf4_waits = function  # a wrapper by functools.wraps gets the mark, and is another function
    return function


def references(packages: tuple = ("",)):
    """(module, attribute, value) of every name in the modules of these packages that are imported."""
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", "")).lower()
        if isinstance(module, types.ModuleType) and name.startswith(packages):
            for attribute, value in list(vars(module).items()):
                yield module, attribute, value


def _say(text: str) -> None:
    print(f"{VARIABLE}=1: {text}", file=sys.stderr)
