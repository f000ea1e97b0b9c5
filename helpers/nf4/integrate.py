"""The kernel inside the libraries people fine-tune with: one call, the same bits, reversible.

    from helpers.nf4.integrate import use_nf4_kernel

    use_nf4_kernel()                 # from here on, in every library already imported
    with use_nf4_kernel("peft"):     # or for a while
        trainer.train()

Every function that dequantizes is replaced in all modules that refer to it (helpers.nf4.call_sites has the
replacements). States the kernel does not cover go to the library's own path, counted: `switch.counts()`.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from dataclasses import dataclass, field

import torch

from helpers.nf4 import kernel as nf4_kernel
from helpers.machine import environment
from helpers.nf4 import call_sites
from helpers.nf4.call_sites import Library, Site

LIBRARIES = ("unsloth", "bitsandbytes", "peft", "transformers")
# Modules of these packages are searched for references; Unsloth also writes and imports modules of its own.
PACKAGES = ("bitsandbytes", "unsloth", "peft", "transformers", "trl", "accelerate")
# Code that is replaced by an equivalent, as read in bitsandbytes 0.50.0, 0.50.1 and 0.50.2.
KNOWN = {
    "matmul_4bit": "b1af5aac6955",
    "MatMul4Bit": "ed850bab240f",
    "gemm_4bit on CUDA": "9cef37263286",
    "_dequant_linear_fallback": "4e5f00cbe3fb",
}
_lock = threading.RLock()
_installed: dict[str, "_Installed"] = {}  # switched on now
_built: dict[str, "_Installed"] = {}  # made earlier in this process: taken again, so nothing compiles anew


class UnknownInternals(RuntimeError):
    """A library is not as this module knows it, so nothing of it was touched; the text names what differs."""


@dataclass
class _Installed:
    """One library with the kernel inside: its switch, its call sites and who asked for it."""

    library: Library
    sites: list[Site]
    holders: set = field(default_factory=set)


class Switch:
    """What one call of use_nf4_kernel did. Leaving it as a context manager, or `off()`, undoes it."""

    def __init__(self, taken: list[str], routes: dict[str, str], refused: dict[str, str]):
        self.libraries, self.routes, self.refused = tuple(taken), routes, refused
        self.sites = [site for name in taken for site in _installed[name].sites]
        self._before = [site.tally() for site in self.sites]
        self._text = self._describe()

    def off(self) -> None:
        """Put the libraries' own functions back, except where another open switch still wants the kernel."""
        with _lock:
            for name in self.libraries:
                if name in _installed:
                    _installed[name].holders.discard(self)
                    if not _installed[name].holders:
                        _restore(_installed.pop(name))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.off()

    def counts(self) -> dict:
        """Eager calls by call site since this switch: decoded by the kernel, left to the library and why,
        products fused by bitsandbytes."""
        return {
            site.name: {kind: now - before[kind] for kind, now in site.tally().items()}
            for site, before in zip(self.sites, self._before, strict=True)
        }

    def __str__(self):
        return self._text

    def _describe(self) -> str:
        lines = ["The NF4 kernel decodes in:" if self.sites else "The NF4 kernel is not used."]
        for site in (site for site in self.sites if not site.watched):
            where = ", ".join(sorted({module.__name__ for module, _ in site.places}))
            lines.append(f"  {site.name}" + (f" (held by {where})" if where else ""))
        lines += [f"  {name}, {how}" for name, how in self.routes.items()]
        lines += [f"Not in {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def use_nf4_kernel(*libraries: str, quiet: bool = False) -> Switch:
    """Let the kernel dequantize in Unsloth, bitsandbytes, PEFT and transformers, or in those named.

    Works at once, and until `off()` of the returned Switch (or the end of its `with` block); prints what
    changed unless `quiet`. Calls may overlap, in any order and thread: a library is restored when the last
    one ends. PEFT and transformers dequantize through bitsandbytes, which is switched with them. Without
    names, a library that is absent, not imported or unknown is left alone and listed; with names that is an
    error: ImportError, UnknownInternals, or RuntimeError where the kernel cannot run.
    """
    wanted = libraries or LIBRARIES
    if unknown := [name for name in wanted if name not in LIBRARIES]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(LIBRARIES)}")
    taken, routes, refused = [], {}, {}
    with _lock:
        for name in wanted:
            try:
                _import(name, asked=bool(libraries))
                for needed in ("bitsandbytes",) if name in _ROUTES else (name,):
                    _install(needed)
                    if needed not in taken:
                        taken.append(needed)
                if name in _ROUTES:
                    routes[name] = _ROUTES[name]()
            except (ImportError, RuntimeError) as error:
                if libraries:
                    for orphan in [n for n, one in _installed.items() if not one.holders]:
                        _restore(_installed.pop(orphan))
                    raise
                refused[name] = str(error)
        switch = Switch(taken, routes, refused)
        for name in taken:
            _installed[name].holders.add(switch)
    if not quiet:
        print(switch)
    return switch


def restore() -> None:
    """Put every library's own functions back, whoever switched them."""
    with _lock:
        while _installed:
            _restore(_installed.popitem()[1])


def _import(name: str, asked: bool) -> None:
    if name in sys.modules:
        return
    if importlib.util.find_spec(name) is None:
        raise ImportError(f"{name} is not installed")
    if not asked and name != "bitsandbytes":
        raise ImportError(f"not imported; import {name} first, then call use_nf4_kernel()")
    importlib.import_module(name)


def _install(name: str) -> None:
    """Put the replacements in place and switch them on; all of the library's or none."""
    installed = _installed.get(name)
    if installed is None:
        if problem := _cannot_run():
            raise RuntimeError(problem)
        library = Library(name)
        installed = _Installed(library, _SITES[name](library))  # refuses before anything changes
        built = _built.get(name)
        if built and [site.original for site in built.sites] == [site.original for site in installed.sites]:
            installed = built
        _built[name] = installed
    try:
        _swap(installed.sites)  # also again: modules imported since the last call may hold the old functions
        installed.library.on = True
    except BaseException:
        _restore(installed)
        raise
    _installed[name] = installed


def _swap(sites: list[Site]) -> None:
    by_id = {id(site.original): site for site in sites}
    for name, module in list(sys.modules.items()):
        if module is None or not name.lower().startswith(PACKAGES):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            site = by_id.get(id(value))
            if site is not None:
                site.places.append((module, attribute))
                setattr(module, attribute, site.replacement)


def _restore(installed: _Installed) -> None:
    installed.holders.clear()
    installed.library.on = False  # every call site at once; what someone else copied stays a mere detour
    for site in installed.sites:
        while site.places:
            module, attribute = site.places.pop()
            if getattr(module, attribute, None) is site.replacement:
                setattr(module, attribute, site.original)


@functools.cache
def _cannot_run() -> str | None:
    """Why the kernel cannot decode here; None if it does, with bitsandbytes' bits on a small weight."""
    if problem := environment.old_triton() or environment.old_gpu():
        return problem
    kernel = nf4_kernel
    if not kernel.INTERPRETED and not environment.has_gpu():
        return f"{environment.no_gpu()} To try it without, set TRITON_INTERPRET=1 before Python starts."
    from bitsandbytes import functional

    device = "cpu" if kernel.INTERPRETED else "cuda"
    values = torch.linspace(-3, 3, 64 * 64, device=device).view(64, 64).half()
    packed, state = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    try:
        ours, theirs = kernel._your_dequantize_nf4(packed, state), functional.dequantize_4bit(packed, state)
        same = torch.equal(ours, theirs)
    except Exception as error:
        return f"the kernel does not run here: {type(error).__name__}: {error}"
    return None if same else "the kernel's bits differ from bitsandbytes' here: please report it"


def _require(condition, library: str, text: str) -> None:
    if not condition:
        version = environment.version_of(library)
        raise UnknownInternals(f"{library} {version} is not known here, nothing of it was changed: {text}")


def _function(module, name: str, parameters: tuple[str, ...]):
    """The module's function of that name and exactly those parameters."""
    library, found = module.__name__.split(".")[0], getattr(module, name, None)
    _require(inspect.isroutine(found), library, f"{module.__name__}.{name} is missing")
    have = tuple(inspect.signature(found).parameters)
    _require(have == parameters, library, f"{module.__name__}.{name} takes {have}, expected {parameters}")
    return found


def fingerprint(source: str) -> str:
    """12 hex digits of a piece of code, blind to indentation, blank lines and comment lines."""
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _operator_source(module, decorator: str) -> str:
    """Source of the function that `module` registers for an operator, by its decorator's arguments."""
    source = inspect.getsource(module)
    for node in ast.parse(source).body:
        decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
        if any(decorator in one for one in decorators):
            return ast.get_source_segment(source, node)
    return ""


def _bitsandbytes(library: Library) -> list[Site]:
    import bitsandbytes.autograd._functions as products
    from bitsandbytes import functional

    kernel = nf4_kernel
    cuda = importlib.import_module("bitsandbytes.backends.cuda.ops") if torch.cuda.is_available() else None
    dequantize = _function(
        functional, "dequantize_4bit", ("A", "quant_state", "absmax", "out", "blocksize", "quant_type")
    )
    matmul = _function(products, "matmul_4bit", ("A", "B", "quant_state", "out", "bias"))
    code = {"matmul_4bit": inspect.getsource(matmul), "MatMul4Bit": inspect.getsource(products.MatMul4Bit)}
    if cuda:
        fallback = _function(
            cuda, "_dequant_linear_fallback",
            ("A", "B", "shapeB", "absmax", "blocksize", "quant_type", "bias",
             "absmax_8bit", "absmax_code", "absmax_offset"),
        )  # fmt: skip
        last = _function(
            cuda, "_dequantize_4bit_impl", ("A", "absmax", "blocksize", "quant_type", "dtype", "out")
        )
        for name in ("_gemm_4bit_use_custom_fn", "_gemm_4bit_custom_max_m"):
            _require(hasattr(cuda, name), "bitsandbytes", f"backends.cuda.ops.{name} is missing")
        code["gemm_4bit on CUDA"] = _operator_source(cuda, "'bitsandbytes::gemm_4bit', 'cuda'")
        code["_dequant_linear_fallback"] = inspect.getsource(fallback)
    for name, source in code.items():
        _require(fingerprint(source) == KNOWN[name], "bitsandbytes", f"the code of {name} has changed")

    sites = [
        site := Site("bitsandbytes.functional.dequantize_4bit", dequantize),
        product := Site("bitsandbytes.autograd._functions.matmul_4bit", matmul),
    ]
    site.replacement = call_sites.dequantize_4bit(site, library, kernel)
    product.replacement = call_sites.matmul_4bit(product, library, kernel, functional, cuda)
    if cuda:
        inside = Site("bitsandbytes.backends.cuda.ops._dequant_linear_fallback", fallback)
        inside.replacement = call_sites.gemm_fallback(inside, library, kernel)
        counted = Site("bitsandbytes.backends.cuda.ops._dequantize_4bit_impl", last, watched=True)
        counted.replacement = call_sites.watch(counted)
        sites += [inside, counted]
    return sites


def _unsloth(library: Library) -> list[Site]:
    from bitsandbytes.functional import QuantState

    utils = importlib.import_module("unsloth.kernels.utils")
    original = _function(utils, "fast_dequantize", ("W", "quant_state", "out", "use_global_buffer", "dtype"))
    site = Site("unsloth.kernels.utils.fast_dequantize", original)
    site.replacement = call_sites.unsloth_fast_dequantize(site, library, nf4_kernel, QuantState)
    return [site]


def _through_bitsandbytes(module_name: str) -> str:
    """Check that a library's helper still looks bitsandbytes' function up at every call."""
    module = importlib.import_module(module_name)
    library, helper = module_name.split(".")[0], getattr(module, "dequantize_bnb_weight", None)
    names = set(getattr(getattr(helper, "__code__", None), "co_names", ()))
    known = {"functional", "dequantize_4bit"} <= names
    _require(known, library, f"{module_name}.dequantize_bnb_weight does not call functional.dequantize_4bit")
    return f"whose {module_name}.dequantize_bnb_weight calls bitsandbytes.functional.dequantize_4bit"


_SITES = {"bitsandbytes": _bitsandbytes, "unsloth": _unsloth}
_ROUTES = {
    "peft": functools.partial(_through_bitsandbytes, "peft.utils.integrations"),
    "transformers": functools.partial(_through_bitsandbytes, "transformers.integrations.bitsandbytes"),
}
