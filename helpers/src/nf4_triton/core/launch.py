"""Launch the puzzle's kernel: replay a cached launch, or check, launch through Triton, and cache that launch.

A first launch takes double-quantized NF4 as in the puzzle; a replay takes every whole weight.
launch_general.py has the rest. A cached launch holds no address of a layer's tensors. `# %%`: notebook cells.
"""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch
import triton

from .kernel import TRITON, _your_dequantize_nf4_kernel
from .private import (
    GUARDED, TensorGuards, current_device, current_stream, dispatch_modes, dynamo_callback, empty_cuda,
    is_compiling, is_traced, launcher, plain_tensors,
)
from .settings import (
    INTERPRETED, KERNEL_DEVICE, cache_key, has_no_bf16, launches, of_card, settings,
)
from .supported import NEWEST_TRITON, UnsupportedState

# %% id="launch-path"
def your_dequantize_nf4(layer):
    """Return the weight of a Linear4bit, of its quant_state's shape and dtype. Raises UnsupportedState."""
    try:
        weight = layer._parameters["weight"]  # without nn.Module's __getattr__
    except (AttributeError, KeyError):
        weight = getattr(layer, "weight", None)
    # FSDP and torch.export replace the weight; then the layer still has the state.
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    return _your_dequantize_nf4(weight, state)


def _your_dequantize_nf4(weight, quant_state):
    """Return a weight dequantized in one launch, bit-identical to bitsandbytes. Raises UnsupportedState."""
    tensors, layout = read_nested(weight, quant_state)
    result = relaunch(tensors, layout)
    return launch_first(tensors, layout) if result is None else result


def relaunch(tensors, layout):
    """Replay a cached launch on tensors of a checked layout. Return the result, or None if none matches."""
    if is_compiling():
        return None  # torch.compile must see the operator
    try:
        known = launches.get(layout, ())
    except TypeError:  # a list among the fields
        return None
    with plain_tensors():
        for same_kind, device, run, before, output, grid, after, was_aligned, _ in known:
            if not same_kind(*tensors) or has_hooks():
                continue  # another type, dtype, device, size, or stride; or a profiler
            if device != current_device():
                with torch.cuda.device(device):
                    return relaunch(tensors, layout)
            weight = tensors[0]
            address = weight.data_ptr()
            if (address % 16 == 0) is not was_aligned or address == weight.storage_offset() * weight.itemsize:
                continue  # its alignment differs, or FSDP freed it
            if len(tensors) == 5:  # written out: 0.1 us less than map(data_ptr, ...)
                _, absmax, code2, absmax2, offset = tensors
                scales = absmax.data_ptr(), code2.data_ptr(), absmax2.data_ptr(), offset.data_ptr()
            else:  # flat: absmax alone
                scales = (tensors[1].data_ptr(),)
            result = empty_cuda(*output)
            run(grid, 1, 1, current_stream(device), *before, address, result.data_ptr(), *scales, *after)
            return result


# %% Read, check, launch for the first time, keep id="launch-first" folded=true
import math

BLOCKSIZES = (64, 128, 256, 512, 1024, 2048, 4096)
# A replay calls the compiled kernel without Triton's own launch code: checked for these versions.
CAN_RELAUNCH = GUARDED and current_device is not None and not INTERPRETED and TRITON <= NEWEST_TRITON
hooks = triton.knobs.runtime  # public: profilers add launch hooks here


def read_nested(weight, quant_state):
    """Return a weight's five tensors and its layout. Raises UnsupportedState unless the absmax is
    quantized, too."""
    try:
        q, q2 = quant_state, quant_state.state2
        return (weight, q.absmax, q2.code, q2.absmax, q.offset), (
            q.shape, q.dtype, q.quant_type, q.blocksize, q2.blocksize, q.nested and q2.dtype is torch.float32)
    except AttributeError as error:
        problem = str(error)
    raise not_the_puzzles(problem)


def not_the_puzzles(problem="this weight or its state has another layout"):
    """Return the error for a weight that this kernel does not dequantize."""
    return UnsupportedState(
        f"{problem}, expected a Linear4bit on a GPU in double-quantized NF4: its codes as (n / 2, 1) in "
        "uint8, n a multiple of 64, to fp16 or bf16. nf4_triton.dequantize takes other layouts")


def is_puzzles(layout):
    """Return whether a layout is the puzzle's: double-quantized NF4 in whole rows of 64, to 16 bit."""
    shape, dtype, quant_type, blocksize, blocksize2, nested = layout
    if not (nested and quant_type == "nf4" and dtype in (torch.float16, torch.bfloat16)
            and blocksize in BLOCKSIZES and blocksize2 in BLOCKSIZES and isinstance(shape, tuple)):
        return False
    n = math.prod(shape)
    return isinstance(n, (int, torch.SymInt)) and n % 64 == 0 and min(shape) > 0 and n < 1 << 34


def fits(tensors, layout):
    """Return whether the puzzle's kernel can dequantize these, at an address that is a multiple of 16."""
    if not is_puzzles(layout):
        return False
    shape, _, _, blocksize, blocksize2, _ = layout
    n = math.prod(shape)
    blocks = -(-n // blocksize)
    needed = (n // 2, blocks, 256, -(-blocks // blocksize2), 1)
    kinds = (torch.uint8, torch.uint8, torch.float32, torch.float32, torch.float32)
    for tensor, kind, least in zip(tensors, kinds, needed, strict=True):
        if not (isinstance(tensor, torch.Tensor) and tensor.dtype == kind and tensor.numel() >= least
                and tensor.device == tensors[0].device and tensor.is_contiguous()):
            return False
    weight, *_, offset = tensors
    return weight.shape == (n // 2, 1) and weight.device.type == KERNEL_DEVICE and offset.numel() == 1


def prepare(tensors, layout, result):
    """Return the grid, the kernel's pointers, its arguments after them, and Triton's options."""
    shape, _, _, blocksize, blocksize2, _ = layout
    weight, *scales = tensors
    s, n = settings(weight.device), math.prod(shape)
    log2_block, log2_block2 = int(blocksize).bit_length() - 1, int(blocksize2).bit_length() - 1
    constexprs, options = of_card(s)
    pointers, after = (weight, result, *scales), (n, log2_block, log2_block2, *constexprs)
    return -(-n // (64 * s.tile_rows)), pointers, after, options


def launch_by_triton(kernel, grid, pointers, after, options):
    """Launch with kernel[grid](...). Return Triton's CompiledKernel, None from its interpreter."""
    for tensor in pointers:
        if tensor.is_neg() or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise not_the_puzzles("a tensor is a negated view, or its memory was freed")
    with torch.cuda.device(pointers[0].get_device()):  # -1, the CPU, changes nothing
        return kernel[(grid,)](*pointers, *after, **options)


def launch_first(tensors, layout):
    """Check everything, launch through Triton, and cache the launch for later calls."""
    weight, (shape, dtype, *_) = tensors[0], layout
    if is_traced(weight):
        return call_operator(tensors, layout)
    with plain_tensors():
        if not fits(tensors, layout) or weight.data_ptr() % 16:
            raise not_the_puzzles()
        result = torch.empty(shape, dtype=dtype, device=weight.device)
        grid, pointers, after, options = prepare(tensors, layout, result)
        compiled = launch_by_triton(_your_dequantize_nf4_kernel, grid, pointers, after, options)
        keep(layout, tensors, compiled, result, grid, after, True)
        return result


def call_operator(tensors, layout):
    """Dequantize through the operator, which tracers record as one call."""
    weight, *scales = tensors
    shape, dtype, _, blocksize, blocksize2, _ = layout
    if not fits(tensors, layout):
        raise not_the_puzzles()
    if dtype is torch.bfloat16 and is_compiling() and has_no_bf16(weight.device):
        return launch_eagerly(tensors, layout)
    return torch.ops.nf4_triton.dequantize(
        weight.detach(), *scales, list(shape), dtype, blocksize, blocksize2, cache_key())


# Between two graphs: on a T4, torch 2.11 raises an error for a graph with bf16.
launch_eagerly = torch.compiler.disable(launch_first)


def keep(key, tensors, compiled, result, grid, after, aligned, sizes=None, strides=None):
    """Cache a launch for calls on such tensors, as a plain tuple: unpacking a NamedTuple takes 50 ns more.

    result: as callers get it. grid: the number of programs, or what launch_general.relaunch() counts it from.
    aligned: whether the weight's address is a multiple of 16. sizes, strides: None stands for any."""
    if not CAN_RELAUNCH or compiled is None or has_hooks():
        return
    kept = (
        # Compares type, dtype, device, sizes, and strides in one call into torch.
        TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check,
        result.get_device(),
        *launcher(compiled, TRITON),  # Triton's launcher, and its arguments before the kernel's own
        (tuple(result.shape), result.stride(), result.dtype),  # what to allocate
        grid,
        after,  # the kernel's arguments after its pointers
        aligned,
        compiled)  # owns the memory that the launcher's arguments point to
    # Guards also depend on autocast and inference mode: a layout may need several launches.
    launches[key] = [kept, *launches.get(key, ())][:32]


def has_hooks():
    """Return whether Dynamo, a dispatch mode, or a profiler's launch hook must see the next launch."""
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return (dynamo_callback() is not None or dispatch_modes()
            or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
