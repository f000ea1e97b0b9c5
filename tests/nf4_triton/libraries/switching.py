"""Shared by the tests of the switch: small weights, and calls compared with the kernel and without."""

import functools

import bitsandbytes as bnb
import torch

from nf4_triton.core import reference
from nf4_triton.libraries import switch
from nf4_triton.libraries.site import KERNEL
from states import oracle

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
quietly = functools.partial(switch.use_nf4_kernel, quiet=True)


def library_function():
    return bnb.functional.dequantize_4bit


ORIGINAL = [library_function()]  # in a list: a name in a module would be reported


def untouched():
    return library_function() is ORIGINAL[0]


def sites():
    return [site for sites in switch.LIBRARIES.values() for site in sites]


def forget_self_tests():
    for site in sites():
        site.replacement = None


def on(*names):
    return quietly(*(names or ["bitsandbytes"]), strict=True)


def inputs(device, *shape, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def quantized(shape, dtype=BF16, device="cpu", **options):
    """(packed, state) of a random weight; nf4 and nested unless `options` say otherwise."""
    options = {"quant_type": "nf4", "compress_statistics": True} | options
    return bnb.functional.quantize_4bit(inputs(device, *shape, dtype=dtype), **options)


def outcome(call):
    """Return what a call returns, or its error as a text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error)} {error}"


def same(a, b):
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, str):
        return a == b
    return a.stride() == b.stride() and reference.same_bits(a, b)


def compare(call, *names):
    """Check that a call returns the same with and without the kernel. Return the switch's counts."""
    expected = outcome(call)
    with on(*names) as switched:
        found = outcome(call)
    assert same(found, expected), (found, expected)
    return switched.calls


def compared(call, name, *libraries):
    """Compare as above. Return how many calls of a function the kernel handled, and how many the library."""
    calls = compare(call, *libraries)[name]
    return calls[KERNEL], calls.total() - calls[KERNEL]


def through(layer, x):
    """Return the result and the input's gradient of a layer."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(y.detach() + 1)
    return y.detach(), x.grad


def from_parts(W, absmax, code2, absmax2, offset, blocksize, blocksize2, shape, dtype):
    """Dequantize as Axolotl does, whose own function needs a GPU: tests/long/test_axolotl.py."""
    second = bnb.functional.QuantState(absmax2, code=code2, blocksize=blocksize2, dtype=FP32)
    state = bnb.functional.QuantState(absmax, shape, None, blocksize, "nf4", dtype, offset, second)
    return oracle(W, state)
