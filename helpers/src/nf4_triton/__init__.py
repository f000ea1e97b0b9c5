"""Dequantize bitsandbytes' NF4 and FP4 weights to fp16, bf16 or fp32 in one kernel launch, bit-exactly.

Train with it: one call after the imports and before training.

    from nf4_triton import use_nf4_kernel

    use_nf4_kernel()                           # Unsloth, bitsandbytes, Axolotl: the imported ones
    trainer.train()

PEFT and transformers dequantize through bitsandbytes. It is on or off for the whole process. Results stay
bit-identical: the same losses, the same adapter. Other ways to switch it on:

    with use_nf4_kernel() as switch: ...    # for a while
    NF4_TRITON=1 python train.py            # without changing the script

    print(switch)                           # which functions, how many dequantizations, what is left
    restore()                               # puts all of the libraries' own functions back

Dequantize by hand:

    weight = dequantize(layer)                     # a Linear4bit: (out, in) in quant_state.dtype
    weight = dequantize(layer, dtype=torch.bfloat16)
    weight = dequantize(packed, quant_state)       # what bitsandbytes.functional.quantize_4bit returned
    experts = dequantize(packed, quant_state, rows=ids)  # these along the first dimension: (len(ids), ...)
    vectors = dequantize(embedding, rows=token_ids)      # a slice, a list, or ids such as (batch, tokens)
    weight = dequantize(*read_checkpoint(tensors, name))  # tensors as safetensors loads a saved 4-bit model

    export_checkpoint("lora", "out")  # merged into its base, in 16 bit: `nf4_triton export lora out`

Environment variables:

    NF4_TRITON=1        as above; or true, on, yes; off with 0, false, off, no, or unset
    NF4_BACKEND=auto    what `dequantize` uses: the kernel on an NVIDIA GPU that can run it, else PyTorch;
                        triton or torch: that one
    NF4_FORCE=t4        use the settings of a T4 on a newer GPU, to test them
    TRITON_INTERPRET=1  run the kernel without a GPU, slowly; set it before Python starts

`nf4_triton doctor` checks whether the kernel works here, and how fast it is. It needs torch 2.8 or newer,
Triton 3.4 or newer, and an NVIDIA GPU: a Tesla T4 (sm_75) or newer.
"""

import importlib
from typing import TYPE_CHECKING

from .core.supported import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from .backend import dequantize as dequantize
    from .core.checkpoint import read_checkpoint as read_checkpoint
    from .core.supported import UnsupportedState as UnsupportedState
    from .export.export import export_checkpoint as export_checkpoint
    from .libraries.site import UnknownInternals as UnknownInternals
    from .libraries.switch import Switch as Switch
    from .libraries.switch import restore as restore
    from .libraries.switch import use_nf4_kernel as use_nf4_kernel
else:
    _HOMES = {
        "Switch": "libraries.switch",
        "UnknownInternals": "libraries.site",
        "UnsupportedState": "core.supported",
        "dequantize": "backend",
        "export_checkpoint": "export.export",
        "read_checkpoint": "core.checkpoint",
        "restore": "libraries.switch",
        "use_nf4_kernel": "libraries.switch",
    }

    def __getattr__(name: str):
        """Import a public name when it is asked for: the package itself imports neither torch nor Triton.

        __all__ are those that can be imported here: help() and dir() ask for each.
        """
        if name == "__all__":
            return [public for public in _HOMES if _can_import(public)]
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        except ImportError as error:
            problem = f"nf4_triton.{name} cannot be imported: {error}"
            raise ImportError(f"{problem}: `python -m nf4_triton doctor` says what to install") from error

    def _can_import(name: str) -> bool:
        try:
            return bool(__getattr__(name))
        except Exception:  # whatever a broken package raises
            return False

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
