"""Switch the kernel on and off in the libraries people fine-tune with: one call, the same bits, reversible.

`use_nf4_kernel` replaces the functions of sites.SITES in every imported module of PACKAGES that refers to
them. A function is replaced if it takes the expected parameters and its self-test is bit-identical. One that
fails is left to the library. print(switch) lists it, and names that your own script imported before the call.
A state that the kernel does not accept goes to the library's own function, counted.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.torch_version import TorchVersion

from . import autoload
from .backend import cannot_run
from .sites import (
    COUNTS,
    OLDEST,
    OWN_KERNELS,
    SITES,
    Site,
    cannot_replay,
    current,
    local_rank,
    self_test,
    self_test_device,
)

# Packages whose modules are searched; Unsloth writes and imports modules of its own ("unsloth_compiled...").
PACKAGES = ("bitsandbytes", "unsloth", "axolotl", "peft", "transformers", "trl", "accelerate", "vllm")
THROUGH = {"peft": "bitsandbytes", "transformers": "bitsandbytes"}  # who dequantizes for them
log = logging.getLogger("nf4_triton")
_lock = threading.RLock()


class UnknownInternals(RuntimeError):
    """A function of a library is missing or takes other arguments, so the library was left unchanged."""


@dataclass(eq=False)
class Library:
    """Sites that are switched together, and the switches that keep them on."""

    name: str
    sites: tuple[Site, ...]
    on: bool = False
    left: dict[str, str] = field(default_factory=dict)  # {function: why it was not replaced}
    holders: set["Switch"] = field(default_factory=set)

    @property
    def replaced(self) -> list[Site]:
        return [site for site in self.sites if site.replacement]

    def switch_on(self) -> None:
        """Replace the functions that pass their self-test. Raises if the first one does not."""
        if not self.on:
            self.on = True  # for the self-tests
            self.left = {}
            for site in self.sites:
                if why := self._prepare(site):
                    self.left[site.name] = why
        if not self.replaced:
            raise RuntimeError("; ".join(self.left.values()))
        replacements = {id(site.original): site.replacement for site in self.replaced}
        # Also if it was on: modules imported since may hold the originals.
        for module, attribute, value in _references(PACKAGES):
            if id(value) in replacements:
                setattr(module, attribute, replacements[id(value)])

    def _prepare(self, site: Site) -> str | None:
        """Give a site a replacement that passed its self-test. Return why it was not replaced, or None."""
        site.failures, site.stopped = 0, ""
        if site.replays and (why := cannot_replay()):
            site.replacement = None
            return f"{why}, and this function launches faster than Triton's ordinary path"
        if site.replacement and current(site.name) in (site.original, site.replacement):
            return None  # tested before
        site.replacement = None
        try:
            if site.exists():
                site.replacement = self._replacement(site)
        except Exception as error:
            if site is self.sites[0]:
                raise
            return str(error)
        return None

    def _replacement(self, site: Site):
        importlib.import_module(site.name.rpartition(".")[0])
        answer = inspect.getfullargspec(site.answer)
        parameters = answer.args[1:]
        names = parameters + answer.kwonlyargs
        require_parameters(site.name, parameters)
        original = site.original = current(site.name)

        @functools.wraps(original, updated=())  # with its name and module it pickles as the original does
        def replacement(*arguments, **named):
            known = self.on and not site.stopped and len(arguments) <= len(parameters)
            for name in named:
                known = known and name in names
            if known:
                result = site.answer(site, *arguments, **named)
                if result is not None:
                    return result
            return original(*arguments, **named)

        self_test(site, replacement)
        return replacement

    def remove(self) -> None:
        """Put the library's own functions back in all modules."""
        self.on = False  # a replacement that this search misses then just calls the original
        self.holders.clear()
        originals = {id(site.replacement): site.original for site in self.replaced}
        for module, attribute, value in _references():
            if id(value) in originals:
                with contextlib.suppress(Exception):  # a module that cannot be written keeps the replacement
                    setattr(module, attribute, originals[id(value)])


LIBRARIES = {name: Library(name, sites) for name, sites in SITES.items()}


class Switch(contextlib.AbstractContextManager):
    """What one call of use_nf4_kernel did. `off()` or the end of its `with` block undoes it.

    libraries: switched on, as a tuple of names in LIBRARIES; refused: {library: why it was not}.
    str(switch) says all of it.
    """

    def __init__(self, names: tuple[str, ...]):
        self.names = names  # as named in the call
        self.libraries: tuple[str, ...] = ()
        self.refused: dict[str, str] = {}
        self._before: dict[str, tuple] = {}  # counts and reasons when this switch began

    @property
    def on(self) -> bool:
        """Whether this switch still holds a library."""
        return any(self in library.holders for library in self._held())

    @property
    def left(self) -> dict[str, str]:
        """{function: why it was not replaced}, in the libraries that are switched on."""
        left = {name: why for library in self._held() for name, why in library.left.items()}
        return left | {site.name: site.stopped for site in self._sites() if site.stopped}

    @property
    def late(self) -> list[str]:
        """Libraries that were imported after the call, which therefore still dequantize by themselves."""
        seen = {*self.libraries, *self.refused}
        return [name for name in LIBRARIES if not self.names and name in sys.modules and name not in seen]

    @property
    def partial(self) -> bool:
        """Whether imported libraries still dequantize something themselves."""
        refused = any(name in sys.modules for name in self.refused)
        return bool(self.libraries and (self.left or self.late or refused))

    @property
    def sites(self) -> list[Site]:
        return [site for site in self._sites() if not site.stopped]

    def off(self) -> None:
        """Put the libraries' own functions back, unless another open switch holds them."""
        with _lock:
            for library in self._held():
                library.holders.discard(self)
                if library.on and not library.holders:
                    library.remove()

    def __enter__(self) -> "Switch":
        if self.libraries and not self.on:
            raise RuntimeError("this switch is off, and stays off: call use_nf4_kernel() for a new one")
        return self

    def __exit__(self, *_) -> None:
        self.off()

    def counts(self) -> dict[str, dict]:
        """Return, for each function, the eager calls since this switch.

        {"kernel": dequantized by the kernel, "library": by the library, "reasons": {why: calls}, "fused":
        products that bitsandbytes forms without dequantizing}.
        """
        counts = {}
        for site in self._sites():
            before, reasons = self._before[site.name]
            row = {kind: site.counts[kind] - before[kind] for kind in COUNTS}
            counts[site.name] = row | {"reasons": site.reasons - reasons}
        return counts

    def summary(self) -> str:
        """Return one sentence: how many dequantizations the libraries did themselves."""
        if not self.libraries:
            return "The kernel was not used: the libraries dequantized everything."
        rows = self.counts().values()
        by_kernel, by_library = (sum(row[who] for row in rows) for who in ("kernel", "library"))
        text = f"{by_library} of {by_kernel + by_library} dequantizations went through the library"
        if by_kernel + by_library == 0:
            text = "No dequantization was counted: calls in compiled code and fused products are not"
        missing = [*self.left, *self.late]
        return f"{text}; not counted: {', '.join(missing)}" if missing else text

    def __repr__(self) -> str:
        libraries = ", ".join(self.libraries) or "nothing"
        return f"<nf4_triton.Switch of {libraries}: {'on' if self.on else 'off'}>"

    def __str__(self) -> str:
        names = [site.name for site in self.sites]
        if names and not self.on:
            still_on = any(library.on for library in self._held())
            text = "off, but still on for another switch:" if still_on else "off. It had replaced:"
            return f"Switched {text} {', '.join(names)}."
        lines = ["The NF4 kernel is not used."]
        if names:
            part = " in part" if self.partial else ""
            lines = [f"The NF4 kernel works here{part}. It dequantizes in:"]
            lines += [f"  {name}" for name in names]
            if why := cannot_replay():
                lines.append(f"Calls take longer: {why}.")
        if "bitsandbytes" in self.libraries:
            lines.append("PEFT and transformers dequantize through bitsandbytes.")
        lines += [f"Left to the library: {name}: {why}" for name, why in self.left.items()]
        lines += [f"Not replaced: {name}: {why}" for name, why in _not_replaced(self.sites).items()]
        lines += [f"Not in {name}: {why}" for name, why in self.refused.items()]
        lines += [f"Not in {name}: it was imported later; call use_nf4_kernel() again" for name in self.late]
        changed = [site.name for site in self.sites if current(site.name) is not site.replacement]
        lines += [f"Since then {name} was wrapped or replaced by another library." for name in changed]
        return "\n".join(lines)

    def _held(self) -> list[Library]:
        return [LIBRARIES[name] for name in self.libraries]

    def _sites(self) -> list[Site]:
        return [site for library in self._held() for site in library.replaced]

    def _switch_on(self, name: str) -> None:
        """Switch one library on, all of its functions or none."""
        if name not in sys.modules:
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"{name} is not installed: pip install {name}")
            importlib.import_module(name)
        if name in THROUGH:
            self._switch_on(THROUGH[name])
            return
        require_version(name)
        if problem := cannot_run(self_test_device()):
            raise RuntimeError(problem)
        library = LIBRARIES[name]
        library.holders.add(self)  # first: the garbage collector may end another switch meanwhile
        try:
            library.switch_on()
        except BaseException:
            library.holders.discard(self)
            if not library.holders:
                library.remove()
            raise
        if name not in self.libraries:
            self.libraries += (name,)
        for site in library.sites:
            self._before[site.name] = site.counts.copy(), site.reasons.copy()


def use_nf4_kernel(*names: str, quiet: bool = False, strict: bool = False) -> Switch:
    """Let the kernel dequantize in Unsloth, bitsandbytes, Axolotl, PEFT and transformers, or in those named.

    names: of "unsloth", "bitsandbytes", "axolotl", "peft", "transformers"; without names, bitsandbytes and
    those that are imported.
    quiet: log nothing, except why a library that was named is not switched. Otherwise the logger
    "nf4_triton" says what was replaced and what was not, on one process per host (LOCAL_RANK 0).
    strict: raise if one of these libraries cannot be switched, and change nothing. Otherwise it is left as it
    is, and switch.refused says why: training goes on without the kernel.

    Returns a Switch. Calls may overlap, in any order and thread: a library is restored when the last switch
    that holds it ends. Raises ValueError for an unknown name; with strict, ImportError (not installed),
    UnknownInternals (other functions than expected) or RuntimeError (no usable GPU, or other bits).
    """
    check_names(names)
    switch = Switch(names)
    imported = [name for name in LIBRARIES if name == "bitsandbytes" or name in sys.modules]
    with _lock:
        try:
            for name in names or imported:
                try:
                    switch._switch_on(name)
                except Exception as error:
                    if strict:
                        raise
                    switch.refused[name] = str(error) or type(error).__name__
            autoload.waiting.clear()  # now: importing bitsandbytes sets it
        except BaseException:
            switch.off()
            raise
    if not quiet:
        say(str(switch))
    elif names and switch.refused:
        refused = [f"{name} runs without the NF4 kernel: {why}" for name, why in switch.refused.items()]
        say("\n".join(refused), logging.WARNING)
    return switch


def check_names(names: tuple[str, ...]) -> None:
    """Raise ValueError for a library that use_nf4_kernel does not know."""
    accepted = [*LIBRARIES, *THROUGH]
    for name in names:
        if name not in accepted:
            what = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise ValueError(f"{what} is an unknown library, expected one of {', '.join(accepted)}")


def restore() -> None:
    """Put every library's own functions back, whoever switched them."""
    with _lock:
        autoload.waiting.clear()
        for library in LIBRARIES.values():
            library.remove()


class _Stderr(logging.Handler):
    """Prints what a program that has not configured logging would not see."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


def say(text: str, level: int = logging.INFO) -> None:
    """Log on one process per host (LOCAL_RANK 0), to stderr if no handler is configured."""
    if local_rank() > 0:
        return
    if not log.hasHandlers():
        log.addHandler(_Stderr())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    log.log(level, "%s", text)


def require_version(name: str) -> None:
    """Raise UnknownInternals if a library is older than the oldest that is supported."""
    version, oldest = getattr(sys.modules[name], "__version__", ""), OLDEST.get(name)
    if oldest and version and TorchVersion(version) < oldest:
        problem = f"{name} {version} was left unchanged: it is too old, expected {oldest} or newer"
        raise UnknownInternals(f"{problem}: pip install -U {name}")


def require_parameters(name: str, parameters: list[str]) -> None:
    """Raise UnknownInternals unless a function takes these parameters first and needs no others."""
    function, problem = current(name), "is missing"
    if inspect.isfunction(function):
        have = inspect.signature(function).parameters
        more = list(have.values())[len(parameters) :]
        optional = all(parameter.default is not parameter.empty for parameter in more)
        if optional and list(have)[: len(parameters)] == parameters:
            return
        problem = f"takes {tuple(have)}, expected {tuple(parameters)}"
    library = name.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    raise UnknownInternals(f"{library} {version} is unknown and was left unchanged: {name} {problem}")


def _references(packages: tuple[str, ...] = ("",)) -> Iterator[tuple[types.ModuleType, str, object]]:
    """Yield (module, attribute, value) for every function in the imported modules of these packages."""
    for name, module in list(sys.modules.items()):
        # Not isinstance and vars: they would import a lazy module.
        if issubclass(type(module), types.ModuleType) and name.lower().startswith(packages):
            for attribute, value in list(types.ModuleType.__getattribute__(module, "__dict__").items()):
                if type(value) in (types.FunctionType, functools.partial):
                    yield module, attribute, value


def _not_replaced(sites: list[Site]) -> dict[str, str]:
    """Return {name: why} of what still dequantizes without the kernel, as far as modules show it."""
    originals = {id(site.original) for site in sites}
    kept = {name: "it has a kernel of its own" for name in OWN_KERNELS if sites and current(name)}
    for module, attribute, value in _references():
        function = value.func if type(value) is functools.partial else value
        if id(function) in originals:
            kept[f"{module.__name__}.{attribute}"] = "it was imported before use_nf4_kernel() was called"
    return kept
