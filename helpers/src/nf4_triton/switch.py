"""Switch the kernel on and off in the libraries people fine-tune with: one call, the same bits, reversible.

`use_nf4_kernel` replaces the functions listed in LIBRARIES, in every imported module of PACKAGES that refers
to them. A function is replaced if it takes the parameters listed there and a self-test on a small layer is
bit-identical. What fails stays the library's, and print(switch) names it. So does a name that your own script
imported before the call, and a library with kernels of its own. A state that the kernel does not accept goes
to the library's own function, counted.
"""

import collections
import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from . import autoload, launch
from .backend import cannot_run
from .reference import same_bits

# Packages whose modules are searched; Unsloth writes and imports modules of its own ("unsloth_compiled...").
PACKAGES = ("bitsandbytes", "unsloth", "axolotl", "peft", "transformers", "trl", "accelerate")
THROUGH = {"peft": "bitsandbytes", "transformers": "bitsandbytes"}  # who dequantizes for them
UNSLOTH = "unsloth.kernels.utils.fast_dequantize"
AXOLOTL = "axolotl.kernels.quantize._ctypes_nf4_dequant"
DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
PRODUCT = "bitsandbytes.autograd._functions.matmul_4bit"
CUDA_OPS = "bitsandbytes.backends.cuda.ops"  # imported only where there is a GPU
FALLBACK = f"{CUDA_OPS}._dequant_linear_fallback"
# Functions that dequantize in kernels of their own (mixtures of experts), which no switch reaches.
OWN_KERNELS = (
    "unsloth_zoo.temporary_patches.gpt_oss_grouped_qlora.nf4_dequant_expert_stack",
    "unsloth_zoo.temporary_patches.moe_nf4_grouped.nf4_grouped_mm",
)
# Of calls: dequantized by the kernel, dequantized by the library, multiplied without dequantizing.
COUNTS = ("kernel", "library", "fused")
log = logging.getLogger("nf4_triton")
_compiling = torch.compiler.is_dynamo_compiling
State = types.SimpleNamespace  # a quant_state made of one call's arguments


class UnknownInternals(RuntimeError):
    """A function of a library is missing or takes other arguments, so the library was left unchanged."""


@dataclass(eq=False)
class Site:
    """A function of a library that dequantizes, and what computes its result.

    Calls in compiled code are not counted; concurrent threads may miss a few.
    """

    name: str
    answer: Callable  # answer(site, ...): the result of a call; None leaves it to the library
    results: Callable  # results(function, packed, quant_state): what the self-test compares
    exists: Callable = lambda: True  # whether this release of the library has it
    original: Callable | None = None
    replacement: Callable | None = None  # None: not tested yet, or left to the library
    counts: dict = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    reasons: collections.Counter = field(default_factory=collections.Counter)

    def count_fallback(self, reason: Exception) -> None:
        """Count a call that the library dequantizes because of `reason`."""
        self.counts["library"] += 1
        self.reasons[str(reason).split(":")[0]] += 1


@dataclass(eq=False)
class Library:
    """Sites that are switched together, and the switches that keep them on."""

    sites: tuple[Site, ...]  # without the first one the library is refused; others may be left as they are
    on: bool = False
    left: dict = field(default_factory=dict)  # {function: why it stays the library's}
    holders: set = field(default_factory=set)

    @property
    def replaced(self) -> list[Site]:
        return [site for site in self.sites if site.replacement]


# The answers: each takes its original's arguments and returns the same bits.


def _dequantize(site: Site, weight, state, out=None):
    """Return the weight that the kernel dequantizes, counted; None if that is left to the library."""
    try:
        result = launch._your_dequantize_nf4(weight, state, out)
    except launch.UnsupportedState as error:
        return None if _compiling() else site.count_fallback(error)
    if not _compiling():
        site.counts["kernel"] += 1
    return result


def fast_dequantize(site, W, quant_state=None, out=None, use_global_buffer=False, *, dtype=None):
    """Answer for Unsloth. The result is a new tensor, as `use_global_buffer` permits; `dtype` is for other
    formats (8 bit, NVFP4, MXFP4), which have other state types."""
    if type(quant_state).__name__ != "QuantState":
        return None
    return _dequantize(site, W, quant_state, out)


def dequantize_4bit(site, A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
    """Answer for bitsandbytes, which reads the other arguments only if there is no quant_state."""
    return None if quant_state is None else _dequantize(site, A, quant_state, out)


def _dequant_linear_fallback(
    site, A, B, shapeB, absmax, blocksize, quant_type, bias=None,
    absmax_8bit=None, absmax_code=None, absmax_offset=None,
):  # fmt: skip
    """Answer for the branch of bitsandbytes' CUDA operator gemm_4bit that dequantizes and multiplies. It runs
    in compiled graphs, and in eager calls that `matmul_4bit` leaves to the operator."""
    state = State(shape=shapeB, dtype=A.dtype, quant_type=quant_type, blocksize=blocksize)
    state.nested, state.absmax = absmax_8bit is not None, absmax
    if state.nested:
        state.absmax, state.offset = absmax_8bit, absmax_offset
        state.state2 = State(absmax=absmax, code=absmax_code, blocksize=256, dtype=torch.float32)
    weight = _dequantize(site, B, state)
    if weight is None:
        return None
    return linear(A, weight.t() if B.shape[0] == 1 else weight, bias)  # here a row is not a transposed weight


def _ctypes_nf4_dequant(site, W, absmax, code2, absmax2, offset, blocksize, blocksize2, shape, dtype):
    """Answer for Axolotl, whose LoRA kernels and operator axolotl::nf4_dequantize call it."""
    state = State(shape=shape, dtype=dtype, quant_type="nf4", blocksize=blocksize, nested=True)
    state.absmax, state.offset = absmax, offset
    state.state2 = State(absmax=absmax2, code=code2, blocksize=blocksize2, dtype=torch.float32)
    return _dequantize(site, W, state)


def matmul_4bit(site, A, B, quant_state, out=None, bias=None):
    """Answer for bitsandbytes where it dequantizes and multiplies: the same weight into the same `linear`
    (forward) and `matmul` (backward), without the operator's dispatch and two helper kernels."""
    if out is not None or _compiling() or not product_applies(A, quant_state, bias):
        return None
    if is_fused(A, quant_state):
        site.counts["fused"] += 1
        return None
    with torch._C.DisableTorchFunctionSubclass():  # Params4bit answers every method through Python
        packed = B.view(-1, 1)
    try:
        if A.requires_grad and torch.is_grad_enabled():
            result = Product.apply(A, packed, quant_state, bias)
        else:
            result = product(A, packed, quant_state, bias)
    except launch.UnsupportedState:
        return None  # the operator's own branch counts it
    site.counts["kernel"] += 1
    return result


def product_applies(A, quant_state, bias) -> bool:
    """Return whether bitsandbytes forms the product of a plain tensor and a weight that was quantized as
    (outputs, inputs), in whole blocks."""
    if type(A) is not torch.Tensor or torch._C._are_functorch_transforms_active():
        return False
    if quant_state is None or len(quant_state.shape) != 2:
        return False
    outputs, inputs = quant_state.shape
    return (
        A.numel() > 0
        and A.shape[-1] == inputs
        and inputs % quant_state.blocksize == 0
        and A.is_cuda == (CUDA_OPS in sys.modules)
        and (bias is None or not bias.requires_grad)
        and (not quant_state.nested or quant_state.state2.blocksize == 256)
    )


def is_fused(A, quant_state) -> bool:
    """Return whether bitsandbytes takes a fused kernel for so few rows, whose sums round differently."""
    cuda_ops = sys.modules.get(CUDA_OPS)
    if cuda_ops is None:  # on a CPU it always dequantizes
        return False
    outputs, inputs = quant_state.shape
    rows = A.numel() // inputs
    if rows > cuda_ops._gemm_4bit_custom_max_m:
        return False
    return cuda_ops._gemm_4bit_use_custom_fn(A.device.index, A.dtype, rows, outputs, inputs)


def product(A, packed, quant_state, bias):
    """Return linear(A, weight, bias) of the weight dequantized to A's dtype, whatever the state's is."""
    if quant_state.dtype is not A.dtype:
        quant_state = State(**vars(quant_state) | {"dtype": A.dtype})
    return linear(A, launch._your_dequantize_nf4(packed, quant_state), bias)


class Product(torch.autograd.Function):
    """`product`, and its gradient for A."""

    @staticmethod
    def forward(ctx, A, packed, quant_state, bias):
        ctx.packed, ctx.quant_state = packed, quant_state
        return product(A, packed, quant_state, bias)

    @staticmethod
    def backward(ctx, grad):
        weight = current(DEQUANTIZE)(ctx.packed, ctx.quant_state)
        return torch.matmul(grad, weight.to(grad.dtype)), None, None, None


# The self-tests: what a function, the library's or its replacement, returns for a small layer.


def dequantized(function, packed, state):
    return function(packed, state), function(packed.t(), state)


def dequantized_from_parts(function, packed, state):
    second = state.state2
    parts = state.absmax, second.code, second.absmax, state.offset, state.blocksize, second.blocksize
    return [function(packed, *parts, state.shape, state.dtype)]


def multiplied_from_parts(function, packed, state):
    x, bias = small_input(64, state), small_input(1, state)[0, : state.shape[0]]
    sizes = state.blocksize, state.quant_type
    second = state.absmax, state.state2.code, state.offset
    return [function(x, packed, state.shape, state.state2.absmax, *sizes, bias, *second)]


def products_and_gradients(function, packed, state):
    """Of 1, 64, and 2,048 rows: bitsandbytes takes a fused kernel up to some hundred rows, at most 1,536."""
    results = []
    for rows in (1, 64, 2048):
        x = small_input(rows, state).requires_grad_()
        y = function(x, packed, state, bias=small_input(1, state)[0, : state.shape[0]])
        y.backward(y.detach())
        results += [y.detach(), x.grad]
    return results


def small_input(rows, state):
    values = torch.linspace(-1, 1, rows * state.shape[1], device=state.absmax.device)
    return values.view(rows, state.shape[1]).to(state.dtype)


def small_layer(dtype, device):
    """Return (packed, quant_state) of 128 x 192 nested NF4 weights: two second-level blocks, every code."""
    ramp = torch.linspace(0.01, 0.5, 128 * 192, dtype=torch.float32, device=device)
    values = (ramp * (1000 * ramp).sin()).view(128, 192).to(dtype)
    quantize = current("bitsandbytes.functional.quantize_4bit")
    return quantize(values, quant_type="nf4", compress_statistics=True)


def self_test(site: Site, replacement: Callable) -> None:
    """Raise RuntimeError unless a replacement returns the original's bits, and the kernel made them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = site.counts["kernel"]
    # Models are often created on "meta" or in inference mode.
    with torch.device(device), torch.inference_mode(False), torch.enable_grad():
        for dtype in (torch.float16, torch.bfloat16):
            try:
                layer = small_layer(dtype, device)
                expected = site.results(site.original, *layer)
                same = all(map(same_bits, site.results(replacement, *layer), expected))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise RuntimeError(f"the self-test of {site.name} failed: {problem}") from error
            if not same:
                raise RuntimeError(f"the kernel's {dtype} bits differ from those of {site.name}")
    if site.counts["kernel"] == before:
        raise RuntimeError(f"the kernel refused the self-test of {site.name}")


# The table


def has_gemm_4bit() -> bool:
    """Return whether this is bitsandbytes 0.50 or newer. Older products call dequantize_4bit."""
    return hasattr(torch.ops.bitsandbytes, "gemm_4bit")


def has_cuda_gemm_4bit() -> bool:
    return CUDA_OPS in sys.modules and has_gemm_4bit()


LIBRARIES = {
    "unsloth": Library((Site(UNSLOTH, fast_dequantize, dequantized),)),
    "bitsandbytes": Library((
        Site(DEQUANTIZE, dequantize_4bit, dequantized),
        Site(FALLBACK, _dequant_linear_fallback, multiplied_from_parts, has_cuda_gemm_4bit),
        Site(PRODUCT, matmul_4bit, products_and_gradients, has_gemm_4bit),
    )),
    "axolotl": Library((Site(AXOLOTL, _ctypes_nf4_dequant, dequantized_from_parts),)),
}  # fmt: skip
_lock = threading.RLock()


class Switch(contextlib.AbstractContextManager):
    """What one call of use_nf4_kernel did. `off()` or the end of its `with` block undoes it.

    libraries: switched on, as a tuple of names in LIBRARIES; refused: {library: why it was not}; left:
    {function: why it stays the library's}; partial: whether imported libraries still dequantize something
    themselves. str(switch) says all of it.
    """

    def __init__(self):
        self.libraries: tuple[str, ...] = ()
        self.refused: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._before = {}  # {site: its counts and reasons when this switch began}

    @property
    def on(self) -> bool:
        """Whether this switch still holds a library."""
        return any(self in library.holders for library in self._held())

    @property
    def partial(self) -> bool:
        return bool(self.libraries and (self.left or any(name in sys.modules for name in self.refused)))

    @property
    def sites(self) -> list[Site]:
        return [site for library in self._held() for site in library.replaced]

    def off(self) -> None:
        """Put the libraries' own functions back, unless another open switch holds them."""
        with _lock:
            for library in self._held():
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
        products that bitsandbytes forms without dequantizing}.
        """
        counts = {}
        for site in self.sites:
            before, reasons = self._before[site]
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
        return f"{text}; not counted: {', '.join(self.left)}" if self.left else text

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
        if "bitsandbytes" in self.libraries:
            lines.append("PEFT and transformers dequantize through bitsandbytes.")
        lines += [f"Left to the library: {name}: {why}" for name, why in self.left.items()]
        lines += [f"Not replaced: {name}: {why}" for name, why in _not_replaced(self.sites).items()]
        lines += [f"Not in {name}: {why}" for name, why in self.refused.items()]
        changed = [site.name for site in self.sites if current(site.name) is not site.replacement]
        lines += [f"Since then {name} was wrapped or replaced by another library." for name in changed]
        return "\n".join(lines)

    def _held(self) -> list[Library]:
        return [LIBRARIES[name] for name in self.libraries]

    def _hold(self, name: str) -> None:
        library = LIBRARIES[name]
        library.holders.add(self)
        if name not in self.libraries:
            self.libraries += (name,)
        self.left |= library.left
        for site in library.sites:
            self._before[site] = site.counts.copy(), site.reasons.copy()


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
    accepted = [*LIBRARIES, *THROUGH]
    for name in names:
        if name not in accepted:
            raise ValueError(f"{name!r} is unknown, expected one of {', '.join(accepted)}")
    autoload.waiting.clear()
    switch = Switch()
    with _lock:
        try:
            for name in names or _imported(switch):
                try:
                    _switch_on(name, switch)
                except Exception as error:
                    if strict:
                        raise
                    switch.refused[name] = str(error) or type(error).__name__
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
    """Put every library's own functions back, whoever switched them."""
    with _lock:
        autoload.waiting.clear()
        for library in LIBRARIES.values():
            _remove(library)


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


def _imported(switch: Switch) -> list[str]:
    """Return bitsandbytes, which PEFT and transformers may import later, and what is imported so far."""
    names = []
    for name in LIBRARIES:
        if name == "bitsandbytes" or name in sys.modules:
            names.append(name)
        elif importlib.util.find_spec(name):
            switch.refused[name] = "not imported; import it first, then call use_nf4_kernel()"
    return names


def _switch_on(name: str, switch: Switch) -> None:
    """Switch one library on for `switch`, all of its functions or none."""
    if name not in sys.modules:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"{name} is not installed: pip install {name}")
        importlib.import_module(name)
    if name in THROUGH:
        _switch_on(THROUGH[name], switch)
        return
    library = LIBRARIES[name]
    try:
        if not library.on:
            library.on = True  # for the self-tests
            library.left = _prepare(library)
        replacements = {id(site.original): site.replacement for site in library.replaced}
        # Also if it was on: modules imported since may hold the originals.
        for module, attribute, value in _references(PACKAGES):
            if id(value) in replacements:
                setattr(module, attribute, replacements[id(value)])
    except BaseException:
        _remove(library)
        raise
    switch._hold(name)


def _prepare(library: Library) -> dict[str, str]:
    """Make and test the replacements. Return {function that stays the library's: why}."""
    if problem := cannot_run():
        raise RuntimeError(problem)
    left = {}
    for site in library.sites:
        if site.replacement and current(site.name) in (site.original, site.replacement):
            continue  # tested before
        site.replacement = None
        try:
            if site.exists():
                _replace(site, library)
        except Exception as error:
            if site is library.sites[0]:
                raise
            left[site.name] = str(error)
    return left


def _replace(site: Site, library: Library) -> None:
    """Give a site a replacement that passed its self-test."""
    importlib.import_module(site.name.rpartition(".")[0])
    answer = inspect.getfullargspec(site.answer)
    parameters = answer.args[1:]
    names = parameters + answer.kwonlyargs
    require_parameters(site.name, parameters)
    original = site.original = current(site.name)

    @functools.wraps(original, updated=())  # with its name and module it pickles as the original does
    def replacement(*arguments, **named):
        known = len(arguments) <= len(parameters)
        for name in named:
            known = known and name in names
        if known and library.on:
            result = site.answer(site, *arguments, **named)
            if result is not None:
                return result
        return original(*arguments, **named)

    self_test(site, replacement)
    site.replacement = replacement


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


def _remove(library: Library) -> None:
    """Put a library's own functions back in all modules."""
    library.on = False  # a replacement that this search misses then just calls the original
    library.holders.clear()
    originals = {id(site.replacement): site.original for site in library.replaced}
    for module, attribute, value in _references():
        if id(value) in originals:
            with contextlib.suppress(Exception):  # a module that cannot be written keeps the replacement
                setattr(module, attribute, originals[id(value)])


def _references(packages: tuple[str, ...] = ("",)) -> Iterator[tuple[types.ModuleType, str, object]]:
    """Yield (module, attribute, value) for every function in the imported modules of these packages."""
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", "")).lower()
        if isinstance(module, types.ModuleType) and name.startswith(packages):
            for attribute, value in list(vars(module).items()):
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


def current(name: str):
    """Return what a module refers to by the last part of `name` now, None without the module or the name."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)
