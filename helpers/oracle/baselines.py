"""What the kernel is measured against: Unsloth (today's and the classic path), bitsandbytes and PEFT.

Each is one function, layer -> weight, where it is installed and can run; elsewhere it carries the reason.
Nothing is imported before `available()` is called: Unsloth takes many seconds, and must come before what it
patches.
"""

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from helpers.machine import environment


@dataclass(frozen=True)
class Baseline:
    """One way to dequantize a `Linear4bit` layer."""

    name: str
    label: str
    version: str | None = None
    fn: Callable | None = None  # layer -> weight; None where it cannot run
    reason: str = ""  # why `fn` is None
    note: str = ""  # what a reader of its figures must know: which function it is

    def __str__(self) -> str:
        if self.fn is None:
            return f"{self.label}: absent, {self.reason}"
        return f"{self.label}: {self.version}" + (f", {self.note}" if self.note else "")


UNSLOTH_TODAY = Baseline("unsloth_today", "Unsloth today")
UNSLOTH_CLASSIC = Baseline("unsloth_classic", "Unsloth classic")
BITSANDBYTES = Baseline("bitsandbytes", "bitsandbytes")
PEFT = Baseline("peft", "PEFT")


@functools.cache
def available() -> dict[str, Baseline]:
    """All four baselines by name: unsloth_today, unsloth_classic, bitsandbytes, peft, in this order.

    The first call imports the libraries (Unsloth first, and only where there is a GPU).
    """
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        # What tqdm says in a notebook without widgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
        import tqdm.auto  # noqa: F401
    return {baseline.name: baseline for baseline in (*_unsloth(), _bitsandbytes(), _peft())}


def _unsloth() -> tuple[Baseline, Baseline]:
    module, facts = _load("unsloth", "unsloth.kernels.utils", needs_gpu=True)
    today, classic = replace(UNSLOTH_TODAY, **facts), replace(UNSLOTH_CLASSIC, **facts)
    if module is None:
        return today, classic

    def fast_dequantize(layer, function=module.fast_dequantize):
        return function(layer.weight, layer.weight.quant_state)

    fused = getattr(module, "_USE_NF4_KERNELS", None)  # private: None where this Unsloth does not say
    if fused is not None and not fused:
        note = "fast_dequantize, which takes its classic path here: both names are the same function"
        return replace(today, fn=fast_dequantize, note=note), replace(classic, fn=fast_dequantize, note=note)
    note = "fast_dequantize as installed" + (", one fused launch" if fused else "")
    today = replace(today, fn=fast_dequantize, note=note)
    if not hasattr(module, "_fast_dequantize_ctypes"):
        reason = f"Unsloth {today.version} has no _fast_dequantize_ctypes, the classic path's name"
        return today, replace(classic, reason=reason)

    def three_launches(layer, function=module._fast_dequantize_ctypes):
        return function(layer.weight, layer.weight.quant_state, None, False)

    note = "_fast_dequantize_ctypes of the same package, three launches: the puzzle's baseline"
    return today, replace(classic, fn=three_launches, note=note)


def _bitsandbytes() -> Baseline:
    module, facts = _load("bitsandbytes", "bitsandbytes.functional")
    if module is None:
        return replace(BITSANDBYTES, **facts)

    def dequantize_4bit(layer, function=module.dequantize_4bit):
        weight = layer.weight
        return function(weight.data, weight.quant_state)  # .data, as PEFT passes it: the subclass costs time

    return replace(BITSANDBYTES, **facts, fn=dequantize_4bit)


def _peft() -> Baseline:
    module, facts = _load("peft", "peft.utils.integrations")
    return replace(PEFT, **facts, fn=module and module.dequantize_module_weight)


def _load(package: str, module: str, needs_gpu: bool = False):
    """(the module or None, the Baseline fields `version` and, where it is None, `reason`)."""
    facts = {"version": environment.version_of(package)}
    if needs_gpu and not environment.has_gpu():
        return None, facts | {"reason": "needs an NVIDIA GPU"}
    if importlib.util.find_spec(package) is None:
        return None, facts | {"reason": "not installed (bash colab_setup.sh installs it)"}
    try:
        return importlib.import_module(module), facts
    except Exception as error:  # whatever a broken installation raises is the reason to show
        return None, facts | {"reason": f"cannot be imported: {type(error).__name__}: {error}"}
