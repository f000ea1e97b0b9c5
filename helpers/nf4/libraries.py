"""What the libraries look like: which of their functions dequantize, and what is known of their code.

A public function is replaced wherever its signature holds (and integrate.py's self-test of the bits);
a product only where its code is known, because the replacement repeats it. The rest is left to the
library and listed.
"""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable

import torch

from . import call_sites, kernel
from .call_sites import Library, Site

# Code that is replaced by an equivalent, as read in bitsandbytes 0.50.0, 0.50.1 and 0.50.2.
KNOWN = {
    "matmul_4bit": "b1af5aac6955",
    "MatMul4Bit": "ed850bab240f",
    "gemm_4bit on CUDA": "9cef37263286",
    "_dequant_linear_fallback": "4e5f00cbe3fb",
}
# Functions that decode NF4 in kernels of their own, which no switch reaches.
OWN_KERNELS = {
    "unsloth_zoo.temporary_patches.gpt_oss_grouped_qlora": "nf4_dequant_expert_stack",
    "unsloth_zoo.temporary_patches.moe_nf4_grouped": "nf4_grouped_mm",
}
DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
PRODUCT = "bitsandbytes.autograd._functions.matmul_4bit"
CUDA_OPS = "bitsandbytes.backends.cuda.ops"
FALLBACK = f"{CUDA_OPS}._dequant_linear_fallback"
LAST = f"{CUDA_OPS}._dequantize_4bit_impl"  # where every decode that bitsandbytes does itself on CUDA ends
UNSLOTH = "unsloth.kernels.utils.fast_dequantize"


class UnknownInternals(RuntimeError):
    """A library is not as this module knows it, so nothing of it was touched; the text names what differs."""


def current(name: str):
    """What the module refers to by the last part of `name` now; None without the module or the attribute."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def site_of(function) -> Site | None:
    """The call site that a function stands in at, if it is a replacement (of any copy of this package)
    itself: functools.wraps copies marks to wrappers."""
    site = getattr(function, "__dict__", {}).get("nf4_site")
    return site if site and site.replacement is function else None


def reloaded(site: Site) -> bool:
    """Was the site's module loaded again since, so that the library's own function is back?"""
    function, original = current(site.name), site.original
    places = [getattr(getattr(one, "__code__", None), "co_filename", None) for one in (function, original)]
    same = places[0] == places[1] and getattr(function, "__name__", "") == site.name.rpartition(".")[2]
    return function is not original and same


def fingerprint(source: str) -> str:
    """12 hex digits of a piece of code, blind to indentation, blank lines and comment lines."""
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _require(condition, name: str, text: str) -> None:
    if not condition:
        library = name.split(".")[0]
        version = getattr(sys.modules.get(library), "__version__", "")
        raise UnknownInternals(
            f"{library} {version} is not known here, nothing of it was changed: {name} {text}"
        )


def _require_function(name: str, parameters: tuple[str, ...], more: tuple[str, ...] | None = None) -> None:
    """Refuse a function that does not take these parameters first. Others with a default may follow: those in
    `more`, or any."""
    function = current(name)
    _require(inspect.isroutine(function), name, "is missing")
    if site_of(function):
        raise RuntimeError(f"{name} is another copy's NF4 kernel already: call restore(), then try again")
    have = inspect.signature(function).parameters
    fits = tuple(have)[: len(parameters)] == parameters
    for rest in list(have.values())[len(parameters) :]:
        fits &= rest.default is not rest.empty and (more is None or rest.name in more)
    _require(fits, name, f"takes {tuple(have)}, expected {parameters}")


def _source(code) -> str:
    """Source of a function or class; of a module, that of the operator gemm_4bit which it registers."""
    source = inspect.getsource(code)
    if not inspect.ismodule(code):
        return source
    for node in ast.parse(source).body:
        decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
        if any("'bitsandbytes::gemm_4bit', 'cuda'" in one for one in decorators):
            return ast.get_source_segment(source, node)
    return ""


def _unknown(codes: dict[str, object]) -> str:
    """Why code is not what KNOWN says, from {name: function, class or module}; "" where it is."""
    for name, code in codes.items():
        try:
            if fingerprint(_source(code)) != KNOWN[name]:
                return f"the code of {name} is not one that is known"
        except (OSError, TypeError, SyntaxError) as error:  # no source files, as in a frozen application
            return f"the code of {name} cannot be read ({error})"
    return ""


def _calls(function, *names: str) -> bool:
    return set(names) <= set(getattr(getattr(function, "__code__", None), "co_names", ()))


def _add(library: Library, name: str, make: Callable, *arguments) -> None:
    """Give the library another call site, and have its replacement made."""
    library.sites.append(site := Site(name, current(name), library))
    make(site, *arguments)


def bitsandbytes() -> Library:
    """Its call sites, replacements made but not in place, and what is left to it."""
    import bitsandbytes.autograd._functions as products
    from bitsandbytes import functional

    library = Library()
    _require_function(DEQUANTIZE, ("A", "quant_state", "absmax", "out", "blocksize", "quant_type"))
    _add(library, DEQUANTIZE, call_sites.dequantize_4bit, kernel)
    cuda = None
    if torch.cuda.is_available() and "bitsandbytes.backends.cuda" in sys.modules:
        cuda = importlib.import_module(CUDA_OPS)
    gemm = {"gemm_4bit on CUDA": cuda, "_dequant_linear_fallback": current(FALLBACK)}
    if current(FALLBACK):
        if why := _unknown(gemm):
            library.left[FALLBACK] = why
        else:
            _add(library, FALLBACK, call_sites.gemm_fallback, kernel)
    forward, backward = products.MatMul4Bit.forward, products.MatMul4Bit.backward
    if not (_calls(forward, "dequantize_4bit") and _calls(backward, "dequantize_4bit")):  # from 0.50 on
        known = {"matmul_4bit": products.matmul_4bit, "MatMul4Bit": products.MatMul4Bit}
        if why := _unknown(known | (gemm if cuda else {})):
            library.left[PRODUCT] = why
            _add(library, PRODUCT, call_sites.watch)
        else:
            _add(library, PRODUCT, call_sites.matmul_4bit, kernel, functional, cuda)
    if current(LAST):
        _add(library, LAST, call_sites.watch)
    return library


def unsloth() -> Library:
    """As `bitsandbytes`, for Unsloth's one function. Its arguments beyond `out` change no bit."""
    from bitsandbytes.functional import QuantState

    importlib.import_module("unsloth.kernels.utils")
    _require_function(UNSLOTH, ("W", "quant_state", "out"), more=("use_global_buffer", "dtype"))
    _add(library := Library(), UNSLOTH, call_sites.unsloth_fast_dequantize, kernel, QuantState)
    return library


SITES = {"bitsandbytes": bitsandbytes, "unsloth": unsloth}
# Libraries that decode through bitsandbytes: the helper they do it by outside the layers' products.
ROUTES = {
    "peft": "peft.utils.integrations.dequantize_bnb_weight",
    "transformers": "transformers.integrations.bitsandbytes.dequantize_bnb_weight",
}


def route(library: str) -> str:
    """How a library of ROUTES decodes: its helper calls bitsandbytes' function, or goes its own way."""
    importlib.import_module(ROUTES[library].rpartition(".")[0])
    if _calls(current(ROUTES[library]), "functional", "dequantize_4bit"):
        return f"whose {ROUTES[library]} calls {DEQUANTIZE}"
    return f"in its layers' products; {ROUTES[library]} does not call {DEQUANTIZE} and stays as it is"


def several_bitsandbytes() -> str:
    """Where more than one bitsandbytes is on the path: which of them is in use; "" otherwise."""
    versions = {
        str(one.locate_file("bitsandbytes")): one.version
        for one in importlib.metadata.distributions(name="bitsandbytes")
    }
    if len(versions) < 2:
        return ""
    listed = ", ".join(f"{version} in {path}" for path, version in versions.items())
    return f"bitsandbytes is installed twice ({listed}); in use is {sys.modules['bitsandbytes'].__file__}"
