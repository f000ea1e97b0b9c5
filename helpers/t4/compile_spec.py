"""What a compiler or a driver needs of the kernel without a launch: signature, constexprs, options, arguments."""

import dataclasses

import torch

from helpers.nf4 import kernel as nf4_kernel


def launch_arguments(weight, quant_state, out):
    """(grid, arguments) of one launch, tensors and ints in the kernel's order, to launch foreign machine code."""
    grid, arguments, *_ = nf4_kernel._configure(weight, quant_state, out)
    return (grid, 1, 1), arguments


def compile_spec(out_dtype, nested=True, quant_type="nf4", blocksize=64, blocksize2=256, settings=None, tail=False,
                 small=False):  # fmt: skip
    """What triton.compile needs without a GPU: fn, signature, constexprs, attrs, options. `settings` decides for
    the card (default: a T4's); `small` takes the tile of small tensors; quant_type changes nothing but data."""
    s = settings or dataclasses.replace(
        nf4_kernel._card(0), asm=True, **{**nf4_kernel.T4, **nf4_kernel._forced}
    )
    kernel = nf4_kernel._your_dequantize_nf4_kernel
    out = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}[out_dtype]
    log2_block, log2_block2 = (
        nf4_kernel._log2("blocksize", blocksize, 37),
        nf4_kernel._log2("blocksize2", blocksize2, 31) * nested,
    )
    values = nf4_kernel._constexprs(out_dtype, nested, log2_block, log2_block2, tail, small, small, s)
    types = (
        ["*u8", out, "*u8" if nested else "*fp32"] + ["*fp32"] * 4 + ["i32"] * 2 + ["constexpr"] * len(values)
    )
    constexprs = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    return dict(fn=kernel, signature=dict(zip(kernel.arg_names, types, strict=True)), constexprs=constexprs,
                attrs={(1,): [["tt.divisibility", 16]]}, options=nf4_kernel._options(s))  # fmt: skip
