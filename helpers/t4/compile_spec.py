"""What a compiler or a driver needs of the kernel without a launch: here alone its inner names are known."""

import contextlib
import dataclasses
import types
from unittest import mock

import torch

from helpers.nf4 import kernel as nf4_kernel

LARGE = 2048 * 8192  # elements: an official size; the kernel's tile and hints depend on it
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


@contextlib.contextmanager
def _replaced(namespace: dict, name: str, value):
    """Another global inside the block. Not mock.patch.dict, which empties the namespace on its way out."""
    before = namespace[name]
    namespace[name] = value
    try:
        yield
    finally:
        namespace[name] = before


def card_settings(arch: int, module=nf4_kernel):
    """The Settings that the kernel's own code chooses on a card of `arch`; what is forced is left out."""
    major, minor = divmod(arch, 10)
    card = types.SimpleNamespace(name=f"sm_{arch}", major=major, minor=minor, multi_processor_count=1)
    choose = module._card.__wrapped__
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_properties", lambda _: card),
        _replaced(choose.__globals__, "INTERPRETED", False),
    ):
        return choose(0)


class Launch(BaseException):  # passes through whoever explains failed launches
    """Stands where a launcher expects its kernel, and carries out what it would launch."""

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *arguments, **named):
        self.arguments, self.named = arguments, named
        raise self


def launch_arguments(weight, quant_state, out, arch: int, module=nf4_kernel):
    """(grid, arguments) of the launch that the kernel's own code would make into `out` on a card of `arch`.

    arguments: tensors and ints in the kernel's order, to launch foreign machine code with. Raises ValueError
    for a tensor so empty that nothing is launched.
    """
    call = module._your_dequantize_nf4
    instead = _replaced(call.__globals__, "_your_dequantize_nf4_kernel", Launch())
    with module.force(**dataclasses.asdict(card_settings(arch, module))), instead:
        try:
            call(weight, quant_state, out)
        except Launch as launch:
            return launch.grid, list(launch.arguments)
    raise ValueError(f"nothing is launched for a tensor of shape {tuple(out.shape)}")


def compile_spec(out_dtype, nested=True, numel=LARGE, settings=None, module=nf4_kernel) -> dict:
    """What triton.compile takes for a tensor of `numel` elements: fn, signature, constexprs, attrs, options.

    Blocks are bitsandbytes' own: 64 and 256. settings: decisions for the card (default: a T4's).
    """
    chosen, kernel = settings or card_settings(75, module), module._your_dequantize_nf4_kernel
    small, hint_loads = numel <= chosen.small_up_to, numel <= chosen.hint_loads_up_to
    values = module._constexprs(out_dtype, nested, 6, 8 * nested, numel % 8 != 0, small, hint_loads, chosen)
    signature = ["*u8", POINTERS[out_dtype], "*u8" if nested else "*fp32", *["*fp32"] * 4, "i32", "i32"]
    signature += ["constexpr"] * len(values)
    return dict(
        fn=kernel,
        signature=dict(zip(kernel.arg_names, signature, strict=True)),
        constexprs={(kernel.arg_names.index(name),): value for name, value in values.items()},
        attrs={(1,): [["tt.divisibility", 16]]},
        options=module._options(chosen),
    )
