"""A library function that dequantizes, and its replacement."""

import collections
import functools
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import private
from ..core.settings import INTERPRETED
from ..core.state import read_rows, read_state
from ..core.supported import UnsupportedState
from ..log import say
from .self_test import dequantized, self_test

try:
    from ..core import launch, launch_general
except (ImportError, AttributeError):  # no Triton, or an old version: no function is replaced
    launch = launch_general = None  # type: ignore[assignment]

OFF = "switched off"
KERNEL = "by the kernel"
COMPILED = "used in compiled code, where calls cannot be counted"
ORIGINALS: dict[Callable, Callable] = {}  # {replacement: original}, of all that were ever made


class UnknownInternals(RuntimeError):
    """A function of a library is missing or takes other arguments, so the library was left unchanged."""


@dataclass(eq=False)
class Site:
    """A library function that dequantizes, and its replacement. With threads, some calls may go uncounted."""

    name: str
    answer: Callable  # answer(site, ...): the result of a call; None leaves it to the original
    # calls_of(packed, quant_state, weight): the self-test's calls, but none that `answer` always declines
    calls_of: Callable = dequantized
    relaunches: bool = False  # whether the original launches faster than Triton's kernel[grid]
    original: Any = None
    replacement: Any = None  # None: no self-test has passed
    why_not: str = OFF  # why calls go to the original; empty while the kernel answers them
    calls: collections.Counter = field(default_factory=collections.Counter)  # {by whom and why: eager calls}

    def by_kernel(self, kernel: Callable, *arguments):
        """Return kernel(*arguments), counted, or None if the library has to dequantize."""
        try:
            result = kernel(*arguments)
        except UnsupportedState as error:
            if not private.is_compiling():  # Dynamo cannot trace str(error)
                self.calls[f"by the library: {str(error).split(':')[0]}"] += 1
            return None
        except launch_general.CANNOT_LAUNCH as error:  # no second try: each could compile for seconds
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            self.why_not = f"the kernel could not be launched ({reason})"
            if self.replacement:  # during its self-test, an error says so
                say(f"Left to the library: {self.name}: {self.why_not}", logging.WARNING)
            return None
        if private.is_compiling():
            self.note_compiled()
        else:
            self.calls[KERNEL] += 1
        return result

    @torch.compiler.assume_constant_result  # runs once, when Dynamo traces a call
    def note_compiled(self) -> None:
        self.calls[COMPILED] = 0

    def prepare(self, switched: Iterable["Site"]) -> None:
        """Make the replacement and test it, unless that was done before.

        switched: functions that are on; the original may call or wrap their replacements.
        Raises UnknownInternals for other parameters, and RuntimeError if the self-test fails.
        """
        if self.relaunches and not (launch.CAN_RELAUNCH or INTERPRETED):
            raise RuntimeError("launches cannot be cached here, and this function is faster than Triton's")
        if self.replacement and current(self.name) in (self.original, self.replacement):
            return
        importlib.import_module(self.name.rpartition(".")[0])
        original = current(self.name)
        before = [(site, site.why_not) for site in switched]
        for site, _ in before:
            site.why_not = "a self-test runs"
        try:
            trial = Site(self.name, self.answer, self.calls_of, original=original, why_not="")
            self_test(trial, trial.make_replacement(original))
            if not trial.calls[KERNEL]:
                raise RuntimeError(f"the kernel failed the self-test of {self.name}: it handled no call")
        finally:
            for site, why_not in before:
                site.why_not = why_not
        replacement = self.make_replacement(original)
        ORIGINALS[replacement] = original  # first: restore() must know every replacement
        self.replacement, self.original = replacement, original

    def make_replacement(self, original: Callable) -> Callable:
        """Return a function that answers calls with known arguments and passes others to the original."""
        answer = inspect.getfullargspec(self.answer)
        parameters = answer.args[1:]
        names = parameters + answer.kwonlyargs
        have = list(inspect.signature(original).parameters) if inspect.isfunction(original) else []
        if have[: len(parameters)] != parameters:
            raise UnknownInternals(
                f"{self.name} has the parameters {have}, expected {parameters}:"
                " this version is unknown and was left unchanged"
            )

        @functools.wraps(original, updated=())  # with its name and module it pickles as the original does
        def replacement(*arguments, **named):
            known = not self.why_not and len(arguments) <= len(parameters)
            if known and all(name in names for name in named):
                result = self.answer(self, *arguments, **named)
                if result is not None:
                    return result
            return original(*arguments, **named)

        return replacement


def dequantize_stack(weight, quant_state, shape, rows=None, out=None) -> torch.Tensor:
    """Return a stack of experts of this shape, or its rows: ids or a slice. Raises UnsupportedState."""
    tensors, layout = read_state(weight.reshape(-1, 1), quant_state)
    layout = tuple(shape), *layout[1:]
    selection = None if rows is None else read_rows(rows, tensors, layout)
    return launch_general.dequantize_tensors(tensors, layout, out, selection)


def contents(module) -> dict[str, Any]:
    """Return a module's __dict__, {} for anything else. Plain attribute access may import a lazy module."""
    if issubclass(type(module), types.ModuleType):
        return types.ModuleType.__getattribute__(module, "__dict__")
    return {}


def current(name: str) -> Any:
    """Return the object that a full name refers to now, or None if its module or its last part is missing."""
    module, _, attribute = name.rpartition(".")
    return contents(sys.modules.get(module)).get(attribute)
