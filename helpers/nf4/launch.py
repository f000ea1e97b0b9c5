"""The launch path: check a bitsandbytes state, launch the kernel, replay launches, torch.compile.

A call reads a state's fields into `tensors` (weight, absmax, code2, absmax2, offset; a flat state
has the first two) and `values` (shape, dtype, quant_type, blocksize, dtype2, blocksize2), which
with the device are the key of a launch. Nothing about a layer is kept. `# %%`: notebook cells.
"""
# ruff: noqa: E402, F401, I001
# %% tags=["module-only"]
from .kernel import (
    ALL, CHECKED, FP4, INTERPRETED, NF4, TRITON, _constexprs, _knobs, _options,
    _your_dequantize_nf4_kernel, compiled_launches, force, launches, settings,
)

# %% Checks id="launch-checks" part="host" folded=true tags=["launch"]
import contextlib
import dataclasses
import functools
import math
import operator
import sys
import types

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor

STORAGES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OFFSETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the default on loading
NAMES = "weight", "absmax", "state2.code", "state2.absmax", "offset"


def _private(root, path, public):
    """Return a private attribute of torch or Triton, or `public` if it is missing."""
    try:
        return operator.attrgetter(path)(root)
    except AttributeError:
        return public


# What Inductor's generated code allocates with: half the time of torch.empty_strided.
_empty_cuda = _private(
    torch._C, "_dynamo.guards._empty_strided_cuda",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))
# bitsandbytes' Params4bit answers every method through a Python __torch_function__: not needed here
_plain_tensors = _private(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
# One C++ call compares type, dispatch keys, dtype, device, sizes, strides: 0.4 us for 5 tensors.
_TensorGuards = _private(torch._C, "_dynamo.guards.TensorGuards", None)
_stream = _private(torch._C, "_cuda_getCurrentRawStream",
                   lambda index: torch.cuda.current_stream(index).cuda_stream)
_current_device = _private(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_modes = _private(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_no_modes = _private(torch.utils, "_python_dispatch._disable_current_modes", contextlib.nullcontext)
_transforms = _private(torch._C, "_functorch.peek_interpreter_stack", lambda: None)
# Not None where Dynamo gave up a frame (bf16 on a T4): it would trace each call made from there.
_dynamo_watches = _private(torch._C, "_dynamo.eval_frame.get_eval_frame_callback", lambda: None)
_undisturbed = _private(torch, "_disable_dynamo", lambda function: function)
_is_compiling = torch.compiler.is_dynamo_compiling
_count_write = torch.autograd.graph.increment_version
DIRECT = CHECKED and not INTERPRETED and _TensorGuards is not None  # replay launches
IN_C = TRITON in ((3, 5), (3, 6))  # call what run wraps: in others it takes other arguments
_hooks = _knobs.runtime if _knobs else triton.compiler.CompiledKernel  # where profilers hook in
_enter, _exit = _hooks.launch_enter_hook, _hooks.launch_exit_hook  # which they replace or add to
_enter_calls, _exit_calls = (getattr(x, "calls", [x] * (x is not None)) for x in (_enter, _exit))


class UnsupportedState(ValueError):
    """A weight or quant_state that cannot be dequantized: what is wrong, expected, and to do."""


def _fields(weight, q):
    """Read a state's fields once: (tensors, values). A missing one is None, for the checks."""
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedState(f"the weight is {type(weight).__name__}, expected packed 4-bit "
                               "codes: pass a Linear4bit, or its weight and weight.quant_state")
    if q is None:
        raise UnsupportedState("there is no quant_state, expected bitsandbytes' QuantState: move "
                               "the Linear4bit to the GPU; plain and 8-bit layers have none")
    # A plain getattr would run QuantState's own __getattr__ in each guard of a compiled call.
    if getattr(q, "__dict__", {}).get("packing_format_for_cpu"):
        raise UnsupportedState("bitsandbytes repacked this layer for its CPU matmul, expected the "
                               "usual layout: move the layer to the GPU, or reload it")
    nested, state2 = getattr(q, "nested", None), getattr(q, "state2", None)
    if not isinstance(nested, bool) or nested and state2 is None:
        raise UnsupportedState(f"quant_state.nested is {nested} and state2 {type(state2).__name__}"
                               ", expected False, or True and a state: reload the layer")
    absmax, *values = (
        getattr(q, name, None) for name in ("absmax", "shape", "dtype", "quant_type", "blocksize"))
    if not nested:
        return (weight, absmax), (*values, None, None)
    code2, absmax2, dtype2, blocksize2 = (
        getattr(state2, name, None) for name in ("code", "absmax", "dtype", "blocksize"))
    if dtype2 != torch.float32:
        raise UnsupportedState(f"state2.dtype is {dtype2}, expected torch.float32: quantize the "
                               "layer again")
    return ((weight, absmax, code2, absmax2, getattr(q, "offset", None)),
            (*values, dtype2, blocksize2))


def check_state(weight, quant_state, any_device=False):
    """Return (elements, log2 blocksize, log2 state2.blocksize or 0). Raises UnsupportedState."""
    return _check(*_fields(weight, quant_state), any_device)


def _check(tensors, values, any_device=False):
    sizes = _check_values(tensors, values)
    (weight, absmax, *second), fp32 = tensors, (torch.float32,)
    if weight.device.type != "cuda" and not (any_device or INTERPRETED):
        raise UnsupportedState(f"the weight is on {weight.device}, expected CUDA: move the layer, "
                               "or set TRITON_INTERPRET=1 before Python starts")
    if hasattr(weight, "ds_id") and not weight.numel():
        raise UnsupportedState("the weight is partitioned (DeepSpeed ZeRO-3), expected all of it: "
                               "gather it first (deepspeed.zero.GatheredParameters)")
    _check_tensor("weight", weight, (weight.dtype,), weight.device, 0)
    if weight.nbytes * 2 < sizes[0]:
        raise UnsupportedState(f"the weight holds {weight.nbytes} bytes, expected "
                               f"{(sizes[0] + 1) // 2} for the shape {tuple(values[0])}: gather it "
                               "first if it is FSDP's shard, else reload the layer")
    blocks = -(-sizes[0] // values[3])
    _check_tensor("absmax", absmax, (torch.uint8,) if second else fp32, weight.device, blocks)
    if second:
        code2, absmax2, offset = second
        _check_tensor("state2.code", code2, fp32, weight.device, 256)
        _check_tensor("state2.absmax", absmax2, fp32, weight.device, -(-blocks // values[5]))
        _check_tensor("offset", offset, OFFSETS, weight.device, 1)
        # bitsandbytes would add a one-dimensional fp64 offset in fp64.
        if offset.numel() != 1 or offset.dim() and offset.dtype == torch.float64:
            raise UnsupportedState(f"offset has shape {tuple(offset.shape)} and {offset.dtype}, "
                                   "expected one value without a dimension: reload the layer")
    return sizes


def _check_values(tensors, values):
    """Check everything but the tensors' own metadata, so that torch.compile can trace it."""
    shape, dtype, quant_type, blocksize, dtype2, blocksize2 = values
    if quant_type not in ("nf4", "fp4"):
        raise UnsupportedState(f"quant_type is {quant_type!r}, expected 'nf4' or 'fp4': use the "
                               "library's own dequantization for other states")
    if dtype not in DTYPES:
        raise UnsupportedState(f"quant_state.dtype is {dtype}, expected one of {DTYPES}: set it")
    if not (isinstance(shape, (tuple, list)) and all(isinstance(x, int) and x >= 0 for x in shape)):
        raise UnsupportedState(f"quant_state.shape is {shape}, expected the weight's shape: reload "
                               "the layer")
    log2_block = _log2("quant_state.blocksize", blocksize, 37)
    n = math.prod(shape)
    if n >= ALL or -(-n // blocksize) >= 1 << 31:
        raise UnsupportedState(f"the weight has {n} elements in blocks of {blocksize}, expected "
                               "fewer than 2**34 elements and 2**31 blocks: dequantize it in parts")
    log2_block2 = _log2("state2.blocksize", blocksize2, 31) if dtype2 else 0
    weight = tensors[0]
    unpacked = weight.is_floating_point() and n > 3 and tuple(weight.shape) == tuple(shape)
    if not weight.dim() or weight.dtype not in STORAGES or unpacked:
        raise UnsupportedState(f"the weight is {weight.dtype} of shape {tuple(weight.shape)}, "
                               "expected packed 4-bit codes, as (n / 2, 1) in one of "
                               f"{STORAGES}: quantize the layer again")
    for name, tensor in zip(NAMES, tensors, strict=False):
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedState(f"{name} is {type(tensor).__name__}, expected a tensor: the "
                                   "quant_state is incomplete; reload the layer")
    return n, log2_block, log2_block2


def _check_tensor(name, tensor, dtypes, device, least):
    if tensor.dtype not in dtypes or tensor.numel() < least:
        raise UnsupportedState(f"{name} has {tensor.numel()} elements of {tensor.dtype}, expected "
                               f"{least} or more of {dtypes[0]}: state and weight do not belong "
                               "together; reload the layer")
    if tensor.device != device:
        raise UnsupportedState(f"{name} is on {tensor.device}, expected {device}, where the weight "
                               "is: move the whole layer with layer.to(device)")
    if not tensor.is_contiguous() or tensor.is_neg():
        raise UnsupportedState(f"{name} is not contiguous or is a negated view, expected plain "
                               f"contiguous memory: use {name}.resolve_neg().contiguous()")
    if not _in_memory(tensor):
        raise UnsupportedState(f"{name} has no memory, expected its values: gather it first if "
                               "FSDP freed it, or pass full_tensor() of a DTensor")


def _in_memory(tensor):
    """Whether a tensor's storage is there: FSDP frees that of a gathered weight. Fakes count."""
    if isinstance(tensor, FakeTensor) or not tensor.numel():
        return True
    try:  # without a storage the address is the offset
        return tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize
    except RuntimeError:  # a wrapper, such as a DTensor
        return False


def _log2(name, size, most):
    """Return log2 of a power of two, at most `most` (the kernel shifts 32-bit integers)."""
    if not (isinstance(size, int) and size > 0 and size & (size - 1) == 0):
        raise UnsupportedState(f"{name} is {size!r}, expected a power of two (bitsandbytes makes "
                               "32 to 4096): quantize the layer again")
    return min(int(size).bit_length() - 1, most)


def _out_problem(out, weight, shape, dtype, traced=False):
    """Return why `out` cannot hold the result, or None."""
    if not isinstance(out, torch.Tensor):
        return f"out is {type(out).__name__}, expected a tensor, or None for a new one"
    expected = (tuple(shape), dtype, weight.device, True)
    given = (tuple(out.shape), out.dtype, out.device, out.is_contiguous())
    if given != expected:
        return (f"out has (shape, dtype, device, contiguous) {given}, expected {expected}: pass "
                "such a tensor, or None for a new one")
    if not traced:
        start, first = out.data_ptr(), weight.data_ptr()
        overlap = start < first + weight.nbytes and first < start + out.nbytes
        if overlap or out.is_neg() or not _in_memory(out):
            return "out has no memory of its own, expected a plain tensor: pass another, or None"


@functools.lru_cache(None)
def codebooks(device):
    """Return NF4's 16 values, then FP4's: (32,) fp32 on `device`, uploaded once. Raises
    RuntimeError while a CUDA graph is captured, whose memory pool would own the upload."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first call on a GPU came inside a graph capture, expected one "
                           "before it: call once outside, then capture")
    with torch.inference_mode(False), _no_modes():  # a plain tensor, also in a fake mode
        table = torch.tensor(NF4 + FP4, dtype=torch.float32, device="cpu")
        return table.to(device)  # waits for the copy, so every stream may read it

# %% id="launch-plain" part="host" tags=["launch"]
def plain_dequantize_nf4(weight, quant_state, out=None):
    """Check, allocate, and launch the ordinary way; arguments, result as _your_dequantize_nf4."""
    with _plain_tensors():
        out, *_ = _launch_plain(*_fields(weight, quant_state), out)
        return out.t() if weight.shape[0] == 1 else out


def _launch_plain(tensors, values, out=None):
    """Return (result, CompiledKernel or None for an empty weight, *_configure())."""
    weight, shape, dtype = tensors[0], *values[:2]
    sizes = _check(tensors, values)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=weight.device)
    elif problem := _out_problem(out, weight, shape, dtype):
        raise UnsupportedState(problem)
    else:
        _count_write(out)
    s = settings(weight.device)
    grid, arguments, constexprs, limit = _configure(tensors, values, sizes, out, s)
    with torch.cuda.device(weight.device) if weight.is_cuda else contextlib.nullcontext():
        launch = _your_dequantize_nf4_kernel[(grid,)]
        compiled = launch(*arguments, **constexprs, **_options(s)) if grid else None
    return out, compiled, grid, arguments, constexprs, limit


def _configure(tensors, values, sizes, out, s):
    """Return one launch: (grid, runtime arguments, constexprs, limit of programs per SM or 0)."""
    (n, log2_block, log2_block2), (weight, absmax, *second) = sizes, tensors
    table = codebooks(weight.device)
    constexprs = _constexprs(out.dtype, bool(second), log2_block, log2_block2, n % 8 != 0,
                             n <= s.small_up_to, n <= s.hint_loads_up_to, s)
    grid = -(-n // (constexprs["THREADS"] * constexprs["WORDS"] * 8))
    constexprs["ASM"] &= weight.data_ptr() % 4 == 0 and out.data_ptr() % 16 == 0
    second = second or (absmax,) * 3  # which the kernel does not read
    table = table[16:] if values[2] == "fp4" else table
    packed = weight.reshape(-1).view(torch.uint8)
    arguments = [packed, out, absmax, table, *second, n // 8, n % 8]
    limit = s.programs_per_sm_huge if n > s.huge_above else s.programs_per_sm
    crowded = grid > s.sms * (2048 // constexprs["THREADS"])  # more than one wave of programs
    return grid, arguments, constexprs, limit if crowded else 0

# %% id="launch-call" part="host" tags=["launch"]
def your_dequantize_nf4(layer):
    """Dequantize a bitsandbytes Linear4bit: a new tensor of quant_state.shape and
    quant_state.dtype. Raises UnsupportedState: what is wrong, what was expected, what to do."""
    try:
        weight = layer._parameters["weight"]
        quant_state = weight.quant_state
    except (AttributeError, KeyError):
        weight, quant_state = getattr(layer, "weight", None), None
    if quant_state is None:  # torch.export lifts the weight out; its layer keeps the state too
        quant_state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    return _your_dequantize_nf4(weight, quant_state)


def _your_dequantize_nf4(weight, quant_state, out=None):
    """Dequantize packed 4-bit codes in one kernel launch.

    weight: packed codes, two a byte, in one of STORAGES, at least ceil(n / 2) bytes, on CUDA.
    quant_state: bitsandbytes' QuantState, nf4 or fp4, nested or flat.
    out: optional contiguous tensor of quant_state.shape and quant_state.dtype there, to be filled.
    Returns a new tensor (or `out`), bit-identical to bitsandbytes; its transpose if weight.shape[0]
    is 1, as bitsandbytes and Unsloth do. Raises UnsupportedState on malformed input.
    """
    if _is_compiling() or _dynamo_watches() is not None:
        return _call_operator(*_fields(weight, quant_state), out)
    with _plain_tensors():
        try:
            q = quant_state.__dict__  # past QuantState's own __getattr__
            absmax = q["absmax"]
            if q["nested"]:
                q2 = q["state2"].__dict__
                code2, absmax2, offset = q2["code"], q2["absmax"], q["offset"]
                tensors = weight, absmax, code2, absmax2, offset
                dtype2, blocksize2 = q2["dtype"] or 0, q2["blocksize"]  # in a key None means flat
            else:  # a flat state has no second quantization, and the kernel reads none
                code2 = absmax2 = offset = absmax
                tensors, dtype2, blocksize2 = (weight, absmax), None, None
            known = launches.get((q["shape"], q["dtype"], q["quant_type"], q["blocksize"], dtype2,
                                  blocksize2, _current_device()), ())
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError):
            known = ()  # malformed, or no GPU: the checks of a first call say which
        for launch in known:
            if (launch.fits(*tensors) and launch.kernel is _your_dequantize_nf4_kernel
                    and not (_modes() or _enter_calls or _exit_calls)
                    and _hooks.launch_enter_hook is _enter and _hooks.launch_exit_hook is _exit
                    and (out is None or not _out_problem(out, weight, launch.size, launch.dtype)
                         and out.data_ptr() % 16 == 0)):
                address = weight.data_ptr()
                if address & 3 or address == weight.storage_offset() * weight.itemsize:
                    break  # misaligned, or freed: without a storage the address is the offset
                if out is None:
                    result = _empty_cuda(launch.size, launch.stride, launch.dtype)
                else:
                    _count_write(result := out)  # autograd notices if it had saved `out`
                launch.run(launch.grid, 1, 1, _stream(launch.device), *launch.before, address,
                           result.data_ptr(), absmax.data_ptr(), launch.table, code2.data_ptr(),
                           absmax2.data_ptr(), offset.data_ptr(), *launch.after)
                return result.t() if launch.transposed else result
        return _first_call(weight, quant_state, out)

# %% The launch cache id="launch-cache" part="host" folded=true tags=["launch"]
# A launch that was checked and compiled, to replay on any tensors that fit(*tensors). size, stride,
# dtype: the result's. run(grid, 1, 1, stream, *before, addresses, *after). table: an address.
_Launch = dataclasses.make_dataclass(
    "_Launch", ("fits kernel size stride dtype transposed device run grid before after table "
                "keep").split(), slots=True, eq=False)  # keep: what the addresses belong to


def _make_launch(tensors, out, compiled, grid, arguments, constexprs, limit):
    weight, index, table = tensors[0], tensors[0].get_device(), arguments[3]
    run, metadata = compiled.run, compiled.packed_metadata
    if limit:  # unused shared memory keeps more programs off the SM; the machine code is the same
        card = torch.cuda.get_device_properties(index)
        shared = card.shared_memory_per_multiprocessor // limit - 1024
        metadata = (*metadata[:2], max(metadata[2], min(shared, 48 * 1024)), *metadata[3:])
    before = metadata, None, None, None
    if IN_C and not (run.global_scratch_size or run.profile_scratch_size):
        run, before = run.launch, (0, 0, None, None, *before)
    return _Launch(
        fits=_TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        kernel=_your_dequantize_nf4_kernel, size=tuple(out.shape),
        stride=torch.empty(out.shape, device="meta").stride(),  # `out` may have others
        dtype=out.dtype, transposed=weight.shape[0] == 1, device=index, run=run, grid=grid,
        before=(compiled.function, *before), table=table.data_ptr(),
        after=(*arguments[7:], *constexprs.values()), keep=(compiled, table))


def _first_call(weight, quant_state, out):
    """Check everything, launch the ordinary way, and keep the launch."""
    tensors, values = _fields(weight, quant_state)
    traced = _modes() or torch.jit.is_tracing() or _transforms() is not None or weight.is_meta
    if (traced or isinstance(weight, FakeTensor)) and not isinstance(quant_state, _OperatorState):
        return _call_operator(tensors, values, out)
    if weight.is_cuda and weight.get_device() != _current_device():
        with torch.cuda.device(weight.device):
            return _your_dequantize_nf4(weight, quant_state, out)
    result, compiled, *launched = _launch_plain(tensors, values, out)
    aligned = weight.data_ptr() % 4 == 0 and result.data_ptr() % 16 == 0
    if DIRECT and compiled and aligned and isinstance(values[0], tuple):
        key, kernel = (*values, weight.get_device()), _your_dequantize_nf4_kernel
        known = [one for one in launches.get(key, ()) if one.kernel is kernel]
        if not any(one.fits(*tensors) for one in known):
            if len(launches) >= 1024:  # a model has few shapes; a test of many must not pile up
                launches.clear()
            # Guards depend on autocast, no_grad, and the like, so a key may need several launches.
            new = _make_launch(tensors, result, compiled, *launched)
            launches[key] = (new, *known)[:32]
    return result.t() if weight.shape[0] == 1 else result

# %% The operator id="launch-operator" part="host" folded=true tags=["launch"]
class _OperatorState(types.SimpleNamespace):
    """A quant_state made of the operator's arguments: whoever traces has seen that call already."""


def _call_operator(tensors, values, out):
    """Make the call as one operator, which torch.compile leaves whole: no break, no copy. It gets a
    plain view of the weight: a Params4bit doubles the time of a dispatch."""
    _check_values(tensors, values)
    weight, absmax, *second = tensors
    shape, dtype, quant_type, blocksize, _, blocksize2 = values
    if out is not None and (problem := _out_problem(out, weight, shape, dtype, True)):
        raise UnsupportedState(problem)
    packed = weight.view(-1) if weight.is_contiguous() else weight
    result = _operator(packed, absmax, *(second or (None,) * 3), list(shape), dtype, quant_type,
                       blocksize, blocksize2)
    result = result if out is None else out.copy_(result)
    return result.t() if weight.shape[0] == 1 else result


@_undisturbed  # where Inductor refused a graph, Dynamo goes on to trace what is called from it
def _run(weight, absmax, code2, absmax2, offset, shape, dtype, quant_type, blocksize, blocksize2):
    """The operator: the eager call, guard included."""
    state2 = _OperatorState(code=code2, absmax=absmax2, dtype=torch.float32, blocksize=blocksize2)
    result = _your_dequantize_nf4(weight, _OperatorState(
        absmax=absmax, shape=tuple(shape), dtype=dtype, quant_type=quant_type, blocksize=blocksize,
        nested=blocksize2 is not None, offset=offset, state2=state2))
    return result.t() if weight.shape[0] == 1 else result  # a single byte looks transposed: undo


def _run_compiled(weight, absmax, code2, absmax2, offset, key):
    """Allocate and launch, from Inductor's generated code: guards have checked the tensors and
    _lower their layouts. Anything unusual runs eagerly. key: the launch's key, and offset.dtype."""
    launch = compiled_launches.get(key)
    with _plain_tensors():
        address = weight.data_ptr()
        if (launch and launch.kernel is _your_dequantize_nf4_kernel and not address & 3
                and address != weight.storage_offset() * weight.itemsize
                and not (_enter_calls or _exit_calls) and launch.device == _current_device()
                and _hooks.launch_enter_hook is _enter and _hooks.launch_exit_hook is _exit):
            result = _empty_cuda(launch.size, launch.stride, launch.dtype)
            launch.run(launch.grid, 1, 1, _stream(launch.device), *launch.before, address,
                       result.data_ptr(), absmax.data_ptr(), launch.table, code2.data_ptr(),
                       absmax2.data_ptr(), offset.data_ptr(), *launch.after)
            return result
    shape, dtype, quant_type, blocksize, _, blocksize2, *_ = key
    tensors = (weight, absmax, code2, absmax2, offset)[:5 if blocksize2 else 2]
    second = tensors[2:] or (None,) * 3
    result = _run(weight, absmax, *second, shape, dtype, quant_type, blocksize, blocksize2)
    for launch in launches.get(key[:-1], ()):
        if launch.kernel is _your_dequantize_nf4_kernel and launch.fits(*tensors):
            compiled_launches[key] = launch
    return result


def _fake(weight, absmax, code2, absmax2, offset, shape, dtype, *_):
    """The operator's result without data, for tracing."""
    _lower()
    if weight.is_cuda and torch.cuda.is_available():
        codebooks(weight.device)  # now: a CUDA graph of the compiled code must not own it
    return torch.empty(shape, dtype=dtype, device=weight.device)


def _lower():
    """Make Inductor's generated code call _run_compiled: the dispatcher takes three times as long.
    If Inductor's internals differ, or it writes C++ or has odd layouts, it calls the operator."""
    lowering = sys.modules.get("torch._inductor.lowering")
    lowerings = getattr(lowering, "lowerings", None)
    if lowerings is None or _operator in lowerings or not hasattr(lowering, "fallback_handler"):
        return
    dispatched = lowering.fallback_handler(_operator, add_to_fallback_set=False)

    def lower(*arguments):
        *tensors, shape, dtype, quant_type, blocksize, blocksize2 = arguments
        try:
            ir, graph, shape = lowering.ir, lowering.V.graph, tuple(map(int, shape))
            values = shape, dtype, quant_type, blocksize, blocksize2 and torch.float32, blocksize2
            _check([x.meta["val"] for x in graph.current_node.args[:5] if x is not None], values)
            inputs = [ir.ExternKernel.realize_input(tensors[1] if x is None else x)
                      for x in tensors]
            layouts = [x.get_layout() for x in inputs]
            fixed = all(isinstance(one, ir.FixedLayout) and one.is_contiguous() for one in layouts)
            if fixed and lowering.config.size_asserts and not graph.cpp_wrapper:
                whole = getattr(inputs[0], "data", None)  # saves making a view at every call
                if (isinstance(inputs[0], ir.ReinterpretView) and whole.get_layout().is_contiguous()
                        and whole.get_numel() == inputs[0].get_numel()):
                    inputs[0] = whole
                device, offset = layouts[0].device, layouts[4].dtype
                result = ir.FixedLayout(device, dtype, list(shape))
                call = ir.ExternKernelAlloc(result, inputs, ((*values, device.index, offset),),
                                            python_kernel_name=f"torch.ops.{_operator}.run")
                call.codegen_size_asserts = lambda wrapper: None  # _empty_cuda made it
                return ir.TensorBox.create(call)
        except Exception:  # whatever is unusual in it, the operator takes
            pass
        return dispatched(*arguments)

    lowerings[_operator] = lower


def _register():
    """Register nf4_triton::dequantize; a notebook, or a second copy, gets a name of its own."""
    name = first = "nf4_triton_live" if __name__ == "__main__" else "nf4_triton"
    copies = 1
    while hasattr(getattr(torch.ops, name), "dequantize"):
        copies += 1
        name = f"{first}_{copies}"
    library = torch.library.Library(name, "FRAGMENT")
    library.define(  # torch.library.custom_op has wrappers that take longer than the launch
        "dequantize(Tensor weight, Tensor absmax, Tensor? code2, Tensor? absmax2, Tensor? offset, "
        "SymInt[] shape, ScalarType dtype, str quant_type, int blocksize, int? blocksize2) -> "
        "Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("dequantize", _run, "CompositeExplicitAutograd")
    library.impl("dequantize", torch.library.fallthrough_kernel, "Autograd")  # codes have no grad
    torch.library.register_fake(f"{name}::dequantize", _fake, lib=library)
    operators = getattr(torch.ops, name)
    operators.library = library  # kept for good: code compiled with a freed one crashes
    return operators.dequantize.default


_operator = _register()
_operator.run = _run_compiled  # generated code on disk calls it: new arguments need a new name
