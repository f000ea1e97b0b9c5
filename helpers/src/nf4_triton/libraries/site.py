"""A library function that dequantizes, what answers its calls, and the test that both give the same bits."""

import collections
import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import private
from ..core.checks import DTYPES
from ..core.reference import VALUES, exact_weight, same_bits
from ..core.settings import INTERPRETED
from ..core.state import read_rows, read_state
from ..core.supported import UnsupportedState
from ..log import local_rank, say

try:
    from ..core import launch, launch_general
except (ImportError, AttributeError):  # no Triton, or an old one: no function is replaced
    launch = launch_general = None  # type: ignore[assignment]

OFF = "switched off"
KERNEL = "by the kernel"
COMPILED = "used in compiled code, where calls cannot be counted"
ORIGINALS: dict[Callable, Callable] = {}  # of every replacement that was ever made
SCALES = "nested", "flat"
LAYOUTS = [  # what the self-test compares: (quant_type, scales, dtype, blocksize)
    *itertools.product(("nf4", "fp4"), SCALES, DTYPES, (64,)),
    *itertools.product(("nf4",), SCALES, (torch.bfloat16,), [32 << k for k in range(8)]),  # to 4096
]


class UnknownInternals(RuntimeError):
    """A function of a library is missing or takes other arguments, so the library was left unchanged."""


def dequantized(packed, quant_state, weight):
    """Return [(arguments, named arguments, result)]: the self-test's calls of a function that takes
    (packed, quant_state, out=...). weight: PyTorch's."""
    out = torch.full_like(weight, torch.nan)
    return [
        ((packed, quant_state), {}, weight),
        ((packed, quant_state), {"out": out}, weight),
        ((packed.t(), quant_state), {}, weight.t()),
    ]


@dataclass(eq=False)
class Site:
    """A function of a library that dequantizes, and what answers its calls. Threads may miss a few counts."""

    name: str
    answer: Callable  # answer(site, ...): the result of a call; None leaves it to the original
    # calls_of(packed, quant_state, weight): the self-test's calls; none for what the answer always declines
    calls_of: Callable = dequantized
    relaunches: bool = False  # whether the original launches faster than Triton's ordinary path
    original: Any = None
    replacement: Any = None  # None: no self-test has passed
    why_not: str = OFF  # why it does not answer; empty while it does
    calls: collections.Counter = field(default_factory=collections.Counter)  # {by whom and why: eager calls}

    def by_kernel(self, kernel: Callable, *arguments):
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

    def prepare(self, switched: Iterable["Site"]) -> None:
        """Make the replacement and test it, unless it was tested before.

        switched: functions that are on; the original may call or wrap their replacements.
        Raises UnknownInternals for other parameters, and RuntimeError if the self-test fails.
        """
        if self.relaunches and not (launch.CAN_RELAUNCH or INTERPRETED):
            raise RuntimeError("launches cannot be kept here, and this function is faster than Triton's")
        if self.replacement and current(self.name) in (self.original, self.replacement):
            return
        importlib.import_module(self.name.rpartition(".")[0])
        original = current(self.name)
        before = [(site, site.why_not) for site in switched]
        for site, _ in before:
            site.why_not = "a self-test runs"
        try:
            self_test(Site(self.name, self.answer, self.calls_of, original=original, why_not=""))
        finally:
            for site, why_not in before:
                site.why_not = why_not
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
            if known and all(name in names for name in named):
                result = self.answer(self, *arguments, **named)
                if result is not None:
                    return result
            return original(*arguments, **named)

        return replacement


def dequantize_stack(weight, quant_state, shape, rows=None, out=None) -> torch.Tensor:
    """Return a stack of this shape, or its rows: ids or a slice. Raises UnsupportedState."""
    tensors, layout = read_state(weight.reshape(-1, 1), quant_state)
    layout = tuple(shape), *layout[1:]
    selection = None if rows is None else read_rows(rows, tensors, layout)
    return launch_general.dequantize_tensors(tensors, layout, out, selection)


def contents(module) -> dict[str, Any]:
    """Return the names in a module; none of what is no module. Asking it for one may import a lazy module."""
    if issubclass(type(module), types.ModuleType):
        return types.ModuleType.__getattribute__(module, "__dict__")
    return {}


def current(name: str) -> Any:
    """Return what a module refers to by the last part of `name` now, None without the module or the name."""
    module, _, attribute = name.rpartition(".")
    return contents(sys.modules.get(module)).get(attribute)


# The self-test


def self_test(trial: Site) -> None:
    """Compare the original in LAYOUTS, and the kernel in the first two, with PyTorch, bit for bit.

    Raises RuntimeError for other bits, if the original dequantizes no layout, and if the kernel answers no
    call. Where the original raises or returns no tensor it declines a layout: there are no bits to compare.
    """
    replacement = trial.make_replacement(trial.original)
    device = self_test_device()
    # On a CPU bitsandbytes has other zeros in fp4, and compiles code for long blocks, which takes seconds.
    layouts = LAYOUTS if device.type == "cuda" else LAYOUTS[:6]
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        failed = f"{trial.name} failed its self-test"
        declined = compare(trial.original, trial.calls_of, layouts, device, failed)
        if all(declined):
            raise RuntimeError(f"{failed}: {declined[0]}")
        failed = f"the kernel failed the self-test of {trial.name}"
        declined = compare(replacement, trial.calls_of, layouts[:2], device, failed)
    if not trial.calls[KERNEL]:
        declined.append("it answered no call")
    for problem in filter(None, (trial.why_not, *declined)):
        raise RuntimeError(f"{failed}: {problem}")


def compare(function, calls_of, layouts, device, failed) -> list[str]:
    """Compare the bits of each call with PyTorch's. Return why a call declines, "" if it does not, of each.

    failed: how the RuntimeError for other bits begins.
    """
    declined = []
    for layout in layouts:
        for arguments, named, expected in calls_of(*small_layer(device, *layout)):
            try:
                result = function(*arguments, **named)
                same = same_bits(result, expected) and same_bits(named.get("out", result), expected)
            except Exception as error:
                declined.append(f"{type(error).__name__}: {error}".split("\n")[0])
                continue
            if not same:
                how = ", ".join(["{}, {}, {}, blocksize {}".format(*layout), *named])
                raise RuntimeError(f"{failed}: other bits in {how}")
            declined.append("")
    return declined


def self_test_device() -> torch.device:
    """Return the current GPU, or that of LOCAL_RANK if the process has not chosen one yet: a test on GPU 0
    would open a context there for every rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = local_rank()
    chosen = torch.cuda.current_device()
    return torch.device("cuda", chosen or (rank if rank < torch.cuda.device_count() else 0))


def small_layer(device, quant_type, scales, dtype, blocksize) -> tuple:
    """Return (packed, quant_state, PyTorch's weight) of 8 x 4096, with every byte. No block spans two rows,
    where bitsandbytes is wrong on a CPU.

    bitsandbytes quantizes nothing here: it would keep tables in torch's default dtype of this moment.
    """
    # With the device named: transformers' from_pretrained makes torch.linspace ignore `with device`.
    codes = torch.arange(8 * 2048, device=device).to(torch.uint8)
    floats = torch.linspace(-1, 1, 256, dtype=torch.float32, device=device)
    make = importlib.import_module("bitsandbytes.functional").QuantState
    blocks = 8 * 4096 // blocksize
    absmax, offset, second = floats.repeat(4)[:blocks], None, None
    if scales == "nested":
        absmax, offset = codes[:blocks], floats[240]
        second = make(floats[200 : 200 - -blocks // 256], code=floats, blocksize=256, dtype=torch.float32)
    table = torch.tensor(VALUES[quant_type], dtype=torch.float32, device=device)
    shape, packed = torch.Size((8, 4096)), codes.view(-1, 1)
    quant_state = make(absmax, shape, table, blocksize, quant_type, dtype, offset, second)
    return packed, quant_state, exact_weight(*read_state(packed, quant_state))


def small_stack(packed: torch.Tensor) -> tuple:
    """Return (ids, shape) for the small layer as 8 experts of 1 x 4096: repeated, not sorted."""
    return torch.tensor([5, 0, 7, 5], device=packed.device), (8, 1, 4096)
