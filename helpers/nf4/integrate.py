"""Switch the kernel on and off in the libraries people fine-tune with: one call, the same bits, reversible.

Replaced are the names by which modules of bitsandbytes, Unsloth, PEFT, transformers, TRL and
accelerate refer to a function that dequantizes (libraries.py), in every such module imported by then,
by functions that call the kernel (call_sites.py). Never replaced are a name that a script of yours
imported before the call, a functools.partial, a class attribute, and code that decodes inside a kernel
of its own; where they can be seen, the switch's text names them. States that the kernel does not cover
go to the library's own path, counted.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING

import torch

from . import autoload, backend, kernel, libraries
from .autoload import references
from .call_sites import Library, Site
from .libraries import UnknownInternals, current, reloaded, site_of

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["Switch", "UnknownInternals", "restore", "trainer_callback", "use_nf4_kernel"]
LIBRARIES = ("unsloth", "bitsandbytes", "peft", "transformers")
# Modules of these packages are searched for references; Unsloth also writes and imports modules of its own.
PACKAGES = ("bitsandbytes", "unsloth", "peft", "transformers", "trl", "accelerate")
# A reload of this module keeps them: what is switched on must stay reachable.
_lock = globals().get("_lock") or threading.RLock()
_built: dict[str, Library] = globals().get("_built", {})  # kept while off, so nothing compiles anew
_tested: set = set()  # (the library's function, the kernel's) that gave the same bits


class Switch(contextlib.AbstractContextManager):
    """What one call of use_nf4_kernel did. Leaving it as a context manager, or `off()`, undoes it.

    libraries: those switched on; refused: {library: why not}; left: {function: why it stays the library's};
    str(switch) says it all, with what was changed by others since.
    """

    def __init__(self, taken: list[str], routes: dict[str, str], refused: dict[str, str]):
        self.libraries, self.routes, self.refused = tuple(taken), routes, refused
        self.sites: list[Site] = [site for name in taken for site in _built[name].sites]
        self.left = {function: why for name in taken for function, why in _built[name].left.items()}
        self._before = [site.tally() for site in self.sites]
        self._with_unsloth = current(libraries.UNSLOTH) is not None
        self._text = self._describe()

    def off(self) -> None:
        """Put the libraries' own functions back, except where another open switch still wants the kernel."""
        with _lock:
            for library in _built.values():
                library.holders.discard(self)
            _remove_orphans()

    def __exit__(self, *_) -> None:
        self.off()

    def counts(self) -> dict[str, dict]:
        """Eager calls by call site since this switch: {"kernel": decoded by the kernel, "library": left
        to the library, "reasons": why, "fused": products that bitsandbytes forms without dequantizing}.
        Raises RuntimeError where a library was reloaded since, and the kernel is no longer in it."""
        if gone := [site.name for site in self.sites if site.library_switch.on and reloaded(site)]:
            raise RuntimeError(f"{gone[0]} was reloaded since the switch: call use_nf4_kernel() again")
        return {
            site.name: {kind: now - before[kind] for kind, now in site.tally().items()}
            for site, before in zip(self.sites, self._before, strict=True)
        }

    def summary(self) -> str:
        """How many of the eager dequantizations since this switch the libraries did themselves."""
        counts = self.counts()
        by_kernel = sum(row["kernel"] for row in counts.values())
        last = counts.get(libraries.LAST)
        by_library = last["library"] if last else sum(row["library"] for row in counts.values())
        return f"{by_library} of {by_kernel + by_library} dequantizations went through the library"

    def __str__(self) -> str:
        lines = [self._text]
        for site in self.sites:
            if site.library_switch.on and not site.watched and current(site.name) is not site.replacement:
                why = "reloaded" if reloaded(site) else "wrapped or replaced by another library"
                lines.append(
                    f"Since then {site.name} was {why}: call use_nf4_kernel() again to be sure of it."
                )
        if current(libraries.UNSLOTH) and not self._with_unsloth and "unsloth" not in _switched_on():
            lines.append(_TOO_LATE)
        return "\n".join(lines)

    def _describe(self) -> str:
        lines = ["The NF4 kernel decodes in:" if self.sites else "The NF4 kernel is not used."]
        replaced = {id(site.replacement): set() for site in self.sites}
        for module, _, value in references():
            if id(value) in replaced:
                replaced[id(value)].add(module.__name__)
        for site in (site for site in self.sites if not site.watched):
            where = ", ".join(sorted(replaced[id(site.replacement)]))
            lines.append(f"  {site.name}" + (f" (held by {where})" if where else ""))
        lines += [f"  {name}, {how}" for name, how in self.routes.items()]
        lines += [f"Left to the library: {name}: {why}" for name, why in self.left.items()]
        if self.sites:
            lines += [f"Not replaced: {name}, {why}" for name, why in _kept(self.sites).items()]
            lines += [note for note in [libraries.several_bitsandbytes()] if note]
        for reason in dict.fromkeys(self.refused.values()):
            names = [name for name, why in self.refused.items() if why == reason]
            lines.append(f"Not in {', '.join(names)}: {reason}")
        return "\n".join(lines)


def use_nf4_kernel(*names: str, quiet: bool = False) -> Switch:
    """Let the kernel dequantize in Unsloth, bitsandbytes, PEFT and transformers, or in those named.

    names: of "unsloth", "bitsandbytes", "peft", "transformers"; none means all that are imported.
    quiet: print nothing; else what was replaced, what was left and why.
    Returns a Switch, and works until its `off()` or the end of its `with` block. Calls may overlap, in
    any order and thread: a library is restored when the last one ends. PEFT and transformers dequantize
    through bitsandbytes, which is switched with them. A product of which the code is not known (in a
    newer bitsandbytes) stays the library's and is listed; what it decodes by a switched function is the
    kernel's.

    Without names, what cannot be switched is left alone and listed. With names it is an error, and
    nothing is changed: ImportError (not installed), UnknownInternals (a function is missing or takes
    other arguments), RuntimeError (no GPU, one too old, or bits that differ). ValueError: unknown name.
    """
    wanted = names or LIBRARIES
    if unknown := [name for name in wanted if name not in LIBRARIES]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(LIBRARIES)}")
    taken, routes, refused = [], {}, {}
    with _lock:
        autoload.forget()
        try:
            for name in wanted:
                if not names and name in libraries.ROUTES and name not in sys.modules:
                    if "bitsandbytes" in taken and importlib.util.find_spec(name):
                        routes[name] = "once it is imported"
                    continue
                try:
                    _import(name, asked=bool(names))
                    needed = "bitsandbytes" if name in libraries.ROUTES else name
                    _install(needed)
                    if needed not in taken:
                        taken.append(needed)
                    if name in libraries.ROUTES:
                        routes[name] = libraries.route(name)
                except (ImportError, RuntimeError, OSError, AttributeError, TypeError, ValueError) as error:
                    if names:
                        raise
                    refused[name] = f"{error}" or type(error).__name__
            switch = Switch(taken, routes, refused)
            for name in taken:
                _built[name].holders.add(switch)
        except BaseException:
            _remove_orphans()
            raise
        if taken and not current(libraries.UNSLOTH) and _Latecomer not in map(type, sys.meta_path):
            sys.meta_path.insert(0, _Latecomer())
    if not quiet:
        print(switch)
    return switch


def restore() -> None:
    """Put every library's own functions back, whoever switched them. Works at any time, also twice, after
    a reload of this module, or with a second copy of it: what was replaced is found by its mark."""
    with _lock:
        autoload.forget()
        for library in _built.values():
            library.on, library.holders = False, set()
        _put_back()
        sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "_Latecomer"]


def trainer_callback(*names: str, quiet: bool = False) -> "TrainerCallback":
    """A transformers.TrainerCallback that switches the kernel on when training begins and off when it
    ends: `Trainer(..., callbacks=[trainer_callback()])`, also for TRL's and Unsloth's trainers. Prints at
    the end how many dequantizations were left to the library. Arguments as for use_nf4_kernel. Raises
    ImportError without transformers."""
    from transformers import TrainerCallback

    class NF4KernelCallback(TrainerCallback):
        switch: Switch | None = None

        def on_train_begin(self, args, state, control, **kwargs):
            self.switch = use_nf4_kernel(*names, quiet=quiet or not state.is_world_process_zero)

        def on_train_end(self, args, state, control, **kwargs):
            if self.switch is None:
                return
            if not quiet and state.is_world_process_zero:
                print(self.switch.summary())
            self.switch.off()

    return NF4KernelCallback()


# Switching


def stand_in_of(original):
    """What stands in for a library's function now: the replacement, or the function itself."""
    sites = (site for library in _switched_on().values() for site in library.sites)
    return next((site.replacement for site in sites if site.original is original), original)


def _switched_on() -> dict[str, Library]:
    return {name: library for name, library in list(_built.items()) if library.on}


def _import(name: str, asked: bool) -> None:
    if name in sys.modules:
        return
    if importlib.util.find_spec(name) is None:
        raise ImportError(f"{name} is not installed" if asked else "not installed")
    if not asked and name != "bitsandbytes":
        raise ImportError("not imported; import it first, then call use_nf4_kernel()")
    importlib.import_module(name)


def _install(name: str) -> None:
    """Put the replacements in place and switch them on; all of the library's or none."""
    library = _built.get(name)
    if name not in _switched_on() or any(map(reloaded, library.sites)):
        holders = _remove(library) if library else set()
        made = libraries.SITES[name]()  # refuses before anything changes
        _works()
        if library is None or library.originals() != made.originals():
            library = _built[name] = made
        library.left, library.holders = made.left, holders
    by_id = {id(site.original): site for site in library.sites}
    try:  # also again: modules imported since the last call may hold the old functions
        for module, attribute, value in references(PACKAGES):
            if id(value) in by_id:
                setattr(module, attribute, by_id[id(value)].replacement)
        library.on = True
    except BaseException:
        _remove(library)
        raise


def _remove(library: Library) -> set:
    """Take one library's replacements out; returns who held them."""
    library.on = False  # every call site at once; what someone else copied stays a mere detour
    _put_back(library.sites)
    holders, library.holders = library.holders, set()
    return holders


def _remove_orphans() -> None:
    """Take out what no open switch holds."""
    for library in _switched_on().values():
        if not library.holders:
            _remove(library)


def _put_back(sites: list[Site] | None = None) -> None:
    """Undo replacements wherever a module refers to one: those of `sites`, or all there are."""
    replacements = {id(site.replacement) for site in sites or ()}
    for module, attribute, value in references():
        if type(value) is types.FunctionType and (sites is None or id(value) in replacements):
            if site := site_of(value):
                site.library_switch.on = False
                with contextlib.suppress(Exception):  # a module that takes nothing keeps the detour
                    setattr(module, attribute, site.original)


def _kept(sites: list[Site]) -> dict[str, str]:
    """References that can be seen and were not replaced: {name: why}."""
    originals = {id(site.original) for site in sites if not site.watched}
    kept = {}
    for module, attribute, value in references():
        if id(value) in originals and not module.__name__.startswith(__package__):
            kept[f"{module.__name__}.{attribute}"] = "a name imported before the call"
        elif type(value) is functools.partial and id(value.func) in originals:
            kept[f"{module.__name__}.{attribute}"] = "a partial of it"
    for module, attribute, value in references(PACKAGES):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner, held in list(vars(value).items()):
                if id(getattr(held, "__func__", held)) in originals:  # of a static or class method
                    kept[f"{module.__name__}.{attribute}.{inner}"] = "a class attribute"
    for module_name, function in libraries.OWN_KERNELS.items():
        if hasattr(sys.modules.get(module_name), function):
            kept[f"{module_name}.{function}"] = "which decodes in a kernel of its own"
    return kept


_TOO_LATE = "Unsloth was imported after use_nf4_kernel(): call it again, to switch Unsloth's function too"


class _Latecomer:
    """On sys.meta_path while switched on: says when Unsloth comes too late to be switched; finds nothing."""

    def find_spec(self, name, path=None, target=None):
        if name == "unsloth.kernels.utils" and _switched_on():
            warnings.warn(_TOO_LATE, stacklevel=2)


def _works() -> None:
    """Raise RuntimeError unless the kernel decodes here with bitsandbytes' bits. Only a success is
    remembered: what failed may have been the moment's, such as a full GPU."""
    if problem := backend.cannot_run():
        raise RuntimeError(problem)
    from bitsandbytes import functional

    site = site_of(functional.dequantize_4bit)
    library, ours = site.original if site else functional.dequantize_4bit, kernel._your_dequantize_nf4
    if (library, ours) in _tested:
        return
    device = "cpu" if kernel.INTERPRETED else "cuda"
    values = torch.linspace(-3, 3, 64 * 64, dtype=torch.float32, device=device).view(64, 64)
    for dtype in (torch.float16, torch.bfloat16):
        name = "bitsandbytes itself"
        try:
            options = {"quant_type": "nf4", "compress_statistics": True}
            packed, state = functional.quantize_4bit(values.to(dtype), **options)
            expected = library(packed, state)
            name = "the kernel"
            same = torch.equal(ours(packed, state), expected)
        except Exception as error:
            raise RuntimeError(f"{name} does not run here: {type(error).__name__}: {error}") from error
        if not same:
            raise RuntimeError(
                f"the kernel's {dtype} bits differ from this bitsandbytes', which stays as it is"
            )
    _tested.add((library, ours))
