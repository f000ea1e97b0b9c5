"""A library function that dequantizes, what answers its calls, and the test that both give the same bits."""

import collections
import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import launch_general, private
from ..kernel import INTERPRETED
from ..log import local_rank, say
from ..reference import same_bits
from ..state import UnsupportedState, read_state

# bitsandbytes makes these tables at their first use, in torch's default dtype of that moment.
TABLES = ("bitsandbytes.functional.name2qmap", "bitsandbytes.backends.utils._code_4bit_cache")
MOST_FAILURES = 3  # each may have compiled for seconds
OFF = "switched off"
ORIGINALS: dict[Callable, Callable] = {}  # of every replacement that was ever made


class UnknownInternals(RuntimeError):
    """A function of a library is missing or takes other arguments, so the library was left unchanged."""


def dequantized(function: Callable, packed: torch.Tensor, quant_state) -> Iterable:
    """Return what the self-test compares for functions that take (packed, quant_state)."""
    return function(packed, quant_state), function(packed.t(), quant_state)


@dataclass(eq=False)
class Site:
    """A function of a library that dequantizes, and what answers its calls.

    Calls in compiled code are not counted; concurrent threads may miss a few.
    """

    name: str
    answer: Callable  # answer(site, ...): the result of a call; None leaves it to the original
    results: Callable = dequantized  # results(function, packed, quant_state): what the self-test compares
    replays: bool = False  # whether the original launches faster than Triton's ordinary path
    original: Any = None
    replacement: Any = None  # None: no self-test has passed
    why_not: str = OFF  # why it does not answer; empty while it does
    failures: int = 0
    answered: int = 0  # calls that the kernel dequantized for
    reasons: collections.Counter = field(default_factory=collections.Counter)  # why the library did, of calls

    def dequantize(self, kernel: Callable, *arguments):
        """Return kernel(*arguments), counted, or None if the library has to dequantize."""
        try:
            result = kernel(*arguments)
        except UnsupportedState as error:
            if not private.is_compiling():  # Dynamo cannot trace str(error)
                self.reasons[str(error).split(":")[0]] += 1
            return None
        except launch_general.CANNOT_LAUNCH as error:
            self.reasons[self.fail(error)] += 1
            return None
        if not private.is_compiling():
            self.answered += 1
        return result

    def fail(self, error: Exception) -> str:
        """Note a launch that failed, and return why. The first is logged; the last stops this site."""
        why = f"the kernel could not be launched ({type(error).__name__}: {error})"
        self.failures += 1
        if self.failures == 1:
            say(f"{self.name} falls back to the library: {why}", logging.WARNING)
        if self.failures == MOST_FAILURES:
            self.why_not = why
        return why

    def exists(self) -> bool:
        """Return whether the library was imported as far as this function's package, and has its module."""
        module = self.name.rpartition(".")[0]
        package = module.rpartition(".")[0]
        return module in sys.modules or (package in sys.modules and bool(importlib.util.find_spec(module)))

    def prepare(self) -> None:
        """Make the replacement and test it, unless it was tested before.

        Raises UnknownInternals for other parameters, and RuntimeError if the self-test fails.
        """
        self.failures = 0
        if self.replays and not (launch_general.CAN_RELAUNCH or INTERPRETED):
            raise RuntimeError("launches cannot be replayed here, and this function is faster than Triton's")
        if self.replacement and current(self.name) in (self.original, self.replacement):
            return
        importlib.import_module(self.name.rpartition(".")[0])
        original = current(self.name)
        # The original may wrap an earlier replacement.
        before, self.why_not = self.why_not, "its self-test runs"
        try:
            self_test(Site(self.name, self.answer, self.results, original=original, why_not=""))
        finally:
            self.why_not = before
        replacement = self.make_replacement(original)
        ORIGINALS[replacement] = original  # first: restore() must know every replacement
        self.replacement, self.original = replacement, original

    def make_replacement(self, original: Callable) -> Callable:
        """Return a function that answers calls with known arguments and passes on the others."""
        answer = inspect.getfullargspec(self.answer)
        parameters = answer.args[1:]
        names = parameters + answer.kwonlyargs
        have = list(inspect.signature(original).parameters) if inspect.isfunction(original) else []
        if have[: len(parameters)] != parameters:
            problem = f"{self.name} has the parameters {have}, expected {parameters}"
            raise UnknownInternals(f"{problem}: this version is unknown and was left unchanged")

        @functools.wraps(original, updated=())  # with its name and module it pickles as the original does
        def replacement(*arguments, **named):
            known = not self.why_not and len(arguments) <= len(parameters)
            for name in named:
                known = known and name in names
            if known:
                result = self.answer(self, *arguments, **named)
                if result is not None:
                    return result
            return original(*arguments, **named)

        return replacement


def dequantize_rows(weight, quant_state, shape, rows) -> torch.Tensor:
    """Return these rows, ids or a slice, of a stack of this shape. Raises UnsupportedState."""
    packed = read_state(weight.reshape(-1, 1), quant_state)
    if len(shape) != 3 or math.prod(shape) != math.prod(packed.shape):
        raise UnsupportedState(
            f"a state of shape {tuple(packed.shape)} is not that of the stack {tuple(shape)}"
        )
    return launch_general.dequantize_packed(packed._replace(shape=tuple(shape)), rows=rows)


def contents(module) -> dict[str, Any]:
    """Return the names in a module; none of what is no module. Asking it for one may import a lazy module."""
    if issubclass(type(module), types.ModuleType):
        return types.ModuleType.__getattribute__(module, "__dict__")
    return {}


def current(name: str) -> Any:
    """Return what a module refers to by the last part of `name` now, None without the module or the name."""
    module, _, attribute = name.rpartition(".")
    return contents(sys.modules.get(module)).get(attribute)


# The self-test: what a function, the library's or its replacement, returns for a small layer


def self_test(trial: Site) -> None:
    """Raise RuntimeError unless a replacement returns the original's bits, and the kernel made them."""
    replacement = trial.make_replacement(trial.original)
    with without_trace(self_test_device()) as device:
        for dtype in (torch.float16, torch.bfloat16):
            try:
                layer = small_layer(dtype, device)
                expected = trial.results(trial.original, *layer)
                same = all(map(same_bits, trial.results(replacement, *layer), expected))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise RuntimeError(f"the self-test of {trial.name} failed: {problem}") from error
            if not same:
                raise RuntimeError(f"the kernel's {dtype} bits differ from those of {trial.name}")
    if not trial.answered:
        raise RuntimeError(f"the kernel refused the self-test of {trial.name}")


def self_test_device() -> torch.device:
    """Return the current GPU, or that of LOCAL_RANK if the process has not chosen one yet: a test on GPU 0
    would open a context there for every rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = local_rank()
    chosen = torch.cuda.current_device()
    return torch.device("cuda", chosen or (rank if rank < torch.cuda.device_count() else 0))


@contextlib.contextmanager
def without_trace(device: torch.device) -> Iterator[torch.device]:
    """Run on a device, in float32, and put bitsandbytes' tables back as they were.

    Models are often created on "meta", or with another default dtype.
    """
    tables = [table for table in map(current, TABLES) if isinstance(table, dict)]
    copies = [table.copy() for table in tables]
    dtype = torch.get_default_dtype()
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        torch.set_default_dtype(torch.float32)
        with guard, device:
            yield device
    finally:
        torch.set_default_dtype(dtype)
        for table, copy in zip(tables, copies, strict=True):
            table.clear()
            table.update(copy)


def small_layer(dtype: torch.dtype, device: torch.device) -> tuple:
    """Return (packed, quant_state) of 128 x 192 nested NF4 weights: every code, two second-level blocks."""
    # With the device named: transformers' from_pretrained makes torch.linspace ignore `with device`.
    values = torch.linspace(-1, 1, 128 * 192, dtype=torch.float32, device=device)
    values *= torch.sin(values * 2**16)
    quantize = importlib.import_module("bitsandbytes.functional").quantize_4bit
    return quantize(values.view(128, 192).to(dtype), quant_type="nf4", compress_statistics=True)


def small_stack(packed: torch.Tensor, quant_state) -> tuple:
    """Return (ids, shape) for the small layer as 8 experts of 16 x 192: repeated, not sorted."""
    return torch.tensor([5, 0, 7, 5], device=packed.device), (8, 16, 192)
