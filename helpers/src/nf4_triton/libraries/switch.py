"""Switch the kernel on and off in fine-tuning libraries: one call, bit-identical, reversible.

It is on or off for the whole process. `use_nf4_kernel` replaces the functions of LIBRARIES in every imported
module of PACKAGES that refers to them, if they take the expected parameters and pass their self-test. A state
that the kernel does not accept goes to the library's own function, and is counted.
"""

import contextlib
import importlib
import logging
import os
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator

from ..environment import cannot_run
from ..log import say
from . import axolotl, bitsandbytes, unsloth
from .self_test import self_test_device
from .site import COMPILED, KERNEL, OFF, ORIGINALS, Site, contents, current

# Without its first function, a library is not switched.
LIBRARIES = {"unsloth": unsloth.SITES, "bitsandbytes": bitsandbytes.SITES, "axolotl": axolotl.SITES}
THROUGH = {"peft": "bitsandbytes", "transformers": "bitsandbytes"}  # which library dequantizes for them
# Packages whose modules are searched, by the beginning of their names: Unsloth also imports modules that it
# wrote ("unsloth_compiled...").
PACKAGES = (
    "bitsandbytes",
    "unsloth",
    "axolotl",
    "peft",
    "transformers",
    "trl",
    "accelerate",
    "vllm",
    "moe_utils",
)
# These select or multiply experts in kernels of their own, which nothing replaces.
OWN_KERNELS = (
    "unsloth_zoo.temporary_patches.moe_routed.nf4_select_dequant",
    "unsloth_zoo.temporary_patches.gpt_oss_grouped_qlora.nf4_dequant_expert_stack",
    "unsloth_zoo.temporary_patches.moe_nf4_grouped.nf4_grouped_mm",
    "nf4_route.dequant_groups",  # of the package grouped-nf4-gemm
)
_lock = threading.RLock()
# A child that is forked while another thread holds the lock would wait for it forever.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
was_called = False  # whether use_nf4_kernel() or restore() was: then NF4_TRITON=1 switches nothing on
# State since the kernel was last switched on. Each switch-on makes new dicts: older reports stay true.
_sites: list[Site] = []  # with those left to the library; empty after restore()
_calls: dict[str, Counter] = {}
_left: dict[str, str] = {}


class Switch:
    """The switch, as use_nf4_kernel() returns it. print(switch) says how much the kernel dequantized, where,
    and what was left to the libraries and why, even after the kernel was switched off.

    The end of a `with` block switches the kernel off, unless it was on before.
    calls: {replaced function: Counter of {"by the kernel", or "by the library: " and why: eager calls}}.
    """

    def __init__(self, was_on: bool = True):
        self._was_on = was_on
        self.calls, self._left = _calls, _left

    @property
    def on(self) -> bool:
        """Whether the kernel is on, and has been since this switch was made."""
        return self.calls is _calls and any(not site.why_not for site in _sites)

    @property
    def left(self) -> dict[str, str]:
        """{name: why}: functions that dequantize without the kernel, or did until restore()."""
        if self.calls is _calls:
            _find_left()
        return self._left

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *_) -> None:
        if not self._was_on:
            restore()

    def __repr__(self) -> str:
        lines = [self._first_line()]
        for name, calls in self.calls.items():
            if calls or name not in self.left:
                parts = [f"{count} {how}" if count else how for how, count in calls.most_common(5)]
                lines.append(f"  {name}: {'; '.join(parts) or 'no calls'}")
        lines += [f"Left to the library: {name}: {why}" for name, why in self.left.items()]
        if self.on:
            lines.append("restore() ends it.")
        elif not (self.left or any(self.calls.values())):
            lines.append("Was a model loaded in 4 bits?")
        return "\n".join(lines)

    def _first_line(self) -> str:
        counted = sum(self.calls.values(), Counter())
        if counted:
            return f"The kernel dequantized {counted[KERNEL]} of {counted.total()}."
        if self.on:
            return "The NF4 kernel works here."
        if self.calls:
            return "The NF4 kernel was on, but no dequantization was counted."
        return "The NF4 kernel is not used."


def use_nf4_kernel(*names: str, quiet: bool = False, strict: bool = False) -> Switch:
    """Let the kernel dequantize in Unsloth, bitsandbytes, Axolotl, PEFT, and transformers, or in those named.

    names: any of "unsloth", "bitsandbytes", "axolotl", "peft", "transformers"; without names, bitsandbytes
    and those that are imported.
    quiet: log nothing. Otherwise the logger "nf4_triton" says what was replaced and what was not, on one
    process per host (LOCAL_RANK 0).
    strict: raise if one of these libraries cannot be switched, and change nothing. Otherwise that library
    stays as it is, and the switch says why: training goes on without the kernel.

    Call it again after other imports, to add what was imported since. restore() ends it. Raises ValueError
    for an unknown name; with strict, ImportError (not installed), UnknownInternals (unexpected functions), or
    RuntimeError (no usable GPU, or other bits).
    """
    global was_called
    for name in names:
        if name not in (*LIBRARIES, *THROUGH):
            known = ", ".join([*LIBRARIES, *THROUGH])
            raise ValueError(f"{name!r:.60} is an unknown library, expected {known}, or no name")
    was_called = True
    imported = [name for name in LIBRARIES if name == "bitsandbytes" or sys.modules.get(name)]
    with _lock:
        was_on = Switch().on
        prepared = _prepare(names or imported, strict)
        _switch_on(prepared)
        switch = Switch(was_on)
    if not quiet:
        say(str(switch), logging.WARNING if any(prepared.values()) else logging.INFO)
    return switch


def restore() -> None:
    """Put every library's own functions back, no matter who switched them."""
    global was_called
    was_called = True
    with _lock:
        _find_left()
        for site in _sites:
            site.why_not = OFF  # first: then a replacement that is not found below just calls the original
        _sites.clear()
        _replace(ORIGINALS, ("",))


def _prepare(names, strict: bool) -> dict[Site, str]:
    """Test the functions of these libraries. Return {function: why it is left to the library, or ""}.

    Nothing is replaced yet. With strict, raise the error of a library's first function.
    """
    prepared = {}
    for name in names:
        main, *others = LIBRARIES[THROUGH.get(name, name)]
        try:
            importlib.import_module(name)
            if problem := cannot_run(self_test_device()):
                raise RuntimeError(problem)
            main.prepare(_sites)
            prepared[main] = ""
        except (Exception, SystemExit) as error:  # Unsloth exits without a GPU
            if strict:
                raise
            prepared[main] = str(error) or type(error).__name__
            continue
        for site in others:
            if site.name.rsplit(".", 2)[0] not in sys.modules:
                continue  # its package is not in use
            try:
                site.prepare(_sites)
                prepared[site] = ""
            except ModuleNotFoundError:
                pass  # this version of the library has no such module
            except Exception as error:
                prepared[site] = str(error)
    return prepared


def _switch_on(prepared: dict[Site, str]) -> None:
    """Let the kernel answer for these functions, then replace them everywhere."""
    global _calls, _left
    if not Switch().on:
        _sites.clear()
        _calls, _left = {}, {}
    for site, why_not in prepared.items():
        if site not in _sites:
            site.calls = Counter({COMPILED: 0} if COMPILED in site.calls else ())  # that code is used again
            _sites.append(site)
        site.why_not = why_not
        if not why_not:  # before it is replaced: calls of other threads count from then on
            _calls[site.name] = site.calls
    _replace({site.original: site.replacement for site in _sites if not site.why_not}, PACKAGES)
    _find_left()


def _replace(others: dict, packages: tuple[str, ...]) -> None:
    for name, attribute, value in _references(packages):
        if value in others:
            with contextlib.suppress(Exception):  # a read-only module keeps its function
                setattr(sys.modules[name], attribute, others[value])


def _references(packages: tuple[str, ...] = ("",)) -> Iterator[tuple]:
    """Yield (module's name, attribute, value) for every function in imported modules of these packages."""
    for name, module in list(sys.modules.items()):
        if str(name).lower().startswith(packages):
            for attribute, value in list(contents(module).items()):
                if type(value) is types.FunctionType:
                    yield name, attribute, value


def _find_left() -> None:
    """Note what dequantizes without the kernel now, as far as modules show it."""
    if not _sites:  # restored
        return
    _left.clear()
    _left.update((site.name, site.why_not) for site in _sites if site.why_not)
    if on := {site.original: site for site in _sites if not site.why_not}:
        _left.update(_others(on))


def _others(on: dict) -> Iterator[tuple[str, str]]:
    """Yield (name, why) of what dequantizes beside the functions that are on: {original: site}."""
    for name in OWN_KERNELS:
        if current(name):
            yield name, "it has a kernel of its own"
    for name, attribute, value in _references():
        if value in on:
            yield f"{name}.{attribute}", "imported before use_nf4_kernel() was called, or read-only"
    for site in on.values():
        if not site.calls and current(site.name) is not site.replacement:
            yield site.name, "another library wrapped or replaced it since, and no call came through"
