"""Switch the kernel on and off in the libraries people fine-tune with: one call, the same bits, reversible.

`use_nf4_kernel` replaces functions of bitsandbytes and Unsloth in every imported module of PACKAGES that
refers to them. PEFT and transformers dequantize through bitsandbytes. It does not reach a name that your own
script imported before the call, a functools.partial, or libraries with kernels of their own: print(switch)
lists those it can see. A state that the kernel does not accept goes to the library's own function, counted.

A function is replaced if it takes the parameters listed here and a self-test is bit-identical. The
replacement of bitsandbytes' matrix product repeats its code, so there the source must also be one in KNOWN.
"""

import ast
import collections
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import linear

from . import autoload, launch

LIBRARIES = ("unsloth", "bitsandbytes", "peft", "transformers")
# Packages whose modules are searched; Unsloth writes and imports modules of its own ("unsloth_compiled...").
PACKAGES = ("bitsandbytes", "unsloth", "peft", "transformers", "trl", "accelerate")
UNSLOTH = "unsloth.kernels.utils.fast_dequantize"
DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
PRODUCT = "bitsandbytes.autograd._functions.matmul_4bit"
AUTOGRAD = "bitsandbytes.autograd._functions.MatMul4Bit"
CUDA_OPS = "bitsandbytes.backends.cuda.ops"
FALLBACK = f"{CUDA_OPS}._dequant_linear_fallback"
LAST = f"{CUDA_OPS}._dequantize_4bit_impl"  # all that bitsandbytes itself dequantizes on CUDA ends here
# Sources that a replacement repeats, as in bitsandbytes 0.50.0, 0.50.1 and 0.50.2. CUDA_OPS: its gemm_4bit.
KNOWN = {
    PRODUCT: "b1af5aac6955",
    AUTOGRAD: "ed850bab240f",
    CUDA_OPS: "9cef37263286",
    FALLBACK: "4e5f00cbe3fb",
}
# The functions by which PEFT and transformers dequantize outside a layer's product.
ROUTES = {
    "peft": "peft.utils.integrations.dequantize_bnb_weight",
    "transformers": "transformers.integrations.bitsandbytes.dequantize_bnb_weight",
}
# Functions that dequantize in kernels of their own (mixtures of experts), which no switch reaches.
OWN_KERNELS = (
    "unsloth_zoo.temporary_patches.gpt_oss_grouped_qlora.nf4_dequant_expert_stack",
    "unsloth_zoo.temporary_patches.moe_nf4_grouped.nf4_grouped_mm",
)
RELOADED, OTHER = "was reloaded: call use_nf4_kernel() again", "is another function"
REPLACED = "was wrapped or replaced by another library"
log = logging.getLogger("nf4_triton")
_KINDS = {types.FunctionType, functools.partial}
_compiling = torch.compiler.is_dynamo_compiling
_functorch = torch._C._are_functorch_transforms_active
_plain_tensors = torch._C.DisableTorchFunctionSubclass  # Params4bit answers every method through Python


class UnknownInternals(RuntimeError):
    """A function of a library is missing or takes other arguments, so the library was left unchanged."""


def your_fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, dtype=None):
    """Dequantize with the signature of Unsloth's fast_dequantize.

    W: packed 4-bit codes; without a quant_state W itself is returned. out: optional contiguous tensor of
    quant_state's shape and dtype to fill. The result is a new tensor whatever use_global_buffer says; dtype
    is for Unsloth's other formats and ignored. Raises UnsupportedState.
    """
    return W if quant_state is None else launch._your_dequantize_nf4(W, quant_state, out)


class Library:
    """A library's sites, and the holders that keep it switched on. All its replacements read `on`."""

    def __init__(self):
        self.on, self.sites, self.left, self.holders = False, [], {}, set()


class Site:
    """A function of a library, its replacement, and how often each of them dequantized.

    kernel: calls by the kernel; library: calls by the library, by `reasons`; fused: products that the library
    forms without dequantizing. Calls in compiled code are not counted; concurrent threads may miss a few.
    """

    def __init__(self, name: str, library: Library):
        self.name, self.original, self.library_switch = name, current(name), library
        self.replacement: Callable | None = None
        self.watched = False  # the replacement only counts
        self.kernel = self.library = self.fused = 0
        self.reasons: collections.Counter = collections.Counter()

    def replace(self, function: Callable) -> "Site":
        """Make `function` the replacement. It keeps the original's name and module, so it pickles alike."""
        functools.update_wrapper(function, self.original, updated=())
        function.nf4_site, self.replacement = self, function
        return self

    def changed(self) -> str:
        """Return what others did to the function since, "" if it is as this module left it."""
        now, original = current(self.name), self.original
        if now is (self.replacement if self.library_switch.on else original):
            return ""
        files = [getattr(getattr(one, "__code__", None), "co_filename", None) for one in (now, original)]
        alike = files[0] == files[1] and getattr(now, "__name__", "") == self.name.rpartition(".")[2]
        return RELOADED if alike else REPLACED if self.library_switch.on else OTHER

    def tally(self) -> dict:
        kinds = {kind: getattr(self, kind) for kind in ("kernel", "library", "fused")}
        return kinds | {"reasons": collections.Counter(self.reasons)}

    def left(self, reason: Exception) -> None:
        """Count a call that the library dequantizes because of `reason`."""
        self.library += 1
        self.reasons[str(reason).split(":")[0]] += 1


# A reload of this module keeps both: what is switched on must stay reachable.
_lock = globals().get("_lock") or threading.RLock()
_libraries: dict[str, Library] = globals().get("_libraries") or {name: Library() for name in LIBRARIES[:2]}
_tested: set = set()  # (the library's function, the kernel's) that gave the same bits


class Switch(contextlib.AbstractContextManager):
    """What one call of use_nf4_kernel did. `off()` or the end of its `with` block undoes it.

    libraries: switched on, as a tuple of "unsloth" and "bitsandbytes"; refused: {library: why it was not};
    left: {function: why it stays the library's}; partial: whether imported libraries still dequantize
    something themselves. str(switch) says all of it.
    """

    def __init__(self):
        self.libraries: tuple[str, ...] = ()
        self.routes: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._before: dict[Site, dict] = {}

    @property
    def on(self) -> bool:
        """Whether this switch still holds a library."""
        return any(library.on and self in library.holders for library in self._held())

    @property
    def partial(self) -> bool:
        return bool(self.libraries and (self.left or any(name in sys.modules for name in self.refused)))

    @property
    def sites(self) -> list[Site]:
        return [site for library in self._held() for site in library.sites]

    def off(self) -> None:
        """Put the libraries' own functions back, unless another open switch holds them."""
        with _lock:
            for library in _libraries.values():
                library.holders.discard(self)
                if library.on and not library.holders:
                    _remove(library)

    def __enter__(self) -> "Switch":
        if self.libraries and not self.on:
            raise RuntimeError("this switch is off, and stays off: call use_nf4_kernel() for a new one")
        return self

    def __exit__(self, *_) -> None:
        self.off()

    def counts(self) -> dict[str, dict]:
        """Return, for each function, the eager calls since this switch.

        {"kernel": dequantized by the kernel, "library": by the library, "reasons": {why: calls}, "fused":
        products that bitsandbytes forms without dequantizing}. Raises RuntimeError if a library was reloaded.
        """
        if gone := [site.name for site in self.sites if self.on and site.changed() == RELOADED]:
            raise RuntimeError(f"{gone[0]} {RELOADED}")
        counts = {}
        for site in self.sites:
            before = self._before.get(site, {})
            counts[site.name] = {kind: n - before.get(kind, type(n)()) for kind, n in site.tally().items()}
        return counts

    def summary(self) -> str:
        """Return one sentence: how many dequantizations the libraries did themselves."""
        if not self.libraries:
            return "The kernel was not used: the libraries dequantized everything."
        counts = self.counts()
        by_kernel = sum(row["kernel"] for row in counts.values())
        by_library = sum(row["library"] for row in counts.values())
        if LAST in counts:
            by_library = counts[LAST]["library"]
        return f"{by_library} of {by_kernel + by_library} dequantizations went through the library"

    def __repr__(self) -> str:
        libraries = ", ".join((*self.libraries, *self.routes)) or "nothing"
        return f"<nf4_triton.Switch of {libraries}: {'on' if self.on else 'off'}>"

    def __str__(self) -> str:
        names = [site.name for site in self.sites if not site.watched]
        if not self.on and names:
            still_on = any(library.on for library in self._held())
            text = "off, but still on for another switch:" if still_on else "off. It had replaced:"
            return f"Switched {text} {', '.join(names)}."
        lines = ["The NF4 kernel is not used."]
        if names:
            lines = [f"The NF4 kernel works here{' in part' * self.partial}. It dequantizes in:"]
            lines += [f"  {name}" for name in names]
        lines += [f"  {name}, {how}" for name, how in self.routes.items()]
        lines += [f"Left to the library: {name}: {why}" for name, why in self.left.items()]
        lines += [f"Not replaced: {name}: {why}" for name, why in _not_replaced(self.sites).items()]
        for reason in dict.fromkeys(self.refused.values()):
            refused = [name for name, why in self.refused.items() if why == reason]
            lines.append(f"Not in {', '.join(refused)}: {reason}")
        changes = {site.name: site.changed() for site in self.sites if not site.watched}
        lines += [f"Since then {name} {change}." for name, change in changes.items() if change]
        return "\n".join(lines)

    def _held(self) -> list[Library]:
        return [_libraries[name] for name in self.libraries]

    def _hold(self, name: str) -> None:
        library = _libraries[name]
        library.holders.add(self)
        self.libraries = tuple(dict.fromkeys((*self.libraries, name)))
        self.left |= library.left
        self._before |= {site: site.tally() for site in library.sites}


def use_nf4_kernel(*names: str, quiet: bool = False, strict: bool = False) -> Switch:
    """Let the kernel dequantize in Unsloth, bitsandbytes, PEFT and transformers, or only in those named.

    names: of "unsloth", "bitsandbytes", "peft", "transformers"; without names, all that are imported.
    quiet: log nothing, except why a library that was named is not switched. Otherwise the logger
    "nf4_triton" says what was replaced and what was not, on one process per host (LOCAL_RANK 0).
    strict: raise if a library cannot be switched, and change nothing. Otherwise it is left as it is, and
    switch.refused says why: training goes on without the kernel.

    Returns a Switch. Calls may overlap, in any order and thread: a library is restored when the last switch
    that holds it ends. Raises ValueError for an unknown name; with strict, ImportError (not installed),
    UnknownInternals (other functions than expected) or RuntimeError (no usable GPU, or other bits).
    """
    if unknown := [name for name in names if name not in LIBRARIES]:
        raise ValueError(f"{unknown[0]!r} is unknown, expected one of {', '.join(LIBRARIES)}")
    autoload.waiting.clear()
    switch = Switch()
    with _lock:
        try:
            for name in names or LIBRARIES:
                try:
                    _switch_on(name, switch, asked=bool(names))
                except Exception as error:
                    if strict:
                        raise
                    switch.refused[name] = f"{error}" or type(error).__name__
        except BaseException:
            switch.off()
            raise
    if not quiet:
        say(str(switch))
    elif names and switch.refused:
        refused = [f"{name} runs without the NF4 kernel: {why}" for name, why in switch.refused.items()]
        say("\n".join(refused), logging.WARNING)
    return switch


def restore() -> None:
    """Put every library's own functions back, whoever switched them. Also works twice, after this module was
    reloaded, and beside a second copy of it."""
    with _lock:
        autoload.waiting.clear()
        for library in _libraries.values():
            library.on = False
        _put_back()


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def say(text: str, level: int = logging.INFO) -> None:
    """Log on one process per host (LOCAL_RANK 0), to stderr if the logger "nf4_triton" has no handler."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if not log.handlers:
        log.addHandler(_Stderr())
        log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    log.log(level, "%s", text)


# Switching


def _switch_on(name: str, switch: Switch, asked: bool) -> None:
    """Switch one library on for `switch`, all of its functions or none."""
    if name not in sys.modules:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"{name} is not installed")
        if not asked and name in ROUTES and "bitsandbytes" in switch.libraries:
            switch.routes[name] = "once it is imported"
            return
        if not asked and name != "bitsandbytes":
            raise ImportError("not imported; import it first, then call use_nf4_kernel()")
        importlib.import_module(name)
    through = "bitsandbytes" if name in ROUTES else name
    _install(through)
    switch._hold(through)
    if name in ROUTES:
        importlib.import_module(ROUTES[name].rpartition(".")[0])
        calls = _calls(current(ROUTES[name]), "functional", "dequantize_4bit")
        how = f"only in its layers: {ROUTES[name]} does not call {DEQUANTIZE}"
        switch.routes[name] = f"whose {ROUTES[name]} calls {DEQUANTIZE}" if calls else how


def _install(name: str) -> None:
    library = _libraries[name]
    if not library.on:
        library.holders.clear()  # those that another copy of this package restored
    if not library.sites or any(site.changed() in (RELOADED, OTHER) for site in library.sites):
        if library.on:
            _remove(library)
        library.sites, library.left = {"bitsandbytes": _bitsandbytes, "unsloth": _unsloth}[name](library)
    if not library.on:
        _self_test()
    replacements = {id(site.original): site.replacement for site in library.sites}
    try:  # also if it is on: modules imported since may hold the originals
        for module, attribute, value in _references(PACKAGES):
            if id(value) in replacements:
                setattr(module, attribute, replacements[id(value)])
        library.on = True
    except BaseException:
        library.holders.clear()
        _remove(library)
        raise


def _remove(library: Library) -> None:
    library.on = False  # all replacements at once; a copy that nobody can find only passes calls on
    _put_back(library.sites)


def _put_back(sites: list[Site] | None = None) -> None:
    """Undo replacements in all modules: those of `sites`, or those of every copy of this package."""
    for module, attribute, value in _references():
        site = site_of(value)
        if site and (sites is None or site in sites):
            site.library_switch.on = False
            with contextlib.suppress(Exception):  # a module that cannot be written keeps the detour
                setattr(module, attribute, site.original)


def _references(packages: tuple[str, ...] = ("",)) -> Iterator[tuple[types.ModuleType, str, object]]:
    """Yield (module, attribute, value) for every function in the imported modules of these packages."""
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", "")).lower()
        if isinstance(module, types.ModuleType) and name.startswith(packages):
            names = list(vars(module).items())
            for attribute, value in [row for row in names if type(row[1]) in _KINDS]:
                yield module, attribute, value


def _not_replaced(sites: list[Site]) -> dict[str, str]:
    """Return {name: why} of what still dequantizes without the kernel, as far as modules show it."""
    originals = {id(site.original) for site in sites if not site.watched}
    kept = {name: "it has a kernel of its own" for name in OWN_KERNELS if sites and current(name)}
    for module, attribute, value in _references():
        function = value.func if type(value) is functools.partial else value
        if id(function) in originals and not module.__name__.startswith(__package__):
            kept[f"{module.__name__}.{attribute}"] = "it was imported before use_nf4_kernel() was called"
    return kept


def _self_test() -> None:
    """Raise RuntimeError unless the kernel runs here, bit-identical to bitsandbytes. Only success is kept."""
    from bitsandbytes import __version__ as version
    from bitsandbytes import functional

    from .backend import cannot_run

    if problem := cannot_run():
        raise RuntimeError(problem)
    site, ours = site_of(functional.dequantize_4bit), launch._your_dequantize_nf4
    library = site.original if site else functional.dequantize_4bit
    if (library, ours) in _tested:
        return
    device = "cpu" if launch.INTERPRETED else "cuda"
    for dtype in (torch.float16, torch.bfloat16):
        name = f"bitsandbytes {version}"
        try:
            with torch.device(device):  # models are often created on "meta"
                values = torch.linspace(-3, 3, 64 * 64, dtype=torch.float32, device=device)
                values = values.view(64, 64).to(dtype)
                packed, state = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
                expected = library(packed, state)
                name = "the kernel"
                same = torch.equal(ours(packed, state), expected)
        except Exception as error:
            raise RuntimeError(f"{name} does not run here: {type(error).__name__}: {error}") from error
        if not same:
            why = " (0.47 and 0.48 round the NF4 table first, but only on a CPU)" * (device == "cpu")
            raise RuntimeError(f"the kernel's {dtype} bits differ from bitsandbytes {version}'s{why}")
    _tested.add((library, ours))


# What is known of the libraries


def current(name: str):
    """Return what a module refers to by the last part of `name` now, None without the module or the name."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def site_of(function) -> Site | None:
    """Return the site that a function is the replacement of. functools.wraps copies the mark to wrappers."""
    site = getattr(function, "nf4_site", None) if type(function) is types.FunctionType else None
    return site if site and site.replacement is function else None


def _require(name: str, parameters: tuple[str, ...], more: tuple[str, ...] | None = None) -> None:
    """Refuse a function that does not take `parameters` first. Others need a default and, if `more` is given,
    one of its names."""
    function, library = current(name), name.partition(".")[0]
    if site_of(function):
        raise RuntimeError(f"{name} was replaced by another copy of nf4_triton: call restore() first")
    problem = "is missing"
    if inspect.isfunction(function):
        have = inspect.signature(function).parameters
        fits = tuple(have)[: len(parameters)] == parameters
        for rest in list(have.values())[len(parameters) :]:
            fits &= rest.default is not rest.empty and (more is None or rest.name in more)
        problem = "" if fits else f"takes {tuple(have)}, expected {parameters}"
    if problem:
        version = getattr(sys.modules.get(library), "__version__", "")
        raise UnknownInternals(f"{library} {version} is unknown and was left unchanged: {name} {problem}")


def _unknown(*names: str) -> str:
    """Return why these sources are not the ones in KNOWN, "" if they are. Indentation and comments do not
    count."""
    for name in names:
        try:
            lines = (line.strip() for line in _source(current(name)).splitlines())
        except (OSError, TypeError, SyntaxError) as error:  # no source files, as in a frozen application
            return f"the code of {name} cannot be read ({error})"
        text = "\n".join(line for line in lines if line and not line.startswith("#"))
        if hashlib.sha256(text.encode()).hexdigest()[:12] != KNOWN[name]:
            return f"the code of {name} is not known"
    return ""


def _source(code) -> str:
    """Return the source of a function or class; of a module, that of the CUDA operator gemm_4bit."""
    source = inspect.getsource(code)
    for node in ast.parse(source).body if inspect.ismodule(code) else ():
        decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
        if any("'bitsandbytes::gemm_4bit', 'cuda'" in one for one in decorators):
            return ast.get_source_segment(source, node)
    return source


def _calls(function, *names: str) -> bool:
    return set(names) <= set(getattr(getattr(function, "__code__", None), "co_names", ()))


def _bitsandbytes(library: Library) -> tuple[list[Site], dict[str, str]]:
    """Return bitsandbytes' sites, with replacements that are not in place yet, and {function left: why}."""
    _require(DEQUANTIZE, ("A", "quant_state", "absmax", "out", "blocksize", "quant_type"))
    sites, left, cuda_ops = [_dequantize_4bit(Site(DEQUANTIZE, library))], {}, sys.modules.get(CUDA_OPS)
    operator = (CUDA_OPS, FALLBACK) if cuda_ops else ()
    if current(FALLBACK):
        if why := _unknown(*operator):
            left[FALLBACK] = why
        else:
            sites.append(_gemm_fallback(Site(FALLBACK, library)))
    parts = [getattr(current(AUTOGRAD), part, None) for part in ("forward", "backward")]
    if not all(_calls(part, "dequantize_4bit") for part in parts):  # from 0.50 on
        site = Site(PRODUCT, library)
        if why := _unknown(PRODUCT, AUTOGRAD, *operator):
            left[PRODUCT] = why
        sites.append(_watch(site) if why else _matmul_4bit(site, cuda_ops))
    if current(LAST):
        sites.append(_watch(Site(LAST, library)))
    return sites, left


def _unsloth(library: Library) -> tuple[list[Site], dict[str, str]]:
    importlib.import_module("unsloth.kernels.utils")
    _require(UNSLOTH, ("W", "quant_state", "out"), more=("use_global_buffer", "dtype"))
    return [_fast_dequantize(Site(UNSLOTH, library))], {}


# The replacements: each takes its original's arguments and returns the same bits. They look the kernel up at
# each call, so that a reloaded one is used.


class State(types.SimpleNamespace):
    """Fields of a quant_state for one call."""


def _covered(weight, state) -> bool:
    """Return whether the kernel accepts these tensors, from metadata that torch.compile guards: compiled code
    cannot catch UnsupportedState. A value that it refuses ends the trace, and the call runs eagerly."""
    n, fp32 = math.prod(state.shape), (torch.float32,)
    blocks = -(-n // state.blocksize)
    needed = [(state.absmax, (torch.uint8,) if state.nested else fp32, blocks)]
    if state.nested:
        second, offset = state.state2, state.offset
        if second is None or second.dtype is not torch.float32 or offset is None or offset.numel() != 1:
            return False
        needed += [(second.absmax, fp32, -(-blocks // second.blocksize)), (second.code, fp32, 256)]
        needed += [(offset, (torch.float32, torch.bfloat16, torch.float16), 1)]
    for tensor, dtypes, count in needed:
        if tensor is None or tensor.dtype not in dtypes or tensor.device != weight.device:
            return False
        if tensor.numel() < count or not tensor.is_contiguous():
            return False
    return not (
        not (weight.is_cuda or launch.INTERPRETED)
        or getattr(state, "packing_format_for_cpu", False)
        or weight.dtype not in launch.STORAGES
        or not weight.is_contiguous()
        or weight.numel() * weight.element_size() * 2 < n
        or (weight.is_floating_point() and n > 3 and tuple(weight.shape) == tuple(state.shape))
    )


def _dequantize(site: Site, weight, state, out=None):
    """Return the weight that the kernel dequantizes, counted; None if that is left to the library."""
    if _compiling():
        return launch._your_dequantize_nf4(weight, state, out) if _covered(weight, state) else None
    try:
        result = launch._your_dequantize_nf4(weight, state, out)
    except launch.UnsupportedState as error:
        return site.left(error)
    site.kernel += 1
    return result


def _fast_dequantize(site: Site) -> Site:
    """Replace Unsloth's fast_dequantize. Results are new tensors, as `use_global_buffer` permits.
    Other formats (8 bit, NVFP4, MXFP4) have other state types and pass through."""
    from bitsandbytes.functional import QuantState

    original, library = site.original, site.library_switch

    def fast_dequantize(W, quant_state=None, out=None, *more, **named):
        if type(quant_state) is QuantState and library.on:
            if (result := _dequantize(site, W, quant_state, out)) is not None:
                return result
        return original(W, quant_state, out, *more, **named)

    return site.replace(fast_dequantize)


def _dequantize_4bit(site: Site) -> Site:
    """Replace bitsandbytes.functional.dequantize_4bit. Calls without a quant_state, or with arguments that a
    newer release adds, go to the library."""
    original, library = site.original, site.library_switch

    def dequantize_4bit(
        A, quant_state=None, absmax=None, out=None, blocksize=64, quant_type="fp4", *more, **named
    ):
        if library.on and quant_state is not None and not more and not named:
            if (result := _dequantize(site, A, quant_state, out)) is not None:
                return result
        return original(A, quant_state, absmax, out, blocksize, quant_type, *more, **named)

    return site.replace(dequantize_4bit)


def _gemm_fallback(site: Site) -> Site:
    """Replace the branch of bitsandbytes' CUDA operator gemm_4bit that dequantizes and multiplies: compiled
    graphs run it, and eager calls that `_matmul_4bit` leaves to the operator."""
    original, library = site.original, site.library_switch

    def fallback(
        A, B, shapeB, absmax, blocksize, quant_type, bias=None,
        absmax_8bit=None, absmax_code=None, absmax_offset=None,
    ):  # fmt: skip
        if library.on:
            state = State(shape=torch.Size(shapeB), dtype=A.dtype, quant_type=quant_type, blocksize=blocksize)
            state.nested, state.absmax = absmax_8bit is not None, absmax
            if state.nested:
                state.state2 = State(absmax=absmax, code=absmax_code, blocksize=256, dtype=torch.float32)
                state.absmax, state.offset = absmax_8bit, absmax_offset
            if (weight := _dequantize(site, B, state)) is not None:  # here one row means no transposed weight
                return linear(A, weight.t() if B.shape[0] == 1 else weight, bias)
        return original(
            A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset
        )

    return site.replace(fallback)


def _matmul_4bit(site: Site, cuda_ops: types.ModuleType | None) -> Site:
    """Replace bitsandbytes' matmul_4bit where it dequantizes and multiplies: the same weight into the same
    `linear` (forward) and `matmul` (backward), without the operator's dispatch and two helper kernels.
    Products of few rows stay with bitsandbytes' fused kernels, whose sums round differently; `cuda_ops` says
    which (None on a CPU, where it always dequantizes)."""
    from bitsandbytes import functional

    original, library, tensor = site.original, site.library_switch, torch.Tensor
    fused = getattr(cuda_ops, "_gemm_4bit_use_custom_fn", None)
    most_rows = getattr(cuda_ops, "_gemm_4bit_custom_max_m", 0)
    on_cpu = launch.INTERPRETED and cuda_ops is None

    def dequantized(B, state, dtype):  # to the dtype of the input, whatever the state's
        state = state if state.dtype is dtype else State(**vars(state) | {"dtype": dtype})
        return launch._your_dequantize_nf4(B, state)

    class MatMul4Bit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, A, B, bias, quant_state):
            ctx.packed, ctx.state = B, quant_state
            return linear(A, dequantized(B, quant_state, A.dtype), bias)

        @staticmethod
        def backward(ctx, grad):
            weight = functional.dequantize_4bit(ctx.packed, ctx.state)
            return torch.matmul(grad, weight.to(grad.dtype)), None, None, None

    # Function.apply itself only adds a check for functorch, which is made below.
    apply = super(torch.autograd.Function, MatMul4Bit).apply

    def matmul_4bit(A, B, quant_state, out=None, bias=None):
        if library.on and out is None and not _compiling() and type(A) is tensor and not _functorch():
            try:
                outputs, inputs = quant_state.shape
                elements = A.numel()
                rows = elements // inputs
                if (
                    A.shape[-1] == inputs
                    and elements
                    and inputs * outputs
                    >= 64  # smaller: the packed column may be one row, read as transposed
                    and (A.is_cuda or on_cpu)
                    and (bias is None or not bias.requires_grad)
                    and (not quant_state.nested or quant_state.state2.blocksize == 256)
                ):
                    if fused and rows <= most_rows:
                        odd = inputs % quant_state.blocksize  # then bitsandbytes warns, and dequantizes
                        if odd or fused(A.device.index, A.dtype, rows, outputs, inputs):
                            site.fused += not odd
                            return original(A, B, quant_state, out, bias)
                    with _plain_tensors():
                        B = B.data  # keeps the present storage, as bitsandbytes' view does, in half the time
                        if B.size(0) == 1:
                            B = B.view(-1, 1)
                    if A.requires_grad and torch.is_grad_enabled():
                        result = apply(A, B, bias, quant_state)
                    else:
                        result = linear(A, dequantized(B, quant_state, A.dtype), bias)
                    site.kernel += 1
                    return result
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                site.left(error)  # whatever is wrong with the arguments, bitsandbytes says it best
        return original(A, B, quant_state, out, bias)

    return site.replace(matmul_4bit)


def _watch(site: Site) -> Site:
    """Count the calls of a function that stays the library's."""
    original, site.watched = site.original, True

    def watched(*arguments, **named):
        if not _compiling():
            site.library += 1
        return original(*arguments, **named)

    return site.replace(watched)
