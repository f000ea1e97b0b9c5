"""A card that is not here: what the kernel decides there, and its launches as Triton compiles them for it.

The kernel's inner names are known in this room only here.
"""

import dataclasses
import functools
import types
from unittest import mock

import torch

from helpers.nf4 import kernel as nf4_kernel


def card_settings(arch: int, module=nf4_kernel):
    """The Settings that the kernel's own code chooses on a card of `arch`; what is forced is left out."""
    major, minor = divmod(arch, 10)
    card = types.SimpleNamespace(name=f"sm_{arch}", major=major, minor=minor, multi_processor_count=1)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_properties", lambda _: card),
        mock.patch.object(module, "INTERPRETED", False),
    ):
        return module._card.__wrapped__(0)


def compiled(arch: int, kernel, arguments, named):
    """Triton's CompiledKernel of kernel[grid](*arguments, **named) on a card of `arch`; nothing is launched.

    arguments: as in a launch, or torch dtypes in the place of tensors.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    card = types.SimpleNamespace(
        get_current_device=lambda: f"sm_{arch}",  # whose kernels Triton keeps apart
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    with mock.patch.object(driver, "_active" if "_active" in vars(driver) else "active", card):
        return kernel.warmup(*arguments, grid=(1,), **named)


def our_launch(arch: int, out_dtype, nested: bool, numel: int, force: dict):
    """(kernel, arguments, named) of the launch for a tensor of `numel` elements in bitsandbytes' own blocks.

    force: other values for fields of the Settings that the kernel chooses there.
    """
    chosen = dataclasses.replace(card_settings(arch), **force)
    small, hint_loads = numel <= chosen.small_up_to, numel <= chosen.hint_loads_up_to
    constexprs = nf4_kernel._constexprs(
        out_dtype, nested, 6, 8 * nested, numel % 8 != 0, small, hint_loads, chosen
    )
    absmax = torch.uint8 if nested else torch.float32
    arguments = (torch.uint8, out_dtype, absmax, *[torch.float32] * 4, numel // 8, numel % 8)
    return nf4_kernel._your_dequantize_nf4_kernel, arguments, constexprs | nf4_kernel._options(chosen)


class ForeignKernel:
    """Stands where a launcher expects `kernel`, and runs the PTX that a card of `arch` would get.

    A T4 executes sm_75 PTX; the driver of a newer card translates the same text for itself.
    """

    def __init__(self, kernel, arch: int):
        self.kernel, self.arch = kernel, arch

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *arguments, **named):
        """Triton's CompiledKernel, launched. Raises RuntimeError with what the driver says of the PTX."""
        found = compiled(self.arch, self.kernel, arguments, named)
        if f".target sm_{self.arch}" not in found.asm["ptx"]:  # sm_90a is an sm_90
            raise RuntimeError(f"Triton compiled for another card than sm_{self.arch}")
        found.kernel = found.asm["ptx"].encode()  # in the place of the cubin: the driver loads either
        constexprs = (named[name] for name in self.kernel.arg_names[len(arguments) :])
        found[(*grid, 1, 1)](*arguments, *constexprs)
        return found


def run_foreign(weight, quant_state, out, arch: int, module=nf4_kernel) -> None:
    """Dequantize into `out` as on a card of `arch`: its settings, its PTX. module: what holds the kernel."""
    name = "_your_dequantize_nf4_kernel"
    foreign = ForeignKernel(getattr(module, name), arch)
    settings = dataclasses.asdict(card_settings(arch, module))
    with module.force(**settings), mock.patch.object(module, name, foreign):
        module._your_dequantize_nf4(weight, quant_state, out)
