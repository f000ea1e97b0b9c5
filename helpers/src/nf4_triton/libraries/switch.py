"""Switch the kernel on and off in the libraries people fine-tune with: one call, the same bits, reversible.

It is on or off for the whole process. `use_nf4_kernel` replaces the functions of LIBRARIES in every imported
module of PACKAGES that refers to them, if they take the expected parameters and pass their self-test. A state
that the kernel does not accept goes to the library's own function, counted.
"""

import contextlib
import importlib
import logging
import sys
import threading
import types
from collections.abc import Iterator

from .. import autoload
from ..environment import cannot_run
from ..log import say
from . import axolotl, bitsandbytes, unsloth
from .site import OFF, ORIGINALS, Site, contents, current, self_test_device

# The first function of a library is the one that counts: without it the library is left as it is.
LIBRARIES = {"unsloth": unsloth.SITES, "bitsandbytes": bitsandbytes.SITES, "axolotl": axolotl.SITES}
THROUGH = {"peft": "bitsandbytes", "transformers": "bitsandbytes"}  # who dequantizes for them
# Packages whose modules are searched; Unsloth writes and imports modules of its own ("unsloth_compiled...").
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
# Experts are selected or multiplied here in kernels of their own, which nothing replaces.
OWN_KERNELS = (
    "unsloth_zoo.temporary_patches.moe_routed.nf4_select_dequant",
    "unsloth_zoo.temporary_patches.gpt_oss_grouped_qlora.nf4_dequant_expert_stack",
    "unsloth_zoo.temporary_patches.moe_nf4_grouped.nf4_grouped_mm",
    "nf4_route.dequant_groups",  # of the package grouped-nf4-gemm
)
_lock = threading.RLock()
_sites: list[Site] = []  # of this time that the kernel is on, or the last; also those left to the library


class Switch(contextlib.AbstractContextManager):
    """The switch, as use_nf4_kernel() returns it. print(switch) says what was replaced and what was not.

    The end of a `with` block switches the kernel off, unless it was on before.
    """

    def __init__(self):
        self._was_on = self.on

    @property
    def on(self) -> bool:
        """Whether the kernel is on in this process."""
        return any(not site.why_not for site in _sites)

    @property
    def report(self) -> dict[str, str]:
        """{function: "kernel", or why the library dequantizes}."""
        return {site.name: site.why_not or "kernel" for site in _sites}

    def off(self) -> None:
        """Put the libraries' own functions back, as restore() does."""
        restore()

    def __exit__(self, *_) -> None:
        if not self._was_on:
            restore()

    def counts(self) -> dict[str, dict]:
        """Return, for each function, the eager calls since the kernel was switched on.

        {"kernel": dequantized by the kernel, "library": by the library, "reasons": {why: calls}}.
        """
        counts = {}
        for site in _sites:
            reasons = dict(site.reasons)
            counts[site.name] = dict(kernel=site.answered, library=sum(reasons.values()), reasons=reasons)
        return counts

    def summary(self) -> str:
        """Return one sentence: how many dequantizations the libraries did themselves."""
        kernel = sum(site.answered for site in _sites)
        library = sum(site.reasons.total() for site in _sites)
        left = _left()
        if not kernel + library:
            if len(left) == len(_sites):
                return "The kernel was not used: the libraries dequantized everything."
            return "No call came: is the model loaded in 4 bits? (Calls in compiled code are not counted.)"
        text = f"{library} of {kernel + library} dequantizations went through the library"
        return f"{text}; not counted: {', '.join(left)}" if left else text

    def __repr__(self) -> str:
        replaced = [site.name for site in _sites if not site.why_not]
        lines = ["The NF4 kernel is not used."]
        if replaced:
            lines = ["The NF4 kernel works here. It dequantizes in:"]
            lines += [f"  {name}" for name in replaced]
        for name, why in (_left() | _not_replaced()).items():
            lines.append(f"Left to the library: {name}: {why}")
        return "\n".join([*lines, "restore() ends it."] if replaced else lines)


def use_nf4_kernel(*names: str, quiet: bool = False, strict: bool = False) -> Switch:
    """Let the kernel dequantize in Unsloth, bitsandbytes, Axolotl, PEFT and transformers, or in those named.

    names: of "unsloth", "bitsandbytes", "axolotl", "peft", "transformers"; without names, bitsandbytes and
    those that are imported.
    quiet: log nothing, except why a library that was named is not switched. Otherwise the logger
    "nf4_triton" says what was replaced and what was not, on one process per host (LOCAL_RANK 0).
    strict: raise if one of these libraries cannot be switched, and change nothing. Otherwise it is left as it
    is, and switch.report says why: training goes on without the kernel.

    Call it again after other imports: it adds what was imported since. restore() ends it. Raises ValueError
    for an unknown name; with strict, ImportError (not installed), UnknownInternals (other functions than
    expected) or RuntimeError (no usable GPU, or other bits).
    """
    check_names(names)
    imported = [name for name in LIBRARIES if name == "bitsandbytes" or sys.modules.get(name) is not None]
    with _lock:
        switch = Switch()
        prepared = _prepare(names or imported, strict)
        autoload.waiting.clear()  # now: importing bitsandbytes sets it
        try:
            _switch_on(prepared)
        except BaseException:
            restore()
            raise
    if not quiet:
        say(str(switch))
    for name in names:
        if why := _sites_of(name)[0].why_not:
            say(f"{name} runs without the NF4 kernel: {why}", logging.WARNING)
    return switch


def check_names(names: tuple[str, ...]) -> None:
    """Raise ValueError for a library that use_nf4_kernel does not know."""
    accepted = [*LIBRARIES, *THROUGH]
    for name in names:
        if name not in accepted:
            raise ValueError(f"{name!r} is an unknown library, expected one of {', '.join(accepted)}")


def restore() -> None:
    """Put every library's own functions back, whoever switched them."""
    with _lock:
        autoload.waiting.clear()
        for site in _sites:
            site.why_not = OFF  # first: a replacement that is not found below then just calls the original
        _replace(ORIGINALS, ("",))


def _sites_of(name: str) -> tuple[Site, ...]:
    return LIBRARIES[THROUGH.get(name, name)]


def _prepare(names, strict: bool) -> dict[Site, str]:
    """Test the functions of these libraries. Return {function: why it is left to the library, or ""}.

    Nothing is replaced yet. With strict, raise what is wrong with a library's first function.
    """
    prepared = {}
    for name in names:
        main, *others = _sites_of(name)
        try:
            importlib.import_module(name)
            if problem := cannot_run(self_test_device()):
                raise RuntimeError(problem)
            main.prepare()
            prepared[main] = ""
        except Exception as error:
            if strict:
                raise
            prepared[main] = str(error) or type(error).__name__
            continue
        for site in others:
            try:
                if site.exists():
                    site.prepare()
                    prepared[site] = ""
            except Exception as error:
                prepared[site] = str(error)
    return prepared


def _switch_on(prepared: dict[Site, str]) -> None:
    """Let these functions answer, and then replace them everywhere."""
    if not Switch().on:
        _sites.clear()
    for site, why_not in prepared.items():
        if site not in _sites:
            site.answered = 0  # before it is replaced: calls of other threads count from then on
            site.reasons.clear()
            _sites.append(site)
        site.why_not = why_not
    _replace({site.original: site.replacement for site in _sites if not site.why_not}, PACKAGES)


def _replace(others: dict, packages: tuple[str, ...]) -> None:
    for _, module, attribute, value in _references(packages):
        if value in others:
            with contextlib.suppress(Exception):  # a module that cannot be written keeps what it has
                setattr(module, attribute, others[value])


def _references(packages: tuple[str, ...] = ("",)) -> Iterator[tuple]:
    """Yield (its name, module, attribute, value) for every function in imported modules of these packages."""
    for name, module in list(sys.modules.items()):
        if isinstance(name, str) and name.lower().startswith(packages):
            for attribute, value in list(contents(module).items()):
                if type(value) is types.FunctionType:
                    yield name, module, attribute, value


def _left() -> dict[str, str]:
    """Return {name: why} of the functions that could not be replaced."""
    return {site.name: site.why_not for site in _sites if site.why_not not in ("", OFF)}


def _not_replaced() -> dict[str, str]:
    """Return {name: why} of what still dequantizes without the kernel, as far as modules show it."""
    originals = {site.original: site for site in _sites if not site.why_not}
    kept = {name: "it has a kernel of its own" for name in OWN_KERNELS if originals and current(name)}
    for name, _, attribute, value in _references():
        if value in originals:
            kept[f"{name}.{attribute}"] = "imported before use_nf4_kernel() was called, or read-only"
    for site in originals.values():
        if site.name not in kept and current(site.name) is not site.replacement:
            kept[site.name] = "it was wrapped or replaced by another library since"
    return kept
