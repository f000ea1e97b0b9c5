"""NF4 weights of bitsandbytes to fp16, bf16 or fp32 in one exact Triton kernel.

Train with it: one call, after the imports and before training.

    from nf4_triton import use_nf4_kernel      # in a checkout: from helpers.integrate import use_nf4_kernel

    use_nf4_kernel()                           # Unsloth, bitsandbytes, PEFT, transformers: what is imported
    trainer.train()

It prints which functions it replaced and what it left alone. Every bit stays what it was: the same losses,
the same adapter. Other ways to switch it on:

    with use_nf4_kernel() as switch: ...       # for a while; switch.counts() says who decoded
    Trainer(..., callbacks=[trainer_callback()])     # from the begin of training to its end
    NF4_TRITON=1 python train.py               # no line changed: its first use switches

    restore()                                  # puts every library's own functions back

Decode by hand:

    weight = dequantize(layer)                 # a Linear4bit: (out, in) in quant_state.dtype
    weight = dequantize(packed, quant_state)   # what bitsandbytes.functional.quantize_4bit returned

Environment: NF4_TRITON=1 as above. NF4_BACKEND=triton|torch|auto is what `dequantize` decodes with (auto, the
default: the kernel where its bits are right, else plain PyTorch). TRITON_INTERPRET=1, set before Python
starts, runs without a GPU. `python -m nf4_triton doctor` says whether it works here and what it takes.

Needs torch 2.7 or newer, Triton 3.3 or newer, and an NVIDIA GPU from the Tesla T4 (sm_75) on.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import dequantize
    from .integrate import Switch, UnknownInternals, restore, trainer_callback, use_nf4_kernel
    from .kernel import UnsupportedState

__all__ = [
    "Switch",
    "UnknownInternals",
    "UnsupportedState",
    "dequantize",
    "restore",
    "trainer_callback",
    "use_nf4_kernel",
]
_HOMES = {"dequantize": "backend", "UnsupportedState": "kernel"}  # all others: integrate


def __getattr__(name: str):
    """Import what is asked for when it is asked for: this package itself imports neither torch nor Triton."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_HOMES.get(name, 'integrate')}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        text = f"the NF4 kernel needs torch 2.7 and Triton 3.3 or newer, and {error.name} is not installed"
        raise ImportError(f"{text}: pip install {error.name}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
