"""The launch path: read a bitsandbytes state, check it, launch the kernel, replay the launch.

    read_state: tensors and spec -> the first Launch kept for this spec that matches -> replay
                                 -> none: check, Triton's ordinary launch, keep a Launch

tensors: weight, absmax; if nested also state2.code, state2.absmax, offset.
spec: shape, dtype, quant_type, blocksize; if nested also state2.blocksize, state2.dtype.
Everything after read_state takes these two. No address of a layer's tensors is kept. `# %%`:
notebook cells.
"""
# ruff: noqa: E402, F401, I001
# %% tags=["module-only"]
from .kernel import (
    FP4, INTERPRETED, MAX_ELEMENTS, NF4, TRITON, TRITON_TESTED, _knobs,
    _your_dequantize_nf4_kernel, kernel_constexprs, launch_options, launches, settings,
)

# %% Read and check a state id="launch-checks" part="launch" folded=true tags=["launch"]
import contextlib
import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable

import torch
import triton

STORAGES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# bitsandbytes loads the offset in torch's default dtype.
OFFSETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES = "weight", "absmax", "state2.code", "state2.absmax", "offset"  # of `tensors`, in errors


def _private(root, path, public):
    """Return a private attribute of torch or Triton, or `public` if it is missing."""
    try:
        return operator.attrgetter(path)(root)
    except AttributeError:
        return public


# All private names. For speed, with what each saves where a call takes 15 us (slow host, H200):
# 0.5 us for five tensors: compares type, dispatch keys, dtype, device, sizes, and strides.
_TensorGuards = _private(torch._C, "_dynamo.guards.TensorGuards", None)
# 2.9 us over torch.empty_strided. Inductor's generated code allocates with it too.
_empty_cuda = _private(
    torch._C, "_dynamo.guards._empty_strided_cuda",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))
# 1.6 us: Params4bit sends every tensor method through a Python __torch_function__.
_plain_tensors = _private(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
# 4.2 us: the stream's handle without a Stream object.
_stream = _private(torch._C, "_cuda_getCurrentRawStream",
                   lambda index: torch.cuda.current_stream(index).cuda_stream)
# 0.5 us: does not check that CUDA is initialized.
_current_device = _private(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# 1.8 us: skips the Python part of Triton's launcher, whose arguments are known for these versions.
SKIP_PYTHON_LAUNCHER = TRITON in ((3, 5), (3, 6))

# For correctness. Dispatch modes, functorch transforms, and fake tensors get the operator.
_modes = _private(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_transforms = _private(torch._C, "_functorch.peek_interpreter_stack", lambda: None)
_is_fake = _private(torch, "_subclasses.fake_tensor.is_fake", lambda tensor: False)
# The codebook is a plain tensor even if the first call comes inside a mode or a transform.
_no_modes = _private(torch.utils, "_python_dispatch._disable_current_modes", contextlib.nullcontext)
_no_transforms = _private(torch._C, "_DisableFuncTorch", contextlib.nullcontext)
# Set while Dynamo runs a frame it could not compile (bf16 on a T4); it still traces the functions
# that the frame calls.
_dynamo_callback = _private(torch._C, "_dynamo.eval_frame.get_eval_frame_callback", lambda: None)
# Profilers add hooks here and expect every launch to call them.
_hooks = _knobs.runtime if _knobs else triton.compiler.CompiledKernel

_is_compiling = torch.compiler.is_dynamo_compiling
CAN_REPLAY = TRITON_TESTED and not INTERPRETED and _TensorGuards is not None


class UnsupportedState(ValueError):
    """A weight or quant_state that cannot be dequantized. The message says what is wrong, what was
    expected, and what to do."""


def read_state(weight, quant_state):
    """Return (tensors, spec) of a state. Checks only that all fields exist.

    tensors: weight, absmax; if nested also state2.code, state2.absmax, offset.
    spec: shape, dtype, quant_type, blocksize; if nested also state2.blocksize, state2.dtype.
    Raises UnsupportedState if one is missing, or if bitsandbytes repacked the layer.
    """
    q = quant_state
    try:
        if q.nested:
            q2 = q.state2
            tensors = weight, q.absmax, q2.code, q2.absmax, q.offset
            return tensors, (
                tuple(q.shape), q.dtype, q.quant_type, q.blocksize, q2.blocksize, q2.dtype)
        repacked = getattr(q, "packing_format_for_cpu", False)  # repacking also sets nested=False
        tensors, spec = (weight, q.absmax), (tuple(q.shape), q.dtype, q.quant_type, q.blocksize)
    except (AttributeError, TypeError) as error:
        raise UnsupportedState(missing_field(quant_state, error)) from error
    if repacked:
        raise UnsupportedState(
            "bitsandbytes repacked this layer for its CPU matmul and rounded its scales, expected "
            "the usual layout: reload the layer, and dequantize it before its first forward pass")
    return tensors, spec


def missing_field(quant_state, error):
    """Return the text of an error for a state that cannot be read."""
    if quant_state is None:
        return ("there is no quant_state, expected bitsandbytes' QuantState: quantize the layer "
                "first by moving it with layer.to(device); plain and 8-bit layers have none")
    return (f"the quant_state is incomplete ({error}), expected bitsandbytes' QuantState with all "
            "fields: reload the layer")


def check(tensors, spec, any_device=False):
    """Return (elements, log2 blocksize, log2 state2.blocksize or 0). Raises UnsupportedState.

    Reads only metadata, which torch.compile can trace. any_device: accept a weight on the CPU, for
    dequantizing in plain PyTorch.
    """
    shape, dtype, quant_type, blocksize, *second_spec = spec
    if quant_type not in ("nf4", "fp4"):
        raise UnsupportedState(
            f"quant_type is {quant_type!r}, expected 'nf4' or 'fp4': use the library's own "
            "dequantization for other states")
    if dtype not in DTYPES:
        raise UnsupportedState(f"quant_state.dtype is {dtype}, expected one of {DTYPES}: set it")
    if not all(isinstance(size, (int, torch.SymInt)) and size >= 0 for size in shape):
        raise UnsupportedState(
            f"quant_state.shape is {shape}, expected the weight's shape: reload the layer")
    log2_block = log2_of("quant_state.blocksize", blocksize, 37)
    n = math.prod(shape)
    blocks = -(-n // blocksize)
    if n >= MAX_ELEMENTS or blocks >= 1 << 31:
        raise UnsupportedState(
            f"the weight has {n} elements in blocks of {blocksize}, expected fewer than 2**34 "
            "elements and 2**31 blocks: dequantize it in parts")
    weight, absmax, *second = tensors
    check_weight(weight, n, shape, any_device)
    check_tensor("absmax", absmax, weight, blocks, torch.uint8 if second else torch.float32)
    if not second:
        return n, log2_block, 0
    blocksize2, dtype2 = second_spec
    if dtype2 != torch.float32:
        raise UnsupportedState(
            f"state2.dtype is {dtype2}, expected torch.float32: quantize the layer again")
    log2_block2 = log2_of("state2.blocksize", blocksize2, 31)
    code2, absmax2, offset = second
    check_tensor("state2.code", code2, weight, 256, torch.float32)
    check_tensor("state2.absmax", absmax2, weight, -(-blocks // blocksize2), torch.float32)
    check_tensor("offset", offset, weight, 1, *OFFSETS)
    # bitsandbytes adds a one-dimensional fp64 offset in fp64, which rounds differently.
    if offset.numel() != 1 or (offset.dim() and offset.dtype == torch.float64):
        raise UnsupportedState(
            f"offset has shape {tuple(offset.shape)} and {offset.dtype}, expected one value, in "
            "float64 without a dimension: reload the layer")
    return n, log2_block, log2_block2


def log2_of(name, size, most):
    """Return log2 of a power of two, capped at `most`, where one block already spans the tensor:
    the kernel shifts 32-bit integers."""
    if not isinstance(size, (int, torch.SymInt)) or size <= 0 or size & (size - 1):
        raise UnsupportedState(
            f"{name} is {size!r}, expected a power of two (bitsandbytes uses 32 to 4096): quantize "
            "the layer again")
    return min(int(size).bit_length() - 1, most)


def check_weight(weight, n, shape, any_device):
    """Check that the weight holds packed codes for n elements, where the kernel can read them."""
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedState(
            f"the weight is {type(weight).__name__}, expected a tensor of packed 4-bit codes: pass "
            "a Linear4bit, or its weight and weight.quant_state")
    on_cpu = weight.device.type == "cpu" and (any_device or INTERPRETED)
    if weight.device.type != "cuda" and not on_cpu:
        raise UnsupportedState(
            f"the weight is on {weight.device}, expected CUDA: move the layer, or set "
            "TRITON_INTERPRET=1 before Python starts to run on the CPU")
    # A float tensor in the full shape is an unpacked weight, unless it has at most 3 elements.
    unpacked = weight.is_floating_point() and n > 3 and tuple(weight.shape) == shape
    if weight.dtype not in STORAGES or not weight.dim() or unpacked:
        raise UnsupportedState(
            f"the weight is {weight.dtype} of shape {tuple(weight.shape)}, expected packed 4-bit "
            f"codes, as (n / 2, 1) in one of {STORAGES}: quantize the layer again")
    check_tensor("weight", weight, weight, 0, *STORAGES)
    held = weight.numel() * weight.itemsize
    if held * 2 < n:
        raise UnsupportedState(
            f"the weight holds {held} bytes, expected {(n + 1) // 2} for the shape {shape}: gather "
            "it first if FSDP or DeepSpeed ZeRO-3 sharded it, else reload the layer")


def check_tensor(name, tensor, weight, least, *dtypes):
    """Check that a tensor of a state is on the weight's device, contiguous, of one of the dtypes,
    and has at least `least` elements."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedState(
            f"{name} is {type(tensor).__name__}, expected a tensor: the quant_state is incomplete; "
            "reload the layer")
    if tensor.dtype not in dtypes or tensor.numel() < least:
        raise UnsupportedState(
            f"{name} has {tensor.numel()} elements of {tensor.dtype}, expected {least} or more of "
            f"{dtypes[0]}: state and weight do not belong together; reload the layer")
    if tensor.device != weight.device:
        raise UnsupportedState(
            f"{name} is on {tensor.device}, expected {weight.device}, where the weight is: move "
            "the whole layer with layer.to(device)")
    if not tensor.is_contiguous():
        raise UnsupportedState(
            f"{name} is not contiguous, expected contiguous memory: use {name}.contiguous()")


def check_memory(name, tensor):
    """Check that a real tensor has memory, not freed by FSDP, and is no negated view."""
    if tensor.is_neg():
        raise UnsupportedState(
            f"{name} is a negated view, expected plain memory: use {name}.resolve_neg()")
    if is_freed(tensor):
        raise UnsupportedState(
            f"{name} has no memory, expected its values: gather it first if FSDP freed it, or pass "
            "full_tensor() of a DTensor")


def is_freed(tensor):
    """Return whether a tensor lost its storage: its address is then its offset in bytes."""
    try:
        offset = tensor.storage_offset() * tensor.itemsize
        return tensor.numel() > 0 and tensor.data_ptr() == offset
    except RuntimeError:  # a wrapper such as a DTensor has no storage
        return True


def check_out(out, tensors, spec):
    """Check that `out` can hold the result. Raises UnsupportedState."""
    if not isinstance(out, torch.Tensor):
        raise UnsupportedState(
            f"out is {type(out).__name__}, expected a tensor, or None for a new one")
    shape, dtype, *_ = spec
    expected = (shape, dtype, tensors[0].device, True, False)
    given = (tuple(out.shape), out.dtype, out.device, out.is_contiguous(), out.requires_grad)
    if given != expected:
        raise UnsupportedState(
            f"out has (shape, dtype, device, contiguous, requires_grad) {given}, expected "
            f"{expected}: pass such a tensor, or None for a new one")


def check_overlap(out, tensors):
    """Check that writing into `out` overwrites nothing that the kernel reads."""
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, tensor in zip(NAMES, tensors, strict=False):
        first = tensor.data_ptr()
        if start < first + tensor.nbytes and first < end:
            raise UnsupportedState(
                f"out shares memory with {name}, expected its own: pass another tensor, or None")


@functools.cache
def codebook(device, quant_type):
    """Return the 16 fp32 values of NF4 or FP4 on `device`, uploaded once for each device.

    Raises RuntimeError during a CUDA graph capture, whose memory pool would own the upload.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the first {quant_type} call on a GPU came inside a graph capture, "
                           "expected one before it: call once outside, then capture")
    values = FP4 if quant_type == "fp4" else NF4
    with torch.inference_mode(False), _no_modes(), _no_transforms():
        # .to() waits for the copy, so any stream may read the table.
        return torch.tensor(values, dtype=torch.float32, device="cpu").to(device)


# %% Launch the ordinary way id="launch-plain" part="launch" folded=true tags=["launch"]
class Launched(typing.NamedTuple):
    """One ordinary launch: what it wrote, and all that is needed to launch again."""

    result: torch.Tensor  # not transposed
    compiled: object  # Triton's CompiledKernel; None if interpreted or nothing was launched
    grid: int  # programs
    arguments: list  # all of the kernel's arguments, in order


def launch_kernel(weight, quant_state):
    """Check, allocate, and launch with kernel[grid](...). Return Launched.

    weight, quant_state, and errors: as for _your_dequantize_nf4.
    """
    with _plain_tensors():
        return launch_ordinary(*read_state(weight, quant_state))


def maybe_transpose(result, tensors):
    """Return the result transposed if weight.shape[0] is 1, as bitsandbytes and Unsloth do."""
    return result.t() if tensors[0].shape[0] == 1 else result


def launch_ordinary(tensors, spec, out=None):
    """Check tensors and spec, then launch with kernel[grid](...). Return Launched."""
    weight = tensors[0]
    shape, dtype, quant_type, *_ = spec
    sizes = check(tensors, spec)
    for name, tensor in zip(NAMES, tensors, strict=False):
        check_memory(name, tensor)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=weight.device)
    else:
        check_out(out, tensors, spec)
        check_memory("out", out)
        check_overlap(out, tensors)
        torch.autograd.graph.increment_version(out)  # so that autograd notices the change
    # The kernel loads 32-bit words and stores 128 bits.
    aligned = weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0
    table = codebook(weight.device, quant_type)
    grid, arguments, options = kernel_arguments(tensors, sizes, table, out, aligned)
    compiled = None
    with torch.cuda.device(weight.device) if weight.is_cuda else contextlib.nullcontext():
        if grid:
            compiled = _your_dequantize_nf4_kernel[(grid,)](*arguments, **options)
    return Launched(out, compiled, grid, arguments)


TABLE, POINTERS = 3, 7  # place of the codebook among the arguments; how many are pointers


def kernel_arguments(tensors, sizes, table, out, aligned):
    """Return (grid, all arguments of the kernel, launch options).

    aligned: the weight's address is a multiple of 4, and out's of 16.
    """
    weight, absmax, *second = tensors
    n, log2_block, log2_block2 = sizes
    s = settings(weight.device)
    constexprs = kernel_constexprs(out.dtype, bool(second), log2_block, log2_block2, n, s)
    if not aligned:
        constexprs["ASM"] = False
    grid = -(-n // (constexprs["THREADS"] * constexprs["WORDS"] * 8))
    code2, absmax2, offset = second or (absmax, absmax, absmax)  # a flat launch reads none of them
    if weight.dtype != torch.uint8:  # quant_storage
        weight = weight.view(-1).view(torch.uint8)
    pointers = [weight, out, absmax, table, code2, absmax2, offset]
    return grid, [*pointers, n // 8, n % 8, *constexprs.values()], launch_options(s)


# %% Keep a launch id="launch-cache" part="launch" folded=true tags=["launch"]
@dataclasses.dataclass
class Launch:
    """A launch that was checked and compiled, to replay on other tensors of the same layout."""

    guards: Callable  # compares tensors with those that were checked, in one call into torch
    layout: tuple  # shape, strides, and dtype of the result, as callers get it
    device: int  # index of the GPU
    run: Callable  # Triton's launcher: run(grid, 1, 1, stream, *before, *kernel arguments)
    grid: int  # programs
    before: tuple  # what the launcher takes before the kernel's own arguments
    table: int  # address of the codebook
    after: tuple  # the kernel's arguments after the pointers: sizes and constexprs
    owners: tuple  # the objects that own what `before` and `table` point to

    def matches(self, tensors):
        """Return whether the layout is the same, and the weight has memory aligned to 4 bytes.

        The guards fail under transforms and jit.trace, whose dispatch keys differ.
        """
        if not self.guards(*tensors):
            return False
        weight = tensors[0]
        address = weight.data_ptr()
        freed = address == weight.storage_offset() * weight.itemsize  # as in is_freed
        return address % 4 == 0 and not freed


def is_observed():
    """Return whether a dispatch mode or a profiler's launch hook must see the next launch."""
    # From Triton 3.4 on a hook is a chain with a list of calls, before that None or a function.
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    return _modes() or getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


def check_and_launch(tensors, spec, out):
    """Check everything, launch the ordinary way, and keep the launch for later calls."""
    if is_traced(tensors[0]):
        return maybe_transpose(call_operator(tensors, spec, out), tensors)
    with _plain_tensors():
        launched = launch_ordinary(tensors, spec, out)
        result = maybe_transpose(launched.result, tensors)
        if CAN_REPLAY and launched.compiled and out is None:
            launch = make_launch(tensors, launched, result)
            if launch.matches(tensors):  # not for a misaligned weight, or one tensor given twice
                if len(launches) >= 1024:  # a model has few shapes, a test may have many
                    launches.clear()
                # Guards also depend on autocast and inference mode: a spec may need several.
                launches[spec] = [launch, *launches.get(spec, ())][:32]
        return result


def is_traced(weight):
    """Return whether torch traces, transforms, or watches this call."""
    return (_is_compiling() or _dynamo_callback() is not None or _modes()
            or _transforms() is not None or torch.jit.is_tracing() or _is_fake(weight))


def make_launch(tensors, launched, result):
    """Return the Launch that repeats an ordinary launch, with the result as callers get it."""
    compiled, arguments = launched.compiled, launched.arguments
    run, before = compiled.run, (compiled.packed_metadata, None, None, None)  # no hooks
    if SKIP_PYTHON_LAUNCHER and not (run.global_scratch_size or run.profile_scratch_size):
        run = run.launch
        before = (0, 0, None, None, *before)  # no cooperative or dependent launch, no scratch
    table = arguments[TABLE]
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Launch(
        guards=guards.check,
        layout=(tuple(result.shape), result.stride(), result.dtype),
        device=result.get_device(),
        run=run,
        grid=launched.grid,
        before=(compiled.function, *before),
        table=table.data_ptr(),
        after=tuple(arguments[POINTERS:]),
        owners=(compiled, table))


# %% The call id="launch-call" part="launch" tags=["launch"]
def your_dequantize_nf4(layer):
    """Return the weight of a bitsandbytes Linear4bit, of its quant_state's shape and dtype."""
    try:
        weight = layer._parameters["weight"]  # 0.4 us faster than layer.weight
    except (AttributeError, KeyError):
        weight = getattr(layer, "weight", None)
    # FSDP and torch.export replace the weight; then the layer still has the state.
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    return _your_dequantize_nf4(weight, state)


def _your_dequantize_nf4(weight, quant_state, out=None):
    """Return a weight dequantized in one kernel launch, bit-identical to bitsandbytes.

    weight: packed 4-bit codes, two a byte. quant_state: bitsandbytes' QuantState. out: optional
    contiguous tensor for the result, of quant_state's shape and dtype. Transposed if
    weight.shape[0] is 1, as in bitsandbytes and Unsloth. Raises UnsupportedState on bad input.
    """
    tensors, spec = read_state(weight, quant_state)
    if out is None and not _is_compiling() and _dynamo_callback() is None:
        with _plain_tensors():
            for launch in launches.get(spec, ()):
                if launch.matches(tensors) and not is_observed():
                    return replay(launch, tensors)
    return check_and_launch(tensors, spec, out)


def replay(launch, tensors):
    """Allocate the result and launch on other tensors of the same layout."""
    if launch.device != _current_device():
        with torch.cuda.device(launch.device):
            return replay(launch, tensors)
    if len(tensors) == 5:
        weight, absmax, code2, absmax2, offset = tensors
    else:
        weight, absmax = tensors
        code2 = absmax2 = offset = absmax  # not read
    result = _empty_cuda(*launch.layout)
    launch.run(
        launch.grid, 1, 1, _stream(launch.device), *launch.before,
        weight.data_ptr(), result.data_ptr(), absmax.data_ptr(), launch.table,
        code2.data_ptr(), absmax2.data_ptr(), offset.data_ptr(), *launch.after)
    return result


# %% torch.compile, export, and torch.func id="launch-operator" part="launch" folded=true tags=["launch"]
@torch.compiler.assume_constant_result  # Dynamo ignores it on a functools.cache function
def traced_codebook(device, quant_type):
    """Return the codebook, for Dynamo a constant of the graph."""
    return codebook(device, quant_type)


def call_operator(tensors, spec, out):
    """Dequantize by the operator, which tracers record as one call."""
    check(tensors, spec)
    if out is not None:
        check_out(out, tensors, spec)
    weight, absmax, *second = tensors
    shape, dtype, quant_type, blocksize, *second_spec = spec
    code2, absmax2, offset = second or (None, None, None)
    blocksize2 = second_spec[0] if second_spec else None
    if not _is_compiling() and _is_fake(weight):  # fake tensors accept no real one beside them
        table = weight.new_empty(16, dtype=torch.float32)
    else:
        table = traced_codebook(weight.device, quant_type)
    result = dequantize_operator(
        weight.detach(), absmax, table, code2, absmax2, offset, list(shape), dtype, quant_type,
        blocksize, blocksize2)
    return result if out is None else out.copy_(result)


def _dequantize(
    weight: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, code2: torch.Tensor | None,
    absmax2: torch.Tensor | None, offset: torch.Tensor | None, shape: typing.Sequence[int],
    dtype: torch.dtype, quant_type: str, blocksize: int, blocksize2: int | None
) -> torch.Tensor:
    """Dequantize a state given field by field.

    table: codebook(weight.device, quant_type), for the traced launch. Real tensors take the
    ordinary launch.
    """
    tensors, spec = (weight, absmax), (tuple(shape), dtype, quant_type, blocksize)
    if blocksize2 is not None:
        tensors = (weight, absmax, code2, absmax2, offset)
        spec = (*spec, blocksize2, torch.float32)
    if not _is_fake(weight):
        return launch_ordinary(tensors, spec).result
    sizes = check(tensors, spec)
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    # If an input is 16-byte aligned here, Inductor copies it when it is less aligned at run time
    # (an nn.Parameter it does not check).
    aligned = weight.storage_offset() * weight.itemsize % 16 == 0
    grid, arguments, options = kernel_arguments(tensors, sizes, table, out, aligned)
    if grid and not INTERPRETED:
        # It takes no enable_fp_fusion. Bits stay the same: no product feeds a sum directly.
        kernel = torch.library.wrap_triton(_your_dequantize_nf4_kernel)
        kernel[(grid,)](*arguments, num_warps=options["num_warps"])
    return out


def register():
    """Register the operator, with a namespace of its own in a notebook.

    Inductor inlines the kernel of a triton_op. Triton's interpreter cannot be traced, so there the
    operator is opaque.
    """
    name = "nf4_triton_live" if __name__ == "__main__" else "nf4_triton"
    register_as = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    registered = register_as(f"{name}::dequantize", _dequantize, mutates_args=())
    if INTERPRETED:
        registered.register_fake(_dequantize)
    return registered


dequantize_operator = register()
