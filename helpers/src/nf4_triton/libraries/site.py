"""A library function that dequantizes, what answers its calls, and the test that both give the same bits."""

import collections
import contextlib
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

from .. import private
from ..log import local_rank, say
from ..reference import NF4_VALUES, same_bits
from ..settings import INTERPRETED
from ..state import UnsupportedState, read_rows, read_state

try:
    from .. import launch, launch_general
except ImportError:  # no Triton: use_nf4_kernel() says so, and no function is replaced
    launch = launch_general = None  # type: ignore[assignment]

OFF = "switched off"
KERNEL = "by the kernel"
COMPILED = "used in compiled code, where calls cannot be counted"
ORIGINALS: dict[Callable, Callable] = {}  # of every replacement that was ever made


class UnknownInternals(RuntimeError):
    """A function of a library is missing or takes other arguments, so the library was left unchanged."""


def dequantized(function: Callable, packed: torch.Tensor, quant_state) -> Iterable:
    """Return what the self-test compares for functions that take (packed, quant_state)."""
    return function(packed, quant_state), function(packed.t(), quant_state)


@dataclass(eq=False)
class Site:
    """A function of a library that dequantizes, and what answers its calls. Threads may miss a few counts."""

    name: str
    answer: Callable  # answer(site, ...): the result of a call; None leaves it to the original
    results: Callable = dequantized  # results(function, packed, quant_state): what the self-test compares
    relaunches: bool = False  # whether the original launches faster than Triton's ordinary path
    original: Any = None
    replacement: Any = None  # None: no self-test has passed
    why_not: str = OFF  # why it does not answer; empty while it does
    calls: collections.Counter = field(default_factory=collections.Counter)  # {by whom and why: eager calls}

    def dequantize(self, kernel: Callable, *arguments):
        """Return kernel(*arguments), counted, or None if the library has to dequantize."""
        try:
            result = kernel(*arguments)
        except UnsupportedState as error:
            if not private.is_compiling():  # Dynamo cannot trace str(error)
                self.calls[f"by the library: {str(error).split(':')[0]}"] += 1
            return None
        except launch_general.CANNOT_LAUNCH as error:  # no second try: each may compile for seconds
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            self.why_not = f"the kernel could not be launched ({reason})"
            if self.replacement:  # the self-test raises it
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

    def prepare(self) -> None:
        """Make the replacement and test it, unless it was tested before.

        Raises UnknownInternals for other parameters, and RuntimeError if the self-test fails.
        """
        if self.relaunches and not (launch.CAN_RELAUNCH or INTERPRETED):
            raise RuntimeError("launches cannot be kept here, and this function is faster than Triton's")
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
            raise UnknownInternals(
                f"{self.name} has the parameters {have}, expected {parameters}:"
                " this version is unknown and was left unchanged"
            )

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
    tensors, layout = read_state(weight.reshape(-1, 1), quant_state)
    layout = tuple(shape), *layout[1:]
    return launch_general.run_kernel(tensors, layout, selection=read_rows(rows, tensors, layout))


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
    device = self_test_device()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for dtype in (torch.float16, torch.bfloat16):
            try:
                layer = small_layer(dtype, device)
                expected = trial.results(trial.original, *layer)
                same = all(map(same_bits, trial.results(replacement, *layer), expected))
            except Exception as error:
                raise RuntimeError(
                    f"the self-test of {trial.name} failed: {type(error).__name__}: {error}"
                ) from error
            if not same:
                raise RuntimeError(f"the kernel's {dtype} bits differ from those of {trial.name}")
    if trial.why_not or not trial.calls[KERNEL]:
        raise RuntimeError(trial.why_not or f"the kernel refused the self-test of {trial.name}")


def self_test_device() -> torch.device:
    """Return the current GPU, or that of LOCAL_RANK if the process has not chosen one yet: a test on GPU 0
    would open a context there for every rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = local_rank()
    chosen = torch.cuda.current_device()
    return torch.device("cuda", chosen or (rank if rank < torch.cuda.device_count() else 0))


def small_layer(dtype: torch.dtype, device: torch.device) -> tuple:
    """Return (packed, quant_state) of 128 x 192 nested NF4 weights: every byte, two second-level blocks.

    bitsandbytes quantizes nothing here: it would keep tables in torch's default dtype of this moment.
    """
    # With the device named: transformers' from_pretrained makes torch.linspace ignore `with device`.
    codes = torch.arange(128 * 96, device=device).to(torch.uint8)
    floats = torch.linspace(-1, 1, 256, dtype=torch.float32, device=device)
    make = importlib.import_module("bitsandbytes.functional").QuantState
    second = make(absmax=floats[200:202], code=floats, blocksize=256, dtype=torch.float32)
    return codes.view(-1, 1), make(
        absmax=codes[:384], shape=torch.Size((128, 192)), dtype=dtype, blocksize=64, quant_type="nf4",
        code=torch.tensor(NF4_VALUES, dtype=torch.float32, device=device), offset=floats[240], state2=second,
    )  # fmt: skip


def small_stack(packed: torch.Tensor, quant_state) -> tuple:
    """Return (ids, shape) for the small layer as 8 experts of 16 x 192: repeated, not sorted."""
    return torch.tensor([5, 0, 7, 5], device=packed.device), (8, 16, 192)
